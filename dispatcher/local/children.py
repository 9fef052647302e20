"""Child processes that die with the process that started them, even when that one is killed outright."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from dispatcher.errors import DispatcherError

# The kernel ties a death signal to the THREAD that forked. This one lives as long as the process does.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-spawner")
_GUARD = Path(__file__).with_name("guard.py")
# Room for clock ticks and rounding between what the kernel, PostgreSQL and psutil call a process's start.
START_TIME_TOLERANCE = 2.0


@dataclass(frozen=True)
class Account:
    """An unprivileged account a child runs as."""

    uid: int
    gid: int


@dataclass(frozen=True)
class Identity:
    """Which process is meant: an id alone may since have been given to another."""

    pid: int
    started_at: float


def spawn(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    death_signal: signal.Signals,
    account: Account | None = None,
) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own, its output appended to `log`."""
    return _spawner.submit(_spawn, argv, environment, log, death_signal, account).result()


def _spawn(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    death_signal: signal.Signals,
    account: Account | None,
) -> subprocess.Popen[bytes]:
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    guard = [
        sys.executable,
        "-S",
        "-I",
        str(_GUARD),
        str(os.getpid()),
        str(int(death_signal)),
        str(uid),
        str(gid),
    ]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        return subprocess.Popen(
            [*guard, *argv],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def stop(child: subprocess.Popen[bytes], first: signal.Signals, patience: float) -> None:
    """Ask with `first`, wait `patience` seconds, then kill."""
    if child.poll() is not None:
        return
    child.send_signal(first)
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def identity(pid: int) -> Identity:
    """The identity of a process that is running now."""
    return Identity(pid, psutil.Process(pid).create_time())


def is_alive(who: Identity) -> bool:
    """Whether exactly that process, not a later one of the same id, is still there."""
    try:
        process = psutil.Process(who.pid)
        same = abs(process.create_time() - who.started_at) <= START_TIME_TOLERANCE
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_leftover(who: Identity, first: signal.Signals, patience: float = 5.0) -> None:
    """Stop a process that an earlier, killed run left behind. Does nothing when it is gone."""
    if not is_alive(who):
        return
    process = psutil.Process(who.pid)
    process.send_signal(first)
    _, alive = psutil.wait_procs([process], patience)
    for stubborn in alive:
        stubborn.kill()
    psutil.wait_procs(alive, patience)


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, for an error message."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


class ChildError(DispatcherError):
    """A part of the embedded Supabase did not start or ended by itself; the message ends with its log."""
