"""Field failure 71: health that tells the truth, read as a container's health check reads it."""

import json
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dispatcher.cli.health import judge_heartbeat, read_heartbeat
from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.support.daemon import PROGRAM, ROOT, DaemonProcess, base_environment
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

SABOTAGE = ROOT / "tests" / "support" / "sabotage"
Verdict = dict[str, Any]


class Saboteur:
    """Starts a daemon whose parts can be broken: `break_("sweep")`, `mend("sweep")`."""

    def __init__(self, start: StartDaemon, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._start = start

    def start(self, **settings: object) -> DaemonProcess:
        chosen = {"HEARTBEAT_INTERVAL": 0.5, "DEGRADED_RECONCILE_INTERVAL": 0.5, "WAKE_COOLDOWN": 0, **settings}
        return self._start(PYTHONPATH=f"{SABOTAGE}:{ROOT}", SABOTAGE=self.folder, **chosen).ready()

    def break_(self, part: str) -> None:
        (self.folder / part).touch()

    def mend(self, part: str) -> None:
        (self.folder / part).unlink()


@pytest.fixture
def saboteur(start_daemon: StartDaemon, tmp_path: Path) -> Saboteur:
    return Saboteur(start_daemon, tmp_path / "sabotage")


def health(daemon: DaemonProcess) -> tuple[int, Verdict]:
    """What `dispatcher health` ends with and says."""
    file = daemon.environment["HEARTBEAT_FILE"]
    done = subprocess.run(
        [*PROGRAM, "health", "--json", "--file", file],
        env=base_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def verdict(daemon: DaemonProcess) -> Verdict:
    """The same without the cost of a process."""
    return judge_heartbeat(read_heartbeat(Path(daemon.environment["HEARTBEAT_FILE"])), datetime.now(UTC))


def wait_for(daemon: DaemonProcess, status: str, loop: str = "", deadline: float = 20.0) -> Verdict:
    """The first verdict with that status that names that loop."""

    def found() -> Verdict | None:
        seen = verdict(daemon)
        named = not loop or any(cause.startswith(f"{loop}:") for cause in seen["causes"])
        return seen if seen["status"] == status and named else None

    return wait_until(found, deadline, poll=0.05, what=f"{status} {loop}; now {verdict(daemon)}")


def test_ff71_health_names_each_loop_that_stands_still(
    saboteur: Saboteur, seed: Seed, working_agent: StubAgent
) -> None:
    """One daemon, because each start costs seconds: fresh, then one loop after the other, then all of it."""
    seed.agent("ada")
    daemon = saboteur.start(RECONCILE_INTERVAL=0.5)
    wait_for(daemon, "ok")
    code, seen = health(daemon)
    assert (code, seen["status"], seen["causes"]) == (0, "ok", [])
    assert {"sweep", "claims", "reports", "leases", "realtime"} <= seen["loops"].keys()

    saboteur.break_("sweep")
    seen = wait_for(daemon, "failing", "sweep")
    assert {name for name, loop in seen["loops"].items() if loop["status"] != "ok"} == {"sweep"}
    seed.item("ada")
    daemon.wait_for("wake.started", path="event")
    saboteur.mend("sweep")
    wait_for(daemon, "ok")

    saboteur.break_("realtime")
    wait_for(daemon, "failing", "realtime")
    saboteur.mend("realtime")
    wait_for(daemon, "ok")

    # It cannot say so any more: the age of its last word does.
    daemon.process.send_signal(signal.SIGSTOP)
    wait_for(daemon, "silent")
    code, seen = health(daemon)
    assert (code, "heartbeat" in seen["causes"][0]) == (1, True)


def test_ff71_sweeps_come_often_while_the_realtime_loop_stands_still(
    saboteur: Saboteur, seed: Seed, working_agent: StubAgent
) -> None:
    """It still says "ready", which was true when it last turned."""
    seed.agent("ada")
    daemon = saboteur.start(RECONCILE_INTERVAL=3600)
    saboteur.break_("realtime")
    wait_for(daemon, "failing", "realtime")
    seed.item("ada")
    daemon.wait_for("wake.started", path="sweep", deadline=5)


def test_ff71_claims_that_all_fail_are_named(
    api: Api, saboteur: Saboteur, seed: Seed, working_agent: StubAgent, database: Database
) -> None:
    for agent in ("a1", "a2", "a3"):
        seed.agent(agent)
    daemon = saboteur.start(REST_TIMEOUT=0.5)
    api.faults(rest={"match": "claim_wakes", "fail": -1, "status": 503})
    for agent in ("a1", "a2", "a3"):
        seed.item(agent)
    seen = wait_for(daemon, "failing", "claims")
    assert seen["loops"]["sweep"]["status"] == "ok"
    api.faults(rest={"match": "", "fail": 0})
    wait_for(daemon, "ok")
    wait_until(lambda: database.value("select count(*) from agent_inbox_items where status = 'done'") == 3, 10)


def test_ff71_a_dead_realtime_task_ends_the_daemon_by_name(
    saboteur: Saboteur, seed: Seed, stub_agent: StubAgent
) -> None:
    """Whoever supervises daemons starts a new one; half a daemon would say it is fine."""
    seed.agent("ada")
    daemon = saboteur.start()
    saboteur.break_("realtime-dies")
    [line] = daemon.wait_for("service.ended", service="realtime")
    assert daemon.wait() == line["exit_code"] == 1
    assert verdict(daemon)["status"] == "absent"


def heartbeat(age: timedelta, **health: object) -> Verdict:
    said = {"status": "ok", "causes": [], "loops": {}, **health}
    return {"ts": (datetime.now(UTC) - age).isoformat(), "heartbeat_interval_s": 10, "health": said}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "ok"), (34, "ok"), (36, "silent"), (-4, "ok"), (-3600, "silent")],
    ids=["fresh", "late", "too old", "a little ahead", "the clock was put back"],
)
def test_ff71_the_age_of_the_last_heartbeat_decides(seconds: float, expected: str) -> None:
    assert judge_heartbeat(heartbeat(timedelta(seconds=seconds)), datetime.now(UTC))["status"] == expected


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "{"])
def test_a_file_that_is_no_heartbeat_is_no_daemon(tmp_path: Path, content: str) -> None:
    file = tmp_path / "hb.json"
    file.write_text(content)
    assert judge_heartbeat(read_heartbeat(file), datetime.now(UTC))["status"] == "absent"
