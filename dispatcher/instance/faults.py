"""Side writes that failed in the database while what they tell about was done: said in the log, shown in health."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from dispatcher import events
from dispatcher.instance.model import SideFault
from dispatcher.logs import get_logger
from dispatcher.runtime.health import Health

log = get_logger(__name__)

CAUSE: Final = "side_writes"
# The database names a fault of a kind at most once a minute: after so long without one it is over.
QUIET_SECONDS: Final = 180.0


class FaultWatch:
    """Keeps what was heard of; `note` is called with each heartbeat's news, also with none."""

    def __init__(self, health: Health, now: Callable[[], float] = time.monotonic) -> None:
        self._health = health
        self._now = now
        self._heard_at = 0.0
        self.last_id = 0

    def note(self, faults: Sequence[SideFault]) -> None:
        """Logs new faults and keeps health degraded until they have stopped for a while."""
        for fault in faults:
            self.last_id = max(self.last_id, fault.id)
            self._tell(fault)
        if faults:
            self._heard_at = self._now()
        elif self._heard_at and self._now() - self._heard_at > QUIET_SECONDS:
            self._heard_at = 0.0
            self._health.clear_cause(CAUSE)

    def _tell(self, fault: SideFault) -> None:
        text = f"A {fault.side_write} could not be written: {fault.error}"
        self._health.add_cause(CAUSE, text)
        log.error(events.SIDE_WRITE_FAILED, msg=text, side_write=fault.side_write, error=fault.error)
