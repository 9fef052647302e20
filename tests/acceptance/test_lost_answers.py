"""The database did it and the daemon never heard of it: no second child, no wake left open, no slot lost."""

import signal

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

FAST = {"HEARTBEAT_INTERVAL": 0.5, "REST_TIMEOUT": 1, "WAKE_COOLDOWN": 0, "RECONCILE_INTERVAL": 3600}
SLOW_MACHINE = 30.0


def lose_answers_of(api: Api, function: str) -> None:
    """Every call of the function is carried out and its answer lost, repeats included."""
    api.faults(rest={"match": function, "lose_replies": -1})


def heal(api: Api) -> None:
    api.faults(rest={"match": "", "lose_replies": 0})


def test_a_claim_nobody_heard_of_is_given_back_and_made_again(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(**working_orders(api))
    daemon = start_daemon(**FAST).ready()
    lose_answers_of(api, "claim_wakes")
    item = seed.item("ada")
    wait_until(lambda: database.rows("select from agent_wakes where state = 'interrupted'"), SLOW_MACHINE)
    heal(api)
    done = "select attempt_count from agent_inbox_items where id = %s and status = 'done'"
    [row] = wait_until(lambda: database.rows(done, [item]), SLOW_MACHINE)
    assert row["attempt_count"] == 1
    wait_until(lambda: not database.rows("select from agent_wakes where ended_at is null"), SLOW_MACHINE)
    assert len(stub_agent.calls()) == 1
    assert database.value("select consecutive_failures from agent_wake_state") == 0
    assert daemon.of("wake.adoption_failed") == []


def test_an_adoption_nobody_heard_of_is_made_again_and_starts_no_second_child(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    seed.item("ada")
    stub_agent.order(mode="hang")
    first = start_daemon(**FAST).ready()
    first.wait_for("wake.started")
    wait_until(lambda: database.rows("select from agent_wakes where state = 'running'"), SLOW_MACHINE)
    [child] = stub_agent.living()
    first.kill()
    lose_answers_of(api, "adopt_wake")
    second = start_daemon(**FAST)
    second.wait_for("daemon.ready", deadline=SLOW_MACHINE)
    second.wait_for("wake.adoption_failed", times=2, deadline=SLOW_MACHINE)
    assert database.value("select state from agent_wakes") == "running"
    heal(api)
    second.wait_for("wake.adopted", deadline=SLOW_MACHINE)
    assert [call["pid"] for call in stub_agent.calls()] == [child.pid]
    # It is supervised: its end is noticed and reported at once.
    child.kill()
    second.wait_for("wake.ended", deadline=SLOW_MACHINE)
    wait_until(lambda: database.value("select ended_at from agent_wakes order by claimed_at limit 1"), SLOW_MACHINE)


def test_an_end_whose_answer_was_lost_still_says_when_the_agent_is_due(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """The sweep, an hour away here, would find it too; a lost answer must not cost that long."""
    seed.agent("ada")
    stub_agent.order(mode="exit", exit_code=1)
    daemon = start_daemon(**FAST | {"WAKE_COOLDOWN": 1}).ready()
    api.faults(rest={"match": "report_wakes", "lose_replies": 2})
    seed.item("ada")
    daemon.wait_for("wake.started", times=2, deadline=SLOW_MACHINE)
    assert database.value("select count(*) from agent_wakes where state = 'failed'") >= 1


def test_what_a_hanging_daemon_should_have_ended_is_ended_by_another(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    seed.item("ada")
    stub_agent.order(mode="hang")
    first = start_daemon(**FAST | {"INSTANCE_TIMEOUT": 2}).ready()
    first.wait_for("wake.started")
    wait_until(lambda: database.rows("select from agent_wakes where state = 'running'"), SLOW_MACHINE)
    [child] = stub_agent.living()
    first.process.send_signal(signal.SIGSTOP)
    second = start_daemon(**FAST | {"INSTANCE_TIMEOUT": 2, "RECONCILE_INTERVAL": 1, "AGENT_PROCESS_TIMEOUT": 1})
    second.wait_for("daemon.ready", deadline=SLOW_MACHINE)
    second.wait_for("sweep.finished", times=4, deadline=SLOW_MACHINE)
    assert child in stub_agent.living()  # silent is not dead: until its time is over the wake is its daemon's
    database.execute("update agent_wakes set deadline_at = now() where ended_at is null")
    wait_until(lambda: child not in stub_agent.living(), SLOW_MACHINE)
    state = "select state from agent_wakes order by claimed_at limit 1"
    wait_until(lambda: database.value(state) == "timed_out", SLOW_MACHINE)
    first.process.send_signal(signal.SIGCONT)
    # It notices that the wake is not its own any more, and goes on.
    wait_until(lambda: first.of("wake.ended") or first.of("lease.lost"), SLOW_MACHINE)
    assert first.stop() == 0
    assert database.value(state) == "timed_out"
