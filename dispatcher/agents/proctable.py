"""What the kernel says about processes: who is whose child, in which group, started when.

A process is known by its pid *and* its start time. Start times are seconds since the machine booted, as the
kernel counts them: unlike wall-clock times they do not move when the clock is set.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from dispatcher.agents.command import WAKE_MARKER

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# Two readings of one start time are equal to the tick; this only forgives a number that went through text.
_SAME_START: Final = 0.5 / _TICKS


@dataclass(frozen=True)
class ProcessIdentity:
    """A process beyond doubt. `started_at`: seconds since boot, None when it could not be read."""

    pid: int
    started_at: float | None
    host_id: str


@dataclass(frozen=True)
class ProcessRow:
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    started_at: float
    is_zombie: bool


@functools.cache
def host_id() -> str:
    """Names this boot of this machine, and the pid namespace we live in: where a pid means something."""
    boot = _read_text("/proc/sys/kernel/random/boot_id") or f"boot-{psutil.boot_time():.0f}"
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid").removeprefix("pid:").strip("[]")  # noqa: PTH115 - no file
    return f"{boot}/{namespace}"


def identity_of(pid: int) -> ProcessIdentity:
    """The identity of whatever has that pid now."""
    return ProcessIdentity(pid, started_at(pid), host_id())


def started_at(pid: int) -> float | None:
    """When the process with that pid started, in seconds since boot; None when there is none to be read."""
    row = read_row(pid)
    return row.started_at if row is not None else None


def seconds_since_boot() -> float:
    """The clock `started_at` is on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_alive(pid: int, started: float | None) -> bool | None:
    """Whether the process that had this pid and start time still runs; a zombie does not.

    None when that cannot be told: the pid is in use and the start time is unknown. Whoever gets None must
    neither kill nor count on it.
    """
    row = read_row(pid)
    if row is None or (row.is_zombie and _is_same(row, started)):
        return False
    if started is None:
        return None
    return _is_same(row, started)


def _is_same(row: ProcessRow, started: float | None) -> bool:
    return started is not None and abs(row.started_at - started) <= _SAME_START


def same_process(row: ProcessRow | None, started: float | None) -> bool:
    """Whether `row` is the process that started at `started`; False when either is unknown."""
    return row is not None and _is_same(row, started)


def read_row(pid: int) -> ProcessRow | None:
    """The line of one pid; None when there is no such process."""
    text = _read_text(f"/proc/{pid}/stat")
    if text is None:
        return None
    # The name stands in brackets and may hold anything, brackets included: what counts follows the last one.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return ProcessRow(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        started_at=int(fields[19]) / _TICKS,
        is_zombie=fields[0] in "ZX",
    )


def read_table() -> dict[int, ProcessRow]:
    """All processes by pid."""
    rows = (read_row(pid) for pid in psutil.pids())
    return {row.pid: row for row in rows if row is not None}


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def wake_marker(pid: int) -> str | None:
    """The wake id in the environment a process was started with; None where there is none to be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{WAKE_MARKER}=".encode()
    for entry in raw.split(b"\0"):
        if entry.startswith(prefix):
            return entry.removeprefix(prefix).decode("utf-8", "replace")
    return None


def marked_processes() -> dict[str, list[ProcessIdentity]]:
    """The running processes of each wake id, group leaders first, then by age.

    They are found by the marker in their environment: also those whose pid was never written down. This
    process and its ancestors are never among them, even when an agent started them.
    """
    scan = _shared.take()
    spared = own_line(scan.table)
    found: dict[str, list[ProcessRow]] = {}
    for pid, marker in scan.markers.items():
        if pid not in spared:
            found.setdefault(marker, []).append(scan.table[pid])
    return {marker: [_identity(row) for row in sorted(rows, key=_seniority)] for marker, rows in found.items()}


@dataclass(frozen=True)
class Scan:
    """All processes by pid, and the wake ids of those that carry one."""

    table: dict[int, ProcessRow]
    markers: dict[int, str]


class SharedScan:
    """Scans that threads share: whoever asks gets one that began after the question.

    Fifty wakes ended at once would otherwise look through all processes fifty times over.
    """

    def __init__(self, scan: Callable[[], Scan]) -> None:
        self._scan = scan
        self._changed = threading.Condition()
        self._begun = 0
        self._done: tuple[int, Scan] | None = None
        self._is_running = False

    def take(self) -> Scan:
        """A scan that began after this call did."""
        with self._changed:
            wanted = self._begun + 1
            self._changed.wait_for(lambda: not self._is_running or self._is_done(wanted))
            if self._done is not None and self._is_done(wanted):
                return self._done[1]
            self._begun += 1
            number = self._begun
            self._is_running = True
        try:
            scan = self._scan()
            with self._changed:
                self._done = (number, scan)
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
        return scan

    def _is_done(self, wanted: int) -> bool:
        return self._done is not None and self._done[0] >= wanted


def _scan() -> Scan:
    table = read_table()
    markers = {pid: marker for pid in table if (marker := wake_marker(pid)) is not None}
    return Scan(table, markers)


_shared = SharedScan(_scan)


def _identity(row: ProcessRow) -> ProcessIdentity:
    return ProcessIdentity(row.pid, row.started_at, host_id())


def _seniority(row: ProcessRow) -> tuple[bool, float, int]:
    return (row.group != row.pid, row.started_at, row.pid)


def own_line(table: dict[int, ProcessRow]) -> frozenset[int]:
    """This process and its ancestors: what no ladder may ever touch."""
    line = {0, 1, os.getpid()}
    pid = os.getpid()
    while pid in table and table[pid].parent not in line:
        pid = table[pid].parent
        line.add(pid)
    return frozenset(line)


def family(
    leader: ProcessIdentity,
    *,
    leader_is_unreaped: bool,
    wake_id: str | None,
    relatives: Iterable[ProcessRow] = (),
) -> list[ProcessRow]:
    """Every running process that belongs to `leader`'s wake, the leader included.

    Its group, its session, whoever carries the wake's marker, `relatives` found earlier, and all descendants
    of these. The group's number means something only while the leader's pid cannot be somebody else's.
    """
    scan = _shared.take()
    table = scan.table
    spared = own_line(table)
    chosen = {row.pid for row in _of_group(table, leader, leader_is_unreaped=leader_is_unreaped)}
    if wake_id is not None:
        chosen |= {pid for pid, marker in scan.markers.items() if marker == wake_id}
    chosen |= {row.pid for row in relatives if same_process(table.get(row.pid), row.started_at)}
    everyone = _with_descendants(table, chosen, spared)
    own_group = os.getpgrp()
    rows = (table[pid] for pid in everyone)
    return [row for row in rows if not row.is_zombie and row.group != own_group]


def _of_group(table: dict[int, ProcessRow], leader: ProcessIdentity, *, leader_is_unreaped: bool) -> list[ProcessRow]:
    holder = table.get(leader.pid)
    is_ours = leader_is_unreaped or same_process(holder, leader.started_at)
    if holder is not None and not is_ours:
        return []  # the pid is somebody else's now
    if holder is None and leader.started_at is None:
        return []
    return [row for row in table.values() if leader.pid in (row.pid, row.group, row.session)]


def _with_descendants(table: dict[int, ProcessRow], roots: Iterable[int], spared: frozenset[int]) -> set[int]:
    """Not through `spared`: a daemon that an agent started has children that are not the agent's."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    everyone: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in everyone and pid not in spared:
            everyone.add(pid)
            waiting += children.get(pid, [])
    return everyone
