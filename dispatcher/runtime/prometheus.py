"""Keeps the metrics and serves them: `/metrics`, `/livez`, `/healthz`, `/readyz`. Loaded only with METRICS_PORT set."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dispatcher import events
from dispatcher.logs import get_logger, log_lines
from dispatcher.runtime import metrics
from dispatcher.runtime.health import Health
from dispatcher.runtime.metrics import Family, Meter
from dispatcher.runtime.service import Service

log = get_logger(__name__)

REALTIME_STATUSES: Final = ("ready", "connecting", "deaf", "down")
GATEWAY_STATUSES: Final = ("ready", "connecting", "starting", "draining", "hung", "down", "barred", "unused")
HEALTH_STATUSES: Final = ("starting", "ok", "degraded", "failing")
BIND_AGAIN_SECONDS: Final = 5.0
TURN_SECONDS: Final = 0.5
# A whole request takes no longer than this, and there are no more threads than that: who comes when all are taken gets
# the one of the client that has taken longest.
CLIENT_SECONDS: Final = 5.0
MAX_CLIENTS: Final = 8
MAKE_ROOM_SECONDS: Final = 1.0
JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked at the moment of a scrape.

    `realtime` answers {"status", "gaps"}, `gateway` {"status", "outages"}, `not_ready` why the daemon takes no work yet
    or any more, None when it does.
    """

    health: Health
    live_wakes: Callable[[], int]
    realtime: Callable[[], Mapping[str, Any]]
    gateway: Callable[[], Mapping[str, Any]]
    not_ready: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a page says."""

    status: int
    content_type: str
    body: bytes


class PrometheusMeter(Meter):
    """Counts and measures in a registry of its own."""

    def __init__(self, version: str, gateway_id: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._decisions = self._counter(metrics.DECISIONS)
        self._latency = self._histogram(metrics.LATENCY)
        self._ended = self._counter(metrics.ENDED)
        self._process = self._histogram(metrics.PROCESS)
        self._sweeps = self._histogram(metrics.SWEEPS)
        self._swept = self._counter(metrics.SWEPT)
        self._calls = self._histogram(metrics.CALLS)
        self._call_errors = self._counter(metrics.CALL_ERRORS)
        self._waitlist = self._gauge(metrics.WAITLIST)
        self._backlog = self._gauge(metrics.BACKLOG)
        self._oldest = self._gauge(metrics.OLDEST)
        self._paused = self._gauge(metrics.PAUSED)
        self._runs = self._gauge(metrics.RUNS)
        self._held = self._gauge(metrics.HELD)
        self._gauge(metrics.INFO).labels(version, gateway_id).set(1)
        for step in metrics.SWEEP_STEPS:
            self._swept.labels(step)

    def _counter(self, family: Family) -> Counter:
        return Counter(family.name, family.meaning, family.labels, registry=self.registry)

    def _gauge(self, family: Family) -> Gauge:
        return Gauge(family.name, family.meaning, family.labels, registry=self.registry)

    def _histogram(self, family: Family) -> Histogram:
        return Histogram(family.name, family.meaning, family.labels, registry=self.registry, buckets=family.buckets)

    def decided(self, reason: str) -> None:
        self._decisions.labels(reason).inc()

    def started(self, path: str, latency_s: float) -> None:
        # Two clocks are compared: a host that is behind would else take time off the sum.
        self._latency.labels(path).observe(max(0.0, latency_s))

    def process_ended(self, ending: str, seconds: float) -> None:
        self._process.labels(ending).observe(seconds)

    def ended(self, state: str) -> None:
        self._ended.labels(state).inc()

    def swept(self, seconds: float, counts: Mapping[str, int]) -> None:
        self._sweeps.observe(seconds)
        self._waitlist.set(counts.get("waiting", 0))
        for step in metrics.SWEEP_STEPS:
            self._swept.labels(step).inc(counts.get(step, 0))

    def gauged(self, gauges: Mapping[str, Any]) -> None:
        for age in metrics.BACKLOG_AGES:
            self._backlog.labels(age).set(gauges["backlog"][age])
        self._oldest.set(gauges["backlog"]["oldest_seconds"] or 0)
        self._paused.set(gauges["backlog"]["waiting_for_paused"])
        for status in metrics.RUN_STATUSES:
            self._runs.labels(status).set(gauges["runs"].get(status, 0))
        self._held.set(gauges["held"] or 0)

    def called(self, function: str, seconds: float, outcome: str) -> None:
        self._calls.labels(function).observe(seconds)
        if outcome != "ok":
            self._call_errors.labels(function, outcome).inc()


class _AtThisMoment(Collector):
    """What is not counted but asked for."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return ()  # asking for the names must not ask the daemon

    def collect(self) -> Iterator[Metric]:
        health, realtime = self._sources.health.snapshot(), self._sources.realtime()
        loops = {name: loop["status"] == "ok" for name, loop in health["loops"].items()}
        yield _gauges(metrics.LIVE, {(): self._sources.live_wakes()})
        yield _gauges(metrics.REALTIME, {(one,): one == realtime["status"] for one in REALTIME_STATUSES})
        yield CounterMetricFamily(metrics.GAPS.name, metrics.GAPS.meaning, value=float(realtime["gaps"]))
        gateway = self._sources.gateway()
        yield _gauges(metrics.GATEWAY, {(one,): one == gateway["status"] for one in GATEWAY_STATUSES})
        yield CounterMetricFamily(metrics.OUTAGES.name, metrics.OUTAGES.meaning, value=float(gateway["outages"]))
        yield _gauges(metrics.HEALTH, {(one,): one == health["status"] for one in HEALTH_STATUSES})
        yield _gauges(metrics.LOOPS, {(name,): is_ok for name, is_ok in loops.items()})
        waiting, dropped = log_lines()
        yield _gauges(metrics.LOG_WAITING, {(): waiting})
        yield CounterMetricFamily(metrics.LOG_DROPPED.name, metrics.LOG_DROPPED.meaning, value=float(dropped))


def _gauges(family: Family, values: Mapping[tuple[str, ...], float]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
    for labels, value in values.items():
        found.add_metric(labels, float(value))
    return found


class Pages:
    """The pages. `answer` is called by the thread of each request."""

    def __init__(self, meter: PrometheusMeter, sources: Sources) -> None:
        self._registry = meter.registry
        self._sources = sources
        self._registry.register(_AtThisMoment(sources))

    def answer(self, path: str, accept: str) -> Answer:
        """The page at that path; 404 where there is none."""
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return Answer(200, content_type, encode(self._registry))
        if path == "/livez":
            return self._liveness()
        if path == "/healthz":
            seen = self._sources.health.snapshot()
            return _json(503 if seen["status"] == "failing" else 200, seen)
        if path == "/readyz":
            return self._readiness()
        return _json(404, {"pages": ["/metrics", "/livez", "/healthz", "/readyz"]})

    def _liveness(self) -> Answer:
        loops = self._sources.health.snapshot()["loops"]
        still = [name for name, loop in loops.items() if not loop["live"]]
        return _json(503 if still else 200, {"live": not still, "stand_still": still})

    def _readiness(self) -> Answer:
        seen = self._sources.health.snapshot()
        reason = self._sources.not_ready()
        if reason is None and seen["status"] == "failing":
            reason = "; ".join(seen["causes"])
        return _json(200 if reason is None else 503, {"ready": reason is None, "cause": reason})


def _json(status: int, facts: Mapping[str, Any]) -> Answer:
    return Answer(status, JSON_TYPE, json.dumps(facts).encode() + b"\n")


class MetricsService(Service):
    """Serves the pages. A port that cannot be had degrades the daemon's health and is tried again; wakes go on."""

    def __init__(self, host: str, port: int, pages: Pages, health: Health) -> None:
        super().__init__("metrics")
        self._address = (host, port)
        self._pages = pages
        self._health = health
        self._told = False

    def run_service(self) -> None:
        """Serves until asked to stop."""
        while not self.stopping.is_set():
            try:
                server = _Server(self._address, self._pages)
            except OSError as error:
                self._wait_for_port(error)
                continue
            self._told = False
            self._health.clear_cause(self.name)
            with server:
                self._serve(server)

    def _serve(self, server: _Server) -> None:
        host, port = server.server_address[:2]
        log.info(events.METRICS_SERVED, msg=f"Metrics at http://{host!s}:{port}/metrics", host=host, port=port)
        while not self.stopping.is_set():
            server.handle_request()
            server.end_overdue()

    def _wait_for_port(self, error: OSError) -> None:
        host, port = self._address
        text = f"METRICS_PORT={port} on {host} cannot be had: {error.strerror or error}"
        self._health.add_cause(self.name, text)
        if not self._told:
            log.warning(events.METRICS_FAILED, msg=f"{text}; trying again", host=host, port=port)
            self._told = True
        self.stopping.wait(BIND_AGAIN_SECONDS)


def metrics_service(
    host: str,
    port: int,
    meter: PrometheusMeter,
    *,
    health: Health,
    live_wakes: Callable[[], int],
    realtime: Callable[[], Mapping[str, Any]],
    gateway: Callable[[], Mapping[str, Any]],
    not_ready: Callable[[], str | None],
) -> MetricsService:
    """The service for METRICS_HOST and METRICS_PORT; for the rest see `Sources`."""
    pages = Pages(meter, Sources(health, live_wakes, realtime, gateway, not_ready))
    return MetricsService(host, port, pages, health)


class _Clients:
    """The requests under way, oldest first, no more than MAX_CLIENTS."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._since: dict[socket, float] = {}

    def take_place(self, client: socket) -> bool:
        """Counts it in, in place of the oldest where all places are taken; False when that one does not go."""
        with self._changed:
            if len(self._since) >= MAX_CLIENTS:
                _hang_up(next(iter(self._since)))
            has_room = self._changed.wait_for(lambda: len(self._since) < MAX_CLIENTS, MAKE_ROOM_SECONDS)
            if has_room:
                self._since[client] = time.monotonic()
            return has_room

    def leave(self, client: socket) -> None:
        """Its request is over."""
        with self._changed:
            self._since.pop(client, None)
            self._changed.notify_all()

    def end_those_before(self, moment: float) -> None:
        """Hangs up on those that came before `moment` (monotonic seconds)."""
        with self._changed:
            for client in [client for client, since in self._since.items() if since < moment]:
                _hang_up(client)


def _hang_up(client: socket) -> None:
    """Its thread reads an end, or fails to write; closing the socket is left to it."""
    with contextlib.suppress(OSError):
        client.shutdown(SHUT_RDWR)


class _Server(ThreadingMixIn, TCPServer):
    """Not `HTTPServer`: that one asks the resolver for this host's name, which can take seconds."""

    allow_reuse_address = True
    daemon_threads = True
    timeout = TURN_SECONDS

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self.pages = pages
        self._clients = _Clients()
        super().__init__(address, _Handler)

    def end_overdue(self) -> None:
        """Ends the requests that have taken longer than one may."""
        self._clients.end_those_before(time.monotonic() - CLIENT_SECONDS)

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        assert isinstance(request, socket)
        if not self._clients.take_place(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._clients.leave(request)
            raise

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        assert isinstance(request, socket)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.leave(request)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:  # noqa: ARG002 - socketserver's
        log.debug(events.METRICS_FAILED, msg="A client of the metrics port went away", error=str(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS
    server: _Server

    def do_GET(self) -> None:
        answer = self._answer()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _answer(self) -> Answer:
        try:
            return self.server.pages.answer(self.path.partition("?")[0], self.headers.get("Accept", ""))
        except Exception as error:
            log.error(events.METRICS_FAILED, msg="A page of the metrics port cannot be made", exc_info=error)
            return _json(500, {"error": type(error).__name__})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Scrapes are no news."""
