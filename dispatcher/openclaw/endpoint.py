"""Where OpenClaw's Gateway listens and how it lets us in, from `openclaw.json` and the environment. Pure.

The environment's names and their order are OpenClaw's: OPENCLAW_GATEWAY_URL, then `gateway.mode: remote`, then the
local Gateway at OPENCLAW_GATEWAY_PORT or `gateway.port`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from dispatcher.errors import GatewayBarred

DEFAULT_PORT: Final = 18789
URL_VARIABLE: Final = "OPENCLAW_GATEWAY_URL"
PORT_VARIABLE: Final = "OPENCLAW_GATEWAY_PORT"
TOKEN_VARIABLE: Final = "OPENCLAW_GATEWAY_TOKEN"  # noqa: S105 - the name of a variable
PASSWORD_VARIABLE: Final = "OPENCLAW_GATEWAY_PASSWORD"  # noqa: S105 - the same
LARGEST_PORT: Final = 65_535

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One Gateway. `auth` is what `connect` sends: {"token"} or {"password"}, or empty where none is asked for."""

    url: str
    auth: Mapping[str, str] = field(default_factory=dict, repr=False)


def find_endpoint(config: object, environ: Mapping[str, str]) -> Endpoint | None:
    """The Gateway this host's OpenClaw uses; None when none is configured, here or in the environment.

    Raises:
        GatewayBarred: there is one, but only OpenClaw's own command line can reach it; the text says why.
    """
    gateway = _part(config, "gateway")
    named = environ.get(URL_VARIABLE, "").strip()
    if named:
        # As OpenClaw does it: what the file holds is not meant for another address.
        return Endpoint(_loopback_url(named, URL_VARIABLE), _auth({}, environ))
    if gateway.get("mode") == "remote":
        remote = _part(gateway, "remote")
        return Endpoint(_loopback_url(str(remote.get("url") or ""), "gateway.remote.url"), _auth(remote, environ))
    if gateway.get("mode") != "local" and not environ.get(PORT_VARIABLE, "").strip():
        return None
    if _part(gateway, "tls").get("enabled") is True:
        raise GatewayBarred("the Gateway speaks TLS (gateway.tls.enabled), which the link does not")
    return Endpoint(f"ws://127.0.0.1:{_port(gateway, environ)}/", _auth(_part(gateway, "auth"), environ))


def _part(config: object, name: str) -> Mapping[str, Any]:
    part = config.get(name) if isinstance(config, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _port(gateway: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    for given in (environ.get(PORT_VARIABLE), gateway.get("port")):
        text = str(given or "").strip()
        if text.isascii() and text.isdecimal() and 0 < int(text) <= LARGEST_PORT:
            return int(text)
    return DEFAULT_PORT


def _loopback_url(url: str, name: str) -> str:
    """The URL when it is a plain one of this host. The Gateway lets nobody else in without pairing."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise GatewayBarred(f"{name} is no URL") from None
    if not _is_loopback(host):
        raise GatewayBarred(f"the Gateway is remote ({name} is at {host or 'no host'})")
    if parts.scheme not in {"ws", "http"}:
        raise GatewayBarred(f"{name} is not a ws:// URL")
    shown = f"[{host}]" if ":" in host else host
    return f"ws://{shown}:{port or 80}/"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _auth(section: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """What to present. The Gateway asks for what `mode` names; without it for what there is, the token first."""
    mode = section.get("mode")
    if mode == "none":
        return {}
    wanted = ("password",) if mode in {"password", "trusted-proxy"} else ("token", "password")
    for name in wanted:
        variable = TOKEN_VARIABLE if name == "token" else PASSWORD_VARIABLE
        value = _secret(section.get(name), f"gateway {name}", environ) or environ.get(variable, "").strip()
        if value:
            return {name: value}
    return {}


def _secret(value: object, what: str, environ: Mapping[str, str]) -> str:
    """A text with its `${NAME}` filled in, or a reference to a variable; "" when it is not given.

    Raises:
        GatewayBarred: it stands where only OpenClaw can read it.
    """
    if isinstance(value, str):
        missing = [name for name in _VARIABLE.findall(value) if not environ.get(name)]
        if missing:
            raise GatewayBarred(f"the {what} is in {missing[0]}, which is not set for the dispatcher")
        return _VARIABLE.sub(lambda found: environ[found[1]], value).strip()
    if isinstance(value, Mapping):
        variable = str(value.get("id"))
        if value.get("source") == "env" and environ.get(variable):
            return environ[variable].strip()
        raise GatewayBarred(f"the {what} is a secret reference that only OpenClaw can read; set {TOKEN_VARIABLE}")
    return ""
