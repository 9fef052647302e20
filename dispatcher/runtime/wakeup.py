"""Hints for a worker: which keys to look at, coalesced, and which at what time."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from dispatcher.clock import SYSTEM_CLOCK, Clock

Key = TypeVar("Key", bound=Hashable)

# A hint that names this many things needs no more names: whoever looks will see the rest.
MAX_PAYLOAD = 500


class Wakeup(Generic[Key]):
    """A set of keys somebody should look at, each with what the hints about it named.

    Setting a key that is waiting already merges the payloads and keeps its place. Thread-safe. After
    `close` no wait blocks any more.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Key, dict[Hashable, None]] = OrderedDict()
        self._closed = False

    def set(self, key: Key, payload: Iterable[Hashable] = ()) -> None:
        """Asks for a look at `key`; `payload` are the things (item ids) this hint is about."""
        with self._changed:
            named = self._waiting.setdefault(key, {})
            for thing in payload:
                if len(named) >= MAX_PAYLOAD:
                    break
                named[thing] = None
            self._changed.notify()

    def wait(self, timeout: float | None = None) -> dict[Key, tuple[Hashable, ...]]:
        """All waiting keys with their payloads, in order of arrival; empty after `timeout` s or close."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout)
            taken = {key: tuple(named) for key, named in self._waiting.items()}
            self._waiting.clear()
            return taken

    def pop(self, timeout: float | None = None) -> tuple[Key, tuple[Hashable, ...]] | None:
        """The longest waiting key and its payload, for one of several workers; None on timeout or close."""
        with self._changed:
            self._changed.wait_for(self._has_news, timeout)
            if not self._waiting:
                return None
            key, named = self._waiting.popitem(last=False)
            return key, tuple(named)

    def close(self) -> None:
        """Ends all waits, now and later; what was set stays readable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def _has_news(self) -> bool:
        return bool(self._waiting) or self._closed


class DueTimes(Generic[Key]):
    """Keys with the moment each is due, on the clock's monotonic scale. Thread-safe.

    A key has one due time; scheduling it again keeps the earlier one: a look too early costs one call,
    a look too late costs latency.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()

    def schedule(self, key: Key, at: float) -> bool:
        """Makes `key` due at `at`; True when this is now the next due time of all."""
        with self._lock:
            if at >= self._due.get(key, float("inf")):
                return False
            self._due[key] = at
            heapq.heappush(self._heap, (at, next(self._order), key))
            self._drop_stale()
            return self._heap[0][2] == key

    def schedule_in(self, key: Key, seconds: float) -> bool:
        """Makes `key` due in `seconds`."""
        return self.schedule(key, self._clock.monotonic() + max(0.0, seconds))

    def cancel(self, key: Key) -> None:
        """Forgets `key`."""
        with self._lock:
            self._due.pop(key, None)

    def pop_due(self, now: float | None = None) -> list[Key]:
        """The keys that are due, earliest first; each is given once."""
        moment = self._clock.monotonic() if now is None else now
        due: list[Key] = []
        with self._lock:
            while (at := self._first()) is not None and at <= moment:
                key = heapq.heappop(self._heap)[2]
                del self._due[key]
                due.append(key)
        return due

    def next_at(self) -> float | None:
        """When the next key is due; None when none is."""
        with self._lock:
            return self._first()

    def seconds_to_next(self, otherwise: float) -> float:
        """How long a worker may sleep: until the next due time, at most `otherwise`."""
        at = self.next_at()
        return otherwise if at is None else min(otherwise, max(0.0, at - self._clock.monotonic()))

    def __len__(self) -> int:
        with self._lock:
            return len(self._due)

    def _first(self) -> float | None:
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def _drop_stale(self) -> None:
        """Entries of cancelled or rescheduled keys leave the heap at its top, or when they are too many."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
