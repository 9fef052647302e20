"""What an answer that is no result means: whose fault it is, and whether the call may be sent again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import httpx

from dispatcher.errors import LOCK_NOT_AVAILABLE, BadKey, DispatcherError, RestError, ServiceUnavailable
from dispatcher.supabase.network import PROXY_SETTING, Network, is_of_certificate

_MESSAGE_LIMIT = 500

# PostgREST gave up before the statement reached the database, or has an old picture of the schema.
_CODES_NOT_EXECUTED = frozenset({"PGRST000", "PGRST002", "PGRST003"})
_CODES_STALE_SCHEMA = frozenset({"PGRST202", "PGRST204", "PGRST205"})
# PostgreSQL rolled back or refused the session: serialization, deadlock, lock timeout, shutting down, full.
_SQLSTATES_ROLLED_BACK = frozenset({"40001", "40P01", "57P01", "57P02", "57P03", "53300"})
# The connection to the database went away during the statement: the commit may have happened.
_CODES_CONNECTION_LOST = frozenset({"PGRST001", "08000", "08003", "08006", "08007"})
_WORDS_CONNECTION_LOST = ("connection", "terminat", "server closed")
# A proxy or gateway in between gave up on PostgREST: it may still be at work.
_STATUSES_OF_GATEWAYS = frozenset({408, 500, 502, 504, 520, 522, 524})
_CODES_BAD_KEY = frozenset({"PGRST301", "PGRST302", "PGRST303"})
_SCHEMA_RELOAD_SECONDS = 2.0


class Repeat(Enum):
    """May the same request be sent again by the client itself?"""

    SAFE = "safe"
    """It was not executed."""
    STALE_SCHEMA = "stale_schema"
    """It was not executed; PostgREST needs seconds to learn of a migration."""
    IF_IDEMPOTENT = "if_idempotent"
    """Nobody knows whether it was executed."""
    LATER = "later"
    """It was not executed: another session holds what it needs, and the call has waited for it. Its caller asks again,
    and can say what for."""
    NEVER = "never"
    """It was refused, and would be again."""


@dataclass(frozen=True)
class Failure:
    """One failed attempt: the error to raise if it stays so, and whether to try again."""

    error: DispatcherError
    repeat: Repeat
    not_before: float = 0.0
    """Seconds to wait at least before a repeat."""
    at_once: bool = False
    """The peer closed a connection: nothing is overloaded, so the first repeat need not wait."""


@dataclass(frozen=True)
class _ErrorBody:
    code: str | None
    message: str
    hint: str | None

    def text(self) -> str:
        # `details` is left out on purpose: PostgreSQL puts whole rows there ("Failing row contains …").
        parts = [self.message, f"(hint: {self.hint})" if self.hint else ""]
        return " ".join(part for part in parts if part)[:_MESSAGE_LIMIT] or "no reason given"


def failure_of_response(response: httpx.Response, what: str) -> Failure | None:
    """None when the response carries a result; what went wrong otherwise.

    Args:
        response: with its body already read.
        what: the function or table, for the message.
    """
    if response.is_success:
        return None if _may_be_a_result(response) else _not_postgrest(response, what)
    body = _error_body(response)
    return _not_postgrest(response, what) if body is None else _refused(response, body, what)


def _may_be_a_result(response: httpx.Response) -> bool:
    if response.status_code == httpx.codes.NO_CONTENT:
        return response.request.method == "POST"  # a function that returns void; a select never answers so
    return bool(response.content) and "json" in response.headers.get("content-type", "")


def _error_body(response: httpx.Response) -> _ErrorBody | None:
    try:
        body = json.loads(response.content)
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    code, hint = body.get("code"), body.get("hint")
    message = body.get("message") or body.get("error") or body.get("msg") or ""
    return _ErrorBody(str(code) if code else None, str(message), str(hint) if hint else None)


def _refused(response: httpx.Response, body: _ErrorBody, what: str) -> Failure:
    status = response.status_code
    if status in {401, 403} or body.code in _CODES_BAD_KEY:
        return Failure(_bad_key(status, body, what), Repeat.NEVER)
    repeat = repeat_for(status, body.code, body.message)
    message = f"{what}: {body.text()} (HTTP {status}{f', {body.code}' if body.code else ''})"
    error = RestError(message, status=status, code=body.code, retryable=repeat is not Repeat.NEVER)
    return Failure(error, repeat, not_before=_seconds_to_wait(response, repeat))


def _seconds_to_wait(response: httpx.Response, repeat: Repeat) -> float:
    asked_for = response.headers.get("retry-after", "")
    seconds = float(asked_for) if asked_for.isdecimal() else 0.0
    return max(seconds, _SCHEMA_RELOAD_SECONDS) if repeat is Repeat.STALE_SCHEMA else seconds


def repeat_for(status: int, code: str | None, message: str = "") -> Repeat:
    """The class of an error answer, from its HTTP status, its PGRST code or SQLSTATE, and its text."""
    if code == LOCK_NOT_AVAILABLE:
        return Repeat.LATER
    if code in _CODES_STALE_SCHEMA:
        return Repeat.STALE_SCHEMA
    if code in _CODES_NOT_EXECUTED or code in _SQLSTATES_ROLLED_BACK:
        return Repeat.SAFE
    if code in _CODES_CONNECTION_LOST or _is_connection_lost(status, code, message):
        return Repeat.IF_IDEMPOTENT
    if status in {429, 503}:
        return Repeat.SAFE
    return Repeat.IF_IDEMPOTENT if code is None and status in _STATUSES_OF_GATEWAYS else Repeat.NEVER


def _is_connection_lost(status: int, code: str | None, message: str) -> bool:
    # PostgREST answers 400 without a code of its own when libpq loses the server during a statement, with libpq's
    # words, or with none at all when the server was killed.
    says_so = not message or any(word in message.lower() for word in _WORDS_CONNECTION_LOST)
    return status == 400 and not code and says_so


def _bad_key(status: int, body: _ErrorBody, what: str) -> BadKey:
    advice = "set SUPABASE_SERVICE_ROLE_KEY to this project's service_role (or sb_secret_…) key"
    if body.code == "42501":
        advice += ", and apply the migrations (`dispatcher migrate`) if it already is"
    return BadKey(f"{what}: the server refuses the key: {body.text()} (HTTP {status}); {advice}")


def _not_postgrest(response: httpx.Response, what: str) -> Failure:
    status, kind = response.status_code, response.headers.get("content-type", "no content type")
    if status in {401, 403} and not response.content:
        return Failure(_bad_key(status, _ErrorBody(None, "no reason given", None), what), Repeat.NEVER)
    repeat = Repeat.IF_IDEMPOTENT if response.is_success else repeat_for(status, None, "no JSON")
    message = f"{what}: not an answer of PostgREST: HTTP {status}, {kind}, {len(response.content)} bytes"
    if response.is_redirect:
        message += f"; redirected to {_origin(response.headers.get('location', ''))}: check SUPABASE_URL"
    if status == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
        message += f"; the proxy wants a user and a password: give them in {PROXY_SETTING}"
    error = RestError(message, status=status, retryable=repeat is not Repeat.NEVER)
    return Failure(error, repeat, not_before=_seconds_to_wait(response, repeat))


def _origin(location: str) -> str:
    url = httpx.URL(location[:200])
    return f"{url.scheme}://{url.host}" if url.host else "another path"


def failure_of_transport(error: httpx.TransportError, url: str, network: Network) -> Failure:
    """A request that brought no answer. The text names the address, the cause and the setting, never the key."""
    cause = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError):
        repeat = Repeat.NEVER if is_of_certificate(error) else Repeat.SAFE
        return Failure(ServiceUnavailable(f"cannot reach {url}: {network.why_not(error, url)}"), repeat)
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return Failure(RestError(f"cannot ask {url}: {cause}"), Repeat.NEVER)
    if isinstance(error, httpx.TimeoutException):
        text = f"no answer from {url} in time ({type(error).__name__}): it may have been executed"
        return Failure(ServiceUnavailable(text), Repeat.IF_IDEMPOTENT)
    text = f"lost the connection to {url}: {cause}: it may have been executed"
    return Failure(ServiceUnavailable(text), Repeat.IF_IDEMPOTENT, at_once=True)
