"""What is counted, and who may ask. The service is tried over a real loopback port."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.runtime import metrics, prometheus
from dispatcher.runtime.health import Health
from dispatcher.runtime.metrics import Meter
from dispatcher.runtime.prometheus import MAX_CLIENTS, MetricsService, PrometheusMeter, metrics_service
from tests.support.waiting import wait_until


class Watched:
    """A meter with everything around it that a daemon would have."""

    def __init__(self, port: int = 0) -> None:
        self.health = Health()
        self.meter = PrometheusMeter("1.2.3", "east")
        self.state: dict[str, Any] = {"status": "ready", "gaps": 2}
        self.not_ready: str | None = None
        self.service: MetricsService = metrics_service(
            "127.0.0.1",
            port or free_port(),
            self.meter,
            health=self.health,
            live_wakes=lambda: 3,
            realtime=lambda: self.state,
            gateway=lambda: {"status": "hung", "outages": 3},
            not_ready=lambda: self.not_ready,
        )

    @property
    def port(self) -> int:
        return self.service._address[1]

    def get(self, page: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, page, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def samples(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.get("/metrics")[1].decode())
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def watched() -> Iterator[Watched]:
    daemon = Watched()
    daemon.service.start()
    wait_until(lambda: is_open(daemon.port), 5)
    yield daemon
    daemon.service.request_stop()
    assert daemon.service.join(5)


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_f8_lines_of_the_log_that_wait_or_were_dropped_are_counted(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "log_lines", lambda: (5, 7))
    samples = watched.samples()
    assert samples["dispatcher_log_lines_waiting",] == 5
    assert samples["dispatcher_log_lines_dropped_total",] == 7


def test_each_report_is_counted_under_its_name(watched: Watched) -> None:
    meter = watched.meter
    meter.decided("granted"), meter.decided("cooldown"), meter.decided("cooldown")
    meter.started("event", 0.02)
    meter.process_ended("exited", 4.0)
    meter.ended("succeeded")
    meter.swept(0.2, {"waiting": 7, "expired": 2, "ms": 12})
    backlog = {"items": 6, "under_1m": 3, "under_1h": 1, "over_1h": 2, "oldest_seconds": 7000, "waiting_for_paused": 4}
    meter.gauged({"backlog": backlog, "runs": {"queued": 4}, "held": 2})
    meter.called("claim_wakes", 0.003, "ok"), meter.called("claim_wakes", 10.0, "unavailable")
    samples = watched.samples()
    expected = {
        ("dispatcher_wake_decisions_total", "granted"): 1,
        ("dispatcher_wake_decisions_total", "cooldown"): 2,
        ("dispatcher_wake_latency_seconds_bucket", "0.025", "event"): 1,
        ("dispatcher_wake_latency_seconds_bucket", "0.01", "event"): 0,
        ("dispatcher_wake_process_seconds_sum", "exited"): 4,
        ("dispatcher_wakes_ended_total", "succeeded"): 1,
        ("dispatcher_waitlist",): 7,
        ("dispatcher_sweep_rows_total", "expired"): 2,
        ("dispatcher_sweep_seconds_count",): 1,
        ("dispatcher_backlog_items", "over_1h"): 2,
        ("dispatcher_backlog_oldest_seconds",): 7000,
        ("dispatcher_backlog_waiting_for_paused",): 4,
        ("dispatcher_workflow_runs", "queued"): 4,
        ("dispatcher_workflow_runs", "running"): 0,
        ("dispatcher_budget_held_runs",): 2,
        ("dispatcher_rpc_seconds_count", "claim_wakes"): 2,
        ("dispatcher_rpc_errors_total", "claim_wakes", "unavailable"): 1,
        ("dispatcher_live_wakes",): 3,
        ("dispatcher_realtime_state", "ready"): 1,
        ("dispatcher_realtime_state", "deaf"): 0,
        ("dispatcher_realtime_gaps_total",): 2,
        ("dispatcher_gateway_state", "hung"): 1,
        ("dispatcher_gateway_state", "ready"): 0,
        ("dispatcher_gateway_outages_total",): 3,
        ("dispatcher_health", "ok"): 1,
        ("dispatcher_info", "1.2.3", "east"): 1,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_a_clock_behind_the_databases_takes_nothing_off(watched: Watched) -> None:
    watched.meter.started("event", -3.0)
    assert watched.samples()[("dispatcher_wake_latency_seconds_sum", "event")] == 0


def test_every_family_of_the_table_is_shown_and_no_other() -> None:
    watched = Watched()
    shown = {one.name for one in watched.meter.registry.collect() if one.name.startswith("dispatcher_")}
    assert shown == {family.name for family in metrics.FAMILIES}


def test_a_daemon_without_metrics_reports_all_the_same() -> None:
    """Both meters take the same reports, whoever asks."""
    reports = [name for name in vars(Meter) if not name.startswith("_")]
    assert reports == [name for name in vars(PrometheusMeter) if name in reports]
    for meter in (Meter(), PrometheusMeter("1", "g")):
        meter.decided("x"), meter.started("x", 1.0), meter.process_ended("x", 1.0), meter.ended("x")
        none = {"items": 0, "under_1m": 0, "under_1h": 0, "over_1h": 0, "oldest_seconds": None, "waiting_for_paused": 0}
        meter.gauged({"backlog": none, "runs": {}, "held": None})
        meter.swept(1.0, {}), meter.called("x", 1.0, "refused")


def test_open_metrics_where_asked_for(watched: Watched) -> None:
    status, body = watched.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, body.endswith(b"# EOF\n")) == (200, True)


@pytest.mark.parametrize(("failures", "status", "code"), [(0, "ok", 200), (1, "degraded", 200), (3, "failing", 503)])
def test_ff71_healthz_says_which_loop(watched: Watched, failures: int, status: str, code: int) -> None:
    for _ in range(failures):
        watched.health.loop("sweep", 60).failed("no database")
    answered, body = watched.get("/healthz")
    seen = json.loads(body)
    assert (answered, seen["status"]) == (code, status)
    assert all(cause.startswith("sweep:") for cause in seen["causes"])
    assert bool(seen["causes"]) == bool(failures)


def test_readyz_waits_for_the_first_sweep_and_ends_with_the_stop(watched: Watched) -> None:
    watched.not_ready = "the first sweep is not done"
    assert watched.get("/readyz")[0] == 503
    watched.not_ready = None
    assert watched.get("/readyz")[0] == 200
    for _ in range(3):
        watched.health.loop("claims", None).failed("no database")
    status, body = watched.get("/readyz")
    assert (status, "claims" in json.loads(body)["cause"]) == (503, True)


def test_c21_livez_is_about_the_process_alone(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        watched.health.loop("sweep", 60).failed("no database")
    assert watched.get("/healthz")[0] == 503
    assert (watched.get("/livez")[0], json.loads(watched.get("/livez")[1])["live"]) == (200, True)
    monkeypatch.setattr(watched.health.loop("sweep", 60), "_is_live", lambda _now: False)
    status, body = watched.get("/livez")
    assert (status, json.loads(body)) == (503, {"live": False, "stand_still": ["sweep"]})


def test_there_are_four_pages_and_one_method(watched: Watched) -> None:
    assert watched.get("/")[0] == 404
    assert watched.get("/metrics?x=1")[0] == 200
    assert watched.get("/healthz", "HEAD") == (200, b"")
    assert watched.get("/metrics", "POST")[0] == 501


def test_a_source_that_raises_is_a_500_and_no_end(watched: Watched) -> None:
    watched.state = {}
    assert watched.get("/metrics")[0] == 500
    assert watched.service.is_alive


def test_a_port_in_use_degrades_health_and_is_had_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "BIND_AGAIN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        watched = Watched(taken.getsockname()[1])
        watched.service.start()
        [cause] = wait_until(lambda: watched.health.snapshot()["causes"], 5)
        assert f"METRICS_PORT={watched.port}" in cause
        assert watched.service.is_alive
    wait_until(lambda: watched.health.snapshot()["status"] == "ok", 5)
    assert watched.get("/healthz")[0] == 200
    watched.service.request_stop()
    assert watched.service.join(5)


def test_clients_that_say_nothing_hold_few_threads_and_not_for_long(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_SECONDS", 0.5)
    silent = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(MAX_CLIENTS + 4)]
    try:
        wait_until(closed_by_server(silent, 4), 3)
        wait_until(closed_by_server(silent, len(silent)), 5)
    finally:
        for connection in silent:
            connection.close()


def test_s12_slow_clients_leave_room_for_health_and_are_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says a byte now and then, as many as may be served at once; a health check comes sixteen times."""
    monkeypatch.setattr(prometheus, "CLIENT_SECONDS", 3.0)
    slow = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(MAX_CLIENTS)]
    ended = threading.Event()
    trickle = threading.Thread(target=say_a_byte_now_and_then, args=(slow, ended))
    trickle.start()
    try:
        assert [watched.get("/livez")[0] for _ in range(16)] == [200] * 16
        wait_until(closed_by_server(slow, MAX_CLIENTS), 8)
    finally:
        ended.set()
        trickle.join()
        for connection in slow:
            connection.close()


def say_a_byte_now_and_then(connections: list[socket.socket], ended: threading.Event) -> None:
    while not ended.wait(0.05):
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"G")


def closed_by_server(connections: list[socket.socket], number: int) -> Callable[[], bool]:
    def are_closed() -> bool:
        closed = 0
        for connection in connections:
            connection.setblocking(False)
            try:
                closed += connection.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                continue
            except ConnectionError:
                closed += 1
        return closed >= number

    return are_closed


def watched_answers(watched: Watched) -> bool:
    try:
        return watched.get("/healthz")[0] == 200
    except OSError:
        return False
    except http.client.HTTPException:
        return False
