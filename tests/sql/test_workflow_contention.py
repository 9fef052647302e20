"""Runs beside what others hold, break and write: nobody waits for a row of somebody else, no row ends a worker."""

import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows

PHASES = ("look", "stopped", "dispatched", "retried", "timed_out", "released", "unrouted", "pruned")
# Generous for a busy machine; whoever waited for a lock would wait for a second or more.
AT_ONCE = 0.8


@pytest.fixture(scope="module")
def shared(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as database:
        yield database


@pytest.fixture
def runs(shared: Database) -> Iterator[Workflows]:
    with fresh_workflows(shared) as workflows:
        yield workflows


def ago(**delta: float) -> datetime:
    return datetime.now(UTC) - timedelta(**delta)


def faults(runs: Workflows) -> set[str]:
    return {row["side_write"] for row in runs.database.rows("select side_write from dispatcher_faults")}


def cancel(runs: Workflows, run: uuid.UUID) -> Any:
    return runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")


# ------------------------------------------------------------------------------------------- C3: bounded phases


def overspent(runs: Workflows, number: int) -> None:
    """A spent hard stop over so many queued runs, and another type beside it."""
    runs.route(max_concurrent=5), runs.route("free", "ada", max_concurrent=5)
    runs.done(cost=5)
    runs.budget(1, "hard_stop", "project", scope_id="code-change")
    runs.database.execute(
        "insert into workflow_runs (workflow_type) select 'code-change' from generate_series(1, %s)", [number]
    )
    runs.database.execute("analyze workflow_runs")


def test_c03_a_hard_stop_over_a_long_queue_goes_on_in_short_passes_and_holds_up_nobody(runs: Workflows) -> None:
    overspent(runs, 100_000)
    runs.connection.execute("set statement_timeout = '8s'")
    for number in range(1, 5):
        started = time.monotonic()
        answer = runs.phase("stopped")
        assert (answer["stopped"], answer["again"], answer["errors"]) == (500, True, [])
        assert time.monotonic() - started < 2
        free = runs.run("free")
        started = time.monotonic()
        assert runs.phase("dispatched")["dispatched"] == 1
        assert time.monotonic() - started < 2
        assert runs.status(free) == "dispatched"
        [event] = runs.events("hard_stopped")
        assert event["detail"]["cancelled_runs"] == 500 * number
    assert len(event["detail"]["cancelled_run_ids"]) == 1000
    assert runs.statuses()["queued"] == 98_000


def test_c03_a_hard_stop_ends_when_all_is_stopped(runs: Workflows) -> None:
    overspent(runs, 1200)
    passes = [runs.phase("stopped") for _ in range(4)]
    assert [one["stopped"] for one in passes] == [500, 500, 200, 0]
    assert [one["again"] for one in passes] == [True, True, False, False]
    assert runs.statuses() == {"cancelled": 1200, "completed": 1}
    assert runs.database.value("select count(*) from workflow_run_events where to_status = 'cancelled'") == 1200


@pytest.mark.parametrize(
    ("phase", "column", "status"),
    [
        ("timed_out", "deadline_at", "running"),
        ("released", "last_heartbeat_at", "running"),
        ("retried", "dispatched_at", "dispatched"),
    ],
)
def test_c03_what_is_due_is_settled_at_most_500_a_pass(runs: Workflows, phase: str, column: str, status: str) -> None:
    runs.route(max_concurrent=5)
    runs.database.execute(
        f"""insert into workflow_runs (workflow_type, status, owner_agent_id, claimed_at, {column})
            select 'code-change', '{status}', 'coder', now() - interval '2 hours', now() - interval '1 hour'
              from generate_series(1, 600)"""
    )
    first, second, third = (runs.phase(phase) for _ in range(3))
    assert [answer[phase] for answer in (first, second, third)] == [500, 100, 0]
    assert [answer["again"] for answer in (first, second, third)] == [True, False, False]


def test_c03_unrouted_runs_are_marked_500_a_pass(runs: Workflows) -> None:
    runs.database.execute("insert into workflow_runs (workflow_type) select 'nowhere' from generate_series(1, 600)")
    assert [runs.phase("unrouted")["unrouted"] for _ in range(3)] == [500, 100, 0]
    assert runs.phase("look")["due"] == ["dispatched"]


# ------------------------------------------------------------------------------------------- C2: locks


@contextmanager
def holding(runs: Workflows, query: str) -> Iterator[None]:
    """Another session has locked what the query finds, and stays so."""
    with runs.database.connect() as other:
        other.execute("begin")
        assert other.execute(f"{query} for update").fetchall()
        yield
        other.execute("rollback")


def full_of_work(runs: Workflows) -> dict[str, uuid.UUID]:
    """Something due for every phase, twice each; the first of each is the one that is held."""
    runs.seed.agent("coder")
    runs.route(max_concurrent=50), runs.route("other", "ada", max_concurrent=50)
    runs.done("other", "ada", cost=5)
    runs.budget(1, "hard_stop", "agent", scope_id="nobody"), runs.budget(1, "pause_new_runs", "agent", scope_id="ada")
    found = {}
    for kind in ("held", "free"):
        found[f"queued {kind}"] = runs.run()
        found[f"stale {kind}"] = runs.run(
            status="dispatched", owner_agent_id="coder", dispatched_at=ago(hours=1), dispatch_attempts=1
        )
        for name, column in (("late", "deadline_at"), ("silent", "last_heartbeat_at")):
            run = runs.run(status="dispatched", owner_agent_id="coder")
            runs.claim(run, name), runs.heartbeat(run, name)
            runs.shift(run, column, 3600), runs.shift(run, "claimed_at", 3600)
            found[f"{name} {kind}"] = run
        found[f"unrouted {kind}"] = runs.run("nowhere")
    return found


MOVED = {"queued": "dispatched", "late": "timed_out", "silent": "queued"}
HELD_ROWS = {
    "run": "select from workflow_runs where id = any (%(held)s)",
    "claim": "select from workflow_claims where run_id = any (%(held)s)",
    "budget": "select from budgets",
    "tenant's gateway lock": "select from dispatcher_gateways",
    "agent": "select from agents",
    "instance": "select from dispatcher_instances",
    "notification": "select from workflow_notifications",
}


@pytest.mark.parametrize("what", HELD_ROWS)
def test_c02_what_somebody_holds_keeps_no_phase_waiting(runs: Workflows, what: str) -> None:
    work = full_of_work(runs)
    runs.run("other")
    runs.database.execute(
        """insert into workflow_notifications (tenant_id, run_id, attempt, agent_id)
           select tenant_id, id, 9, 'coder' from workflow_runs limit 1"""
    )
    held = [str(run) for name, run in work.items() if name.endswith("held")]
    query = HELD_ROWS[what].replace("%(held)s", "array['" + "','".join(held) + "']::uuid[]")
    with holding(runs, query):
        for phase in PHASES:
            started = time.monotonic()
            answer = runs.phase(phase)
            assert time.monotonic() - started < AT_ONCE, phase
            assert answer["errors"] == []
        started = time.monotonic()
        runs.phase("note", p_facts={})
        runs.call("claim_workflow_notifications", p_instance_id=runs.id, p_limit=10)
        runs.call("monitor_workflows", p_instance_id=runs.id)
        assert time.monotonic() - started < AT_ONCE
        for name, status in MOVED.items():
            assert runs.status(work[f"{name} free"]) == status, name
    runs.tick(), runs.tick()
    for name in ("queued", "late"):
        assert runs.status(work[f"{name} held"]) == MOVED[name], name


def test_c02_a_gateway_somebody_holds_keeps_its_own_agents_runs_only(runs: Workflows) -> None:
    runs.seed.agent("bob", gateway="elsewhere")
    runs.seed.agent("coder")
    runs.route(), runs.route("for-bob", "bob")
    mine, other = runs.run(), runs.run("for-bob")
    with holding(runs, "select from gateways where slug = 'elsewhere'"):
        started = time.monotonic()
        answer = runs.phase("dispatched")
        assert time.monotonic() - started < AT_ONCE
        assert (answer["dispatched"], answer["locked"]) == (1, 1)
    assert (runs.status(mine), runs.status(other)) == ("dispatched", "queued")
    assert runs.tick()["dispatched"] == 1


def calls_of_agents(runs: Workflows, run: uuid.UUID) -> dict[str, Callable[[], Any]]:
    return {
        "claim": lambda: runs.claim(run),
        "heartbeat": lambda: runs.heartbeat(run),
        "complete": lambda: runs.complete(run),
        "fail": lambda: runs.fail(run),
        "release": lambda: runs.release(run),
        "usage": lambda: runs.usage(run, cost_usd=1),
        "cancel": lambda: cancel(runs, run),
        "retry": lambda: runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op"),
    }


@pytest.mark.parametrize("verb", ["claim", "heartbeat", "complete", "fail", "release", "usage", "cancel", "retry"])
def test_c02_a_held_run_is_busy_after_a_short_wait_and_the_others_are_not(runs: Workflows, verb: str) -> None:
    runs.route(max_concurrent=5)
    run, other = runs.run(), runs.run()
    runs.tick()
    if verb != "claim":
        runs.claim(run)
    with holding(runs, f"select from workflow_runs where id = '{run}'"):
        started = time.monotonic()
        answer = calls_of_agents(runs, run)[verb]()
        assert (answer["applied"], answer["code"], answer["run_id"]) == (False, "busy", str(run))
        assert time.monotonic() - started < 4
        started = time.monotonic()
        assert runs.claim(other, "other")["code"] == "ok"
        assert runs.heartbeat(other, "other")["code"] == "ok"
        assert time.monotonic() - started < AT_ONCE


def test_c02_an_orphan_whose_agent_somebody_holds_is_busy(runs: Workflows) -> None:
    agent = runs.seed.agent("coder")
    runs.route()
    run = runs.run()
    runs.tick()
    runs.claim(run), runs.heartbeat(run)
    runs.shift(run, "last_heartbeat_at", 400)
    [suspect] = runs.call("monitor_workflows", p_instance_id=runs.id)["suspects"]
    runs.database.execute("insert into agent_wake_state (agent_id, tenant_id) values (%s, %s)", [agent, runs.tenant])
    arguments = {"p_instance_id": runs.id, "p_run_id": run, "p_claim_token": suspect["claim_token"]}
    for query in ("select from agents", "select from agent_wake_state", "select from workflow_claims"):
        with holding(runs, query):
            started = time.monotonic()
            answer = runs.call("respawn_workflow_run", p_request=uuid.uuid4(), **arguments)
            assert (answer["granted"], answer["skip_reason"]) == (False, "busy")
            assert time.monotonic() - started < AT_ONCE
    assert runs.call("respawn_workflow_run", p_request=uuid.uuid4(), **arguments)["granted"] is True


def test_c33_many_runs_in_one_statement_are_one_hint(runs: Workflows) -> None:
    runs.route(max_concurrent=0)
    runs.database.execute("insert into workflow_runs (workflow_type) select 'code-change' from generate_series(1, 50)")
    runs.database.execute("update workflow_runs set status = 'blocked'")
    runs.database.execute("delete from realtime.messages")
    runs.database.execute("update workflow_runs set status = 'queued'")
    assert runs.database.value("select count(*) from realtime.messages where event = 'run'") == 1
    runs.database.execute("update workflow_agent_routing set max_concurrent = 1")
    assert runs.database.value("select count(*) from realtime.messages where event = 'run'") == 2


# ------------------------------------------------------------------------------------------- C10: side writes


@contextmanager
def breaking(runs: Workflows, table: str, timing: str) -> Iterator[None]:
    """A neighbour's trigger on a table raises at every insert: at once, or at the commit."""
    runs.database.execute(
        """create or replace function public.break_it() returns trigger language plpgsql as
           $$ begin raise exception 'broken by a neighbour'; end $$"""
    )
    kind, when = (
        ("constraint trigger", "deferrable initially deferred") if timing == "at the commit" else ("trigger", "")
    )
    runs.database.execute(
        f"create {kind} breaks after insert on public.{table} {when} for each row execute function public.break_it()"
    )
    try:
        yield
    finally:
        runs.database.execute(f"drop trigger breaks on public.{table}")


@pytest.mark.parametrize("timing", ["at once", "at the commit"])
@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("workflow_run_events", "event of a run"),
        ("workflow_notifications", "notification of a run"),
        ("workflow_audit_log", "audit of cancel_run"),
        ("budget_events", "event of a budget"),
    ],
)
def test_c10_what_tells_of_a_transition_never_undoes_it(runs: Workflows, table: str, fault: str, timing: str) -> None:
    runs.route(max_concurrent=9), runs.route("dear", "ada")
    runs.done("dear", "ada", cost=5)
    runs.budget(1, "hard_stop", "agent", scope_id="ada")
    run, other, stopped = runs.run(), runs.run(), runs.run("dear")
    with breaking(runs, table, timing):
        tick = runs.tick()
        assert (tick["dispatched"], tick["stopped"], tick["errors"]) == (2, 1, [])
        assert runs.claim(run)["code"] == "ok"
        assert runs.complete(run)["code"] == "ok"
        assert cancel(runs, other)["code"] == "ok"
    assert (runs.status(run), runs.status(other), runs.status(stopped)) == ("completed", "cancelled", "cancelled")
    assert fault in faults(runs)


def test_c10_one_event_that_cannot_be_written_costs_the_others_nothing(runs: Workflows) -> None:
    runs.route(max_concurrent=9)
    bad, good = runs.run(), [runs.run() for _ in range(3)]
    runs.database.execute(
        f"""create or replace function public.break_it() returns trigger language plpgsql as
            $$ begin if new.run_id = '{bad}' then raise exception 'broken'; end if; return new; end $$"""
    )
    runs.database.execute(
        "create trigger breaks before insert on workflow_run_events for each row execute function public.break_it()"
    )
    try:
        assert runs.tick()["dispatched"] == 4
    finally:
        runs.database.execute("drop trigger breaks on workflow_run_events")
    assert runs.steps(bad) == []
    assert all(runs.steps(run) == ["queued>dispatched"] for run in good)


# ------------------------------------------------------------------------------------------- C9, C12: values


def finite(value: Any) -> bool:
    """Whether no number in a document is infinite, also where JSON writes it as a text."""
    if isinstance(value, dict):
        return all(finite(part) for name, part in value.items() if name not in ("run", "runs", "events"))
    if isinstance(value, list):
        return all(map(finite, value))
    return value not in ("Infinity", "-Infinity", "NaN") and not (isinstance(value, float) and not math.isfinite(value))


ABSURD = ("infinity", "-infinity", "294276-01-01Z", "4713-01-01Z BC")


@pytest.mark.parametrize("status", ["queued", "dispatched", "claimed", "running", "blocked"])
@pytest.mark.parametrize("moment", ABSURD)
def test_c09_no_time_in_a_run_ends_a_worker(runs: Workflows, moment: str, status: str) -> None:
    runs.seed.agent("coder")
    runs.route(max_concurrent=99)
    runs.budget(50)
    columns = [
        "queued_at",
        "dispatched_at",
        "claimed_at",
        "last_heartbeat_at",
        "deadline_at",
        "paused_at",
        "reported_at",
    ]
    if moment not in ("infinity", "-infinity"):
        columns.append("next_attempt_at")
    for _ in columns:
        runs.run(status="running" if status == "blocked" else status, owner_agent_id="coder")
    ids = [row["id"] for row in runs.database.rows("select id from workflow_runs")]
    if status == "blocked":
        runs.database.execute("update workflow_runs set status = 'blocked'")
    for run, column in zip(ids, columns, strict=True):
        if column == "paused_at" and status != "blocked":
            continue
        runs.database.execute(f"update workflow_runs set {column} = %s where id = %s", [moment, run])
    if status == "blocked":
        runs.database.execute("update workflow_runs set status = 'running'")
    for _ in range(2):
        tick = runs.tick()
        assert tick["errors"] == []
        assert finite(tick)
    for answer in (
        runs.call("workflow_stats", p_tenant_id=runs.tenant),
        runs.call("list_budgets", p_tenant_id=runs.tenant),
        runs.call("monitor_workflows", p_instance_id=runs.id),
        runs.call("claim_workflow_notifications", p_instance_id=runs.id, p_limit=10),
        *(runs.claim(run, "again") for run in ids),
        *(runs.heartbeat(run, "again") for run in ids),
    ):
        assert finite(answer), answer


def test_c09_a_run_from_beyond_any_clock_is_recovered(runs: Workflows) -> None:
    runs.route(max_concurrent=9)
    dispatched = runs.run(status="dispatched", owner_agent_id="coder")
    silent = runs.run(status="running", owner_agent_id="coder")
    runs.database.execute("update workflow_runs set dispatched_at = 'infinity' where id = %s", [dispatched])
    runs.database.execute(
        "update workflow_runs set last_heartbeat_at = 'infinity', claimed_at = 'infinity' where id = %s", [silent]
    )
    tick = runs.tick()
    assert (tick["retried"], tick["released"], tick["errors"]) == (1, 1, [])
    assert (runs.status(dispatched), runs.status(silent)) == ("dispatched", "queued")


def test_c09_numbers_at_the_ends_of_their_types_raise_nothing(runs: Workflows) -> None:
    runs.route(max_concurrent=2_147_483_647, timeout_minutes=2_147_483_647)
    most = 2**63 - 1
    runs.done(cost="NaN", input_tokens=most, output_tokens=most), runs.done(cost=-1, input_tokens=-most)
    runs.budget(None, "warn", cap_tokens=most), runs.budget(50, period="weekly")
    run = runs.run(dispatch_attempts=2_147_483_647)
    tick = runs.tick()
    assert (tick["dispatched"], tick["errors"], tick["budget_error"]) == (1, [], None)
    assert runs.claim(run)["code"] == "ok"
    assert finite(runs.call("list_budgets", p_tenant_id=runs.tenant))


def test_c12_no_fence_is_passed_with_nothing(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    runs.tick()
    runs.claim(run)
    runs.heartbeat(run)
    for session in (None, "", "stranger"):
        for call in (runs.heartbeat, runs.complete, runs.fail, runs.release):
            assert call(run, session)["code"] == "not_yours"
        assert runs.usage(run, session, cost_usd=9)["code"] == "not_yours"
    assert runs.claim(run, None)["code"] == "bad_session"
    respawn = runs.call(
        "respawn_workflow_run", p_instance_id=runs.id, p_run_id=run, p_claim_token=None, p_request=uuid.uuid4()
    )
    assert respawn["skip_reason"] == "not_an_orphan"
    assert (runs.status(run), runs.row(run)["cost_estimate"]) == ("running", None)


def test_c12_nonsense_about_a_notification_changes_nothing(runs: Workflows) -> None:
    runs.route()
    runs.run()
    runs.tick()
    [note] = runs.call("claim_workflow_notifications", p_instance_id=runs.id, p_limit=5)["notifications"]
    nonsense = [
        {},
        None,
        3,
        {"id": note["id"]},
        {"id": note["id"], "claim_token": "x"},
        {"id": note["id"], "claim_token": None},
    ]
    good = {"id": note["id"], "claim_token": note["claim_token"], "sent": True}
    finish = {"p_instance_id": runs.id}
    assert runs.call("finish_workflow_notifications", p_results=nonsense, **finish) == {"finished": 0}
    assert runs.call("finish_workflow_notifications", p_results=[*nonsense, good], **finish) == {"finished": 1}
    with pytest.raises(psycopg.Error) as refused:
        runs.call("finish_workflow_notifications", p_results={}, **finish)
    assert refused.value.sqlstate == "OD002"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"p_workflow_type": None}, "workflow_type"),
        ({"p_workflow_type": "x" * 201}, "workflow_type"),
        ({"p_tenant_id": None}, "tenant_id"),
        ({"p_tenant_id": uuid.UUID(int=7)}, "tenant_id"),
        ({"p_priority": 2**31 - 1}, "priority"),
        ({"p_priority": -(2**31)}, "priority"),
        ({"p_agent": "x" * 1_000_000}, "agent"),
        ({"p_request_key": "x" * 1_000_000}, "request_key"),
        ({"p_delay_seconds": math.inf}, "delay_seconds"),
        ({"p_delay_seconds": math.nan}, "delay_seconds"),
        ({"p_delay_seconds": -1}, "delay_seconds"),
        ({"p_delay_seconds": 1e300}, "delay_seconds"),
        ({"p_not_before": "infinity"}, "not_before"),
    ],
)
def test_c12_a_run_that_cannot_be_queued_is_refused_by_name(
    runs: Workflows, arguments: dict[str, Any], fault: str
) -> None:
    answer = runs.call("enqueue_workflow_run", **{"p_tenant_id": runs.tenant, "p_workflow_type": "t"} | arguments)
    assert (answer["applied"], answer["code"]) == (False, "invalid")
    assert [one.partition(":")[0] for one in answer["faults"]] == [fault]
    assert runs.statuses() == {}


def test_c28_a_delay_is_counted_by_the_databases_clock(runs: Workflows) -> None:
    runs.call("enqueue_workflow_run", p_tenant_id=runs.tenant, p_workflow_type="t", p_delay_seconds=60)
    assert (
        runs.database.value("select extract(epoch from next_attempt_at - created_at)::integer from workflow_runs") == 60
    )


# ------------------------------------------------------------------------------------------- C25: attempts


def test_c25_an_earlier_wake_is_not_handed_what_a_later_one_holds(runs: Workflows) -> None:
    """One session name through both attempts."""
    agent = runs.seed.agent("coder")
    runs.route()
    run = runs.run()
    columns = {"gateway_id": runs.gateway_id, "tenant_id": runs.tenant, "instance_id": runs.id, "agent_id": agent}
    wakes = []
    for number in range(2):
        runs.database.execute("update agent_wakes set state = 'lost', ended_at = now() where ended_at is null")
        wakes.append(
            runs.seed.insert(
                "agent_wakes", path="event", claimed_at=ago(hours=2 - number), deadline_at=ago(hours=-1), **columns
            )["id"]
        )
        runs.tick()
        claimed = runs.claim(run, "main", p_wake_id=wakes[-1])
        assert claimed["code"] == "ok"
        if number == 0:
            first = claimed["claim_token"]
            runs.shift(run, "last_heartbeat_at", 700), runs.shift(run, "claimed_at", 700)
            runs.tick()
    late = runs.claim(run, "main", p_wake_id=wakes[0])
    assert (late["applied"], late["code"], "claim_token" in late) == (False, "claimed_by_another", False)
    again = runs.claim(run, "main", p_wake_id=wakes[1])
    assert (again["code"], again["claim_token"]) == ("already", claimed["claim_token"])
    for call in (runs.heartbeat, runs.complete, runs.fail, runs.release):
        assert call(run, "main", p_claim_token=first)["code"] == "not_yours"
    assert runs.status(run) == "claimed"
