"""Budgets: periods over zones and clock changes, spend, reservations, scopes, actions, latches, frames, failure."""

import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows


@pytest.fixture(scope="module")
def shared(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as database:
        yield database


@pytest.fixture
def runs(shared: Database) -> Iterator[Workflows]:
    with fresh_workflows(shared) as workflows:
        workflows.route(max_concurrent=100)
        workflows.settings = {"workflow_cost_estimate_usd": 0.2}
        workflows.set()
        yield workflows


# ------------------------------------------------------------------------------------------- periods


def period(database: Database, kind: str, zone: str, moment: str) -> dict[str, Any]:
    return database.row("select * from dispatcher.workflow_period(%s, %s, %s)", [kind, zone, moment])


@pytest.mark.parametrize(
    ("kind", "zone", "moment", "key", "starts", "ends"),
    [
        ("daily", "UTC", "2026-11-30T23:59:59Z", "2026-11-30", "2026-11-30T00:00Z", "2026-12-01T00:00Z"),
        ("weekly", "UTC", "2026-11-30T00:00:00Z", "2026-W49", "2026-11-30T00:00Z", "2026-12-07T00:00Z"),
        ("monthly", "UTC", "2026-11-30T12:00:00Z", "2026-11", "2026-11-01T00:00Z", "2026-12-01T00:00Z"),
        # a zone ahead and one behind
        ("daily", "Asia/Tokyo", "2026-11-30T15:00:00Z", "2026-12-01", "2026-11-30T15:00Z", "2026-12-01T15:00Z"),
        ("monthly", "America/New_York", "2026-12-01T04:59:59Z", "2026-11", "2026-11-01T04:00Z", "2026-12-01T05:00Z"),
        ("daily", "Asia/Kathmandu", "2026-06-01T18:14:59Z", "2026-06-01", "2026-05-31T18:15Z", "2026-06-01T18:15Z"),
        # clocks forward (23 h) and back (25 h)
        ("daily", "Europe/Berlin", "2026-03-29T12:00:00Z", "2026-03-29", "2026-03-28T23:00Z", "2026-03-29T22:00Z"),
        ("daily", "Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-25", "2026-10-24T22:00Z", "2026-10-25T23:00Z"),
        ("weekly", "America/New_York", "2026-11-01T12:00:00Z", "2026-W44", "2026-10-26T04:00Z", "2026-11-02T05:00Z"),
        # midnight does not exist on the day the clocks go forward here
        ("daily", "Africa/Cairo", "2026-04-24T12:00:00Z", "2026-04-24", "2026-04-23T22:00Z", "2026-04-24T21:00Z"),
        # week 53, and a new year's day in the old year's week
        ("weekly", "UTC", "2027-01-01T00:00:00Z", "2026-W53", "2026-12-28T00:00Z", "2027-01-04T00:00Z"),
        ("weekly", "UTC", "2027-01-04T00:00:00Z", "2027-W01", "2027-01-04T00:00Z", "2027-01-11T00:00Z"),
        # ends of months
        ("monthly", "UTC", "2028-02-29T23:59:59Z", "2028-02", "2028-02-01T00:00Z", "2028-03-01T00:00Z"),
        ("monthly", "Pacific/Kiritimati", "2026-12-31T10:00:00Z", "2027-01", "2026-12-31T10:00Z", "2027-01-31T10:00Z"),
    ],
)
def test_periods(shared: Database, kind: str, zone: str, moment: str, key: str, starts: str, ends: str) -> None:
    found = period(shared, kind, zone, moment)
    assert found["period_key"] == key
    assert (found["starts_at"], found["ends_at"]) == (datetime.fromisoformat(starts), datetime.fromisoformat(ends))


@given(
    st.integers(1577836800, 2208988800).map(lambda seconds: datetime.fromtimestamp(seconds, UTC)),
    st.sampled_from(
        ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia"]
    ),
    st.sampled_from(["daily", "weekly", "monthly"]),
)
@settings(max_examples=150, deadline=None)
def test_every_moment_lies_in_its_period_and_keys_follow_the_zone(
    shared: Database, moment: datetime, zone: str, kind: str
) -> None:
    found = period(shared, kind, zone, moment.isoformat())
    assert found["starts_at"] <= moment < found["ends_at"]
    local = moment.astimezone(ZoneInfo(zone))
    year, week, _ = local.isocalendar()
    assert (
        found["period_key"]
        == {"daily": f"{local:%Y-%m-%d}", "weekly": f"{year}-W{week:02}", "monthly": f"{local:%Y-%m}"}[kind]
    )


@pytest.mark.parametrize(("kind", "zone"), [("daily", "No/Where"), ("yearly", "UTC")])
def test_what_is_no_period_raises(shared: Database, kind: str, zone: str) -> None:
    with pytest.raises(psycopg.Error):
        period(shared, kind, zone, "2026-01-01T00:00Z")


# ------------------------------------------------------------------------------------------- breach


@pytest.mark.parametrize(("spent", "goes_out"), [("0.99", True), ("1.00", False), ("1.01", False)])
def test_equality_breaches(runs: Workflows, spent: str, goes_out: bool) -> None:
    runs.done(cost=spent)
    runs.budget(1)
    runs.run()
    tick = runs.tick(workflow_cost_estimate_usd=0)
    # the median of what was reported is the estimate, so the last cent would not be enough for a whole one
    assert tick["dispatched"] == 0
    runs.route("cheap"), runs.run("cheap")
    assert runs.tick(workflow_cost_estimate_usd=0)["dispatched"] == goes_out


def test_a_cap_of_nothing_blocks(runs: Workflows) -> None:
    runs.budget(0)
    run = runs.run()
    tick = runs.tick(workflow_cost_estimate_usd=0)
    assert (tick["dispatched"], tick["budget_enforcement"]["held"]) == (0, 1)
    assert (runs.status(run), runs.row(run)["dispatch_attempts"]) == ("queued", 0)


def test_pause_holds_without_an_attempt_tells_once_and_resumes_on_a_raised_cap(runs: Workflows) -> None:
    runs.done(cost=1)
    budget = runs.budget(1)
    run = runs.run()
    for _ in range(10):
        assert runs.tick()["budget_enforcement"] == {"held": 1, "stopped": 0, "warned": 0}
    assert [event["event_kind"] for event in runs.events()] == ["paused"]
    assert len(runs.frames()) == 1
    assert (runs.status(run), runs.row(run)["dispatch_attempts"]) == ("queued", 0)
    runs.database.execute("update budgets set cap_usd = 5 where id = %s", [budget])
    assert runs.tick()["dispatched"] == 1


def test_pause_resumes_on_deactivation_and_rollover(runs: Workflows) -> None:
    spent = runs.done(cost=1)
    budget = runs.budget(1)
    runs.run()
    assert runs.tick()["dispatched"] == 0
    assert runs.call("deactivate_budget", p_tenant_id=runs.tenant, p_budget=str(budget))["code"] == "ok"
    assert runs.tick()["dispatched"] == 1
    runs.database.execute("update budgets set active = true")
    runs.database.execute("delete from workflow_runs where status = 'dispatched'")
    runs.run()
    assert runs.tick()["dispatched"] == 0
    runs.book_back(spent)
    assert runs.tick()["dispatched"] == 1


def test_warn_dispatches_and_tells_once(runs: Workflows) -> None:
    runs.done(cost=1)
    runs.budget(1, "warn")
    for _ in range(3):
        runs.run()
        assert runs.tick()["budget_enforcement"] == {"held": 0, "stopped": 0, "warned": 1}
    assert [event["event_kind"] for event in runs.events()] == ["warned"]
    assert runs.frames() == []


def test_hard_stop_ends_everything_open_in_its_scope_and_nothing_else(runs: Workflows) -> None:
    runs.route("other", "ada")
    finished = runs.done(cost=2)
    open_runs = [
        runs.run(),
        *(runs.run(status=status, owner_agent_id="coder") for status in ("dispatched", "claimed", "running")),
        *(runs.run(queued_at=datetime.now(UTC) - timedelta(days=1)) for _ in range(30)),  # beyond any batch
    ]
    outside, later = runs.run("other"), runs.run(next_attempt_at=datetime.now(UTC) + timedelta(hours=1))
    budget = runs.budget(2, "hard_stop", "project", scope_id="code-change", name="Code", period="monthly")
    tick = runs.tick()
    assert tick["budget_enforcement"]["stopped"] == len(open_runs)
    key = datetime.now(UTC).strftime("%Y-%m")
    for run in open_runs:
        assert (runs.status(run), runs.row(run)["last_error"]) == ("cancelled", f"Budget hard stop: Code ({key})")
    assert (runs.status(finished), runs.status(outside), runs.status(later)) == ("completed", "dispatched", "queued")
    [event] = runs.events()
    assert (event["event_kind"], event["budget_id"], event["period_key"]) == ("hard_stopped", budget, key)
    assert sorted(event["detail"]["cancelled_run_ids"]) == sorted(map(str, open_runs))
    late = runs.run()
    assert runs.tick()["budget_enforcement"]["stopped"] == 1
    [event] = runs.events()
    assert str(late) in event["detail"]["cancelled_run_ids"]
    assert len(runs.frames()) == 1
    runs.shift(later, "next_attempt_at", 1)
    assert runs.tick()["budget_enforcement"]["stopped"] == 1
    assert runs.status(later) == "cancelled"


def test_what_a_hard_stop_has_just_ended_fills_no_other_budget(runs: Workflows) -> None:
    runs.route("paid", "ada")
    ended = runs.run("paid")
    assert runs.tick()["dispatched"] == 1
    runs.done("paid", "ada", cost=1)
    runs.budget(1, "hard_stop", "agent", scope_id="ada")
    runs.budget("1.2"), runs.budget("1.2", "warn", period="weekly")
    free = runs.run()
    tick = runs.tick()
    assert tick["budget_enforcement"] == {"held": 0, "stopped": 1, "warned": 0}
    assert (runs.status(ended), runs.status(free)) == ("cancelled", "dispatched")
    assert [event["event_kind"] for event in runs.events()] == ["hard_stopped"]
    assert len(runs.frames()) == 1


def test_a_hard_stop_is_evaluated_with_nothing_queued(runs: Workflows) -> None:
    """ff59: another run's cost passes the cap while this one runs."""
    runs.budget(1, "hard_stop")
    running, other = runs.run(), runs.run()
    runs.tick()
    for run, session in ((running, "a"), (other, "b")):
        runs.claim(run, session), runs.heartbeat(run, session)
    runs.usage(other, "b", cost_usd=1.2)
    assert runs.tick()["budget_enforcement"]["stopped"] == 2
    assert runs.heartbeat(running, "a")["code"] == "finished"
    assert [event["event_kind"] for event in runs.events()] == ["hard_stopped"]


def test_a_reservation_alone_stops_nobody(runs: Workflows) -> None:
    """A run that was let in because it fits must not be the reason it is stopped."""
    runs.budget("0.2", "hard_stop")
    run = runs.run()
    assert runs.tick()["dispatched"] == 1
    second = runs.run()
    for _ in range(3):
        assert runs.tick()["budget_enforcement"] == {"held": 1, "stopped": 0, "warned": 0}
    assert (runs.status(run), runs.status(second)) == ("dispatched", "queued")


def held_by(runs: Workflows) -> dict[str, list[str]]:
    """Per type, the budgets `runs stats` names as holding it."""
    types = runs.call("workflow_stats", p_tenant_id=runs.tenant)["by_type"]
    return {row["workflow_type"]: row["held_by"] for row in types}


def test_a_hard_stop_that_holds_says_so(runs: Workflows) -> None:
    """Its rest is too small for the next run, and nothing is spent enough to stop anybody."""
    runs.route("paid", "ada"), runs.done("paid", "ada", cost="0.95")
    budget = runs.budget("1.00", "hard_stop", name="All")
    runs.tick()
    assert (runs.events(), held_by(runs)) == ([], {"code-change": [], "paid": []})
    run = runs.run()
    for _ in range(3):
        assert runs.tick()["budget_enforcement"] == {"held": 1, "stopped": 0, "warned": 0}
    assert [event["event_kind"] for event in runs.events()] == ["paused"]
    [sent] = runs.frames()
    frame = sent["payload"]
    assert (frame["event_kind"], frame["action"], float(frame["spend_usd"])) == ("paused", "hard_stop", 0.95)
    assert (runs.status(run), held_by(runs)) == ("queued", {"code-change": ["All"], "paid": []})
    runs.database.execute("update budgets set active = false where id = %s", [budget])
    assert runs.tick()["dispatched"] == 1
    assert held_by(runs) == {"code-change": [], "paid": []}


def test_every_budget_that_holds_is_named_and_told(runs: Workflows) -> None:
    runs.done("paid", "ada", cost="0.95")
    runs.budget("1.30", "hard_stop", name="All")
    runs.budget("0.30", "pause_new_runs", "agent", scope_id="coder", name="Coder's")
    runs.budget("0.30", "warn", "project", scope_id="code-change", name="Code")
    runs.run(), runs.run()
    assert runs.tick()["dispatched"] == 1
    assert held_by(runs)["code-change"] == ["All", "Coder's"]
    told = {frame["payload"]["budget_name"] for frame in runs.frames()}
    assert (told, len(runs.events("paused"))) == ({"All", "Coder's"}, 2)


def test_the_strictest_of_several_wins(runs: Workflows) -> None:
    runs.done(cost=1)
    runs.budget(1, "warn", "agent", scope_id="coder")
    runs.budget(1, "pause_new_runs", "project", scope_id="code-change")
    run = runs.run()
    assert runs.tick()["budget_enforcement"] == {"held": 1, "stopped": 0, "warned": 0}
    runs.budget(1, "hard_stop")
    assert runs.tick()["budget_enforcement"]["stopped"] == 1
    assert runs.status(run) == "cancelled"


@pytest.mark.parametrize(
    ("scope", "scope_id"), [("agent", "coder"), ("department", "dev"), ("project", "code-change"), ("fleet", None)]
)
def test_every_link_of_the_scope_chain(runs: Workflows, scope: str, scope_id: str | None) -> None:
    runs.seed.insert("agent_profiles", agent_id="coder", department_id="dev", tenant_id=runs.tenant)
    runs.route("elsewhere", "ada", max_concurrent=9)
    runs.done(cost=1)
    runs.done("elsewhere", "ada", cost=0)
    runs.budget(1, scope=scope, scope_id=scope_id)
    hit, free = runs.run(), runs.run("elsewhere")
    runs.tick()
    assert runs.status(hit) == "queued"
    assert runs.status(free) == ("queued" if scope == "fleet" else "dispatched")


def test_other_scopes_spend_does_not_count(runs: Workflows) -> None:
    runs.route("elsewhere", "ada")
    runs.done("elsewhere", "ada", cost=50)
    for scope, scope_id in (("agent", "coder"), ("project", "code-change"), ("department", "dev")):
        runs.budget(1, scope=scope, scope_id=scope_id)
    runs.run()
    assert runs.tick()["dispatched"] == 1
    stranger = Workflows(runs.database, "theirs", uuid.uuid4())
    stranger.route()
    stranger.budget(1), stranger.run()
    assert stranger.tick()["dispatched"] == 1
    stranger.close()


def test_a_pinned_run_is_charged_to_its_own_agent(runs: Workflows) -> None:
    runs.done(cost=1)
    runs.budget(1, scope="agent", scope_id="coder")
    free, held = runs.run(pinned_agent_id="ada"), runs.run()
    runs.tick()
    assert (runs.status(free), runs.status(held)) == ("dispatched", "queued")


def test_a_held_head_hides_nobody(runs: Workflows) -> None:
    runs.route("free", "ada")
    runs.done(cost=1)
    runs.budget(1, scope="project", scope_id="code-change")
    for _ in range(40):
        runs.run(priority=9)
    free = runs.run("free")
    tick = runs.tick(workflow_batch_size=1)
    assert (tick["dispatched"], tick["budget_enforcement"]["held"]) == (1, 40)
    assert runs.status(free) == "dispatched"


# ------------------------------------------------------------------------------------------- unknown and reserved


@pytest.mark.parametrize("cost", [None, -3, "NaN"])
def test_an_unknown_cost_counts_as_the_estimate(runs: Workflows, cost: object) -> None:
    for _ in range(4):
        runs.done(cost=cost)
    runs.budget("1.00")
    first, second = runs.run(), runs.run()
    assert runs.tick()["dispatched"] == 1  # 4 x 0.20 are spent, one fits
    assert {runs.status(first), runs.status(second)} == {"queued", "dispatched"}


def test_the_estimate_is_the_median_of_the_last_twenty(runs: Workflows) -> None:
    for number in range(25):
        runs.done(
            cost=9 if number < 5 else [0.4, 0.5, 0.5, 7][number % 4],
            reported_at=datetime.now(UTC) - timedelta(days=60 - number),
        )
    estimates = runs.call("dispatcher.workflow_estimates", p_tenant_id=runs.tenant)
    assert (float(estimates["code-change"]["usd"]), estimates["code-change"]["usd_reports"]) == (0.5, 20)
    assert (float(estimates[""]["usd"]), estimates[""]["usd_reports"]) == (0.2, 0)
    runs.run()
    runs.tick()
    assert float(runs.database.value("select reserved_usd from workflow_runs where status = 'dispatched'")) == 0.5


@pytest.mark.parametrize("origin", ["dispatched", "claimed", "running"])
def test_a_held_run_keeps_its_reservation(runs: Workflows, origin: str) -> None:
    budget = runs.budget("0.2")
    run = runs.run()
    runs.tick()
    if origin != "dispatched":
        runs.claim(run)
    if origin == "running":
        runs.heartbeat(run)
    for side in ("blocked", "waiting_for_approval"):
        runs.database.execute("update workflow_runs set status = %s where id = %s", [side, run])
        assert spend(runs, budget) == (0, 0.2)
    waiting = runs.run()
    assert runs.tick()["budget_enforcement"]["held"] == 1
    runs.database.execute("update workflow_runs set status = %s where id = %s", [origin, run])
    assert spend(runs, budget) == (0, 0.2)
    assert runs.status(waiting) == "queued"


def test_a_run_held_in_the_queue_reserves_nothing(runs: Workflows) -> None:
    budget = runs.budget("0.2")
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [runs.run()])
    assert spend(runs, budget) == (0, 0)


def test_a_cancelled_run_nobody_took_cost_nothing(runs: Workflows) -> None:
    run = runs.run()
    runs.tick()
    runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    runs.budget("0.2")
    runs.run()
    assert runs.tick()["dispatched"] == 1


def test_ff58_eight_sessions_start_nothing_with_too_little_and_one_with_enough(runs: Workflows) -> None:
    runs.route("paid")
    runs.done("paid", "ada", cost="0.90")
    budget = runs.budget("1.00")
    for _ in range(8):
        runs.run()

    def ask_at_once() -> int:
        daemons = [runs.sibling() for _ in range(8)]
        gate, started = threading.Barrier(8), []

        def ask(daemon: Workflows) -> None:
            gate.wait()
            started.append(daemon.tick().get("dispatched", 0))

        threads = [threading.Thread(target=ask, args=(daemon,)) for daemon in daemons]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(started)

    runs.database.execute("delete from workflow_agent_routing where workflow_type = 'paid'")
    assert ask_at_once() == 0
    assert [event["event_kind"] for event in runs.events()] == ["paused"]
    runs.database.execute("update budgets set cap_usd = 1.20 where id = %s", [budget])
    assert ask_at_once() == 1
    assert ask_at_once() == 0


def test_ff58_a_crashed_claims_reservation_returns_and_its_late_cost_is_settled_once(runs: Workflows) -> None:
    budget = runs.budget("0.30")
    run = runs.run()
    runs.tick()
    runs.claim(run, "crashed")
    assert spend(runs, budget) == (0, 0.2)
    runs.shift(run, "last_heartbeat_at", 601), runs.shift(run, "claimed_at", 700)
    runs.tick()
    assert spend(runs, budget) == (0, 0)
    for _ in range(2):
        late = runs.complete(run, "crashed", p_usage={"cost_usd": 0.05})
        assert (late["code"], late["usage_booked"]) == ("not_yours", True)
        assert spend(runs, budget) == (0.05, 0)
    assert runs.tick()["dispatched"] == 1
    runs.claim(run, "second")
    assert runs.complete(run, "second", p_usage={"cost_usd": 0.1})["code"] == "ok"
    assert spend(runs, budget) == (0.15, 0)


def test_every_lost_claim_is_settled_once_also_the_last(runs: Workflows) -> None:
    budget = runs.budget(50)
    run = runs.run()
    for number in range(1, 5):
        runs.tick()
        runs.claim(run, f"s{number}")
        runs.heartbeat(run, f"s{number}", p_usage={"cost_usd": 1})
        runs.release(run, f"s{number}")
        assert spend(runs, budget) == (number, 0)
    assert runs.status(run) == "failed"
    runs.usage(run, "s4", cost_usd=1.5), runs.usage(run, "s1", cost_usd=1.25)
    assert spend(runs, budget) == (4.75, 0)
    runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    assert spend(runs, budget) == (4.75, 0)


@pytest.mark.parametrize(
    ("usage", "settled", "tokens"),
    [
        ({"cost_usd": 0.5}, 0.5, 900),
        ({"input_tokens": 40}, 0.3, 40),
        ({"output_tokens": 2, "input_tokens": 40}, 0.3, 42),
        ({"cost_usd": 0, "input_tokens": 0}, 0, 0),
        ({"model": "m"}, 0.3, 900),
    ],
)
def test_what_a_lost_claim_left_unsaid_counts_as_its_reservation(
    runs: Workflows, usage: dict[str, object], settled: float, tokens: int
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=40)
    runs.done(cost="0.3", input_tokens=600, output_tokens=300, reported_at=long_ago)
    budget = runs.budget(5)
    run = runs.run()
    runs.tick(workflow_token_estimate=100)
    runs.claim(run), runs.heartbeat(run, p_usage=usage)
    runs.release(run)
    assert spend(runs, budget) == (settled, 0)
    assert runs.database.value("select tokens from workflow_claims") == tokens


def test_attempts_that_worked_and_died_unreported_are_not_free(runs: Workflows) -> None:
    budget = runs.budget(5)
    run = runs.run()
    for number in range(1, 4):
        runs.tick()
        runs.claim(run, f"s{number}"), runs.heartbeat(run, f"s{number}")
        runs.shift(run, "last_heartbeat_at", 601), runs.shift(run, "claimed_at", 700)
        assert runs.tick()["released"] == 1
        assert spend(runs, budget) == (pytest.approx(0.2 * number), 0)
    assert runs.complete(run, "s2", p_usage={"cost_usd": 0.05})["usage_booked"] is True
    assert spend(runs, budget) == (0.45, 0)


def test_a_late_cost_replaces_what_was_assumed_and_is_booked_when_it_arrives(runs: Workflows) -> None:
    budget = runs.budget(5)
    run = runs.run()
    runs.tick()
    runs.claim(run)
    runs.complete(run)
    assert spend(runs, budget) == (0.2, 0)
    runs.book_back(run)
    assert spend(runs, budget) == (0, 0)
    answer = runs.usage(run, cost_usd=0.7)
    assert (answer["usage_booked"], answer["booked"]["cost_usd"]) == (True, 0.5)
    assert spend(runs, budget) == (0.5, 0)
    assert [(cost, source) for cost, _, source in runs.bookings(run)] == [(0.2, "assumed"), (0.5, "report")]


def test_a_retried_run_keeps_what_its_failure_cost(runs: Workflows) -> None:
    budget = runs.budget(5)
    run = runs.run()
    runs.tick()
    runs.claim(run)
    runs.fail(run, p_usage={"cost_usd": 0.4})
    runs.call("retry_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    assert spend(runs, budget) == (0.4, 0)
    runs.tick()
    runs.claim(run, "again")
    runs.complete(run, "again", p_usage={"cost_usd": 0.3})
    assert spend(runs, budget) == (0.7, 0)


def test_a_run_across_midnight_is_settled_when_it_reports(runs: Workflows) -> None:
    budget = runs.budget(5)
    run = runs.run()
    runs.tick()
    runs.claim(run), runs.heartbeat(run)
    for column in ("dispatched_at", "started_at"):
        runs.shift(run, column, 90_000)
    assert spend(runs, budget) == (0, 0.2)
    runs.complete(run, p_usage={"cost_usd": 0.3})
    assert spend(runs, budget) == (0.3, 0)


def test_tokens_have_budgets_too(runs: Workflows) -> None:
    runs.done(cost=0, input_tokens=600, output_tokens=300)
    runs.budget(None, cap_tokens=1800)
    first, second = runs.run(), runs.run()
    assert runs.tick()["dispatched"] == 1
    out = first if runs.status(first) == "dispatched" else second
    assert runs.row(out)["reserved_tokens"] == 900
    runs.claim(out)
    runs.complete(out, p_usage={"input_tokens": 900, "cost_usd": 0})
    assert runs.tick()["budget_enforcement"]["held"] == 1


def spend(runs: Workflows, budget: uuid.UUID) -> tuple[float, float]:
    """Settled and reserved, as an operator sees them."""
    return runs.spend(budget)


# ------------------------------------------------------------------------------------------- stale runs and budgets


def test_retries_run_out_also_under_a_breached_budget(runs: Workflows) -> None:
    run = runs.run(status="dispatched", dispatch_attempts=4, dispatched_at=datetime.now(UTC) - timedelta(seconds=301))
    runs.done(cost=1)
    runs.budget(1)
    assert runs.tick()["failed"] == 1
    assert runs.row(run)["last_error"] == "Dispatch retries exhausted after 4 attempts"


def test_a_retry_that_is_held_returns_to_the_queue_and_spends_nothing(runs: Workflows) -> None:
    run = runs.run()
    runs.tick()
    runs.done(cost=1)
    budget = runs.budget(1)
    runs.shift(run, "dispatched_at", 301)
    tick = runs.tick()
    assert (tick["retried"], tick["budget_enforcement"]["held"]) == (0, 1)
    assert (runs.status(run), runs.row(run)["dispatch_attempts"], runs.row(run)["reserved_usd"]) == ("queued", 1, None)
    runs.database.execute("update budgets set active = false where id = %s", [budget])
    assert runs.tick()["dispatched"] == 1
    assert runs.row(run)["dispatch_attempts"] == 2


def test_a_retry_does_not_stand_in_its_own_way(runs: Workflows) -> None:
    runs.budget("0.2")
    run = runs.run()
    assert runs.tick()["dispatched"] == 1
    runs.shift(run, "dispatched_at", 301)
    assert runs.tick()["retried"] == 1
    assert runs.row(run)["dispatch_attempts"] == 2


# ------------------------------------------------------------------------------------------- latch, rollover, frames


def move_events_back(runs: Workflows) -> None:
    """What happened today happened yesterday."""
    for row in runs.database.rows("select distinct period_key from budget_events order by period_key"):
        runs.database.execute(
            "update budget_events set period_key = to_char(period_key::date - 1, 'YYYY-MM-DD') where period_key = %s",
            [row["period_key"]],
        )


def test_a_new_period_writes_recovered_first_and_once(runs: Workflows) -> None:
    spent = runs.done(cost=1)
    runs.budget(1)
    runs.run()
    runs.tick()
    move_events_back(runs)
    runs.tick(), runs.tick()
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    kinds = [(event["event_kind"], event["period_key"] == today) for event in runs.events()]
    assert kinds == [("paused", False), ("recovered", True), ("paused", True)]
    move_events_back(runs)
    runs.book_back(spent)
    assert runs.tick()["dispatched"] == 1
    runs.database.execute("delete from workflow_runs where status = 'dispatched'")
    move_events_back(runs)
    runs.tick()  # a period without a breach before it: nothing to recover from
    assert [event["event_kind"] for event in runs.events()] == ["paused", "recovered", "paused", "recovered"]
    assert len(runs.frames()) == 4


def test_the_frame_says_everything(runs: Workflows) -> None:
    runs.done(cost="1.5")
    budget = runs.budget(1, scope="agent", scope_id="coder", name="Coder's", period="weekly")
    runs.tick()
    [sent] = runs.frames()
    frame = sent["payload"]
    year, week, _ = datetime.now(UTC).isocalendar()
    key = f"{year}-W{week:02}"
    assert (sent["topic"], sent["private"]) == ("budgets", True)
    assert frame["id"] == f"{budget}:{key}:paused"
    assert (frame["budget_id"], frame["budget_name"]) == (str(budget), "Coder's")
    assert (frame["scope"], frame["scope_id"], frame["period"], frame["period_key"]) == (
        "agent",
        "coder",
        "weekly",
        key,
    )
    assert (frame["event_kind"], frame["action"]) == ("paused", "pause_new_runs")
    assert (float(frame["spend_usd"]), float(frame["cap_usd"]), frame["cap_tokens"]) == (1.5, 1, None)
    assert frame["message"] == f"Budget Coder's ({key}) holds new runs"
    datetime.fromisoformat(frame["timestamp"])


def test_without_its_event_table_a_budget_still_holds(database: Database) -> None:
    runs = Workflows(database)
    runs.route("free", "ada"), runs.route()
    runs.done(cost=1)
    runs.budget(1, scope="agent", scope_id="coder")
    hit, free = runs.run(), runs.run("free")
    database.execute("drop table public.budget_events")
    tick = runs.tick()
    assert (runs.status(hit), runs.status(free)) == ("queued", "dispatched")
    assert "budget_events" in tick["budget_error"]
    assert tick["budgets_open"] is False


def test_without_its_event_table_a_hard_stop_still_stops(database: Database) -> None:
    runs = Workflows(database)
    runs.route(max_concurrent=3)
    running, queued = runs.run(status="running", owner_agent_id="coder"), runs.run()
    runs.budget(0, "hard_stop", scope="agent", scope_id="coder")
    database.execute("drop table public.budget_events")
    tick = runs.tick()
    assert (runs.status(running), runs.status(queued)) == ("cancelled", "cancelled")
    assert tick["budget_enforcement"]["stopped"] == 2
    assert (tick["budgets_open"], "budget_events" in tick["budget_error"]) == (False, True)


def test_a_frame_that_cannot_be_sent_breaks_nothing(runs: Workflows) -> None:
    runs.done(cost=1)
    runs.route("free", "ada"), runs.run("free")
    runs.budget(1, scope="agent", scope_id="coder")
    runs.database.execute("alter function realtime.send(jsonb, text, text, boolean) rename to gone")
    try:
        tick = runs.tick()
    finally:
        runs.database.execute("alter function realtime.gone(jsonb, text, text, boolean) rename to send")
    assert (tick["dispatched"], tick["errors"]) == (1, [])
    assert len(runs.events("paused")) == 1


# ------------------------------------------------------------------------------------------- open and closed


def test_without_budget_tables_dispatch_goes_on_loudly(database: Database) -> None:
    runs = Workflows(database)
    runs.route(max_concurrent=9)
    runs.done(cost=1)
    runs.budget(1)
    runs.run()
    assert runs.tick()["dispatched"] == 0
    database.execute("drop table public.budget_events, public.budgets")
    for _ in range(2):
        runs.run()
        tick = runs.tick()
        assert tick["dispatched"] > 0
        assert "budgets" in tick["budget_error"]
        assert (tick["errors"], tick["budgets_open"]) == ([], True)


@pytest.mark.parametrize("fail_closed", [False, True])
def test_a_budget_that_cannot_be_evaluated(runs: Workflows, fail_closed: bool) -> None:
    runs.route("free", "ada")
    runs.budget(100, timezone="Not/AZone", scope="agent", scope_id="coder", fail_closed=fail_closed, name="Odd")
    hit, free = runs.run(), runs.run("free")
    tick = runs.tick()
    assert runs.status(hit) == ("queued" if fail_closed else "dispatched")
    assert runs.status(free) == "dispatched"
    assert tick["budget_error"].startswith("Odd: ")
    assert runs.events() == []


READS_A_TABLE = re.compile(r"(Seq Scan|Index Scan .*|Index Only Scan .*|Bitmap Heap Scan|Insert|Update|Delete) on ")


def statements_of_a_tick(runs: Workflows, batch: int) -> Counter[str]:
    """What a tick that hands out so many runs asks of tables, also inside functions: how often each statement runs."""
    seen: Counter[str] = Counter()

    def note(diagnostic: psycopg.errors.Diagnostic) -> None:
        explained = (diagnostic.message_primary or "").partition("Query Text: ")[2]
        text, _, plan = explained.partition("  (cost=")
        if READS_A_TABLE.search(text.rpartition("\n")[2] + plan):
            seen[text.rpartition("\n")[0]] += 1

    with runs.database.connect() as connection:
        connection.execute("load 'auto_explain'")
        for setting in (
            *("log_min_duration = 0", "log_level = notice"),
            *("log_nested_statements = on", "log_parameter_max_length = 0"),
        ):
            connection.execute(f"set auto_explain.{setting}")
        connection.add_notice_handler(note)
        tick = runs.tick(connection, workflow_batch_size=batch)
    assert (tick["dispatched"], tick["errors"]) == (batch, [])
    return seen


def test_neither_runs_nor_types_nor_budgets_add_a_statement(runs: Workflows) -> None:
    """No N+1: one run and a handful of budgets, or hundreds of both, are asked after alike."""

    def budgets(numbers: range, cap: int) -> None:
        for number in numbers:
            for kind in ("daily", "weekly", "monthly"):
                runs.budget(cap, "pause_new_runs", "agent", scope_id=f"coder {number}", period=kind)

    runs.done(cost="0.2"), runs.run()
    runs.budget(90, "hard_stop"), runs.budget(90, "warn", "project", scope_id="code-change")
    budgets(range(1), 90)
    few = statements_of_a_tick(runs, 1)
    budgets(range(1, 30), 90), budgets(range(30, 60), 100_000)  # those that could be filled by this tick, and others
    for number in range(150):
        runs.run(priority=number % 3), runs.done(agent=f"coder {number % 50}", cost="0.2")
    for number in range(30):
        runs.route(f"type {number}", f"coder {number}"), runs.run(f"type {number}")
    many, batch = statements_of_a_tick(runs, 1), statements_of_a_tick(runs, 10)
    assert {text: times for text, times in many.items() if times != few[text]} == {}
    # The books are read once for the hard stops, which come first, and once for what goes out.
    assert [times for text, times in batch.items() if "with booked as" in text] == [2]
    assert {text: times for text, times in batch.items() if times > 10 * few[text]} == {}


# ------------------------------------------------------------------------------------------- operator


def test_budgets_are_set_listed_and_deactivated(runs: Workflows) -> None:
    base = {
        "p_tenant_id": runs.tenant, "p_name": "Daily", "p_scope": "fleet", "p_scope_id": None, "p_period": "daily",
        "p_cap_usd": 5, "p_cap_tokens": None, "p_action": "warn",
    }  # fmt: skip
    made = runs.call("set_budget", **base)
    assert made["code"] == "ok"
    again = runs.call("set_budget", **{**base, "p_cap_usd": 7, "p_action": "hard_stop"})
    assert (again["budget"]["id"], again["budget"]["cap_usd"]) == (made["budget"]["id"], 7)
    wrong = runs.call(
        "set_budget",
        **{**base, "p_name": "", "p_scope": "agent", "p_period": "hourly", "p_cap_tokens": 1, "p_action": "shout"},
        p_timezone="Mars/Base",
    )
    assert [fault.partition(":")[0] for fault in wrong["faults"]] == [
        "name",
        "scope_id",
        "period",
        "cap",
        "action",
        "timezone",
    ]
    [listed] = runs.call("list_budgets", p_tenant_id=runs.tenant)["budgets"]
    assert (listed["name"], listed["events"], float(listed["settled_usd"])) == ("Daily", [], 0.0)
    codes = [runs.call("deactivate_budget", p_tenant_id=runs.tenant, p_budget="Daily")["code"] for _ in range(2)]
    assert codes == ["ok", "already"]
    assert runs.call("deactivate_budget", p_tenant_id=runs.tenant, p_budget="x")["code"] == "not_found"


def set_budget(runs: Workflows, name: str, **more: object) -> Any:
    return runs.call("set_budget", p_tenant_id=runs.tenant, p_name=name, p_actor="operator:ann", **more)


def test_m3_what_is_not_given_is_kept(runs: Workflows) -> None:
    strict: dict[str, object] = {
        "p_scope": "agent",
        "p_scope_id": "coder",
        "p_period": "daily",
        "p_timezone": "Europe/Berlin",
        "p_action": "hard_stop",
        "p_fail_closed": True,
    }
    made = set_budget(runs, "Coder", p_cap_usd=10, **strict)
    assert (made["code"], made["created"], made["changed"]) == ("ok", True, {})
    raised = set_budget(runs, "Coder", p_cap_usd=20)
    assert (raised["created"], raised["changed"]) == (False, {"cap_usd": [10, 20]})
    kept = {
        name: made["budget"][name]
        for name in ("id", "scope", "scope_id", "period", "timezone", "action_on_exceed", "fail_closed")
    }
    assert kept.items() <= raised["budget"].items()
    assert set_budget(runs, "Coder", p_cap_usd=20)["changed"] == {}
    assert set_budget(runs, "Coder", p_cap_tokens=5)["changed"] == {"cap_usd": [20, None], "cap_tokens": [None, 5]}
    assert set_budget(runs, "Coder", p_fail_closed=False)["changed"] == {"fail_closed": [True, False]}
    audit = runs.database.rows("select actor, action, target, before, after from workflow_audit_log order by id")
    assert [(line["actor"], line["action"]) for line in audit] == [("operator:ann", "set_budget")] * 4
    assert (audit[1]["before"]["cap_usd"], audit[1]["after"]["cap_usd"]) == (10, 20)
    assert {line["target"] for line in audit} == {f"budget:{made['budget']['id']}"}


def test_m3_a_name_never_takes_another_budget(runs: Workflows) -> None:
    first = runs.budget(1, "hard_stop", name="All", period="monthly")
    refused = set_budget(runs, "Mine", p_cap_usd=5)  # of the fleet and a month, as the other
    assert (refused["applied"], refused["code"]) == (False, "exists")
    assert f"All ({first})" in refused["faults"][0]
    daily = set_budget(runs, "All", p_cap_usd=2, p_period="daily")
    assert (daily["code"], daily["created"]) == ("ok", True)
    several = set_budget(runs, "All", p_cap_usd=3)
    assert (several["code"], len(several["budgets"])) == ("ambiguous", 2)
    one = set_budget(runs, "All", p_cap_usd=3, p_period="monthly")
    assert (one["budget"]["id"], one["changed"]) == (str(first), {"cap_usd": [1, 3]})
    renamed = set_budget(runs, "whatever", p_budget_id=first, p_new_name="Month")
    assert renamed["changed"] == {"name": ["All", "Month"]}
    assert set_budget(runs, "Moon", p_cap_usd=3, p_only_change=True)["code"] == "not_found"
    assert set_budget(runs, "New", p_scope="agent", p_scope_id="ada")["code"] == "invalid"  # no cap
    rows = runs.database.rows("select name, action_on_exceed from budgets order by created_at")
    assert [(row["name"], row["action_on_exceed"]) for row in rows] == [("Month", "hard_stop"), ("All", "warn")]


def test_m3_an_end_is_audited(runs: Workflows) -> None:
    budget = runs.budget(1, name="All")
    for _ in range(2):
        runs.call("deactivate_budget", p_tenant_id=runs.tenant, p_budget="All", p_actor="operator:ann")
    audit = runs.database.rows("select actor, action, target from workflow_audit_log")
    assert [(line["actor"], line["action"], line["target"]) for line in audit] == [
        ("operator:ann", "deactivate_budget", f"budget:{budget}")
    ]


def test_a_name_ends_a_budget_only_where_it_says_which(runs: Workflows) -> None:
    def end(what: object) -> dict[str, Any]:
        return runs.call("deactivate_budget", p_tenant_id=runs.tenant, p_budget=str(what))

    first = runs.budget(1, name="Cap")
    second = runs.budget(1, name="Cap", period="weekly")
    namesake = runs.budget(1, name=str(first), period="monthly")
    refused = end("Cap")
    assert (refused["applied"], refused["code"]) == (False, "ambiguous")
    assert [(one["id"], one["period"]) for one in refused["budgets"]] == [
        (str(first), "daily"),
        (str(second), "weekly"),
    ]
    ended = end(first)  # an id, though another budget has it for a name
    assert (ended["code"], [one["id"] for one in ended["budgets"]]) == ("ok", [str(first)])
    assert (end(first)["code"], end("Cap")["code"], end("Cap")["code"]) == ("already", "ok", "already")
    active = runs.database.rows("select id from public.budgets where active")
    assert [one["id"] for one in active] == [namesake]


def test_only_one_active_budget_per_scope_and_period(runs: Workflows) -> None:
    runs.budget(1)
    with pytest.raises(psycopg.errors.UniqueViolation):
        runs.budget(2)
    runs.database.execute("update budgets set active = false")
    runs.budget(2)
    for wrong in ({"cap_tokens": 1}, {"scope_id": "x"}, {"scope": "agent"}, {"period": "hourly"}):
        with pytest.raises(psycopg.errors.CheckViolation):
            runs.budget(3, **{"period": "weekly", **wrong})


def test_the_ledger(runs: Workflows) -> None:
    runs.done(cost=1)
    runs.budget(1)
    runs.tick()
    [entry] = runs.call("budget_ledger", p_tenant_id=runs.tenant)["events"]
    assert (entry["event_kind"], entry["budget"], entry["detail"]["action"]) == (
        "paused",
        "fleet budget",
        "pause_new_runs",
    )
