"""The tick: who goes out, in what order, how many, what becomes of the silent, and that nothing stops the rest."""

import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows

ZERO = {"held": 0, "stopped": 0, "warned": 0}


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


def handed_out(runs: Workflows) -> list[uuid.UUID]:
    """What goes out, one by one, in its order."""
    while runs.tick(workflow_batch_size=1)["dispatched"]:
        pass
    return order_of(runs)


def order_of(runs: Workflows) -> list[uuid.UUID]:
    query = "select run_id from workflow_run_events where to_status = 'dispatched' order by id"
    return [row["run_id"] for row in runs.database.rows(query)]


# ------------------------------------------------------------------------------------------- candidates and order


def test_an_empty_tick_says_so(runs: Workflows) -> None:
    tick = runs.tick()
    assert tick["budget_enforcement"] == ZERO
    assert (tick["busy"], tick["errors"], tick["again"], tick["next_in"]) == (False, [], False, None)


def test_route_priority_then_run_priority_then_age(runs: Workflows) -> None:
    runs.route("low", priority=0, max_concurrent=9)
    runs.route("high", priority=3, max_concurrent=9)
    low_urgent = runs.run("low", priority=50)
    low_late = runs.run("low", queued_at=ago(seconds=5))
    low_early = runs.run("low", queued_at=ago(minutes=5))
    high = runs.run("high", priority=-3)
    assert handed_out(runs) == [high, low_urgent, low_early, low_late]


def test_waiting_long_beats_any_priority(runs: Workflows) -> None:
    runs.route("low", max_concurrent=1)
    runs.route("high", priority=10, max_concurrent=1)
    old = runs.run("low", queued_at=ago(hours=1))
    runs.run("high", priority=10)
    assert runs.tick(workflow_batch_size=1)["dispatched"] == 1
    assert order_of(runs) == [old]


def test_priority_counts_among_runs_that_have_waited_long(runs: Workflows) -> None:
    """Of one type, and of types on routes of one priority: five minutes more do not outweigh thirty points."""
    runs.route("one", max_concurrent=9), runs.route("two", max_concurrent=9)
    low = runs.run("one", queued_at=ago(minutes=65))
    urgent = runs.run("one", priority=30, queued_at=ago(minutes=60))
    other = runs.run("two", priority=20, queued_at=ago(minutes=65))
    assert handed_out(runs) == [urgent, other, low]


def test_the_highest_priority_there_is_spoils_no_arithmetic(runs: Workflows) -> None:
    runs.route("top", priority=1_000_000), runs.route()
    top = runs.run("top", priority=1_000_000, queued_at=ago(days=900))
    other = runs.run()
    assert handed_out(runs) == [top, other]
    with pytest.raises(psycopg.errors.CheckViolation):
        runs.run(priority=1_000_001)
    with pytest.raises(psycopg.errors.CheckViolation):
        runs.run(next_attempt_at="infinity")


def test_a_busy_or_closed_head_hides_nobody(runs: Workflows) -> None:
    """Thirty old runs of a full type, thirty of a disabled one and thirty without a route stand in front."""
    runs.route("full", priority=9)
    runs.route("disabled", priority=9, max_concurrent=0)
    runs.route("open")
    runs.run("full", status="running", owner_agent_id="coder")
    for kind in ("full", "disabled", "nowhere"):
        for _ in range(30):
            runs.run(kind, queued_at=ago(hours=9), priority=9)
    last = runs.run("open")
    assert runs.tick(workflow_batch_size=1)["dispatched"] == 1
    assert order_of(runs) == [last]


def test_a_run_without_a_route_waits_visibly_and_goes_out_when_one_appears(runs: Workflows) -> None:
    run = runs.run("new-type")
    assert runs.tick()["unrouted"] == 1
    row = runs.row(run)
    assert (row["status"], row["blocker_type"], row["dispatch_attempts"]) == ("queued", "no_route", 0)
    assert runs.call("workflow_stats", p_tenant_id=runs.tenant)["no_route"] == 1
    runs.route("new-type", "ada")
    assert runs.tick()["dispatched"] == 1
    row = runs.row(run)
    assert (row["owner_agent_id"], row["blocker_type"]) == ("ada", None)


def test_not_before_its_time(runs: Workflows) -> None:
    runs.route(max_concurrent=5)
    later = runs.run(next_attempt_at=datetime.now(UTC) + timedelta(seconds=50))
    now = runs.run(next_attempt_at=ago(seconds=1))
    tick = runs.tick()
    assert (runs.status(later), runs.status(now)) == ("queued", "dispatched")
    assert 0 < tick["next_in"] <= 50


def test_a_pin_wins_over_the_route_and_keeps_the_types_limit(runs: Workflows) -> None:
    runs.route(agent="coder", max_concurrent=2)
    pinned = [runs.run(pinned_agent_id="ada") for _ in range(2)]
    runs.run()
    assert runs.tick()["dispatched"] == 2
    assert {runs.row(run)["owner_agent_id"] for run in pinned} == {"ada"}
    unrouted = runs.run("nowhere", pinned_agent_id="bob")
    runs.tick()
    assert runs.row(unrouted)["owner_agent_id"] == "bob"


def test_the_batch_is_a_limit_per_tick_and_says_there_is_more(runs: Workflows) -> None:
    runs.route(max_concurrent=100)
    for _ in range(25):
        runs.run()
    ticks = [runs.tick() for _ in range(4)]
    assert [tick["dispatched"] for tick in ticks] == [10, 10, 5, 0]
    assert [tick["again"] for tick in ticks] == [True, True, False, False]


# ------------------------------------------------------------------------------------------- concurrency


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_counts_dispatched_claimed_and_running(runs: Workflows, limit: int) -> None:
    runs.route(max_concurrent=limit)
    for status in ("dispatched", "claimed", "running")[: limit - 1]:
        runs.run(status=status, owner_agent_id="coder")
    ids = [runs.run() for _ in range(5)]
    assert runs.tick()["dispatched"] == 1
    [out] = [run for run in ids if runs.status(run) == "dispatched"]
    runs.claim(out)
    assert runs.tick()["dispatched"] == 0
    runs.complete(out)
    assert runs.tick()["dispatched"] == 1


@pytest.mark.parametrize("side", ["blocked", "waiting_for_approval"])
@pytest.mark.parametrize("origin", ["dispatched", "claimed", "running"])
def test_a_held_run_keeps_its_slot(runs: Workflows, origin: str, side: str) -> None:
    runs.route()
    run = runs.run(status=origin, owner_agent_id="coder")
    runs.database.execute("update workflow_runs set status = %s where id = %s", [side, run])
    waiting = runs.run()
    assert runs.tick()["dispatched"] == 0
    [stats] = runs.call("workflow_stats", p_tenant_id=runs.tenant)["by_type"]
    assert (stats["queued"], stats["active"]) == (1, 1)
    runs.database.execute("update workflow_runs set status = %s where id = %s", [origin, run])
    assert runs.tick()["dispatched"] == 0
    runs.database.execute("update workflow_runs set status = %s where id = %s", [side, run])
    runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    assert runs.tick()["dispatched"] == 1
    assert runs.status(waiting) == "dispatched"


def test_a_run_held_in_the_queue_has_no_slot(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [run])
    runs.run()
    assert runs.tick()["dispatched"] == 1


def test_ff47_eight_daemons_never_exceed_a_limit_of_one(runs: Workflows) -> None:
    runs.route(max_concurrent=1)
    for _ in range(10):
        runs.run()
    daemons = [runs.sibling() for _ in range(8)]
    most: list[int] = []

    def live(daemon: Workflows) -> None:
        active = "select count(*) as n from public.workflow_runs where status in ('dispatched', 'claimed', 'running')"
        for _ in range(400):
            daemon.tick()
            [row] = daemon.connection.execute(active).fetchall()
            most.append(row["n"])
            polled = daemon.call("poll_workflow_runs", p_tenant_id=runs.tenant, p_agent=None, p_limit=1)
            for run in polled["runs"]:
                session = str(uuid.uuid4())
                if daemon.claim(run["id"], session)["code"] == "ok":
                    daemon.complete(run["id"], session)
            [left] = daemon.connection.execute(
                "select count(*) as n from public.workflow_runs where finished_at is null"
            ).fetchall()
            if not left["n"]:
                return

    threads = [threading.Thread(target=live, args=(daemon,)) for daemon in daemons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert runs.statuses() == {"completed": 10}
    assert {row["dispatch_attempts"] for row in runs.database.rows("select dispatch_attempts from workflow_runs")} == {
        1
    }
    assert runs.database.value("select count(*) from workflow_notifications") == 10


def test_ff47_a_pass_waits_for_nothing_and_counts_what_is_committed(runs: Workflows) -> None:
    """A pass that is still open holds the next one off; what it dispatched counts once it has committed."""
    runs.route(max_concurrent=1)
    runs.run(), runs.run()
    slow, fast = runs.sibling(), runs.sibling()
    slow.connection.autocommit = False
    assert slow.tick()["dispatched"] == 1
    assert fast.tick()["busy"] is True
    slow.connection.commit()
    assert fast.tick()["dispatched"] == 0


def test_a_route_that_somebody_changes_is_left_out_until_it_is_free(runs: Workflows) -> None:
    """Nobody waits for the operator, and nothing goes out by what the route said before."""
    runs.route(max_concurrent=1), runs.route("other", "ada")
    held, other = runs.run(), runs.run("other")
    operator = runs.sibling()
    operator.connection.autocommit = False
    operator.call(
        "set_workflow_route", p_tenant_id=runs.tenant, p_workflow_type="code-change", p_agent="bob", p_max_concurrent=1
    )
    started = time.monotonic()
    assert runs.phase("dispatched")["locked"] == 1
    assert time.monotonic() - started < 0.5
    assert (runs.status(held), runs.status(other)) == ("queued", "dispatched")
    operator.connection.commit()
    assert runs.tick()["dispatched"] == 1
    assert runs.row(held)["owner_agent_id"] == "bob"


# ------------------------------------------------------------------------------------------- the silent


def test_an_unclaimed_run_goes_out_three_more_times_with_notification_and_then_fails(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    assert runs.tick()["dispatched"] == 1
    for attempt in (2, 3, 4):
        assert runs.tick()["retried"] == 0
        runs.shift(run, "dispatched_at", 301)
        assert runs.tick()["retried"] == 1
        assert runs.row(run)["dispatch_attempts"] == attempt
    notes = runs.database.rows("select attempt, state from workflow_notifications order by attempt")
    assert [(note["attempt"], note["state"]) for note in notes] == [
        (1, "obsolete"), (2, "obsolete"), (3, "obsolete"), (4, "pending"),
    ]  # fmt: skip
    runs.shift(run, "dispatched_at", 301)
    tick = runs.tick()
    assert (tick["retried"], tick["failed"]) == (0, 1)
    assert (runs.status(run), runs.row(run)["last_error"]) == ("failed", "Dispatch retries exhausted after 4 attempts")
    assert runs.steps(run) == ["queued>dispatched", *["dispatched>dispatched"] * 3, "dispatched>failed"]


def test_a_stale_run_follows_its_route(runs: Workflows) -> None:
    runs.route(agent="coder")
    run = runs.run()
    runs.tick()
    runs.database.execute("update workflow_agent_routing set agent_id = 'ada'")
    runs.shift(run, "dispatched_at", 301)
    assert runs.tick()["retried"] == 1
    assert runs.row(run)["owner_agent_id"] == "ada"
    runs.database.execute("delete from workflow_agent_routing")
    runs.shift(run, "dispatched_at", 301)
    runs.tick()
    assert (runs.status(run), runs.row(run)["dispatch_attempts"], runs.row(run)["blocker_type"]) == (
        "queued",
        2,
        "no_route",
    )


@pytest.mark.parametrize("status", ["claimed", "running"])
def test_a_claim_without_heartbeats_returns_three_times_and_then_fails(runs: Workflows, status: str) -> None:
    runs.route()
    run = runs.run()
    for number in range(1, 5):
        assert runs.tick()["dispatched"] == 1
        runs.claim(run, f"s{number}")
        if status == "running":
            runs.heartbeat(run, f"s{number}")
        runs.shift(run, "claimed_at", 900)
        assert runs.tick()["released"] == 0  # claimed long ago, but its last heartbeat is fresh
        runs.shift(run, "last_heartbeat_at", 601)
        tick = runs.tick()
        assert (tick["released"], tick["failed"]) == ((1, 0) if number < 4 else (0, 1))
        if number < 4:
            row = runs.row(run)
            assert (row["status"], row["release_count"], row["session_id"], row["reserved_usd"]) == (
                "queued",
                number,
                None,
                None,
            )
    assert (runs.status(run), runs.row(run)["last_error"]) == ("failed", "Claim lost after 3 releases (no heartbeat)")
    assert runs.row(run)["dispatch_attempts"] == 4


def test_ff42_a_heartbeat_keeps_a_long_run_its_owners(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    runs.tick()
    runs.claim(run)
    for _ in range(5):
        runs.shift(run, "last_heartbeat_at", 500)
        assert runs.heartbeat(run)["code"] == "ok"
        assert runs.tick()["released"] == 0
    assert runs.row(run)["dispatch_attempts"] == 1


def test_ff45_any_daemon_of_the_tenant_recovers_whoever_died(runs: Workflows) -> None:
    """The daemon that dispatched is gone, its row too; another gateway's daemon is all there is."""
    runs.route(max_concurrent=5)
    one, two = runs.run(), runs.run()
    runs.tick()
    runs.claim(one), runs.claim(two), runs.heartbeat(two)
    runs.database.execute("delete from dispatcher_instances")
    other = Workflows(runs.database, "elsewhere")
    for run in (one, two):
        runs.shift(run, "last_heartbeat_at", 601), runs.shift(run, "claimed_at", 700)
    assert other.tick()["released"] == 2
    assert other.tick()["dispatched"] == 2
    other.close()


def test_ff46_a_run_that_kills_whoever_takes_it_ends(runs: Workflows) -> None:
    runs.route("poison"), runs.route("fine", max_concurrent=9)
    poison = runs.run("poison")
    fine = 0
    for _ in range(9):
        runs.run("fine")
        tick = runs.tick()
        fine += tick["dispatched"] - (runs.status(poison) == "dispatched")
        if runs.status(poison) == "dispatched":
            runs.claim(poison, str(uuid.uuid4()))
            runs.shift(poison, "last_heartbeat_at", 601), runs.shift(poison, "claimed_at", 601)
    assert runs.status(poison) == "failed"
    assert runs.row(poison)["dispatch_attempts"] == 4
    assert fine == 9


@pytest.mark.parametrize(("minutes", "status"), [(60, "claimed"), (5, "running")])
def test_over_its_deadline(runs: Workflows, minutes: int, status: str) -> None:
    runs.route(timeout_minutes=minutes)
    run = runs.run()
    runs.tick()
    assert round(runs.claim(run)["deadline_in"]) == minutes * 60
    if status == "running":
        runs.heartbeat(run)
    runs.shift(run, "deadline_at", 1)
    assert runs.tick()["timed_out"] == 1
    assert (runs.status(run), runs.row(run)["last_error"]) == (
        "timed_out",
        f"Run exceeded timeout of {minutes} minutes",
    )
    assert runs.complete(run)["code"] == "finished"


def test_the_next_moment_is_known(runs: Workflows) -> None:
    runs.route(max_concurrent=5)
    run = runs.run()
    assert 299 < runs.tick()["next_in"] <= 300
    runs.claim(run)
    assert 599 < runs.tick()["next_in"] <= 600
    runs.shift(run, "deadline_at", -5)
    assert 0 < runs.tick()["next_in"] <= 5


# ------------------------------------------------------------------------------------------- isolation


def poison_trigger(runs: Workflows, condition: str) -> None:
    """Updates of such rows raise, as a broken trigger of the project's own would."""
    runs.database.execute(
        f"""create or replace function public.poison() returns trigger language plpgsql as
            $$ begin if {condition} then raise exception 'poisoned row'; end if; return new; end $$"""
    )
    runs.database.execute(
        "create trigger a_poison before update on workflow_runs for each row execute function public.poison()"
    )


@pytest.fixture
def poisoned(runs: Workflows) -> Iterator[Workflows]:
    try:
        yield runs
    finally:
        runs.database.execute("drop trigger if exists a_poison on workflow_runs")


def test_ff62_a_row_that_raises_stops_nobody(poisoned: Workflows) -> None:
    runs = poisoned
    runs.route(max_concurrent=5), runs.route("slow", max_concurrent=5)
    bad = [runs.run(priority=9, initiator="bad") for _ in range(3)]
    good = [runs.run() for _ in range(4)]
    stale_bad = runs.run("slow", status="running", initiator="bad", deadline_at=ago(minutes=1))
    stale_good = runs.run("slow", status="running", deadline_at=ago(seconds=50))
    poison_trigger(runs, "new.initiator = 'bad'")
    for _ in range(3):
        tick = runs.tick()
        assert {error["run_id"] for error in tick["errors"]} == {str(run) for run in [*bad, stale_bad]}
        assert {error["error"] for error in tick["errors"]} == {"poisoned row"}
    assert {runs.status(run) for run in good} == {"dispatched"}
    assert (runs.status(stale_good), runs.status(stale_bad)) == ("timed_out", "running")


def test_a_row_that_raises_keeps_no_blocker_from_the_others(poisoned: Workflows) -> None:
    runs = poisoned
    bad, good = runs.run("nowhere", initiator="bad"), runs.run("nowhere")
    poison_trigger(runs, "new.initiator = 'bad'")
    tick = runs.tick()
    assert [(error["phase"], error["run_id"]) for error in tick["errors"]] == [("unrouted", str(bad))]
    assert (runs.row(good)["blocker_type"], runs.row(bad)["blocker_type"]) == ("no_route", None)


def test_a_row_or_a_route_that_somebody_holds_keeps_nothing_else_back(runs: Workflows) -> None:
    runs.route()
    run, unrouted = runs.run(), runs.run("nowhere")
    late = runs.run(status="running", owner_agent_id="coder", deadline_at=ago(minutes=1))
    with runs.database.connect() as other:
        other.execute("begin")
        other.execute("select from workflow_runs where id = %s for update", [unrouted])
        tick = runs.tick()
        assert (tick["errors"], tick["timed_out"], runs.status(late)) == ([], 1, "timed_out")
        other.execute("select from workflow_agent_routing for update")
        late = runs.run(status="running", owner_agent_id="coder", deadline_at=ago(minutes=1))
        tick = runs.tick()
        assert (tick["errors"], tick["timed_out"], runs.status(late)) == ([], 1, "timed_out")
        assert runs.status(run) == "queued"
        other.execute("rollback")
    assert runs.tick()["errors"] == []
    assert runs.status(run) == "dispatched"


def test_a_phase_that_raises_stops_no_other(shared: Database, runs: Workflows) -> None:
    runs.route(), runs.route("other")
    run = runs.run(status="running", owner_agent_id="coder", deadline_at=ago(minutes=1))
    runs.run("other")
    shared.execute("alter function dispatcher.dispatch_queued_runs(dispatcher.tick) rename to gone_for_a_while")
    try:
        tick = runs.tick()
    finally:
        shared.execute("alter function dispatcher.gone_for_a_while(dispatcher.tick) rename to dispatch_queued_runs")
    assert [error["phase"] for error in tick["errors"]] == ["dispatched"], tick["errors"]
    assert (tick["timed_out"], runs.status(run)) == (1, "timed_out")


def test_the_tick_needs_a_registered_instance(runs: Workflows) -> None:
    with pytest.raises(psycopg.Error) as refused:
        runs.call("dispatch_workflows", p_instance_id=uuid.uuid4())
    assert refused.value.sqlstate == "OD001"


# ------------------------------------------------------------------------------------------- the outbox


def claim_notes(daemon: Workflows, limit: int = 10, **more: object) -> list[dict]:
    answer = daemon.call("claim_workflow_notifications", p_instance_id=daemon.id, p_limit=limit, **more)
    return answer["notifications"]


def finish(daemon: Workflows, notes: list[dict], sent: bool, error: str | None = None) -> int:
    results = [{"id": n["id"], "claim_token": n["claim_token"], "sent": sent, "error": error} for n in notes]
    return daemon.call("finish_workflow_notifications", p_instance_id=daemon.id, p_results=results)["finished"]


def test_a_notification_goes_to_its_agents_gateway_once(runs: Workflows) -> None:
    runs.seed.agent("coder", gateway="elsewhere")
    there = Workflows(runs.database, "elsewhere")
    runs.route()
    run = runs.run()
    runs.tick()
    assert claim_notes(runs) == []
    [note] = claim_notes(there)
    assert (note["run_id"], note["agent_id"], note["workflow_type"], note["tries"]) == (
        str(run),
        "coder",
        "code-change",
        1,
    )
    assert "input_payload" not in note
    assert claim_notes(there) == []
    assert finish(there, [note], sent=True) == 1
    assert finish(there, [note], sent=True) == 0
    assert claim_notes(there) == []
    there.close()


def test_the_only_gateway_notifies_an_agent_without_a_row_and_of_several_who_knows_it(runs: Workflows) -> None:
    runs.route(max_concurrent=9)
    runs.run()
    runs.tick()
    [note] = claim_notes(runs)
    finish(runs, [note], sent=True)
    other = Workflows(runs.database, "elsewhere")
    runs.run()
    runs.tick()
    assert claim_notes(runs) == []
    assert len(claim_notes(other, p_known_agents=["coder"])) == 1
    other.close()


def test_a_failed_notification_comes_back_later_and_never_undoes_the_dispatch(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    runs.tick()
    [note] = claim_notes(runs)
    finish(runs, [note], sent=False, error="no Gateway")
    assert claim_notes(runs) == []
    row = runs.database.row(
        "select state, last_error, extract(epoch from next_try_at - now())::float as wait from workflow_notifications"
    )
    assert (row["state"], row["last_error"]) == ("pending", "no Gateway")
    assert 3 < row["wait"] < 7
    assert runs.status(run) == "dispatched"
    runs.database.execute("update workflow_notifications set next_try_at = now(), tries = 11")
    [note] = claim_notes(runs)
    finish(runs, [note], sent=False, error="no Gateway")
    assert runs.database.value("select state from workflow_notifications") == "failed"


def test_a_notification_whose_sender_died_is_taken_again(runs: Workflows) -> None:
    runs.route()
    runs.run()
    runs.tick()
    [first] = claim_notes(runs)
    runs.database.execute("update workflow_notifications set claimed_until = now() - interval '1 second'")
    [second] = claim_notes(runs.sibling())
    assert second["tries"] == 2
    assert finish(runs, [first], sent=True) == 0
    assert finish(runs, [second], sent=True) == 1


def test_a_notification_of_a_run_that_moved_on_is_dropped(runs: Workflows) -> None:
    runs.route()
    run = runs.run()
    runs.tick()
    runs.claim(run)
    assert claim_notes(runs) == []
    assert runs.database.value("select state from workflow_notifications") == "obsolete"


# ------------------------------------------------------------------------------------------- orphans


def orphan(runs: Workflows, silent: float = 400) -> uuid.UUID:
    runs.seed.agent("coder")
    runs.route()
    run = runs.run()
    runs.tick()
    runs.claim(run, "lost")
    runs.heartbeat(run, "lost")
    runs.shift(run, "last_heartbeat_at", silent)
    return run


def suspects(daemon: Workflows) -> list[dict]:
    return daemon.call("monitor_workflows", p_instance_id=daemon.id)["suspects"]


def respawn(daemon: Workflows, suspect: dict, request: uuid.UUID | None = None) -> dict:
    return daemon.call(
        "respawn_workflow_run",
        p_instance_id=daemon.id,
        p_run_id=suspect["run_id"],
        p_claim_token=suspect["claim_token"],
        p_request=request or uuid.uuid4(),
    )


def test_an_orphan_gets_one_new_process_in_an_attempt(runs: Workflows) -> None:
    run = orphan(runs)
    [suspect] = suspects(runs)
    request = uuid.uuid4()
    grant = respawn(runs, suspect, request)
    assert (grant["granted"], grant["path"], grant["agent_slug"]) == (True, "workflow", "coder")
    assert grant["run"]["session_id"] == f"respawn-{grant['wake_id']}"
    # It may run for as long as its run may, not for as long as a look at the inbox.
    assert 3590 < grant["timeout_seconds"] <= 3605
    assert respawn(runs, suspect, request)["wake_id"] == grant["wake_id"]
    assert suspects(runs) == []
    # The daemon dies; the next one finds the wake lost, and the run silent again: not a second process.
    runs.database.execute("update agent_wakes set state = 'lost', ended_at = now()")
    runs.shift(run, "last_heartbeat_at", 400)
    restarted = runs.sibling()
    assert suspects(restarted) == []
    current = {"run_id": str(run), "claim_token": runs.row(run)["claim_token"]}
    assert respawn(restarted, current)["skip_reason"] == "already_respawned"
    # Silent for long enough the run is released and may be spawned again in its next attempt.
    runs.shift(run, "last_heartbeat_at", 601), runs.shift(run, "claimed_at", 700)
    assert runs.tick()["released"] == 1
    assert runs.tick()["dispatched"] == 1
    runs.claim(run, "again"), runs.heartbeat(run, "again")
    runs.shift(run, "last_heartbeat_at", 400)
    assert [one["attempt"] for one in suspects(runs)] == [2]


def test_two_daemons_respawn_an_orphan_once(runs: Workflows) -> None:
    orphan(runs)
    [suspect] = suspects(runs)
    daemons = [runs.sibling() for _ in range(6)]
    gate = threading.Barrier(6)
    answers: list[dict] = []

    def go(daemon: Workflows) -> None:
        gate.wait()
        answers.append(respawn(daemon, suspect))

    threads = [threading.Thread(target=go, args=(daemon,)) for daemon in daemons]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answer["granted"] for answer in answers) == 1
    assert runs.database.value("select count(*) from agent_wakes") == 1


def test_the_lost_session_is_fenced_and_the_new_one_carries_on(runs: Workflows) -> None:
    run = orphan(runs)
    grant = respawn(runs, suspects(runs)[0])
    assert runs.heartbeat(run, "lost")["code"] == "not_yours"
    session = grant["run"]["session_id"]
    assert runs.heartbeat(run, session)["code"] == "ok"
    assert runs.database.value("select bool_or(worked_at is not null) from workflow_claims") is True
    assert runs.complete(run, session)["status"] == "completed"
    assert runs.tick()["stop_wakes"] == []
    ends = runs.database.rows("select session_id, ended_as from workflow_claims order by claimed_at")
    assert [(end["session_id"], end["ended_as"]) for end in ends] == [("lost", "orphaned"), (session, "completed")]


def money(runs: Workflows) -> tuple[float, float]:
    """What the only budget has settled and reserved."""
    [budget] = runs.call("list_budgets", p_tenant_id=runs.tenant)["budgets"]
    return float(budget["settled_usd"]), float(budget["reserved_usd"])


@pytest.mark.parametrize(("reported", "lost"), [(5, 5), (None, 0.1)])
def test_a_respawn_keeps_what_the_lost_session_cost(runs: Workflows, reported: float | None, lost: float) -> None:
    runs.budget(9)
    run = orphan(runs)
    runs.heartbeat(run, "lost", p_usage={"cost_usd": reported, "model": "m"})
    runs.shift(run, "last_heartbeat_at", 400)
    session = respawn(runs, suspects(runs)[0])["run"]["session_id"]
    assert money(runs) == (lost, 0.1)
    assert (runs.row(run)["cost_estimate"], runs.row(run)["reported_at"]) == (None, None)
    assert runs.complete(run, session, p_usage={"cost_usd": 0.5})["code"] == "ok"
    assert money(runs) == (lost + 0.5, 0)
    assert runs.usage(run, "lost", cost_usd=5.25)["usage_booked"] is True
    assert money(runs) == (5.75, 0)


@pytest.mark.parametrize(("cap", "granted"), [("0.20", True), ("0.15", False)])
def test_a_respawn_needs_room_beside_what_was_lost(runs: Workflows, cap: str, granted: bool) -> None:
    orphan(runs)
    runs.budget(cap)
    answer = respawn(runs, suspects(runs)[0])
    assert (answer["granted"], answer.get("skip_reason")) == (granted, None if granted else "workflow_budget")
    assert money(runs) == ((0.1, 0.1) if granted else (0, 0.1))


@pytest.mark.parametrize(
    "reason", ["wake_in_flight", "agent_paused", "concurrency_limit", "workflow_budget", "not_local", "budget_exceeded"]
)
def test_an_orphan_is_a_wake_like_any_other(runs: Workflows, reason: str) -> None:
    orphan(runs)
    [suspect] = suspects(runs)
    agent = runs.seed.agent("coder")
    wake = {
        "gateway_id": runs.gateway_id,
        "tenant_id": runs.tenant,
        "instance_id": runs.id,
        "path": "event",
        "deadline_at": ago(minutes=-5),
    }
    if reason == "wake_in_flight":
        runs.seed.insert("agent_wakes", agent_id=agent, **wake)
    elif reason == "agent_paused":
        runs.database.execute("update agents set status = 'paused'")
    elif reason == "concurrency_limit":
        for other in ("ada", "bob"):
            runs.seed.insert("agent_wakes", agent_id=runs.seed.agent(other), **wake)
    elif reason == "workflow_budget":
        runs.done(cost=5)
        runs.budget(5, scope="agent", scope_id="coder")
    elif reason == "not_local":
        runs.database.execute("update agents set gateway_id = %s", [runs.seed.gateway("elsewhere")])
    else:
        runs.seed.insert(
            "agent_budgets", agent_id=agent, status="exceeded", monthly_limit_usd=1, current_period_spend_usd=2
        )
    refused = respawn(runs, suspect)
    assert (refused["granted"], refused["skip_reason"]) == (False, reason)
    assert runs.database.value("select count(*) from workflow_respawns") == 0


def test_who_is_alive_is_no_suspect(runs: Workflows) -> None:
    run = orphan(runs, silent=300)
    assert suspects(runs) == []
    runs.shift(run, "last_heartbeat_at", 400)
    runs.shift(run, "deadline_at", 1)
    assert suspects(runs) == []  # that one is timed out by the tick
    fresh = {"run_id": str(run), "claim_token": runs.row(run)["claim_token"]}
    runs.shift(run, "deadline_at", -100)
    runs.heartbeat(run, "lost")
    assert respawn(runs, fresh)["skip_reason"] == "not_an_orphan"


@pytest.mark.parametrize("how", ["timed_out", "cancelled", "released"])
def test_the_process_of_a_run_that_was_taken_away_is_to_be_stopped(runs: Workflows, how: str) -> None:
    run = orphan(runs)
    grant = respawn(runs, suspects(runs)[0])
    if how == "timed_out":
        runs.shift(run, "deadline_at", 1)
    elif how == "cancelled":
        runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=run, p_actor="op")
    else:
        runs.shift(run, "last_heartbeat_at", 601), runs.shift(run, "claimed_at", 700)
    [stop] = runs.tick()["stop_wakes"]
    assert stop["wake_id"] == grant["wake_id"]
    assert runs.call("monitor_workflows", p_instance_id=runs.id)["stop_wakes"] == [stop]
    assert runs.sibling().tick()["stop_wakes"] == []


def test_a_run_claimed_inside_a_wake_is_tied_to_it(runs: Workflows) -> None:
    agent = runs.seed.agent("coder")
    runs.route()
    run = runs.run()
    runs.tick()
    columns = {"gateway_id": runs.gateway_id, "tenant_id": runs.tenant, "instance_id": runs.id, "path": "event"}
    wake = runs.seed.insert("agent_wakes", agent_id=agent, deadline_at=ago(minutes=-5), **columns)["id"]
    runs.claim(run, p_wake_id=wake)
    runs.shift(run, "deadline_at", 1)
    assert [stop["wake_id"] for stop in runs.tick()["stop_wakes"]] == [str(wake)]


# ------------------------------------------------------------------------------------------- hints


def hints(runs: Workflows) -> list[str]:
    rows = runs.database.rows("select topic, private from realtime.messages where event = 'run' order by inserted_at")
    assert all(row["private"] for row in rows)
    return [row["topic"] for row in rows]


def test_new_runs_hint_the_living_daemons_of_the_tenant(runs: Workflows) -> None:
    dead = Workflows(runs.database, "dead")
    runs.database.execute(
        "update dispatcher_instances set last_heartbeat_at = now() - interval '1 hour' where id = %s", [dead.id]
    )
    stranger = Workflows(runs.database, "theirs", uuid.uuid4())
    runs.database.execute("insert into workflow_runs (workflow_type) select 'a' from generate_series(1, 30)")
    assert hints(runs) == [f"gateway:{runs.gateway_id}"]
    dead.close(), stranger.close()


def test_a_freed_slot_hints_while_others_wait(runs: Workflows) -> None:
    runs.route()
    first, _second = runs.run(), runs.run()
    runs.tick()
    runs.claim(first)
    runs.database.execute("delete from realtime.messages")
    runs.complete(first)
    assert len(hints(runs)) == 1
    runs.tick()
    [second] = [row["id"] for row in runs.database.rows("select id from workflow_runs where status = 'dispatched'")]
    runs.claim(second)
    runs.database.execute("delete from realtime.messages")
    runs.complete(second)
    assert hints(runs) == []


def test_a_held_run_frees_its_slot_when_it_is_cancelled(runs: Workflows) -> None:
    runs.route()
    runs.run(), runs.run()
    runs.tick()
    runs.database.execute("delete from realtime.messages")
    out = runs.database.value("select id from workflow_runs where status = 'dispatched'")
    runs.database.execute("update workflow_runs set status = 'blocked' where id = %s", [out])
    assert hints(runs) == []
    runs.call("cancel_workflow_run", p_tenant_id=runs.tenant, p_run_id=out, p_actor="op")
    assert len(hints(runs)) == 1


def test_a_hint_that_fails_fails_no_insert(runs: Workflows) -> None:
    runs.database.execute("alter table realtime.messages rename to hidden")
    try:
        run = runs.run()
    finally:
        runs.database.execute("alter table realtime.hidden rename to messages")
    assert runs.status(run) == "queued"
