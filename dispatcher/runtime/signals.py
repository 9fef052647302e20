"""The signals that stop the daemon, counted as they come, whichever thread the kernel gives them to.

No signal that can be caught ends the process without a line and with children left behind: what has no meaning here
is logged and ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from dispatcher import events
from dispatcher.logs import get_logger

log = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# These end a process that does not handle them.
MEANINGLESS_SIGNALS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM),
    *(signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),
)


class SignalCollector:
    """While entered, the signals are collected instead of acted on. Enter and leave in the main thread.

    Python runs a handler in the main thread alone, and not before that thread's next instruction: one that waits
    for a lock sleeps on when the kernel gave the signal to another thread, or gave it a moment before the wait
    began. So a thread of this collector reads what the interpreter itself writes at once
    (`signal.set_wakeup_fd`), and counts and tells there. The handlers before are put back at the exit.

    A SIGHUP after another signal is not counted: a service manager or a terminal sends it along with the first.
    One that was ignored from the start (`nohup`) stays ignored. Signals that were blocked are let in.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
        meaningless: Sequence[signal.Signals] = MEANINGLESS_SIGNALS,
    ) -> None:
        self._signals = tuple(signals)
        self._meaningless = tuple(meaningless)
        self._before: dict[signal.Signals, Any] = {}
        self._lock = threading.Lock()
        self._received: list[int] = []
        self._listener: Callable[[int], object] = lambda _count: None

    @property
    def received(self) -> tuple[int, ...]:
        """The numbers of those that have come, in order."""
        return tuple(self._received)

    @property
    def count(self) -> int:
        """How many have come."""
        return len(self._received)

    def listen(self, listener: Callable[[int], object]) -> None:
        """From now on calls `listener` with the number received so far; at once for each that has come already.

        It takes the place of an earlier listener, and is called in a thread of its own, one call at a time.
        """
        with self._lock:
            self._listener = listener
            for number in range(len(self._received)):
                listener(number + 1)

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._collect, name="signals", daemon=True)
        self._thread.start()
        for number in (*self._signals, *self._meaningless):
            if self._is_ours(number):
                self._before[number] = signal.signal(number, _leave_to_the_collector)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._signals)
        return self

    def _is_ours(self, number: signal.Signals) -> bool:
        found = signal.getsignal(number)
        if number in self._meaningless:
            return found is signal.SIG_DFL
        return number is not signal.SIGHUP or found is not signal.SIG_IGN

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
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)

    def _collect(self) -> None:
        while numbers := os.read(self._read_end, 512):
            for number in numbers:
                # A wakeup descriptor is told of every signal Python handles, also of those of others.
                if number in self._signals:
                    self._count(signal.Signals(number))
                elif number in self._meaningless and number in self._before:
                    self._tell(signal.Signals(number), "it has no meaning here and is ignored")

    def _count(self, number: signal.Signals) -> None:
        with self._lock:
            if number is signal.SIGHUP and self._received:
                self._tell(number, "a stop is under way already")
                return
            self._tell(number, "hurrying" if self._received else "stopping")
            self._received.append(number)
            self._listener(len(self._received))

    def _tell(self, number: signal.Signals, consequence: str) -> None:
        log.info(events.DAEMON_SIGNAL, msg=f"{number.name}: {consequence}", signal=number.name)


def _leave_to_the_collector(_number: int, _frame: object) -> None:
    """The interpreter notes a signal for the collector only while it has a handler in Python."""
