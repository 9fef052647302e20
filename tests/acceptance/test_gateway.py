"""The daemon beside OpenClaw's Gateway, which is played by what was recorded of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import StartDaemon
from tests.acceptance.test_metrics import free_port, samples
from tests.support.daemon import DaemonProcess
from tests.support.gateway import ScriptedGateway, scripted_gateway
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
