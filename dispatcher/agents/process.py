"""Starting, waiting for, and stopping one process of a wake together with everything it started."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dispatcher import events
from dispatcher.agents import proctable
from dispatcher.agents.proctable import ProcessIdentity, ProcessRow
from dispatcher.errors import ExecutableMissing, SpawnError
from dispatcher.logs import get_logger

log = get_logger(__name__)

TERM_GRACE: Final = 5.0
KILL_WAIT: Final = 3.0
FEWEST_KILLS: Final = 2
# Only where the kernel or a sandbox has no pidfd: how often the end of a process is looked for.
FALLBACK_POLL: Final = 0.05
# poll counts milliseconds in 31 bits: 24.8 days.
LONGEST_POLL: Final = 86_400.0

MISSING: Final = frozenset({errno.ENOENT, errno.EACCES})
_PR_SET_CHILD_SUBREAPER: Final = 36


class ManagedProcess:
    """A process this daemon answers for: started by it, or adopted from an earlier one.

    It stays unreaped until `reap`, so that its pid and its group's number keep meaning what they mean.
    `wait` and `reap` belong to one thread.
    """

    def __init__(self, identity: ProcessIdentity, popen: subprocess.Popen[bytes] | None) -> None:
        self.identity = identity
        self._popen = popen
        self._is_reaped = False
        self._pidfd = _open_pidfd(identity.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.identity.pid

    @property
    def started_at(self) -> float | None:
        """When it started, in seconds since boot."""
        return self.identity.started_at

    @property
    def is_child(self) -> bool:
        """Whether it is a child of this process, so that its exit code will be known."""
        return self._popen is not None

    @property
    def is_unreaped_child(self) -> bool:
        """Whether its pid cannot have been given to another process."""
        return self._popen is not None and not self._is_reaped

    def wait(self, timeout: float | None, interrupt_fd: int | None = None) -> bool:
        """Waits for its end; True once it has ended.

        Returns at once when it ends, when `interrupt_fd` becomes readable, or after `timeout` seconds.
        """
        if self._pidfd is not None:
            _poll([self._pidfd] + ([interrupt_fd] if interrupt_fd is not None else []), timeout)
            return self.has_ended()
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.has_ended():
            left = FALLBACK_POLL if deadline is None else min(FALLBACK_POLL, deadline - time.monotonic())
            if left <= 0 or _poll([interrupt_fd] if interrupt_fd is not None else [], left):
                break
        return self.has_ended()

    def has_ended(self) -> bool:
        """Whether it has ended, reaped or not."""
        if self._is_reaped:
            return True
        if self._pidfd is not None:
            return bool(_poll([self._pidfd], 0))
        if self._popen is not None:
            return _is_waitable(self.pid)
        return proctable.is_alive(self.pid, self.started_at) is False

    def exit_code(self) -> int | None:
        """As `reap`, but the process stays unreaped."""
        if self._popen is None or self._is_reaped:
            return self._popen.returncode if self._popen is not None else None
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def reap(self) -> int | None:
        """Its exit code, negative for a signal; None when it is not our child or has not ended."""
        if self._popen is None or not self.has_ended():
            return None
        self._is_reaped = True
        return self._popen.wait()

    def close(self) -> None:
        """Gives back what watching it took."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def spawn(argv: Sequence[str], env: Mapping[str, str], output_fd: int | None = None) -> ManagedProcess:
    """Starts `argv` in its own session: no stdin, none of our open files, output to `output_fd` or nowhere.

    Raises:
        SpawnError: with the cause, when it cannot be started.
    """
    output = subprocess.DEVNULL if output_fd is None else output_fd
    try:
        popen = subprocess.Popen(
            [argument.encode("utf-8", "surrogateescape") for argument in argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=True,
        )
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, OSError) and error.errno in MISSING
        kind = ExecutableMissing if is_missing else SpawnError
        raise kind(f"cannot start {argv[0]}: {_spawn_cause(error)}") from error
    # Unreaped, so the pid is its own and its start time can be read even if it has ended already.
    return ManagedProcess(proctable.identity_of(popen.pid), popen)


def _spawn_cause(error: OSError | ValueError) -> str:
    if not isinstance(error, OSError):
        return "an argument or a variable has a character no command line can hold"
    causes = {
        errno.ENOENT: "not found (it, or the interpreter it names)",
        errno.EACCES: "not executable",
        errno.E2BIG: "its arguments and environment are too long",
        errno.EAGAIN: "no more processes allowed",
        errno.ENOMEM: "out of memory",
        errno.ENOEXEC: "not a program",
    }
    return causes.get(error.errno or 0, error.strerror or type(error).__name__)


def adopt(pid: int, started: float | None) -> ManagedProcess | None:
    """The process an earlier daemon started, when it is beyond doubt the one; its exit code stays unknown.

    None when it has ended, when the pid is another's now, or when its start time was never known.
    """
    process = ManagedProcess(ProcessIdentity(pid, started, proctable.host_id()), None)
    # Asked after the pidfd was opened: what it answers holds for what the pidfd refers to.
    if proctable.is_alive(pid, started) is True:
        return process
    process.close()
    return None


# ------------------------------------------------------------------------------------------ stopping


@dataclass(frozen=True)
class StopReport:
    """What a ladder did: how many processes it asked, how many it had to kill, which are still there."""

    asked: int
    killed: int
    survivors: tuple[int, ...]


def stop_family(
    process: ManagedProcess,
    wake_id: str | None,
    *,
    term_grace: float = TERM_GRACE,
    kill_wait: float = KILL_WAIT,
) -> StopReport:
    """Ends a process and all it started: SIGTERM, `term_grace` seconds, SIGKILL, gone or `kill_wait` seconds.

    Everyone is looked up again before the kill, and until nobody is left: those who left the group or the
    session, and those started meanwhile. The process itself is left unreaped, so that its group's number
    stays its own. Our own group and our ancestors are never signalled.
    """
    asked = _family(process, wake_id, ())
    _signal_all(asked, signal.SIGTERM, process)
    _wait_gone(asked, term_grace)
    killed, survivors, everyone = _kill_until_gone(process, wake_id, asked, kill_wait)
    _reap_relatives(process, everyone)
    return StopReport(len(asked), killed, tuple(row.pid for row in survivors))


def _reap_relatives(process: ManagedProcess, rows: Iterable[ProcessRow]) -> None:
    """Who came to us as to a subreaper leaves no zombie behind; the process itself is its owner's to reap."""
    for row in rows:
        if row.pid != process.pid and proctable.same_process(proctable.read_row(row.pid), row.started_at):
            _reap_pid(row.pid)


def _family(process: ManagedProcess, wake_id: str | None, relatives: Iterable[ProcessRow]) -> list[ProcessRow]:
    return proctable.family(
        process.identity,
        leader_is_unreaped=process.is_unreaped_child,
        wake_id=wake_id,
        relatives=relatives,
    )


def _kill_until_gone(
    process: ManagedProcess, wake_id: str | None, relatives: list[ProcessRow], kill_wait: float
) -> tuple[int, list[ProcessRow], list[ProcessRow]]:
    killed: set[int] = set()
    left = _family(process, wake_id, relatives)
    # From the first kill on, and not without a second: on a busy machine looking alone can take longer than the wait.
    deadline = time.monotonic() + kill_wait
    for rounds in itertools.count():
        if not left or (rounds >= FEWEST_KILLS and time.monotonic() >= deadline):
            break
        _signal_all(left, signal.SIGKILL, process)
        killed |= {row.pid for row in left}
        _wait_gone(left, max(0.0, deadline - time.monotonic()))
        relatives = relatives + left
        left = _family(process, wake_id, relatives)
    return len(killed), left, relatives


def _signal_all(rows: Sequence[ProcessRow], number: signal.Signals, process: ManagedProcess) -> None:
    """Signals groups as a whole, so that nobody forked meanwhile gets away, then who is in none of them."""
    groups = {row.group for row in rows if _may_signal_group(row.group, rows, process)}
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)
    for row in rows:
        if row.group not in groups:
            send_signal(row.pid, row.started_at, number)


def kill_group(process: ManagedProcess) -> None:
    """SIGKILL to a child's group without a look at the process table: for when there is no descriptor left for it."""
    if process.is_unreaped_child:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _may_signal_group(group: int, rows: Iterable[ProcessRow], process: ManagedProcess) -> bool:
    """Whether the number of the group is beyond doubt that of a group of this wake, and not our own."""
    if group in (0, os.getpgrp()):
        return False
    if group == process.pid and process.is_unreaped_child:
        return True
    leader = next((row for row in rows if row.pid == group), None)
    return leader is not None and proctable.same_process(proctable.read_row(group), leader.started_at)


def stop_strays(wake_ids: Collection[str], term_grace: float = 1.0) -> int:
    """Ends what wakes that ended by themselves left running, found by their marker; how many that was."""
    strays = [
        process for wake_id, marked in proctable.marked_processes().items() if wake_id in wake_ids for process in marked
    ]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for stray in strays:
            send_signal(stray.pid, stray.started_at, number)
        _wait_gone(strays, term_grace)
    return len(strays)


def send_signal(pid: int, started: float | None, number: signal.Signals) -> bool:
    """Signals the process that has this pid *and* this start time; False, and no signal, for any other."""
    pidfd = _open_pidfd(pid)
    try:
        if not proctable.same_process(proctable.read_row(pid), started):
            return False
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def _wait_gone(rows: Iterable[ProcessRow | ProcessIdentity], timeout: float) -> None:
    """Returns when all of `rows` have ended, or after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    for row in rows:
        pidfd = _open_pidfd(row.pid)
        try:
            while proctable.is_alive(row.pid, row.started_at) and (left := deadline - time.monotonic()) > 0:
                _poll([pidfd] if pidfd is not None else [], left if pidfd is not None else FALLBACK_POLL)
        finally:
            if pidfd is not None:
                os.close(pidfd)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:  # no such process, or no pidfd here: both are looked into by start time instead
        return None


def _poll(descriptors: Sequence[int], timeout: float | None) -> list[int]:
    """The descriptors that are readable within `timeout` seconds."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    # Rounded up: a wait cut to 0 ms would spin until its deadline. Cut to what poll can take: who waits looks again.
    milliseconds = None if timeout is None else max(0, int(min(timeout, LONGEST_POLL) * 1000 + 0.999))
    return [descriptor for descriptor, _ in poller.poll(milliseconds)]


def _is_waitable(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


# ------------------------------------------------------------------------------------------ orphans


def prepare_parent() -> bool:
    """Makes this process the one that orphans of its wakes come to, instead of PID 1. Main thread only.

    They can then be found at the end and reaped, whatever group, session or environment they gave
    themselves. False where the kernel does not offer it; nothing depends on it then.
    """
    # Inherited as ignored (nohup and some service managers do so) every exit code would read 0.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        import ctypes  # noqa: PLC0415 - used once, and not small

        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


class OrphanReaper:
    """Reaps the ended children nobody waits for: orphans that came to us as PID 1 or as subreaper.

    A child somebody else in this program waits for is reaped by them within moments, so only one that is
    still there at the next call is taken.
    """

    def __init__(self) -> None:
        self._seen: frozenset[tuple[int, float]] = frozenset()

    def reap(self, known: Iterable[int]) -> int:
        """Reaps what was there last time already and is not among the pids in `known`; how many that was."""
        zombies = self._unknown_zombies(frozenset(known)) if _has_zombie() else frozenset()
        reaped = [pid for pid, _ in zombies & self._seen if _reap_pid(pid)]
        self._seen = zombies
        if reaped:
            log.debug(events.PROCESS_REAPED, msg="Reaped orphans", count=len(reaped))
        return len(reaped)

    @staticmethod
    def _unknown_zombies(known: frozenset[int]) -> frozenset[tuple[int, float]]:
        me = os.getpid()
        rows = proctable.read_table().values()
        return frozenset(
            (row.pid, row.started_at) for row in rows if row.parent == me and row.is_zombie and row.pid not in known
        )


def _has_zombie() -> bool:
    """One system call, so that looking every few seconds costs nothing while there are none."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _reap_pid(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
