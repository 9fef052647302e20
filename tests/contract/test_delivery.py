"""What is delivered, in which order, and what is lost: the guarantees of postgres_changes, and its limits."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dispatcher.local.postgres import PostgresServer
from dispatcher.local.realtime import Limits, Timings
from tests.contract.local_realtime import LocalRealtime
from tests.contract.raw_client import RawClient
from tests.support.database import Database
from tests.support.waiting import wait_until

PLAIN = {"event": "INSERT", "schema": "public", "table": "plain"}
TOPIC = "realtime:x"


@pytest.fixture
def client(realtime: LocalRealtime) -> Iterator[RawClient]:
    with RawClient(realtime.websocket_url(apikey=realtime.keys.service_role_key)) as client:
        yield client


@pytest.fixture
def own_client(own_realtime: LocalRealtime) -> Iterator[RawClient]:
    with RawClient(own_realtime.websocket_url(apikey=own_realtime.keys.service_role_key)) as client:
        yield client


@contextmanager
def served(database: Database, **options: Any) -> Iterator[RawClient]:
    """A client of a server with timings or limits of its own."""
    with ExitStack() as stack:
        realtime = stack.enter_context(LocalRealtime(database.url, **options))
        url = realtime.websocket_url(apikey=realtime.keys.service_role_key)
        yield stack.enter_context(RawClient(url))


def record(client: RawClient, topic: str = TOPIC) -> dict[str, Any]:
    return dict(client.payload(topic, "postgres_changes")["data"]["record"])


def test_commit_order_across_transactions_and_statement_order_within(
    client: RawClient, recorded_database: Database
) -> None:
    client.subscribe(TOPIC, PLAIN)
    first, second = recorded_database.connect(autocommit=False), recorded_database.connect(autocommit=False)
    first.execute("insert into plain values (1, 'a')")
    second.execute("insert into plain values (2, 'b')")
    first.execute("insert into plain values (3, 'c')")
    second.commit()
    first.commit()
    assert [record(client)["id"] for _ in range(3)] == [2, 1, 3]


def test_nothing_is_sent_for_a_rollback_or_a_truncate(client: RawClient, recorded_database: Database) -> None:
    client.subscribe(TOPIC, {"event": "*", "schema": "public", "table": "plain"})
    undone = recorded_database.connect(autocommit=False)
    undone.execute("insert into plain values (1, 'undone')")
    undone.rollback()
    recorded_database.execute("insert into plain values (2, 'kept')")
    recorded_database.execute("truncate plain")
    recorded_database.execute("insert into plain values (3, 'last')")
    assert [record(client)["id"] for _ in range(2)] == [2, 3]
    assert client.rest() == []


def test_row_committed_just_before_a_warm_join_is_delivered(recorded_database: Database) -> None:
    timings = Timings(cold_subscribe=(0, 0), warm_subscribe=(0, 0), idle_poll=3)
    rests = """select count(*) from pg_stat_activity where datname = current_database() and state = 'idle'
                  and application_name = 'realtime_changes' and state_change < clock_timestamp() - interval '200 ms'"""
    with served(recorded_database, timings=timings) as client:
        client.subscribe("realtime:warm", PLAIN)
        recorded_database.execute("insert into plain values (1, 'polled')")
        client.expect("realtime:warm")
        wait_until(lambda: recorded_database.value(rests), 10)  # the next poll is seconds away
        recorded_database.execute("insert into plain values (2, 'overlap')")
        client.subscribe(TOPIC, PLAIN)
        assert record(client)["v"] == "overlap"


def test_rows_before_a_cold_start_has_finished_are_lost(recorded_database: Database) -> None:
    timings = Timings(cold_subscribe=(0.3, 0.3), idle_poll=0.02)
    with served(recorded_database, timings=timings) as client:
        client.join(TOPIC, PLAIN)
        client.reply(TOPIC)
        recorded_database.execute("insert into plain values (1, 'too early')")
        assert client.payload(TOPIC, "system")["message"] == "Subscribed to PostgreSQL"
        recorded_database.execute("insert into plain values (2, 'in time')")
        assert record(client)["v"] == "in time"


def test_each_channel_of_each_client_gets_its_frame(realtime: LocalRealtime, recorded_database: Database) -> None:
    url = realtime.websocket_url(apikey=realtime.keys.service_role_key, vsn="2.0.0")
    with RawClient(url) as one, RawClient(url) as other:
        for client in (one, other):
            client.subscribe("realtime:x", PLAIN)
            client.subscribe("realtime:y", PLAIN)
        recorded_database.execute("insert into plain values (1, 'both')")
        for client in (one, other):
            assert [record(client, topic)["v"] for topic in ("realtime:x", "realtime:y")] == ["both", "both"]
            assert client.rest() == []


def test_entries_that_select_different_columns_make_frames_of_their_own(
    client: RawClient, recorded_database: Database
) -> None:
    client.subscribe(TOPIC, PLAIN, {**PLAIN, "select": ["v"]})
    recorded_database.execute("insert into plain values (1, 'x', 'a1')")
    frames = [client.payload(TOPIC, "postgres_changes") for _ in range(2)]
    assert sorted(list(frame["data"]["record"]) for frame in frames) == [["v", "id"], ["v", "id", "agent_id"]]
    assert all(len(frame["ids"]) == 1 for frame in frames)


def test_time_zone_of_the_database_shows_in_records_only(own_database: Database) -> None:
    own_database.execute(f"alter database {own_database.name} set timezone to 'Europe/Madrid'")
    with served(own_database) as client:
        client.subscribe(TOPIC, {"event": "INSERT", "schema": "public", "table": "events"})
        own_database.execute("insert into events (created_at) values ('2026-07-01 10:00:00+00')")
        data = client.payload(TOPIC, "postgres_changes")["data"]
        assert data["record"]["created_at"] == "2026-07-01T12:00:00+02:00"
        assert data["commit_timestamp"].endswith("Z")


def test_publication_change_subscribes_the_good_anew_and_never_revives_the_failed(
    own_client: RawClient, own_database: Database
) -> None:
    own_client.subscribe(TOPIC, PLAIN)
    own_client.join("realtime:np", {"event": "INSERT", "schema": "public", "table": "notpub"})
    own_client.reply("realtime:np")
    assert own_client.payload("realtime:np", "system")["status"] == "error"
    own_database.execute("alter publication supabase_realtime add table notpub")
    assert own_client.payload(TOPIC, "system")["message"] == "Subscribed to PostgreSQL"
    own_database.execute("insert into notpub values (1)")
    own_database.execute("insert into plain values (1)")
    assert record(own_client)["id"] == 1
    assert own_client.rest() == []


def test_record_just_below_the_limit_is_whole(client: RawClient, recorded_database: Database) -> None:
    client.subscribe(TOPIC, PLAIN)
    recorded_database.execute("insert into plain values (1, repeat('x', 1040000), 'a1')")
    frame = client.payload(TOPIC, "postgres_changes")
    assert frame["data"]["errors"] is None
    assert len(frame["data"]["record"]["v"]) == 1_040_000


def test_wide_transaction_arrives_whole_and_in_order(client: RawClient, recorded_database: Database) -> None:
    client.subscribe(TOPIC, PLAIN)
    recorded_database.execute("insert into plain select n, 'v' from generate_series(1, 3000) as n")
    assert [record(client)["id"] for _ in range(3000)] == list(range(1, 3001))


def test_deliveries_above_the_rate_are_dropped_without_a_word_until_the_average_has_fallen(
    recorded_database: Database,
) -> None:
    limits = Limits(max_events_per_second=10, rate_window=1.0)
    with served(recorded_database, limits=limits) as client:
        client.subscribe(TOPIC, PLAIN)
        recorded_database.execute("insert into plain select n, 'flood' from generate_series(1, 50) as n")
        assert [record(client)["id"] for _ in range(10)] == list(range(1, 11))
        for number in range(1000, 1200):
            recorded_database.execute("insert into plain values (%s, 'probe')", (number,))
            try:
                found = json.loads(client.expect(TOPIC, deadline=0.1))
            except TimeoutError:
                continue
            assert found["payload"]["data"]["record"]["v"] == "probe"
            return
        pytest.fail("nothing came after the flood")


def test_unchanged_toasted_value_comes_from_a_full_replica_identity(
    own_client: RawClient, own_database: Database
) -> None:
    own_database.execute("alter table plain replica identity full")
    own_database.execute("insert into plain values (1, repeat('x', 10000), 'before')")
    own_client.subscribe(TOPIC, {"event": "UPDATE", "schema": "public", "table": "plain"})
    own_database.execute("update plain set agent_id = 'after'")
    data = own_client.payload(TOPIC, "postgres_changes")["data"]
    assert data["record"] == {"v": "x" * 10_000, "id": 1, "agent_id": "after"}
    assert data["old_record"] == {"v": "x" * 10_000, "id": 1, "agent_id": "before"}


def test_update_of_the_key_reports_the_old_key(client: RawClient, recorded_database: Database) -> None:
    recorded_database.execute("insert into plain values (1, 'x')")
    client.subscribe(TOPIC, {"event": "UPDATE", "schema": "public", "table": "plain"})
    recorded_database.execute("update plain set id = 2")
    data = client.payload(TOPIC, "postgres_changes")["data"]
    assert (data["record"]["id"], data["old_record"]) == (2, {"id": 1})


def test_columns_that_the_role_may_not_read_are_left_out(own_realtime: LocalRealtime, own_database: Database) -> None:
    own_database.execute("revoke all on plain from authenticated")
    own_database.execute("grant select (id, agent_id) on plain to authenticated")
    with RawClient(own_realtime.websocket_url(apikey=own_realtime.keys.token("authenticated"))) as client:
        client.subscribe(TOPIC, PLAIN)
        own_database.execute("insert into plain values (1, 'secret', 'a1')")
        data = client.payload(TOPIC, "postgres_changes")["data"]
        assert data["record"] == {"id": 1, "agent_id": "a1"}
        assert [column["name"] for column in data["columns"]] == ["id", "agent_id"]
        client.join("realtime:f", {**PLAIN, "filter": "v=eq.x"})
        client.reply("realtime:f")
        assert "invalid column for filter v" in client.payload("realtime:f", "system")["message"]


def test_slot_is_temporary_and_goes_with_the_server(cluster: PostgresServer, own_database: Database) -> None:
    count = "select count(*) from pg_replication_slots where database = current_database() and temporary"
    with LocalRealtime(own_database.url) as realtime:
        assert own_database.value(count) == 0
        with RawClient(realtime.websocket_url(apikey=realtime.keys.service_role_key)) as client:
            client.subscribe(TOPIC, PLAIN)
            assert own_database.value(count) == 1
    assert own_database.value(count) == 0
