"""The wakes this instance answers for, from the question that may claim them until the database has taken their end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID


@dataclass(frozen=True, slots=True)
class BookedWake:
    """A wake of ours. `claim_token` is the fence every report presents."""

    wake_id: UUID
    claim_token: UUID
    agent_id: UUID
    agent_slug: str
    pid: int | None = None


class WakeBook:
    """Thread-safe table of `BookedWake` by wake id. A wake in here is renewed by every heartbeat."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[UUID, BookedWake] = {}
        self._requests: set[UUID] = set()

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

    def remove(self, wake_id: UUID) -> None:
        with self._lock:
            self._wakes.pop(wake_id, None)

    def ids(self) -> list[UUID]:
        with self._lock:
            return list(self._wakes)

    def __len__(self) -> int:
        with self._lock:
            return len(self._wakes)
