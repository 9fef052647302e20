"""Says a trouble that comes again and again once, and then now and then how often."""

from __future__ import annotations

import threading
from typing import Final

from dispatcher.clock import SYSTEM_CLOCK, Clock

TELL_AGAIN_SECONDS: Final = 60.0
REMEMBERED: Final = 50


class Repeats:
    """The troubles of one loop. Thread-safe.

    `news` says of each whether to tell it now; `over` is for when it works again.
    """

    def __init__(self, seconds: float = TELL_AGAIN_SECONDS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        # By trouble: when it was last told, and how often it has come since.
        self._told: dict[str, tuple[float, int]] = {}

    def news(self, trouble: str) -> int | None:
        """How often this trouble came untold since it was told; 0 the first time. None: not to be told now."""
        now = self._clock.monotonic()
        with self._lock:
            told_at, untold = self._told.get(trouble, (None, 0))
            if told_at is not None and now - told_at < self._seconds:
                self._told[trouble] = (told_at, untold + 1)
                return None
            if len(self._told) >= REMEMBERED:
                self._told.clear()
            self._told[trouble] = (now, 0)
            return untold

    def over(self) -> None:
        """It works again: the next trouble is news."""
        with self._lock:
            self._told.clear()
