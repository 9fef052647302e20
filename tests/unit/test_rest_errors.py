import httpx
import pytest

from dispatcher.errors import BadKey, RestError, ServiceUnavailable
from dispatcher.supabase.network import Network
from dispatcher.supabase.rest_errors import (
    Failure,
    Repeat,
    failure_of_response,
    failure_of_transport,
    repeat_for,
)


def answer(status: int, method: str = "POST", **kwargs: object) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request(method, "http://x/rest/v1/rpc/f"), **kwargs)  # type: ignore[arg-type] # forwarded as written in the test


def failed(response: httpx.Response) -> Failure:
    failure = failure_of_response(response, "claim_wake")
    assert failure is not None
    return failure


@pytest.mark.parametrize(
    ("status", "code", "message", "repeat"),
    [
        (503, "PGRST000", "", Repeat.SAFE),
        (503, "PGRST001", "", Repeat.IF_IDEMPOTENT),
        (503, "PGRST002", "", Repeat.SAFE),
        (504, "PGRST003", "", Repeat.SAFE),
        (404, "PGRST202", "", Repeat.STALE_SCHEMA),
        (400, "PGRST204", "", Repeat.STALE_SCHEMA),
        (404, "PGRST205", "", Repeat.STALE_SCHEMA),
        (500, "40001", "", Repeat.SAFE),
        (500, "40P01", "", Repeat.SAFE),
        (500, "55P03", "", Repeat.LATER),
        (503, "57P01", "", Repeat.SAFE),
        (503, "57P03", "", Repeat.SAFE),
        (503, "08006", "", Repeat.IF_IDEMPOTENT),
        (400, "", "no connection to the server", Repeat.IF_IDEMPOTENT),
        (400, None, "server closed the connection unexpectedly", Repeat.IF_IDEMPOTENT),
        (400, None, "bad request", Repeat.NEVER),
        (400, "", "", Repeat.IF_IDEMPOTENT),
        (400, "P0001", "connection string refused by our rule", Repeat.NEVER),
        (429, None, "", Repeat.SAFE),
        (502, None, "", Repeat.IF_IDEMPOTENT),
        (503, None, "", Repeat.SAFE),
        (504, None, "", Repeat.IF_IDEMPOTENT),
        (500, None, "", Repeat.IF_IDEMPOTENT),
        (500, "57014", "canceling statement", Repeat.NEVER),
        (404, None, "", Repeat.NEVER),
        (409, "23505", "duplicate key", Repeat.NEVER),
    ],
)
def test_ff21_each_class_of_answer_says_whether_it_may_be_repeated(
    status: int, code: str | None, message: str, repeat: Repeat
) -> None:
    assert repeat_for(status, code, message) is repeat
    failure = failed(answer(status, json={"code": code, "message": message}))
    assert isinstance(failure.error, RestError)
    assert (failure.repeat, failure.error.code, failure.error.status) == (repeat, code or None, status)
    assert failure.error.retryable is (repeat is not Repeat.NEVER)


def test_ff19_a_stale_schema_is_left_two_seconds_at_least() -> None:
    assert failed(answer(404, json={"code": "PGRST202", "message": "no function"})).not_before == 2.0


def test_a_server_that_names_a_time_is_obeyed() -> None:
    assert failed(answer(429, headers={"retry-after": "3"}, json={"message": "slow down"})).not_before == 3.0
    assert failed(answer(429, headers={"retry-after": "soon"}, json={"message": "slow"})).not_before == 0.0


@pytest.mark.parametrize("status", [200, 206, 502, 503])
def test_a_page_of_html_is_never_data(status: int) -> None:
    response = answer(status, content=b"<html>hello</html>", headers={"content-type": "text/html"})
    error = failed(response).error
    assert isinstance(error, RestError)
    assert error.retryable
    assert "text/html" in str(error)
    assert "hello" not in str(error)


def test_an_empty_answer_is_no_result_except_from_a_function_that_returns_void() -> None:
    json_type = {"content-type": "application/json"}
    assert failure_of_response(answer(204), "f") is None
    assert failure_of_response(answer(204, method="GET"), "t") is not None
    assert failure_of_response(answer(200, headers=json_type), "f") is not None
    assert failure_of_response(answer(200, content=b"[]", headers=json_type), "f") is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"code": "PGRST301", "message": "No suitable key or wrong key type"}),
        (401, {"message": "Invalid API key"}),
        (403, {"code": "42501", "message": "permission denied for function claim_wake"}),
        (401, {"code": "PGRST303", "message": "JWT expired"}),
    ],
)
def test_a_refused_key_says_what_to_do(status: int, body: dict[str, str]) -> None:
    failure = failed(answer(status, json=body))
    assert isinstance(failure.error, BadKey)
    assert failure.repeat is Repeat.NEVER
    assert body["message"] in str(failure.error)
    assert "SUPABASE_SERVICE_ROLE_KEY" in str(failure.error)
    assert ("dispatcher migrate" in str(failure.error)) is (body.get("code") == "42501")


def test_a_firewalls_page_is_not_a_refused_key() -> None:
    response = answer(403, content=b"<html>blocked</html>", headers={"content-type": "text/html"})
    assert isinstance(failed(response).error, RestError)


def test_whole_rows_of_the_server_never_reach_the_text() -> None:
    body = {
        "code": "23514",
        "message": "violates check",
        "details": "Failing row contains (SECRET)",
        "hint": "h",
    }
    text = str(failed(answer(400, json=body)).error)
    assert "SECRET" not in text
    assert "violates check (hint: h)" in text


def test_a_redirect_names_the_setting_and_not_the_query() -> None:
    response = answer(301, headers={"location": "https://other.example/login?token=abc"})
    text = str(failed(response).error)
    assert "https://other.example: check SUPABASE_URL" in text
    assert "abc" not in text


@pytest.mark.parametrize(
    ("error", "repeat", "words"),
    [
        (httpx.ConnectError("Connection refused"), Repeat.SAFE, "cannot reach http://db: Connection refused"),
        (httpx.ConnectTimeout("timed out"), Repeat.SAFE, "cannot reach"),
        (httpx.PoolTimeout(""), Repeat.SAFE, "PoolTimeout"),
        (httpx.ReadTimeout("timed out"), Repeat.IF_IDEMPOTENT, "may have been executed"),
        (httpx.ReadError("reset"), Repeat.IF_IDEMPOTENT, "may have been executed"),
        (httpx.RemoteProtocolError("Server disconnected"), Repeat.IF_IDEMPOTENT, "may have been executed"),
    ],
)
def test_ff28_no_answer_is_told_apart_from_surely_not_executed(
    error: httpx.TransportError, repeat: Repeat, words: str
) -> None:
    failure = failure_of_transport(error, "http://db", Network(environ={}))
    assert isinstance(failure.error, ServiceUnavailable)
    assert failure.repeat is repeat
    assert words in str(failure.error)
