"""Facts about the installed OpenClaw."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from dispatcher import events
from dispatcher.errors import OpenclawMissing
from dispatcher.files import read_regular_file
from dispatcher.logs import get_logger

log = get_logger(__name__)

Version = tuple[int, int, int, int]

# These run an accepted prompt a second time, embedded, after waiting 630 s for the Gateway.
FIRST_AFFECTED: Final[Version] = (2026, 6, 11, 0)
LAST_AFFECTED: Final[Version] = (2026, 7, 1, 2)

MAX_PACKAGE_BYTES: Final = 1024 * 1024
_VERSION: Final = re.compile(r"\b(20\d\d)\.(\d{1,2})\.(\d{1,2})(?:-(\d+))?\b")


def find_executable(openclaw_bin: str, search_path: str | None = None) -> str:
    """The absolute path of the executable; a name without a slash is looked up on `search_path` (PATH).

    Raises:
        OpenclawMissing: there is no such executable file.
    """
    found = shutil.which(openclaw_bin, path=search_path)
    if found is not None:
        return os.path.abspath(found)  # noqa: PTH100 - a link such as /usr/bin/openclaw is called by its own name
    if "/" in openclaw_bin:
        reason = "is not executable" if Path(openclaw_bin).exists() else "does not exist"
        raise OpenclawMissing(f"OPENCLAW_BIN={openclaw_bin}: {reason}")
    raise OpenclawMissing(f"OPENCLAW_BIN={openclaw_bin}: not found on PATH; install it or give its full path")


def parse_version(text: str) -> Version | None:
    """The first version in `text`: 2026.7.1-2 is (2026, 7, 1, 2)."""
    found = _VERSION.search(text)
    if found is None:
        return None
    year, month, patch, build = (int(part or 0) for part in found.groups())
    return (year, month, patch, build)


def runs_prompts_twice(version: Version) -> bool:
    """Whether this release may run an accepted prompt a second time by itself."""
    return FIRST_AFFECTED <= version <= LAST_AFFECTED


def installed_version(executable: str) -> Version | None:
    """The version its package.json names, without running anything; None when there is none to be found."""
    for folder in list(Path(executable).resolve().parents)[:3]:
        try:
            package = json.loads(read_regular_file(folder / "package.json", MAX_PACKAGE_BYTES)[0])
        except (OSError, ValueError):
            continue
        if isinstance(package, dict) and package.get("name") == "openclaw":
            return parse_version(str(package.get("version", "")))
    return None


def warn_of_affected_version(executable: str) -> bool:
    """Logs one warning when the installed release may run a prompt twice; whether it did."""
    installed = installed_version(executable)
    if installed is None or not runs_prompts_twice(installed):
        return False
    log.warning(
        events.OPENCLAW_AFFECTED,
        msg="This OpenClaw runs an accepted prompt a second time after 630 s without an answer: update it",
        openclaw_version="{}.{}.{}-{}".format(*installed),
        executable=executable,
    )
    return True


def version(executable: str, timeout: float = 10.0) -> Version | None:
    """The version the executable itself names; None when it names none within `timeout` seconds.

    It starts a process: for the operator's commands, not for the daemon's start.
    """
    try:
        answer = subprocess.run(
            [executable, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
            env={**os.environ, "OPENCLAW_NO_RESPAWN": "1"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_version(answer.stdout.decode("utf-8", "replace"))
