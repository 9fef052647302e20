"""Who the agent is and where its HQ answers: environment, then the gateway's secrets, then the agent's own.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_TENANT = "00000000-0000-0000-0000-000000000000"
# Which wake this command belongs to; the daemon sets it for the process it starts.
WAKE_MARKER = "DISPATCHER_WAKE_ID"
ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$")
QUOTED = re.compile(r"""^(?:"((?:[^"\\]|\\.)*)"|'([^']*)')\s*(?:#.*)?$""")
MAX_FILE_BYTES = 64 * 1024
MAX_AUTHORITIES_BYTES = 8 * 1024 * 1024
URL, KEY = "SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY"
# They say where the key goes: a workspace may be a stranger's, so its own file never sets them.
NOT_FROM_WORKSPACE = ("SUPABASE_CA_FILE", "SUPABASE_PROXY")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class UsageError(Exception):
    """The command was called wrongly or lacks a setting: exit 2, message on stderr."""


@dataclass(frozen=True)
class Settings:
    """What a command needs to know. The key is never part of a text form of this object."""

    agent: str
    tenant_id: str
    url: str
    key: str = field(repr=False)
    call_timeout: float
    state_folders: tuple[Path, ...]
    ca_file: str = ""
    proxy: str = field(default="", repr=False)
    wake_id: str | None = None


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Find every setting, or raise `UsageError` that names all that is missing or wrong."""
    workspace = find_workspace()
    agent = environ.get("AGENT_SLUG", "").strip() or workspace.name
    homes = openclaw_homes(environ)
    sources = [Source("the environment", given(environ)), *read_sources(homes, workspace, agent)]
    found = merged_values(sources)
    faults = [*find_faults(agent, found), *torn_pair(sources), *misplaced(sources)]
    if faults:
        raise UsageError("; ".join(faults))
    return Settings(
        agent=agent,
        tenant_id=found.get("TENANT_ID", DEFAULT_TENANT),
        url=found["SUPABASE_URL"].rstrip("/"),
        key=found["SUPABASE_SERVICE_ROLE_KEY"],
        call_timeout=float(found.get("HQ_CALL_TIMEOUT", "10")),
        state_folders=state_folders(environ, homes, workspace),
        ca_file=expanded(found.get("SUPABASE_CA_FILE", "")),
        proxy=found.get("SUPABASE_PROXY", ""),
        wake_id=environ.get(WAKE_MARKER, "").strip().lower() or None,
    )


def find_faults(agent: str, found: Mapping[str, str]) -> list[str]:
    """Every missing or unusable setting in words; values of secrets are not repeated."""
    faults = []
    if not agent:
        faults.append("the agent is unknown: set AGENT_SLUG or run from a folder that holds agent.json")
    missing = [name for name in ("SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY") if not found.get(name)]
    if missing:
        faults.append(
            f"missing {' and '.join(missing)}: looked in the environment, "
            "$OPENCLAW_HOME/secrets/gateway.env and secrets/agents/<slug>.env"
        )
    if found.get("SUPABASE_URL") and not re.match(r"^https?://[^/\s]+", found["SUPABASE_URL"]):
        faults.append("SUPABASE_URL must begin with http:// or https:// and name a host")
    if re.search(r"[^\x21-\x7e]", found.get("SUPABASE_SERVICE_ROLE_KEY", "")):
        faults.append("SUPABASE_SERVICE_ROLE_KEY holds a blank or a character no key has")
    if found.get("TENANT_ID") and not is_uuid(found["TENANT_ID"]):
        faults.append("TENANT_ID must be a uuid")
    faults += network_faults(expanded(found.get("SUPABASE_CA_FILE", "")), found.get("SUPABASE_PROXY", ""))
    if found.get(WAKE_MARKER) and not is_uuid(found[WAKE_MARKER]):
        faults.append(f"{WAKE_MARKER} must be a uuid: the daemon sets it, nobody else should")
    if found.get("HQ_CALL_TIMEOUT") and not is_seconds(found["HQ_CALL_TIMEOUT"], 0.1, 120):
        faults.append("HQ_CALL_TIMEOUT must be 0.1 to 120 seconds")
    return faults


def expanded(path: str) -> str:
    """A path with its `~` resolved; empty for none."""
    return str(Path(path).expanduser()) if path else ""


def network_faults(ca_file: str, proxy: str) -> Iterator[str]:
    """What is wrong with the file of authorities and with the proxy, whose password is not repeated."""
    if ca_file:
        try:
            read_regular_file(Path(ca_file), MAX_AUTHORITIES_BYTES)
            ssl.create_default_context().load_verify_locations(ca_file)
        except ssl.SSLError:
            yield f"SUPABASE_CA_FILE={ca_file}: no certificate in PEM format is in it"
        except OSError as error:
            yield f"SUPABASE_CA_FILE={ca_file}: cannot be read ({error.strerror})"
    if proxy and not is_http_proxy(proxy):
        yield "SUPABASE_PROXY must be http://[user:password@]host:port"


def is_http_proxy(text: str) -> bool:
    """Whether the text is the URL of a proxy that is spoken to in HTTP."""
    try:
        parts = urlsplit(text)
        return parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def is_uuid(text: str) -> bool:
    """Whether the text is a uuid in its usual form."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def is_seconds(text: str, lowest: float, highest: float) -> bool:
    """Whether the text is a number of seconds within bounds."""
    try:
        return lowest <= float(text) <= highest
    except ValueError:
        return False


def find_workspace() -> Path:
    """The agent's folder, see `own_workspace`; where nothing tells one, the working folder."""
    return own_workspace() or Path.cwd()


def own_workspace() -> Path | None:
    """The agent's folder: the nearest one with agent.json above this script, then above the working folder.

    Without an agent.json it is what holds `skills/hq/scripts`, else None. Links are not followed: a skill
    shared by link belongs to the workspace it is reached through.
    """
    scripts = Path(os.path.abspath(sys.argv[0])).parent  # noqa: PTH100 - Path.resolve() would follow links
    for start in (scripts, Path.cwd()):
        for folder in (start, *start.parents):
            if (folder / "agent.json").is_file():
                return folder
    return scripts.parents[2] if scripts.parts[-3:] == ("skills", "hq", "scripts") else None


def openclaw_homes(environ: Mapping[str, str]) -> list[Path]:
    """Where OpenClaw's state may lie: OPENCLAW_HOME itself (as in YourHQ's containers) or .openclaw in it."""
    named = environ.get("OPENCLAW_HOME", "").strip()
    home = Path(named).expanduser() if named else Path.home() / ".openclaw"
    return [home, home / ".openclaw"]


def secret_files(homes: list[Path], workspace: Path, agent: str) -> list[Path]:
    """The files that may hold settings, the first word counts; that of the workspace is the last."""
    files = [home / "secrets" / "gateway.env" for home in homes]
    if re.match(r"^[^./\\\x00][^/\\\x00]*$", agent):
        files += [root / "secrets" / "agents" / f"{agent}.env" for root in (*homes, workspace)]
    return files


@dataclass(frozen=True)
class Source:
    """One place of settings: its name for people, its values, and whether it lies in the workspace."""

    name: str
    values: Mapping[str, str] = field(repr=False)
    is_workspace: bool = False


def read_sources(homes: list[Path], workspace: Path, agent: str) -> list[Source]:
    """The files with their values; raises `UsageError` for one that others could have written."""
    own_file = workspace / "secrets" / "agents" / f"{agent}.env"
    sources = []
    for path in secret_files(homes, workspace, agent):
        is_workspace = path == own_file and workspace not in homes
        sources.append(Source(str(path), given(read_env_file(path, is_ours=is_workspace)), is_workspace))
    return sources


def given(values: Mapping[str, str]) -> dict[str, str]:
    """Without what is empty."""
    return {name: value.strip() for name, value in values.items() if value.strip()}


def merged_values(sources: Sequence[Source]) -> dict[str, str]:
    """All values; what stands earlier wins."""
    found: dict[str, str] = {}
    for source in reversed(sources):
        found.update(source.values)
    return found


def torn_pair(sources: Sequence[Source]) -> Iterator[str]:
    """A key goes to the URL that stands beside it: another place must not send it elsewhere."""
    url = next((source for source in sources if URL in source.values), None)
    key = next((source for source in sources if KEY in source.values), None)
    if url and key and url.values[URL].rstrip("/") != key.values.get(URL, "").rstrip("/"):
        yield (
            f"{URL} is from {url.name}, {KEY} from {key.name}: a key is only sent to the URL that stands beside it; "
            "set both in one place"
        )


def misplaced(sources: Sequence[Source]) -> Iterator[str]:
    """What the workspace's own file sets, though it says where the key goes."""
    for number, source in enumerate(sources):
        for name in NOT_FROM_WORKSPACE if source.is_workspace else ():
            if name in source.values and not any(name in earlier.values for earlier in sources[:number]):
                yield f"{name} in {source.name} is not taken from a workspace: set it in secrets/gateway.env"


def read_env_file(path: Path, *, is_ours: bool = False) -> dict[str, str]:
    """The assignments of a dotenv file (export, quotes, comments); empty when it cannot be read.

    Raises `UsageError` for one that every user may write, or, where it has to be ours, that is another user's.
    """
    try:
        content, found = read_regular_file(path, MAX_FILE_BYTES)
    except (OSError, ValueError):
        return {}
    if found.st_mode & stat.S_IWOTH:
        raise UsageError(f"{path} can be written by every user: chmod o-w {path}")
    if is_ours and found.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{path} belongs to another user: remove it, or set AGENT_SLUG and work elsewhere")
    text = content.decode("utf-8", "replace")
    matches = (ASSIGNMENT.match(line) for line in text.lstrip("\ufeff").splitlines())
    return {match.group(1): unquote(match.group(2)) for match in matches if match}


def read_regular_file(path: Path, limit: int) -> tuple[bytes, os.stat_result]:
    """The content and state of a regular file of bounded size; a pipe or device is neither waited for nor read."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            raise OSError(errno.EINVAL, f"no regular file of at most {limit} bytes", str(path))
        return os.read(descriptor, limit), found
    finally:
        os.close(descriptor)


def unquote(raw: str) -> str:
    """A dotenv value without its quotes or its trailing comment."""
    quoted = QUOTED.match(raw)
    if quoted is None:
        return re.split(r"(?:^|\s)#", raw, maxsplit=1)[0].strip()
    if quoted.group(1) is None:
        return quoted.group(2)
    return re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape.group(1), escape.group(1)), quoted.group(1))


def state_folders(environ: Mapping[str, str], homes: list[Path], workspace: Path) -> tuple[Path, ...]:
    """Where lease tokens may be kept, best first: HQ_STATE_DIR alone, else OpenClaw's state, workspace."""
    named = environ.get("HQ_STATE_DIR", "").strip()
    if named:
        return (Path(named).expanduser(),)
    return (*(home / "state" / "hq" for home in reversed(homes) if home.is_dir()), workspace / ".hq")
