"""When is a hint path well, when is it given up, which paths are wanted: pure decisions, no socket, no clock.

A path is OFF (not wanted), WAITING (to join at `retry_at`), JOINING (asked, not confirmed) or READY (the
server said so). Every method takes the time in seconds of a monotonic clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Literal

from dispatcher.runtime.backoff import exponential, jittered

Path = Literal["broadcast", "postgres_changes"]
Mode = Literal["auto", "broadcast", "postgres_changes"]
Carrying = Literal["broadcast", "postgres_changes", "both", "none"]
Status = Literal["connecting", "ready", "deaf", "down"]
PATHS: tuple[Path, ...] = ("broadcast", "postgres_changes")

_CANARIES_REMEMBERED = 64


@dataclass(frozen=True)
class RealtimeTimings:
    """Seconds. The measured server confirms within 2 s when well, and never in some silent states."""

    connect: float = 10.0
    join: float = 10.0
    ready: float = 15.0
    canary: float = 5.0
    leave: float = 2.0
    heartbeat: float = 20.0
    watch: float = 1.0
    settle: float = 30.0
    retry: float = 1.0
    retry_cap: float = 30.0
    reconnect_cap: float = 10.0
    refused: float = 5.0
    overloaded: float = 30.0
    misconfigured: float = 60.0


@dataclass(frozen=True)
class RealtimeState:
    """What carries hints now.

    path: which paths are ready.
    status: `ready` (at least one is well), `connecting` (nothing has failed yet), `deaf` (joined, but the
        canary did not come back) or `down`.
    since: when the status began.
    cause: what is wrong, also while another path stands in.
    gaps: how often hints may have been lost; each time a sweep follows.
    """

    path: Carrying
    status: Status
    since: datetime
    cause: str | None
    gaps: int


class Trouble(Enum):
    """Why a path was lost; decides how long to wait and what to try."""

    CHANNEL = "channel"
    """Closed, crashed, timed out, not confirmed: try again soon."""
    DEAF = "deaf"
    """The canary did not come back: rejoin, then a fresh client."""
    MISCONFIGURED = "misconfigured"
    """The server says the subscription cannot work: somebody has to change something."""
    REFUSED = "refused"
    """The server refuses the token."""
    OVERLOADED = "overloaded"
    """A rate or connection limit of the project."""


class Phase(Enum):
    """Where a path is in its life."""

    OFF = "off"
    WAITING = "waiting"
    JOINING = "joining"
    READY = "ready"


class Canary:
    """Which heartbeats have not come back yet. A frame may overtake the answer of the call that caused it."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._expected: dict[str, float] = {}
        self._early: deque[str] = deque(maxlen=_CANARIES_REMEMBERED)
        self._row_seen_at: float | None = None

    def expect(self, nonce: str, now: float) -> None:
        """This nonce is on its way."""
        row_just_seen = self._row_seen_at is not None and now - self._row_seen_at <= self._patience
        if nonce not in self._early and not row_just_seen:
            self._expected[nonce] = now

    def forget(self, nonce: str) -> None:
        """The call that would have sent it failed: its absence says nothing."""
        self._expected.pop(nonce, None)

    def seen(self, nonce: str | None, now: float) -> None:
        """It came back, and vouches for what was sent before. None: our row changed, by some heartbeat."""
        if nonce is None:
            self._row_seen_at = now
            self._expected.clear()
        elif nonce in self._expected:
            sent = self._expected[nonce]
            self._expected = {other: at for other, at in self._expected.items() if at > sent}
        else:
            self._early.append(nonce)

    def overdue(self, now: float) -> bool:
        """Whether one has been out for longer than the patience."""
        return any(now - sent > self._patience for sent in self._expected.values())

    def clear(self) -> None:
        """The path was lost: nothing that was sent before can come back on the next one."""
        self._expected.clear()


class PathHealth:
    """The life of one path. `draw` gives numbers in [0, 1)."""

    def __init__(self, name: Path, timings: RealtimeTimings, draw: Callable[[], float] = random.random) -> None:
        self.name = name
        self.phase = Phase.OFF
        self.cause: str | None = None
        self.trouble: Trouble | None = None
        self.attempts = 0
        self.gaps = 0
        self.retry_at = 0.0
        self.canary = Canary(timings.canary)
        self._timings = timings
        self._draw = draw
        self._phase_since = 0.0
        self._suspect = False
        self._is_fresh = True

    def want(self, now: float) -> None:
        """It should be joined, from now on."""
        if self.phase is Phase.OFF:
            self._enter(Phase.WAITING, now)
            self.retry_at = now

    def unwant(self, now: float) -> None:
        """It should be left; what went wrong before is forgotten."""
        self._enter(Phase.OFF, now)
        self.cause, self.trouble, self.attempts, self._suspect = None, None, 0, False
        self.canary.clear()

    def joining(self, now: float) -> None:
        """The join was sent."""
        self._enter(Phase.JOINING, now)

    def ready(self, now: float) -> None:
        """The server says that events flow."""
        if self.phase is Phase.JOINING:
            self._enter(Phase.READY, now)

    def was_ready(self, moment: float) -> bool:
        """Whether events have flowed since `moment` at the latest, and still do."""
        return self.phase is Phase.READY and self._phase_since <= moment

    def lost(self, now: float, trouble: Trouble, cause: str) -> None:
        """It no longer carries hints; it is to be joined again at `retry_at`."""
        self._leave_ready(now)
        self.cause, self.trouble = cause, trouble
        self._suspect = self._suspect or trouble is Trouble.DEAF
        self.attempts += 1
        self._is_fresh = False
        self.retry_at = now + self._delay(trouble)

    def disconnected(self, now: float) -> None:
        """The socket under it is gone or about to go: join again with the next one, without blame."""
        self.retry_now(now)
        self._is_fresh = True

    def retry_now(self, now: float) -> None:
        """What stood in the way has changed (a new key, a narrower subscription)."""
        if self.phase is not Phase.OFF:
            self._leave_ready(now)
            self.retry_at = now

    def canary_seen(self, nonce: str | None, now: float) -> None:
        """Proof that it hears."""
        self.canary.seen(nonce, now)
        if self.phase is Phase.READY:
            self._forgive()

    def fault(self, now: float) -> tuple[Trouble, str] | None:
        """What is wrong with it by now, if time alone shows it."""
        waited = now - self._phase_since
        if self.phase is Phase.JOINING and waited > self._timings.ready:
            return Trouble.CHANNEL, f"not confirmed by the server within {self._timings.ready:g} s"
        if self.phase is Phase.READY and self.canary.overdue(now):
            return Trouble.DEAF, f"our heartbeat did not come back within {self._timings.canary:g} s"
        if self.phase is Phase.READY and waited > self._timings.settle:
            self._forgive()
        return None

    def is_due(self, now: float) -> bool:
        """Whether it is time to join."""
        return self.phase is Phase.WAITING and now >= self.retry_at

    @property
    def needs_fresh_client(self) -> bool:
        """Whether a rejoin on the same socket has been tried and did not help."""
        return self.attempts >= 2 and not self._is_fresh and self.trouble in {Trouble.CHANNEL, Trouble.DEAF}

    @property
    def is_well(self) -> bool:
        """Ready, and since it was last found deaf, proven to hear."""
        return self.phase is Phase.READY and not self._suspect

    @property
    def is_deaf(self) -> bool:
        """Found deaf, and not proven to hear since."""
        return self.phase is not Phase.OFF and self._suspect

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_since = phase, now

    def _leave_ready(self, now: float) -> None:
        self.gaps += self.phase is Phase.READY
        self.canary.clear()
        self._enter(Phase.WAITING, now)

    def _forgive(self) -> None:
        self.attempts, self.cause, self.trouble, self._suspect = 0, None, None, False

    def _delay(self, trouble: Trouble) -> float:
        timings = self._timings
        if trouble is Trouble.MISCONFIGURED:
            return jittered(timings.misconfigured, 0.2, self._draw)
        if trouble is Trouble.OVERLOADED:
            return jittered(timings.overloaded, 0.2, self._draw)
        base = timings.refused if trouble is Trouble.REFUSED else timings.retry
        return exponential(self.attempts, base, timings.retry_cap) * (0.5 + self._draw() / 2)


def paths_wanted(
    mode: Mode, *, broadcast_available: bool, broadcast: PathHealth, changes: PathHealth
) -> frozenset[Path]:
    """Which paths should be joined now.

    `auto` is broadcast alone where the database offers it, postgres_changes alone where it does not, and both from the
    moment broadcast has failed (not confirmed, refused, deaf) until it is well again. Nothing that works is left before
    its successor does.
    """
    if mode != "auto":
        return frozenset({mode})
    if not broadcast_available:
        return frozenset({"postgres_changes"})
    has_failed = broadcast.attempts > 0 or broadcast.is_deaf
    stands_in = changes.phase is not Phase.OFF
    return frozenset(PATHS) if not broadcast.is_well and (has_failed or stands_in) else frozenset({"broadcast"})


def connection_delay(failures: int, timings: RealtimeTimings, draw: Callable[[], float]) -> float:
    """Seconds before fresh client number `failures` (from 1) in a row: growing and jittered."""
    return exponential(failures, timings.retry, timings.reconnect_cap) * (0.5 + draw() / 2)


def summary(
    paths: Mapping[Path, PathHealth], connection_cause: str | None, notes: Sequence[str] = ()
) -> tuple[Carrying, Status, str | None]:
    """Path, status and cause of the whole, as in `RealtimeState`; `notes` are causes of no path's own."""
    wanted = [path for path in paths.values() if path.phase is not Phase.OFF]
    ready = [path.name for path in wanted if path.phase is Phase.READY]
    named: Carrying = ready[0] if len(ready) == 1 else "both" if ready else "none"
    causes = [f"{path.name}: {path.cause}" for path in wanted if path.cause and not path.is_well]
    cause = "; ".join([*([connection_cause] if connection_cause else []), *causes, *notes]) or None
    if any(path.is_well for path in wanted):
        return named, "ready", cause
    if any(path.is_deaf for path in wanted):
        return named, "deaf", cause
    has_failed = bool(connection_cause or causes)
    return named, "down" if has_failed else "connecting", cause
