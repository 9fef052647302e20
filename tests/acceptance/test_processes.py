"""What happens to children: time-outs, whole trees, stops, and a daemon that dies."""

import signal
import time

import psutil
import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


def states(database: Database) -> dict[str, str]:
    """State of the newest wake of each agent."""
    rows = database.rows(
        """select distinct on (slug) slug, state from agent_wakes join agents on agents.id = agent_id
            order by slug, claimed_at desc"""
    )
    return {row["slug"]: row["state"] for row in rows}


def running(database: Database, stub: StubAgent) -> None:
    """Waits until one wake runs: the database knows it, and the child is past its start."""
    wait_until(lambda: database.value("select bool_or(state = 'running') from agent_wakes"), 20)
    wait_until(stub.calls, 10)


@pytest.mark.parametrize("escape", [False, True])
def test_ff34_a_tree_that_ignores_sigterm_is_gone_and_delays_nobody(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, escape: bool
) -> None:
    stub_agent.order(**working_orders(api, agents={"hq/bad": {"mode": "fork", "deaf": True, "escape": escape}}))
    seed.agent("bad"), seed.agent("good")
    daemon = start_daemon(AGENT_PROCESS_TIMEOUT=2, WAKE_COOLDOWN=0).ready()
    seed.item("bad")
    daemon.wait_for("wake.started", agent="bad")
    tree = wait_until(lambda: found if len(found := stub_agent.living()) == 2 else None, 5)
    for _ in range(3):
        item = seed.item("good")
        wait_until(
            lambda item=item: database.value("select status from agent_inbox_items where id = %s", [item]) == "done", 5
        )
    wait_until(lambda: not any(process.is_running() for process in tree), 2 + 10)
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'timed_out'") >= 1, 5)


def test_sigterm_with_two_children_gives_the_attempts_back(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada"), seed.item("bob")
    stub_agent.order(**working_orders(api, outcome="leased", seconds=600))
    daemon = start_daemon(SHUTDOWN_GRACE=1)
    wait_until(lambda: database.value("select count(*) from agent_inbox_items where status = 'leased'") == 2, 20)
    started = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - started < 1 + 10
    assert stub_agent.living() == []
    assert states(database) == {"ada": "interrupted", "bob": "interrupted"}
    items = database.rows("select status::text, attempt_count, leased_until from agent_inbox_items")
    assert items == [{"status": "pending", "attempt_count": 0, "leased_until": None}] * 2
    assert database.value("select sum(consecutive_failures) from agent_wake_state") == 0
    assert database.value("select state from dispatcher_instances") == "stopped"


@pytest.mark.parametrize("child_first", [True, False])
def test_c18_a_stop_that_signals_daemon_and_child_together_costs_no_attempt(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, child_first: bool
) -> None:
    """As systemd does it without KillMode=mixed: SIGTERM to the whole control group, in any order."""
    seed.item("ada")
    stub_agent.order(mode="hang")
    for restart in range(1, 4):
        daemon = start_daemon(SHUTDOWN_GRACE=5, WAKE_COOLDOWN=0)
        wait_until(lambda number=restart: len(stub_agent.calls()) == number, 20)
        child = psutil.Process(stub_agent.calls()[-1]["pid"])
        for target in (child, daemon.process) if child_first else (daemon.process, child):
            target.send_signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert states(database) == {"ada": "interrupted"}
    [item] = database.rows("select status::text, attempt_count from agent_inbox_items")
    assert item == {"status": "pending", "attempt_count": 0}
    assert database.value("select sum(consecutive_failures) from agent_wake_state") == 0


def test_children_that_end_within_the_grace_end_well(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada"), seed.item("ada")
    stub_agent.order(**working_orders(api, limit=1, seconds=1))
    daemon = start_daemon(SHUTDOWN_GRACE=20)
    daemon.wait_for("wake.started")
    assert daemon.stop() == 0
    assert states(database) == {"ada": "succeeded"}
    assert len(stub_agent.calls()) == 1


def test_a_second_signal_skips_the_grace(seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon) -> None:
    seed.item("ada")
    stub_agent.order(mode="hang")
    daemon = start_daemon(SHUTDOWN_GRACE=300)
    daemon.wait_for("wake.started")
    daemon.process.send_signal(signal.SIGINT)
    daemon.wait_for("daemon.stopping")
    assert daemon.stop(signal.SIGINT, deadline=20) == 0
    assert stub_agent.living() == []


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=["term", "int", "hangup", "quit"]
)
def test_c19_other_signals_that_stop_are_named_and_leave_no_child(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, number: signal.Signals
) -> None:
    seed.item("ada")
    stub_agent.order(mode="hang")
    daemon = start_daemon(SHUTDOWN_GRACE=1)
    daemon.wait_for("wake.started")
    running(database, stub_agent)
    daemon.process.send_signal(signal.SIGUSR1)
    daemon.wait_for("daemon.signal", signal="SIGUSR1")
    assert daemon.stop(number) == 0
    assert daemon.of("daemon.signal", signal=number.name)
    assert daemon.of("daemon.stopped")
    assert stub_agent.living() == []
    assert states(database) == {"ada": "interrupted"}


def test_c19_a_hangup_while_settings_are_awaited_is_a_line_and_0(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(WAIT_FOR_CONFIG="true", GATEWAY_ID="")
    daemon.wait_for("config.waiting")
    assert daemon.stop(signal.SIGHUP) == 0
    assert daemon.of("daemon.signal", signal="SIGHUP")


def test_ff38_a_chatty_child_and_one_that_reads_stdin_end_normally(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("chatty"), seed.item("reader")
    stub_agent.order(
        mode="exit", agents={"hq/chatty": {"mode": "chatty", "bytes": 5_000_000}, "hq/reader": {"mode": "read"}}
    )
    daemon = start_daemon()
    daemon.wait_for("wake.ended", times=2)
    assert {line["exit_code"] for line in daemon.of("wake.ended")} == {0}
    assert stub_agent.events("stdin")[0]["bytes"] == 0


def test_output_goes_to_one_bounded_file_per_wake(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: object
) -> None:
    seed.item("chatty")
    stub_agent.order(mode="chatty", bytes=5_000_000)
    daemon = start_daemon(AGENT_OUTPUT_DIR=f"{tmp_path}/output")
    daemon.wait_for("wake.ended")
    [file] = list((daemon.directory.parent / "output").iterdir())
    assert 0 < file.stat().st_size <= 1_100_000


def test_kill_9_and_a_restart_give_exactly_the_same_children(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    for agent in ("ada", "bob", "cat"):
        seed.item(agent)
    stub_agent.order(**working_orders(api, outcome="leased", seconds=600))
    first = start_daemon(MAX_CONCURRENT_WAKES=2, WAKE_COOLDOWN=0)
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'running'") == 2, 20)
    wait_until(lambda: len(stub_agent.living()) == 2, 20)
    before = {process.pid for process in stub_agent.living()}
    first.kill()

    second = start_daemon(MAX_CONCURRENT_WAKES=2, WAKE_COOLDOWN=0).ready()
    assert len(second.wait_for("wake.adopted", times=2)) == 2
    assert {process.pid for process in stub_agent.living()} == before
    # The cap holds: the third agent waits until an adopted child has ended, and is then woken.
    assert {call["argv"][2] for call in stub_agent.calls()} == {"hq/ada", "hq/bob"}
    stub_agent.living()[0].kill()
    second.wait_for("wake.started", agent="cat")
    wait_until(lambda: len(stub_agent.living()) == 2, 10)
    assert database.value("select count(*) from agent_wakes where state = 'lost'") == 0


def test_kill_9_with_the_children_dead_gives_lost_and_a_new_wake(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada")
    stub_agent.order(mode="hang")
    first = start_daemon()
    running(database, stub_agent)
    first.kill()
    stub_agent.kill_all()
    start_daemon(WAKE_COOLDOWN=0).ready()
    wait_until(lambda: len(stub_agent.calls()) == 2, 20)
    assert database.value("select count(*) from agent_wakes where state = 'lost'") == 1
    assert database.value("select consecutive_failures from agent_wake_state") == 0


def test_ff64_a_crash_between_spawn_and_save_is_found_by_the_marker(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """The database forgets what the daemon reported, as if it had died before."""
    seed.item("ada")
    stub_agent.order(mode="hang")
    first = start_daemon()
    running(database, stub_agent)
    first.kill()
    database.execute(
        """update agent_wakes set state = 'starting', pid = null, pid_started_at = null,
                  host_id = null, started_at = null"""
    )
    [child] = stub_agent.living()
    second = start_daemon(WAKE_COOLDOWN=0).ready()
    [adopted] = second.wait_for("wake.adopted")
    assert adopted["pid"] == child.pid
    assert len(stub_agent.calls()) == 1


def test_ff45_wakes_of_a_dead_daemon_are_taken_over_by_a_living_one(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(mode="hang")
    first = start_daemon(HEARTBEAT_INTERVAL=1, INSTANCE_TIMEOUT=4).ready()
    seed.item("ada")
    running(database, stub_agent)
    second = start_daemon(HEARTBEAT_INTERVAL=1, INSTANCE_TIMEOUT=4, SHUTDOWN_GRACE=0).ready()
    assert second.of("wake.adopted") == []
    first.kill()
    second.wait_for("wake.adopted")
    assert len(stub_agent.calls()) == 1
    second.stop()
    assert stub_agent.living() == []
    assert states(database) == {"ada": "interrupted"}


def test_ff35_a_recycled_pid_is_neither_adopted_nor_signalled(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada")
    stub_agent.order(mode="hang")
    first = start_daemon()
    running(database, stub_agent)
    first.kill()
    stub_agent.kill_all()
    innocent = psutil.Popen(["sleep", "300"])
    try:
        database.execute("update agent_wakes set pid = %s", [innocent.pid])
        start_daemon(WAKE_COOLDOWN=0).ready()
        wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'lost'") == 1, 10)
        assert innocent.is_running()
    finally:
        innocent.kill()
        innocent.wait()


def test_ff46_a_child_that_kills_its_daemon_ends_as_dead_letter(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: object
) -> None:
    poison = stub_agent.path.with_name("poison")
    poison.write_text('#!/bin/sh\ncase "$*" in *hq/poison*) echo x >> "$0.log"; kill -9 $PPID;; esac\nexit 0\n')
    poison.chmod(0o755)
    seed.item("poison")
    for _ in range(5):
        daemon = start_daemon(OPENCLAW_BIN=poison, WAKE_COOLDOWN=0)
        try:
            wait_until(lambda daemon=daemon: daemon.process.poll() is not None, 6)
        except AssertionError:
            break
        daemon.wait()
    assert poison.with_name("poison.log").read_text().count("x") == 3
    row = database.row(
        "select status::text, attempt_count, context ->> 'last_failure_reason' as reason from agent_inbox_items"
    )
    assert row == {"status": "dead_letter", "attempt_count": 3, "reason": "worker lost"}
    seed.item("other")
    daemon.wait_for("wake.started", agent="other")


def test_g1_a_missing_binary_while_running_is_nobodys_failure_and_work_goes_on_with_the_next_one(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    daemon = start_daemon().ready()
    away = working_agent.path.rename(working_agent.path.with_suffix(".away"))
    seed.item("ada")
    [line] = daemon.wait_for("wake.spawn_failed")
    assert "openclaw" in line["error"]
    wait_until(lambda: states(database) == {"ada": "interrupted"}, 5)
    assert database.value("select consecutive_failures from agent_wake_state") == 0
    assert database.value("select attempt_count from agent_inbox_items") == 0
    seed.item("ada")  # news, and yet nobody is woken for nothing
    daemon.wait_for("health.changed", status="degraded")
    assert len(daemon.of("wake.spawn_failed")) == 1
    away.rename(working_agent.path)
    wait_until(lambda: database.value("select count(*) from agent_inbox_items where status <> 'done'") == 0, 20)
