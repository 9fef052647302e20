"""What a Prometheus, a liveness and a readiness probe see of a real daemon."""

import json
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.support.daemon import DaemonProcess
from tests.support.seed import DEFAULT_TENANT, Seed
from tests.support.waiting import wait_until

Samples = dict[tuple[str, ...], float]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def page(daemon: DaemonProcess, name: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{daemon.environment['METRICS_PORT']}/{name}", trust_env=False)


def samples(daemon: DaemonProcess) -> Samples:
    families = text_string_to_metric_families(page(daemon, "metrics").text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_a_wake_is_counted_from_its_decision_to_its_outcome(
    api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    stub_agent.order(**working_orders(api, agents={"hq/bob": {"mode": "hang"}}))
    daemon = start_daemon(METRICS_PORT=free_port(), WAKE_COOLDOWN=600, MAX_CONCURRENT_WAKES=1).ready()
    assert page(daemon, "readyz").json() == {"ready": True, "cause": None}
    assert page(daemon, "healthz").json()["status"] == "ok"

    seed.item("ada")
    daemon.wait_for("wake.ended")
    counted = wait_until(
        lambda: found if ("dispatcher_wakes_ended_total", "succeeded") in (found := samples(daemon)) else None, 5
    )
    assert counted["dispatcher_wakes_ended_total", "succeeded"] == 1
    assert counted["dispatcher_wake_decisions_total", "granted"] == 1
    assert counted["dispatcher_wake_latency_seconds_count", "event"] == 1
    assert 0 < counted["dispatcher_wake_latency_seconds_sum", "event"] < 5
    assert counted["dispatcher_wake_process_seconds_count", "exited"] == 1
    assert counted["dispatcher_sweep_seconds_count",] >= 1
    assert counted["dispatcher_rpc_seconds_count", "claim_wakes"] >= 1
    assert counted["dispatcher_realtime_state", "ready"] == 1
    assert counted["dispatcher_live_wakes",] == 0

    seed.item("ada")  # within the cooldown
    seed.item("bob"), daemon.wait_for("wake.started", agent="bob")
    daemon.wait_for("wake.skipped", agent="ada")
    counted = wait_until(
        lambda: found if ("dispatcher_wake_decisions_total", "cooldown") in (found := samples(daemon)) else None, 5
    )
    assert counted["dispatcher_live_wakes",] == 1


def test_c36_what_waits_in_the_tables_is_shown_by_age_and_status(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    ada = seed.agent("ada")
    seed.insert(
        "agent_budgets", agent_id=ada, status="exceeded", monthly_limit_usd=1, current_period_spend_usd=2
    )  # fmt: skip
    seed.item("ada"), seed.item("ada")
    seed.agent("idle", status="paused")
    seed.item("idle", created_at=datetime.now(UTC) - timedelta(days=2))
    seed.item("ada", created_at=datetime.now(UTC) - timedelta(hours=2))
    seed.insert("workflow_runs", tenant_id=DEFAULT_TENANT, workflow_type="without-a-route")
    daemon = start_daemon(METRICS_PORT=free_port()).ready()
    counted = wait_until(
        lambda: found if ("dispatcher_backlog_items", "over_1h") in (found := samples(daemon)) else None, 5
    )
    assert counted["dispatcher_backlog_items", "under_1m"] == 2
    assert counted["dispatcher_backlog_items", "over_1h"] == 1
    assert 7200 <= counted["dispatcher_backlog_oldest_seconds",] < 7300  # C36: not the item nobody may take
    assert counted["dispatcher_backlog_waiting_for_paused",] == 1
    assert counted["dispatcher_workflow_runs", "queued"] == 1
    assert counted["dispatcher_budget_held_runs",] == 0


def test_a_burst_costs_calls_by_the_agent_not_by_the_item(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """Items one by one: while their agent works, and in the cooldown after it."""
    agent = seed.agent("ada")
    stub_agent.order(mode="hang")
    daemon = start_daemon(METRICS_PORT=free_port(), WAKE_COOLDOWN=60, AGENT_PROCESS_TIMEOUT=2).ready()
    before = calls(daemon)
    seed.items(agent, 100)
    daemon.wait_for("wake.ended")
    seed.items(agent, 100)
    daemon.wait_for("wake.skipped", agent="ada")
    assert 4 <= calls(daemon) - before <= 12


def calls(daemon: DaemonProcess) -> float:
    """All calls of the daemon but those of its clock: heartbeats, sweeps, the tick of the workflows."""
    counted = samples(daemon)
    return sum(counted.get(("dispatcher_rpc_seconds_count", name), 0) for name in ("claim_wakes", "report_wakes"))


def test_an_outage_shows_in_every_page(api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon) -> None:
    seed.agent("ada")
    daemon = start_daemon(
        METRICS_PORT=free_port(), REST_TIMEOUT=1, RECONCILE_INTERVAL=0.5, DEGRADED_RECONCILE_INTERVAL=0.5
    ).ready()
    api.faults(rest={"fail": -1, "status": 503}, realtime={"connect_status": 500, "close": 1001})
    wait_until(lambda: page(daemon, "healthz").status_code == 503, 20)
    assert any(cause.startswith("sweep:") for cause in page(daemon, "healthz").json()["causes"])
    assert page(daemon, "readyz").status_code == 503
    counted = samples(daemon)
    assert counted["dispatcher_health", "failing"] == 1
    assert counted["dispatcher_loop_ok", "sweep"] == 0
    assert counted["dispatcher_rpc_errors_total", "sweep_inbox", "retryable"] >= 3
    wait_until(lambda: samples(daemon)["dispatcher_realtime_state", "ready"] == 0, 10)
    assert samples(daemon)["dispatcher_realtime_gaps_total",] >= 1
    api.faults(rest={"fail": 0}, realtime={"connect_status": None})
    wait_until(lambda: page(daemon, "readyz").status_code == 200, 30)


def test_the_port_is_on_loopback_alone_and_closed_without_the_setting(
    seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.gateway()
    silent, serving = start_daemon(), start_daemon(METRICS_PORT=free_port())
    serving.wait_for("metrics.served"), silent.wait_for("daemon.ready")
    assert listeners(silent) == set()
    assert listeners(serving) == {("127.0.0.1", int(serving.environment["METRICS_PORT"]))}


def listeners(daemon: DaemonProcess) -> set[tuple[str, int]]:
    found = psutil.Process(daemon.pid).net_connections("inet")
    return {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def test_nothing_of_prometheus_is_loaded_unless_asked_for() -> None:
    """Memory: a daemon without METRICS_PORT does not pay for it."""
    text = "import dispatcher.app, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert {"prometheus_client", "http.server", "dispatcher.runtime.prometheus"} & loaded == set()


def test_a_port_in_use_costs_health_and_nothing_else(
    api: Api, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        seed.agent("ada")
        daemon = start_daemon(METRICS_PORT=taken.getsockname()[1], HEARTBEAT_INTERVAL=0.5)
        daemon.wait_for("metrics.failed")
        seed.item("ada")
        daemon.wait_for("wake.ended", ending="exited")
        [line] = daemon.wait_for("health.changed", status="degraded")
        assert "METRICS_PORT" in line["msg"]
    daemon.wait_for("metrics.served", deadline=15)
