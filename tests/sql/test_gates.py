"""Every gate in its order, and what a grant carries."""

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.database import Database
from tests.support.seed import Seed

pytestmark = pytest.mark.kept_database


def ago(**delta: float) -> datetime:
    return datetime.now(UTC) - timedelta(**delta)


def test_a_grant_carries_everything_a_spawn_needs(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    task, first, second = seed.task("Ship it"), seed.task("Design mockups"), seed.task("API review")
    for target in (first, second):
        seed.insert("task_relations", source_task_id=task, target_task_id=target, relation_type="blocked_by")
    done = seed.task("Done already", status="done")
    seed.insert("task_relations", source_task_id=task, target_task_id=done, relation_type="blocked_by")
    item = seed.item("ada", task_id=task, summary="Ship", context={"model_override": "m1", "thinking_override": 7})

    grant = dispatcher().claim(agent, item)

    assert grant["granted"] is True
    assert (grant["agent_slug"], grant["workspace_slug"], grant["summary"]) == ("ada", "hq", "Ship")
    assert (grant["model_override"], grant["thinking_override"]) == ("m1", 7)
    assert grant["blockers"] == ["Design mockups", "API review"]
    wake = database.row("select state, path, item_ids, model_override, thinking_override from agent_wakes")
    assert wake == {
        "state": "starting",
        "path": "event",
        "item_ids": [item],
        "model_override": "m1",
        "thinking_override": None,
    }


def test_the_sweep_runs_an_agent_on_the_overrides_of_its_oldest_item(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    newer = seed.item("ada", context={"model_override": "newer"}, created_at=ago(minutes=1))
    oldest = seed.item("ada", context={"model_override": "older"}, created_at=ago(minutes=9))
    grant = dispatcher().claim(agent, path="sweep")
    assert (grant["model_override"], grant["item_ids"]) == ("older", [str(oldest), str(newer)])


@pytest.mark.parametrize("status", ["paused", "hibernating"])
def test_a_paused_agent_sleeps(seed: Seed, dispatcher, status: str) -> None:
    agent = seed.agent("ada", status=status)
    seed.item("ada")
    assert dispatcher().claim(agent)["skip_reason"] == "agent_paused"


def test_an_active_lease_and_its_end(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item(
        "ada",
        status="leased",
        leased_at=ago(seconds=5),
        leased_until=datetime.now(UTC) + timedelta(minutes=1),
    )
    refused = dispatcher().claim(agent)
    assert refused["skip_reason"] == "active_lease"
    assert 0 < refused["retry_in"] <= 60


def test_an_expired_lease_with_attempts_left_is_work(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada", status="leased", leased_at=ago(minutes=5), leased_until=ago(minutes=3), attempt_count=1)
    assert dispatcher().claim(agent)["granted"] is True


def test_no_work(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada", status="done")
    seed.item("ada", status="failed", failed_at=ago(hours=9), attempt_count=3)
    assert dispatcher().claim(agent)["skip_reason"] == "no_actionable_work"


@pytest.mark.parametrize(("attempt", "delay"), [(1, 30), (2, 60), (3, 120), (9, 900)])
def test_a_failed_item_rests_longer_after_each_attempt(seed: Seed, dispatcher, attempt: int, delay: int) -> None:
    agent = seed.agent("ada")
    seed.item("ada", status="failed", failed_at=ago(seconds=1), attempt_count=attempt, max_attempts=99)
    refused = dispatcher().claim(agent)
    assert refused["skip_reason"] == "no_actionable_work"
    assert delay - 10 < refused["retry_in"] < delay


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"status": "exceeded", "current_period_start": "month"}, "budget_exceeded"),
        ({"status": "exceeded", "current_period_start": "earlier"}, None),
        ({"status": "exceeded", "current_period_start": "month", "hard_cutoff": False}, None),
        ({"status": "warned", "current_period_start": "month", "monthly_limit_usd": 11}, None),
        ({"status": "warned", "current_period_start": "month", "monthly_limit_usd": None}, None),
        ({"status": "exceeded", "current_period_start": "month", "monthly_limit_usd": 99}, None),
        (
            {"status": "exceeded", "current_period_start": "month", "period_anchor_tz": "No/Where"},
            "budget_exceeded",
        ),
        (
            {"status": "exceeded", "current_period_start": "month", "monthly_limit_usd": None},
            "budget_exceeded",
        ),
    ],
)
def test_the_budget(seed: Seed, dispatcher, columns: dict, reason: str | None) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    month = datetime.now(UTC).date().replace(day=1)
    start = {"month": month, "earlier": month - timedelta(days=1)}[columns.pop("current_period_start")]
    limit = columns.pop("monthly_limit_usd", 10)
    seed.insert(
        "agent_budgets",
        agent_id=agent,
        monthly_limit_usd=limit,
        current_period_spend_usd=10,
        current_period_start=start,
        **columns,
    )
    assert dispatcher().claim(agent).get("skip_reason") == reason


@pytest.mark.parametrize("status", ["ok", "warned", "exceeded"])
@pytest.mark.parametrize(("spent", "reason"), [(9.99, None), (10, "budget_exceeded"), (12, "budget_exceeded")])
def test_m28_what_is_spent_blocks_whatever_the_status_says(
    seed: Seed, dispatcher, status: str, spent: float, reason: str | None
) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    seed.insert(
        "agent_budgets",
        agent_id=agent,
        status=status,
        monthly_limit_usd=10,
        current_period_spend_usd=spent,
        current_period_start=datetime.now(UTC).date().replace(day=1),
    )
    assert dispatcher().claim(agent).get("skip_reason") == reason


def test_the_cooldown_counts_from_the_start_of_a_good_wake(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    item = seed.item("ada")
    daemon = dispatcher(wake_cooldown=30)
    grant = daemon.claim(agent, item)
    database.execute("update agent_inbox_items set status = 'done', completed_at = now() where id = %s", [item])
    assert daemon.ended(grant)["state"] == "succeeded"
    seed.item("ada")
    refused = daemon.claim(agent)
    assert refused["skip_reason"] in ("cooldown(30s)", "cooldown(29s)")
    assert 0 < refused["retry_in"] <= 30


def test_a_failure_doubles_the_cooldown_from_its_end_and_a_new_item_takes_it_back(
    database: Database, seed: Seed, dispatcher
) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    daemon = dispatcher(wake_cooldown=30)
    ended = daemon.ended(daemon.claim(agent), exit_code=1)
    assert (ended["state"], ended["consecutive_failures"]) == ("failed", 1)
    database.execute("update agent_wake_state set last_claimed_at = last_claimed_at - interval '50 seconds'")
    refused = daemon.claim(agent)
    assert refused["skip_reason"] in ("cooldown(60s)", "cooldown(59s)")
    assert refused["failures"] == 1
    seed.item("ada")
    refused = daemon.claim(agent)
    assert refused["skip_reason"] in ("cooldown(30s)", "cooldown(29s)")
    assert refused["failures"] == 0


def test_the_cooldown_has_a_ceiling_and_does_not_overflow(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    item = seed.item("ada")
    daemon = dispatcher(wake_cooldown=30, max_consecutive_failures=5000)
    daemon.ended(daemon.claim(agent, item), exit_code=1)
    database.execute("update agent_wake_state set consecutive_failures = 2000")
    assert 890 < daemon.claim(agent)["retry_in"] <= 900


def test_the_first_closed_gate_names_the_refusal(database: Database, seed: Seed, dispatcher) -> None:
    """Opened one by one, in the order of the table."""
    agent = seed.agent("ada", status="paused")
    item = seed.item(
        "ada", status="leased", leased_at=ago(seconds=1), leased_until=datetime.now(UTC) + timedelta(hours=1)
    )
    seed.insert(
        "agent_budgets",
        agent_id=agent,
        status="exceeded",
        monthly_limit_usd=1,
        current_period_spend_usd=1,
        current_period_start=datetime.now(UTC).date().replace(day=1),
    )
    daemon = dispatcher(wake_cooldown=60, max_concurrent_wakes=1)
    other = daemon.claim(seed.agent("bob"), seed.item("bob"))
    wake = uuid.uuid4()
    database.execute(
        """insert into agent_wakes (id, tenant_id, agent_id, gateway_id, path, deadline_at)
           select %s, tenant_id, id, gateway_id, 'sweep', now() from agents where slug = 'ada'""",
        [wake],
    )
    database.execute(
        """insert into agent_wake_state (agent_id, tenant_id, consecutive_failures, last_claimed_at)
           select id, tenant_id, 5, now() from agents where slug = 'ada'""",
    )
    seen = []
    for opening in (
        "update agent_wake_state set consecutive_failures = 0",
        "update agent_wakes set state = 'lost', ended_at = now() from agents a where a.id = agent_id and slug = 'ada'",
        "update agents set status = 'ready' where slug = 'ada'",
        "update agent_inbox_items set leased_until = now() - interval '1 s', max_attempts = 0 where agent_slug = 'ada'",
        "update agent_budgets set monthly_limit_usd = 100",
        "update agent_inbox_items set max_attempts = 3 where agent_slug = 'ada'",
        "update agent_wake_state set last_claimed_at = now() - interval '1 hour'",
    ):
        seen.append(daemon.claim(agent)["skip_reason"].partition("(")[0])
        database.execute(opening)
    seen.append(daemon.claim(agent)["skip_reason"])
    assert seen == [
        "stalled",
        "wake_in_flight",
        "agent_paused",
        "active_lease",
        "budget_exceeded",
        "no_actionable_work",
        "cooldown",
        "concurrency_limit",
    ]
    assert daemon.ended(other, "interrupted")["applied"]
    assert daemon.claim(agent, item)["granted"] is True


def test_an_agent_of_another_gateway_or_tenant_is_not_touched(database: Database, seed: Seed, dispatcher) -> None:
    seed.item("theirs", agent_id=seed.agent("theirs", gateway="other"), agent_slug="theirs")
    theirs = database.value("select id from agents where slug = 'theirs'")
    assert dispatcher().claim(theirs)["skip_reason"] == "not_local"
    assert database.rows("select from agent_wakes") == []
    assert database.value("select last_wake_attempt_at from agent_inbox_items") is None


def test_the_daily_limit(database: Database, seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    daemon = dispatcher(max_wakes_per_day=2)
    for _ in range(2):
        item = seed.item("ada")
        grant = daemon.claim(agent, item)
        database.execute("update agent_inbox_items set status = 'done' where id = %s", [item])
        daemon.ended(grant)
    seed.item("ada")
    refused = daemon.claim(agent)
    assert refused["skip_reason"] == "daily_limit"
    assert 0 < refused["retry_in"] <= 86_400


@pytest.mark.own_database
@pytest.mark.faults_expected
def test_one_agent_whose_gates_raise_does_not_stop_the_others(database: Database, seed: Seed, dispatcher) -> None:
    """Field failure 62."""
    bad, good = seed.agent("bad"), seed.agent("good")
    seed.item("bad"), seed.item("good")
    database.execute(
        """create function public.break_one() returns trigger language plpgsql as $$
           begin
             if new.agent_id = (select id from public.agents where slug = 'bad') then raise 'broken agent'; end if;
             return new;
           end $$"""
    )
    database.execute("create trigger break_one before insert on agent_wakes for each row execute function break_one()")
    daemon = dispatcher()
    broken, fine = daemon.claims([bad, good])
    assert (broken["skip_reason"], broken["error"]) == ("error", "broken agent")
    assert fine["granted"] is True
    daemon.ended(fine, "interrupted")
    swept = daemon.sweep(limit=2)
    assert [claim["granted"] for claim in swept["claims"] if claim["agent_id"] == str(good)] == [True]
    assert [claim["error"] for claim in swept["claims"] if claim["agent_id"] == str(bad)] == ["broken agent"]


@pytest.mark.own_database
def test_blockers_that_cannot_be_looked_up_do_not_stop_the_wake(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada", task_id=seed.task())
    database.execute("alter table task_relations rename to task_relations_away")
    grant = dispatcher().claim(agent, item)
    assert grant["granted"] is True
    assert "task_relations" in grant["blockers_error"]
