"""What docs/explanation/failure-modes.md promises and no other test tries: disks, clocks, networks, lost rows."""

import resource
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from dispatcher.agents import output
from dispatcher.agents.output import WakeOutput
from dispatcher.instance.heartbeat_file import HeartbeatFile
from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.acceptance.test_health import verdict
from tests.support.daemon import ROOT
from tests.support.database import Database
from tests.support.fault_proxy import FaultProxy
from tests.support.seed import Seed
from tests.support.waiting import wait_until

MOVED_CLOCK = ROOT / "tests" / "support" / "chaos" / "clock"


def undone(database: Database) -> int:
    return database.value("select count(*) from agent_inbox_items where status <> 'done'")


# -- disks


def test_a_heartbeat_file_on_a_full_disk_is_one_warning_and_leaves_nothing(tmp_path: Path) -> None:
    file = HeartbeatFile(tmp_path / "hb.json", "g", "i")
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with capture_logs() as logs:
        for room in (10, 10, least, 10):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
            try:
                file.write({"health": {}})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
            assert (file.trouble is None) == (room == least)
    assert [entry["event"] for entry in logs] == ["instance.heartbeat_file_failed"] * 2
    assert "File too large" in logs[0]["msg"]
    assert [path.name for path in tmp_path.iterdir()] == ["hb.json"]


def test_output_is_not_kept_on_a_disk_that_is_about_to_be_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child whose prints fail would fail with them."""
    disk = SimpleNamespace(f_bavail=100, f_frsize=4096)
    monkeypatch.setattr(output.os, "statvfs", lambda _path: disk)
    with pytest.raises(OSError, match="No space left"):
        WakeOutput(tmp_path, "ada", "w")
    assert list(tmp_path.iterdir()) == []


def test_files_that_cannot_be_written_stop_neither_wakes_nor_the_end(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    daemon = start_daemon(
        HEARTBEAT_FILE=tmp_path / "file" / "hb.json", AGENT_OUTPUT_DIR=tmp_path / "file" / "out", HEARTBEAT_INTERVAL=0.5
    )
    seed.item("ada")
    daemon.wait_for("wake.ended", ending="exited")
    wait_until(lambda: undone(database) == 0, 5)
    daemon.wait_for("instance.heartbeat_file_failed"), daemon.wait_for("wake.output_lost")
    [line] = daemon.wait_for("health.changed", status="degraded")
    assert "hb.json: Not a directory" in line["msg"]
    assert verdict(daemon)["status"] == "absent"
    assert daemon.stop() == 0
    assert len(daemon.of("instance.heartbeat_file_failed")) == 1
    assert database.value("select state from dispatcher_instances") == "stopped"


# -- clocks


def test_a_hosts_clock_that_is_wrong_decides_nothing(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Cooldowns are the database's; only the times in the log are ours. A day ahead, then behind."""
    offset = tmp_path / "offset"
    offset.write_text("86400")
    seed.agent("ada")
    clock = {"PYTHONPATH": f"{MOVED_CLOCK}:{ROOT}", "CHAOS_CLOCK_FILE": offset}
    daemon = start_daemon(**clock, WAKE_COOLDOWN=2, HEARTBEAT_INTERVAL=0.5).ready()
    seed.item("ada")
    daemon.wait_for("wake.ended", exit_code=0)
    offset.write_text("-86400")
    seed.item("ada")
    daemon.wait_for("wake.skipped", agent="ada")
    daemon.wait_for("wake.started", times=2, deadline=10)
    wait_until(lambda: undone(database) == 0, 10)
    assert database.value("select max(attempt_count) from agent_inbox_items") == 1
    assert daemon.of("realtime.deaf") == []
    first, second = (row["claimed_at"] for row in database.rows("select claimed_at from agent_wakes order by 1"))
    assert 1.9 < (second - first).total_seconds() < 10
    days = {line["ts"][:10] for line in daemon.lines}
    assert len(days) >= 2


@pytest.mark.parametrize("offset", [86_400, -86_400])
def test_leases_and_expiry_are_the_databases_too(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, tmp_path: Path, offset: int
) -> None:
    """A day ahead would end the lease and the fresh item, a day behind would keep the lease and the stale one."""
    moved = tmp_path / "offset"
    moved.write_text(str(offset))
    now = database.value("select now()")
    fresh = seed.item("bob", created_at=now - timedelta(hours=23))
    stale = seed.item("eve", created_at=now - timedelta(hours=25))
    leased = seed.item("ada", status="leased", attempt_count=1, leased_until=now + timedelta(seconds=6))
    clock = {"PYTHONPATH": f"{MOVED_CLOCK}:{ROOT}", "CHAOS_CLOCK_FILE": moved}
    daemon = start_daemon(**clock, WAKE_COOLDOWN=0, RECONCILE_INTERVAL=0.5, DEGRADED_RECONCILE_INTERVAL=0.5).ready()
    wait_until(lambda: database.value("select count(*) from agent_inbox_items where status = 'done'") == 2, 20)
    statuses = {row["id"]: row["status"] for row in database.rows("select id, status::text from agent_inbox_items")}
    assert statuses == {fresh: "done", stale: "failed", leased: "done"}
    assert {line["agent"] for line in daemon.of("wake.started")} == {"ada", "bob"}
    wait = (
        "select wake.claimed_at - %s from agent_wakes wake join agents agent on agent.id = agent_id where slug = 'ada'"
    )
    assert timedelta(seconds=6) <= database.value(wait, [now]) < timedelta(seconds=12)


# -- networks


@pytest.mark.parametrize("fault", ["black_hole", "half_open", "refuse"])
def test_a_network_that_swallows_everything_is_noticed_and_survived(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, fault: str
) -> None:
    seed.agent("ada")
    proxy = FaultProxy(int(api.url.rsplit(":", 1)[1])).start()
    try:
        daemon = start_daemon(
            SUPABASE_URL=proxy.url,
            REST_TIMEOUT=1,
            RECONCILE_INTERVAL=0.5,
            DEGRADED_RECONCILE_INTERVAL=0.5,
            HEARTBEAT_INTERVAL=0.5,
            WAKE_COOLDOWN=0,
        ).ready()
        getattr(proxy, fault)()
        seed.item("ada")
        wait_until(lambda: verdict(daemon)["status"] == "failing", 20, poll=0.05)
        assert daemon.of("wake.started") == []
        proxy.heal(cut=True)
        wait_until(lambda: undone(database) == 0, 20)
        assert database.value("select max(attempt_count) from agent_inbox_items") == 1
        assert daemon.stop() == 0
    finally:
        proxy.stop()


# -- rows


def test_a_daemon_whose_row_is_gone_registers_again_and_keeps_its_children(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada"), seed.agent("bob")
    stub_agent.order(mode="hang")
    daemon = start_daemon(HEARTBEAT_INTERVAL=0.5, RECONCILE_INTERVAL=0.5).ready()
    seed.item("ada")
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'running'") == 1, 10)
    database.execute("delete from dispatcher_instances")
    daemon.wait_for("instance.gone")
    wait_until(lambda: database.value("select count(*) from dispatcher_instances where state = 'running'") == 1, 10)
    seed.item("bob")
    daemon.wait_for("wake.started", agent="bob")
    wait_until(lambda: len(stub_agent.calls()) == 2, 5)
    assert database.value("select count(*) from agent_wakes where ended_at is not null") == 0
    # Its end is told, with whatever token the database knows it by now.
    [child] = [one for one in stub_agent.living() if one.pid == stub_agent.calls()[0]["pid"]]
    child.kill()
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'failed'") == 1, 10)
    assert daemon.of("wake.adoption_failed") == []


def test_a_wedged_daemon_keeps_its_wakes_while_it_lives(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Another daemon of the same host sees that its process lives; a second child for the agent would be worse."""
    seed.agent("ada")
    stub_agent.order(mode="hang")
    first = start_daemon(HEARTBEAT_INTERVAL=0.5, INSTANCE_TIMEOUT=2, SHUTDOWN_GRACE=0).ready()
    seed.item("ada")
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'running'") == 1, 10)
    first.process.send_signal(signal.SIGSTOP)
    second = start_daemon(HEARTBEAT_INTERVAL=0.5, INSTANCE_TIMEOUT=2, RECONCILE_INTERVAL=0.5, WAKE_COOLDOWN=0).ready()
    silent = (
        "select extract(epoch from now() - last_heartbeat_at) > 3 from dispatcher_instances order by started_at limit 1"
    )
    wait_until(lambda: database.value(silent), 10)
    swept = len(second.of("sweep.finished"))
    second.wait_for("sweep.finished", times=swept + 2)
    assert second.of("wake.adopted") == []
    assert len(stub_agent.calls()) == 1
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: not database.value(silent), 10)
    assert first.stop() == 0
