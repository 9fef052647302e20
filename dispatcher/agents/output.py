"""What a wake prints, kept in one bounded file each, or in memory.

The child writes to the file itself: no pipe that could fill, and nothing that breaks when this daemon dies
and the next one adopts the child. The bound is kept by cutting the file now and then; its tail stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 1024 * 1024
KEPT_TAIL: Final = MAX_BYTES // 2
# An answer is about 25 KB.
READ_TAIL: Final = 256 * 1024
MAX_FILES: Final = 200
# On a disk with less room than this a child would fail in its first print: it is better off without a file.
LEAST_ROOM: Final = 8 * MAX_BYTES
CUT_LINE: Final = b"[the beginning was cut]\n"

_UNFIT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")


class CapturedOutput:
    """What one wake prints, kept in memory until it is read: `fd` goes to the child, `trim` it now and then."""

    def __init__(self) -> None:
        """Raises OSError: no descriptor or memory is left."""
        self.fd = os.memfd_create("wake-output", os.MFD_CLOEXEC)
        # As for a file: the child goes on at the new end after a cut.
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_APPEND)

    def trim(self) -> None:
        """Cuts it to its tail when it has passed `MAX_BYTES`. What is written meanwhile may be lost."""
        with contextlib.suppress(OSError):
            size = os.fstat(self.fd).st_size
            if size > MAX_BYTES:
                tail = os.pread(self.fd, KEPT_TAIL, size - KEPT_TAIL)
                os.ftruncate(self.fd, 0)
                os.write(self.fd, CUT_LINE + tail)

    def tail(self) -> bytes:
        """The last of what was printed, at most `READ_TAIL` bytes."""
        try:
            size = os.fstat(self.fd).st_size
            return os.pread(self.fd, READ_TAIL, max(0, size - READ_TAIL))
        except OSError:
            return b""

    def close(self) -> None:
        """Gives it up."""
        os.close(self.fd)

    def discard(self) -> None:
        """Nothing was started: nothing is kept."""
        self.close()


class WakeOutput(CapturedOutput):
    """The output file of one wake: `fd` goes to the child; `trim` it now and then, `close` it at the end."""

    def __init__(self, directory: Path, agent: str, wake_id: str, started: datetime | None = None) -> None:
        """Makes the file, and room for it.

        Raises:
            OSError: the directory or the file cannot be made, or the disk is about to be full.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_oldest(directory, MAX_FILES - 1)
        _require_room(directory)
        self.path = directory / _file_name(agent, wake_id, started or datetime.now(UTC))
        # Appending, so that the child goes on at the new end after a cut.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)

    def close(self) -> None:
        """The last cut."""
        self.trim()
        os.close(self.fd)

    def discard(self) -> None:
        """Nothing was started: no file is kept."""
        self.close()
        self.path.unlink(missing_ok=True)


def _require_room(directory: Path) -> None:
    disk = os.statvfs(directory)
    if disk.f_bavail * disk.f_frsize < LEAST_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def remove_oldest(directory: Path, keep: int) -> None:
    """Leaves the `keep` newest files of wakes; their names begin with their time."""
    files = sorted(directory.glob("*.wake.log"))
    for path in files[: max(0, len(files) - keep)]:
        path.unlink(missing_ok=True)


def _file_name(agent: str, wake_id: str, started: datetime) -> str:
    agent_part, wake_part = (_UNFIT_IN_NAMES.sub("-", part)[:64] for part in (agent, wake_id))
    return f"{started:%Y%m%dT%H%M%S.%f}-{agent_part}-{wake_part}.wake.log"
