"""What the daemon does while its world is broken, and when it is whole again."""

import threading
import time
from collections import Counter
from typing import Any

import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.acceptance.test_wake import most_alive
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

OUTAGE_SECONDS = 6.0


def undone(database: Database) -> int:
    return database.value("select count(*) from agent_inbox_items where status <> 'done'")


def wake_by_event(daemon: DaemonProcess, seed: Seed, name: str = "hinted") -> None:
    """Inserts for one agent after another until a hint, and not the sweep after a subscription, wakes one."""
    for number in range(10):
        agent = f"{name}{number}"
        seed.item(agent)
        [line] = daemon.wait_for("wake.started", agent=agent)
        if line["path"] == "event":
            return
    raise AssertionError(f"no hint ever woke anybody: {daemon.tail()}")


def test_realtime_down_from_the_start_then_back(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    api.faults(realtime={"connect_status": 500})
    seed.item("ada")
    daemon = start_daemon(WAKE_COOLDOWN=0, DEGRADED_RECONCILE_INTERVAL=1)
    wait_until(lambda: undone(database) == 0, 20)
    seed.item("ada")
    wait_until(lambda: undone(database) == 0, 20)
    assert daemon.of("realtime.subscribed") == []
    api.faults(realtime={"connect_status": None})
    daemon.wait_for("realtime.subscribed", deadline=30)
    swept = len(daemon.of("sweep.finished"))
    daemon.wait_for("sweep.finished", times=swept + 1)
    seed.item("ada")
    daemon.wait_for("wake.started", path="event", deadline=10)
    wait_until(lambda: undone(database) == 0, 10)
    assert len(working_agent.calls()) == 3


def test_ff10_a_hint_that_comes_twice_wakes_once(
    api: Api, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, database: Database
) -> None:
    seed.agent("ada")
    daemon = start_daemon().ready()
    api.faults(realtime={"duplicate_events": -1})
    seed.item("ada")
    daemon.wait_for("wake.ended")
    wait_until(lambda: database.value("select count(*) from agent_wakes where ended_at is not null") == 1, 5)
    assert len(working_agent.calls()) == 1
    assert [line for line in daemon.lines if line["level"] == "error"] == []


def test_without_the_trigger_it_falls_back_by_itself_and_says_so(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    daemon = start_daemon(HEARTBEAT_INTERVAL=0.5, WAKE_COOLDOWN=0).ready()
    database.execute("drop trigger dispatcher_inbox_insert_hint on agent_inbox_items")
    daemon.wait_for("realtime.subscribed", path="postgres_changes")
    wake_by_event(daemon, seed)
    assert any("broadcast" in line["msg"] for line in daemon.lines if line["event"].startswith("realtime."))


def test_postgres_changes_alone_needs_no_broadcast(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.gateway()
    seed.item(seed.agent("theirs", gateway="other"))
    daemon = start_daemon(REALTIME_MODE="postgres_changes").ready()
    wake_by_event(daemon, seed)
    seed.item(database.value("select id from agents where slug = 'theirs'"))
    wake_by_event(daemon, seed, "second")
    assert not any("theirs" in call["argv"][2] for call in working_agent.calls())


def test_database_and_postgrest_away_under_load(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Nothing lost, nothing doubled, the daemon never ends; an attempt is spent only by a run that was cut off."""
    for number in range(6):
        seed.agent(f"a{number}")
    stub_agent.order(**working_orders(api, seconds=0.2))
    daemon = start_daemon(MAX_CONCURRENT_WAKES=3, WAKE_COOLDOWN=0, DEGRADED_RECONCILE_INTERVAL=2).ready()
    stop = threading.Event()
    inserter = threading.Thread(target=insert_steadily, args=(seed, stop))
    inserter.start()
    daemon.wait_for("wake.ended", times=3)
    api.rest.stop()
    database.execute(
        """select pg_terminate_backend(pid) from pg_stat_activity
            where datname = current_database() and pid <> pg_backend_pid()"""
    )
    time.sleep(OUTAGE_SECONDS)
    assert daemon.process.poll() is None
    api.rest.start()
    time.sleep(2)
    stop.set()
    inserter.join()
    # A stub that was cut off fails its wake; its items come back after the backoff.
    database.execute("update agent_wake_state set last_ended_at = now() - interval '1 hour', consecutive_failures = 0")
    wait_until(lambda: undone(database) == 0, 60, poll=0.1)
    in_all, per_agent = most_alive_ended(stub_agent)
    assert per_agent == 1
    assert in_all <= 3
    check_attempts(database, stub_agent)
    assert daemon.stop() == 0


def check_attempts(database: Database, stub: StubAgent) -> None:
    """Each item is closed, within its attempts; each one beyond the first is that of a run which the outage cut off."""
    ended = {event["pid"] for event in stub.events("end")}
    cut_off = Counter(agent_of(call) for call in stub.calls() if call["pid"] not in ended)
    items = database.rows("select agent_slug, status::text, attempt_count, max_attempts from agent_inbox_items")
    for item in items:
        assert item["status"] == "done"
        assert 1 <= item["attempt_count"] <= min(item["max_attempts"], 1 + cut_off[item["agent_slug"]])


def agent_of(call: dict[str, Any]) -> str:
    return call["argv"][call["argv"].index("--agent") + 1].rsplit("/", 1)[-1]


def insert_steadily(seed: Seed, stop: threading.Event) -> None:
    turn = 0
    while not stop.wait(0.1):
        turn += 1
        seed.item(f"a{turn % 6}")


def most_alive_ended(stub: StubAgent) -> tuple[int, int]:
    """As `most_alive`, over the wakes that logged their end (one cut off from the API dies without)."""
    ended = {event["pid"] for event in stub.events("end")}
    events = [event for event in stub.events() if event["pid"] in ended]
    view = type("View", (), {"events": lambda _self, kind=None: [e for e in events if kind in (None, e["event"])]})()
    view.calls = lambda: view.events("start")
    return most_alive(view)


def test_a_claim_whose_answer_is_lost_starts_one_child(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Field failure 28."""
    seed.agent("ada")
    daemon = start_daemon().ready()
    api.faults(rest={"match": "claim_wakes", "lose_replies": 1})
    seed.item("ada")
    daemon.wait_for("wake.ended")
    wait_until(lambda: undone(database) == 0, 5)
    assert len(working_agent.calls()) == 1
    assert database.row(
        "select count(*) as wakes, max(attempt_count) as attempts from agent_wakes, agent_inbox_items"
    ) == {
        "wakes": 1,
        "attempts": 1,
    }


def test_ff11_a_claim_that_hangs_does_not_delay_the_next_agent(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada"), seed.agent("bob")
    daemon = start_daemon(REST_TIMEOUT=15).ready()
    api.faults(rest={"match": "claim_wakes", "delay": 8})
    seed.item("ada")
    time.sleep(0.3)
    api.faults(rest={"match": "claim_wakes", "delay": 0})
    seed.item("bob")
    daemon.wait_for("wake.started", agent="bob", deadline=4)
    daemon.wait_for("wake.started", agent="ada", deadline=15)


def test_ff19_a_stale_schema_cache_costs_nothing_but_time(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    for agent in ("a1", "a2", "a3"):
        seed.agent(agent)
    daemon = start_daemon(WAKE_COOLDOWN=0, MAX_CONCURRENT_WAKES=3).ready()
    body = {"code": "PGRST202", "message": "Could not find the function", "details": None, "hint": None}
    api.faults(rest={"match": "/rpc/claim", "fail": -1, "status": 404, "body": body})
    for agent in ("a1", "a2", "a3"):
        seed.item(agent)
    daemon.wait_for("wake.claim_failed", deadline=20)
    assert database.value("select count(*) from agent_inbox_items where status = 'pending' and attempt_count = 0") == 3
    api.faults(rest={"match": "", "fail": 0})
    wait_until(lambda: undone(database) == 0, 30)
    assert database.value("select max(attempt_count) from agent_inbox_items") == 1


@pytest.mark.parametrize("fault", [{"broadcast_dead": True}, {"silence": True}], ids=["dead worker", "silent proxy"])
def test_a_deaf_subscription_is_noticed_by_the_canary(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, fault: dict
) -> None:
    seed.agent("ada")
    daemon = start_daemon(HEARTBEAT_INTERVAL=1, DEGRADED_RECONCILE_INTERVAL=1, WAKE_COOLDOWN=0).ready()
    api.faults(realtime=fault)
    daemon.wait_for("realtime.deaf", deadline=30)
    seed.item("ada")
    wait_until(lambda: undone(database) == 0, 20)
    api.faults(realtime=dict.fromkeys(fault, False))
    before = len(daemon.of("realtime.subscribed"))
    daemon.wait_for("realtime.subscribed", times=before + 1, deadline=60)


def test_ff14_a_publication_without_the_table_is_told(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Joined, never a word: three items that only sweeps find make one warning."""
    seed.agent("ada")
    daemon = start_daemon(REALTIME_MODE="auto", RECONCILE_INTERVAL=1, WAKE_COOLDOWN=0).ready()
    # The trigger is there but hints into the void: the silent state that no error frame announces.
    database.execute(
        """create or replace function dispatcher.send_gateway_hint(p_gateway_id uuid, p_event text, p_payload jsonb)
             returns void
           language plpgsql security definer set search_path = '' as $$
           begin
             if p_event = 'canary' then
               perform realtime.send(p_payload, p_event, 'gateway:' || p_gateway_id, true);
             end if;
           end $$"""
    )
    for number in range(1, 5):
        seed.item("ada")
        wait_until(lambda: undone(database) == 0, 15)
        daemon.wait_for("wake.ended", times=number)
        wait_until(lambda: database.value("select count(*) from agent_wakes where ended_at is null") == 0, 5)
    assert len(daemon.of("realtime.silent")) == 1
