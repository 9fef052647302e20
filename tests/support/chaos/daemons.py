"""A daemon of the run: started, stopped, killed, frozen, started again; its log read, its size measured."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from tests.support.chaos.evidence import Evidence, LineTail, fault_of_log_line, record_of
from tests.support.daemon import PROGRAM, base_environment
from tests.support.waiting import wait_until

# How a start that gives up says so.
LAST_WORD_OF_A_START: Final = "dispatcher: "
UNAVAILABLE: Final = 69
ZOMBIE_SECONDS: Final = 25.0
# On a machine as busy as this run makes it.
SLACK_SECONDS: Final = 15.0


@dataclass
class Life:
    """One process of a daemon, from its start to its end."""

    number: int
    process: subprocess.Popen[bytes]
    log: LineTail
    stderr: Path
    may_end: bool = False
    is_ready: bool = False
    is_frozen: bool = False
    was_killed: bool = False
    started: float = field(default_factory=time.monotonic)
    zombies: dict[int, float] = field(default_factory=dict)


class ChaosDaemon:
    """One place where a daemon runs; `life` is the process that does now."""

    def __init__(self, name: str, run: Path, environment: Mapping[str, str], evidence: Evidence) -> None:
        directory, code = run / name, run / "code"
        self.name = name
        self.grace = float(environment["SHUTDOWN_GRACE"])
        self._directory = directory
        self._evidence = evidence
        self._clock = directory / "clock"
        directory.mkdir(parents=True)
        self._environment = {
            **base_environment(),
            "PYTHONPATH": f"{code / 'chaos' / 'clock'}:{code}",
            "PYTHONDONTWRITEBYTECODE": "",
            "CHAOS_CLOCK_FILE": str(self._clock),
            "HOME": str(directory),
            "OPENCLAW_HOME": str(directory / "openclaw"),
            "HEARTBEAT_FILE": str(directory / "heartbeat.json"),
            **environment,
        }
        self.life: Life
        # Faults act in one thread and the watch looks in another.
        self._changing = threading.RLock()
        self._reading = threading.Lock()
        self.well_stopped: set[int] = set()
        self.slowest_stop = 0.0

    def start(self) -> None:
        """A new life."""
        with self._changing:
            self._start()

    def _start(self) -> None:
        number = self.life.number + 1 if hasattr(self, "life") else 1
        log, stderr = self._directory / f"log-{number}.jsonl", self._directory / f"stderr-{number}"
        with log.open("ab") as out, stderr.open("ab") as err:
            process = subprocess.Popen(
                [*PROGRAM, "run"],
                env=self._environment,
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.life = Life(number, process, LineTail(log), stderr)
        self._evidence.count("daemon starts")

    # -- faults

    def kill(self) -> None:
        """SIGKILL; what it started lives on."""
        with self._changing:
            self._look()  # an end of its own before this is not ours
            life = self.life
            life.may_end = life.was_killed = True
            life.process.kill()
            life.process.wait()
            self._judge_last_words()

    def stop(self, signals: int = 1) -> None:
        """SIGTERM, once or twice; it must end in time and well."""
        with self._changing:
            self._look()
            self._stop(signals)

    def _stop(self, signals: int) -> None:
        life = self.life
        was_ready = self.is_ready()
        life.may_end = True
        asked = time.monotonic()
        for _ in range(signals):
            life.process.send_signal(signal.SIGTERM)
        limit = self.grace + 10 + SLACK_SECONDS
        try:
            code = life.process.wait(limit)
        except subprocess.TimeoutExpired:
            self._evidence.violated("a daemon ends in time", f"{self} did not end {limit:.0f} s after SIGTERM")
            self.kill()
            return
        self._judge_stop(code, was_ready, time.monotonic() - asked)
        self._judge_last_words()

    def _judge_stop(self, code: int, was_ready: bool, seconds: float) -> None:
        self._evidence.count("daemon stops")
        self.slowest_stop = max(self.slowest_stop, seconds)
        self._evidence.facts[f"slowest stop of {self.name}"] = f"{self.slowest_stop:.1f} s"
        # Before it is ready the signal may find the interpreter still loading, or the start giving up.
        allowed = {0} if was_ready else {0, -signal.SIGTERM, UNAVAILABLE}
        if code not in allowed:
            self._evidence.violated("SIGTERM ends with code 0", f"{self} ended with {code} after {seconds:.1f} s")
        elif was_ready:
            self.well_stopped.add(self.life.process.pid)

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        life = self.life
        life.is_frozen = True
        life.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)  # the fault itself, not a wait for anything
        finally:
            life.process.send_signal(signal.SIGCONT)
            life.is_frozen = False

    def move_clock(self, offset: float) -> None:
        """Its wall clock is off by so many seconds from now on."""
        draft = self._clock.with_suffix(".draft")
        draft.write_text(f"{offset}", encoding="ascii")
        draft.replace(self._clock)

    def end(self) -> None:
        """For the end of a run that broke down: gone, whatever it is doing."""
        if self.life.process.poll() is None:
            self.life.process.kill()
            self.life.process.wait()

    # -- looking

    def is_ready(self) -> bool:
        """Whether this life has said that it dispatches."""
        self.read_log()
        return self.life.is_ready

    def read_log(self) -> None:
        """Judges what it has written since the last look."""
        with self._reading:
            self._read_log()

    def _read_log(self) -> None:
        life = self.life
        for line in life.log.new_lines():
            if fault := fault_of_log_line(line):
                self._evidence.violated("every log line parses", f"{self}: {fault}: {line[:500]!r}")
                continue
            record = record_of(line)
            life.is_ready = life.is_ready or record["event"] == "daemon.ready"
            self._evidence.count(f"log {record['level']} {record['event']}")

    def look(self) -> None:
        """Notices an end that nobody asked for, and starts it again, as a supervisor does."""
        if not self._changing.acquire(blocking=False):
            return  # it is being stopped or started at this moment
        try:
            self._look()
        finally:
            self._changing.release()

    def _look(self) -> None:
        self.read_log()
        life = self.life
        code = life.process.poll()
        if code is None or life.may_end:
            self._look_for_zombies(life)
            return
        life.may_end = True
        if life.is_ready or code != UNAVAILABLE:
            what = f"{self} ended by itself with {code}\n{self.last_words()}"
            self._evidence.violated("a daemon never ends by itself", what)
        else:
            self._evidence.count("starts given up (69)")
        self._judge_last_words()
        self._start()

    def _look_for_zombies(self, life: Life) -> None:
        now = time.monotonic()
        if life.is_frozen:
            life.zombies.clear()
            return
        found = {child.pid for child in _children(life.process.pid) if _is_zombie(child)}
        life.zombies = {pid: life.zombies.get(pid, now) for pid in found}
        for pid, since in life.zombies.items():
            if ZOMBIE_SECONDS < now - since < ZOMBIE_SECONDS * 2:
                self._evidence.violated("no zombie stays", f"{self}: pid {pid}, for {now - since:.0f} s")
                life.zombies[pid] = now - 3 * ZOMBIE_SECONDS

    def _judge_last_words(self) -> None:
        """What a process that has ended left in its files."""
        self.read_log()
        life = self.life
        if life.log.unfinished and not life.was_killed:
            self._evidence.violated("every log line parses", f"{self} ends with {life.log.unfinished[:500]!r}")
        said = life.stderr.read_text(errors="replace").strip()
        if said and not (said.startswith(LAST_WORD_OF_A_START) and life.process.returncode == UNAVAILABLE):
            self._evidence.violated("nothing is written beside the log", f"{self} on stderr:\n{said[-3000:]}")

    def last_words(self, lines: int = 8) -> str:
        """The end of its log."""
        text = self.life.log.path.read_text(errors="replace")
        return "\n".join(f"    {line[:600]}" for line in text.splitlines()[-lines:])

    def wait_ready(self, deadline: float) -> None:
        """Until it dispatches; one that gave up its start is started again meanwhile."""

        def ready() -> bool:
            self.look()
            return self.is_ready()

        wait_until(ready, deadline, poll=0.1, what=f"{self} ready; last words:\n{self.last_words()}")

    def size(self) -> tuple[int, int] | None:
        """Descriptors, and resident bytes; None when it is gone."""
        try:
            process = psutil.Process(self.life.process.pid)
            return process.num_fds(), process.memory_info().rss
        except psutil.Error:
            return None

    def __str__(self) -> str:
        return f"daemon {self.name} (life {self.life.number}, pid {self.life.process.pid})"


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.Error:
        return []


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
