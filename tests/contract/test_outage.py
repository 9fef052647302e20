"""The database away for a while: what comes back by itself, and what dies as on the real server."""

import json
from collections.abc import Callable, Iterator

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.contract.local_realtime import LocalRealtime
from tests.contract.raw_client import RawClient
from tests.support.database import Database

PLAIN = {"event": "INSERT", "schema": "public", "table": "plain"}
CHANGES, BROADCASTS = "realtime:changes", "realtime:broadcasts"
_CONNECTED = (
    "select count(*) from pg_stat_activity where datname = %s and application_name in "
    "('realtime_changes', 'realtime_broadcasts')"
)


class Outage:
    """Takes the database away from Realtime, and gives it back."""

    def __init__(self, cluster: PostgresServer, database: Database, wait_until: Callable[..., object]) -> None:
        self._admin = psycopg.connect(cluster.url(), autocommit=True)
        self._database = database
        self._wait_until = wait_until
        database.value("select 1")

    def begin(self) -> None:
        self._admin.execute(f"alter database {self._database.name} allow_connections false".encode())
        self._admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = %s and application_name like 'realtime_%%'",
            (self._database.name,),
        )
        self._wait_until(lambda: self.connected() == 0)

    def end(self) -> None:
        self._admin.execute(f"alter database {self._database.name} allow_connections true".encode())

    def end_and_wait(self) -> None:
        """Until both readers are connected again, the slot is there and the listener listens."""
        self.end()
        self._wait_until(lambda: self.connected() == 2)
        self._wait_until(
            lambda: self._database.value(
                "select count(*) from pg_replication_slots where database = current_database()"
            )
        )
        self._wait_until(
            lambda: self._database.value(
                "select count(*) from pg_stat_activity where datname = current_database() "
                "and application_name = 'realtime_broadcasts' and query = 'listen realtime_messages' "
                "and state = 'idle'"
            )
        )

    def connected(self) -> int:
        row = self._admin.execute(_CONNECTED, (self._database.name,)).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        self.end()
        self._admin.close()


@pytest.fixture
def outage(cluster: PostgresServer, own_database: Database, wait_until: Callable[..., object]) -> Iterator[Outage]:
    outage = Outage(cluster, own_database, wait_until)
    yield outage
    outage.close()


@pytest.fixture
def client(own_realtime: LocalRealtime) -> Iterator[RawClient]:
    with RawClient(own_realtime.websocket_url(apikey=own_realtime.keys.service_role_key)) as client:
        client.subscribe(CHANGES, PLAIN)
        client.listen(BROADCASTS)
        yield client


def write(database: Database, number: int) -> None:
    database.execute("insert into plain values (%s)", (number,))
    database.execute("select realtime.send(%s, 'wake', 'broadcasts', true)", (json.dumps({"n": number}),))


def test_both_paths_come_back_without_a_word_and_what_was_sent_meanwhile_is_lost(
    outage: Outage, client: RawClient, own_database: Database
) -> None:
    outage.begin()
    write(own_database, 1)
    client.sync()
    outage.end_and_wait()
    write(own_database, 2)
    assert client.payload(CHANGES, "postgres_changes")["data"]["record"]["id"] == 2
    assert client.payload(BROADCASTS, "broadcast")["payload"]["n"] == 2
    assert client.rest() == []


def test_both_paths_die_silently_when_asked_to(
    own_realtime: LocalRealtime, outage: Outage, client: RawClient, own_database: Database
) -> None:
    own_realtime.set_faults(changes_die_after_outage=True, broadcast_dies_after_outage=True)
    outage.begin()
    outage.end_and_wait()
    assert own_realtime.faults.broadcast_dead
    with RawClient(own_realtime.websocket_url(apikey=own_realtime.keys.service_role_key)) as newcomer:
        newcomer.subscribe(CHANGES, PLAIN)
        write(own_database, 1)
        newcomer.expect(CHANGES)
    assert client.rest() == []
    client.push(CHANGES, "access_token", {"access_token": own_realtime.keys.token("service_role")})
    assert client.payload(CHANGES, "system")["message"] == "Subscribed to PostgreSQL"
    own_realtime.set_faults(broadcast_dead=False)
    write(own_database, 2)
    assert client.payload(CHANGES, "postgres_changes")["data"]["record"]["id"] == 2
    assert client.payload(BROADCASTS, "broadcast")["payload"]["n"] == 2


def test_subscription_made_during_an_outage_is_ready_after_it(
    outage: Outage, client: RawClient, own_database: Database
) -> None:
    outage.begin()
    client.join("realtime:late", PLAIN)
    assert client.reply("realtime:late")["status"] == "ok"
    client.sync()
    assert not client.waiting["realtime:late"]
    outage.end()
    assert client.payload("realtime:late", "system")["message"] == "Subscribed to PostgreSQL"
    write(own_database, 1)
    assert client.payload("realtime:late", "postgres_changes")["data"]["record"]["id"] == 1


def test_private_join_during_an_outage_is_refused(outage: Outage, client: RawClient) -> None:
    outage.begin()
    client.join("realtime:private", private=True)
    assert client.reply("realtime:private")["status"] == "error"
