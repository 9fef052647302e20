import json
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import respx

from dispatcher.errors import BadKey, RestError, ServiceUnavailable
from dispatcher.supabase.rest import RestClient, Timeouts, seconds_before_repeat
from dispatcher.supabase.rest_errors import Failure, Repeat
from dispatcher.supabase.rest_wire import Answer, Limits, Wire

URL = "http://project.test"
RPC = f"{URL}/rest/v1/rpc/claim_wake"
JWT = "eyJhbGciOiJIUzI1NiJ9.e30.c2lnbmF0dXJl"
POOL_FULL = httpx.Response(504, json={"code": "PGRST003", "message": "Timed out acquiring connection"})
RESTARTING = httpx.Response(503, json={"code": "57P03", "message": "the database system is starting up"})
BAD_GATEWAY = httpx.Response(502, content=b"<html>", headers={"content-type": "text/html"})
LOST = httpx.Response(400, json={"message": "server closed the connection unexpectedly"})
STALE = httpx.Response(404, json={"code": "PGRST202", "message": "Could not find the function"})
NULL = httpx.Response(200, content=b"null", headers={"content-type": "application/json"})
GRANTED = httpx.Response(200, json={"granted": True})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[respx.MockRouter]:
    """Answers selects, and calls as well: what would be written on the wire is handed to httpx, which respx mocks."""
    monkeypatch.setattr(Wire, "exchange", exchange_through_httpx)
    with respx.mock(assert_all_called=False) as router:
        yield router


def exchange_through_httpx(wire: Wire, method: str, path: str, content: bytes, limits: Limits) -> Answer:
    written = wire.request(method, path, content).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in written[1:])
    timeout = {name: limits.within(getattr(limits, name)) for name in ("connect", "read", "write", "pool")}
    url = f"{URL}{written[0].split(' ')[1]}"
    request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": timeout})
    response = httpx.HTTPTransport().handle_request(request)
    return Answer(response.status_code, {name.lower(): value for name, value in response.headers.raw}, response.read())


@pytest.fixture
def build() -> Iterator[Callable[..., RestClient]]:
    clients: list[RestClient] = []

    def make(key: str = JWT, **options: object) -> RestClient:
        clients.append(RestClient(URL, key, **{"jitter": lambda: 0.0, **options}))  # type: ignore[arg-type] # options of the test
        return clients[-1]

    yield make
    for client in clients:
        client.close()


Build = Callable[..., RestClient]


def test_a_function_is_called_with_its_arguments(server: respx.MockRouter, build: Build) -> None:
    route = server.post(RPC).mock(GRANTED)
    assert build().rpc("claim_wake", {"p_agent_id": "a1"}) == {"granted": True}
    assert json.loads(route.calls.last.request.content) == {"p_agent_id": "a1"}


def test_a_void_function_returns_none_and_null_is_a_value(server: respx.MockRouter, build: Build) -> None:
    server.post(RPC).mock(side_effect=[httpx.Response(204), NULL])
    client = build()
    assert client.rpc("claim_wake", {}) is None
    assert client.rpc("claim_wake", {}) is None


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        (JWT, {"apikey": JWT, "authorization": f"Bearer {JWT}"}),
        ("sb_secret_abc", {"apikey": "sb_secret_abc"}),
    ],
)
def test_each_kind_of_key_is_sent_its_way(
    server: respx.MockRouter, build: Build, key: str, headers: dict[str, str]
) -> None:
    rpc = server.post(RPC).mock(GRANTED)
    rows = server.get(f"{URL}/rest/v1/agents").mock(httpx.Response(200, json=[]))
    client = build(key)
    client.rpc("claim_wake", {})
    client.select("agents", {})
    for route in (rpc, rows):
        sent = route.calls.last.request.headers
        assert {name: sent[name] for name in ("apikey", "authorization") if name in sent} == headers


def test_ff21_failures_of_every_class_are_survived_when_the_call_is_idempotent(
    server: respx.MockRouter, build: Build
) -> None:
    answers: list[httpx.Response | Exception] = [
        POOL_FULL,
        RESTARTING,
        BAD_GATEWAY,
        LOST,
        httpx.ReadTimeout("slow"),
        GRANTED,
    ]
    server.post(RPC).mock(side_effect=answers)
    assert build().rpc("claim_wake", {}, retry=True) == {"granted": True}


def test_ff28_an_unknown_outcome_is_repeated_only_when_the_caller_says_so(
    server: respx.MockRouter, build: Build
) -> None:
    route = server.post(RPC).mock(side_effect=[httpx.ReadTimeout("slow"), GRANTED])
    with pytest.raises(ServiceUnavailable, match="may have been executed"):
        build().rpc("claim_wake", {})
    assert route.call_count == 1
    assert build().rpc("claim_wake", {}, retry=True) == {"granted": True}


def test_what_was_not_executed_is_repeated_without_asking(server: respx.MockRouter, build: Build) -> None:
    server.post(RPC).mock(side_effect=[httpx.ConnectError("refused"), POOL_FULL, GRANTED])
    client = build()
    assert client.rpc("claim_wake", {}) == {"granted": True}
    assert (client.calls, client.requests) == (1, 3)


def test_a_refusal_is_not_repeated(server: respx.MockRouter, build: Build) -> None:
    route = server.post(RPC).mock(httpx.Response(400, json={"code": "HQ001", "message": "broken contract"}))
    with pytest.raises(RestError, match="claim_wake: broken contract") as caught:
        build().rpc("claim_wake", {}, retry=True)
    assert (caught.value.code, caught.value.status, caught.value.retryable) == ("HQ001", 400, False)
    assert route.call_count == 1


def test_ff21_a_call_is_over_within_its_time_whatever_happens(server: respx.MockRouter, build: Build) -> None:
    server.post(RPC).mock(POOL_FULL)
    started = time.monotonic()
    with pytest.raises(RestError) as caught:
        build(jitter=lambda: 0.5).rpc("claim_wake", {}, retry=True, timeout=0.8)
    assert caught.value.retryable
    assert time.monotonic() - started < 1.0


def test_ff19_a_stale_schema_is_asked_again_after_two_seconds(server: respx.MockRouter, build: Build) -> None:
    server.post(RPC).mock(side_effect=[STALE, GRANTED])
    started = time.monotonic()
    assert build().rpc("claim_wake", {}) == {"granted": True}
    assert time.monotonic() - started >= 2.0


def test_ff19_a_schema_that_stays_stale_is_a_retryable_error_with_its_code(
    server: respx.MockRouter, build: Build
) -> None:
    server.post(RPC).mock(STALE)
    with pytest.raises(RestError) as caught:
        build().rpc("claim_wake", {}, timeout=0.5)
    assert (caught.value.code, caught.value.retryable) == ("PGRST202", True)


def test_ff21_many_callers_do_not_come_back_in_one_moment() -> None:
    failure = Failure(RestError("x", retryable=True), Repeat.SAFE)
    moments = [seconds_before_repeat(failure, 1, caller / 20) for caller in range(20)]
    for start in moments:
        assert sum(start <= moment < start + 0.1 for moment in moments) <= 5


@pytest.mark.parametrize("attempt", [1, 2, 3, 10, 2000])
def test_the_wait_before_a_repeat_is_bounded(attempt: int) -> None:
    failure = Failure(RestError("x", retryable=True), Repeat.SAFE, not_before=2.0)
    assert 2.0 <= seconds_before_repeat(failure, attempt, 0.999) <= 5.0


def test_a_refused_key_is_named_as_such(server: respx.MockRouter, build: Build) -> None:
    server.post(RPC).mock(httpx.Response(401, json={"code": "PGRST301", "message": "JWSError"}))
    with pytest.raises(BadKey, match="SUPABASE_SERVICE_ROLE_KEY") as caught:
        build().rpc("claim_wake", {}, retry=True)
    assert JWT not in str(caught.value)


def test_an_unreachable_service_is_named_with_its_cause_and_without_the_key(
    server: respx.MockRouter, build: Build
) -> None:
    server.post(RPC).mock(side_effect=httpx.ConnectError("[Errno 111] Connection refused"))
    with pytest.raises(ServiceUnavailable, match=r"project\.test/rest/v1.*refused") as caught:
        build().rpc("claim_wake", {}, timeout=0.1)
    assert JWT not in str(caught.value)


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, content=b"<html>", headers={"content-type": "text/html"}),
        httpx.Response(200, content=b"", headers={"content-type": "application/json"}),
        httpx.Response(200, content=b"{half", headers={"content-type": "application/json"}),
        httpx.Response(200, json={"not": "rows"}),
        httpx.Response(200, json=[1, 2]),
        httpx.Response(204),
    ],
)
def test_what_is_no_list_of_rows_is_never_rows(
    server: respx.MockRouter, build: Build, response: httpx.Response
) -> None:
    server.get(f"{URL}/rest/v1/agents").mock(response)
    with pytest.raises(RestError):
        build().select("agents", {}, timeout=0.2)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{half"])
def test_what_is_not_json_is_never_a_result(server: respx.MockRouter, build: Build, body: bytes) -> None:
    server.post(RPC).mock(httpx.Response(200, content=body, headers={"content-type": "application/json"}))
    with pytest.raises(RestError):
        build().rpc("claim_wake", {}, timeout=0.2)


def test_a_select_sends_postgrests_own_parameters(server: respx.MockRouter, build: Build) -> None:
    route = server.get(f"{URL}/rest/v1/agents").mock(httpx.Response(200, json=[{"id": 1}]))
    query = {"select": "id,slug", "slug": 'eq.ops,lead(1)"x"', "context->>a": "is.null", "order": "id.asc"}
    assert build().select("agents", query) == [{"id": 1}]
    assert dict(route.calls.last.request.url.params) == query


def test_ff21_a_select_is_repeated_by_us_and_not_by_the_library(server: respx.MockRouter, build: Build) -> None:
    answers: list[httpx.Response | Exception] = [
        RESTARTING,
        httpx.ReadError("cut"),
        httpx.Response(200, json=[]),
    ]
    route = server.get(f"{URL}/rest/v1/agents").mock(side_effect=answers)
    started = time.monotonic()
    assert build().select("agents", {}) == []
    assert route.call_count == 3
    assert time.monotonic() - started < 0.9  # the library alone would sleep 1 s before its second attempt


def test_paging_takes_no_order_of_its_own(build: Build) -> None:
    with pytest.raises(ValueError, match="limit"):
        build().select_all("agents", {"limit": "5"})


def test_every_call_is_measured_with_its_outcome(server: respx.MockRouter, build: Build) -> None:
    seen: list[tuple[str, str]] = []

    def on_call(function: str, seconds: float, outcome: str) -> None:
        assert seconds >= 0
        seen.append((function, outcome))
        raise RuntimeError("a broken metric")

    server.post(RPC).mock(
        side_effect=[
            GRANTED,
            httpx.Response(409, json={"code": "23505", "message": "duplicate"}),
            LOST,
            httpx.Response(401, json={"message": "no"}),
            httpx.ReadTimeout("slow"),
        ]
    )
    client = build(on_call=on_call)
    client.rpc("claim_wake", {})
    for error in (RestError, RestError, BadKey, ServiceUnavailable):
        with pytest.raises(error):
            client.rpc("claim_wake", {})
    assert [outcome for _, outcome in seen] == ["ok", "refused", "retryable", "bad_key", "unavailable"]


def test_close_ends_a_call_that_waits_to_repeat(server: respx.MockRouter, build: Build) -> None:
    client = build(jitter=lambda: 0.99)

    def close_and_refuse(request: httpx.Request) -> httpx.Response:
        client.close()
        return POOL_FULL

    server.post(RPC).mock(side_effect=close_and_refuse)
    started = time.monotonic()
    with pytest.raises((RestError, ServiceUnavailable)):
        client.rpc("claim_wake", {}, retry=True)
    with pytest.raises(ServiceUnavailable, match="closed"):
        client.rpc("claim_wake", {})
    assert time.monotonic() - started < 0.4


def test_the_environments_proxy_is_not_used(monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert not build()._http.trust_env
    assert not build()._http._mounts


def test_the_url_may_carry_the_path_already() -> None:
    for url in (URL, f"{URL}/", f"{URL}/rest/v1", f"{URL}/rest/v1/"):
        client = RestClient(url, JWT, timeouts=Timeouts())
        assert client.url == f"{URL}/rest/v1"
        client.close()
