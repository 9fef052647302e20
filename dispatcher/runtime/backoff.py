"""How long to wait before the next try. Pure arithmetic; nothing here sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable

# 2 to the 64th times any base is past any cap in use; beyond it a float power would overflow.
MAX_DOUBLINGS = 64


def exponential(attempt: int, base: float, cap: float) -> float:
    """`base` doubled per attempt after the first, at most `cap`, in seconds. Attempts count from 1."""
    doublings = min(max(attempt - 1, 0), MAX_DOUBLINGS)
    return min(cap, base * 2.0**doublings)


def jittered(delay: float, spread: float, draw: Callable[[], float] = random.random) -> float:
    """`delay` moved by up to `spread` of itself either way, so that many do not act at once.

    `draw` gives numbers in [0, 1).
    """
    return max(0.0, delay * (1.0 + spread * (2.0 * draw() - 1.0)))


class Backoff:
    """The delays of one thing that is tried again and again. Not thread-safe."""

    def __init__(
        self, base: float, cap: float, *, spread: float = 0.2, draw: Callable[[], float] = random.random
    ) -> None:
        self._base = base
        self._cap = cap
        self._spread = spread
        self._draw = draw
        self.attempts = 0

    def next_delay(self) -> float:
        """Counts one more failure and says how long to wait, in seconds; never above the cap."""
        self.attempts += 1
        delay = jittered(exponential(self.attempts, self._base, self._cap), self._spread, self._draw)
        return min(delay, self._cap)

    def reset(self) -> None:
        """It worked: the next failure starts over."""
        self.attempts = 0
