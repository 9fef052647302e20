"""The life of a run: the state table, claims, fences, releases, what an operator may do, and who may call what."""

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations, migrations_directory
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows

STATES = (
    *("queued", "dispatched", "claimed", "running", "waiting_for_approval", "blocked"),
    *("completed", "failed", "timed_out", "cancelled"),
)
ACTIVE = STATES[:4]
SIDE = STATES[4:6]
FINAL = STATES[6:]


@pytest.fixture(scope="module")
def shared(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as database:
        yield database


@pytest.fixture
def runs(shared: Database) -> Iterator[Workflows]:
    with fresh_workflows(shared) as workflows:
        workflows.route()
        yield workflows


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs every call in a thread of its own, released together; answers in order."""
    gate = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)

    def go(number: int, call: Callable[[], Any]) -> None:
        gate.wait()
        answers[number] = call()

    threads = [threading.Thread(target=go, args=(number, call)) for number, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def dispatched(runs: Workflows, **columns: object) -> uuid.UUID:
    run = runs.run(**columns)
    assert runs.tick()["dispatched"] == 1
    return run


def held(runs: Workflows) -> uuid.UUID:
    run = dispatched(runs)
    assert runs.claim(run)["code"] == "ok"
    return run


# ------------------------------------------------------------------------------------------- the state table


def expected(before: str, after: str) -> bool:
    """The table of the specification, in its own words."""
    if before in ACTIVE and after in ("cancelled", *SIDE):
        return True
    if before in SIDE:  # entered from queued in this test, so that is where it may return to
        return after in ("queued", "cancelled", *SIDE) and after != before
    forward = {
        ("queued", "dispatched"), ("dispatched", "claimed"), ("claimed", "running"),
        ("running", "completed"), ("running", "failed"), ("running", "timed_out"), ("claimed", "timed_out"),
    }  # fmt: skip
    back = {
        ("dispatched", "queued"),
        ("claimed", "queued"),
        ("running", "queued"),
        ("dispatched", "failed"),
        ("claimed", "failed"),
    }
    return (before, after) in forward | back


def refusal(runs: Workflows, run: uuid.UUID, after: str) -> str | None:
    """The errcode a transition is refused with, None when it is not."""
    try:
        runs.database.execute("update workflow_runs set status = %s where id = %s", [after, run])
    except psycopg.Error as error:
        return error.sqlstate
    return None


@pytest.mark.parametrize("before", STATES)
def test_every_transition_that_is_not_in_the_table_is_refused(runs: Workflows, before: str) -> None:
    for after in STATES:
        if after == before:
            continue
        run = runs.run(status=before)
        may = expected(before, after)
        assert (refusal(runs, run, after) is None) is may, (before, after)
        assert runs.status(run) == (after if may else before)
        assert runs.steps(run) == ([f"{before}>{after}"] if may else [])


@pytest.mark.parametrize(("origin", "side"), list(product(ACTIVE, SIDE)))
def test_a_side_state_remembers_where_it_came_from_and_returns_only_there(
    runs: Workflows, origin: str, side: str
) -> None:
    run = runs.run(status=origin)
    runs.database.execute("update workflow_runs set status = %s where id = %s", [side, run])
    assert runs.row(run)["paused_from"] == origin
    for other in ACTIVE:
        if other != origin:
            assert refusal(runs, run, other) == "OD010"
    other_side = SIDE[1 - SIDE.index(side)]
    runs.database.execute("update workflow_runs set status = %s where id = %s", [other_side, run])
    assert runs.row(run)["paused_from"] == origin
    runs.database.execute("update workflow_runs set status = %s where id = %s", [origin, run])
    assert runs.row(run)["paused_from"] is None


@pytest.mark.parametrize("final", FINAL)
def test_only_a_failure_is_left_again_and_only_by_override(runs: Workflows, final: str) -> None:
    run = runs.run(status=final)
    answer = runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op", p_reason="try")
    if final in ("failed", "timed_out"):
        assert answer["code"] == "ok"
        assert runs.status(run) == "queued"
        audit = runs.database.row("select actor, action, target, allowed, before from audit_log")
        assert (audit["actor"], audit["action"], audit["target"], audit["allowed"]) == (
            "op",
            "override_failure",
            f"run:{run}",
            True,
        )
        assert audit["before"]["status"] == final
    else:
        assert (answer["applied"], answer["code"]) == (False, "not_failed")
        assert runs.status(run) == final


def test_s18_events_are_append_only_and_outlive_their_run(runs: Workflows) -> None:
    run = dispatched(runs)
    with pytest.raises(psycopg.Error) as refused:
        runs.database.execute("update workflow_run_events set actor = 'me'")
    assert refused.value.sqlstate == "OD012"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        runs.connection.execute("delete from public.workflow_run_events")
    runs.connection.execute("delete from public.workflow_runs where id = %s", [run])
    [event] = runs.database.rows("select run_id, to_status from workflow_run_events")
    assert event == {"run_id": run, "to_status": "dispatched"}


# ------------------------------------------------------------------------------------------- claim to end


def test_a_run_from_the_queue_to_its_end(runs: Workflows) -> None:
    run = runs.run(input_payload={"a": 1})
    assert runs.tick()["dispatched"] == 1
    polled = runs.call("poll_workflow_runs", p_tenant_id=runs.tenant, p_agent="coder", p_limit=3)
    assert [one["id"] for one in polled["runs"]] == [str(run)]
    claimed = runs.claim(run, p_agent="coder")
    assert (claimed["code"], claimed["run"]["input_payload"]) == ("ok", {"a": 1})
    assert 3590 < claimed["deadline_in"] <= 3600
    assert "claim_token" not in claimed["run"]
    assert runs.heartbeat(run)["status"] == "running"
    ended = runs.complete(
        run, p_output={"pr": 7}, p_usage={"cost_usd": 0.12, "input_tokens": 10, "output_tokens": 5, "model": "m"}
    )
    assert (ended["code"], ended["status"]) == ("ok", "completed")
    row = runs.row(run)
    assert (float(row["cost_estimate"]), row["input_tokens"], row["output_tokens"], row["cached_tokens"]) == (
        0.12,
        10,
        5,
        None,
    )
    assert (row["model_id"], row["output_summary"], row["claimed_by"]) == ("m", {"pr": 7}, "coder")
    assert runs.steps(run) == ["queued>dispatched", "dispatched>claimed", "claimed>running", "running>completed"]
    actors = {r["actor"] for r in runs.database.rows("select actor from workflow_run_events")}
    assert actors == {"dispatcher", "coder"}
    stats = runs.call("workflow_stats", p_tenant_id=runs.tenant)
    assert stats["by_status"] == {"completed": 1}
    assert stats["last_tick"]["dispatched"] == 1


def test_a_complete_without_a_heartbeat_passes_through_running(runs: Workflows) -> None:
    run = held(runs)
    assert runs.complete(run)["code"] == "ok"
    assert runs.steps(run)[-2:] == ["claimed>running", "running>completed"]


def test_repeats_are_answered_as_such_and_strangers_refused(runs: Workflows) -> None:
    run = held(runs)
    assert runs.claim(run)["code"] == "already"
    assert runs.claim(run, "s2")["code"] == "claimed_by_another"
    for call in (runs.heartbeat, runs.complete, runs.fail, runs.release):
        answer = call(run, "s2")
        assert (answer["applied"], answer["code"]) == (False, "not_yours")
    assert runs.status(run) == "claimed"
    assert runs.complete(run)["code"] == "ok"
    assert runs.complete(run)["code"] == "already"
    assert runs.fail(run)["code"] == "finished"
    assert runs.claim(run)["code"] == "finished"
    nobody = uuid.uuid4()
    assert {call(nobody)["code"] for call in (runs.claim, runs.heartbeat, runs.complete, runs.release)} == {"not_found"}


def test_a_repeated_complete_changes_no_cost_and_adds_one_that_was_unknown(runs: Workflows) -> None:
    run = held(runs)
    runs.complete(run, p_usage={"input_tokens": 5})
    assert runs.complete(run, p_usage={"cost_usd": 0.12})["code"] == "already"
    first = runs.row(run)
    assert runs.complete(run, p_usage={"cost_usd": 5, "input_tokens": 9})["code"] == "already"
    assert runs.row(run) == first
    assert (float(first["cost_estimate"]), first["input_tokens"]) == (0.12, 5)


def test_a_token_fences_an_earlier_claim_of_the_same_session(runs: Workflows) -> None:
    run = dispatched(runs)
    old = runs.claim(run)["claim_token"]
    runs.heartbeat(run)
    runs.shift(run, "last_heartbeat_at", 700)
    runs.shift(run, "claimed_at", 800)
    assert runs.tick()["released"] == 1
    assert runs.tick()["dispatched"] == 1
    new = runs.claim(run)["claim_token"]
    assert old != new
    assert runs.heartbeat(run, p_claim_token=old)["code"] == "not_yours"
    assert runs.complete(run, p_claim_token=old)["code"] == "not_yours"
    assert runs.complete(run, p_claim_token=new)["code"] == "ok"


def test_only_the_routed_agent_claims(runs: Workflows) -> None:
    run = dispatched(runs)
    assert runs.claim(run, p_agent="other")["code"] == "not_yours"
    assert runs.claim(run, p_agent="coder")["code"] == "ok"


def test_a_queued_run_cannot_be_claimed_and_an_empty_session_claims_nothing(runs: Workflows) -> None:
    run = runs.run("unrouted")
    assert runs.claim(run)["code"] == "not_dispatched"
    assert runs.claim(run, " ")["code"] == "bad_session"


def test_a_failure_keeps_its_reason(runs: Workflows) -> None:
    run = held(runs)
    assert runs.fail(run, error="tests are red")["status"] == "failed"
    row = runs.row(run)
    assert (row["last_error"], row["last_error_at"] is not None) == ("tests are red", True)
    assert runs.fail(run, error="again")["code"] == "already"
    assert runs.row(run)["last_error"] == "tests are red"


def test_a_release_returns_the_run_three_times_and_then_fails_it(runs: Workflows) -> None:
    run = runs.run()
    for number in range(1, 5):
        assert runs.tick()["dispatched"] == 1
        assert runs.claim(run)["code"] == "ok"
        answer = runs.release(run)
        assert answer["status"] == ("queued" if number < 4 else "failed")
        if number < 4:
            assert runs.release(run)["code"] == "already"
    assert runs.row(run)["last_error"] == "Claim lost after 3 releases (released)"


def test_a_paused_run_keeps_its_owner_and_is_not_finished_meanwhile(runs: Workflows) -> None:
    run = held(runs)
    runs.heartbeat(run)
    runs.database.execute("update workflow_runs set status = 'blocked', blocker_type = 'paused' where id = %s", [run])
    assert (runs.heartbeat(run)["code"], runs.heartbeat(run)["status"]) == ("ok", "blocked")
    assert (runs.release(run)["code"], runs.status(run)) == ("held", "blocked")
    runs.database.execute("update workflow_runs set status = 'running' where id = %s", [run])
    assert runs.complete(run)["code"] == "ok"


@pytest.mark.parametrize("origin", ["claimed", "running"])
@pytest.mark.parametrize("end", ["completed", "failed"])
def test_m15_what_ended_while_it_was_held_ends_when_it_goes_on(runs: Workflows, origin: str, end: str) -> None:
    run = held(runs)
    if origin == "running":
        runs.heartbeat(run)
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [run])
    more = {"p_usage": {"cost_usd": 0.5}}
    for _ in range(2):  # a lost answer is asked for again
        answer = runs.complete(run, p_output={"pr": 7}, **more) if end == "completed" else runs.fail(run, **more)
        assert (answer["applied"], answer["code"], answer["status"]) == (True, "kept", "blocked")
    assert runs.row(run)["finished_at"] is None
    assert [cost for cost, _, _ in runs.bookings(run)] == [0.5]
    before = runs.steps(run)
    runs.database.execute("update workflow_runs set status = %s where id = %s", [origin, run])
    row = runs.row(run)
    assert (row["status"], row["kept_status"], float(row["cost_estimate"])) == (end, None, 0.5)
    assert (row["output_summary"], row["last_error"]) == (({"pr": 7}, None) if end == "completed" else (None, "broken"))
    through = [f"blocked>{origin}"]
    if (origin, end) == ("claimed", "completed"):
        through.append("claimed>running")
    assert runs.steps(run)[len(before) :] == [*through, f"{through[-1].partition('>')[2]}>{end}"]
    assert runs.database.value("select ended_as from workflow_claims where run_id = %s", [run]) == end
    assert runs.complete(run)["code"] == ("already" if end == "completed" else "finished")


def test_m15_a_cancelled_run_keeps_the_output_it_was_given_while_it_was_held(runs: Workflows) -> None:
    run = held(runs)
    runs.heartbeat(run)
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [run])
    runs.complete(run, p_output={"pr": 7})
    runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    row = runs.row(run)
    assert (row["status"], row["output_summary"], row["kept_status"]) == ("cancelled", {"pr": 7}, None)


@pytest.mark.parametrize("origin", ["dispatched", "running"])
def test_a_pause_is_no_silence(runs: Workflows, origin: str) -> None:
    run = dispatched(runs)
    if origin == "running":
        runs.claim(run), runs.heartbeat(run)
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [run])
    for column in ("dispatched_at", "claimed_at", "last_heartbeat_at"):
        runs.shift(run, column, 9000)
    assert runs.tick()["errors"] == []
    assert runs.status(run) == "blocked"
    runs.database.execute("update workflow_runs set status = %s where id = %s", [origin, run])
    tick = runs.tick()
    assert (tick["released"], tick["retried"], runs.status(run)) == (0, 0, origin)


def test_a_pause_puts_the_deadline_off_by_its_length(runs: Workflows) -> None:
    run = held(runs)
    runs.heartbeat(run)
    runs.shift(run, "deadline_at", -600)
    for side in SIDE:
        runs.database.execute("update workflow_runs set status = %s where id = %s", [side, run])
    runs.shift(run, "paused_at", 4000)
    runs.shift(run, "deadline_at", 3400)  # both as after holding it for 4000 s
    assert runs.heartbeat(run)["deadline_in"] == pytest.approx(600, abs=10)
    runs.database.execute("update workflow_runs set status = 'running' where id = %s", [run])
    assert (runs.tick()["timed_out"], runs.row(run)["paused_at"]) == (0, None)
    assert runs.heartbeat(run)["deadline_in"] == pytest.approx(600, abs=10)
    runs.shift(run, "deadline_at", 1)
    assert runs.tick()["timed_out"] == 1


def test_what_a_held_run_has_cost_is_booked_at_once(runs: Workflows) -> None:
    run = held(runs)
    runs.heartbeat(run)
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [run])
    for end, cost in ((runs.complete, 0.25), (runs.fail, 0.5)):
        answer = end(run, p_usage={"cost_usd": cost})
        assert (answer["code"], answer["usage_booked"]) == ("kept", True)
        assert float(runs.row(run)["cost_estimate"]) == cost
    assert runs.complete(run)["usage_booked"] is False
    assert runs.complete(run, "other", p_usage={"cost_usd": 9})["usage_booked"] is False
    assert float(runs.row(run)["cost_estimate"]) == 0.5


def test_usage_that_is_no_usage_stays_unknown(runs: Workflows) -> None:
    run = held(runs)
    for cost in (-1, "NaN", "Infinity", "a lot", 1e12, None):
        assert runs.usage(run, cost_usd=cost)["code"] == "ok"
        assert (runs.row(run)["cost_estimate"], runs.row(run)["reported_at"]) == (None, None)
    runs.usage(run, cost_usd=0)
    assert runs.row(run)["cost_estimate"] == 0
    assert runs.row(run)["reported_at"] is not None


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"p_input": {"a": 2}}, "input"),
        ({"p_workflow_type": "qa-review"}, "workflow type"),
        ({"p_agent": "ada"}, "agent"),
    ],
)
def test_m24_another_run_under_the_same_key_is_refused(runs: Workflows, other: dict[str, Any], what: str) -> None:
    more = {"p_tenant_id": runs.tenant, "p_workflow_type": "code-change", "p_input": {"a": 1}, "p_request_key": "k"}
    first = runs.call("enqueue_workflow_run", **more)
    assert runs.call("enqueue_workflow_run", **more)["code"] == "already"
    refused = runs.call("enqueue_workflow_run", **{**more, **other})
    assert (refused["applied"], refused["code"]) == (False, "key_taken")
    assert refused["faults"] == [f"request_key: run {first['run_id']} has it, with another {what}"]
    assert runs.database.value("select count(*) from workflow_runs") == 1


def test_m14_a_refusal_tells_no_session(runs: Workflows) -> None:
    run = held(runs)
    for refused in (runs.claim(run, "mine"), runs.complete(run, "mine"), runs.release(run, "mine")):
        assert refused["code"] in ("claimed_by_another", "not_yours")
        assert not {"session_id", "wake_id", "claim_token"} & refused["run"].keys()
    assert runs.claim(run)["run"]["session_id"] == "s1"


def test_m23_a_retried_run_begins_without_its_old_error(runs: Workflows) -> None:
    run = held(runs)
    runs.fail(run, error="broken")
    runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    assert (runs.row(run)["last_error"], runs.row(run)["last_error_at"]) == (None, None)
    runs.tick(), runs.claim(run, "s2"), runs.complete(run, "s2")
    assert runs.row(run)["last_error"] is None
    [audit] = runs.database.rows("select before from workflow_audit_log")
    assert audit["before"]["last_error"] == "broken"


def test_enqueue_once_per_key_and_pinned(runs: Workflows) -> None:
    more = {"p_tenant_id": runs.tenant, "p_workflow_type": "code-change", "p_input": {"a": 1}, "p_request_key": "k"}
    first = runs.call("enqueue_workflow_run", **more, p_agent="ada", p_priority=4)
    again = runs.call("enqueue_workflow_run", **more)
    assert (first["code"], again["code"]) == ("ok", "already")
    assert first["run_id"] == again["run_id"]
    runs.tick()
    row = runs.row(uuid.UUID(first["run_id"]))
    assert (row["owner_agent_id"], row["priority"], row["input_payload"]) == ("ada", 4, {"a": 1})
    assert runs.call("enqueue_workflow_run", p_tenant_id=runs.tenant, p_workflow_type=" ")["code"] == "invalid"


def test_cancel_is_audited_and_final(runs: Workflows) -> None:
    run = held(runs)
    cancel = {"p_tenant_id": runs.tenant, "p_run_id": run, "p_actor": "op", "p_reason": "not needed"}
    assert runs.call("cancel_workflow_run", **cancel)["code"] == "ok"
    assert runs.call("cancel_workflow_run", **cancel)["code"] == "already"
    assert runs.row(run)["last_error"] == "not needed"
    assert runs.heartbeat(run)["code"] == "finished"
    assert runs.database.value("select count(*) from workflow_audit_log where action = 'cancel_run'") == 1
    assert runs.call("cancel_workflow_run", **{**cancel, "p_run_id": uuid.uuid4()})["code"] == "not_found"


# ------------------------------------------------------------------------------------------- races


def test_eight_sessions_claim_one_run_and_one_wins(runs: Workflows) -> None:
    run = dispatched(runs)
    daemons = [runs.sibling() for _ in range(8)]
    answers = at_once([lambda d=daemon, n=number: d.claim(run, f"s{n}") for number, daemon in enumerate(daemons)])
    assert sorted(answer["code"] for answer in answers) == ["claimed_by_another"] * 7 + ["ok"]
    assert runs.steps(run) == ["queued>dispatched", "dispatched>claimed"]


def test_ff43_a_run_finished_in_time_is_not_recovered(runs: Workflows) -> None:
    """The recovery has chosen the run; the agent completes it first, in a transaction that commits late."""
    run = held(runs)
    runs.heartbeat(run)
    runs.shift(run, "last_heartbeat_at", 700)
    runs.shift(run, "claimed_at", 800)
    agent = runs.sibling()
    agent.connection.autocommit = False
    assert agent.complete(run)["code"] == "ok"
    tick = runs.tick()
    assert (tick["released"], tick["errors"]) == (0, [])
    agent.connection.commit()
    assert runs.tick()["released"] == 0
    assert runs.status(run) == "completed"
    assert [step for step in runs.steps(run) if step.split(">")[1] in FINAL] == ["running>completed"]


def test_ff66_reports_of_different_things_at_once_lose_nothing(runs: Workflows) -> None:
    run = held(runs)
    one, two = runs.sibling(), runs.sibling()
    at_once([
        lambda: [one.usage(run, input_tokens=number) for number in range(20)],
        lambda: [two.usage(run, cost_usd=number) for number in range(20)],
    ])  # fmt: skip
    row = runs.row(run)
    assert (row["input_tokens"], float(row["cost_estimate"])) == (19, 19.0)


def test_a_complete_and_a_cancel_at_once_end_it_once(runs: Workflows) -> None:
    for _ in range(10):
        run = held(runs)
        one, two = runs.sibling(), runs.sibling()
        answers = at_once([
            lambda o=one, r=run: o.complete(r),
            lambda t=two, r=run: t.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=r, p_actor="op"),
        ])  # fmt: skip
        assert sorted(answer["code"] for answer in answers) == ["finished", "ok"]
        one.connection.close(), two.connection.close()


# ------------------------------------------------------------------------------------------- tenants, rights, twice


def test_another_tenants_runs_are_out_of_reach(runs: Workflows) -> None:
    other = uuid.uuid4()
    stranger = Workflows(runs.database, "theirs", other)
    stranger.route()
    mine, theirs = runs.run(), stranger.run()
    assert stranger.tick()["dispatched"] == 1
    assert (runs.status(mine), runs.status(theirs)) == ("queued", "dispatched")
    assert runs.claim(theirs)["code"] == "not_found"
    assert stranger.call("poll_workflow_runs", p_tenant_id=other, p_agent=None, p_limit=9)["count"] == 1
    assert runs.call("poll_workflow_runs", p_tenant_id=runs.tenant, p_agent=None, p_limit=9)["count"] == 0


@pytest.fixture(params=["database", "yourhq_database"])
def either(request: pytest.FixtureRequest) -> Database:
    found: Database = request.getfixturevalue(request.param)
    return found


def test_only_the_service_role_may_call_and_write(either: Database) -> None:
    functions = either.rows(
        """select proname, prosecdef, proconfig, has_function_privilege('service_role', oid, 'execute') as service,
                  has_function_privilege('anon', oid, 'execute')
                    or has_function_privilege('authenticated', oid, 'execute') as open
             from pg_proc where pronamespace::regnamespace::text in ('public', 'dispatcher')
              and proname not in ('budget_blocks', 'hint_budget_change')
              and (proname ~ 'workflow|budget_|_budget|orphan|wakes_to_stop|stale_(claims|dispatches)'
                   or proname ~ 'time_out_runs|queued_runs|_held_runs|unrouted|note_wake_progress')"""
    )
    assert len(functions) > 70
    assert [f["proname"] for f in functions if f["open"] or not f["service"]] == []
    assert [f["proname"] for f in functions if not any("search_path=" in c for c in f["proconfig"] or [])] == []
    definers = {f["proname"] for f in functions if f["prosecdef"]}
    assert definers == {
        *(
            "hint_workflow_daemons",
            "hint_workflow_insert",
            "hint_workflow_update",
            "hint_workflow_rules",
            "broadcast_budget_event",
            "audit_workflow_action",
        )
    }
    assert len({f["proname"] for f in functions}) == len(functions), "one signature per name"
    for role in ("anon", "authenticated"):
        person = either.connect(role, {"sub": str(uuid.uuid4())})
        for table in (
            "workflow_runs",
            "budgets",
            "workflow_agent_routing",
            "workflow_audit_log",
            "workflow_run_events",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                person.execute(f"delete from public.{table}")


def test_signed_in_people_read_their_tenant_and_anon_nothing(runs: Workflows) -> None:
    other = Workflows(runs.database, "theirs", uuid.uuid4())
    runs.run(), other.run()
    person = runs.database.connect("authenticated", {"sub": str(uuid.uuid4())})
    assert len(person.execute("select id from public.workflow_runs").fetchall()) == 1
    anon = runs.database.connect("anon")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        anon.execute("select id from public.workflow_runs")


def test_everything_has_a_comment_and_row_level_security(database: Database) -> None:
    silent = database.rows(
        """select relname from pg_class where relnamespace::regnamespace::text in ('public', 'dispatcher')
             and relkind in ('r', 'v')
             and (relname ~ '^(workflow|budget)' or relname in ('departments', 'agent_profiles'))
             and (obj_description(oid, 'pg_class') is null or (relkind = 'r' and not relrowsecurity))
           union all
           select proname from pg_proc where pronamespace::regnamespace::text in ('public', 'dispatcher')
             and proname ~ 'workflow|budget' and obj_description(oid, 'pg_proc') is null"""
    )
    assert silent == []


def test_a_database_with_an_audit_log_of_its_own_keeps_it(empty_database: Database) -> None:
    """YourHQ has a table of that name and another shape."""
    empty_database.execute("create table public.audit_log (id uuid primary key, module text not null)")
    apply_migrations(empty_database.url, migrations_directory())
    for path in sorted(migrations_directory().glob("*_workflow_*.sql")):
        empty_database.admin.execute(path.read_bytes())  # a second time is harmless
    columns = empty_database.rows(
        "select column_name as name from information_schema.columns where table_name = 'audit_log' order by 1"
    )
    assert [column["name"] for column in columns] == ["id", "module"]
    runs = Workflows(empty_database)
    runs.route()
    run = held(runs)
    assert runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")["code"] == "ok"
    assert empty_database.value("select count(*) from workflow_audit_log") == 1


def test_routes_are_seeded_set_and_removed(runs: Workflows) -> None:
    seeded = runs.call("seed_workflow_routes", p_tenant_id=runs.tenant)
    assert seeded["seeded"] == 7  # code-change has a route already
    assert runs.call("seed_workflow_routes", p_tenant_id=runs.tenant)["seeded"] == 0
    setting = {"p_tenant_id": runs.tenant, "p_workflow_type": "qa-review", "p_agent": "ada"}
    route = runs.call("set_workflow_route", **setting, p_max_concurrent=3)["route"]
    assert (route["agent_id"], route["max_concurrent"], route["timeout_minutes"]) == ("ada", 3, 60)
    assert runs.call("set_workflow_route", **setting, p_priority=5)["route"]["max_concurrent"] == 3
    wrong = runs.call("set_workflow_route", **{**setting, "p_agent": ""}, p_max_concurrent=-1, p_timeout_minutes=0)
    assert len(wrong["faults"]) == 3
    removal = {"p_tenant_id": runs.tenant, "p_workflow_type": "qa-review"}
    assert [runs.call("remove_workflow_route", **removal)["code"] for _ in range(2)] == ["ok", "not_found"]


def test_show_and_list(runs: Workflows) -> None:
    run = held(runs)
    shown = runs.call("show_workflow_run", p_tenant_id=runs.tenant, p_run_id=run)
    assert [event["to"] for event in shown["events"]] == ["dispatched", "claimed"]
    assert (shown["claims"][0]["session_id"], shown["notifications"][0]["state"]) == ("s1", "obsolete")
    assert "claim_token" not in str(Jsonb(shown).obj)
    listed = runs.call("list_workflow_runs", p_tenant_id=runs.tenant, p_status="claimed")
    assert (listed["count"], listed["runs"][0]["id"]) == (1, str(run))
    assert runs.call("show_workflow_run", p_tenant_id=runs.tenant, p_run_id=uuid.uuid4())["code"] == "not_found"
