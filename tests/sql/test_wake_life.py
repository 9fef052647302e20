"""From the grant to the end: states, leases, failures, stall, adoption, heartbeat."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import ANY

import pytest
from psycopg.types.json import Jsonb

from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kept_database


def lease(database: Database, item: uuid.UUID, grant: dict[str, Any], seconds: int = 120) -> None:
    """As an agent's script does it."""
    database.execute(
        """update agent_inbox_items set status = 'leased', attempt_count = attempt_count + 1,
                  leased_at = clock_timestamp(),
                  leased_until = clock_timestamp() + make_interval(secs => %s) where id = %s""",
        [seconds, item],
    )
    database.execute(
        """insert into inbox_item_leases (item_id, tenant_id, agent_id, wake_id, attempt, leased_until)
           select id, tenant_id, agent_id, %s, attempt_count, leased_until from agent_inbox_items where id = %s""",
        [grant["wake_id"], item],
    )


def finish(database: Database, item: uuid.UUID) -> None:
    """As an agent's old script does it, which knows nothing of lease tokens."""
    database.execute("select lease_inbox_item(agent_id) from agent_inbox_items where id = %s", [item])
    database.execute("select complete_inbox_item(%s)", [item])


def item_row(database: Database, item: uuid.UUID) -> dict[str, Any]:
    return database.row(
        """select status::text, attempt_count, leased_until, context ->> 'last_failure_reason' as reason
             from agent_inbox_items where id = %s""",
        [item],
    )


def test_c39_a_wake_ends_though_what_the_gates_remember_of_its_agent_was_deleted(
    database: Database, seed: Seed, dispatcher
) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    database.execute("delete from agent_wake_state")
    assert daemon.started(grant, pid=77)["code"] == "ok"
    database.execute("delete from agent_wake_state")
    ended = daemon.ended(grant, exit_code=1)
    assert (ended["code"], ended["state"], ended["consecutive_failures"]) == ("ok", "failed", 1)


def test_started_keeps_the_process_and_stamps_the_items(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    assert daemon.started(grant, pid=77)["code"] == "ok"
    assert daemon.started(grant, pid=77)["code"] == "already"
    assert database.row("select state, pid, host_id from agent_wakes") == {
        "state": "running",
        "pid": 77,
        "host_id": "boot:1",
    }
    stamped = "select last_wake_attempt_at is not null and last_wake_success_at is not null from agent_inbox_items"
    assert database.value(stamped)


def test_an_end_does_not_overtake_the_start_that_met_a_held_row(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    mine = {key: grant[key] for key in ("wake_id", "claim_token")}
    start = mine | {"report": "started", "host_id": "boot:1", "pid": 7, "pid_started_at": 1.0}
    end = mine | {"report": "ended", "ending": "exited", "exit_code": 1}
    holder = database.connect(autocommit=False)
    holder.execute("select from agent_wakes for update")
    assert [result["code"] for result in daemon.report(start, end)["results"]] == ["busy", "busy"]
    holder.rollback()
    assert [result["code"] for result in daemon.report(start, end)["results"]] == ["ok", "ok"]
    assert database.value("select pid from agent_wakes") == 7


def test_a_wake_that_never_started_stamps_its_attempt_alone(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    daemon.ended(daemon.claim(agent, item), "spawn_failed", None)
    assert database.row(
        "select last_wake_attempt_at is not null as tried, last_wake_success_at from agent_inbox_items"
    ) == {
        "tried": True,
        "last_wake_success_at": None,
    }


@pytest.mark.parametrize(
    ("ending", "exit_code", "work_done", "state", "failures"),
    [
        ("exited", 0, True, "succeeded", 0),
        ("exited", 0, False, "no_progress", 1),
        ("exited", 1, True, "failed", 1),
        ("exited", None, True, "succeeded", 0),
        ("exited", None, False, "no_progress", 1),
        ("timed_out", -15, False, "timed_out", 1),
        ("interrupted", -15, False, "interrupted", 0),
        ("lost", None, False, "lost", 0),
        ("spawn_failed", None, False, "spawn_failed", 1),
    ],
)
def test_how_a_wake_ends(
    database: Database,
    seed: Seed,
    dispatcher,
    ending: str,
    exit_code: int | None,
    work_done: bool,
    state: str,
    failures: int,
) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    daemon.started(grant)
    if work_done:
        finish(database, item)
    answer = daemon.ended(grant, ending, exit_code)
    assert (answer["state"], answer["consecutive_failures"]) == (state, failures)


def test_a_wake_that_ends_well_resets_the_failures_before_it(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    first, _second = seed.items("ada", 2)
    daemon = dispatcher(max_consecutive_failures=5)
    assert fail(daemon, agent, 3)["consecutive_failures"] == 3
    grant = daemon.claim(agent)
    finish(database, first)
    answer = daemon.ended(grant)
    assert (answer["state"], answer["consecutive_failures"]) == ("succeeded", 0)
    assert database.value("select consecutive_failures from agent_wake_state") == 0
    assert fail(daemon, agent, 1)["consecutive_failures"] == 1


def test_a_wake_that_finds_nothing_left_to_do_is_no_failure(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    database.execute("delete from agent_inbox_items")
    assert daemon.ended(grant)["state"] == "succeeded"


@pytest.mark.own_database
def test_progress_is_seen_without_the_trigger_too(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    seed.item("ada")
    database.execute("drop trigger dispatcher_inbox_update_hint on agent_inbox_items")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    database.execute(
        "update agent_inbox_items set status = 'done', completed_at = clock_timestamp() where id = %s", [item]
    )
    assert daemon.ended(grant)["state"] == "succeeded"


@pytest.mark.parametrize(
    ("ending", "attempts_before", "status", "attempts_after"),
    [
        ("exited", 0, "pending", 1),
        ("timed_out", 1, "pending", 2),
        ("exited", 2, "dead_letter", 3),
        ("interrupted", 0, "pending", 0),
        ("interrupted", 2, "pending", 2),
        ("lost", 1, "pending", 2),
        ("lost", 2, "dead_letter", 3),
    ],
)
def test_leases_left_are_released_at_once(
    database: Database,
    seed: Seed,
    dispatcher,
    ending: str,
    attempts_before: int,
    status: str,
    attempts_after: int,
) -> None:
    agent, item = seed.agent("ada"), seed.item("ada", attempt_count=attempts_before)
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    lease(database, item, grant)
    daemon.ended(grant, ending)
    row = item_row(database, item)
    assert (row["status"], row["attempt_count"], row["leased_until"]) == (status, attempts_after, None)
    assert (status == "dead_letter") == ("unfinished" in (row["reason"] or ""))
    assert database.value("select closed_at is not null from inbox_item_leases")


def test_a_lease_of_the_old_function_is_released_too(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    database.execute("select lease_inbox_item(%s)", [agent])
    assert item_row(database, item)["status"] == "leased"
    daemon.ended(grant, "interrupted")
    assert item_row(database, item)["status"] == "pending"


def test_ff43_an_item_finished_before_the_end_is_not_touched(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    lease(database, item, grant)
    database.execute(
        "update agent_inbox_items set status = 'done', completed_at = clock_timestamp() where id = %s", [item]
    )
    daemon.ended(grant, "lost")
    assert (item_row(database, item)["status"], item_row(database, item)["attempt_count"]) == ("done", 1)


def test_ff46_a_poison_item_ends_when_the_daemon_dies_of_it(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada", max_attempts=3)
    wakes = 0
    while (grant := dispatcher().claim(agent))["granted"]:
        wakes += 1
        dispatcher().ended(grant, "lost", None)
    assert wakes == 3
    row = item_row(database, item)
    assert (row["status"], row["attempt_count"], row["reason"]) == ("dead_letter", 3, "worker lost")
    # Its daemon may have died of something else: somebody is told, and what to do about it.
    [note] = database.rows("select type, body from notifications")
    assert note["type"] == "worker_lost"
    assert f"dispatcher inbox requeue {item}" in note["body"]


def test_a_spawn_that_fails_costs_no_attempt(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    daemon.ended(daemon.claim(agent, item), "spawn_failed", None)
    assert item_row(database, item)["attempt_count"] == 0


def fail(daemon: Any, agent: uuid.UUID, times: int) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for _ in range(times):
        answer = daemon.ended(daemon.claim(agent), exit_code=1)
    return answer


def test_a_stall_sets_work_aside_tells_once_and_a_new_item_wakes(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher(max_consecutive_failures=3)
    answer = fail(daemon, agent, 3)
    assert (answer["consecutive_failures"], answer["next"]) == (3, "stalled")
    row = item_row(database, item)
    assert (row["status"], row["attempt_count"], row["reason"]) == ("failed", 0, "agent_stalled")
    assert daemon.claim(agent)["skip_reason"] == "stalled"
    daemon.sweep(), daemon.sweep()
    assert database.value("select count(*) from notifications where type = 'agent_stalled'") == 1
    fresh = seed.item("ada")
    grant = daemon.claim(agent, fresh)
    assert grant["granted"] is True


def test_requeue_clears_the_stall_and_brings_items_back(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher(max_consecutive_failures=2)
    fail(daemon, agent, 2)
    answer = daemon.call(
        "requeue_inbox_items", p_tenant_id=uuid.UUID(int=0), p_gateway="local", p_agent="ada", p_item_ids=None
    )
    assert (answer["requeued"], answer["item_ids"]) == (1, [str(item)])
    assert daemon.claim(agent)["granted"] is True


def test_a_heartbeat_names_wakes_whose_own_daemon_is_silent(database: Database, seed: Seed, dispatcher) -> None:
    """By the silence that the silent one's own settings allow."""
    agent = seed.agent("ada")
    seed.item("ada")
    owner, other = dispatcher(instance_timeout=200), dispatcher()
    grant = owner.claim(agent)
    owner.started(grant)
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '100 seconds'")
    assert other.heartbeat()["orphaned"] == []
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '201 seconds'")
    assert other.heartbeat()["orphaned"] == [grant["wake_id"]]
    assert owner.heartbeat(grant)["orphaned"] == []


def test_status_tells_the_living_from_the_silent_and_what_the_cap_holds(
    database: Database, seed: Seed, dispatcher
) -> None:
    seed.item("bob")
    agent = seed.agent("ada")
    seed.item("ada")
    silent, living = dispatcher(instance_timeout=6), dispatcher(instance_timeout=200, max_concurrent_wakes=1)
    living.started(living.claim(agent))
    living.heartbeat()
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '60 seconds'")
    database.execute("""update dispatcher_instances set health = '{"status": "ok"}'""")
    status = living.call("dispatcher_status", p_tenant_id=uuid.UUID(int=0), p_gateway="local", p_settings={})
    seen = {row["id"]: (row["state"], row["health"]) for row in status["instances"]}
    assert seen == {silent.id: ("silent", {}), living.id: ("running", {"status": "ok"})}
    blocked = {row["agent"]: row["blocked"] for row in status["agents"]}
    assert blocked["bob"] == ["concurrency_limit"]
    assert "wake_in_flight" in blocked["ada"]


def test_a_slow_agent_that_works_cannot_stall_by_time_outs(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    items = seed.items("ada", 6)
    daemon = dispatcher(max_consecutive_failures=3)
    for item in items[:5]:
        grant = daemon.claim(agent)
        finish(database, item)
        answer = daemon.ended(grant, "timed_out", -15)
    assert answer["consecutive_failures"] == 2
    assert database.value("select stalled_at is null from agent_wake_state")


def test_what_arrives_during_a_run_is_waitlisted_at_its_end(database: Database, seed: Seed, dispatcher) -> None:
    """Field failure 49, the database's half."""
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    grant = daemon.claim(agent, item)
    late = seed.item("ada")
    assert daemon.claim(agent, late)["skip_reason"] == "wake_in_flight"
    database.execute("update agent_inbox_items set status = 'done' where id = %s", [item])
    assert daemon.ended(grant)["next"] == "waitlisted"
    [again] = daemon.report(limit=1)["claims"]
    assert (again["granted"], again["path"], again["item_ids"]) == (True, "waitlist", [str(late)])


def test_a_heartbeat_renews_leases_and_names_wakes_it_was_not_told_of(
    database: Database, seed: Seed, dispatcher
) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher()
    request = uuid.uuid4()
    grant = daemon.claim(agent, item, request=request)
    lease(database, item, grant, seconds=20)
    before = item_row(database, item)["leased_until"]
    assert daemon.heartbeat(grant)["renewed"] == 1
    assert item_row(database, item)["leased_until"] > before + timedelta(seconds=90)
    answer = daemon.heartbeat(grant)
    assert (answer["renewed"], answer["unattended"]) == (0, [])
    # A heartbeat may be an old one that comes late: it names what it was not told of, and closes nothing.
    [unattended] = daemon.heartbeat()["unattended"]
    assert (unattended["wake_id"], unattended["claim_request"]) == (grant["wake_id"], str(request))
    assert unattended["claim_token"] == grant["claim_token"]
    assert database.value("select state from agent_wakes") == "starting"
    assert dispatcher().heartbeat()["unattended"] == []


def test_an_adoption_asked_for_again_gets_the_same_answer(database: Database, seed: Seed, dispatcher) -> None:
    """The first answer was lost: without a second one nobody would hold the token, and the wake would go unattended."""
    agent = seed.agent("ada")
    seed.item("ada")
    dead, living, late = dispatcher(), dispatcher(), dispatcher()
    grant = dead.claim(agent)
    dead.started(grant, pid=99)
    first = adopt(living, grant, pid=99)
    assert first["applied"] is True
    assert adopt(living, grant, pid=99) == first | {"deadline_in": ANY}
    assert adopt(late, grant, pid=99)["applied"] is False
    assert adopt(living, grant, pid=98)["applied"] is False


def adopt(daemon: Any, grant: Any, pid: int) -> Any:
    return daemon.call(
        "adopt_wake",
        p_instance_id=daemon.id,
        p_wake_id=grant["wake_id"],
        p_claim_token=grant["claim_token"],
        p_host_id="boot:1",
        p_pid=pid,
        p_pid_started_at=1.0,
    )


def test_an_end_reported_again_says_when_to_look_next(database: Database, seed: Seed, dispatcher) -> None:
    """The first answer was lost, and with it the time at which the agent is due."""
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon = dispatcher(wake_cooldown=30)
    grant = daemon.claim(agent, item)
    first = daemon.ended(grant, exit_code=1)
    again = daemon.ended(grant, exit_code=1)
    assert (again["code"], again["state"], again["agent_id"]) == ("already", "failed", str(agent))
    assert again["next"].startswith("cooldown(")
    assert again["retry_in"] == pytest.approx(first["retry_in"], abs=2)
    assert database.value("select consecutive_failures from agent_wake_state") == 1


def test_a_claim_asked_for_again_while_the_first_is_under_way_gets_its_grant(
    database: Database, seed: Seed, dispatcher
) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    daemon = dispatcher()
    request = uuid.uuid4()
    slow = database.connect("service_role", autocommit=False)
    [[first]] = (row.values() for row in database.call("claim_wakes", claim_of(daemon, agent, request), on=slow))
    with ThreadPoolExecutor(1) as second:
        answer = second.submit(daemon.claim, agent, request=request)
        wait_until(lambda: database.value("select count(*) from pg_stat_activity where wait_event_type = 'Lock'") == 1)
        slow.commit()
        assert answer.result(10)["wake_id"] == first[0]["wake_id"]


def claim_of(daemon: Any, agent: uuid.UUID, request: uuid.UUID) -> dict[str, object]:
    claims = Jsonb([{"agent_id": str(agent), "path": "event"}])
    return {"p_instance_id": daemon.id, "p_claims": claims, "p_request": request}


def test_an_instance_whose_row_is_gone_is_told_and_may_register_again(
    database: Database, seed: Seed, dispatcher
) -> None:
    daemon = dispatcher()
    database.execute("delete from dispatcher_instances")
    with pytest.raises(Exception, match="no dispatcher instance") as raised:
        daemon.heartbeat()
    assert raised.value.sqlstate == "OD001"


def test_open_wakes_of_a_dead_instance_are_listed_for_the_living(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    dead, living = dispatcher(), dispatcher()
    grant = dead.claim(agent)
    dead.started(grant, pid=99)
    [listed] = living.sweep()["open_wakes"]
    assert (listed["wake_id"], listed["pid"], listed["agent_slug"]) == (grant["wake_id"], 99, "ada")
    assert dead.sweep()["open_wakes"] == []


def test_ff45_wakes_are_listed_also_when_the_owners_row_is_gone(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    dead = dispatcher()
    grant = dead.claim(agent)
    database.execute("delete from dispatcher_instances where id = %s", [dead.id])
    [listed] = dispatcher().registered["open_wakes"]
    assert (listed["wake_id"], listed["owner_state"]) == (grant["wake_id"], "lost")


def list_wakes(daemon, **arguments: object) -> dict[str, Any]:
    given = {"p_tenant_id": uuid.UUID(int=0), "p_gateway": "local", "p_agent": None, "p_limit": 50}
    return daemon.call("list_wakes", **{**given, **arguments})


def test_wakes_are_listed_with_the_living_first(database: Database, seed: Seed, dispatcher) -> None:
    ada, bob, items = seed.agent("ada"), seed.agent("bob"), seed.items("ada", 2)
    seed.item("bob"), seed.gateway("other")
    daemon = dispatcher()
    living = daemon.claim(bob, path="sweep")
    daemon.started(living)
    daemon.ended(daemon.claim(ada, *items), "spawn_failed", None)
    ended = daemon.claim(ada, items[0])
    daemon.started(ended)
    daemon.ended(ended, exit_code=3)
    first, second, third = list_wakes(daemon)["wakes"]
    assert [first[name] for name in ("wake_id", "agent", "path", "state", "exit_code", "ended_at")] == [
        *(living["wake_id"], "bob", "sweep", "running", None, None)
    ]
    assert 0 <= first["seconds"] < 60
    assert [second[name] for name in ("wake_id", "agent", "state", "exit_code")] == [
        *(ended["wake_id"], "ada", "failed", 3)
    ]
    assert (third["state"], third["seconds"], third["items"]) == ("spawn_failed", None, 2)
    assert [wake["agent"] for wake in list_wakes(daemon, p_agent="ada", p_limit=1)["wakes"]] == ["ada"]
    assert list_wakes(daemon, p_agent=str(bob))["wakes"] == [first | {"seconds": ANY}]
    assert list_wakes(daemon, p_gateway="other")["wakes"] == []
    assert list_wakes(daemon, p_gateway="nowhere") == {"code": "unknown_gateway", "known": ["local", "other"]}
    assert list_wakes(daemon, p_agent="eve") == {"code": "unknown_agent", "known": ["ada", "bob"]}


def test_what_a_wake_cost_is_what_its_agent_used_meanwhile(database: Database, seed: Seed, dispatcher) -> None:
    ada, bob = seed.agent("ada"), seed.agent("bob")
    seed.item("ada"), seed.item("bob")
    daemon = dispatcher()
    for agent in (ada, bob):
        grant = daemon.claim(agent)
        daemon.started(grant)
        daemon.ended(grant, exit_code=1)
    database.execute(
        "update agent_wakes set started_at = now() - interval '3 minutes', ended_at = now() - interval '1 minute'"
    )
    ago = {"before": 200, "inside": 150, "later inside": 90, "unpriced": 80, "after": 30}
    for run, seconds in ago.items():
        seed.insert(
            "agent_usage",
            agent_id=ada,
            run_id=run,
            provider="p",
            model="m",
            cost_total_usd=None if run == "unpriced" else 0.25,
            occurred_at=datetime.now(UTC) - timedelta(seconds=seconds),
        )
    costs = {wake["agent"]: wake["cost_usd"] for wake in list_wakes(daemon)["wakes"]}
    assert costs == {"ada": 0.5, "bob": None}


class TestSweep:
    def test_stale_items_expire_but_not_those_of_paused_agents(
        self, database: Database, seed: Seed, dispatcher
    ) -> None:
        old = datetime.now(UTC) - timedelta(hours=25)
        stale, waits = (
            seed.item("ada", created_at=old),
            seed.item(seed.agent("zoe", status="paused"), created_at=old),
        )
        answer = dispatcher().sweep()
        assert answer["expired"] == 1
        row = item_row(database, stale)
        assert (row["status"], row["attempt_count"]) == ("failed", 3)
        assert "stale" in row["reason"]
        assert item_row(database, waits)["status"] == "pending"
        assert dispatcher(stale_item_age_hours=0).sweep().get("expired", 0) == 0

    def test_a_spent_lease_is_buried_with_its_reason(self, database: Database, seed: Seed, dispatcher) -> None:
        past = datetime.now(UTC) - timedelta(minutes=3)
        spent = seed.item("ada", status="leased", attempt_count=3, leased_at=past, leased_until=past)
        live = seed.item(
            "bob", status="leased", attempt_count=3, leased_at=past, leased_until=past + timedelta(hours=1)
        )
        assert dispatcher().sweep().get("dead", 0) == 1
        assert item_row(database, spent)["status"] == "dead_letter"
        assert "no attempts left" in item_row(database, spent)["reason"]
        assert item_row(database, live)["status"] == "leased"

    def test_other_gateways_are_never_written(self, database: Database, seed: Seed, dispatcher) -> None:
        theirs = seed.agent("theirs", gateway="other")
        item = seed.item(theirs, created_at=datetime.now(UTC) - timedelta(days=9))
        answer = dispatcher().sweep(limit=2)
        assert (answer["agents"], answer["due"], answer["claims"]) == ([], [], [])
        assert item_row(database, item)["status"] == "pending"
        assert database.rows("select from agent_wake_state") == []

    def test_oldest_work_first_and_everybody_gets_a_turn(self, database: Database, seed: Seed, dispatcher) -> None:
        now = datetime.now(UTC)
        for number in range(9):
            for extra in range(3):
                seed.item(f"a{number}", created_at=now - timedelta(minutes=9 - number, seconds=extra))
        daemon = dispatcher(max_concurrent_wakes=2)
        claims = daemon.sweep(limit=2)["claims"]
        order = [claim["agent_slug"] for claim in claims]
        while claims:
            report = {"report": "ended", "ending": "exited", "exit_code": 1}
            mine = {key: claims[0][key] for key in ("wake_id", "claim_token")}
            database.execute(
                "update agent_inbox_items set status = 'done' where agent_slug = %s",
                [claims[0]["agent_slug"]],
            )
            claims = claims[1:] + daemon.report(report | mine, limit=1)["claims"]
            order += [claim["agent_slug"] for claim in claims[1:]] if len(claims) > 1 else []
        assert order == [f"a{number}" for number in range(9)]

    @pytest.mark.own_database
    def test_a_failing_phase_does_not_stop_the_others(self, database: Database, seed: Seed, dispatcher) -> None:
        seed.item("ada")
        daemon = dispatcher()
        database.execute("alter function dispatcher.chained_items(dispatcher.claimant, integer) rename to away")
        answer = daemon.sweep(limit=1)
        assert [error["phase"] for error in answer["errors"]] == ["chained"]
        assert answer["claims"][0]["granted"] is True

    def test_ff18_a_row_that_commits_late_is_found(self, database: Database, seed: Seed, dispatcher) -> None:
        seed.agent("slow")
        slow = database.connect(autocommit=False)
        slow.execute(
            """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
               select id, slug, 'heartbeat', 'late' from agents where slug = 'slow'"""
        )
        seed.item("fast")
        daemon = dispatcher()
        assert [claim["agent_slug"] for claim in daemon.sweep(limit=2)["claims"]] == ["fast"]
        slow.commit()
        assert [claim["agent_slug"] for claim in daemon.sweep(limit=2)["claims"]] == ["slow"]

    def test_ff16_more_agents_than_the_servers_row_cap(self, database: Database, seed: Seed, dispatcher) -> None:
        gateway = seed.gateway()
        database.execute(
            """insert into agents (gateway_id, name, slug) select %s, 'n', 'n' || n from generate_series(1, 1205) n""",
            [gateway],
        )
        database.execute(
            """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
               select id, slug, 'heartbeat', slug from agents"""
        )
        answer = dispatcher().sweep(limit=2)
        assert (len(answer["agents"]), answer["waiting"], len(answer["claims"])) == (1205, 1203, 2)


class TestChains:
    """Field failure 54: agents that wake themselves or one another."""

    def deep(self, database: Database, item: uuid.UUID, depth: int) -> None:
        database.execute(
            """insert into inbox_item_origins (item_id, tenant_id, chain_depth)
               select id, tenant_id, %s from agent_inbox_items where id = %s""",
            [depth, item],
        )

    def test_ff54_a_chain_at_its_limit_wakes_nobody_and_is_told_once(
        self, database: Database, seed: Seed, dispatcher
    ) -> None:
        agent = seed.agent("ada")
        first, second = seed.items("ada", 2)
        self.deep(database, first, 6), self.deep(database, second, 6)
        daemon = dispatcher(max_wake_chain=6)
        assert daemon.claim(agent, first)["skip_reason"] == "chain_limit"
        assert daemon.sweep(limit=2)["chained"] == 2
        assert item_row(database, first)["status"] == "dead_letter"
        assert "chain limit" in item_row(database, first)["reason"]
        third = seed.item("ada")
        self.deep(database, third, 7)
        daemon.sweep(limit=2)
        assert database.value("select count(*) from notifications where type = 'wake_chain_limit'") == 1
        # What the notification says to do does it, and a chain that goes on then is told of again.
        assert "dispatcher inbox requeue --agent ada" in database.value("select body from notifications")
        tenant = {"p_tenant_id": uuid.UUID(int=0), "p_gateway": "local", "p_item_ids": None}
        assert daemon.call("requeue_inbox_items", **tenant, p_agent=None)["requeued"] == 0
        assert daemon.call("requeue_inbox_items", **tenant, p_agent="ada")["requeued"] == 3
        self.deepen(database, third, 7)
        daemon.sweep(limit=2)
        assert database.value("select count(*) from notifications where type = 'wake_chain_limit'") == 2

    def deepen(self, database: Database, item: uuid.UUID, depth: int) -> None:
        database.execute("update inbox_item_origins set chain_depth = %s where item_id = %s", [depth, item])

    def test_ff54_the_claim_computes_the_depth(self, database: Database, seed: Seed, dispatcher) -> None:
        agent = seed.agent("ada")
        self.deep(database, seed.item("ada"), 4)
        seed.item("ada")
        assert dispatcher().claim(agent)["chain_depth"] == 4

    def test_ff54_an_item_inserted_by_other_means_has_no_chain_and_the_daily_limit_bounds_it(
        self, database: Database, seed: Seed, dispatcher
    ) -> None:
        """Only `hq_inbox_post.py` records the wake an item came from."""
        agent = seed.agent("ada")
        item = seed.item("ada")
        daemon = dispatcher(max_wake_chain=2, max_wakes_per_day=4)
        for _ in range(4):
            grant = daemon.claim(agent, item)
            assert (grant["granted"], grant["chain_depth"]) == (True, 0)
            daemon.started(grant)
            database.execute("update agent_inbox_items set status = 'done' where id = %s", [item])
            item = seed.item("ada")  # what the woken agent does, with a plain insert
            daemon.ended(grant)
        assert daemon.claim(agent, item)["skip_reason"] == "daily_limit"

    def test_no_limit(self, database: Database, seed: Seed, dispatcher) -> None:
        agent = seed.agent("ada")
        self.deep(database, seed.item("ada"), 999)
        assert dispatcher(max_wake_chain=0).claim(agent)["granted"] is True


class TestReviewed:
    """What a review found by experiment."""

    def test_a_stall_of_a_large_inbox_is_settled_in_steps(self, database: Database, seed: Seed, dispatcher) -> None:
        agent = seed.agent("ada")
        database.execute(
            """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
               select id, slug, 'heartbeat', 'many:' || n from agents, generate_series(1, 1200) n"""
        )
        daemon = dispatcher(max_consecutive_failures=1)
        assert daemon.ended(daemon.claim(agent), exit_code=1)["state"] == "failed"
        waiting = "select count(*) from agent_inbox_items where status = 'pending'"
        seen = [database.value(waiting)]
        while database.value(waiting):
            daemon.phase("stalled")
            seen.append(database.value(waiting))
        assert seen == [700, 200, 0]
        assert database.value("select count(*) from notifications where type = 'agent_stalled'") == 1

    def test_ff62_a_row_somebody_holds_stops_nobody(self, database: Database, seed: Seed, dispatcher) -> None:
        held, fine = seed.item("held"), seed.item("fine")
        daemon = dispatcher(max_concurrent_wakes=4)
        holder = database.connect(autocommit=False)
        holder.execute("select from agent_inbox_items where id = %s for update", [held])
        agents = {row["slug"]: row["id"] for row in database.rows("select slug, id from agents")}
        answers = daemon.claims([agents["held"], agents["fine"]])
        assert [answer["granted"] for answer in answers] == [True, True]
        assert daemon.heartbeat(*answers)["fenced"] == []
        assert [daemon.started(answer)["code"] for answer in answers] == ["ok", "ok"]
        assert daemon.sweep()["errors"] == []
        holder.rollback()
        assert database.value("select last_wake_success_at is not null from agent_inbox_items where id = %s", [fine])

    def test_an_insert_never_waits_for_a_claim(self, database: Database, seed: Seed, dispatcher) -> None:
        agent = seed.agent("ada")
        seed.item("ada")
        daemon = dispatcher()
        daemon.ended(daemon.claim(agent), exit_code=1)
        holder = database.connect(autocommit=False)
        holder.execute("select from agent_wake_state for update")
        database.admin.execute("set lock_timeout = '300ms'")
        fresh = seed.item("ada")
        holder.rollback()
        assert daemon.claim(agent, fresh)["granted"] is True
        assert database.value("select consecutive_failures from agent_wake_state") == 0

    @pytest.mark.parametrize("again", ["requeue", "retry", "resume"])
    def test_what_is_brought_back_grows_stale_anew(
        self, database: Database, seed: Seed, dispatcher, again: str
    ) -> None:
        old = datetime.now(UTC) - timedelta(hours=50)
        status = "paused" if again == "resume" else "ready"
        item = seed.item(
            seed.agent("ada", status=status), created_at=old, status="pending" if again == "resume" else "dead_letter"
        )
        daemon = dispatcher()
        if again == "requeue":
            daemon.call(
                "requeue_inbox_items", p_tenant_id=uuid.UUID(int=0), p_gateway="local", p_agent=None, p_item_ids=[item]
            )
        elif again == "retry":
            database.execute("update agent_inbox_items set status = 'pending', attempt_count = 0")
        else:
            database.execute("update agents set status = 'ready'")
        answer = daemon.sweep(limit=1)
        assert ("expired" in answer["due"], answer["claims"][0]["granted"]) == (False, True)

    def test_the_item_a_live_wake_works_on_is_not_buried(self, database: Database, seed: Seed, dispatcher) -> None:
        agent, item = seed.agent("ada"), seed.item("ada", attempt_count=2)
        daemon = dispatcher()
        grant = daemon.claim(agent, item)
        daemon.started(grant)
        lease(database, item, grant)
        database.execute("update agent_inbox_items set leased_until = now() - interval '1 minute'")
        assert daemon.sweep().get("dead", 0) == 0
        assert daemon.heartbeat(grant)["renewed"] == 1
        assert item_row(database, item)["status"] == "leased"

    def test_another_tenants_item_wakes_nobody_and_is_not_touched(
        self, database: Database, seed: Seed, dispatcher
    ) -> None:
        agent = seed.agent("ada")
        theirs = seed.tenant("theirs")
        item = seed.crossed_item(agent, theirs, created_at=datetime.now(UTC) - timedelta(hours=50))
        daemon = dispatcher()
        assert daemon.claim(agent, item)["skip_reason"] == "no_actionable_work"
        answer = daemon.sweep(limit=2)
        assert (answer["due"], answer["claims"]) == ([], [])
        assert item_row(database, item)["status"] == "pending"
        assert database.value("select count(*) from realtime.messages where event = 'inbox'") == 0

    def test_a_lost_wake_with_a_lease_of_the_old_function_costs_one_attempt(
        self, database: Database, seed: Seed, dispatcher
    ) -> None:
        agent, item = seed.agent("ada"), seed.item("ada")
        daemon = dispatcher()
        grant = daemon.claim(agent, item)
        database.execute("select lease_inbox_item(%s)", [agent])
        daemon.ended(grant, "lost", None)
        assert item_row(database, item)["attempt_count"] == 1

    def test_a_repeated_request_is_answered_for_every_agent(self, database: Database, seed: Seed, dispatcher) -> None:
        first, second = seed.agent("a1"), seed.agent("a2", status="paused")
        seed.item("a1"), seed.item("a2")
        daemon, request = dispatcher(), uuid.uuid4()
        once, again = (daemon.claims([first, second], request=request) for _ in range(2))
        assert once == again
        assert [answer.get("skip_reason") for answer in again] == [None, "agent_paused"]
