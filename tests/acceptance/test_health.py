"""Health that tells the truth, read as a container's health check reads it: field failure 71, C20, C21, S10."""

import json
import os
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dispatcher.agents import proctable
from dispatcher.cli.health import judge_file, judge_heartbeat
from dispatcher.cli.main import run_command_line
from dispatcher.instance import heartbeat_file
from dispatcher.instance.heartbeat_file import HeartbeatFile
from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.support.daemon import PROGRAM, ROOT, DaemonProcess
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


def health(daemon: DaemonProcess, *options: str) -> tuple[int, Verdict]:
    """What `dispatcher health` with the daemon's own settings ends with and says."""
    done = subprocess.run(
        [*PROGRAM, "health", "--json", *options],
        env=daemon.environment,
        cwd=daemon.directory,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def verdict(daemon: DaemonProcess) -> Verdict:
    """The same without the cost of a process."""
    return judge_file(Path(daemon.environment["HEARTBEAT_FILE"]), None)


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


def heartbeat(age: timedelta = timedelta(), **health: object) -> Verdict:
    return {
        "ts": (datetime.now(UTC) - age).isoformat(),
        "gateway": "east",
        "instance_id": "i",
        "pid": os.getpid(),
        "process": {"started_at": proctable.started_at(os.getpid()), "host_id": proctable.host_id()},
        "written_every_s": 10,
        "health": {"status": "ok", "live": True, "causes": [], "loops": {}, **health},
    }


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "ok"), (34, "ok"), (36, "silent"), (-4, "ok"), (-3600, "silent")],
    ids=["fresh", "late", "too old", "a little ahead", "the clock was put back"],
)
def test_ff71_the_age_of_the_last_heartbeat_decides(seconds: float, expected: str) -> None:
    assert judge_heartbeat(heartbeat(timedelta(seconds=seconds)), datetime.now(UTC))["status"] == expected


@pytest.mark.parametrize("ts", ["9999-12-31T23:59:59+00:00", "2999-01-01T00:00:00-14:00"])
def test_s17_of_a_heartbeat_of_the_future_nobody_knows_the_age(ts: str) -> None:
    verdict = judge_heartbeat(heartbeat(timedelta()) | {"ts": ts}, datetime.now(UTC))
    assert (verdict["status"], verdict["age_s"]) == ("silent", None)


@pytest.mark.parametrize(
    ("status", "live", "code", "code_with_ready"),
    [
        ("ok", True, 0, 0),
        ("degraded", True, 0, 0),
        ("failing", True, 0, 1),
        ("starting", True, 0, 1),
        ("ok", False, 1, 1),
    ],
)
def test_c21_health_asks_for_the_process_and_with_ready_for_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, live: bool, code: int, code_with_ready: int
) -> None:
    (tmp_path / "hb.json").write_text(json.dumps(heartbeat(status=status, live=live)))
    for options, expected in ((), code), (("--ready",), code_with_ready):
        assert run_command_line(["health", "--file", str(tmp_path / "hb.json"), *options]) == expected
        assert capsys.readouterr().out.splitlines()[0] == (status if live else "stuck")


BAD_CONTENTS = [
    *("", "[]", "{}", "null", "{", "\x00", "[" * 100_000, "1" * (2 * 1024 * 1024)),
    *(json.dumps({**heartbeat(), name: None}) for name in ("ts", "health", "pid", "process", "written_every_s")),
    json.dumps({**heartbeat(), "ts": "yesterday"}),
    json.dumps({**heartbeat(), "ts": "2026-01-01T00:00:00"}),
    json.dumps({**heartbeat(), "written_every_s": float("nan")}),
    json.dumps(heartbeat(causes=[1])),
    json.dumps(heartbeat(loops=[])),
]


@pytest.mark.parametrize("content", BAD_CONTENTS, ids=range(len(BAD_CONTENTS)))
def test_s10_a_file_that_is_no_heartbeat_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "hb.json"
    file.write_text(content)
    assert run_command_line(["health", "--file", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == ["untrusted", f"  {file} is no heartbeat of a daemon"]


@pytest.mark.parametrize("what", ["link", "fifo", "folder", "open to others", "of somebody else"])
def test_s10_a_file_that_others_could_have_made_is_not_believed(tmp_path: Path, what: str) -> None:
    file, good = tmp_path / "hb.json", tmp_path / "good.json"
    good.write_text(json.dumps(heartbeat()))
    assert judge_file(good, None)["status"] == "ok"
    if what == "link":
        file.symlink_to(good)
    elif what == "fifo":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    else:
        good.rename(file)
        file.chmod(0o666 if what == "open to others" else 0o644)
    if what == "of somebody else":
        if os.geteuid() != 0:
            pytest.skip("only root can make a file of somebody else")
        os.chown(file, 65534, -1)
    seen = judge_file(file, None)
    assert (seen["status"], seen["live"]) == ("untrusted", False)
    assert str(file) in seen["causes"][0]


def test_s10_a_link_in_place_of_the_file_is_neither_followed_nor_left(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("hb.json", f"hb.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(precious)
    file = HeartbeatFile(tmp_path / "hb.json", "east", "i")
    file.write({"health": heartbeat()["health"], "written_every_s": 10})
    assert file.trouble is None
    assert precious.read_text() == "mine"
    assert judge_file(tmp_path / "hb.json", "east")["status"] == "ok"


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's heartbeat files, in a place of this test's own."""
    monkeypatch.setattr(heartbeat_file, "PRIVATE_FOLDERS", tmp_path)
    return heartbeat_file.private_folder()


@pytest.mark.parametrize("what", ["link", "file", "open to others"])
def test_s10_a_default_folder_that_is_not_ours_alone_is_refused_by_name(
    private: Path, tmp_path: Path, what: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    if what == "link":
        private.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        private.touch()
    else:
        private.mkdir()
        private.chmod(0o777)
    file = HeartbeatFile(heartbeat_file.own_file(None, "east"), "east", "i")
    file.write({"health": {}})
    assert file.trouble is not None
    assert str(private) in file.trouble
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert judge_file(private, "east")["status"] == "untrusted"


@pytest.mark.parametrize(
    "slug", ["east", "../../etc/passwd", ".hidden", "ost/west", "ost_west", "\U0001f680", "x" * 200]
)
def test_c20_the_default_file_names_the_gateway_and_stays_in_its_folder(private: Path, slug: str) -> None:
    path = heartbeat_file.own_file(None, slug)
    file = HeartbeatFile(path, slug, "i")
    file.write({"health": heartbeat()["health"], "written_every_s": 10})
    assert (path.parent, path.exists()) == (private, True)
    assert private.stat().st_mode & 0o777 == 0o700
    assert heartbeat_file.files_of(slug) == [path]
    assert heartbeat_file.files_of("another") == []
    file.remove()
    assert list(private.iterdir()) == []


def test_c20_another_gateways_file_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "hb.json").write_text(json.dumps(heartbeat()))
    assert judge_file(tmp_path / "hb.json", "east")["status"] == "ok"
    seen = judge_file(tmp_path / "hb.json", "west")
    assert (seen["status"], seen["live"]) == ("foreign", False)
    assert "gateway east, not of west" in seen["causes"][0]


def test_c20_a_process_with_the_same_number_is_not_the_daemon(tmp_path: Path) -> None:
    facts = heartbeat()
    facts["process"]["started_at"] -= 100
    (tmp_path / "hb.json").write_text(json.dumps(facts))
    assert judge_file(tmp_path / "hb.json", None)["status"] == "gone"


def test_c20_a_daemon_that_is_killed_is_gone_whatever_its_neighbours_say(
    api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Three daemons with the default file, two of one gateway; and a fourth takes the place of the killed one."""
    seed.gateway("east"), seed.gateway("west")
    east, other, west = (
        start_daemon(GATEWAY_ID=slug, HEARTBEAT_FILE="", HEARTBEAT_INTERVAL=0.5) for slug in ("east", "east", "west")
    )
    daemons = [east, other, west]
    for daemon in daemons:
        daemon.wait_for("health.changed", status="ok")
    assert [health(daemon)[0] for daemon in daemons] == [0, 0, 0]
    east.kill()
    code, seen = health(east)
    assert (code, seen["status"], seen["pid"], seen["gateway"]) == (1, "gone", east.pid, "east")
    assert [one["pid"] for one in seen["daemons"]] == [east.pid, other.pid]
    assert health(west)[0] == 0
    again = start_daemon(GATEWAY_ID="east", HEARTBEAT_FILE="")
    again.wait_for("health.changed", status="ok")
    assert health(again)[0] == 0


def test_c20_a_file_that_another_daemon_writes_is_left_to_it_and_said(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    seed.gateway("east"), seed.gateway("west")
    shared = {"HEARTBEAT_FILE": tmp_path / "hb.json", "HEARTBEAT_INTERVAL": 0.5}
    first = start_daemon(GATEWAY_ID="east", **shared)
    first.wait_for("health.changed", status="ok")
    second = start_daemon(GATEWAY_ID="west", **shared)
    [line] = second.wait_for("instance.heartbeat_file_failed")
    assert f"process {first.pid} (gateway east)" in line["msg"]
    second.wait_for("health.changed", status="degraded")
    assert (health(first)[0], health(second)[1]["status"]) == (0, "foreign")
    first.kill()
    second.wait_for("sweep.finished")
    assert (health(first)[1]["status"], health(second)[0]) == ("gone", 1)


def test_c21_an_outage_makes_it_failing_and_not_dead(
    api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Calls are swallowed rather than refused: each runs into its time-out."""
    seed.agent("ada")
    stub_agent.order(mode="hang")
    daemon = start_daemon(
        REST_TIMEOUT=5, RECONCILE_INTERVAL=0.5, DEGRADED_RECONCILE_INTERVAL=0.5, HEARTBEAT_INTERVAL=0.5
    ).ready()
    seed.item("ada")
    daemon.wait_for("wake.started")
    api.faults(rest={"fail": -1, "delay": 30, "status": 503}, realtime={"connect_status": 500, "close": 1001})
    seen = wait_for(daemon, "failing", deadline=60)
    assert seen["live"]
    assert (health(daemon)[0], health(daemon, "--ready")[0]) == (0, 1)
    assert len(stub_agent.living()) == 1
    api.faults(rest={"fail": 0, "delay": 0}, realtime={"connect_status": None})
    wait_for(daemon, "ok", deadline=40)


def test_c21_a_start_is_starting_and_not_ok_while_realtime_connects(
    api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    api.faults(realtime={"join_delay": 60})
    daemon = start_daemon(HEARTBEAT_INTERVAL=0.5)
    daemon.wait_for("sweep.finished")
    seen = wait_for(daemon, "starting")
    assert "Realtime is not subscribed yet" in seen["causes"]
    assert (health(daemon)[0], health(daemon, "--ready")[0]) == (0, 1)
    assert daemon.of("health.changed", status="ok") == []


def test_c21_waiting_for_configuration_is_alive_and_not_ready(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(WAIT_FOR_CONFIG="true", GATEWAY_ID="")
    daemon.wait_for("config.waiting")
    seen = wait_for(daemon, "waiting")
    assert "GATEWAY_ID" in seen["causes"][0]
    assert (health(daemon)[0], health(daemon, "--ready")[0]) == (0, 1)
    assert daemon.stop() == 0
    assert verdict(daemon)["status"] == "absent"


def test_y7_a_gateway_whose_row_is_not_there_yet_is_waited_for(
    seed: Seed, database: Database, start_daemon: StartDaemon
) -> None:
    daemon = start_daemon(WAIT_FOR_CONFIG="true", GATEWAY_ID="later")
    [line] = daemon.wait_for("config.waiting")
    assert "'later' is no gateway" in line["msg"]
    seen = wait_for(daemon, "waiting")
    assert "later" in seen["causes"][0]
    seed.gateway("later")
    daemon.wait_for("daemon.ready", gateway="later")
    assert len(daemon.of("config.waiting")) == 1
    assert database.value("select state from dispatcher_instances") == "running"


def test_y7_a_stop_while_the_row_is_waited_for_is_a_good_end(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(WAIT_FOR_CONFIG="true", GATEWAY_ID="later")
    daemon.wait_for("config.waiting")
    assert daemon.stop(deadline=5) == 0
    assert verdict(daemon)["status"] == "absent"
