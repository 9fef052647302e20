"""The main job, by the real code path: a row is inserted, `openclaw agent` starts."""

import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import httpx
import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.support.daemon import ROOT, base_environment
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

MESSAGE = """[inbox] {reason}

Process your inbox:
1. python3 skills/hq/scripts/hq_inbox_process.py
2. Handle each item, then mark done or escalate
3. Continue until inbox is empty or batch limit reached"""


def post_item(api: Api, database: Database, agent: str, **columns: object) -> str:
    """Inserts an item as an application does: over HTTP, with the service key."""
    row = {
        "agent_id": str(database.value("select id from agents where slug = %s", [agent])),
        "agent_slug": agent,
        "event_type": "task_comment_mention",
        "summary": "Say hello",
        "dedup_key": f"post:{uuid.uuid4()}",
        **columns,
    }
    headers = {"apikey": api.keys.service_role_key, "Prefer": "return=representation"}
    answer = httpx.post(f"{api.url}/rest/v1/agent_inbox_items", json=row, headers=headers, trust_env=False)
    answer.raise_for_status()
    return answer.json()[0]["id"]


def script(name: str, api: Api, *arguments: str, home: Path) -> dict:
    """Runs an agent's script as the agent `ada` does."""
    environment = base_environment() | {
        "SUPABASE_URL": api.url,
        "SUPABASE_SERVICE_ROLE_KEY": api.keys.service_role_key,
        "AGENT_SLUG": "ada",
        "OPENCLAW_HOME": str(home),
        "HOME": str(home),
    }
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return json.loads(done.stdout) if done.stdout.strip().startswith("{") else {}


def test_a_posted_row_starts_openclaw_once_and_the_agent_finishes_it(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    seed.agent("ada")
    start_daemon().ready()

    item = post_item(api, database, "ada")

    [call] = wait_until(stub_agent.calls, 5)
    assert call["argv"] == [
        "agent",
        "--agent",
        "hq/ada",
        "--json",
        "--message",
        MESSAGE.format(reason="New: Say hello"),
    ]
    assert call["sid"] == call["pid"] == call["pgid"]
    assert call["stdin"] == "/dev/null"
    assert call["env"]["OPENCLAW_NO_RESPAWN"] == "1"
    assert api.keys.service_role_key not in json.dumps(call["env"])
    wait_until(lambda: database.value("select last_wake_success_at from agent_inbox_items"), 5)
    assert database.value("select last_wake_attempt_at <= last_wake_success_at from agent_inbox_items")

    leased = script("hq_inbox_process.py", api, home=tmp_path)
    assert leased["items"][0]["inbox_item_id"] == item
    script("hq_inbox_done.py", api, item, home=tmp_path)
    assert database.value("select status from agent_inbox_items") == "done"
    assert len(stub_agent.calls()) == 1


@pytest.mark.parametrize("path", ["event", "sweep", "waitlist"])
def test_overrides_and_blockers_whatever_the_path(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, path: str
) -> None:
    task = seed.task("Ship it")
    for title in ("Design mockups", "API schema review"):
        seed.insert("task_relations", source_task_id=task, target_task_id=seed.task(title), relation_type="blocked_by")
    seed.agent("ada"), seed.agent("bob")
    stub_agent.order(mode="exit", seconds=1.0 if path == "waitlist" else 0)
    columns = {
        "event_type": "task_assignment",
        "task_id": task,
        "summary": "Ship it",
        "context": {"model_override": "openai/gpt-5", "thinking_override": "high"},
    }
    if path == "sweep":
        seed.item("ada", **columns)
    daemon = start_daemon(MAX_CONCURRENT_WAKES=1).ready()
    if path == "waitlist":
        seed.item("bob")
        daemon.wait_for("wake.started", agent="bob")
    if path != "sweep":
        seed.item("ada", **columns)
    daemon.wait_for("wake.started", agent="ada", path=path)
    [call] = wait_until(lambda: [c for c in stub_agent.calls() if "hq/ada" in c["argv"]], 5)
    reason = {
        "event": "New: Ship it",
        "sweep": "Reconciliation: pending inbox items found",
        "waitlist": "Concurrency slot freed: queued inbox items",
    }[path]
    note = (
        "\nNote: This task has 2 unresolved blocker(s): Design mockups, API schema review."
        "\nConsider working on unblocked tasks first or doing preparatory work."
    )
    assert call["argv"] == [
        *("agent", "--agent", "hq/ada", "--model", "openai/gpt-5", "--thinking", "high", "--json", "--message"),
        MESSAGE.format(reason=reason + note),
    ]


def test_an_override_of_another_type_is_ignored_with_one_warning(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada", context={"model_override": 7})
    daemon = start_daemon().ready()
    [call] = wait_until(stub_agent.calls, 5)
    assert "--model" not in call["argv"]
    assert len(daemon.of("wake.override_ignored")) == 1


def test_the_id_of_openclaw_json_wins(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    home = tmp_path / "oc"
    home.mkdir()
    (home / "openclaw.json").write_text("{agents: {entries: {'hq-ada': {}, 'other-ada': {}}}} // JSON5")
    seed.item("ada"), seed.item("bob")
    start_daemon(OPENCLAW_HOME=home).ready()
    wait_until(lambda: len(stub_agent.calls()) == 2, 5)
    assert {call["argv"][2] for call in stub_agent.calls()} == {"hq-ada", "hq/bob"}


def test_an_id_openclaw_would_turn_into_main_is_refused_before_the_spawn(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.workspace(None)
    database.execute("update workspace set slug = null")
    seed.item("!!!")
    daemon = start_daemon()
    daemon.wait_for("wake.spawn_failed", agent="!!!")
    wait_until(lambda: database.value("select state from agent_wakes") == "spawn_failed", 5)
    assert database.value("select attempt_count from agent_inbox_items") == 0
    assert stub_agent.calls() == []


def test_two_daemons_never_double_an_agent_nor_pass_the_cap(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """200 items for 20 agents at once; the children themselves say when they lived."""
    for number in range(20):
        seed.agent(f"a{number}")
    stub_agent.order(**working_orders(api, seconds=0.05))
    daemons = [start_daemon(MAX_CONCURRENT_WAKES=3, WAKE_COOLDOWN=0) for _ in range(2)]
    for daemon in daemons:
        daemon.ready()
    inserters = [threading.Thread(target=insert_for_all, args=(database, turn)) for turn in range(10)]
    for inserter in inserters:
        inserter.start()
    for inserter in inserters:
        inserter.join()
    wait_until(
        lambda: database.value("select count(*) from agent_inbox_items where status <> 'done'") == 0, 60, poll=0.1
    )
    wait_until(lambda: database.value("select count(*) from agent_wakes where ended_at is null") == 0, 20)
    assert {call["argv"][2] for call in stub_agent.calls()} == {f"hq/a{number}" for number in range(20)}
    most_in_all, most_per_agent = most_alive(stub_agent)
    assert most_per_agent == 1
    assert most_in_all <= 3
    assert database.value("select max(attempt_count) from agent_inbox_items") == 1


def insert_for_all(database: Database, turn: int) -> None:
    database.connect().execute(
        """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)
           select id, slug, 'heartbeat', slug || %s from agents""",
        [f":{turn}"],
    )


def most_alive(stub: StubAgent) -> tuple[int, int]:
    """From the stub's own start and end lines: most alive at once in all, and for one agent."""
    agent_of = {call["pid"]: call["argv"][2] for call in stub.calls()}
    changes = [
        (event["at"], 1 if event["event"] == "start" else -1, agent_of[event["pid"]])
        for event in stub.events()
        if event["event"] in ("start", "end")
    ]
    alive: dict[str, int] = {}
    in_all = per_agent = 0
    for _, change, agent in sorted(changes):
        alive[agent] = alive.get(agent, 0) + change
        in_all, per_agent = max(in_all, sum(alive.values())), max(per_agent, alive[agent])
    return in_all, per_agent


def test_a_thousand_agents_are_all_woken_oldest_work_first(
    database: Database, seed: Seed, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    gateway = seed.gateway()
    database.execute(
        "insert into agents (gateway_id, name, slug) select %s, 'n', 'n' || n from generate_series(1, 1000) n",
        [gateway],
    )
    # Clustered: all rows of one agent together, so that a row limit would hide the agents behind it.
    database.execute(
        """insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key, created_at)
           select id, slug, 'heartbeat', slug || ':' || k, now() - interval '1 hour'
                  + substr(slug, 2)::int * interval '1 second'
                  + k * interval '1 ms'
             from agents, generate_series(1, 20) k order by substr(slug, 2)::int, k"""
    )
    log = tmp_path / "woken"
    quick = tmp_path / "quick-openclaw"
    quick.write_text(f'#!/bin/sh\necho "$3" >> {log}\n')
    quick.chmod(0o755)
    start_daemon(MAX_CONCURRENT_WAKES=20, OPENCLAW_BIN=quick, WAKE_COOLDOWN=600)
    wait_until(lambda: log.exists() and len(set(log.read_text().split())) == 1000, 90, poll=0.2)
    woken = database.rows(
        """select substr(slug, 2)::int as n, claimed_at from agent_wakes join agents on agents.id = agent_id
            order by claimed_at, n"""
    )
    order = [row["n"] for row in woken]
    assert len(order) == 1000
    assert order == sorted(order)
