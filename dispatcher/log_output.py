"""Where log lines go: a bounded queue and one thread that writes it, so that no reader and no disk stops the work.

The thread may hang in a write for as long as nobody reads. Lines that do not fit meanwhile are counted, and the
count is told in their place once writing goes on. The descriptor is used as it is: making it non-blocking would
change the terminal or pipe for everybody who shares it.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_QUEUED_LINES: Final = 5_000
MAX_QUEUED_BYTES: Final = 1024 * 1024
# Lines are taken together up to this size.
MAX_BATCH_BYTES: Final = 32 * 1024
WRITE_AGAIN_SECONDS: Final = 0.5
WRITABLE_SECONDS: Final = 1.0
# At the end: as long as a write goes forward, and a moment longer.
FLUSH_STANDSTILL_SECONDS: Final = 0.3
FLUSH_SECONDS: Final = 2.0
STDERR_SECONDS: Final = 0.5
# Lines that wait so long without any progress are said to wait for a reader.
STALLED_SECONDS: Final = 5.0


class LineQueue:
    """Writes lines to a descriptor in order, from any thread, and never makes one of them wait.

    Args:
        fd: where to write; not closed.
        dropped_line: the line that tells of so many lost lines.
        tell: is told once for each time the descriptor cannot be written, in words. Must not block.
    """

    def __init__(self, fd: int, dropped_line: Callable[[int], str], tell: Callable[[str], object]) -> None:
        self.fd = fd
        self._dropped_line = dropped_line
        self._tell = tell
        # Reentrant: the garbage collector may log in the middle of a line of the same thread.
        self._changed = threading.Condition(threading.RLock())
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._dropped_in_all = 0
        self._in_doubt = 0  # lines of the batch in writing that are not written whole
        self._fault: str | None = None
        self._moved_at = time.monotonic()
        self._in_writing = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queues one line, given without its end; counts it as dropped where there is no room."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._has_room_for(data):
                self._append(data)
            else:
                self._dropped += 1
                self._dropped_in_all += 1
            self._start_writing()
            self._changed.notify_all()

    @property
    def trouble(self) -> str | None:
        """Why lines do not arrive, in words; None when they do."""
        with self._changed:
            lost = f"; {self._dropped} lines dropped so far" if self._dropped else ""
            if self._fault is not None:
                return f"the log cannot be written: {self._fault}{lost}"
            stalled = self._in_writing and time.monotonic() - self._moved_at > STALLED_SECONDS
            return f"nobody reads the log{lost}" if lost or stalled else None

    @property
    def dropped(self) -> int:
        """How many lines found no room, since the beginning."""
        with self._changed:
            return self._dropped_in_all

    @property
    def waiting(self) -> int:
        """How many lines are not written yet."""
        with self._changed:
            return len(self._lines) + self._in_doubt

    def finish(self) -> None:
        """The process ends: what can be written is, and how many lines cannot is told."""
        if self.flush():
            return
        with self._changed:
            lost = len(self._lines) + self._in_doubt + self._dropped
            why = self._fault or "nobody reads it"
        self._tell(f"dispatcher: the last {lost} lines of the log are lost: {why}")

    def flush(self, seconds: float = FLUSH_SECONDS, standstill: float = FLUSH_STANDSTILL_SECONDS) -> bool:
        """Waits until all is written, for up to `seconds`, or `standstill` seconds without any progress."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self._moved_at = max(self._moved_at, time.monotonic())
            while self._lines or self._in_writing:
                left = min(deadline, self._moved_at + standstill) - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """Nobody writes through it any more: its thread ends, as soon as a write it is in does."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(FLUSH_SECONDS)

    def _has_room_for(self, data: bytes) -> bool:
        return len(self._lines) < MAX_QUEUED_LINES and self._bytes + len(data) <= MAX_QUEUED_BYTES

    def _append(self, data: bytes) -> None:
        self._lines.append(data)
        self._bytes += len(data)

    def _start_writing(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_for_ever, name="log", daemon=True)
            self._thread.start()

    # -- in the thread

    def _write_for_ever(self) -> None:
        if _ends_in_half_a_line(self.fd):
            self._write_all(b"\n")
        while batch := self._next_batch():
            self._write_all(batch)

    def _next_batch(self) -> bytes:
        with self._changed:
            self._in_writing = False
            self._in_doubt = 0
            self._changed.notify_all()
            while not self._lines and not self._closed.is_set():
                self._changed.wait()
            if not self._lines:
                return b""
            self._in_writing = True
            self._moved_at = time.monotonic()
            batch = self._take()
            self._in_doubt = batch.count(b"\n")
            if self._dropped:
                self._append(self._dropped_line(self._dropped).encode("ascii", "backslashreplace") + b"\n")
                self._dropped = 0
            return batch

    def _take(self) -> bytes:
        taken = [self._lines.popleft()]
        size = len(taken[0])
        while self._lines and size + len(self._lines[0]) <= MAX_BATCH_BYTES:
            taken.append(self._lines.popleft())
            size += len(taken[-1])
        self._bytes -= size
        return b"".join(taken)

    def _write_all(self, data: bytes) -> None:
        """Returns when all of it is written, however long that takes; so no line is left half written."""
        left = memoryview(data)
        while left and not (self._fault and self._closed.is_set()):
            try:
                # A pipe takes so much at once or nothing of it: what has gone is known while the write waits.
                written = os.write(self.fd, left[: select.PIPE_BUF])
            except BlockingIOError:  # somebody else made the descriptor non-blocking
                select.select([], [self.fd], [], WRITABLE_SECONDS)
                continue
            except (OSError, ValueError) as error:
                self._cannot_write(error)
                continue
            whole_lines = bytes(left[:written]).count(b"\n")
            left = left[written:]
            self._went_forward(whole_lines)

    def _went_forward(self, whole_lines: int) -> None:
        with self._changed:
            self._fault = None
            self._in_doubt = max(0, self._in_doubt - whole_lines)
            self._moved_at = time.monotonic()
            self._changed.notify_all()

    def _cannot_write(self, error: OSError | ValueError) -> None:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        with self._changed:
            is_news = text != self._fault
            self._fault = text
        if is_news:
            self._tell(f"dispatcher: the log cannot be written: {text}; trying again, the work goes on")
        self._closed.wait(WRITE_AGAIN_SECONDS)


def _ends_in_half_a_line(fd: int) -> bool:
    """Whether a file to be appended to ends without a line end: an earlier process had no room for the rest."""
    with contextlib.suppress(OSError, ValueError):
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_size:
            with open(f"/proc/self/fd/{fd}", "rb") as file:  # noqa: PTH123 - the file itself, whatever its name
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
    return False


def say_on_stderr(text: str, seconds: float = STDERR_SECONDS) -> None:
    """One line on stderr; given up after `seconds` where nobody reads it."""
    stream = sys.stderr
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):  # not a real file, as in tests
        with contextlib.suppress(OSError, ValueError):
            stream.write(text + "\n")
        return
    data = f"{text}\n".encode(getattr(stream, "encoding", None) or "utf-8", "backslashreplace")
    writing = threading.Thread(target=_write_once, args=(fd, data), name="stderr", daemon=True)
    try:
        writing.start()
    except RuntimeError:  # the interpreter ends: no thread starts any more
        _write_if_room(fd, data, seconds)
        return
    writing.join(seconds)


def _write_if_room(fd: int, data: bytes, seconds: float) -> None:
    """As much as is sure not to wait: a pipe that can be written has room for PIPE_BUF bytes."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [fd], [], seconds)[1]:
            os.write(fd, data[: select.PIPE_BUF])


def _write_once(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data:
            data = data[os.write(fd, data) :]
