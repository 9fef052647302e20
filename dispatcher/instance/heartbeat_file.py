"""The heartbeat file: what this daemon last said of itself, for a health check on the same host.

It names gateway, instance and process, so that nobody takes another daemon's word for that of this one. Without
HEARTBEAT_FILE each daemon writes one of its own in a folder that only its user may enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dispatcher import events
from dispatcher.agents import proctable
from dispatcher.clock import SYSTEM_CLOCK, Clock, rfc3339_ms
from dispatcher.logs import get_logger

log = get_logger(__name__)

PRIVATE_FOLDERS: Final = Path("/tmp")  # noqa: S108 - the folder made in it is checked to be ours and closed to others
LARGEST_FILE: Final = 1024 * 1024
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class HeartbeatFileError(Exception):
    """The file cannot be trusted, read or written; the text says why."""


def private_folder() -> Path:
    """Where this user's daemons keep their heartbeat files when HEARTBEAT_FILE is unset."""
    return PRIVATE_FOLDERS / f"openclaw-dispatcher-{os.geteuid()}"


def own_file(configured: Path | None, gateway: str) -> Path:
    """The file of this process: HEARTBEAT_FILE, or one that names gateway and process."""
    return configured or private_folder() / f"{file_stem(gateway)}.{os.getpid()}.json"


def file_stem(gateway: str) -> str:
    """The gateway's slug as part of a file name; two slugs never share one."""
    fit = _UNFIT.sub("_", gateway)[:80]
    if fit == gateway and not fit.startswith("."):
        return fit
    return f"_{fit.lstrip('.')}-{hashlib.sha256(gateway.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def files_of(gateway: str | None) -> list[Path]:
    """The files of this user's daemons for that gateway (None: for any) in the private folder, by name.

    Raises HeartbeatFileError where that folder is not this user's alone.
    """
    folder = private_folder()
    if not _is_private(folder):
        return []
    pattern = re.compile(rf"{re.escape(file_stem(gateway)) if gateway else '.+'}\.\d+\.json\Z")
    return sorted(path for path in folder.iterdir() if pattern.match(path.name))


def read_heartbeat(file: Path) -> dict[str, Any] | None:
    """What the file says; None when there is none.

    Raises HeartbeatFileError for one that is a link, somebody else's, open to others, or no heartbeat.
    """
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HeartbeatFileError(f"{file} cannot be read: {error.strerror} (a link is not followed)") from error
    try:
        _refuse_what_is_not_ours(file, os.fstat(fd))
        with open(fd, "rb", closefd=False) as opened:
            return _facts(file, opened.read(LARGEST_FILE + 1))
    finally:
        os.close(fd)


def _refuse_what_is_not_ours(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise HeartbeatFileError(f"{file} is no regular file")
    if found.st_uid not in {os.geteuid(), 0}:
        raise HeartbeatFileError(
            f"{file} belongs to user {found.st_uid}, not to user {os.geteuid()}: ask as the user the daemon runs as"
        )
    if found.st_mode & _OTHERS_MAY_WRITE:
        raise HeartbeatFileError(f"{file} can be written by other users")


def _facts(file: Path, content: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(content) if len(content) <= LARGEST_FILE else None
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not _is_heartbeat(facts):
        raise HeartbeatFileError(f"{file} is no heartbeat of a daemon")
    return facts


def _is_heartbeat(facts: Mapping[str, Any]) -> bool:
    """Whether everything a verdict is made of is there, and is what it should be."""
    try:
        is_dated = datetime.fromisoformat(facts["ts"]).tzinfo is not None
        health, process = facts["health"], facts["process"]
        texts = (health["status"], *health["causes"], facts["gateway"], facts["instance_id"], process["host_id"])
        return (
            is_dated
            and all(isinstance(text, str) for text in texts)
            and isinstance(health["live"], bool)
            and isinstance(health["loops"], dict)
            and 0 < float(facts["written_every_s"]) < float("inf")
            and type(facts["pid"]) is int
            and (process["started_at"] is None or isinstance(process["started_at"], float | int))
        )
    except (KeyError, TypeError, ValueError):
        return False


def is_running(facts: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote these facts still runs; None where that cannot be told from here."""
    if facts["process"]["host_id"] != proctable.host_id():
        return None
    return proctable.is_alive(facts["pid"], facts["process"]["started_at"])


class HeartbeatFile:
    """Writes the file of this process, each time as a whole. What goes wrong is said once and kept in `trouble`."""

    def __init__(self, path: Path, gateway: str, instance_id: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = path
        self.trouble: str | None = None
        self._clock = clock
        self._has_written = False
        self._is_contested = False
        pid = os.getpid()
        self._identity: dict[str, Any] = {
            "gateway": gateway,
            "instance_id": instance_id,
            "pid": pid,
            "process": {"started_at": proctable.started_at(pid), "host_id": proctable.host_id()},
            "started": rfc3339_ms(clock.now()),
        }

    def write(self, facts: Mapping[str, Any]) -> None:
        """Writes {"ts", "gateway", "instance_id", "pid", …, **facts}; never raises for a file it cannot write."""
        content = json.dumps({"ts": rfc3339_ms(self._clock.now()), **self._identity, **facts})
        try:
            self._prepare()
            self._refuse_to_take_it_from_another()
            _replace(self.path, content)
        except (OSError, HeartbeatFileError) as error:
            self._fail("write", error)
            return
        self._has_written = True
        self.trouble = None

    def remove(self) -> None:
        """The daemon ends in good order: nobody should read its last words as news. As `write`, it never raises."""
        try:
            if self._has_written and self._is_ours():
                self.path.unlink(missing_ok=True)
        except OSError as error:
            self._fail("remove", error)

    def _prepare(self) -> None:
        folder = private_folder()
        if self.path.parent != folder:
            return
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _is_private(folder)
        if not self._has_written:
            _remove_those_of_the_dead(self._identity["gateway"])

    def _refuse_to_take_it_from_another(self) -> None:
        """Also not when that one dies: its own health check would take us for it."""
        found = self._found()
        if found is None or found["pid"] == self._identity["pid"]:
            return
        self._is_contested = self._is_contested or is_running(found) is True
        if self._is_contested:
            raise HeartbeatFileError(
                f"it is the file of process {found['pid']} (gateway {found['gateway']}); "
                "give each daemon a HEARTBEAT_FILE of its own, or none"
            )

    def _is_ours(self) -> bool:
        found = self._found()
        return found is not None and found["instance_id"] == self._identity["instance_id"]

    def _found(self) -> dict[str, Any] | None:
        try:
            return read_heartbeat(self.path)
        except HeartbeatFileError:
            return None

    def _fail(self, verb: str, error: OSError | HeartbeatFileError) -> None:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = f"Could not {verb} {self.path}: {cause}"
        is_news = self.trouble is None or verb == "remove"
        self.trouble = text
        if is_news:
            log.warning(events.HEARTBEAT_FILE_FAILED, msg=text, path=str(self.path))


def _is_private(folder: Path) -> bool:
    """False where the folder is absent. Raises HeartbeatFileError where it is not this user's alone."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise HeartbeatFileError(f"{folder} is no folder; remove it, or set HEARTBEAT_FILE")
    if found.st_uid != os.geteuid():
        raise HeartbeatFileError(f"{folder} belongs to user {found.st_uid}; remove it, or set HEARTBEAT_FILE")
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise HeartbeatFileError(f"{folder} is open to other users; remove it, or set HEARTBEAT_FILE")
    return True


def _remove_those_of_the_dead(gateway: str) -> None:
    """What earlier daemons of the gateway left when they were killed: a new one has taken their place."""
    for path in files_of(gateway):
        with contextlib.suppress(OSError, HeartbeatFileError):
            facts = read_heartbeat(path)
            if facts is not None and is_running(facts) is False:
                path.unlink(missing_ok=True)


def _replace(path: Path, content: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
