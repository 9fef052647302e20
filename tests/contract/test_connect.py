"""Handshakes and limits: what the real server refuses, and with which words."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State

from dispatcher.local.realtime import Limits, Timings
from tests.contract import recordings
from tests.contract.local_realtime import LocalRealtime
from tests.contract.raw_client import RawClient
from tests.contract.replay import Replay, token
from tests.support.database import Database

_CONNECT = re.compile(r"CONNECT ws://(?P<host>[^:/]+)(?::\d+)?(?P<path>/[^?]+)\?(?P<query>\S*)")
_REFUSED = re.compile(r"HANDSHAKE (?P<status>\d+) (?P<headers>\{.*\}) body=(?P<body>.*)$")
_KINDS = {
    "connect_key_bad_signature": "bad_signature",
    "connect_key_expired": "expired",
    "connect_key_no_role": "no_role",
    "connect_key_no_exp": "no_exp",
    "connect_key_alg_none": "alg_none",
}
REFUSALS = [
    name
    for name in recordings.names()
    if name.startswith(("connect_", "vsn_")) and any(_REFUSED.match(note) for note in recordings.notes(name))
]
Started = Callable[..., LocalRealtime]


@pytest.fixture
def started(recorded_database: Database) -> Iterator[Started]:
    """Starts servers with limits or timings of their own."""
    running: list[LocalRealtime] = []

    def start(**options: object) -> LocalRealtime:
        server = LocalRealtime(recorded_database.url, **options)  # type: ignore[arg-type]  # passed on as they are
        running.append(server)
        return server.__enter__()

    yield start
    for server in running:
        server.__exit__()


def recorded_url(realtime: LocalRealtime, name: str) -> str:
    [found] = [match for note in recordings.notes(name) if (match := _CONNECT.match(note))]
    query = found["query"].replace("<jwt>", token(realtime, _KINDS.get(name, "service_role")))
    return f"ws://{found['host']}:{realtime.port}{found['path']}?{query}"


@pytest.mark.parametrize("name", REFUSALS)
def test_handshake_is_refused_as_recorded(name: str, shared_realtime: LocalRealtime) -> None:
    [recorded] = [match for note in recordings.notes(name) if (match := _REFUSED.match(note))]
    with pytest.raises(InvalidStatus) as caught:
        RawClient(recorded_url(shared_realtime, name))
    response = caught.value.response
    assert response.status_code == int(recorded["status"])
    assert response.body.decode() == recorded["body"]
    assert response.headers.get("content-type", "") == ("application/json; charset=utf-8" if recorded["body"] else "")


def test_key_in_the_header_wins_over_the_url(shared_realtime: LocalRealtime) -> None:
    url = shared_realtime.websocket_url(apikey="nonsense", vsn="1.0.0")
    with RawClient(url, headers={"x-api-key": shared_realtime.keys.service_role_key}) as client:
        client.sync()


def test_handshake_offers_no_extension_and_no_subprotocol(shared_realtime: LocalRealtime) -> None:
    with RawClient(shared_realtime.websocket_url(apikey=shared_realtime.keys.anon_key)) as client:
        response = client.connection.response
        assert response is not None
        assert "sec-websocket-extensions" not in response.headers
        assert "sec-websocket-protocol" not in response.headers


def test_refusal_waits_so_that_a_client_cannot_hammer(started: Started) -> None:
    realtime = started(timings=Timings(reject_delay=0.3))
    with pytest.raises(TimeoutError):
        RawClient(realtime.websocket_url(), open_timeout=0.15)
    with pytest.raises(InvalidStatus):
        RawClient(realtime.websocket_url(), open_timeout=5)


def test_suspended_project_is_forbidden(started: Started) -> None:
    realtime = started(limits=Limits(suspended=True))
    with pytest.raises(InvalidStatus) as caught:
        RawClient(realtime.websocket_url(apikey=realtime.keys.anon_key))
    assert caught.value.response.status_code == 403
    assert caught.value.response.body == b'{"error":"Realtime was disabled for this tenant"}'


def test_one_user_too_many_is_refused(started: Started) -> None:
    realtime = started(limits=Limits(max_users=1))
    url = realtime.websocket_url(apikey=realtime.keys.anon_key)
    with RawClient(url), pytest.raises(InvalidStatus) as caught:
        RawClient(url)
    assert caught.value.response.status_code == 429
    assert caught.value.response.body == b'{"error":"Too many connected users"}'


def test_too_many_joins_close_the_socket_and_the_door(started: Started) -> None:
    realtime = started(limits=Limits(max_joins_per_second=1, rate_window=3.0))
    url = realtime.websocket_url(apikey=realtime.keys.anon_key)
    with RawClient(url) as client:
        for number in range(3):
            client.join(f"realtime:j{number}")
            assert client.reply(f"realtime:j{number}")["status"] == "ok"
        client.join("realtime:j3")
        refused = client.reply("realtime:j3")
        assert refused["response"] == {"reason": "ClientJoinRateLimitReached: Too many joins per second"}
        assert client.close_code() == 1001
    with pytest.raises(InvalidStatus) as caught:
        RawClient(url)
    assert caught.value.response.status_code == 429
    assert caught.value.response.body == b'{"error":"Too many joins per second"}'


def test_one_channel_too_many_is_refused_as_recorded(started: Started, recorded_database: Database) -> None:
    Replay("too_many_channels", started(limits=Limits(max_channels_per_socket=3)), recorded_database).run()


def test_requested_disconnect_looks_as_recorded(started: Started, recorded_database: Database) -> None:
    Replay("tenant_disconnect_operation", started(), recorded_database).run()


def test_frame_above_the_limit_closes_with_1009(shared_realtime: LocalRealtime) -> None:
    with RawClient(shared_realtime.websocket_url(apikey=shared_realtime.keys.anon_key)) as client:
        with suppress(ConnectionClosed):  # the close may come while the frame is still on its way
            client.send("x" * 5_000_001)
        assert client.close_code() == 1009


def test_silent_client_is_closed_with_1000_but_pings_keep_it(started: Started) -> None:
    realtime = started(timings=Timings(idle_close=0.3))
    url = realtime.websocket_url(apikey=realtime.keys.anon_key)
    with RawClient(url) as silent, RawClient(url) as pinging:
        while silent.connection.state is State.OPEN:
            assert pinging.connection.ping().wait(5)
        assert silent.close_code() == 1000
        pinging.sync()


def test_shutdown_closes_with_1012_and_no_channel_frame(started: Started) -> None:
    realtime = started()
    with RawClient(realtime.websocket_url(apikey=realtime.keys.service_role_key)) as client:
        client.subscribe("realtime:d", {"event": "INSERT", "schema": "public", "table": "plain"})
        realtime.close_server()
        assert client.close_code() == 1012
        assert not client.waiting["realtime:d"]
