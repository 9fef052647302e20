"""The wakes this instance answers for, from the question that may claim them until the database has taken their end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from uuid import UUID


@dataclass(frozen=True, slots=True)
class BookedWake:
    """A wake of ours. `claim_token` is the fence every report presents.

    `has_override`: its first item asks for a model or thinking level of its own.
    """

    wake_id: UUID
    claim_token: UUID
    agent_id: UUID
    agent_slug: str
    pid: int | None = None
    has_override: bool = False


class WakeBook:
    """Thread-safe table of `BookedWake` by wake id. A wake in here is renewed by every heartbeat.

    `on_deferred` gets the agents that are to be looked at now that their wake has left.
    """

    def __init__(self, on_deferred: Callable[[UUID], object] = lambda _agent_id: None) -> None:
        self._on_deferred = on_deferred
        self._lock = threading.Lock()
        self._wakes: dict[UUID, BookedWake] = {}
        self._requests: set[UUID] = set()
        # By agent: when a look at it was last put off, on the monotonic clock.
        self._deferred: dict[UUID, float] = {}

    @contextlib.contextmanager
    def asking(self, request: UUID) -> Iterator[None]:
        """While entered, wakes may be ours that we cannot name yet; what the answer grants is added inside."""
        with self._lock:
            self._requests.add(request)
        try:
            yield
        finally:
            with self._lock:
                self._requests.discard(request)

    def may_hold(self, wake_id: UUID, request: UUID | None) -> bool:
        """Whether this wake is in here, or on its way by the answer to `request`."""
        with self._lock:
            return wake_id in self._wakes or request in self._requests

    def add(self, wake: BookedWake) -> None:
        with self._lock:
            self._wakes[wake.wake_id] = wake

    def note_pid(self, wake_id: UUID, pid: int) -> None:
        with self._lock:
            if wake_id in self._wakes:
                self._wakes[wake_id] = replace(self._wakes[wake_id], pid=pid)

    def get(self, wake_id: UUID) -> BookedWake | None:
        with self._lock:
            return self._wakes.get(wake_id)

    def defer(self, agent_id: UUID) -> bool:
        """Whether a wake of this agent is in here; a look at it then waits until it has left."""
        with self._lock:
            is_booked = self._is_booked(agent_id)
            if is_booked:
                self._deferred[agent_id] = time.monotonic()
            return is_booked

    def remove(self, wake_id: UUID, told_since: float | None = None) -> None:
        """The wake is ours no more.

        `told_since` is when the database was asked what is next for the agent, on the monotonic clock, if it said so:
        a look put off before is answered by that. One put off later is due now.
        """
        with self._lock:
            wake = self._wakes.pop(wake_id, None)
            if wake is None or self._is_booked(wake.agent_id):
                return
            deferred_at = self._deferred.pop(wake.agent_id, None)
        if deferred_at is not None and (told_since is None or deferred_at >= told_since):
            self._on_deferred(wake.agent_id)

    def _is_booked(self, agent_id: UUID) -> bool:
        return any(wake.agent_id == agent_id for wake in self._wakes.values())

    def ids(self) -> list[UUID]:
        with self._lock:
            return list(self._wakes)

    def __len__(self) -> int:
        with self._lock:
            return len(self._wakes)
