"""Two sessions at once, for everything that claims."""

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.kept_database


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Runs every call in a thread of its own, released together; answers in order."""
    gate = threading.Barrier(len(calls))
    answers: list[Any] = [None] * len(calls)

    def run(number: int, call: Callable[[], Any]) -> None:
        gate.wait()
        answers[number] = call()

    threads = [threading.Thread(target=run, args=(number, call)) for number, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_two_daemons_claiming_one_agent_get_one_grant(seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemons = [dispatcher(max_concurrent_wakes=9) for _ in range(6)]
    answers = at_once([lambda daemon=daemon: daemon.claim(agent, item) for daemon in daemons])
    assert sorted(answer["granted"] for answer in answers) == [False] * 5 + [True]
    assert {answer.get("skip_reason") for answer in answers} == {None, "wake_in_flight"}


def test_ff47_the_cap_is_exact_under_parallel_claims(database: Database, seed: Seed, dispatcher) -> None:
    agents = [seed.agent(f"a{number}") for number in range(8)]
    for number in range(8):
        seed.item(f"a{number}")
    daemons = [dispatcher(max_concurrent_wakes=1) for _ in range(8)]
    answers = at_once([lambda d=daemon, a=agent: d.claim(a) for daemon, agent in zip(daemons, agents, strict=True)])
    assert sum(answer["granted"] for answer in answers) == 1
    assert database.value("select count(*) from agent_wake_state where waitlisted_at is not null") == 7
    [winner] = [answer for answer in answers if answer["granted"]]
    daemon = daemons[answers.index(winner)]
    outcome = daemon.report(
        {
            "report": "ended",
            "wake_id": winner["wake_id"],
            "claim_token": winner["claim_token"],
            "ending": "interrupted",
        },
        limit=5,
    )
    assert sum(claim["granted"] for claim in outcome["claims"]) == 1


def test_ff47_a_claim_waits_for_the_open_transaction_of_another(database: Database, seed: Seed, dispatcher) -> None:
    """A grant that is not yet committed counts against the cap all the same."""
    first, second = seed.agent("a1"), seed.agent("a2")
    seed.item("a1"), seed.item("a2")
    slow, fast = dispatcher(max_concurrent_wakes=1), dispatcher(max_concurrent_wakes=1)
    slow.connection.autocommit = False
    assert slow.claim(first)["granted"] is True
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(fast.claim(second)))
    waiting.start()
    wait_until(
        lambda: database.value("select count(*) from pg_stat_activity where wait_event_type = 'Lock'") == 1,
        deadline=5,
    )
    slow.connection.commit()
    waiting.join(5)
    assert answers[0]["skip_reason"] == "concurrency_limit"


def test_ff28_a_repeated_request_gets_the_same_grant(database: Database, seed: Seed, dispatcher) -> None:
    agent, item = seed.agent("ada"), seed.item("ada")
    daemon, request = dispatcher(), uuid.uuid4()
    first, again = (daemon.claim(agent, item, request=request) for _ in range(2))
    assert first == again
    assert database.value("select count(*) from agent_wakes") == 1
    assert database.value("select attempt_count from agent_inbox_items") == 0


def test_two_ends_of_one_wake_count_once(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    one, two = dispatcher(), dispatcher()
    grant = one.claim(agent)
    answers = at_once([lambda: one.ended(grant, exit_code=1), lambda: two.ended(grant, exit_code=1)])
    # The second waits for nobody: it meets the rows held and is to ask again, or comes after.
    assert sorted(answer["code"] for answer in answers) in (["already", "ok"], ["busy", "ok"])
    assert one.ended(grant, exit_code=1)["code"] == "already"
    assert [answer["consecutive_failures"] for answer in answers if answer["applied"]] == [1]


def test_two_adopters_of_one_wake_and_the_old_owner_is_fenced(seed: Seed, dispatcher) -> None:
    agent = seed.agent("ada")
    seed.item("ada")
    old, one, two = dispatcher(), dispatcher(), dispatcher()
    grant = old.claim(agent)
    old.started(grant)

    def adopt(daemon: Any) -> Any:
        return daemon.call(
            "adopt_wake",
            p_instance_id=daemon.id,
            p_wake_id=grant["wake_id"],
            p_claim_token=grant["claim_token"],
            p_host_id="h",
            p_pid=1,
            p_pid_started_at=1.0,
        )

    answers = at_once([lambda: adopt(one), lambda: adopt(two)])
    assert sorted(answer["applied"] for answer in answers) == [False, True]
    assert old.ended(grant)["code"] == "fence_lost"
    assert old.heartbeat(grant)["fenced"] == [grant["wake_id"]]
    [winner] = [answer for answer in answers if answer["applied"]]
    assert one.ended({**grant, "claim_token": winner["claim_token"]}, exit_code=1)["applied"] is True


def test_two_sweeps_at_once_wake_each_agent_once(database: Database, seed: Seed, dispatcher) -> None:
    for number in range(20):
        seed.item(f"a{number}")
    daemons = [dispatcher(max_concurrent_wakes=3) for _ in range(2)]
    answers = at_once([lambda daemon=daemon: daemon.sweep(limit=3) for daemon in daemons])
    granted = [claim for answer in answers for claim in answer["claims"] if claim["granted"]]
    assert len(granted) == 3
    assert len({claim["agent_id"] for claim in granted}) == 3
    assert all(answer["errors"] == [] for answer in answers)


def test_claims_reports_and_sweeps_of_many_sessions_never_deadlock(database: Database, seed: Seed, dispatcher) -> None:
    agents = [seed.agent(f"a{number}") for number in range(6)]
    for _ in range(4):
        for number in range(6):
            seed.item(f"a{number}")
    daemons = [dispatcher(max_concurrent_wakes=3) for _ in range(5)]

    def live_a_life(daemon: Any) -> int:
        granted = 0
        for turn in range(12):
            for answer in [*daemon.claims(agents), *daemon.sweep(limit=2)["claims"]]:
                if answer["granted"]:
                    granted += 1
                    daemon.started(answer)
                    daemon.ended(answer, "interrupted" if turn % 2 else "exited", limit=1)
        return granted

    assert sum(at_once([lambda daemon=daemon: live_a_life(daemon) for daemon in daemons])) > 0
    most = database.value(
        """select max(live) from (select (select count(*) from agent_wakes b where b.claimed_at <= a.claimed_at
             and (b.ended_at is null or b.ended_at > a.claimed_at)) as live from agent_wakes a) x"""
    )
    assert most <= 3


DELETES_BEFORE_THE_WAKE_IS_WRITTEN = """
    create or replace function dispatcher.items_of_claim(p_facts dispatcher.gate_facts) returns uuid[]
    language plpgsql volatile as $$
    begin
      delete from public.agent_inbox_items where id = any (p_facts.due_item_ids) and agent_slug = 'ada';
      return p_facts.due_item_ids;
    end $$"""


@pytest.mark.own_database
@pytest.mark.parametrize("way", ["claim", "report", "sweep"])
def test_c11_an_item_deleted_while_its_agent_is_claimed_costs_no_other_claim(
    database: Database, seed: Seed, dispatcher, way: str
) -> None:
    ada, bob = seed.agent("ada"), seed.agent("bob")
    seed.item("ada"), seed.item("bob")
    daemon = dispatcher()
    daemon.sweep()
    database.execute(DELETES_BEFORE_THE_WAKE_IS_WRITTEN)  # as another session that commits between two statements
    answers = {
        "claim": lambda: daemon.claims([bob, ada]),
        "report": lambda: daemon.report(limit=5)["claims"],
        "sweep": lambda: daemon.phase("claims", limit=5)["claims"],
    }[way]()
    assert {answer["agent_slug"]: answer["granted"] for answer in answers} == {"ada": False, "bob": True}
    assert [answer["skip_reason"] for answer in answers if not answer["granted"]] == ["busy"]
    assert database.value("select count(*) from agent_wakes") == 1
    memory = database.row("select last_wake_id, last_claimed_at from agent_wake_state where agent_id = %s", [ada])
    assert memory == {"last_wake_id": None, "last_claimed_at": None}
