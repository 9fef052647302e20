"""Why no wake is claimed now although there may be work: the Gateway takes none, or `openclaw` cannot be started.

What is claimed all the same in such a time ends as nobody's failure, but costs a second of CPU and a row each.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from dispatcher.openclaw.state import GatewayState
from dispatcher.runtime.backoff import exponential

# After a wake that met a Gateway it could not reach, until another is tried where no link tells how the Gateway is.
FIRST_REST: Final = 2.0
LONGEST_REST: Final = 60.0
# How soon somebody who is held should ask again; the end of an outage is told before that.
ASK_AGAIN: Final = 5.0
SHORTEST_ASK: Final = 1.0
GATE: Final = "gateway_unavailable"


class GatewayHold:
    """Thread-safe. `cause` says why claims are held, None: they are not.

    Args:
        state: what the link knows.
        can_start: whether `openclaw` can be started now; asked only after it could not.
        on_cause: called with what a wake met, and with None when that is over; what the link knows is told elsewhere.
        on_over: called with everybody who was held, when claims may be made again.
    """

    def __init__(
        self,
        state: Callable[[], GatewayState],
        *,
        can_start: Callable[[], bool] = lambda: True,
        on_cause: Callable[[str | None], None] = lambda _cause: None,
        on_over: Callable[[list[UUID]], None] = lambda _held: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._can_start = can_start
        self._on_cause = on_cause
        self._on_over = on_over
        self._now = now
        self._lock = threading.Lock()
        self._met = 0
        self._until = 0.0
        self._why = ""
        self._missing = ""
        self._held: set[UUID] = set()
        self._is_told = False

    @property
    def cause(self) -> str | None:
        """Why nothing is claimed now; None when claims may be made. Notices the end of a hold."""
        state = self._state()
        if state.is_away:
            return f"OpenClaw's Gateway is {state.status}: {state.cause}"
        with self._lock:
            missing, why = self._missing, self._why if self._now() < self._until else None
        if missing and not self._can_start():
            return missing
        if why is None:
            self._end()
        return why

    @property
    def ask_again(self) -> float:
        """Seconds after which somebody who is held should ask again; the end of an outage is told before that."""
        with self._lock:
            left = self._until - self._now()
        return min(max(left, SHORTEST_ASK), ASK_AGAIN)

    def met(self, cause: str) -> None:
        """A wake could not reach the Gateway: no other is tried for a moment, longer each time.

        Those that were under way together count once.
        """
        with self._lock:
            now = self._now()
            if now >= self._until:
                self._met += 1
                self._until = now + exponential(self._met, FIRST_REST, LONGEST_REST)
            self._why, self._is_told = cause, True
        self._on_cause(cause)

    def missed(self, cause: str) -> None:
        """`openclaw` could not be started: no wake is tried while it is missing, or for a moment where it is there."""
        if self._can_start():
            self.met(cause)
            return
        with self._lock:
            self._missing = cause
            self._is_told = True
        self._on_cause(cause)

    def reached(self) -> None:
        """A wake came through to the Gateway: the next one that does not is the first."""
        with self._lock:
            self._met = 0

    def came_back(self) -> None:
        """The link says that the Gateway takes work again: what wakes met before is over."""
        with self._lock:
            self._met, self._until = 0, 0.0
        _ = self.cause

    def keep(self, who: UUID) -> bool:
        """Notes that somebody is held; whether that is news in this outage."""
        with self._lock:
            is_news = who not in self._held
            self._held.add(who)
            return is_news

    def _end(self) -> None:
        with self._lock:
            held, self._held = list(self._held), set()
            was_told, self._is_told, self._missing = self._is_told, False, ""
        if was_told:
            self._on_cause(None)
        if held or was_told:
            self._on_over(held)
