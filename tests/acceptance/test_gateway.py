"""The daemon beside OpenClaw's Gateway, which is played by what was recorded of it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.acceptance.test_metrics import free_port, samples
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.gateway import ScriptedGateway, said, scripted_gateway
from tests.support.seed import Seed
from tests.support.waiting import wait_until


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway() as started:
        yield started


@pytest.fixture
def home(gateway: ScriptedGateway, tmp_path: Path, seed: Seed) -> Path:
    """OPENCLAW_HOME with an openclaw.json that names the Gateway."""
    seed.agent("ada")
    folder = tmp_path / "openclaw-home"
    folder.mkdir()
    (folder / "openclaw.json").write_text(json.dumps(gateway.config()))
    return folder


def heartbeat(daemon: DaemonProcess) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(daemon.environment["HEARTBEAT_FILE"]).read_text())
    return facts


def status_of(daemon: DaemonProcess) -> str:
    return str(heartbeat(daemon)["openclaw_gateway"]["status"])


def test_g1_the_daemon_knows_how_the_gateway_is_and_says_so(
    gateway: ScriptedGateway, home: Path, start_daemon: StartDaemon
) -> None:
    port = free_port()
    daemon = start_daemon(OPENCLAW_HOME=home, HEARTBEAT_INTERVAL=0.5, METRICS_PORT=port).ready()
    [linked] = daemon.wait_for("gateway.linked")
    assert (linked["version"], linked["restarted"]) == ("2026.9.6", False)
    wait_until(lambda: status_of(daemon) == "ready", 10)
    gateway.stop()
    [lost] = daemon.wait_for("gateway.lost")
    assert lost["status"] == "down"
    wait_until(lambda: heartbeat(daemon)["health"]["status"] == "degraded", 10)
    [cause] = heartbeat(daemon)["health"]["causes"]
    assert cause.startswith("OpenClaw's Gateway is down: ")
    wait_until(lambda: samples(daemon)["dispatcher_gateway_state", "down"] == 1, 10)
    gateway.restart()
    daemon.wait_for("gateway.ready")
    wait_until(lambda: heartbeat(daemon)["health"]["status"] == "ok", 10)
    wait_until(lambda: samples(daemon)["dispatcher_gateway_state", "ready"] == 1, 10)
    assert samples(daemon)["dispatcher_gateway_outages_total",] == 1
    assert daemon.stop() == 0


def test_the_daemon_starts_works_and_stops_beside_a_gateway_that_refuses_it(
    gateway: ScriptedGateway, home: Path, start_daemon: StartDaemon
) -> None:
    gateway.token = "not-what-the-file-says"
    daemon = start_daemon(OPENCLAW_HOME=home, HEARTBEAT_INTERVAL=0.5).ready()
    [barred] = daemon.wait_for("gateway.barred")
    assert "check gateway.auth.token" in barred["cause"]
    wait_until(lambda: status_of(daemon) == "barred", 10)
    assert heartbeat(daemon)["health"]["status"] == "ok"
    assert daemon.stop() == 0
    assert "kit-token" not in str(daemon.lines)


def test_gateway_link_off_holds_no_connection(gateway: ScriptedGateway, home: Path, start_daemon: StartDaemon) -> None:
    daemon = start_daemon(OPENCLAW_HOME=home, HEARTBEAT_INTERVAL=0.5, GATEWAY_LINK="off").ready()
    wait_until(lambda: status_of(daemon) == "unused", 10)
    assert daemon.stop() == 0
    assert gateway.connected == 0


def failures(database: Database) -> int:
    return int(database.value("select coalesce(max(consecutive_failures), 0) from agent_wake_state"))


def undone(database: Database) -> int:
    return int(database.value("select count(*) from agent_inbox_items where status <> 'done'"))


def test_g1_nothing_is_woken_while_the_gateway_is_away_and_work_goes_on_when_it_is_back(
    gateway: ScriptedGateway,
    home: Path,
    seed: Seed,
    database: Database,
    working_agent: StubAgent,
    start_daemon: StartDaemon,
) -> None:
    for agent in ("ada", "bob", "eve"):
        seed.agent(agent)
    daemon = start_daemon(OPENCLAW_HOME=home, RECONCILE_INTERVAL=600, HEARTBEAT_INTERVAL=0.5, WAKE_COOLDOWN=0).ready()
    daemon.wait_for("gateway.linked")
    gateway.stop()
    daemon.wait_for("gateway.lost")
    for agent in ("ada", "bob", "eve") * 3:
        seed.item(agent)
    skipped = daemon.wait_for("wake.skipped", times=3, reason="gateway_unavailable")
    wait_until(lambda: heartbeat(daemon)["health"]["status"] == "degraded", 10)
    time.sleep(3)  # well into the outage
    assert {line["agent"] for line in skipped} == {"ada", "bob", "eve"}
    assert len(daemon.of("wake.skipped", reason="gateway_unavailable")) == 3
    assert daemon.of("wake.started") == []
    assert working_agent.calls() == []
    back = time.monotonic()
    gateway.restart()
    daemon.wait_for("wake.started")
    assert time.monotonic() - back < 4  # two seconds, and two for a busy machine
    wait_until(lambda: undone(database) == 0, 20)
    assert failures(database) == 0
    wait_until(lambda: heartbeat(daemon)["health"]["status"] == "ok", 10)
    assert daemon.stop() == 0


def test_g1_work_found_by_a_sweep_waits_for_the_gateway_too(
    gateway: ScriptedGateway,
    home: Path,
    seed: Seed,
    database: Database,
    working_agent: StubAgent,
    start_daemon: StartDaemon,
) -> None:
    gateway.stop()
    seed.item("ada")
    daemon = start_daemon(OPENCLAW_HOME=home, RECONCILE_INTERVAL=0.5).ready()
    daemon.wait_for("sweep.finished", times=4)
    assert daemon.of("wake.started") == []
    gateway.restart()
    wait_until(lambda: undone(database) == 0, 20)
    assert failures(database) == 0
    assert daemon.stop() == 0


def test_g1_wakes_that_meet_no_gateway_are_nobodys_failure(
    seed: Seed, api: Api, database: Database, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """No link tells how the Gateway is: what the command line answers does."""
    seed.item("ada")
    stub_agent.order(mode="exit", says=said("agent-gateway-down"), exit_code=1)
    daemon = start_daemon(HEARTBEAT_INTERVAL=0.5, MAX_CONSECUTIVE_FAILURES=2)
    daemon.wait_for("wake.ended", times=3, deadline=40)
    assert all(line["ending"] == "interrupted" for line in daemon.of("wake.ended"))
    assert "ECONNREFUSED" in daemon.of("wake.ended")[0]["cause"]
    assert failures(database) == 0
    wait_until(lambda: "not reachable" in str(heartbeat(daemon)["health"]["causes"]), 10)
    assert database.row("select status::text, attempt_count from agent_inbox_items") == {
        "status": "pending",
        "attempt_count": 0,
    }
    stub_agent.order(**working_orders(api))
    wait_until(lambda: undone(database) == 0, 60)
    wait_until(lambda: heartbeat(daemon)["health"]["status"] == "ok", 20)
    assert "ECONNREFUSED" in str(database.value("select error from agent_wakes order by claimed_at limit 1"))
    assert daemon.stop() == 0


def test_g9_an_item_whose_override_is_refused_is_set_aside_and_its_neighbour_is_done(
    seed: Seed, api: Api, database: Database, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(mode="exit", says=said("agent-unsupported-thinking"), exit_code=1)
    daemon = start_daemon(WAKE_COOLDOWN=0).ready()
    refused = seed.item("ada", context={"thinking_override": "high"})
    [ended] = daemon.wait_for("wake.ended")
    assert ended["ending"] == "item_refused"
    assert ended["run_id"] == "0b9e335f-2fce-49a9-ba7d-5927b92bec5a"
    stub_agent.order(**working_orders(api))
    seed.item("ada")
    wait_until(lambda: undone(database) == 1, 20)
    query = "select status::text, context ->> 'last_failure_reason' as why from agent_inbox_items where id = %s"
    row = database.row(query, (refused,))
    assert row["status"] == "dead_letter"
    assert 'Thinking level "high" is not supported' in row["why"]
    assert failures(database) == 0
    assert daemon.stop() == 0


def test_g6_a_failed_wake_says_why(
    seed: Seed, database: Database, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.item("ada")
    stub_agent.order(mode="exit", says=said("agent-empty"), exit_code=1)
    daemon = start_daemon()
    [ended] = daemon.wait_for("wake.ended")
    assert "couldn't generate a response" in ended["cause"]
    assert ended["run_id"] == "fcd020e9-bb13-40a1-807f-545e62748522"
    wait_until(lambda: failures(database) == 1, 10)
    assert "couldn't generate a response" in str(database.value("select error from agent_wakes"))
    assert daemon.stop() == 0
