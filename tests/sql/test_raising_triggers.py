"""A neighbour's trigger on a table of ours that raises for one agent, or drops its rows: nobody else's matter."""

import uuid
from collections.abc import Mapping
from typing import Any, Final

import pytest

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import Seed

pytestmark = [pytest.mark.faults_expected, pytest.mark.own_database]

REFUSES: Final = """
    create function public.refuse() returns trigger language plpgsql as $$
    begin
      if coalesce(to_jsonb(new), to_jsonb(old)) ->> 'agent_id' = tg_argv[0] then
        raise exception 'no more of this';
      end if;
      return coalesce(new, old);
    end $$"""
DROPS: Final = """
    create function public.swallow() returns trigger language plpgsql as $$
    begin
      if coalesce(to_jsonb(new), to_jsonb(old)) ->> 'agent_id' = tg_argv[0] then
        return null;
      end if;
      return coalesce(new, old);
    end $$"""
TIMINGS: Final = {
    "immediate": "create trigger refuse before {0} on public.{1} for each row execute function public.refuse('{2}')",
    "deferred": "create constraint trigger refuse after {0} on public.{1} deferrable initially deferred"
    " for each row execute function public.refuse('{2}')",
}
TABLES: Final = ("inbox_item_leases", "agent_wakes", "agent_wake_state", "agent_inbox_items")
ENDED: Final = {"report": "ended", "ending": "exited", "exit_code": 0}


def refuse(database: Database, timing: str, operation: str, table: str, agent: uuid.UUID) -> None:
    database.execute(REFUSES)
    database.execute(TIMINGS[timing].format(operation, table, agent))


def swallow(database: Database, operation: str, table: str, agent: uuid.UUID) -> None:
    database.execute(DROPS)
    database.execute(
        f"create trigger refuse before {operation} on public.{table} for each row"
        f" execute function public.swallow('{agent}')"
    )


def forgive(database: Database, table: str) -> None:
    database.execute(f"drop trigger refuse on public.{table}")


def faults(database: Database) -> str:
    rows = database.rows("select side_write, error from public.dispatcher_faults order by id")
    return "\n".join(f"{row['side_write']}: {row['error']}" for row in rows)


def ended(grant: Mapping[str, Any]) -> dict[str, object]:
    return {**ENDED, "wake_id": grant["wake_id"], "claim_token": grant["claim_token"]}


def lease(database: Database, seed: Seed, slug: str, grant: Mapping[str, Any]) -> Any:
    arguments = {"p_tenant_id": seed.tenant_id, "p_agent_slug": slug, "p_wake_id": uuid.UUID(grant["wake_id"])}
    [row] = database.call("lease_inbox_items", arguments, on=database.connect("service_role"))
    return row["lease_inbox_items"]


def live_wakes(database: Database, agent: uuid.UUID) -> int:
    return database.value("select count(*) from agent_wakes where agent_id = %s and ended_at is null", [agent])


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("operation", ["insert", "update"])
def test_c10_an_agent_whose_rows_raise_alone_is_refused_and_goes_on_once_they_do_not(
    database: Database, seed: Seed, table: str, operation: str, timing: str
) -> None:
    raising, well = seed.agent("raising"), seed.agent("well")
    daemon = Dispatcher(database, max_concurrent_wakes=4, max_consecutive_failures=1)
    for agent in (raising, well):
        seed.items(agent, 2)
    refuse(database, timing, operation, table, raising)
    grants = dict(zip((raising, well), daemon.claims([raising, well]), strict=True))
    assert grants[well]["granted"]
    for agent, slug in ((raising, "raising"), (well, "well")):
        if grants[agent]["granted"]:
            started = daemon.started(grants[agent], pid=100)
            assert started["applied"] or agent == raising, started
            leased = lease(database, seed, slug, grants[agent])
            assert leased.get("items") or agent == raising, leased
            assert live_wakes(database, agent) == 1
            assert daemon.claim(agent)["granted"] is False
    granted = [agent for agent in (raising, well) if grants[agent]["granted"]]
    results = daemon.report(*[ended(grants[agent]) for agent in granted], limit=4)["results"]
    by_agent = dict(zip(granted, results, strict=True))
    assert by_agent[well]["applied"]
    sweep = daemon.sweep(limit=4)
    assert sweep["errors"] == []
    is_granted = grants[raising]["granted"]
    is_open = is_granted and not by_agent[raising]["applied"]
    assert live_wakes(database, raising) == int(is_open)  # an end that is refused keeps its slot, and nothing else does
    if table != "agent_inbox_items" or operation == "update":
        assert "no more of this" in faults(database) + str(results)

    forgive(database, table)
    if is_open:
        [again] = daemon.report(ended(grants[raising]))["results"]
        assert again["applied"], again
    database.execute("update agent_wake_state set consecutive_failures = 0, stalled_at = null")
    database.execute(
        "update agent_inbox_items set status = 'pending', leased_until = null where agent_id = %s", [raising]
    )
    daemon.sweep()
    assert live_wakes(database, raising) == 0
    assert daemon.claim(raising)["granted"]


@pytest.mark.parametrize("timing", TIMINGS)
def test_c10_an_end_stands_and_its_items_are_released_though_their_leases_raise(
    database: Database, seed: Seed, timing: str
) -> None:
    agent = seed.agent("ada")
    [item] = seed.items(agent, 1)
    daemon = Dispatcher(database)
    grant = daemon.claim(agent)
    daemon.started(grant)
    [leased] = lease(database, seed, "ada", grant)["items"]
    refuse(database, timing, "update", "inbox_item_leases", agent)
    assert daemon.ended(grant, ending="interrupted")["applied"]
    assert database.value("select status from agent_inbox_items where id = %s", [item]) == "pending"
    assert "end of a lease" in faults(database)
    late = {
        "p_item_id": item,
        "p_lease_token": uuid.UUID(leased["lease_token"]),
        "p_outcome": "done",
        "p_wake_id": uuid.UUID(grant["wake_id"]),
    }
    [row] = database.call("close_inbox_item", late, on=database.connect("service_role"))
    assert row["close_inbox_item"]["code"] == "lease_lost"


@pytest.mark.parametrize("table", ["agent_wakes", "agent_wake_state"])
@pytest.mark.parametrize("operation", ["insert", "update"])
def test_c10_a_dropped_row_of_one_agent_is_an_error_of_its_own(
    database: Database, seed: Seed, table: str, operation: str
) -> None:
    dropped, well = seed.agent("dropped"), seed.agent("well")
    daemon = Dispatcher(database, max_concurrent_wakes=4)
    for agent in (dropped, well):
        seed.items(agent, 2)
    swallow(database, operation, table, dropped)
    first, second = daemon.claims([dropped, well])
    assert second["granted"]
    results = daemon.report(*[ended(grant) for grant in (first, second) if grant["granted"]])["results"]
    assert results[-1]["applied"]
    if first["granted"]:
        assert results[0]["code"] == "error"
        assert "keeps the end" in results[0]["error"]
        assert live_wakes(database, dropped) == 1
    else:
        assert first["skip_reason"] in ("error", "busy")
    forgive(database, table)
    if first["granted"]:
        assert daemon.report(ended(first))["results"][0]["applied"]
    else:
        assert daemon.claim(dropped)["granted"]


PHASES: Final = {
    "expired": ("agent_inbox_items", "update"),
    "dead": ("agent_inbox_items", "update"),
    "listed": ("agent_wake_state", "insert"),
    "claims": ("agent_wake_state", "update"),
    "pruned": ("agent_wakes", "delete"),
}


def prepare(database: Database, seed: Seed, phase: str, agent: uuid.UUID) -> None:
    """One row of an agent for a phase to settle."""
    item = seed.item(agent)
    if phase == "expired":
        database.execute("update agent_inbox_items set created_at = now() - interval '3 days' where id = %s", [item])
    elif phase == "dead":
        database.execute("update agent_inbox_items set attempt_count = max_attempts where id = %s", [item])
    elif phase == "claims":
        seed.insert("agent_wake_state", agent_id=agent, tenant_id=seed.tenant_id)
        database.execute(
            "update agent_wake_state set waitlisted_at = now(), waitlist_path = 'sweep' where agent_id = %s", [agent]
        )
    elif phase == "pruned":
        database.execute(
            "insert into agent_wakes (tenant_id, agent_id, gateway_id, path, state, ended_at, deadline_at)"
            " select tenant_id, id, gateway_id, 'event', 'failed', now() - interval '40 days', now() from agents"
            " where id = %s",
            [agent],
        )


LEFT: Final = {
    "expired": "select count(*) from agent_inbox_items where status = 'pending' and agent_id = %s",
    "dead": "select count(*) from agent_inbox_items where status = 'pending' and agent_id = %s",
    "listed": "select 1 - count(*) from agent_wake_state where waitlisted_at is not null and agent_id = %s",
    "claims": "select count(*) from agent_wake_state where waitlist_path = 'sweep' and agent_id = %s",
    "pruned": "select count(*) from agent_wakes where agent_id = %s",
}


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("phase", PHASES)
def test_c10_a_phase_takes_the_rows_that_do_not_raise(database: Database, seed: Seed, phase: str, timing: str) -> None:
    agents = [seed.agent(f"agent-{number}") for number in range(5)]
    daemon = Dispatcher(database)
    for agent in agents:
        prepare(database, seed, phase, agent)
    table, operation = PHASES[phase]
    refuse(database, timing, operation, table, agents[2])
    assert daemon.phase(phase)["again"] is False
    assert [database.value(LEFT[phase], [agent]) for agent in agents] == [0, 0, 1, 0, 0]
    assert "no more of this" in faults(database)
    forgive(database, table)
    daemon.phase(phase)
    assert database.value(LEFT[phase], [agents[2]]) == 0


@pytest.mark.parametrize("phase", ["expired", "dead"])
def test_c10_a_phase_whose_updates_are_dropped_does_not_ask_for_another_pass(
    database: Database, seed: Seed, phase: str
) -> None:
    agent = seed.agent("ada")
    daemon = Dispatcher(database)
    prepare(database, seed, phase, agent)
    columns = "tenant_id, agent_id, agent_slug, event_type, summary, dedup_key, attempt_count, max_attempts, created_at"
    copied = columns.replace("dedup_key", "dedup_key || number")
    database.execute(
        f"insert into agent_inbox_items ({columns}) select {copied} from agent_inbox_items, generate_series(1, 510)"
        " as number"
    )
    swallow(database, "update", "agent_inbox_items", agent)
    answer = daemon.phase(phase)
    assert (answer["count"], answer["again"]) == (0, False)
    forgive(database, "agent_inbox_items")
    assert daemon.phase(phase)["again"] is True


def test_c10_an_agent_that_another_session_is_just_inserting_keeps_no_other_off_the_waitlist(
    database: Database, seed: Seed
) -> None:
    held, *others = [seed.agent(f"agent-{number}") for number in range(4)]
    daemon = Dispatcher(database)
    for agent in (held, *others):
        seed.item(agent)
    other_session = database.connect()
    with other_session.transaction(force_rollback=True):
        other_session.execute(
            "insert into public.agent_wake_state (agent_id, tenant_id) values (%s, %s)", [held, seed.tenant_id]
        )
        answer = daemon.phase("listed")
    assert answer["count"] == 3
    assert [refusal["skip_reason"] for refusal in answer["skipped"]] == ["busy"]


def test_c10_old_instances_whose_wakes_raise_keep_no_daemon_from_its_start(database: Database, seed: Seed) -> None:
    agent = seed.agent("ada")
    seed.item(agent)
    daemon = Dispatcher(database)
    daemon.ended(daemon.claim(agent))
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '8 days'")
    refuse(database, "immediate", "update", "agent_wakes", agent)
    assert Dispatcher(database).registered["code"] == "ok"
    assert faults(database) == ""  # their wakes are not touched


def test_c10_a_lease_whose_renewal_raises_costs_no_other_wake_its_leases(database: Database, seed: Seed) -> None:
    raising, well = seed.agent("raising"), seed.agent("well")
    daemon = Dispatcher(database)
    for agent in (raising, well):
        seed.item(agent)
    grants = daemon.claims([raising, well])
    for slug, grant in zip(("raising", "well"), grants, strict=True):
        daemon.started(grant)
        lease(database, seed, slug, grant)
    database.execute("update agent_inbox_items set leased_until = now() + interval '5 seconds'")
    refuse(database, "immediate", "update", "agent_inbox_items", raising)
    assert daemon.heartbeat(*grants)["renewed"] == 1
    assert "renewal of leases" in faults(database)


def test_f4_an_agent_whose_wake_state_raises_costs_no_other_its_report_or_its_claim(
    database: Database, seed: Seed
) -> None:
    raising, working, waiting = seed.agent("raising"), seed.agent("working"), seed.agent("waiting")
    daemon = Dispatcher(database, max_concurrent_wakes=1)
    seed.item(working)
    grant = daemon.claim(working)
    for agent in (raising, waiting):
        seed.item(agent)
        assert daemon.claim(agent)["skip_reason"] == "concurrency_limit"
    refuse(database, "immediate", "update", "agent_wake_state", raising)
    answer = daemon.report(ended(grant), limit=1)
    assert answer["results"][0]["applied"]
    verdicts = {claim["agent_slug"]: claim.get("skip_reason") for claim in answer["claims"]}
    assert verdicts["waiting"] is None
    assert verdicts["raising"] == "error"
    assert "waitlist: no more of this" in faults(database)
