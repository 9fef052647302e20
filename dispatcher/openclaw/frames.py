"""The frames of the Gateway's WebSocket RPC, protocol 4. Pure.

First comes the event `connect.challenge`; our first request is `connect`; answers carry the id of their request and
may come out of order; events come at any time in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.errors import GatewayBarred, GatewayError, GatewayRefused, GatewayUnavailable

PROTOCOL: Final = 4
# On loopback this client and mode need no device pairing; any other is refused or loses its scopes.
CLIENT: Final = {"id": "gateway-client", "mode": "backend", "platform": "linux", "displayName": "openclaw-dispatcher"}
# admin: only that may abort a turn which another connection has started.
SCOPES: Final = ("operator.read", "operator.write", "operator.admin")
CHALLENGE: Final = "connect.challenge"
SUSPENSION: Final = "gateway.suspension"
SHUTDOWN: Final = "shutdown"
ACCEPTING: Final = "accepting"
_EVENT_START: Final = '{"type":"event","event":"'
# Events nobody here reads come with every word an agent says.
READ_EVENTS: Final = frozenset({CHALLENGE, SUSPENSION, SHUTDOWN})
_SHOWN: Final = 300

# Why a connect is refused for good: what is wrong, and what mends it.
_BARRED: Final = {
    "AUTH_TOKEN_MISMATCH": "the Gateway refuses our token; check gateway.auth.token or OPENCLAW_GATEWAY_TOKEN",
    "AUTH_PASSWORD_MISMATCH": "the Gateway refuses our password; check gateway.auth.password",
    "DEVICE_IDENTITY_REQUIRED": "the Gateway wants a token or a paired device; set gateway.auth.token",
}


@dataclass(frozen=True, slots=True)
class Hello:
    """What the Gateway says of itself. `boot_id` is another after each of its starts."""

    boot_id: str
    version: str
    phase: str
    missing_scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Response:
    """The answer to the request of that id: its payload, or the error it means."""

    id: str
    payload: Any
    error: GatewayError | None


@dataclass(frozen=True, slots=True)
class Event:
    """Something the Gateway tells everybody."""

    name: str
    payload: Any


def connect_params(auth: Mapping[str, str], version: str) -> dict[str, Any]:
    """The parameters of `connect`."""
    return {
        "minProtocol": PROTOCOL,
        "maxProtocol": PROTOCOL,
        "role": "operator",
        "scopes": list(SCOPES),
        "caps": [],
        "auth": dict(auth),
        "client": {**CLIENT, "version": version},
    }


def request(number: str, method: str, params: Mapping[str, Any]) -> str:
    """One request as text."""
    return json.dumps({"type": "req", "id": number, "method": method, "params": params})


def read_frame(text: str | bytes) -> Response | Event | None:
    """What a frame says; None for what nobody here reads, and for what is no frame."""
    if isinstance(text, bytes) or _is_unread_event(text):
        return None
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(frame, dict):
        return None
    if frame.get("type") == "event":
        return Event(str(frame.get("event")), frame.get("payload"))
    if frame.get("type") == "res":
        error = None if frame.get("ok") is True else read_error(frame.get("error"))
        return Response(str(frame.get("id")), frame.get("payload"), error)
    return None


def _is_unread_event(text: str) -> bool:
    """By its first characters: most events are never parsed."""
    if not text.startswith(_EVENT_START):
        return False
    name, _quote, _rest = text[len(_EVENT_START) : len(_EVENT_START) + 64].partition('"')
    return name not in READ_EVENTS


def read_error(error: object) -> GatewayError:
    """The error a refusal means: the Gateway is not ready, or it does not want this request."""
    fields = error if isinstance(error, Mapping) else {}
    details = fields.get("details")
    details = details if isinstance(details, Mapping) else {}
    code, text = str(fields.get("code") or "UNKNOWN"), str(fields.get("message") or "no reason given")[:_SHOWN]
    reason = str(details.get("code") or details.get("reason") or "")
    if code == "UNAVAILABLE" and is_environment(text, reason):
        return GatewayUnavailable(text, reason=reason)
    return GatewayRefused(text, code=code, reason=reason)


def is_environment(text: str, reason: str) -> bool:
    """Whether UNAVAILABLE speaks of the Gateway itself; a session that changed in the same moment is another matter."""
    if reason.startswith(("startup", "gateway")):
        return True
    return any(word in text.lower() for word in ("gateway starting", "draining", "gateway restart", "suspend"))


def barred_by(error: GatewayRefused) -> GatewayBarred:
    """Why `connect` was refused, in words that name what to look at."""
    if error.reason in _BARRED:
        return GatewayBarred(_BARRED[error.reason])
    if error.reason == "PROTOCOL_MISMATCH" or "protocol mismatch" in error.message:
        return GatewayBarred(f"the Gateway does not speak protocol {PROTOCOL}: another version of OpenClaw")
    return GatewayBarred(f"the Gateway refuses us: {error.message}")


def read_hello(payload: object) -> Hello:
    """The payload of an accepted `connect`.

    Raises:
        GatewayBarred: it is of another protocol.
    """
    fields = payload if isinstance(payload, Mapping) else {}
    protocol = fields.get("protocol")
    if protocol != PROTOCOL:
        raise GatewayBarred(f"the Gateway speaks protocol {protocol!a:.20}, the dispatcher {PROTOCOL}")
    server, snapshot, auth = (_mapping(fields.get(name)) for name in ("server", "snapshot", "auth"))
    granted = auth.get("scopes")
    missing = tuple(scope for scope in SCOPES if scope not in granted) if isinstance(granted, list) else ()
    return Hello(
        boot_id=str(server.get("bootId") or ""),
        version=str(server.get("version") or ""),
        phase=read_phase(snapshot.get("suspension")),
        missing_scopes=missing,
    )


def read_phase(suspension: object) -> str:
    """`accepting`, or what keeps the Gateway from taking work."""
    return str(_mapping(suspension).get("phase") or ACCEPTING)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
