"""The command line and the environment of a wake. Pure: nothing here starts anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dispatcher.text import CONTROL

WAKE_MARKER: Final = "DISPATCHER_WAKE_ID"
# Linux takes 128 KiB for one argument; the whole command line stays below this, ends counted.
MAX_COMMAND_BYTES: Final = 100 * 1024 - 1
MAX_OPTION_CHARACTERS: Final = 200
CUT_MARK: Final = "\n[cut]"

# What a command line program needs to know where and for whom it runs. PYTHON*, SSH_*, cloud credentials and
# the daemon's own settings are not among it.
ALLOWED_NAMES: Final = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM"),
        *("TMPDIR", "TMP", "TEMP", "HOSTNAME", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("NODE_EXTRA_CA_CERTS", "NODE_OPTIONS", "NODE_PATH", "NODE_USE_SYSTEM_CA", "NODE_COMPILE_CACHE"),
    }
)
ALLOWED_PREFIXES: Final = ("LC_", "XDG_", "OPENCLAW_")
# Handed on where a host has no other way out; one with a password in it only when named for passing on.
PROXY_NAMES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})

_UNFIT_IN_TEXT: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def option_value(value: object) -> str | None:
    """`value` as the value of `--model` or `--thinking`; None when it is not usable as one.

    Usable is a non-empty string without control characters that cannot be taken for an option.
    """
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_OPTION_CHARACTERS:
        return None
    return None if value.startswith("-") or CONTROL.search(value) else value


def build_argv(
    executable: str, agent_id: str, message: str, *, model: object = None, thinking: object = None
) -> list[str]:
    """The argv of one wake; an unusable `model` or `thinking` is left out.

    The message loses control characters, and its end where the whole would pass `MAX_COMMAND_BYTES`.
    """
    argv = [executable, "agent", "--agent", agent_id]
    for option, value in (("--model", option_value(model)), ("--thinking", option_value(thinking))):
        argv += [option, value] if value is not None else []
    argv += ["--json", "--message"]
    room = MAX_COMMAND_BYTES - command_bytes(argv) - 1
    return [*argv, _cut(_UNFIT_IN_TEXT.sub("", message), room)]


def command_bytes(argv: Iterable[str]) -> int:
    """What the arguments take in the kernel's count: their bytes and one end each."""
    return sum(len(argument.encode("utf-8", "surrogateescape")) + 1 for argument in argv)


def _cut(text: str, room: int) -> str:
    encoded = text.encode()
    if len(encoded) <= room:
        return text
    return encoded[: max(0, room - len(CUT_MARK))].decode("utf-8", "ignore") + CUT_MARK


def child_environment(
    environ: Mapping[str, str],
    wake_id: str,
    *,
    passthrough: Iterable[str] = (),
    secrets: Iterable[str] = (),
    openclaw: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a wake: what the allow-list lets through of `environ`, and what a wake needs.

    A variable that holds one of `secrets` is left out whatever its name, unless `passthrough` names it.
    `openclaw` (see `state_environment`) is added where `environ` does not say it already.
    """
    named = frozenset(passthrough)
    hidden = tuple(secret for secret in secrets if secret)
    kept = {
        name: value
        for name, value in environ.items()
        if name in named or (_is_allowed(name, value) and not any(secret in value for secret in hidden))
    }
    return {**(openclaw or {}), **kept, "OPENCLAW_NO_RESPAWN": "1", WAKE_MARKER: wake_id}


def _is_allowed(name: str, value: str) -> bool:
    if name.lower() in PROXY_NAMES:
        return "@" not in value or urlsplit(value).password is None
    return name in ALLOWED_NAMES or name.startswith(ALLOWED_PREFIXES)


def state_environment(environ: Mapping[str, str], home: Path, config_path: Path | None) -> dict[str, str]:
    """What tells the OpenClaw command line to use the state whose `openclaw.json` we read.

    `OPENCLAW_HOME=/x` means `/x/.openclaw` to it; where `/x` is the state directory itself (containers), it
    has to be named as such. With nothing set both use `~/.openclaw`, and nothing needs saying.
    """
    if "OPENCLAW_STATE_DIR" in environ or "OPENCLAW_CONFIG_PATH" in environ:
        return {}
    default_state = Path(environ.get("HOME", "~")) / ".openclaw"
    is_default = "OPENCLAW_HOME" not in environ and home == default_state
    its_state = default_state if is_default else home / ".openclaw"
    added = {} if is_default or "OPENCLAW_HOME" in environ else {"OPENCLAW_HOME": str(home)}
    if config_path is not None and config_path.parent != its_state:
        added["OPENCLAW_STATE_DIR"] = str(config_path.parent)
    return added
