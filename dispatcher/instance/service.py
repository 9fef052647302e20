"""The heartbeat: this daemon lives, its leases go on, its canary is sent. And the pulse: how it does, in a file.

The pulse asks nobody: a database that is away must not make the process look dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID, uuid4

from dispatcher import events
from dispatcher.errors import RestError
from dispatcher.instance.heartbeat_file import HeartbeatFile
from dispatcher.instance.model import OpenWake, SideFault
from dispatcher.instance.store import InstanceStore
from dispatcher.logs import get_logger
from dispatcher.runtime.health import Health
from dispatcher.runtime.repeats import Repeats

log = get_logger(__name__)

INSTANCE_GONE: Final = "OD001"


FILE_CAUSE: Final = "heartbeat_file"


class Pulse:
    """One `beat` writes the heartbeat file; a `PeriodicService` calls it every `seconds`."""

    def __init__(
        self, file: HeartbeatFile, health: Health, facts: Callable[[], Mapping[str, Any]], seconds: float
    ) -> None:
        self._file = file
        self._health = health
        self._facts = facts
        self._seconds = seconds

    def beat(self) -> None:
        """Observes health, which logs a change of it, and writes it down with the facts."""
        self._file.write({**self._facts(), "health": self._health.observe(), "written_every_s": self._seconds})
        if self._file.trouble is None:
            self._health.clear_cause(FILE_CAUSE)
        else:
            self._health.add_cause(FILE_CAUSE, self._file.trouble)


class Heart:
    """One `beat` is one heartbeat; a `PeriodicService` calls it."""

    def __init__(
        self,
        store: InstanceStore,
        instance_id: UUID,
        *,
        live_wakes: Callable[[], Iterable[UUID]],
        facts: Callable[[], Mapping[str, Any]],
        expect_canary: Callable[[str, float], None],
        on_broadcast_available: Callable[[bool], None],
        on_fenced: Callable[[UUID], None],
        on_unattended: Callable[[Sequence[OpenWake]], None],
        on_orphaned: Callable[[], None],
        on_faults: Callable[[Sequence[SideFault]], None],
        register_again: Callable[[], object],
    ) -> None:
        self._store = store
        self._instance_id = instance_id
        self._live_wakes = live_wakes
        self._facts = facts
        self._expect_canary = expect_canary
        self._on_broadcast_available = on_broadcast_available
        self._on_fenced = on_fenced
        self._on_unattended = on_unattended
        self._on_orphaned = on_orphaned
        self._orphaned: frozenset[UUID] = frozenset()
        self._on_faults = on_faults
        self._register_again = register_again
        self._repeats = Repeats()

    def beat(self) -> None:
        """Writes the row. Raises when it could not be written."""
        nonce, asked_at = uuid4(), time.monotonic()
        live = list(self._live_wakes())
        try:
            answer = self._store.heartbeat(self._instance_id, live, nonce, self._facts())
        except RestError as error:
            if error.code != INSTANCE_GONE:
                raise
            self._come_back()
            return
        self._repeats.over()
        self._expect_canary(str(nonce), asked_at)
        self._on_broadcast_available(answer.broadcast_available)
        for wake_id in answer.fenced:
            self._on_fenced(wake_id)
        self._on_unattended(answer.unattended)
        # Once for each: what a sweep could not settle (another host's, say) waits for its deadline.
        if answer.orphaned - self._orphaned:
            self._on_orphaned()
        self._orphaned = answer.orphaned
        self._on_faults(answer.faults)
        if answer.renewed:
            log.debug(events.LEASE_RENEWED, msg=f"Renewed {answer.renewed} lease(s)", leases=answer.renewed)

    def _come_back(self) -> None:
        """Registers again. Where that fails (its gateway is gone, say) the beat fails with the reason."""
        repeats = self._repeats.news(INSTANCE_GONE)
        if repeats is not None:
            text = "The row of this instance is gone; registering it again"
            log.warning(events.INSTANCE_GONE, msg=text, repeats=repeats)
        self._register_again()
