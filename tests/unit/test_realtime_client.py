"""The seams to the official client: what is replaced must still be there, and be what we think it is."""

import inspect
import json
import logging
from typing import Any

import pytest
import realtime
from realtime import AsyncRealtimeChannel, AsyncRealtimeClient
from realtime._async import channel as channel_library
from realtime._async import client as library
from realtime.message import ServerMessageAdapter
from websockets.asyncio.client import connect
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus, ProxyError
from websockets.http11 import Response

from dispatcher.errors import DispatcherError
from dispatcher.supabase import realtime_client
from dispatcher.supabase.network import Network
from dispatcher.supabase.realtime_client import (
    FrameAlarm,
    SupervisedClient,
    realtime_url,
    require_version,
    with_plain_password,
)
from dispatcher.supabase.realtime_supervisor import RealtimeTarget, connection_cause


def test_ff05_an_older_client_is_refused() -> None:
    require_version()
    require_version("2.34.1")
    require_version("3.0.0")
    for version in ("2.34.0", "2.33.9", "1.99.99"):
        with pytest.raises(DispatcherError, match="2\\.34\\.1 or newer"):
            require_version(version)


def test_ff15_the_library_opens_its_socket_by_the_name_that_is_replaced() -> None:
    assert vars(library)["connect"] is realtime_client._connect
    source = inspect.getsource(AsyncRealtimeClient.connect)
    assert "await connect(endpoint_url, open_timeout=" in source


@pytest.mark.parametrize("proxy", [None, "http://proxy:3128"])
def test_ff12_ff15_our_sockets_take_big_frames_and_only_the_proxy_that_was_set(
    monkeypatch: pytest.MonkeyPatch, proxy: str | None
) -> None:
    asked: dict[str, Any] = {}

    def remember(uri: str, **options: Any) -> connect:
        asked.update(options, uri=uri)
        raise ConnectionRefusedError("not here")

    monkeypatch.setattr("websockets.connect", remember)
    with pytest.raises(ConnectionRefusedError):
        run(open_client(proxy))
    assert (asked["proxy"], asked["max_size"]) == (proxy, 8 * 1024 * 1024)
    asked.clear()
    with pytest.raises(ConnectionRefusedError):
        run(open_other_client())
    assert "proxy" not in asked  # somebody else's client in this process keeps the library's own ways


async def open_client(proxy: str | None) -> None:
    await SupervisedClient("http://127.0.0.1:9", "key", timeout=1.0, network=Network(proxy=proxy)).connect()


async def open_other_client() -> None:
    await AsyncRealtimeClient("http://127.0.0.1:9", "key", auto_reconnect=False).connect()


def run(work: Any) -> None:
    import asyncio  # noqa: PLC0415 - only here

    asyncio.run(work)


def test_the_private_names_we_build_on_are_there() -> None:
    assert inspect.iscoroutinefunction(AsyncRealtimeClient._listen)
    assert list(inspect.signature(AsyncRealtimeChannel._handle_message).parameters) == ["self", "message"]
    assert "channel._handle_message(message)" in inspect.getsource(AsyncRealtimeClient._listen)
    assert "Unrecognized message format" in inspect.getsource(AsyncRealtimeClient._listen)
    library_text = inspect.getsource(library) + inspect.getsource(channel_library)
    assert all(text in library_text for text in realtime_client._SAID_BY_US)
    assert realtime.__version__.startswith("2.")


def test_a_frame_that_cannot_be_read_is_counted_and_kept_out_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alarms: list[bool] = []
    alarm = FrameAlarm(alarms.append)
    alarm.install()
    try:
        with caplog.at_level(logging.ERROR):
            library.logger.error("Unrecognized message format %r", "ROW")
            library.logger.error('Unrecognized message format \'{"errors":["Error 401: Unauthorized"]}\'')
            library.logger.error("Connection attempt failed: [Errno 111]")
            channel_library.logger.error("join push error for channel x: {}")
            library.logger.error("something new")
    finally:
        alarm.remove()
    library.logger.error("Unrecognized message format: nobody listens any more")
    assert alarms == [False, True]
    assert caplog.text.count("Unrecognized") == 3
    assert "ROW" not in caplog.text
    assert "Error 401" not in caplog.text
    assert [record.message for record in caplog.records if "Unrecognized" not in record.message] == ["something new"]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("http://p:1", "http://p:1"),
        ("http://us%65r:p%40ss%3Aw@p:1", "http://user:p@ss:w@p:1"),
        ("http://user:a%2Fb@p:1", "http://user:a%2Fb@p:1"),
    ],
)
def test_c16_a_proxys_password_reaches_realtime_unescaped(given: str, plain: str) -> None:
    assert with_plain_password(given) == plain


def test_the_url_is_the_projects() -> None:
    for url in ("http://p.test", "http://p.test/", "http://p.test/realtime/v1"):
        assert realtime_url(url) == "http://p.test/realtime/v1"


@pytest.mark.parametrize(
    ("error", "proxy", "words"),
    [
        (
            InvalidStatus(Response(401, "Unauthorized", Headers(), b'{"error":"Token has expired"}')),
            None,
            "Token has expired (HTTP 401); check SUPABASE_SERVICE_ROLE_KEY",
        ),
        (InvalidStatus(Response(502, "Bad", Headers(), b"<html>")), None, "no reason given (HTTP 502)"),
        (ProxyError("nope"), "http://p", "REALTIME_PROXY refuses"),
        (
            ConnectionRefusedError("refused"),
            "http://u:pw@p:1",
            "through the proxy http://p:1 (REALTIME_PROXY): the connection is refused",
        ),
        (TimeoutError(), None, "in time"),
        (OSError("unreachable"), None, "cannot connect to Realtime: unreachable"),
    ],
)
def test_why_there_is_no_connection_is_told_in_words_that_help(error: Exception, proxy: str | None, words: str) -> None:
    target = RealtimeTarget(
        "http://p.test",
        "t",
        "i",
        "auto",
        lambda: None,
        Network(proxy=proxy, proxy_setting="REALTIME_PROXY", environ={}),
    )
    assert words in connection_cause(error, target)


BROADCAST = {
    "topic": "realtime:gateway:1",
    "event": "broadcast",
    "payload": {"event": "inbox", "payload": {"agent_id": "a"}, "type": "broadcast", "meta": {"id": "m"}},
    "ref": None,
}


def test_a_plain_broadcast_is_heard_without_the_library_and_as_the_library_would_hear_it() -> None:
    assert "async for msg in ws_connection" in inspect.getsource(AsyncRealtimeClient._listen)
    client = SupervisedClient("http://project.test", "key", timeout=1.0, network=Network())
    channel = client.channel("gateway:1")
    heard: list[Any] = []
    channel.on_broadcast("*", heard.append)
    text = json.dumps(BROADCAST)
    assert client._take(text)
    channel._handle_message(ServerMessageAdapter.validate_json(text))
    assert [(one["event"], one["payload"]) for one in heard] == [("inbox", {"agent_id": "a"})] * 2


@pytest.mark.parametrize(
    "frame",
    [
        json.dumps(BROADCAST).encode(),
        json.dumps(BROADCAST)[:-1],
        "[" * 100_000 + '"broadcast"',
        json.dumps({**BROADCAST, "event": "system"}),
        json.dumps({**BROADCAST, "topic": "realtime:another"}),
        json.dumps({**BROADCAST, "topic": ["realtime:gateway:1"]}),
        json.dumps({**BROADCAST, "payload": {"event": "inbox"}}),
        json.dumps({**BROADCAST, "payload": {"event": 1, "payload": {}}}),
        json.dumps({**BROADCAST, "payload": {"event": "inbox", "payload": {"text": "x" * 70_000}}}),
        json.dumps(["broadcast"]),
    ],
    ids=str.split("bytes cut deep system another list bare number long array"),
)
def test_every_other_frame_is_left_to_the_library(frame: str | bytes) -> None:
    client = SupervisedClient("http://project.test", "key", timeout=1.0, network=Network())
    client.channel("gateway:1").on_broadcast("*", lambda _payload: pytest.fail("it was heard"))
    assert not client._take(frame)


def test_a_callback_that_raises_at_a_broadcast_ends_nothing() -> None:
    def upset(_payload: object) -> None:
        raise KeyError("nothing")

    client = SupervisedClient("http://project.test", "key", timeout=1.0, network=Network())
    client.channel("gateway:1").on_broadcast("*", upset)
    assert client._take(json.dumps(BROADCAST))
