"""The books of runs: what is reserved, reported, assumed and corrected, and in which period each of them counts."""

import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows

ESTIMATE = 5.0
INSERT = (
    "insert into workflow_bookings (tenant_id, run_id, attempt, workflow_type, cost_usd, tokens, source) "
    "values (gen_random_uuid(), gen_random_uuid(), 1, 't', 1, 0, 'report')"
)


@pytest.fixture(scope="module")
def shared(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as database:
        yield database


@pytest.fixture
def runs(shared: Database) -> Iterator[Workflows]:
    with fresh_workflows(shared) as workflows:
        workflows.route(max_concurrent=100)
        workflows.settings = {"workflow_cost_estimate_usd": ESTIMATE}
        workflows.set()
        yield workflows


def started(runs: Workflows, session: str = "s1") -> uuid.UUID:
    """A run that an agent works on."""
    run = runs.run()
    runs.tick()
    assert runs.claim(run, session)["code"] == "ok"
    runs.heartbeat(run, session)
    return run


# ------------------------------------------------------------------------------------------- reserved and reported


def test_m1_a_small_report_frees_none_of_the_reservation(runs: Workflows) -> None:
    budget = runs.budget(10)
    for number in range(2):
        run = started(runs)
        runs.heartbeat(run, p_usage={"cost_usd": 0.01})
        assert runs.spend(budget) == (pytest.approx(0.01 * (number + 1)), pytest.approx(4.99 * (number + 1)))
    for _ in range(9):
        runs.run()
    assert runs.tick()["dispatched"] == 0
    assert runs.spend(budget) == (0.02, 9.98)


def test_m1_a_report_above_the_reservation_counts_as_it_is(runs: Workflows) -> None:
    budget = runs.budget(20)
    run = started(runs)
    runs.heartbeat(run, p_usage={"cost_usd": 7, "input_tokens": 10})
    assert runs.spend(budget) == (7, 0)
    runs.complete(run, p_usage={"cost_usd": 3})
    assert runs.spend(budget) == (3, 0)


def test_m2_what_is_new_is_booked_in_the_period_it_arrives_in(runs: Workflows) -> None:
    daily, monthly = runs.budget(1000), runs.budget(1000, "warn", period="monthly")
    run = started(runs)
    runs.heartbeat(run, p_usage={"cost_usd": 4})
    runs.book_back(run)
    today = datetime.now(UTC).day
    assert runs.spend(daily) == (0, 1)  # what is left of its reservation belongs to the running day
    runs.complete(run, p_usage={"cost_usd": 54})
    assert runs.spend(daily) == (50, 0)
    assert runs.spend(monthly) == ((54 if today > 1 else 50), 0)
    runs.usage(run, cost_usd=53.5)
    assert runs.spend(daily) == (49.5, 0)
    assert [cost for cost, _, _ in runs.bookings(run) if cost] == [4, 50, -0.5]


def test_m5_a_reported_zero_is_no_estimate_and_no_report_is_no_zero(runs: Workflows) -> None:
    budget = runs.budget(1)
    runs.set(workflow_cost_estimate_usd=0.5)
    first = started(runs)
    runs.complete(first, p_usage={"cost_usd": 0})
    assert runs.spend(budget) == (0, 0)
    went_out = []
    for _ in range(8):
        run = runs.run()
        runs.tick(workflow_cost_estimate_usd=0.5)
        if runs.status(run) == "dispatched":
            went_out.append(run)
            runs.claim(run), runs.heartbeat(run), runs.complete(run)
    assert (len(went_out), runs.spend(budget)) == (2, (1, 0))


def test_m5_an_end_without_a_report_counts_at_least_the_configured_estimate(runs: Workflows) -> None:
    for _ in range(3):
        runs.done(cost="0.01", reported_at=datetime(2026, 1, 1, tzinfo=UTC))
    budget = runs.budget(100)
    run = started(runs)
    assert runs.spend(budget) == (0, 0.01)
    runs.complete(run)
    assert runs.spend(budget) == (ESTIMATE, 0)
    assert runs.bookings(run)[0][2] == "assumed"


@pytest.mark.parametrize("how", ["timed_out", "released", "cancelled", "failed"])
def test_m5_every_end_of_work_without_a_report_is_paid_for(runs: Workflows, how: str) -> None:
    budget = runs.budget(100)
    run = started(runs)
    if how == "timed_out":
        runs.shift(run, "deadline_at", 1)
        runs.tick()
    elif how == "released":
        runs.release(run)
    elif how == "cancelled":
        runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    else:
        runs.fail(run)
    assert runs.spend(budget) == (ESTIMATE, 0)
    assert runs.bookings(run) == [(ESTIMATE, 20_000, "assumed")]


def test_m21_tokens_that_nobody_reports_are_not_free(runs: Workflows) -> None:
    budget = runs.budget(None, cap_tokens=50_000)
    first = started(runs)
    assert runs.spend(budget) == (0, 20_000)
    runs.complete(first, p_usage={"cost_usd": 0.2})
    assert runs.spend(budget) == (20_000, 0)
    second = started(runs)
    runs.complete(second, p_usage={"input_tokens": 0, "output_tokens": 0})
    assert runs.spend(budget) == (20_000, 0)
    for _ in range(5):
        runs.run()
    assert runs.tick(workflow_token_estimate=10_000)["dispatched"] == 3
    assert runs.spend(budget) == (20_000, 30_000)


def test_the_books_outlive_the_row_of_a_run(runs: Workflows) -> None:
    budget = runs.budget(100)
    run = started(runs)
    runs.complete(run, p_usage={"cost_usd": 4})
    runs.database.execute("delete from workflow_runs where id = %s", [run])
    assert runs.spend(budget) == (4, 0)


def test_the_books_are_append_only(runs: Workflows) -> None:
    run = started(runs)
    runs.complete(run, p_usage={"cost_usd": 4})
    with pytest.raises(psycopg.Error) as refused:
        runs.database.execute("update workflow_bookings set cost_usd = 0.01")
    assert refused.value.sqlstate == "OD012"
    for statement in ("update workflow_bookings set cost_usd = 1", "delete from workflow_bookings", INSERT):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            runs.connection.execute(statement)


def test_a_row_changed_by_hand_is_booked_as_any_other(runs: Workflows) -> None:
    budget = runs.budget(100)
    run = started(runs)
    runs.database.execute("update workflow_runs set cost_estimate = 6 where id = %s", [run])
    assert runs.spend(budget) == (6, 0)
    runs.database.execute(
        "update workflow_runs set status = 'completed', finished_at = now(), cost_estimate = 7 where id = %s", [run]
    )
    assert runs.spend(budget) == (7, 0)
    unknown = runs.run(status="running", owner_agent_id="coder")
    assert runs.spend(budget) == (7, 7)  # the one report so far is the estimate
    runs.database.execute("update workflow_runs set status = 'failed' where id = %s", [unknown])
    assert runs.spend(budget) == (14, 0)


def test_a_session_that_was_replaced_by_a_respawn_or_retry_keeps_its_account(runs: Workflows) -> None:
    budget = runs.budget(100)
    run = started(runs)
    runs.fail(run, p_usage={"cost_usd": 2})
    runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    assert runs.spend(budget) == (2, 0)
    runs.tick()
    runs.claim(run, "s2"), runs.heartbeat(run, "s2", p_usage={"cost_usd": 1})
    assert runs.spend(budget) == (3, ESTIMATE - 1)
    late = runs.usage(run, "s1", cost_usd=2.5)
    assert (late["code"], late["booked"]["cost_usd"]) == ("not_yours", 0.5)
    assert runs.spend(budget) == (3.5, ESTIMATE - 1)


# ------------------------------------------------------------------------------------------- estimates


def test_m4_a_type_dearer_than_its_cap_goes_out_once_a_period(runs: Workflows) -> None:
    runs.done(cost=12, reported_at=datetime(2026, 1, 1, tzinfo=UTC))
    budget = runs.budget(10, name="Small")
    first, second = runs.run(), runs.run()
    assert runs.tick()["dispatched"] == 1
    out, held = (first, second) if runs.status(first) == "dispatched" else (second, first)
    tick = runs.tick()
    assert (tick["dispatched"], tick["held_by"], tick["blockers"]) == (
        0,
        {"code-change": ["Small"]},
        {"code-change": "estimate_over_cap"},
    )
    [shown] = runs.call("workflow_stats", p_tenant_id=runs.tenant)["by_type"]
    assert (shown["blocker"], float(shown["estimate"]["usd"]), shown["estimate"]["usd_reports"]) == (
        "estimate_over_cap",
        12,
        1,
    )
    runs.claim(out), runs.complete(out, p_usage={"cost_usd": 11})
    assert (runs.tick()["dispatched"], runs.status(held)) == (0, "queued")
    runs.book_back(out)
    assert (runs.tick()["dispatched"], runs.spend(budget)) == (1, (0, 11.5))


def test_m4_a_cap_of_nothing_lets_none_go(runs: Workflows) -> None:
    runs.budget(0)
    runs.run()
    assert runs.tick()["dispatched"] == 0


def test_m4_a_type_without_reports_does_not_inherit_those_of_others(runs: Workflows) -> None:
    runs.route("cheap", "ada")
    runs.done("cheap", cost="0.01"), runs.done("dear", cost=900)
    runs.run()
    runs.tick()
    assert float(runs.database.value("select reserved_usd from workflow_runs where status = 'dispatched'")) == ESTIMATE


# ------------------------------------------------------------------------------------------- what cannot be evaluated


def broken(runs: Workflows, function: str) -> Any:
    """Has a function of the accounts raise; the statement that mends it comes back."""
    [row] = runs.database.rows(
        "select oid, proname, pg_get_functiondef(oid) as text from pg_proc where oid = %s::regprocedure", [function]
    )
    head = row["text"].partition("AS $")[0].replace("LANGUAGE sql", "LANGUAGE plpgsql")
    runs.database.execute(f"{head} as $$ begin raise exception 'the books are on fire'; end $$")
    return row["text"]


@pytest.mark.parametrize(
    "function", ["dispatcher.workflow_estimates(uuid)", "dispatcher.workflow_spend(uuid, timestamptz[])"]
)
def test_m6_an_error_of_estimates_or_spend_is_loud_and_holds_what_is_fail_closed(
    runs: Workflows, function: str
) -> None:
    runs.route("free", "ada")
    runs.budget(100, scope="agent", scope_id="coder", fail_closed=True)
    runs.budget(100, "hard_stop", scope="agent", scope_id="ada")
    held, free = runs.run(), runs.run("free")
    mend = broken(runs, function)
    try:
        tick = runs.tick()
    finally:
        runs.database.execute(mend)
    assert (runs.status(held), runs.status(free)) == ("queued", "dispatched")
    assert "on fire" in tick["budget_error"]
    assert (tick["budgets_open"], tick["errors"]) == (True, [])
    assert runs.tick()["budget_error"] is None
    assert runs.status(held) == "dispatched"


# ------------------------------------------------------------------------------------------- one figure


def test_m16_stats_budgets_and_books_show_one_figure(runs: Workflows) -> None:
    budget = runs.budget(100)
    reported, silent = started(runs, "a"), started(runs, "b")
    runs.complete(reported, "a", p_usage={"cost_usd": 1})
    runs.complete(silent, "b")
    released = started(runs, "c")
    runs.heartbeat(released, "c", p_usage={"cost_usd": 3}), runs.release(released, "c")
    settled, _ = runs.spend(budget)
    stats = runs.call("workflow_stats", p_tenant_id=runs.tenant)
    booked = runs.database.value("select sum(cost_usd) from workflow_bookings")
    assert (settled, float(stats["cost_last_24h_usd"]), float(booked)) == (9, 9, 9)


# ------------------------------------------------------------------------------------------- corrections


def test_m17_a_cost_is_corrected_after_the_end_and_the_answer_says_what_was_booked(runs: Workflows) -> None:
    budget = runs.budget(100)
    run = started(runs)
    runs.complete(run, p_usage={"cost_usd": 2})
    ignored = runs.complete(run, p_usage={"cost_usd": 3})
    assert (ignored["code"], ignored["usage_ignored"], ignored["booked"]["cost_usd"]) == ("already", True, 0)
    answer = runs.usage(run, cost_usd=1.5, input_tokens=40)
    assert (answer["applied"], answer["code"], answer["usage_booked"]) == (True, "ok", True)
    assert (answer["booked"]["cost_usd"], answer["booked"]["tokens"]) == (-0.5, 40 - 20_000)
    assert runs.spend(budget) == (1.5, 0)


def test_m17_an_operator_corrects_what_a_run_or_a_lost_claim_has_cost(runs: Workflows) -> None:
    def correct(**more: Any) -> Any:
        return runs.call(
            "correct_workflow_usage", p_tenant_id=runs.tenant, p_run_id=run, p_actor="operator:ann", **more
        )

    budget = runs.budget(100)
    run = started(runs)
    runs.release(run)
    assert correct(p_usage={"cost_usd": 2})["code"] == "nothing_booked"
    lost = correct(p_usage={"cost_usd": 2}, p_session="s1", p_reason="the bill")
    assert (lost["code"], lost["booked"]["cost_usd"]) == ("ok", -3)
    runs.tick(), runs.claim(run, "s2"), runs.complete(run, "s2")
    now = correct(p_usage={"cost_usd": 0.25})
    assert (now["code"], now["booked"]["cost_usd"], runs.spend(budget)) == ("ok", 0.25 - ESTIMATE, (2.25, 0))
    assert correct(p_usage={"cost_usd": "much"})["code"] == "invalid"
    assert [source for _, _, source in runs.bookings(run)] == ["assumed", "correction", "assumed", "correction"]
    audit = runs.database.rows("select actor, action, before, after from workflow_audit_log order by id")
    assert [(line["actor"], line["action"]) for line in audit] == [("operator:ann", "correct_usage")] * 2
    assert (audit[0]["after"]["reason"], audit[1]["after"]["cost_usd"]) == ("the bill", 0.25)


# ------------------------------------------------------------------------------------------- periods and events


@pytest.mark.parametrize(
    ("zone", "kind", "moment", "starts", "ends"),
    [
        # 01:00 becomes 00:00: the local midnight comes twice, and the first one counts
        ("Atlantic/Azores", "daily", "2026-10-25T00:30Z", "2026-10-25T00:00Z", "2026-10-26T01:00Z"),
        ("Atlantic/Azores", "daily", "2026-10-25T01:30Z", "2026-10-25T00:00Z", "2026-10-26T01:00Z"),
        ("Atlantic/Azores", "daily", "2026-10-24T12:00Z", "2026-10-24T00:00Z", "2026-10-25T00:00Z"),
        ("America/Havana", "daily", "2026-11-01T04:30Z", "2026-11-01T04:00Z", "2026-11-02T05:00Z"),
        # midnight becomes 23:00 of the day before
        ("Asia/Beirut", "daily", "2026-10-24T21:30Z", "2026-10-23T21:00Z", "2026-10-24T22:00Z"),
    ],
)
def test_m26_a_period_begins_with_the_first_instant_of_its_date(
    shared: Database, zone: str, kind: str, moment: str, starts: str, ends: str
) -> None:
    found = shared.row("select * from dispatcher.workflow_period(%s, %s, %s)", [kind, zone, moment])
    assert (found["starts_at"], found["ends_at"]) == (datetime.fromisoformat(starts), datetime.fromisoformat(ends))


def test_m26_no_period_of_any_zone_starts_after_now_around_any_change_of_clocks(shared: Database) -> None:
    """Every zone the database knows, around the days on which most of them change their clocks."""
    wrong = shared.rows(
        """select zone.name, moment, period.*
             from pg_timezone_names as zone
            cross join unnest(
              array['2026-03-29', '2026-04-05', '2026-10-25', '2026-11-01', '2011-12-30']::timestamptz[]) as day
            cross join lateral generate_series(
              day - interval '14 hours', day + interval '26 hours', '2 hours 30 minutes') as moment
            cross join lateral dispatcher.workflow_period('daily', zone.name, moment) as period
            where zone.name !~ '^posix|^right' and (period.starts_at > moment or period.ends_at <= moment
               or (period.starts_at at time zone zone.name)::date::text <> period.period_key)"""
    )
    assert wrong == []


def test_m27_a_changed_cap_opens_a_new_event(runs: Workflows) -> None:
    runs.done(cost=1)
    budget = runs.budget(1)
    runs.tick(), runs.tick()
    runs.database.execute("update budgets set cap_usd = 3 where id = %s", [budget])
    runs.done(cost=1)
    runs.tick()
    assert len(runs.events()) == 1
    runs.done(cost=1)
    runs.tick(), runs.tick()
    told = [(event["event_kind"], float(event["detail"]["cap_usd"]), event["revision"]) for event in runs.events()]
    assert told == [("paused", 1, 1), ("paused", 3, 2)]
    assert len(runs.frames()) == 2
    runs.database.execute("update budgets set name = 'Other', fail_closed = true where id = %s", [budget])
    runs.tick()
    assert len(runs.events()) == 2


# ------------------------------------------------------------------------------------------- races


def test_two_sessions_race_on_the_last_room_in_a_budget(runs: Workflows) -> None:
    """Reports come in while eight daemons hand out runs: what is settled and reserved never passes the cap."""
    budget = runs.budget(20)
    busy = [started(runs, f"s{number}") for number in range(2)]
    for _ in range(30):
        runs.run()
    daemons = [runs.sibling() for _ in range(4)]
    gate = threading.Barrier(6)

    def report(agent: Workflows, run: uuid.UUID, session: str) -> None:
        gate.wait()
        for step in range(1, 11):
            agent.heartbeat(run, session, p_usage={"cost_usd": step / 2})

    def hand_out(daemon: Workflows) -> None:
        gate.wait()
        for _ in range(10):
            daemon.tick()

    agents = [runs.sibling() for _ in range(2)]
    threads = [
        *(threading.Thread(target=report, args=(agents[n], busy[n], f"s{n}")) for n in range(2)),
        *(threading.Thread(target=hand_out, args=(daemon,)) for daemon in daemons),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs.spend(budget) == (10, 10)
    assert Decimal(runs.database.value("select sum(cost_usd) from workflow_bookings")) == 10
