"""The daemon, real agents' scripts and the real Gateway, which goes away and comes back."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dispatcher.local.api import Api
from tests.acceptance.conftest import StartDaemon, start_daemon
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

__all__ = ["start_daemon"]

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(500)]
ROOT = Path(__file__).resolve().parents[2]
AGENTS = ("ada", "grace")
DOES_ITS_INBOX = {
    "commands": [
        "python3 skills/hq/scripts/hq_inbox_process.py",
        "python3 skills/hq/scripts/hq_inbox_done.py {item}",
    ],
    "text": "Did it.",
}


@pytest.fixture
def office(rig: Any, api: Api, seed: Seed) -> Any:
    """The rig with our scripts in the workspaces, and a model that does one item a wake."""
    secrets = rig.home / "secrets"
    secrets.mkdir(exist_ok=True)
    key = api.keys.service_role_key
    (secrets / "gateway.env").write_text(f"SUPABASE_URL={api.url}\nSUPABASE_SERVICE_ROLE_KEY={key}\nGATEWAY_ID=local\n")
    (secrets / "gateway.env").chmod(0o600)
    for agent in AGENTS:
        seed.agent(agent)
        scripts = rig.directory / "workspaces" / agent / "skills" / "hq" / "scripts"
        scripts.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / "scripts").glob("hq_*.py"):
            shutil.copy(file, scripts)
        rig.script(agent, DOES_ITS_INBOX)
    return rig


@pytest.fixture
def daemon(office: Any, start_daemon: StartDaemon) -> DaemonProcess:
    where = office.where()
    started: DaemonProcess = start_daemon(
        **{name: value for name, value in office.env.items() if name != "TMPDIR"},
        OPENCLAW_BIN=where["openclaw_bin"],
        OPENCLAW_HOME=where["openclaw_home"],
        WAKE_COOLDOWN=0,
        MAX_CONSECUTIVE_FAILURES=2,
        RECONCILE_INTERVAL=600,
    )
    return started.ready()


def undone(database: Database) -> int:
    return int(database.value("select count(*) from agent_inbox_items where status <> 'done'"))


def test_g1_an_outage_fails_nobody_and_work_goes_on_within_two_seconds(
    office: Any, daemon: DaemonProcess, database: Database, seed: Seed
) -> None:
    daemon.wait_for("gateway.linked")
    seed.item("ada")
    daemon.wait_for("wake.ended", deadline=120)
    assert undone(database) == 0
    office.kill_gateway()
    daemon.wait_for("gateway.lost")
    before = len(daemon.of("wake.started"))
    for agent in AGENTS:
        seed.item(agent)
    daemon.wait_for("wake.skipped", times=len(AGENTS), reason="gateway_unavailable")
    time.sleep(10)
    assert len(daemon.of("wake.started")) == before
    office.start_gateway()
    ready = time.monotonic()
    daemon.wait_for("wake.started", times=before + len(AGENTS))
    assert time.monotonic() - ready < 4  # two seconds, and two for a busy machine
    wait_until(lambda: undone(database) == 0, 120)
    assert database.value("select max(consecutive_failures) from agent_wake_state") == 0
    done = [entry for entry in office.requests() if "hq_inbox_done" in str(entry.get("command"))]
    assert len(done) == 1 + len(AGENTS)
    assert daemon.stop() == 0
