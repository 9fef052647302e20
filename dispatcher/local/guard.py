"""Becomes a program that dies with its parent. A script: `guard.py PARENT SIGNAL UID GID PROGRAM ARGS...`.

Standard library only and quick to start. The parent may be killed in the moment before the request to the
kernel; comparing the parent's id afterwards closes that gap.
"""

import os
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def kernel_request() -> Callable[[int], object]:
    """The function that asks the kernel for a signal at the parent's end. Only Linux has this."""
    if not sys.platform.startswith("linux"):
        return lambda _: None
    import ctypes  # noqa: PLC0415 - absent from the start-up of systems that have no use for it

    libc = ctypes.CDLL(None)
    return lambda death_signal: libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)


def drop_rights(uid: int, gid: int) -> None:
    """Switch to an unprivileged account; -1 keeps the present one."""
    if uid < 0:
        return
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def main(argv: list[str]) -> None:
    """Replace this process by the wanted program."""
    parent, death_signal, uid, gid = (int(value) for value in argv[1:5])
    # In this order: without rights the interpreter's own library may be out of reach, and giving rights up
    # clears the request.
    die_with_parent = kernel_request()
    drop_rights(uid, gid)
    die_with_parent(death_signal)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(argv[5], argv[5:])  # noqa: S606 - no shell: that is the purpose


if __name__ == "__main__":
    main(sys.argv)
