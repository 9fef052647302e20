"""A row that many share is held by another session, in front of the real daemon: named, waited out, no hindrance."""

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

ROWS = {
    "dispatcher_gateways": "select from dispatcher_gateways for update",
    "gateways": "select from gateways for update",
    "tenants": "select from tenants for update",
    "dispatcher_instances": "select from dispatcher_instances where state = 'running' for update",
}
HOLDER = "psql of an operator"
# What the daemon promises is a second and two; the rest is for a busy machine.
RELEASE_SECONDS, STOP_SECONDS = 5.0, 4.0


@contextlib.contextmanager
def held(database: Database, query: str) -> Iterator[Callable[[], None]]:
    """Another session holds these rows; the value lets go of them."""
    with database.connect(autocommit=False) as holder:
        holder.execute("select set_config('application_name', %s, false)", [HOLDER])
        assert holder.execute(query.encode()).rowcount > 0
        yield holder.rollback
        holder.rollback()


def ask_for_a_wake(database: Database) -> None:
    """An item, past the checks that would have its writer wait for the held tenant: a sweep finds it."""
    with database.connect() as writer:
        writer.execute("set session_replication_role = replica")
        writer.execute(
            """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
               select id, slug, 'heartbeat', 'held' from agents where slug = 'ada'"""
        )


def seconds_to_stop(daemon: DaemonProcess) -> float:
    started = time.monotonic()
    assert daemon.stop() == 0
    return time.monotonic() - started


@pytest.mark.parametrize("table", ROWS)
def test_f4_a_held_row_and_its_holder_are_named_and_claims_go_on_after_its_release(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, table: str
) -> None:
    seed.agent("ada")
    daemon = start_daemon(WAKE_COOLDOWN=0, HEARTBEAT_INTERVAL=1, RECONCILE_INTERVAL=1).ready()
    with held(database, ROWS[table]) as let_go:
        ask_for_a_wake(database)
        [line] = daemon.wait_for("lock.held")
        assert f"a row of {table} is held by pid " in line["held"]
        assert HOLDER in line["held"]
        assert "idle in transaction" in line["held"]
        daemon.wait_for("health.changed", status="degraded")
        assert daemon.of("wake.started") == []
        let_go()
        released_at = time.monotonic()
        daemon.wait_for("wake.started", agent="ada")
        assert time.monotonic() - released_at < RELEASE_SECONDS
    daemon.wait_for("lock.released")
    assert len(daemon.of("lock.held")) == 1


def test_f4_a_stop_waits_for_no_held_row(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    daemon = start_daemon(WAKE_COOLDOWN=0, HEARTBEAT_INTERVAL=1, RECONCILE_INTERVAL=1).ready()
    with contextlib.ExitStack() as stack:
        for query in ROWS.values():
            stack.enter_context(held(database, query))
        ask_for_a_wake(database)
        daemon.wait_for("lock.held")
        assert seconds_to_stop(daemon) < STOP_SECONDS


@pytest.mark.parametrize("table", ["gateways", "tenants", "dispatcher_gateways"])
def test_f4_a_daemon_that_starts_under_a_held_row_stops_at_once_when_told(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, table: str
) -> None:
    seed.agent("ada")
    start_daemon().ready().stop()
    seed.item("ada")
    with held(database, ROWS[table]):
        daemon = start_daemon()
        daemon.wait_for("lock.held")
        assert seconds_to_stop(daemon) < STOP_SECONDS


def test_f4_a_daemon_that_starts_under_a_held_row_waits_for_its_release(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    with held(database, ROWS["gateways"]) as let_go:
        daemon = start_daemon()
        [line] = daemon.wait_for("lock.held")
        assert "a row of gateways is held by pid " in line["held"]
        assert daemon.of("daemon.ready") == []
        let_go()
        released_at = time.monotonic()
        daemon.wait_for("daemon.ready")
        assert time.monotonic() - released_at < RELEASE_SECONDS
    wait_until(lambda: daemon.of("lock.released"), 10)
