"""Where the values of settings stand, and which of these places is believed in what.

The environment and `$OPENCLAW_HOME/secrets/gateway.env` are the operator's. The `.env` of the working directory is
whatever folder a command happens to be called in, a clone of a stranger's repository among them. It may say for whom
we work and how often we look. It never says where secrets go, what is executed or where is written, and a key is
used with the URL that stands beside it, or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Final

from dotenv import dotenv_values

from dispatcher.files import OTHERS_MAY_READ, OTHERS_MAY_WRITE, belongs_to_us, read_regular_file

DEFAULT_OPENCLAW_HOME: Final = "~/.openclaw"
GATEWAY_ENV_PLACES: Final = ("secrets/gateway.env", ".openclaw/secrets/gateway.env")
MAX_ENV_FILE_BYTES: Final = 64 * 1024
URL: Final = "SUPABASE_URL"
KEY: Final = "SUPABASE_SERVICE_ROLE_KEY"


@dataclass(frozen=True)
class Source:
    """One place: what people call it, and its values by name, none of them empty."""

    name: str
    values: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Gathered:
    """All values by name, merged; what was wrong with the places; what deserves a warning."""

    values: Mapping[str, str] = field(repr=False)
    faults: Sequence[str]
    warnings: Sequence[str]


def gather(environ: Mapping[str, str], cwd: Path, not_from_folder: Collection[str]) -> Gathered:
    """The values of every place; the first place that has one wins.

    Args:
        environ: of this process.
        cwd: whose `.env` is read.
        not_from_folder: names that this `.env` may not set.
    """
    faults: list[str] = []
    warnings: list[str] = []
    environment = Source("the environment", given(environ))
    folder = _folder_source(cwd / ".env", faults)
    home = expand_home(environment.values.get("OPENCLAW_HOME", DEFAULT_OPENCLAW_HOME), environ)
    gateway = _gateway_source(home, faults, warnings)
    faults += _misplaced(folder, not_from_folder - environment.values.keys())
    faults += _torn_pair((environment, folder, gateway))
    local = {**folder.values, **environment.values}
    # YourHQ's containers are given `default` until onboarding has written a name; its seed has a gateway so called.
    if local.get("GATEWAY_ID") == "default" and "GATEWAY_ID" in gateway.values:
        del local["GATEWAY_ID"]
    return Gathered({**gateway.values, **local, "OPENCLAW_HOME": str(home)}, faults, warnings)


def given(values: Mapping[str, str | None]) -> dict[str, str]:
    """Without what is empty: compose files and CI pass `NAME=` for what is not set."""
    return {name: value.strip() for name, value in values.items() if value is not None and value.strip()}


def expand_home(path: str, environ: Mapping[str, str]) -> Path:
    """`~` by the given environment, so that a test or a check decides whose home it is."""
    home = environ.get("HOME")
    if home and (path == "~" or path.startswith("~/")):
        return Path(home + path[1:])
    try:
        return Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError:  # nobody of that name: the setting's own check says so
        return Path(path)


# ---------------------------------------------------------------------------------------------- whom to believe


def _misplaced(folder: Source, not_from_folder: Collection[str]) -> list[str]:
    return [
        f"{name} in {folder.name}: never taken from the .env of a folder, because it says where secrets go, what is "
        "executed or where is written; set it in the environment or in secrets/gateway.env"
        for name in folder.values
        if name in not_from_folder
    ]


def _torn_pair(sources: Sequence[Source]) -> list[str]:
    """A key goes to the URL beside it: another place must not send it elsewhere."""
    url = next((source for source in sources if URL in source.values), None)
    key = next((source for source in sources if KEY in source.values), None)
    if url is None or key is None or _same_url(url.values[URL], key.values.get(URL, "")):
        return []
    told = f"{URL} is from {url.name}, {KEY} from {key.name}"
    return [f"{told}: a key is only sent to the URL that stands beside it; set both in one place"]


def _same_url(one: str, other: str) -> bool:
    return one.rstrip("/") == other.rstrip("/")


# ---------------------------------------------------------------------------------------------- the files


def _folder_source(path: Path, faults: list[str]) -> Source:
    """`.env` of the working directory: ours, and nobody else's to write. A folder of that name is none of it."""
    try:
        link = path.lstat()
        if path.is_dir():
            return Source(str(path))
        content, found = read_regular_file(path, MAX_ENV_FILE_BYTES)
        if not (belongs_to_us(link) and belongs_to_us(found)):
            faults.append(f"{path}: belongs to another user; remove it, or work in another folder")
        elif found.st_mode & OTHERS_MAY_WRITE:
            faults.append(f"{path}: can be written by other users; type: chmod go-w {path}")
        else:
            return Source(str(path), _parsed(content))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, UnicodeError) as error:
        faults.append(f"{path}: cannot be read ({_reason(error)})")
    return Source(str(path))


def _gateway_source(home: Path, faults: list[str], warnings: list[str]) -> Source:
    for place in GATEWAY_ENV_PLACES:
        path = home / place
        try:
            content, found = read_regular_file(path, MAX_ENV_FILE_BYTES)
            values = _parsed(content)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeError) as error:
            faults.append(f"{path}: cannot be read ({_reason(error)})")
            continue
        if values:
            _judge_gateway_file(path, found, KEY in values, faults, warnings)
            return Source(str(path), values)
    return Source(str(home / GATEWAY_ENV_PLACES[0]))


def _judge_gateway_file(
    path: Path, found: os.stat_result, has_key: bool, faults: list[str], warnings: list[str]
) -> None:
    """The gateway's container may own it; that everybody may write it is never meant."""
    if found.st_mode & stat.S_IWOTH:
        faults.append(f"{path}: can be written by every user; type: chmod o-w {path}")
    elif has_key and found.st_mode & (OTHERS_MAY_READ | OTHERS_MAY_WRITE):
        mode = stat.S_IMODE(found.st_mode)
        warnings.append(f"{path} holds the service key and is open to other users (mode {mode:04o}): chmod 600 {path}")
    elif has_key and not belongs_to_us(found):
        warnings.append(f"{path} holds the service key and belongs to user {found.st_uid}, not to the daemon's user")


def _parsed(content: bytes) -> dict[str, str]:
    """Names and values of a dotenv file. Values are taken literally."""
    return given(dotenv_values(stream=StringIO(content.decode("utf-8-sig")), interpolate=False))


def _reason(error: OSError | UnicodeError) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "not UTF-8 text"
