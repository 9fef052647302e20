"""Reading a file that others may have put where we look: regular, bounded, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
OTHERS_MAY_READ: Final = stat.S_IRGRP | stat.S_IROTH


def read_regular_file(path: Path, limit: int, *, follow_links: bool = True) -> tuple[bytes, os.stat_result]:
    """The content of a regular file of at most `limit` bytes, and the state of the very file that was read.

    A pipe or device is neither waited for nor read. Raises OSError, its `strerror` made for people.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        if found.st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
        return _read(fd, path, limit), found
    finally:
        os.close(fd)


def _read(fd: int, path: Path, limit: int) -> bytes:
    """The file may grow while it is read."""
    with open(fd, "rb", closefd=False) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def belongs_to_us(found: os.stat_result) -> bool:
    """Whether the file is this user's or root's."""
    return found.st_uid in {os.geteuid(), 0}
