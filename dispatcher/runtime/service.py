"""One life cycle for everything that runs in a thread of its own."""

from __future__ import annotations

import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from dispatcher import events
from dispatcher.errors import EXIT_FAILED, DispatcherError, is_held
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import exponential, jittered
from dispatcher.runtime.health import LoopHealth
from dispatcher.runtime.repeats import Repeats

log = get_logger(__name__)


class Service(ABC):
    """Work with a beginning and an end, in one thread named like the service.

    `run_service` does the work and returns soon after `stopping` is set. A service runs once.
    """

    # How long, in seconds, the services it uses go on for its sake after it was asked to stop.
    stop_hold: float = 0.5

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._on_end: Callable[[Service], None] = lambda _service: None
        # A daemon thread: a service that hangs past every deadline must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def run_service(self) -> None:
        """The work. Raising, or returning while `stopping` is not set, ends the daemon."""

    def start(self, on_end: Callable[[Service], None] | None = None) -> None:
        """Starts the thread; `on_end` is called in it when the work is over, whatever the reason."""
        if on_end is not None:
            self._on_end = on_end
        self._thread.start()

    def request_stop(self) -> None:
        """Asks for the end and returns at once; may be called often, by any thread, before the start."""
        self.stopping.set()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end for up to `timeout` seconds; True when it has ended or never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def exit_code(self) -> int:
        """What the process should end with when this service ended it."""
        return self.error.exit_code if isinstance(self.error, DispatcherError) else EXIT_FAILED

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.run_service()
        except BaseException as error:  # noqa: BLE001 - kept, and reported by whoever waits for the group
            self.error = error
        finally:
            self._on_end(self)


# When the function that gives an interval raises.
SECONDS_WITHOUT_ANSWER: Final = 5.0
# After a beat that failed, where the interval is fixed: what failed for a moment must not look failed for a minute.
SECONDS_AFTER_FAILURE: Final = 5.0
# Another session holds what the beat needs, and it has waited for it.
SECONDS_AFTER_HELD: Final = 1.0
# What fails time after time is tried ever more rarely, up to this or its interval.
LONGEST_AFTER_FAILURE: Final = 60.0


class PeriodicService(Service):
    """Calls `beat` at once, then every `interval` seconds (jittered), and whenever `wake_early` is called.

    A beat that raises is logged and counted, and the next one comes as usual; only errors of a type in
    `fatal` end the service. `interval` may be a function, asked anew before each wait.
    """

    def __init__(
        self,
        name: str,
        beat: Callable[[], object],
        interval: float | Callable[[], float],
        *,
        health: LoopHealth | None = None,
        spread: float = 0.1,
        fatal: tuple[type[BaseException], ...] = (),
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(name)
        self._beat = beat
        self._interval = interval if callable(interval) else lambda: self._fixed_interval(interval)
        self._failures = 0
        self._met_held = False
        self._repeats = Repeats()
        self._health = health
        self._spread = spread
        self._fatal = fatal
        self._draw = draw
        self._early = threading.Event()

    def wake_early(self) -> None:
        """The next beat comes now, or right after the one that is running."""
        self._early.set()

    def request_stop(self) -> None:
        """As in `Service`; also ends the wait between two beats."""
        super().request_stop()
        self._early.set()

    def run_service(self) -> None:
        """Beats until asked to stop."""
        while not self.stopping.is_set():
            self._early.clear()
            if self.stopping.is_set():  # set between the two lines above
                return
            with contextlib.nullcontext() if self._health is None else self._health.turn():
                self._beat_once()
            self._early.wait(jittered(self._seconds_to_next(), self._spread, self._draw))

    def _fixed_interval(self, seconds: float) -> float:
        if not self._failures:
            return seconds
        if self._met_held:
            return min(seconds, SECONDS_AFTER_HELD)
        return min(seconds, exponential(self._failures, SECONDS_AFTER_FAILURE, LONGEST_AFTER_FAILURE))

    def _seconds_to_next(self) -> float:
        try:
            return self._interval()
        except Exception as error:  # as for a beat
            log.error(events.BEAT_FAILED, msg=f"{self.name} cannot say when it is due", exc_info=error)
            return SECONDS_WITHOUT_ANSWER

    def _beat_once(self) -> None:
        try:
            self._beat()
        except self._fatal:
            raise
        except Exception as error:  # one bad beat must not end the loop
            # The same error is told once, then once a minute with the number of times.
            if (repeats := self._repeats.news(f"{type(error).__name__}: {error}")) is not None:
                log.error(
                    events.BEAT_FAILED,
                    msg=f"{self.name} failed this time: {error}",
                    service=self.name,
                    repeats=repeats,
                    # Of a database that is away the way through our own code tells nobody anything.
                    exc_info=None if isinstance(error, DispatcherError) else error,
                )
            self._failures += 1
            self._met_held = is_held(error)
            if self._health is not None:
                self._health.failed(error)
        else:
            self._failures = 0
            self._repeats.over()
            if self._health is not None:
                self._health.succeeded()
