"""The table of live wakes. Each has one thread that waits for its end, and ends it when its time is up.

A command that prints its answer and never exits is ended by its time-out.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from dispatcher import events
from dispatcher.agents import process as processes
from dispatcher.agents import proctable
from dispatcher.agents.output import CapturedOutput, WakeOutput
from dispatcher.agents.process import ManagedProcess, OrphanReaper, StopReport
from dispatcher.errors import ShuttingDown, SpawnError
from dispatcher.logs import get_logger
from dispatcher.runtime.signals import STOP_SIGNALS

log = get_logger(__name__)

# Exit codes of a process that ended by a signal asking for it: the kernel's, and as shells and programs put it.
ENDED_BY_STOP_SIGNAL: Final = frozenset(code for number in STOP_SIGNALS for code in (-number, 128 + number))
# How long an end by such a signal waits for news that this daemon is stopping. One that sends the signal to the daemon
# and its children together reaches them within a moment of each other, in any order.
STOP_NEWS_SECONDS: Final = 1.0

EndKind = Literal["exited", "timed_out", "stopped", "lost"]

OUTPUT_TRIM_INTERVAL: Final = 0.5
# Wakes whose leftovers are still looked for when the daemon stops.
REMEMBERED_ENDINGS: Final = 5_000
# What a stop may take beyond the grace: the ladder, the reports; then what earlier wakes left running.
STOP_LIMIT: Final = 8.5
STRAYS_LIMIT: Final = 1.0
SHUTDOWN_CAUSE: Final = "shutdown"
# Past its deadline, ladder included, by this much: the thread that should have ended it has failed.
OVERDUE_MARGIN: Final = 15.0
# A process that could not be killed (one the kernel holds, say) is tried again after this.
STOP_AGAIN_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Ending:
    """How a wake's process ended.

    `exit_code` is negative for a signal and None when unknown (adopted, or not to be killed); `duration_s`
    runs from the start of the process; `cause` is a sentence for `timed_out`, `stopped` and `lost`, else "".
    `stopped` is also an end by a signal somebody else sent while this daemon stops. `output` is the last of what it
    printed, where that is known.
    """

    kind: EndKind
    exit_code: int | None
    duration_s: float
    cause: str
    output: bytes = field(default=b"", repr=False)


class WakeProcess:
    """One live wake: who it is for, its process, and when its time is up."""

    def __init__(
        self,
        wake_id: str,
        agent: str,
        process: ManagedProcess,
        timeout_seconds: float,
        *,
        age: float = 0.0,
        output: CapturedOutput | None = None,
    ) -> None:
        self.wake_id = wake_id
        self.agent = agent
        self.process = process
        self.timeout_seconds = timeout_seconds
        self.output = output
        self.stop_cause: str | None = None
        self.thread: threading.Thread | None = None
        self._started = time.monotonic() - age
        # Of one adopted late, the time is up now: it cannot be overdue for longer than it is known.
        self.deadline = max(self._started + timeout_seconds, time.monotonic())
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._nudge_lock = threading.Lock()
        self._is_open = True

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self.process.pid

    @property
    def started_at(self) -> float | None:
        """Start of the process in seconds since boot; with the pid it names the process beyond doubt."""
        return self.process.started_at

    @property
    def is_adopted(self) -> bool:
        """Whether an earlier daemon started it."""
        return not self.process.is_child

    @property
    def duration_s(self) -> float:
        """How long it has been running, in seconds."""
        return time.monotonic() - self._started

    def request_stop(self, cause: str) -> None:
        """Asks its thread to end it; the first cause stands."""
        if self.stop_cause is None:
            self.stop_cause = cause
        self.nudge()

    def nudge(self) -> None:
        """Makes its thread look."""
        with self._nudge_lock:
            if self._is_open:
                os.eventfd_write(self._nudge, 1)

    def wait(self) -> bool:
        """Waits until it has ended (True), somebody nudges, its time is up, or its output wants cutting."""
        timeout = max(0.0, self.deadline - time.monotonic())
        if self.output is not None:
            timeout = min(timeout, OUTPUT_TRIM_INTERVAL)
        has_ended = self.process.wait(timeout, self._nudge)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._nudge)
        if self.output is not None:
            self.output.trim()
        return has_ended

    def close(self) -> None:
        """Gives back its descriptors; the process has been dealt with."""
        with self._nudge_lock:
            self._is_open = False
            os.close(self._nudge)
        self.process.close()
        if self.output is not None:
            self.output.close()


class Supervisor:
    """Starts, watches and ends the processes of wakes.

    `on_end` is called once per wake, in the thread that watched it, after the wake has left the table and its
    process is gone; what it raises is logged. All methods are thread-safe, and no lock is held over I/O.
    """

    def __init__(
        self,
        on_end: Callable[[WakeProcess, Ending], object],
        timeout_seconds: float,
        *,
        output_dir: Path | None = None,
        term_grace: float = processes.TERM_GRACE,
    ) -> None:
        self._on_end = on_end
        self._timeout_seconds = timeout_seconds
        self._output_dir = output_dir
        self._term_grace = term_grace
        self._lock = threading.Lock()
        self._starting: set[str] = set()
        self._live: dict[str, WakeProcess] = {}
        self._reporting: set[str] = set()
        self._ended_alone: deque[str] = deque(maxlen=REMEMBERED_ENDINGS)
        self._is_closed = False
        self._reaper = OrphanReaper()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_hurried = False
        self._is_stopping = threading.Event()

    # -- starting

    def start(
        self,
        wake_id: str,
        agent: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_seconds: float | None = None,
        on_started: Callable[[WakeProcess], object] | None = None,
    ) -> WakeProcess:
        """Starts one process and watches it.

        `on_started` is called before the process is waited for: however short it is, what `on_started` says of it
        comes before what `on_end` says. What it raises is logged.

        Raises:
            SpawnError: it cannot be started; nothing is left of the attempt.
            ShuttingDown: `stop_all` has been called.
        """
        with self._reserved(wake_id):
            output = self._open_output(agent, wake_id)
            try:
                process = processes.spawn(argv, env, output.fd if output is not None else None)
            except SpawnError:
                if output is not None:
                    output.discard()
                raise
            seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            try:
                wake = WakeProcess(wake_id, agent, process, seconds, output=output)
            except Exception as error:
                if output is not None:
                    output.discard()  # first: its descriptor may be the one the rest needs
                self._end_unwatched(process, wake_id)
                raise SpawnError(f"cannot watch the process: {error}") from error
            return self._watch(wake, on_started)

    def adopt(
        self,
        wake_id: str,
        agent: str,
        pid: int,
        started_at: float | None,
        *,
        seconds_left: float | None = None,
    ) -> WakeProcess | None:
        """Watches a process an earlier daemon started, for `seconds_left`; without them its time runs from its start.

        None when it has ended, or is not beyond doubt the one with that pid and start time.

        Raises:
            ShuttingDown: `stop_all` has been called.
        """
        with self._reserved(wake_id):
            process = processes.adopt(pid, started_at)
            if process is None or started_at is None:
                return None
            age = max(0.0, proctable.seconds_since_boot() - started_at)
            seconds = self._timeout_seconds if seconds_left is None else age + max(0.0, seconds_left)
            try:
                wake = WakeProcess(wake_id, agent, process, seconds, age=age)
            except Exception:
                process.close()  # it goes on, as before; whoever is told may adopt it later
                raise
            return self._watch(wake)

    @contextlib.contextmanager
    def _reserved(self, wake_id: str) -> Iterator[None]:
        """Between the decision to start and the entry in the table, a stop must know of what is coming."""
        with self._lock:
            if self._is_closed:
                raise ShuttingDown("no wake is started any more")
            if wake_id in self._live or wake_id in self._starting:
                raise ValueError(f"wake {wake_id} is live already")
            self._starting.add(wake_id)
        try:
            yield
        finally:
            with self._lock:
                self._starting.discard(wake_id)
            self._news.put(None)

    def _open_output(self, agent: str, wake_id: str) -> CapturedOutput | None:
        try:
            return CapturedOutput() if self._output_dir is None else WakeOutput(self._output_dir, agent, wake_id)
        except OSError as error:
            log.warning(
                events.WAKE_OUTPUT_LOST,
                msg="The output of this wake cannot be kept",
                wake_id=wake_id,
                cause=error.strerror,
            )
            return None

    def _watch(self, wake: WakeProcess, on_started: Callable[[WakeProcess], object] | None = None) -> WakeProcess:
        wake.thread = threading.Thread(
            target=self._see_through, args=(wake,), name=f"wake-{wake.agent}"[:40], daemon=True
        )
        with self._lock:
            self._live[wake.wake_id] = wake
        _announce(wake, on_started)
        try:
            wake.thread.start()
        except Exception as error:  # no more threads, or no memory for one
            with self._lock:
                del self._live[wake.wake_id]
            self._end_unwatched(wake.process, wake.wake_id, wake.close)
            raise SpawnError(f"no thread left to watch the process: {error}") from error
        return wake

    def _end_unwatched(self, process: ManagedProcess, wake_id: str, close: Callable[[], object] | None = None) -> None:
        """A process nobody waits for must not stay, whatever is missing for its end in good order."""
        try:
            processes.stop_family(process, wake_id, term_grace=self._term_grace)
        except Exception:
            log.exception(events.PROCESS_SURVIVED, msg="Killing a process nobody can watch", pids=[process.pid])
            processes.kill_group(process)
            process.wait(processes.KILL_WAIT)
        process.reap()
        (close or process.close)()

    # -- the life of one wake, in its own thread

    def _see_through(self, wake: WakeProcess) -> None:
        try:
            ending = self._await_ending(wake)
        except Exception as error:  # whatever it was, the slot must become free and be reported
            log.exception(events.WAKE_LOST, msg=f"Lost the process of {wake.agent}", wake_id=wake.wake_id)
            ending = self._abandon(wake, f"{type(error).__name__} while waiting")
        self._finish(wake, ending)

    def _abandon(self, wake: WakeProcess, cause: str) -> Ending:
        """A process nobody waits for must not go on; its end is reported even if stopping it fails."""
        try:
            self._stop_processes(wake)
            return Ending("lost", wake.process.reap(), wake.duration_s, cause)
        except Exception:
            log.exception(
                events.PROCESS_SURVIVED, msg=f"Cannot stop {wake.agent}", wake_id=wake.wake_id, pids=[wake.pid]
            )
            return Ending("lost", None, wake.duration_s, cause)

    def _finish(self, wake: WakeProcess, ending: Ending) -> None:
        with self._lock:
            if self._live.pop(wake.wake_id, None) is not wake:
                return
            self._reporting.add(wake.wake_id)
        ending = replace(ending, output=b"" if wake.output is None else wake.output.tail())
        wake.close()
        try:
            self._on_end(wake, ending)
        except Exception:
            log.exception(events.WAKE_END_UNREPORTED, msg=f"The end of {wake.agent} was lost", wake_id=wake.wake_id)
        finally:
            with self._lock:
                self._reporting.discard(wake.wake_id)
            self._news.put(None)

    def _await_ending(self, wake: WakeProcess) -> Ending:
        while True:
            if wake.wait():
                return self._ended_by_itself(wake)
            if wake.stop_cause is not None:
                return self._ended_by_us(wake, "stopped", wake.stop_cause)
            if time.monotonic() >= wake.deadline:
                return self._ended_by_us(wake, "timed_out", f"ran longer than {_shown(wake.timeout_seconds)} s")

    def _ended_by_itself(self, wake: WakeProcess) -> Ending:
        duration = wake.duration_s
        exit_code = wake.process.exit_code()
        if exit_code:
            # A failed run is over: what it left running must not meet the next one.
            self._stop_processes(wake)
        else:
            self._ended_alone.append(wake.wake_id)
        wake.process.reap()
        if exit_code in ENDED_BY_STOP_SIGNAL and self._is_stopping.wait(STOP_NEWS_SECONDS):
            return Ending("stopped", exit_code, duration, SHUTDOWN_CAUSE)
        return Ending("exited", exit_code, duration, "")

    def _ended_by_us(self, wake: WakeProcess, kind: EndKind, cause: str) -> Ending:
        self._stop_processes(wake)
        while not wake.process.has_ended():
            # Were its end reported now, its agent would be woken beside it: it keeps its slot for as long as it lives.
            wake.deadline = time.monotonic() + STOP_AGAIN_SECONDS
            wake.process.wait(STOP_AGAIN_SECONDS)
            self._stop_processes(wake)
        exit_code = wake.process.reap()
        return Ending(kind, exit_code, wake.duration_s, cause)

    def _stop_processes(self, wake: WakeProcess) -> StopReport:
        report = processes.stop_family(wake.process, wake.wake_id, term_grace=self._term_grace)
        if report.killed:
            log.warning(
                events.PROCESS_KILLED,
                msg=f"Killed what {wake.agent} left running after SIGTERM",
                wake_id=wake.wake_id,
                asked=report.asked,
                killed=report.killed,
            )
        if report.survivors:
            log.error(
                events.PROCESS_SURVIVED,
                msg=f"Processes of {wake.agent} cannot be killed",
                wake_id=wake.wake_id,
                pids=report.survivors,
            )
        return report

    # -- looking and stopping

    def live(self) -> list[WakeProcess]:
        """The wakes whose processes run, oldest first."""
        with self._lock:
            return list(self._live.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def stop(self, wake_id: str, cause: str) -> bool:
        """Asks for the end of one wake and returns at once; False when it is not live."""
        with self._lock:
            wake = self._live.get(wake_id)
        if wake is None:
            return False
        wake.request_stop(cause)
        return True

    def note_stopping(self) -> None:
        """This daemon is about to stop: a child that ends by a signal now, whoever sent it, was interrupted."""
        self._is_stopping.set()

    def hurry(self) -> None:
        """Ends the grace `stop_all` is giving, or will give."""
        self._is_hurried = True
        self._news.put(None)

    def stop_all(self, grace: float, limit: float = STOP_LIMIT) -> bool:
        """Starts nothing more, gives live wakes `grace` seconds to end, then ends all at once.

        What earlier wakes left running is ended too. Returns within `grace` + `limit` seconds, and one or two
        more for such leftovers: True when every process is gone and every end was reported.
        """
        self.note_stopping()
        with self._lock:
            self._is_closed = True
        deadline = time.monotonic() + grace
        while not self._is_idle() and not self._is_hurried and time.monotonic() < deadline:
            self._await_news(deadline)
        deadline = time.monotonic() + limit
        while not self._is_idle() and time.monotonic() < deadline:
            for wake in self.live():
                wake.request_stop(SHUTDOWN_CAUSE)
            self._await_news(deadline)
        if self._ended_alone:
            processes.stop_strays(frozenset(self._ended_alone), STRAYS_LIMIT / 2)
        return self._is_idle()

    def _is_idle(self) -> bool:
        with self._lock:
            return not (self._starting or self._live or self._reporting)

    def _await_news(self, deadline: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=max(0.0, deadline - time.monotonic()))

    def check(self) -> None:
        """The net under the waiting threads, for a loop to call every few seconds; also reaps orphans."""
        wakes = self.live()
        for wake in wakes:
            self._check_one(wake)
        self._reaper.reap(known={wake.pid for wake in wakes})

    def _check_one(self, wake: WakeProcess) -> None:
        if self._has_lost_its_thread(wake):
            self._finish(wake, self._abandon(wake, "its thread had died"))
            return
        overdue = time.monotonic() - wake.deadline - self._term_grace - processes.KILL_WAIT
        if overdue > OVERDUE_MARGIN:
            log.error(events.PROCESS_NUDGED, msg=f"{wake.agent} is overdue", wake_id=wake.wake_id)
            wake.nudge()

    def _has_lost_its_thread(self, wake: WakeProcess) -> bool:
        """Whether nobody waits for it: the look at the thread comes first, then the table.

        A thread that ended in good order has taken its wake out of the table before. The other way round a wake that
        ended well meanwhile would have its background processes killed.
        """
        if wake.thread is None or wake.thread.ident is None or wake.thread.is_alive():
            return False
        with self._lock:
            return self._live.get(wake.wake_id) is wake


def _shown(seconds: float) -> str:
    """Whole seconds where they say enough: the time of an adopted process is what was left of it."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:g}"


def _announce(wake: WakeProcess, on_started: Callable[[WakeProcess], object] | None) -> None:
    if on_started is None:
        return
    try:
        on_started(wake)
    except Exception:
        log.exception(events.WAKE_START_UNREPORTED, msg=f"The start of {wake.agent} was lost", wake_id=wake.wake_id)
