"""Workflow runs with the real daemon, the real PostgREST and Realtime, the agents' own command, and real signals."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, settings_for
from tests.support.daemon import PROGRAM, ROOT, base_environment
from tests.support.database import Database
from tests.support.gateway import scripted_gateway
from tests.support.waiting import wait_until as wait_for
from tests.support.workflows import Workflows

CLIENT = ROOT / "scripts" / "agent_workflow_client.py"
QUICK = {"WORKFLOW_POLL_INTERVAL": 0.5}
# Far beyond what anything here takes, and below the 30 s of a poll where a hint is what is waited for.
HINTED = 20.0
wait_until = partial(wait_for, deadline=40.0)


class World:
    """One gateway with its commands: what an operator and an agent would type."""

    def __init__(self, database: Database, api: Api, stub: StubAgent, folder: Path) -> None:
        self.api, self.stub, self.folder = api, stub, folder
        self.runs = Workflows(database)
        self.database = database
        self.environment = base_environment() | settings_for(api, stub) | {"HOME": str(folder)}

    def dispatcher(self, *arguments: str, code: int = 0) -> Any:
        done = self._run([*PROGRAM, *arguments, "--json"])
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout) if done.stdout else None

    def client(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        done = self._run([sys.executable, str(CLIENT), *arguments, "--json"], **environment)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert self.api.keys.service_role_key not in done.stdout + done.stderr
        return json.loads(done.stdout) if done.stdout else None

    def _run(self, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        env = self.environment | environment
        return subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        )

    def system_events(self) -> list[list[str]]:
        return [call["argv"] for call in self.stub.calls() if call["argv"][:2] == ["system", "event"]]

    def wakes(self) -> list[dict[str, Any]]:
        return [call for call in self.stub.calls() if call["argv"][:1] == ["agent"]]


@pytest.fixture
def world(database: Database, api: Api, stub_agent: StubAgent, tmp_path: Path) -> Iterator[World]:
    world = World(database, api, stub_agent, tmp_path)
    # Only the daemons of the test itself count as living.
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '1 hour'")
    yield world
    world.runs.close()


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_a_run_from_the_operators_command_to_its_end(world: World, start_daemon: StartDaemon) -> None:
    """The issue's first acceptance line; the poll interval is its default of 30 s, so the hint must do it."""
    daemon = start_daemon().ready()
    assert world.dispatcher("routing", "seed")["seeded"] == 8
    queued = world.dispatcher("runs", "enqueue", "code-change", "--input", '{"a":1}')
    run = queued["run_id"]
    wait_for(lambda: world.runs.status(run) == "dispatched", HINTED)
    [argv] = wait_until(world.system_events)
    assert argv[2:4] == ["--mode", "now"]
    assert option(argv, "--session-key") == "agent:code-change:main"
    text = option(argv, "--text")
    assert run in text
    assert "code-change" in text
    assert '"a"' not in text

    assert world.client("poll")["runs"][0]["id"] == run
    assert world.client("claim", run, "--session", "S")["run"]["input_payload"] == {"a": 1}
    world.client("claim", run, "--session", "T", code=3)
    assert world.client("heartbeat", run, "--session", "S")["status"] == "running"
    world.client("complete", run, "--session", "T", code=3)
    usage = ("--cost-usd", "0.12", "--input-tokens", "100", "--output-tokens", "20", "--model", "m")
    assert world.client("complete", run, "--session", "S", "--output", '{"pr": 1}', *usage)["status"] == "completed"
    assert world.client("complete", run, "--session", "S", "--output", '{"pr": 1}')["repeated"] is True
    world.client("claim", run, "--session", "S", code=3)
    world.client("heartbeat", str(uuid.uuid4()), "--session", "S", code=4)
    world.client("heartbeat", "no-uuid", "--session", "S", code=2)

    assert world.client("stats")["by_status"] == {"completed": 1}
    assert world.dispatcher("runs", "stats")["cost_last_24h_usd"] == 0.12
    shown = world.dispatcher("runs", "show", run)
    assert [event["to"] for event in shown["events"]] == ["dispatched", "claimed", "running", "completed"]
    assert world.database.value("select state from workflow_notifications") in ("sent", "obsolete")
    assert len(world.system_events()) == 1
    assert daemon.stop() == 0


def test_a_project_without_broadcast_hints_hears_of_runs_too(world: World, start_daemon: StartDaemon) -> None:
    world.runs.route()
    start_daemon(REALTIME_MODE="postgres_changes").ready()
    run = world.runs.run()
    wait_for(lambda: world.runs.status(run) == "dispatched", HINTED)


def test_a_notification_that_fails_is_tried_again_and_undoes_nothing(world: World, start_daemon: StartDaemon) -> None:
    world.stub.order(exit_code=1)
    world.runs.route()
    start_daemon(**QUICK)
    run = world.runs.run()
    wait_until(lambda: world.database.rows("select from workflow_notifications where state = 'pending' and tries = 1"))
    assert world.runs.status(run) == "dispatched"
    world.stub.order()
    world.database.execute("update workflow_notifications set next_try_at = now()")
    wait_until(lambda: world.database.value("select state from workflow_notifications") == "sent")
    assert len(world.system_events()) == 2


def test_every_gateway_tells_its_own_agents(world: World, start_daemon: StartDaemon, tmp_path: Path) -> None:
    other_stub = StubAgent(tmp_path / "other-stub")
    world.runs.seed.agent("ada", gateway="local")
    world.runs.seed.agent("bob", gateway="elsewhere")
    world.runs.route("for-ada", "ada"), world.runs.route("for-bob", "bob")
    start_daemon().ready()
    start_daemon(GATEWAY_ID="elsewhere", OPENCLAW_BIN=other_stub.path).ready()
    world.runs.run("for-ada"), world.runs.run("for-bob")
    [mine] = wait_until(world.system_events)
    [other] = wait_until(other_stub.calls)
    assert option(mine, "--session-key") == "agent:ada:main"
    assert option(other["argv"], "--session-key") == "agent:bob:main"


# ------------------------------------------------------------------------------------------- budgets


def test_a_hard_stop_ends_the_processes_and_sends_one_frame(world: World, start_daemon: StartDaemon) -> None:
    """ff59 and the frame: an official client hears of it once."""
    heard = listen_for_breaches(world)
    orphan(world, start_daemon)
    world.runs.done(cost=5)
    world.runs.budget(5, "hard_stop", name="All")
    [wake] = world.wakes()
    wait_until(lambda: not psutil.pid_exists(wake["pid"]) or psutil.Process(wake["pid"]).status() == "zombie")
    [run] = world.database.rows("select status, last_error from workflow_runs where status <> 'completed'")
    assert run["status"] == "cancelled"
    assert run["last_error"].startswith("Budget hard stop: All (")
    frames = wait_until(heard)
    wait_until(lambda: world.database.value("select state from agent_wakes") == "interrupted")
    assert [frame["event_kind"] for frame in frames] == ["hard_stopped"]


def test_c03_a_hard_stop_over_a_long_queue_lets_other_runs_go_out_meanwhile(
    world: World, start_daemon: StartDaemon
) -> None:
    world.runs.route(), world.runs.route("free", "ada")
    world.runs.done(cost=5)
    world.runs.budget(5, "hard_stop", "project", scope_id="code-change")
    world.database.execute(
        "insert into workflow_runs (workflow_type) select 'code-change' from generate_series(1, 20000)"
    )
    daemon = start_daemon().ready()
    wait_until(lambda: world.runs.statuses().get("cancelled", 0) > 0)
    free = world.runs.run("free")
    wait_until(lambda: world.runs.status(free) == "dispatched")
    assert world.runs.statuses().get("queued", 0) > 0
    wait_until(lambda: world.runs.statuses().get("cancelled") == 20_000)
    assert daemon.of("workflow.step_failed") == []
    assert sum(line["stopped"] for line in daemon.of("workflow.tick")) > 0


def listen_for_breaches(world: World) -> Callable[[], list[dict[str, Any]]]:
    """An official Realtime client in a process of its own; what it heard so far."""
    program = (
        "import asyncio, json, sys\n"
        "from realtime import AsyncRealtimeClient\n"
        "async def main():\n"
        "    client = AsyncRealtimeClient(sys.argv[1], sys.argv[2])\n"
        "    await client.connect()\n"
        "    plain = {'broadcast': {'ack': False, 'self': False}, 'presence': {'key': '', 'enabled': False}}\n"
        "    channel = client.channel('budgets', {'config': {'private': True, **plain}})\n"
        "    say = lambda what: print(json.dumps(what), flush=True)\n"
        "    channel.on_broadcast('budget:breach', lambda frame: say(frame['payload']))\n"
        "    await channel.subscribe(lambda state, error: say(str(state)))\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    url = world.api.url.replace("http", "ws") + "/realtime/v1"
    command = [sys.executable, "-c", program, url, world.api.keys.service_role_key]
    with (world.folder / "heard").open("wb") as output:
        LISTENERS.append(subprocess.Popen(command, stdout=output, env=base_environment() | {"HOME": str(world.folder)}))

    def lines() -> list[Any]:
        return [json.loads(line) for line in (world.folder / "heard").read_text().splitlines()]

    wait_until(lambda: any("SUBSCRIBED" in str(line) for line in lines()))
    return lambda: [line for line in lines() if isinstance(line, dict)]


LISTENERS: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def no_listener_survives(api: Api) -> Iterator[None]:
    yield
    while LISTENERS:
        listener = LISTENERS.pop()
        listener.kill()
        listener.wait()


def test_without_budget_tables_the_daemon_says_so_once_and_goes_on(world: World, start_daemon: StartDaemon) -> None:
    world.runs.route(max_concurrent=50)
    world.runs.budget(5)
    daemon = start_daemon(**QUICK, HEARTBEAT_INTERVAL=1)
    first = world.runs.run()
    wait_until(lambda: world.runs.status(first) == "dispatched")
    world.database.execute("drop table public.budget_events, public.budgets")
    for _ in range(3):
        run = world.runs.run()
        wait_until(lambda run=run: world.runs.status(run) == "dispatched")
    [line] = daemon.wait_for("budgets.failed_open")
    assert line["level"] == "error"
    health = daemon.directory / "heartbeat.json"
    wait_until(
        lambda: json.loads(health.read_text())["health"]["status"] == "degraded" and "Budgets" in health.read_text()
    )
    assert len(daemon.of("budgets.failed_open")) == 1
    assert daemon.of("workflow.step_failed") == []


# ------------------------------------------------------------------------------------------- silence and orphans


def orphan(world: World, start_daemon: StartDaemon, *, daemons: int = 1) -> tuple[str, list[Any]]:
    """A running run whose session died; its agent's new process hangs. Monitors look at once, as at any start."""
    world.stub.order(agents={"hq/coder": {"mode": "hang"}})
    run = silent_run(world)
    started = [start_daemon(**QUICK) for _ in range(daemons)]
    wait_until(world.wakes)
    return str(run), started


def silent_run(world: World) -> uuid.UUID:
    """A run that was claimed, and whose session has said nothing for long."""
    world.runs.seed.agent("coder")
    world.runs.route()
    run = world.runs.run()
    world.runs.tick()
    world.client("claim", str(run), "--session", "lost")
    world.client("heartbeat", str(run), "--session", "lost")
    world.runs.shift(run, "last_heartbeat_at", 400)
    return run


def test_an_orphan_is_spawned_once_by_however_many_daemons_and_restarts(
    world: World, start_daemon: StartDaemon
) -> None:
    run, [one, _two] = orphan(world, start_daemon, daemons=2)
    [wake] = world.wakes()
    message = option(wake["argv"], "--message")
    session = f"respawn-{wake['env']['DISPATCHER_WAKE_ID']}"
    assert message.startswith(f"[workflow] Resume run {run} (code-change)")
    assert session in message
    world.client("heartbeat", run, "--session", "lost", code=3)
    one.kill()
    # The child dies with nobody to see it; the run falls silent again within the same attempt.
    psutil.Process(wake["pid"]).kill()
    world.runs.shift(uuid.UUID(run), "last_heartbeat_at", 400)
    three = start_daemon(**QUICK)
    three.wait_for("sweep.finished")
    wait_until(lambda: world.database.value("select count(*) from agent_wakes where ended_at is null") == 0)
    assert len(world.wakes()) == 1
    assert world.database.value("select count(*) from workflow_respawns") == 1
    # The new session carries on and finishes it.
    assert world.client("complete", run, "--session", session, "--cost-usd", "0.5")["status"] == "completed"


def test_g1_an_orphan_waits_for_the_gateway_and_keeps_its_one_new_process(
    world: World, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    with scripted_gateway() as gateway:
        (tmp_path / "openclaw.json").write_text(json.dumps(gateway.config()))
        gateway.stop()
        start = partial(start_daemon, OPENCLAW_CONFIG_PATH=tmp_path / "openclaw.json")
        world.stub.order(agents={"hq/coder": {"mode": "hang"}})
        silent_run(world)
        daemon = start(**QUICK)
        daemon.wait_for("workflow.orphan_waits", reason="gateway_unavailable")
        assert world.database.value("select count(*) from workflow_respawns") == 0
        gateway.restart()
        wait_until(world.wakes)
        assert world.database.value("select count(*) from workflow_respawns") == 1


def test_a_run_over_its_deadline_is_timed_out_and_its_process_stopped(world: World, start_daemon: StartDaemon) -> None:
    run, [daemon] = orphan(world, start_daemon)
    [wake] = world.wakes()
    world.runs.shift(uuid.UUID(run), "deadline_at", 1)
    wait_until(lambda: world.runs.status(uuid.UUID(run)) == "timed_out")
    assert world.runs.row(uuid.UUID(run))["last_error"] == "Run exceeded timeout of 60 minutes"
    daemon.wait_for("workflow.process_stopped")
    wait_until(lambda: not psutil.pid_exists(wake["pid"]))
    wait_until(lambda: world.database.value("select state from agent_wakes") == "interrupted")
    world.client("heartbeat", run, "--session", f"respawn-{wake['env']['DISPATCHER_WAKE_ID']}", code=3)


def test_a_living_session_is_left_alone_and_an_unknown_one_too(world: World, start_daemon: StartDaemon) -> None:
    """OpenClaw's word: the stub fails the question, so nothing is known and nobody is spawned."""
    world.stub.order(exit_code=1)
    world.runs.seed.agent("coder")
    world.runs.route()
    run = world.runs.run()
    world.runs.tick()
    world.runs.claim(run), world.runs.heartbeat(run)
    world.runs.shift(run, "last_heartbeat_at", 400)
    daemon = start_daemon(**QUICK)
    daemon.wait_for("workflow.monitor_blind")
    assert world.wakes() == []
    assert world.runs.status(run) == "running"


def test_a_session_that_openclaw_lists_by_its_workspace_is_found_alive(world: World, start_daemon: StartDaemon) -> None:
    """Its agent is `coder` in the database and `hq-coder` in OpenClaw."""
    session = {"key": "agent:hq-coder:main", "agentId": "hq-coder", "sessionId": "s1", "ageMs": 3000}
    world.stub.order(sessions=[session])
    world.runs.seed.agent("coder")
    world.runs.route()
    run = world.runs.run()
    world.runs.tick()
    world.runs.claim(run, "s1"), world.runs.heartbeat(run, "s1")
    world.runs.shift(run, "last_heartbeat_at", 400)
    daemon = start_daemon(**QUICK)
    wait_until(lambda: [call for call in world.stub.events("end") if is_question(world, call)])
    daemon.stop()
    assert world.wakes() == []


def is_question(world: World, end: dict[str, Any]) -> bool:
    """Whether this is the end of a question for sessions."""
    return any(call["pid"] == end["pid"] and call["argv"][:1] == ["sessions"] for call in world.stub.calls())


def test_unclaimed_and_silent_runs_are_recovered_by_the_daemon(world: World, start_daemon: StartDaemon) -> None:
    world.runs.route(max_concurrent=5)
    unclaimed, claimed = world.runs.run(), world.runs.run()
    start_daemon(**QUICK, STALE_DISPATCH_SECONDS=1, STALE_CLAIM_SECONDS=2, MAX_DISPATCH_RETRIES=1)
    wait_until(lambda: world.runs.status(claimed) == "dispatched")
    world.client("claim", str(claimed), "--session", "dies")
    wait_until(lambda: world.runs.status(unclaimed) == "failed")
    assert world.runs.row(unclaimed)["last_error"] == "Dispatch retries exhausted after 2 attempts"
    told = [option(argv, "--text") for argv in world.system_events()]
    assert sum(str(unclaimed) in text for text in told) == 2
    wait_until(lambda: world.runs.row(claimed)["release_count"] == 1)


# ------------------------------------------------------------------------------------------- many daemons

# From the record of every transition, not from samples: how many runs were active at the same time at most.
MOST_AT_ONCE = """
    select max(active) from (
      select sum(change) over (order by at, change rows unbounded preceding) as active
        from (select at, (to_status = 'dispatched')::integer - (to_status = 'completed')::integer as change
                from workflow_run_events) as changes) as sums"""


def test_eight_daemons_one_slot_and_every_run_goes_out_once(world: World, start_daemon: StartDaemon) -> None:
    world.runs.route()
    ids = [world.runs.run() for _ in range(50)]
    for _ in range(8):
        start_daemon(**QUICK)
    most = 0

    def all_done() -> bool:
        nonlocal most
        active = world.database.rows(
            "select id from workflow_runs where status in ('dispatched', 'claimed', 'running')"
        )
        most = max(most, len(active))
        for row in active:
            if world.runs.claim(row["id"], str(row["id"]))["code"] == "ok":
                world.runs.complete(row["id"], str(row["id"]))
        return world.runs.statuses() == {"completed": 50}

    wait_for(all_done, 90)
    assert most == 1
    assert {world.runs.row(run)["dispatch_attempts"] for run in ids} == {1}
    assert world.database.value(MOST_AT_ONCE) == 1
