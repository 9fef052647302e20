"""Where the Gateway is, what its frames say, what its command line answers: no socket."""

import json
from pathlib import Path
from typing import Any

import pytest

from dispatcher.agents.gateway_calls import payload_of
from dispatcher.agents.openclaw_calls import CallResult
from dispatcher.errors import (
    GatewayBarred,
    GatewayError,
    GatewayRefused,
    GatewaySilent,
    GatewayUnavailable,
)
from dispatcher.openclaw.endpoint import Endpoint, find_endpoint
from dispatcher.openclaw.finder import EndpointFinder
from dispatcher.openclaw.frames import (
    Response,
    barred_by,
    connect_params,
    read_error,
    read_frame,
    read_hello,
    request,
)
from dispatcher.openclaw.gateway import read_task
from dispatcher.openclaw.state import LinkTimings, seconds_to_next_try, status_after
from tests.support.gateway import RESTARTING, WORK_START_CHANGED, error, payload, recorded

LOCAL = {"mode": "local", "auth": {"token": "abc"}}


@pytest.mark.parametrize(
    ("config", "environ", "url", "auth"),
    [
        ({"gateway": LOCAL}, {}, "ws://127.0.0.1:18789/", {"token": "abc"}),
        ({"gateway": {**LOCAL, "port": 19001}}, {}, "ws://127.0.0.1:19001/", {"token": "abc"}),
        ({"gateway": {**LOCAL, "port": 19001}}, {"OPENCLAW_GATEWAY_PORT": "19002"}, "ws://127.0.0.1:19002/", None),
        ({"gateway": {**LOCAL, "port": "junk"}}, {"OPENCLAW_GATEWAY_PORT": "0"}, "ws://127.0.0.1:18789/", None),
        ({"gateway": {"mode": "local"}}, {"OPENCLAW_GATEWAY_TOKEN": "e"}, "ws://127.0.0.1:18789/", {"token": "e"}),
        (
            {"gateway": {"mode": "local", "auth": {"token": "${T}x"}}},
            {"T": "e"},
            "ws://127.0.0.1:18789/",
            {"token": "ex"},
        ),
        (
            {"gateway": {"mode": "local", "auth": {"token": {"source": "env", "provider": "default", "id": "T"}}}},
            {"T": "e"},
            "ws://127.0.0.1:18789/",
            {"token": "e"},
        ),
        (
            {"gateway": {"mode": "local", "auth": {"mode": "password", "token": "t", "password": "p"}}},
            {},
            "ws://127.0.0.1:18789/",
            {"password": "p"},
        ),
        ({"gateway": {"mode": "local", "auth": {"mode": "none"}}}, {}, "ws://127.0.0.1:18789/", {}),
        (
            {"gateway": LOCAL},
            {"OPENCLAW_GATEWAY_URL": "ws://localhost:1/x", "OPENCLAW_GATEWAY_TOKEN": "e"},
            "ws://localhost:1/",
            {"token": "e"},
        ),
        ({"gateway": LOCAL}, {"OPENCLAW_GATEWAY_URL": "ws://[::1]:7"}, "ws://[::1]:7/", {}),
        (
            {"gateway": {"mode": "remote", "remote": {"url": "ws://127.0.0.1:7", "token": "r"}}},
            {},
            "ws://127.0.0.1:7/",
            {"token": "r"},
        ),
        (None, {"OPENCLAW_GATEWAY_PORT": "7"}, "ws://127.0.0.1:7/", {}),
    ],
)
def test_the_gateway_is_found_as_openclaw_finds_it(
    config: object, environ: dict[str, str], url: str, auth: dict[str, str] | None
) -> None:
    found = find_endpoint(config, environ)
    assert found is not None
    assert found.url == url
    assert auth is None or found.auth == auth
    assert "abc" not in repr(found)


@pytest.mark.parametrize("config", [None, [], {}, {"gateway": None}, {"gateway": {}}, {"agents": {"list": []}}])
def test_no_gateway_is_configured(config: object) -> None:
    assert find_endpoint(config, {}) is None


@pytest.mark.parametrize(
    ("gateway", "environ", "words"),
    [
        (
            {"mode": "remote", "remote": {"url": "wss://gw.example:443"}},
            {},
            "remote (gateway.remote.url is at gw.example",
        ),
        ({"mode": "remote"}, {}, "remote (gateway.remote.url is at no host"),
        (LOCAL, {"OPENCLAW_GATEWAY_URL": "ws://10.0.0.7:18789"}, "remote (OPENCLAW_GATEWAY_URL is at 10.0.0.7"),
        (LOCAL, {"OPENCLAW_GATEWAY_URL": "ws://[bad"}, "OPENCLAW_GATEWAY_URL is no URL"),
        (LOCAL, {"OPENCLAW_GATEWAY_URL": "wss://127.0.0.1:18789"}, "not a ws:// URL"),
        ({**LOCAL, "tls": {"enabled": True}}, {}, "TLS"),
        ({"mode": "local", "auth": {"token": "${NOT_SET}"}}, {}, "NOT_SET, which is not set"),
        ({"mode": "local", "auth": {"token": {"source": "file", "id": "/x"}}}, {}, "set OPENCLAW_GATEWAY_TOKEN"),
    ],
)
def test_a_gateway_only_the_command_line_can_reach_is_named(
    gateway: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(GatewayBarred, match=words.replace("(", r"\(")):
        find_endpoint({"gateway": gateway}, environ)


def test_files_are_read_anew_and_a_broken_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "openclaw.json"
    finder = EndpointFinder([file], {})
    assert finder.find() is None
    before = finder.signature()
    file.write_text("{gateway: {mode: 'local', auth: {token: '${FROM_DOTENV}'}}} // JSON5")
    (tmp_path / ".env").write_text("FROM_DOTENV=inside\n")
    assert finder.signature() != before
    assert finder.find() == Endpoint("ws://127.0.0.1:18789/", {"token": "inside"})
    assert EndpointFinder([file], {}, is_off=True).find() is None
    file.write_text("{")
    with pytest.raises(GatewayBarred, match="cannot be read"):
        finder.find()


def test_connect_is_what_the_gateway_was_seen_to_accept() -> None:
    ours, theirs = connect_params({"token": "kit-token"}, "1.0.0"), recorded("handshake: connect", "->")["params"]
    assert ours["client"].pop("displayName") == "openclaw-dispatcher"
    assert ours["scopes"] == [*theirs["scopes"], "operator.admin"]
    assert {**ours, "scopes": None} == {**theirs, "scopes": None}
    assert json.loads(request("7", "m", {"a": 1})) == {"type": "req", "id": "7", "method": "m", "params": {"a": 1}}


@pytest.mark.parametrize(
    ("answer", "kind", "status"),
    [
        (error("connect while the Gateway is starting"), GatewayUnavailable, "starting"),
        (RESTARTING, GatewayUnavailable, "draining"),
        (error("call without the scope"), GatewayRefused, "down"),
        (WORK_START_CHANGED, GatewayRefused, "down"),
        (None, GatewayRefused, "down"),
        ({"code": 7, "details": "x"}, GatewayRefused, "down"),
    ],
)
def test_refusals_are_told_apart(answer: object, kind: type[GatewayError], status: str) -> None:
    found = read_error(answer)
    assert type(found) is kind
    assert status_after(found) == status


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (error("wrong token: connect"), "refuses our token; check gateway.auth.token"),
        (error("client id of our own: connect"), "refuses us: invalid connect params"),
        (
            {"code": "NOT_PAIRED", "message": "x", "details": {"code": "DEVICE_IDENTITY_REQUIRED"}},
            "set gateway.auth.token",
        ),
        ({"code": "INVALID_REQUEST", "message": "x", "details": {"code": "PROTOCOL_MISMATCH"}}, "protocol 4"),
    ],
)
def test_why_we_are_not_let_in_is_said_with_what_to_check(answer: object, words: str) -> None:
    refused = read_error(answer)
    assert isinstance(refused, GatewayRefused)
    assert words in str(barred_by(refused))


def test_the_hello_is_read_and_another_protocol_refused() -> None:
    hello = read_hello(payload("handshake: connect"))
    assert (hello.boot_id, hello.version, hello.phase) == (
        "5decc449-99da-4b6a-9c1b-4b4d536e7fc2",
        "2026.9.6",
        "accepting",
    )
    assert hello.missing_scopes == ("operator.admin",)
    for other in ({}, None, {"protocol": 5}, {"protocol": "4"}):
        with pytest.raises(GatewayBarred, match="protocol"):
            read_hello(other)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null", b"\x00", '{"type":"other"}', "[" * 100_000])
def test_what_is_no_frame_is_nothing(text: str | bytes) -> None:
    assert read_frame(text) is None


def test_events_nobody_reads_are_not_parsed() -> None:
    assert read_frame('{"type":"event","event":"chat","payload":{broken') is None
    assert read_frame('{"type":"event","event":"shutdown","payload":{}}') is not None
    answer = read_frame('{"type":"res","id":"3","ok":true,"payload":{"a":1}}')
    assert answer == Response("3", {"a": 1}, None)


def test_g4_tasks_are_read_as_they_are_and_a_ghost_is_told_from_a_living_one() -> None:
    [row] = payload("background command of a session")["tasks"]
    task = read_task(row)
    assert (task.kind, task.session_key, task.title, task.is_live) == (
        "exec",
        "agent:linus:inbox-bg",
        "sleep 200",
        True,
    )
    assert not read_task({**row, "execution": {"state": "unknown"}}).is_live
    # A turn in its first moments is unknown too, and alive.
    assert read_task({**row, "kind": "cli", "execution": {"state": "unknown"}}).is_live
    assert read_task({**row, "execution": "another shape"}).is_live
    assert not read_task({**row, "status": "cancelled"}).is_live


CLI_DOWN = {
    "ok": False,
    "error": {"type": "gateway_transport_error", "kind": "closed", "message": "Gateway not reachable"},
}
CLI_HUNG = {"ok": False, "error": {"type": "gateway_transport_error", "kind": "timeout", "message": "gateway timeout"}}
CLI_REFUSED = {"ok": False, "error": {"code": "INVALID_REQUEST", "message": "unknown method"}}


@pytest.mark.parametrize(
    ("result", "document", "kind"),
    [
        (CallResult(1, b""), CLI_DOWN, GatewayUnavailable),
        (CallResult(1, b""), CLI_HUNG, GatewaySilent),
        (CallResult(1, b""), CLI_REFUSED, GatewayRefused),
        (CallResult(1, b"boom"), None, GatewaySilent),
        (CallResult(None, b"", "no end within 20 s"), None, GatewaySilent),
    ],
)
def test_the_command_lines_failures_are_those_of_the_link(
    result: CallResult, document: object, kind: type[GatewayError]
) -> None:
    with pytest.raises(kind, match=r"sessions\.list: "):
        payload_of("sessions.list", result, document)
    assert payload_of("sessions.list", CallResult(0, b""), {"sessions": []}) == {"sessions": []}


def test_a_gateway_that_is_away_is_tried_about_once_a_second_and_one_that_bars_us_about_once_a_minute() -> None:
    timings = LinkTimings()
    for draw in (0.0, 0.5, 0.999):
        assert 0.4 < seconds_to_next_try("down", timings, lambda at=draw: at) < 1.0
        assert 40 < seconds_to_next_try("barred", timings, lambda at=draw: at) < 80
