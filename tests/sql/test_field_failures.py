"""What went wrong for others, tried on the functions. Numbers: docs/explanation/field-failures.md."""

import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from dispatcher.answers import Answer
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.model import ReportResult
from dispatcher.runtime.wakeup import DueTimes
from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed

Register = Callable[..., Dispatcher]


def asked_by(daemon: Dispatcher, reason: str, agent: uuid.UUID) -> list[dict[str, Any]]:
    """One question in each of the ways a wake can come about; the verdicts on this agent."""
    if reason == "sweep":
        answer = daemon.sweep(limit=1)
        return answer["claims"] + answer["skipped"]
    if reason == "report":
        return daemon.report(limit=1)["claims"]
    if reason == "operator":
        answer = daemon.call(
            "request_wake", p_tenant_id=DEFAULT_TENANT, p_gateway="local", p_agent="ada", p_dry_run=False, p_settings={}
        )
        return [answer]
    return [daemon.claim(agent, path=reason)]


@pytest.mark.parametrize("seed_of_mix", range(4))
def test_ff56_every_reason_meets_the_cooldown(
    database: Database, seed: Seed, dispatcher: Register, seed_of_mix: int
) -> None:
    """Twenty wakes for seven reasons within its cooldown: one run now, and one once it is over."""
    agent = seed.agent("ada")
    seed.items("ada", 3)
    daemon = dispatcher(wake_cooldown=60)
    reasons = ["event", "sweep", "waitlist", "due", "command", "report", "operator"] * 3
    random.Random(seed_of_mix).shuffle(reasons)
    grant = daemon.claim(agent)
    daemon.started(grant)
    database.execute("update agent_inbox_items set status = 'done', completed_at = now()")
    assert daemon.ended(grant)["state"] == "succeeded"
    for reason in reasons:
        seed.item("ada")
        asked_by(daemon, reason, agent)
    assert database.value("select count(*) from agent_wakes") == 1
    refused = daemon.claim(agent)
    assert refused["skip_reason"].startswith("cooldown(")
    assert 50 < refused["retry_in"] <= 60

    database.execute("update agent_wake_state set last_claimed_at = last_claimed_at - interval '61 seconds'")
    for reason in reasons:
        asked_by(daemon, reason, agent)
    assert database.value("select count(*) from agent_wakes") == 2


class ManualClock:
    """A clock that stands still unless told."""

    def monotonic(self) -> float:
        return 0.0


def test_ff63_agents_that_fail_together_back_off_and_do_not_return_together(
    database: Database, seed: Seed, dispatcher: Register
) -> None:
    """Ten agents whose runs end at once with "quota exceeded": few starts, growing waits from the end, spread."""
    agents = [seed.agent(f"a{number}") for number in range(10)]
    for number in range(10):
        seed.items(f"a{number}", 3)
    database.execute("update agent_inbox_items set created_at = now() - interval '10 hours'")
    daemon = dispatcher(wake_cooldown=30, max_concurrent_wakes=10)
    due: DueTimes[uuid.UUID] = DueTimes(ManualClock())  # type: ignore[arg-type]  # nothing asks it for the date
    decisions = Decisions(lambda _grant: None, due, draw=random.Random(1).random)
    starts, waits = 0, {agent: [] for agent in agents}
    for _ in range(6):
        for agent in agents:
            grant = daemon.claim(agent)
            if not grant["granted"]:
                continue
            starts += 1
            daemon.started(grant)
            busy = daemon.claim(agent)
            assert busy["skip_reason"] == "wake_in_flight"
            result = ReportResult.read(Answer.of("end_wake", daemon.ended(grant, exit_code=1) | {"report": "ended"}))
            decisions.after_end(result)
            waits[agent].append(result.retry_in)
        database.execute("update agent_wake_state set last_ended_at = last_ended_at - interval '1000 seconds'")
    assert starts == 50  # five failures each, then stalled: also within ten minutes no more than 60
    for agent in agents:
        assert waits[agent][-1] is None  # stalled: nothing but new context wakes it
        assert waits[agent][:-1] == pytest.approx([60, 120, 240, 480], abs=1)
    moments = sorted(at for at in due._due.values())
    assert len(set(moments)) == 10
    assert moments[0] >= 60
    assert moments[-1] - moments[0] > 3


def test_ff63_the_two_thousandth_failure_does_not_overflow(
    database: Database, seed: Seed, dispatcher: Register
) -> None:
    agent = seed.agent("ada")
    seed.items("ada", 2)
    daemon = dispatcher(wake_cooldown=30, max_consecutive_failures=5000)
    grant = daemon.claim(agent)
    daemon.started(grant)
    database.execute("update agent_wake_state set consecutive_failures = 1999")
    result = daemon.ended(grant, exit_code=1)
    assert (result["consecutive_failures"], result["retry_in"]) == (2000, pytest.approx(900, abs=1))


def test_ff62_a_wake_whose_report_raises_stops_no_other(database: Database, seed: Seed, dispatcher: Register) -> None:
    """One row of a batch that cannot be written is an answer of its own."""
    good, bad = seed.agent("good"), seed.agent("bad")
    seed.item("good"), seed.item("bad")
    daemon = dispatcher()
    grants = {agent: daemon.claim(agent) for agent in (good, bad)}
    database.execute(
        f"""create function sabotage() returns trigger language plpgsql as
            $$ begin if new.agent_id = '{bad}' then raise exception 'sabotaged'; end if; return new; end $$"""
    )
    database.execute("create trigger sabotage before update on agent_wakes for each row execute function sabotage()")
    reports = [
        {
            "report": "ended",
            "ending": "exited",
            "exit_code": 0,
            "wake_id": grant["wake_id"],
            "claim_token": grant["claim_token"],
        }
        for grant in (grants[bad], grants[good])
    ]
    answers = {answer["wake_id"]: answer for answer in daemon.report(*reports)["results"]}
    assert answers[grants[bad]["wake_id"]]["code"] == "error"
    assert answers[grants[good]["wake_id"]]["applied"] is True
