"""SIGTERM and SIGINT, counted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalCollector:
    """While entered, the signals are collected instead of acted on. Main thread only.

    `on_signal` is called in the handler with the number received so far: it may only do what is safe there,
    such as putting into a `SimpleQueue`. The handlers before are put back at the exit.
    """

    def __init__(
        self,
        on_signal: Callable[[int], object] = lambda _count: None,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
    ) -> None:
        self.received: list[int] = []
        self._on_signal = on_signal
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}

    @property
    def count(self) -> int:
        """How many have come."""
        return len(self.received)

    def __enter__(self) -> Self:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._collect)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _collect(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._on_signal(len(self.received))
