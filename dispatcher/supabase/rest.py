"""The REST side of Supabase: call a SQL function, read rows; thread-safe, bounded in time.

Function calls go over a wire of our own (`rest_wire`), as a wake waits for them; through a proxy they take the
transport of httpx. Selects, which are not on the way of a wake, go through `postgrest`, with its own retry (blocking,
GET only, up to 7 s) and its HTTP/2 switched off.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import tenacity
from postgrest import SyncPostgrestClient

from dispatcher import events
from dispatcher.errors import BadKey, DispatcherError, MalformedAnswer, RestError, ServiceUnavailable
from dispatcher.logs import get_logger
from dispatcher.supabase import rest_errors, rest_payload
from dispatcher.supabase.network import Network
from dispatcher.supabase.rest_errors import Failure, Repeat
from dispatcher.supabase.rest_wire import Answer, Limits, Wire

T = TypeVar("T")
Row = dict[str, Any]
OnCall = Callable[[str, float, str], None]
"""Told of every call: function or table, seconds, and ok, refused, retryable, bad_key or unavailable."""

log = get_logger(__name__)

SERVER_ROW_CAP = 1000
SCHEMA = "public"
_WARN_AGAIN_SECONDS = 60.0
_CLOSED = "the client is closed"


@dataclass(frozen=True)
class Timeouts:
    """Seconds. `call` bounds a whole call with its repeats, the others one attempt of it."""

    call: float = 10.0
    connect: float = 3.0
    read: float = 6.0
    write: float = 5.0
    pool: float = 5.0
    # Below the 30 s after which PostgREST's own server closes an idle connection: we let go first.
    idle: float = 20.0


@dataclass(frozen=True)
class _Call:
    """What one call is allowed. The httpx hooks read it: `postgrest` has no argument to pass it through."""

    what: str
    ends_at: float
    read: float


_current_call: ContextVar[_Call | None] = ContextVar("rest_call", default=None)


class _AttemptFailed(Exception):  # noqa: N818 - carries the error from the hook to the repeat decision, never leaves
    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure.error))
        self.failure = failure


class RestClient:
    """Calls SQL functions and reads rows over one keep-alive pool (HTTP/1.1, no environment proxy).

    Every request names the schema `public`: a project may list another one first.

    Every call ends within its `timeout` (default 10 s), repeats included. What was surely not executed is
    repeated with jitter; what may have been is repeated only with `retry=True`.

    Args:
        base_url: the project's URL (`SUPABASE_URL`), with or without `/rest/v1`.
        key: a service_role JWT (sent as `apikey` and Bearer) or an `sb_secret_…` key (sent as `apikey` only:
            the gateway of the project turns it into a role, and PostgREST would refuse it as a token).
        network: authorities and proxy; see `Network`. Without one: those of the system, and a direct connection.
        timeouts: see `Timeouts`.
        max_connections: size of the pool; a caller beyond it waits `timeouts.pool` seconds.
        on_call: a metrics hook; see `OnCall`. Its errors are swallowed.
        jitter: random numbers in [0, 1), for tests.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        *,
        network: Network | None = None,
        timeouts: Timeouts | None = None,
        max_connections: int = 16,
        on_call: OnCall | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.url = _rest_url(base_url)
        self.on_call = on_call
        self.calls = 0
        self.requests = 0
        self._network = network or Network()
        self._timeouts = timeouts or Timeouts()
        self._jitter = jitter
        self._closed = threading.Event()
        self._counting = threading.Lock()
        self._warned: dict[tuple[str, str], float] = {}
        self._transport = self._build_transport(max_connections)
        self._http = self._build_http(_headers(key))
        self._wire = None if self._network.proxy else self._build_wire(max_connections)
        self._postgrest = SyncPostgrestClient(
            self.url, schema=SCHEMA, headers=_headers(key), http_client=self._http, retry_enabled=False
        )

    def _build_transport(self, max_connections: int) -> httpx.HTTPTransport:
        limits = httpx.Limits(
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=self._timeouts.idle,
        )
        return httpx.HTTPTransport(
            limits=limits,
            http2=False,
            trust_env=False,
            verify=self._network.ssl_context_for(self.url),
            proxy=self._network.proxy,
        )

    def _build_http(self, headers: dict[str, str]) -> httpx.Client:
        return httpx.Client(
            headers=headers,
            transport=self._transport,
            timeout=self._timeouts.call,
            trust_env=False,
            follow_redirects=False,
            event_hooks={"request": [self._bound_in_time], "response": [_refuse_what_is_no_result]},
        )

    def _build_wire(self, max_connections: int) -> Wire:
        return Wire(
            self.url,
            dict(self._http.headers),
            self._network.ssl_context_for(self.url),
            max_connections=max_connections,
            idle=self._timeouts.idle,
        )

    def rpc(
        self,
        function: str,
        params: Mapping[str, object],
        *,
        retry: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """What the SQL function returned, as JSON data (None for void).

        Args:
            function: its name in the public schema.
            params: its arguments by name; cleaned by `rest_payload.clean`.
            retry: True only if calling twice does no harm (idempotent, or the call carries an idempotency
                token): then it is repeated even when an earlier attempt may have been executed. A connection
                closed by the server while it was idle counts as such where the close and the request crossed:
                TCP cannot say whether the request was read. (A close that arrived before is seen and costs
                nothing.)
            timeout: seconds for the call as a whole; also lets one attempt take that long.

        Raises:
            RestError: an answer that is not a result; MalformedAnswer when it is no JSON.
            ServiceUnavailable: no answer.
            BadKey: the key is refused.
        """
        content = rest_payload.encode(params)
        return self._call(function, lambda: self._post(function, content), retry, timeout)

    def select(self, table: str, query: Mapping[str, str], *, timeout: float | None = None) -> list[Row]:
        """The rows of one page (the server stops at its cap, 1,000 by default: see `select_all`).

        Args:
            table: table or view in the public schema.
            query: PostgREST's own parameters, unencoded, e.g. {"select": "id,slug", "slug": equals(slug)}.
            timeout: seconds for the call as a whole.

        Raises:
            RestError, ServiceUnavailable, BadKey: as `rpc`.
        """
        return self._select(table, list(query.items()), timeout)

    def select_all(
        self,
        table: str,
        query: Mapping[str, str],
        *,
        key: Sequence[str] = ("id",),
        page: int = SERVER_ROW_CAP,
    ) -> list[Row]:
        """Every row, in ascending order of `key`, past the server's row cap, none twice.

        Pages by position, not by offset: rows that change or leave between two pages shift nothing.

        Args:
            table: table or view in the public schema.
            query: as `select`, without order, limit and offset; must select the columns of `key`.
            key: NOT NULL columns, unique together.
            page: rows asked for at once; the server may send fewer.

        Raises:
            RestError, ServiceUnavailable, BadKey: as `rpc`. ValueError: the query or key does not fit.
        """
        if clash := {"order", "limit", "offset"}.intersection(query):
            raise ValueError(f"select_all sets {sorted(clash)} itself")
        fixed = [*query.items(), ("order", ",".join(f"{column}.asc" for column in key)), ("limit", str(page))]
        rows = self._select(table, fixed, None)
        last_page = rows
        while last_page:  # only an empty page is the end: the server's cap may be below `page`
            last_page = self._select(table, [*fixed, ("or", rest_payload.after(key, last_page[-1]))], None)
            rows += last_page
        return rows

    def warm(self) -> None:
        """Opens a connection, so that the first call does not pay for it. Any answer will do.

        Raises:
            ServiceUnavailable: the server cannot be reached.
        """
        try:
            self._greet()
        except httpx.TransportError as error:
            raise rest_errors.failure_of_transport(error, self.url, self._network).error from error

    def _greet(self) -> None:
        patience = self._timeouts.connect
        if self._wire is None:
            self._http.options(f"{self.url}/", timeout=patience)
        else:
            limits = Limits(patience, patience, patience, patience, time.monotonic() + 2 * patience)
            self._wire.exchange("OPTIONS", "/", b"", limits)

    def close(self) -> None:
        """Closes the pool; a call that is waiting to repeat ends at once."""
        self._closed.set()
        self._http.close()
        if self._wire is not None:
            self._wire.close()

    def _post(self, function: str, content: bytes) -> Any:
        """One request, and the result that its answer carries."""
        allowed = _current_call.get()
        assert allowed is not None
        if self._wire is None:
            return _json(function, self._post_through_httpx(function, content))
        answer = self._wire.exchange("POST", f"/rpc/{function}", content, self._limits(allowed))
        if answer.is_plain_json and answer.content:
            return _parsed(function, answer.content, answer.status)
        response = _response(answer, self._request(function))
        _refuse_what_is_no_result(response)
        return _json(function, response)

    def _post_through_httpx(self, function: str, content: bytes) -> httpx.Response:
        request = self._request(function, content)
        self._bound_in_time(request)
        response = self._transport.handle_request(request)
        response.request = request
        try:
            response.read()
        finally:
            response.close()
        _refuse_what_is_no_result(response)
        return response

    def _request(self, function: str, content: bytes = b"") -> httpx.Request:
        return httpx.Request("POST", f"{self.url}/rpc/{function}", headers=self._http.headers, content=content)

    def _select(self, table: str, query: list[tuple[str, str]], timeout: float | None) -> list[Row]:
        return self._call(table, lambda: self._read_rows(table, query), retry=True, timeout=timeout)

    def _read_rows(self, table: str, query: list[tuple[str, str]]) -> list[Row]:
        columns = dict(query).get("select", "*")
        builder = self._postgrest.from_(table).select(columns)
        filters = [(name, rest_payload.clean_text(value)) for name, value in query if name != "select"]
        builder.request.params = httpx.QueryParams([*builder.request.params.multi_items(), *filters])
        data: object = builder.execute().data
        if isinstance(data, list) and all(isinstance(row, dict) for row in data):
            return data
        raise _AttemptFailed(Failure(RestError(f"{table}: the answer is no list of rows"), Repeat.NEVER))

    def _call(self, what: str, attempt: Callable[[], T], retry: bool, timeout: float | None) -> T:
        started = time.monotonic()
        allowed = _Call(what, started + (timeout or self._timeouts.call), timeout or self._timeouts.read)
        outcome = "unavailable"
        try:
            result = self._repeated(attempt, allowed, retry)
            outcome = "ok"
            return result
        except _AttemptFailed as failed:
            outcome = _outcome(failed.failure)
            raise failed.failure.error from failed.__cause__
        finally:
            self._account(what, time.monotonic() - started, outcome)

    def _repeated(self, attempt: Callable[[], T], allowed: _Call, retry: bool) -> T:
        try:
            return self._attempt(attempt, allowed)
        except _AttemptFailed as failed:
            if not _may_repeat(failed, retry):
                raise
            first = failed
        return self._repeated_after(first, attempt, allowed, retry)

    def _repeated_after(self, first: _AttemptFailed, attempt: Callable[[], T], allowed: _Call, retry: bool) -> T:
        """The repeats of a call of which the first attempt has failed, as tenacity counts them."""
        repeats = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: _may_repeat(error, retry)),
            wait=self._seconds_to_wait,
            stop=tenacity.stop_any(
                tenacity.stop_before_delay(allowed.ends_at - time.monotonic()),
                tenacity.stop_when_event_set(self._closed),
            ),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=lambda state: self._tell_of_repeat(allowed.what, state),
            reraise=True,
        )
        failures = [first]

        def again() -> T:
            if failures:
                raise failures.pop()
            return self._attempt(attempt, allowed)

        return repeats(again)

    def _attempt(self, attempt: Callable[[], T], allowed: _Call) -> T:
        if self._closed.is_set():
            raise _AttemptFailed(Failure(ServiceUnavailable(f"{allowed.what}: {_CLOSED}"), Repeat.NEVER))
        token = _current_call.set(allowed)
        try:
            return attempt()
        except httpx.TransportError as error:
            raise _AttemptFailed(rest_errors.failure_of_transport(error, self.url, self._network)) from error
        except httpx.HTTPError as error:
            text = f"{allowed.what}: unreadable answer: {error}"
            raise _AttemptFailed(Failure(RestError(text), Repeat.NEVER)) from error
        finally:
            _current_call.reset(token)

    def _bound_in_time(self, request: httpx.Request) -> None:
        allowed = _current_call.get()
        if allowed is None:
            return
        limits = self._limits(allowed)
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: limits.within(getattr(limits, name)) for name in names}

    def _limits(self, allowed: _Call) -> Limits:
        """Of the next attempt, which is counted."""
        with self._counting:
            self.requests += 1
        times = self._timeouts
        return Limits(times.pool, times.connect, times.write, allowed.read, allowed.ends_at)

    def _seconds_to_wait(self, state: tenacity.RetryCallState) -> float:
        return seconds_before_repeat(_failure(state), state.attempt_number, self._jitter())

    def _tell_of_repeat(self, what: str, state: tenacity.RetryCallState) -> None:
        failure = _failure(state)
        cause = _name_of(failure.error)
        warn = self._is_news(what, cause)
        tell = log.warning if warn else log.debug
        text = f"{what} is repeated: {failure.error}"
        tell(events.REST_RETRIED, msg=text, function=what, cause=cause, attempt=state.attempt_number)

    def _is_news(self, what: str, cause: str) -> bool:
        now = time.monotonic()
        with self._counting:
            told_at = self._warned.get((what, cause))
            if told_at is not None and now - told_at < _WARN_AGAIN_SECONDS:
                return False
            self._warned[(what, cause)] = now
            return True

    def _account(self, what: str, seconds: float, outcome: str) -> None:
        with self._counting:
            self.calls += 1
        if self.on_call is None:
            return
        try:
            self.on_call(what, seconds, outcome)
        except Exception as error:  # noqa: BLE001 - a metric must not fail the call it measures
            log.warning(events.REST_FAILED, msg="The metrics hook failed", function=what, error=str(error))


def seconds_before_repeat(failure: Failure, attempt: int, jitter: float) -> float:
    """Seconds between attempt number `attempt` (from 1) and the next: full jitter over 0.5, 1, 2, then 3 s.

    Spread over the whole span, so that many callers hit by one outage do not come back in one moment.
    """
    if failure.at_once and attempt == 1:
        return failure.not_before
    span = min(3.0, 0.25 * float(2 ** min(attempt, 8)))
    return failure.not_before + jitter * span


def _may_repeat(error: BaseException, idempotent: bool) -> bool:
    if not isinstance(error, _AttemptFailed):
        return False
    repeat = error.failure.repeat
    return repeat in {Repeat.SAFE, Repeat.STALE_SCHEMA} or (repeat is Repeat.IF_IDEMPOTENT and idempotent)


def _failure(state: tenacity.RetryCallState) -> Failure:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, _AttemptFailed)
    return error.failure


def _name_of(error: DispatcherError) -> str:
    if isinstance(error, RestError):
        return error.code or f"HTTP {error.status}"
    return "unreachable"


def _outcome(failure: Failure) -> str:
    if isinstance(failure.error, BadKey):
        return "bad_key"
    if isinstance(failure.error, ServiceUnavailable):
        return "unavailable"
    return "refused" if failure.repeat is Repeat.NEVER else "retryable"


def _refuse_what_is_no_result(response: httpx.Response) -> None:
    allowed = _current_call.get()
    if allowed is None:
        return
    response.read()
    if failure := rest_errors.failure_of_response(response, allowed.what):
        raise _AttemptFailed(failure)


def _json(what: str, response: httpx.Response) -> Any:
    if response.status_code == httpx.codes.NO_CONTENT:
        return None
    return _parsed(what, response.content, response.status_code)


def _parsed(what: str, content: bytes, status: int) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        text = f"{what}: malformed answer: it says JSON and is not: {len(content)} bytes"
        failure = Failure(MalformedAnswer(text, status=status, retryable=True), Repeat.IF_IDEMPOTENT)
        raise _AttemptFailed(failure) from error


def _response(answer: Answer, request: httpx.Request) -> httpx.Response:
    """The answer as httpx shows it, decoded; for all that is not a plain result."""
    return httpx.Response(answer.status, headers=list(answer.headers.items()), content=answer.content, request=request)


def _rest_url(base_url: str) -> str:
    trimmed = base_url.strip().rstrip("/")
    return trimmed if trimmed.endswith("/rest/v1") else f"{trimmed}/rest/v1"


def _headers(key: str) -> dict[str, str]:
    trimmed = key.strip()
    headers = {"apikey": trimmed, "Content-Type": "application/json", "Accept": "application/json"}
    headers |= {"Accept-Profile": SCHEMA, "Content-Profile": SCHEMA}
    return headers if trimmed.startswith("sb_") else {**headers, "Authorization": f"Bearer {trimmed}"}
