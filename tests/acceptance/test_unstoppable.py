"""Nobody can stop the others: open transactions, neighbours' triggers, odd rows, in front of the real daemon."""

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


@contextlib.contextmanager
def open_insert(database: Database, *slugs: str) -> Iterator[None]:
    """Somebody's transaction that has inserted items for these agents and stays open."""
    holder = database.connect(autocommit=False)
    for slug in slugs:
        holder.execute(
            """insert into public.agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
               select id, slug, 'heartbeat', %s from public.agents where slug = %s""",
            (f"open:{uuid.uuid4()}", slug),
        )
    try:
        yield
    finally:
        holder.rollback()


def ended(database: Database) -> dict[str, str]:
    rows: list[dict[str, Any]] = database.rows(
        """select agent.slug, wake.state from agent_wakes as wake join agents as agent on agent.id = wake.agent_id
            where wake.ended_at is not null"""
    )
    return {row["slug"]: row["state"] for row in rows}


def test_c01_an_insert_that_stays_open_holds_up_nobody(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    held, others = ["held1", "held2", "held3"], [f"free{number}" for number in range(12)]
    for slug in [*held, *others]:
        seed.agent(slug)
    daemon = start_daemon(MAX_CONCURRENT_WAKES=4, WAKE_COOLDOWN=0).ready()
    with open_insert(database, *held):
        for slug in [*held, *others]:
            seed.item(slug)
        wait_until(lambda: len(ended(database)) == 15, 20)
    assert set(ended(database).values()) == {"succeeded"}
    assert [line for line in daemon.of("wake.skipped") if line["reason"] == "busy"] == []
    assert daemon.of("wake.claim_failed") == daemon.of("wake.end_unreported") == []


def test_c10_a_neighbours_trigger_on_notifications_costs_no_slot(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    database.execute(
        """create function public.refuse() returns trigger language plpgsql
           as $$ begin raise exception 'schema net does not exist'; end $$"""
    )
    database.execute(
        "create trigger refuse before insert on public.notifications for each row execute function public.refuse()"
    )
    seed.agent("failing")
    seed.agent("fine")
    stub_agent.order(mode="exit", exit_code=1)
    daemon = start_daemon(
        MAX_CONCURRENT_WAKES=1, MAX_CONSECUTIVE_FAILURES=1, WAKE_COOLDOWN=0, HEARTBEAT_INTERVAL=1
    ).ready()
    seed.item("failing")
    daemon.wait_for("agent.stalled", agent="failing")
    stub_agent.order(**working_orders(api))
    seed.item("fine")
    wait_until(lambda: ended(database).get("fine") == "succeeded", 10)
    [line] = daemon.wait_for("side_write.failed")[:1]
    assert line["side_write"] == "notification agent_stalled"
    assert "schema net does not exist" in line["error"]
    causes = "select health ->> 'causes' from dispatcher_instances"
    wait_until(lambda: "schema net does not exist" in (database.value(causes) or ""), 10)


def test_c22_a_last_attempt_without_work_is_no_success_and_its_dead_letter_is_told(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(**working_orders(api, outcome="leased"))
    daemon = start_daemon(WAKE_COOLDOWN=0).ready()
    item = seed.item("ada", attempt_count=2)
    [line] = daemon.wait_for("item.dead_letter")
    assert (line["agent"], line["item_id"]) == ("ada", str(item))
    assert ended(database) == {"ada": "no_progress"}
    told = database.row("select type, body from notifications")
    assert told["type"] == "dead_letter"
    assert f"dispatcher inbox requeue {item}" in told["body"]


def test_c23_what_an_operator_ends_during_a_wake_is_no_progress_of_its_agent(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(mode="exit", seconds=1.5)
    daemon = start_daemon().ready()
    item, _left = seed.item("ada"), seed.item("ada")
    daemon.wait_for("wake.started")
    who = {"p_tenant_id": uuid.UUID(int=0), "p_gateway": "local", "p_item_ids": [item], "p_reason": "not needed"}
    database.call("expire_inbox_items", who)
    wait_until(lambda: ended(database), 10)
    assert ended(database) == {"ada": "no_progress"}
