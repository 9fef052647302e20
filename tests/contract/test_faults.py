"""Every fault switch does what its table says, and stops when it is taken back."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from dispatcher.local.realtime import Faults
from tests.contract.local_realtime import LocalRealtime
from tests.contract.raw_client import RawClient
from tests.support.database import Database

PLAIN = {"event": "INSERT", "schema": "public", "table": "plain"}
TOPIC = "realtime:x"


@pytest.fixture
def url(realtime: LocalRealtime) -> str:
    return realtime.websocket_url(apikey=realtime.keys.service_role_key)


@pytest.fixture
def client(url: str) -> Iterator[RawClient]:
    with RawClient(url) as client:
        yield client


@pytest.fixture
def send(recorded_database: Database) -> Any:
    def send(number: int) -> None:
        recorded_database.execute("select realtime.send(%s, 'wake', 'x', true)", (json.dumps({"n": number}),))

    return send


def numbers(client: RawClient, count: int) -> list[int]:
    return [client.payload(TOPIC, "broadcast")["payload"]["n"] for _ in range(count)]


def test_events_are_dropped_and_duplicated_by_number(
    realtime: LocalRealtime,
    client: RawClient,
    send: Any,
    recorded_database: Database,
    wait_until: Callable[..., object],
) -> None:
    client.listen(TOPIC)
    realtime.set_faults(drop_events=1)
    send(1)
    send(2)
    assert numbers(client, 1) == [2]
    realtime.set_faults(duplicate_events=1)
    send(3)
    send(4)
    assert numbers(client, 3) == [3, 3, 4]
    realtime.set_faults(drop_events=-1)
    send(5)
    wait_until(lambda: recorded_database.value("select count(*) from realtime.messages") == 0)
    realtime.set_faults(drop_events=0)
    send(6)
    assert numbers(client, 1) == [6]
    assert realtime.faults == Faults()


def test_delayed_events_keep_their_order_and_hold_up_nothing_else(
    realtime: LocalRealtime, client: RawClient, send: Any
) -> None:
    client.listen(TOPIC)
    realtime.set_faults(delay_events=0.3)
    send(1)
    send(2)
    client.sync()
    assert not client.waiting[TOPIC]
    assert numbers(client, 2) == [1, 2]


@pytest.mark.parametrize("code", [1000, 1001, 1006, 1012])
def test_close_closes_every_socket_with_its_code(realtime: LocalRealtime, client: RawClient, code: int) -> None:
    client.sync()
    realtime.set_faults(close=code)
    assert client.close_code() == code


def test_silence_answers_pings_and_nothing_else(realtime: LocalRealtime, client: RawClient, send: Any) -> None:
    client.listen(TOPIC)
    realtime.set_faults(silence=True)
    client.push("phoenix", "heartbeat", {})
    send(1)
    assert client.connection.ping().wait(5)
    with pytest.raises(TimeoutError):
        client.expect(TOPIC, deadline=0.1)
    realtime.set_faults(silence=False)
    send(2)
    assert numbers(client, 1) == [2]


def test_dead_change_subscription_is_silent_until_a_new_token_or_join(
    realtime: LocalRealtime, client: RawClient, recorded_database: Database
) -> None:
    client.subscribe(TOPIC, PLAIN)
    client.subscribe("realtime:other", PLAIN)
    realtime.set_faults(changes_dead=True)
    client.subscribe("realtime:new", PLAIN)
    recorded_database.execute("insert into plain values (1)")
    client.expect("realtime:new")
    assert client.rest() == []
    client.push(TOPIC, "access_token", {"access_token": realtime.keys.token("service_role")})
    assert client.payload(TOPIC, "system")["message"] == "Subscribed to PostgreSQL"
    client.join("realtime:other", PLAIN)
    assert client.reply("realtime:other")["status"] == "ok"
    assert client.message("realtime:other")["event"] == "phx_close"
    assert client.payload("realtime:other", "system")["message"] == "Subscribed to PostgreSQL"
    recorded_database.execute("insert into plain values (2)")
    for topic in (TOPIC, "realtime:other", "realtime:new"):
        assert client.payload(topic, "postgres_changes")["data"]["record"]["id"] == 2


def test_dead_broadcast_path_times_out_joins_and_comes_back_with_the_next(
    realtime: LocalRealtime, client: RawClient, send: Any
) -> None:
    client.listen(TOPIC)
    realtime.set_faults(broadcast_dead=True)
    send(1)
    client.join("realtime:late", private=True, broadcast={"replication_ready": True})
    assert client.reply("realtime:late")["status"] == "ok"
    told = client.payload("realtime:late", "system")
    assert (told["status"], told["message"]) == (
        "error",
        "Replication connection was not established in time",
    )
    assert client.message("realtime:late")["event"] == "phx_close"
    assert not client.waiting[TOPIC]
    realtime.set_faults(broadcast_dead=False)
    client.listen("realtime:late")
    send(2)
    assert numbers(client, 1) == [2]


def test_rate_limit_drops_changes_without_a_word(
    realtime: LocalRealtime, client: RawClient, recorded_database: Database
) -> None:
    client.subscribe(TOPIC, PLAIN)
    realtime.set_faults(rate_limited=True)
    recorded_database.execute("insert into plain values (1)")
    with pytest.raises(TimeoutError):
        client.expect(TOPIC, deadline=0.3)
    realtime.set_faults(rate_limited=False)
    recorded_database.execute("insert into plain values (2)")
    assert client.payload(TOPIC, "postgres_changes")["data"]["record"]["id"] == 2


def test_records_are_trimmed_as_if_too_large(
    realtime: LocalRealtime, client: RawClient, recorded_database: Database
) -> None:
    client.subscribe(TOPIC, PLAIN)
    realtime.set_faults(trim_records=True)
    recorded_database.execute("insert into plain values (1, repeat('x', 100), 'a1')")
    data = client.payload(TOPIC, "postgres_changes")["data"]
    assert data["errors"] == ["Error 413: Payload Too Large"]
    assert data["record"] == {"id": 1, "agent_id": "a1"}


def test_joins_are_refused_and_late(realtime: LocalRealtime, client: RawClient) -> None:
    realtime.set_faults(refuse_join="IncreaseConnectionPool: Please increase your connection pool size")
    client.join(TOPIC, PLAIN)
    assert client.reply(TOPIC)["response"]["reason"].startswith("IncreaseConnectionPool")
    realtime.set_faults(refuse_join=None, join_delay=0.3)
    client.join(TOPIC, PLAIN)
    client.sync()
    assert not client.waiting[TOPIC]
    assert client.reply(TOPIC)["status"] == "ok"


def test_readiness_is_late(realtime: LocalRealtime, client: RawClient) -> None:
    realtime.set_faults(system_delay=0.3)
    client.join(TOPIC, PLAIN)
    assert client.reply(TOPIC)["status"] == "ok"
    client.sync()
    assert not client.waiting[TOPIC]
    assert client.payload(TOPIC, "system")["message"] == "Subscribed to PostgreSQL"


@pytest.mark.parametrize(
    ("status", "body"),
    [(401, b'{"error":"Failed to validate JWT signature"}'), (500, b"Internal Server Error")],
)
def test_handshakes_get_a_status(realtime: LocalRealtime, url: str, status: int, body: bytes) -> None:
    realtime.set_faults(connect_status=status)
    with pytest.raises(InvalidStatus) as caught:
        RawClient(url)
    assert (caught.value.response.status_code, caught.value.response.body) == (status, body)
    realtime.set_faults(connect_status=None)
    with RawClient(url) as client:
        client.sync()


def test_channels_are_closed_crashed_and_told_errors(realtime: LocalRealtime, client: RawClient) -> None:
    ref = client.subscribe(TOPIC, PLAIN)
    realtime.set_faults(system_error="something broke")
    told = client.payload(TOPIC, "system")
    assert (told["status"], told["message"]) == ("error", "something broke")
    realtime.set_faults(channel_close=True)
    assert client.message(TOPIC) == {"ref": ref, "topic": TOPIC, "event": "phx_close", "payload": {}}
    ref = client.subscribe(TOPIC, PLAIN)
    realtime.set_faults(channel_crash=True)
    message = client.message(TOPIC)
    assert (message["event"], message["ref"]) == ("phx_error", ref)
    assert client.rest() == []


def test_frames_are_big_or_no_json_or_denied(realtime: LocalRealtime, client: RawClient) -> None:
    client.subscribe(TOPIC, PLAIN)
    realtime.set_faults(big_frame=1_500_000)
    assert len(client.expect(TOPIC)) > 1_500_000
    realtime.set_faults(unparsable_frame=True)
    assert client.expect("?") == "{not json"
    realtime.set_faults(denied_event=True)
    data = client.payload(TOPIC, "postgres_changes")["data"]
    assert (data["errors"], data["commit_timestamp"]) == (["Error 401: Unauthorized"], None)


def test_down_cuts_sockets_and_resets_attempts_for_its_time(
    realtime: LocalRealtime, client: RawClient, url: str
) -> None:
    client.sync()
    realtime.set_faults(down_for=0.5)
    assert client.close_code() == 1006
    refused = 0
    while True:
        try:
            with RawClient(url) as again:
                again.sync()
                break
        except (OSError, InvalidHandshake, ConnectionClosed):
            refused += 1
    assert refused > 0
