"""The composition root: builds every long-lived object of the daemon, once, and runs them until told to stop."""

from __future__ import annotations

import functools
import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import dispatcher
from dispatcher import events
from dispatcher.agents import proctable
from dispatcher.agents.command import WAKE_MARKER, child_environment, state_environment
from dispatcher.agents.gateway_calls import CommandLineCalls
from dispatcher.agents.openclaw import find_executable, warn_of_affected_version
from dispatcher.agents.openclaw_calls import OpenclawCommand
from dispatcher.agents.process import prepare_parent, stop_strays
from dispatcher.agents.proctable import ProcessIdentity
from dispatcher.agents.registry import AgentRegistry
from dispatcher.agents.service import SupervisionService
from dispatcher.agents.supervisor import Ending, Supervisor, WakeProcess
from dispatcher.answers import Answer
from dispatcher.clock import rfc3339_ms
from dispatcher.config import Settings
from dispatcher.errors import MalformedAnswer, MigrationsMissing, RestError, ShuttingDown, is_held
from dispatcher.inbox.book import BookedWake, WakeBook
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.hints import Hints, LocalAgents
from dispatcher.inbox.launcher import Launcher
from dispatcher.inbox.model import Ended, Grant, ReportResult
from dispatcher.inbox.namesakes import Namesakes
from dispatcher.inbox.reporter import Reporter
from dispatcher.inbox.settings import wake_settings
from dispatcher.inbox.store import InboxStore, booked
from dispatcher.inbox.sweep import Sweeper
from dispatcher.inbox.worker import ClaimTroubles, WakeWorker
from dispatcher.instance.adoption import Adopter, Host
from dispatcher.instance.faults import FaultWatch
from dispatcher.instance.heartbeat_file import HeartbeatFile, own_file
from dispatcher.instance.holders import HolderWatch, WatchedRest
from dispatcher.instance.model import Adoption, OpenWake, Registration
from dispatcher.instance.schema import difference, refuse_older
from dispatcher.instance.service import Heart, Pulse
from dispatcher.instance.store import MISSING_FUNCTION, InstanceStore
from dispatcher.logs import get_logger
from dispatcher.openclaw.config_file import config_candidates
from dispatcher.openclaw.finder import EndpointFinder
from dispatcher.openclaw.gateway import Gateway
from dispatcher.openclaw.hold import GATE, GatewayHold
from dispatcher.openclaw.link import GatewayLink
from dispatcher.openclaw.state import GatewayState
from dispatcher.runtime.group import ServiceGroup
from dispatcher.runtime.health import STANDSTILL_SECONDS, Health
from dispatcher.runtime.metrics import Meter
from dispatcher.runtime.repeats import Repeats
from dispatcher.runtime.service import PeriodicService, Service
from dispatcher.runtime.signals import SignalCollector
from dispatcher.runtime.wakeup import DueTimes
from dispatcher.supabase.network import network_of, realtime_network_of
from dispatcher.supabase.realtime import RealtimeService, RealtimeState
from dispatcher.supabase.realtime_paths import Hint
from dispatcher.supabase.rest import RestClient, Timeouts
from dispatcher.workflows.model import Respawn, Suspect
from dispatcher.workflows.monitor import Monitor, monitor_interval
from dispatcher.workflows.notify import Notifier
from dispatcher.workflows.service import ProcessStopper, Ticker
from dispatcher.workflows.settings import workflow_settings
from dispatcher.workflows.store import WorkflowStore

log = get_logger(__name__)

WORKERS: Final = 2
# What a stop may take beyond the grace: the ladder of the wakes, the last reports, the threads; then, with what is
# left of the limit, the goodbye.
STOP_SECONDS: Final = 9.5
STOP_LIMIT: Final = 10.0
SHORTEST_GOODBYE: Final = 0.2
LONGEST_GOODBYE: Final = 3.0
# The Realtime loop turns about once a second; see RealtimeService.on_alive.
REALTIME_TURN_SECONDS: Final = 5.0
# So does the link to the Gateway, or once in five seconds when nothing is amiss.
GATEWAY_TURN_SECONDS: Final = 10.0
LONGEST_PULSE_SECONDS: Final = 10.0
GAUGE_SECONDS: Final = 30.0
# A registration has waited in the database for what another session holds.
HELD_SECONDS: Final = 0.8
# By so much the deadline in the database lies behind the time-out of the process, as `claim_one_wake` writes it.
DEADLINE_MARGIN: Final = 15.0


class Daemon:
    """`run` is the whole life of the daemon. Built from settings alone; raises the errors of its parts' start."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._environ = environ
        self._executable = find_executable(settings.openclaw_bin, environ.get("PATH"))
        warn_of_affected_version(self._executable)
        self._instance_id = uuid4()
        self._host = Host(proctable.host_id(), socket.gethostname())
        self._health = Health(standstill=max(STANDSTILL_SECONDS, 3 * settings.rest_timeout))
        self._faults = FaultWatch(self._health)
        self._health.await_first("sweep", "the first sweep is not done")
        self._health.await_first("realtime", "Realtime is not subscribed yet")
        self._ending = threading.Event()
        self._group: ServiceGroup | None = None
        self._registered: queue.SimpleQueue[Registration | BaseException | None] = queue.SimpleQueue()
        key = settings.supabase_service_role_key.get_secret_value()
        self._meter, self._serve_metrics = _meter(settings)
        self._rest = RestClient(
            settings.supabase_url,
            key,
            network=network_of(settings),
            timeouts=Timeouts(call=settings.rest_timeout),
            on_call=self._meter.called,
        )
        self._holders = HolderWatch(self._health, self._ask_who_holds)
        self._calls = WatchedRest(self._rest, self._holders)
        self._instances = InstanceStore(self._calls)
        self._config_files = config_candidates(
            settings.openclaw_home, settings.openclaw_state_dir, settings.openclaw_config_path
        )
        self._registry = AgentRegistry(self._config_files)
        self._openclaw = OpenclawCommand(self._executable, self._child_environment, self._ending.is_set)
        self._build_gateway()
        # Of this daemon alone: one that waits for its gateway's row is followed by another in the same process.
        self._environment_of_all = functools.lru_cache(maxsize=1)(self._read_environment_of_all)
        self._build_inbox()

    # -- building

    def _build_gateway(self) -> None:
        finder = EndpointFinder(self._config_files, self._environ, is_off=self._settings.gateway_link == "off")
        self._link = GatewayLink(
            finder.find,
            changed=finder.signature,
            on_state=self._on_gateway_state,
            on_alive=self._health.loop("gateway", GATEWAY_TURN_SECONDS).succeeded,
        )
        self._gateway = Gateway(self._link, CommandLineCalls(self._openclaw))
        self._hold = GatewayHold(
            lambda: self._link.state,
            can_start=lambda: shutil.which(self._executable) is not None,
            on_cause=self._on_hold_cause,
            on_over=self._on_hold_over,
        )

    def _build_inbox(self) -> None:
        settings = self._settings
        self._book = WakeBook(on_deferred=self._look_again)
        self._agents = LocalAgents()
        self._malformed_hints = Repeats()
        self._due: DueTimes[UUID] = DueTimes()
        self._hints = Hints(self._agents, self._due, self._book)
        self._store = InboxStore(self._calls, lambda: self._instance_id, self._book)
        self._launcher = self._build_launcher()
        self._decisions = Decisions(
            self._launcher.launch, self._due, rest=self._hints.rest, on_decision=_counted(self._meter.decided)
        )
        self._supervisor = Supervisor(
            self._on_process_end, settings.agent_process_timeout, output_dir=settings.agent_output_dir
        )
        self._reporter = Reporter(
            self._store,
            self._book,
            self._claim_limit,
            on_verdicts=self._decisions.act_on,
            on_result=self._on_result,
            health=self._health.loop("reports", None),
        )
        self._launcher.connect(self._supervisor, self._reporter.put)

    def _build_launcher(self) -> Launcher:
        self._namesakes = Namesakes(self._registry.known_ids)
        return Launcher(
            book=self._book,
            executable=self._executable,
            host_id=self._host.host_id,
            resolve_agent=self._registry.resolve,
            child_environment=self._child_environment,
            namesakes=self._namesakes,
            hold=self._hold,
            on_held=self._on_held,
            on_started=_counted(self._meter.started),
        )

    def _child_environment(self, wake_id: str) -> Mapping[str, str]:
        return {**self._environment_of_all(self._registry.config_path()), WAKE_MARKER: wake_id}

    def _read_environment_of_all(self, config_path: Path | None) -> Mapping[str, str]:
        """What the environments of all wakes have in common. It changes with the place of `openclaw.json` alone."""
        settings, environ = self._settings, self._environ
        return child_environment(
            environ,
            "",
            passthrough=settings.agent_env_passthrough,
            secrets=settings.secret_values(),
            openclaw=state_environment(environ, settings.openclaw_home, config_path),
        )

    def _build_workflows(self) -> list[PeriodicService]:
        settings, interval = self._settings, self._settings.workflow_poll_interval
        self._workflow_store = WorkflowStore(self._calls, lambda: self._instance_id)
        stopper = ProcessStopper(self._supervisor.stop)
        notifier = Notifier(
            self._workflow_store,
            self._openclaw,
            self._registry.known_ids,
            interval=interval,
            is_stopping=self._ending.is_set,
        )
        self._notify = self._periodic("notify", notifier.beat, notifier.next_interval, None)
        ticker = Ticker(
            self._workflow_store,
            interval=interval,
            stopper=stopper,
            health=self._health,
            on_dispatched=self._notify.wake_early,
            is_stopping=self._ending.is_set,
        )
        self._workflows = self._periodic("workflows", ticker.beat, ticker.next_interval, interval)
        monitor = Monitor(
            self._workflow_store,
            self._openclaw,
            stopper,
            self._claim_respawn,
            self._launch_respawn,
            known_agents=self._registry.known_ids,
            is_stopping=self._ending.is_set,
        )
        seconds = monitor_interval(settings.stale_claim_seconds)
        self._monitor = self._periodic("monitor", monitor.beat, seconds, seconds)
        return [self._notify, self._workflows, self._monitor]

    def _periodic(
        self, name: str, beat: Callable[[], None], interval: float | Callable[[], float], expected: float | None
    ) -> PeriodicService:
        """A loop whose health is measured by the interval it is expected to keep; None: by its failures alone."""
        return PeriodicService(name, beat, interval, health=self._health.loop(name, expected))

    def _claim_respawn(self, suspect: Suspect) -> Respawn:
        """As `InboxStore` does it: what is granted is in the book before the call counts as answered."""
        if self._hold.cause is not None:  # it would be the one new process of this attempt, and come to nothing
            return Respawn(GATE, Answer.of("respawn_workflow_run", {}), "")
        request = uuid4()
        with self._book.asking(request):
            respawn = self._workflow_store.respawn(suspect, request)
            if respawn.refusal is None:
                grant = Grant.read(respawn.grant)
                self._book.add(booked(grant))
        return respawn

    def _launch_respawn(self, respawn: Respawn, message: str) -> None:
        self._launcher.launch(replace(Grant.read(respawn.grant), message=message))

    def _build_services(self, registration: Registration) -> ServiceGroup:
        settings = self._settings
        self._realtime = self._build_realtime(registration)
        self._adopter = self._build_adopter()
        self._sweeper = self._build_sweeper()
        sweep_health = self._health.loop("sweep", settings.reconcile_interval)
        self._sweep = PeriodicService("sweep", self._sweeper.beat, self._sweeper.next_interval, health=sweep_health)
        claims = self._health.loop("claims", None)
        self._claim_troubles = ClaimTroubles()
        workers = [
            WakeWorker(
                f"inbox-{number}",
                hints=self._hints,
                store=self._store,
                agents=self._agents,
                decisions=self._decisions,
                health=claims,
                troubles=self._claim_troubles,
                hold=self._hold,
            )
            for number in range(1, WORKERS + 1)
        ]
        self._supervision = SupervisionService(self._supervisor, settings.shutdown_grace)
        # Stopped in reverse: first whoever finds work, then the wakes, then whoever reports and keeps leases alive.
        finders = [*workers, *self._build_workflows(), self._sweep, self._realtime]
        return ServiceGroup(
            [
                self._build_pulse(),
                *self._build_metrics(),
                self._link,
                self._reporter,
                self._build_heart(),
                self._supervision,
                *finders,
            ],
            stopped_first=finders,
        )

    def _build_metrics(self) -> list[Service]:
        if self._serve_metrics is None:
            return []
        return [
            self._serve_metrics(
                health=self._health,
                live_wakes=lambda: len(self._supervisor),
                realtime=lambda: _as_json(self._realtime.state),
                gateway=lambda: _gateway_as_json(self._gateway.state),
                not_ready=self._not_ready,
            ),
            PeriodicService("gauges", self._read_gauges, GAUGE_SECONDS),
        ]

    def _read_gauges(self) -> None:
        self._meter.gauged(self._instances.gauges(self._instance_id))

    def _not_ready(self) -> str | None:
        if self._ending.is_set():
            return "stopping"
        return None if self._sweeper.sweeps else "the first sweep is not done"

    def _build_realtime(self, registration: Registration) -> RealtimeService:
        settings = self._settings
        self._realtime_loop = self._health.loop("realtime", REALTIME_TURN_SECONDS)
        self._was_realtime_well = False
        realtime = RealtimeService(
            url=settings.supabase_url,
            key=settings.supabase_service_role_key.get_secret_value(),
            gateway_topic=lambda: registration.topic,
            tenant_id=settings.tenant_id,
            instance_id=self._instance_id,
            mode=settings.realtime_mode,
            network=realtime_network_of(settings),
            on_hint=self._on_hint,
            on_ready=self._on_ready,
            on_state=self._on_state,
            on_alive=self._realtime_loop.succeeded,
        )
        realtime.broadcast_available = registration.broadcast_available
        return realtime

    def _build_sweeper(self) -> Sweeper:
        settings = self._settings
        return Sweeper(
            self._store,
            self._agents,
            self._namesakes,
            self._hints.items,
            self._decisions,
            claim_limit=self._claim_limit,
            interval=settings.reconcile_interval,
            degraded_interval=settings.degraded_reconcile_interval,
            is_realtime_well=self._is_realtime_well,
            settle_open_wakes=self._settle_open_wakes,
            on_broadcast_available=self._on_broadcast_available,
            health=self._health,
            is_stopping=self._ending.is_set,
            on_swept=self._on_swept,
        )

    def _build_adopter(self) -> Adopter:
        return Adopter(
            self._host,
            self._settings.instance_timeout,
            adopt=lambda wake, process: self._instances.adopt(
                self._instance_id, wake, self._host.host_id, process.pid, process.started_at
            ),
            on_adopted=self._on_adopted,
            on_lost=self._on_lost,
            on_unstarted=self._on_unstarted,
            stop_strays=stop_strays,
            pause=time.sleep,
        )

    def _build_pulse(self) -> PeriodicService:
        settings = self._settings
        path = own_file(settings.heartbeat_file, settings.gateway_id)
        self._file = HeartbeatFile(path, settings.gateway_id, str(self._instance_id))
        seconds = min(settings.heartbeat_interval, LONGEST_PULSE_SECONDS)
        return PeriodicService("pulse", Pulse(self._file, self._health, self._facts, seconds).beat, seconds)

    def _build_heart(self) -> PeriodicService:
        settings = self._settings
        heart = Heart(
            self._instances,
            self._instance_id,
            live_wakes=self._book.ids,
            facts=self._facts,
            expect_canary=self._realtime.expect_canary,
            on_broadcast_available=self._on_broadcast_available,
            on_fenced=self._launcher.stop_fenced,
            on_unattended=self._settle_unattended,
            on_orphaned=self._sweep.wake_early,
            on_faults=self._faults.note,
            register_again=self._register,
        )
        health = self._health.loop("leases", settings.heartbeat_interval)
        return PeriodicService("heartbeat", lambda: self._beat(heart), settings.heartbeat_interval, health=health)

    # -- what the parts tell one another

    def _on_hint(self, hint: Hint) -> None:
        agent_id = uuid_or_none(hint.agent_id)
        item_ids = [item for text in hint.item_ids if (item := uuid_or_none(text)) is not None]
        if hint.kind == "run":
            self._workflows.wake_early()
            self._notify.wake_early()
        elif agent_id is None:
            self._tell_malformed(hint)
            self._sweep.wake_early()
        elif hint.kind == "inbox" and item_ids:
            self._sweeper.note_hint()
            self._hints.item(agent_id, item_ids, hint.path)
        else:
            self._hints.agent(agent_id)

    def _tell_malformed(self, hint: Hint) -> None:
        """A hint without an agent means everybody; one that names no agent there can be is told, now and then."""
        repeats = None if hint.agent_id is None else self._malformed_hints.news("agent id")
        if repeats is not None:
            log.warning(
                events.REALTIME_HINT_MALFORMED,
                msg=f"A hint names an agent id that is no UUID ({hint.agent_id!a:.60}); sweeping instead",
                path=hint.path,
                repeats=repeats,
            )

    def _look_again(self, agent_id: UUID) -> None:
        self._hints.agent(agent_id)

    def _on_ready(self, _path: str) -> None:
        """What came before the subscription has no hint: a sweep follows every readiness."""
        self._sweeper.note_subscribed()
        self._sweep.wake_early()
        self._workflows.wake_early()

    def _on_state(self, state: RealtimeState) -> None:
        if state.status != "connecting":
            self._health.has_come("realtime")
        if state.status == "ready":
            self._health.clear_cause("realtime")
        else:
            self._health.add_cause("realtime", f"Realtime is {state.status}: {state.cause or 'not subscribed yet'}")
            # The wait it is in was measured when hints still came; the next ones are short.
            self._sweep.wake_early()

    def _on_gateway_state(self, state: GatewayState) -> None:
        """In the thread of the link."""
        if state.is_away:
            self._health.add_cause("gateway", f"OpenClaw's Gateway is {state.status}: {state.cause}")
        else:
            self._health.clear_cause("gateway")
        if state.status == "ready":
            self._hold.came_back()

    def _claim_limit(self) -> int:
        """How many wakes a call may claim that looks for anybody: none while the Gateway takes no work."""
        return 0 if self._hold.cause is not None else self._settings.max_concurrent_wakes

    def _on_held(self, agent_id: UUID) -> None:
        """Its wake met no Gateway: it is looked at again when there is one."""
        self._hold.keep(agent_id)
        self._link.look_now()
        self._hints.later(agent_id, self._hold.ask_again)

    def _on_hold_cause(self, cause: str | None) -> None:
        if cause is None:
            self._health.clear_cause("openclaw")
        else:
            self._health.add_cause("openclaw", cause)

    def _on_hold_over(self, held: Sequence[UUID]) -> None:
        """Work goes on: with whoever was kept back at once, with whoever else waits by a sweep."""
        for agent_id in held:
            self._hints.agent(agent_id)
        if self._group is not None:
            for service in (self._sweep, self._notify, self._monitor):
                service.wake_early()

    def _is_realtime_well(self) -> bool:
        """Whether hints come: what it says of itself counts only while its loop turns."""
        return self._realtime.state.status == "ready" and self._realtime_loop.snapshot()["status"] == "ok"

    def _beat(self, heart: Heart) -> None:
        """A loop that does not turn cannot say so itself; the sweep then has to come sooner than it was told."""
        was_well, self._was_realtime_well = self._was_realtime_well, self._is_realtime_well()
        if was_well and not self._was_realtime_well:
            self._sweep.wake_early()
        heart.beat()

    def _on_swept(self, seconds: float, counts: Mapping[str, int]) -> None:
        self._health.has_come("sweep")
        self._claim_troubles.over()
        _counted(self._meter.swept)(seconds, counts)

    def _on_broadcast_available(self, available: bool) -> None:
        self._realtime.broadcast_available = available

    def _on_process_end(self, process: WakeProcess, ending: Ending) -> None:
        self._launcher.on_end(process, ending)
        _counted(self._meter.process_ended)(ending.kind, ending.duration_s)

    def _on_result(self, result: ReportResult) -> None:
        self._launcher.on_result(result)
        self._decisions.after_end(result)
        if result.applied and result.state is not None:
            _counted(self._meter.ended)(result.state)
        if result.applied and result.state == "lost" and result.agent_id is not None:
            # What is next was answered by the settings of the daemon that is gone: asked again by ours.
            self._hints.agent(result.agent_id)

    def _settle_open_wakes(self, rows: Sequence[Answer]) -> None:
        wakes = []
        for row in rows:
            try:
                wakes.append(OpenWake.read(row))
            except MalformedAnswer as error:  # the others are settled all the same
                log.error(events.WAKE_ADOPTION_FAILED, msg=f"Cannot read a wake left open: {error}", error=str(error))
        self._adopter.settle(wakes)

    def _settle_unattended(self, wakes: Sequence[OpenWake]) -> None:
        """Between the heartbeat's question and its answer some may have arrived; others are on their way."""
        self._adopter.settle_own([wake for wake in wakes if not self._book.may_hold(wake.wake_id, wake.claim_request)])

    def _on_adopted(self, wake: OpenWake, process: ProcessIdentity, adoption: Adoption) -> None:
        self._book.add(BookedWake(wake.wake_id, adoption.claim_token, wake.agent_id, wake.agent_slug, process.pid))
        if any(live.wake_id == str(wake.wake_id) for live in self._supervisor.live()):
            return  # ours all the while: it was our row that was gone
        self._namesakes.hold(wake.wake_id, wake.agent_id, wake.agent_slug)
        is_watched = False
        try:
            is_watched = self._watch_adopted(wake, process, adoption)
        except ShuttingDown:
            # Whoever comes next finds it alive and adopts it.
            self._book.remove(wake.wake_id)
        except Exception:
            # Nobody watches it: out of the book, the next heartbeat hands it to us once more.
            self._book.remove(wake.wake_id)
            raise
        finally:
            if not is_watched:
                self._namesakes.leave(wake.wake_id)

    def _watch_adopted(self, wake: OpenWake, process: ProcessIdentity, adoption: Adoption) -> bool:
        """False for a process that ended meanwhile, which is reported."""
        seconds_left = None if adoption.deadline_in is None else adoption.deadline_in - DEADLINE_MARGIN
        watched = self._supervisor.adopt(
            str(wake.wake_id), wake.agent_slug, process.pid, process.started_at, seconds_left=seconds_left
        )
        if watched is None:
            self._reporter.put(Ended(wake.wake_id, adoption.claim_token, "exited"))
        return watched is not None

    def _on_lost(self, wake: OpenWake) -> None:
        if self._book.get(wake.wake_id) is not None:
            return  # our own child, whose row lost its owner: its waiter tells how it really ended
        self._reporter.put(Ended(wake.wake_id, wake.claim_token, "lost", error="its process and its daemon are gone"))

    def _on_unstarted(self, wake: OpenWake) -> None:
        self._book.add(BookedWake(wake.wake_id, wake.claim_token, wake.agent_id, wake.agent_slug))
        error = "the answer to its claim was lost; it never ran"
        self._reporter.put(Ended(wake.wake_id, wake.claim_token, "interrupted", error=error))

    def _facts(self) -> dict[str, Any]:
        """What the heartbeat says of this daemon."""
        return {
            "health": self._health.snapshot(),
            "realtime": _as_json(self._realtime.state),
            "openclaw_gateway": _gateway_as_json(self._gateway.state),
            "live_wakes": len(self._supervisor),
            "heartbeat_interval_s": self._settings.heartbeat_interval,
            "instance_id": str(self._instance_id),
            "faults_after": self._faults.last_id,
        }

    # -- the life of the daemon

    def run(self, signals: SignalCollector, on_registered: Callable[[], object] = lambda: None) -> int:
        """Runs until a signal, now or before, or the unasked end of a service; the exit code of the process.

        Raises what the registration raises; it holds no connection then.
        """
        prepare_parent()
        signals.listen(self._on_signal)
        registration = None if signals.count else self._register_unless_told_to_stop()
        if registration is None:
            return self._end_unregistered()
        on_registered()
        self._group = group = self._build_services(registration)
        if signals.count:  # before there was a group to interrupt
            group.interrupt()
        return self._work(group, registration)

    def _work(self, group: ServiceGroup, registration: Registration) -> int:
        group.start()
        # Beside the services: the gates hold the agents concerned, and nobody else waits for a look at processes.
        settle = partial(self._adopter.settle, registration.open_wakes)
        threading.Thread(target=settle, name="adoption", daemon=True).start()
        self._tell_when_ready(registration)
        ended = group.wait_for_end()
        self._stop(group)
        return 0 if ended is None else ended.exit_code

    def _on_signal(self, count: int) -> None:
        """In the thread of the collector; the main one waits for the registration or for the group."""
        self._supervisor.note_stopping()
        if count > 1:
            self._supervisor.hurry()
        self._registered.put(None)
        if self._group is not None and count == 1:
            self._group.interrupt()

    def _register_unless_told_to_stop(self) -> Registration | None:
        """Registers in a thread, because a call that hangs must not hold up a stop; None when told to stop."""
        threading.Thread(target=self._register_and_tell, name="register", daemon=True).start()
        outcome = self._registered.get()
        if isinstance(outcome, BaseException):
            self._rest.close()
            raise outcome
        return outcome

    def _register_and_tell(self) -> None:
        try:
            self._check_schema()
            self._registered.put(self._register_when_free())
        except BaseException as error:  # noqa: BLE001 - raised again by the main thread
            self._registered.put(error)

    def _register_when_free(self) -> Registration:
        """What another session holds for long is no reason to give up; the watch says what it is."""
        while True:
            try:
                return self._register()
            except RestError as error:
                if not is_held(error) or self._ending.wait(HELD_SECONDS):
                    raise

    def _ask_who_holds(self) -> str:
        return InstanceStore(self._rest).holders(self._settings.tenant_id, self._settings.gateway_id)

    def _check_schema(self) -> None:
        """Raises MigrationsMissing for a schema that is older; tells of any other difference, and goes on."""
        try:
            schema = self._instances.schema()
        except (RestError, MalformedAnswer) as error:
            log.warning(events.SCHEMA_DIFFERS, msg=f"The schema's revision could not be read: {error}")
            return
        refuse_older(schema)
        told = difference(schema)
        if told:
            log.warning(events.SCHEMA_DIFFERS, msg=told, revision=schema.revision, drift=list(schema.drift))

    def _end_unregistered(self) -> int:
        """Told to stop before there was anything to stop; the registration may have come through all the same."""
        log.info(events.DAEMON_STOPPING, msg="Stopping before the start", live_wakes=0)
        self._sign_off(LONGEST_GOODBYE)
        log.info(events.DAEMON_STOPPED, msg="Stopped", live_wakes=0)
        return 0

    def _register(self) -> Registration:
        identity = {
            "instance_id": str(self._instance_id),
            "hostname": self._host.hostname,
            "host_id": self._host.host_id,
            "pid": os.getpid(),
            "pid_started_at": proctable.started_at(os.getpid()),
            "version": dispatcher.__version__,
        }
        settings = self._settings
        try:
            registered = wake_settings(settings) | workflow_settings(settings)
            return self._instances.register(settings.tenant_id, settings.gateway_id, identity, registered)
        except RestError as error:
            if error.code == MISSING_FUNCTION:
                raise MigrationsMissing(
                    "The database lacks the dispatcher's functions: run `dispatcher migrate --db-url …` first."
                ) from error
            raise

    def _tell_when_ready(self, registration: Registration) -> None:
        log.info(
            events.DAEMON_READY,
            msg=f"Dispatching for gateway {registration.gateway_slug}",
            instance_id=str(self._instance_id),
            gateway=registration.gateway_slug,
            version=dispatcher.__version__,
            max_concurrent_wakes=self._settings.max_concurrent_wakes,
            openclaw=self._executable,
        )

    def _stop(self, group: ServiceGroup) -> None:
        deadline = time.monotonic() + self._settings.shutdown_grace + STOP_LIMIT
        log.info(events.DAEMON_STOPPING, msg="Stopping: no new wakes", live_wakes=len(self._supervisor))
        self._ending.set()
        self._supervisor.note_stopping()
        self._launcher.close()
        self._reporter.stop_claiming()
        self._hints.close()
        group.stop(self._settings.shutdown_grace + STOP_SECONDS)
        self._file.remove()
        self._sign_off(seconds_for_goodbye(deadline - time.monotonic()))
        log.info(events.DAEMON_STOPPED, msg="Stopped", live_wakes=len(self._supervisor))

    def _sign_off(self, seconds: float) -> None:
        """Tells the database; in a thread, because not every wait (that for a name server) can be cut short."""
        goodbye = threading.Thread(target=self._say_goodbye, args=(seconds,), name="goodbye", daemon=True)
        goodbye.start()
        goodbye.join(seconds)
        self._rest.close()

    def _say_goodbye(self, seconds: float) -> None:
        try:
            self._instances.stop(self._instance_id, seconds)
        except Exception as error:  # noqa: BLE001 - the heartbeat's silence will tell the others
            log.warning(events.INSTANCE_GONE, msg="Could not sign off", error=str(error))


def uuid_or_none(text: str | None) -> UUID | None:
    """What a frame calls an id; None when it can be none."""
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None


def seconds_for_goodbye(left: float) -> float:
    """How long the goodbye may take when a stop has `left` seconds: a moment in any case, and never long."""
    return min(max(left, SHORTEST_GOODBYE), LONGEST_GOODBYE)


def _counted(count: Callable[..., None]) -> Callable[..., None]:
    """The same call of the meter, but what it raises is logged: a number must not cost a wake its start or its end."""

    def call(*facts: object) -> None:
        try:
            count(*facts)
        except Exception as error:  # noqa: BLE001 - whatever a metrics library raises
            log.warning(events.METRICS_FAILED, msg="Could not count", error=str(error))

    return call


def _meter(settings: Settings) -> tuple[Meter, Callable[..., Service] | None]:
    """Where to count, and what makes the service that shows it; nothing is loaded when nobody asked."""
    if settings.metrics_port is None:
        return Meter(), None
    from dispatcher.runtime import prometheus  # noqa: PLC0415 - 5 MiB that a daemon without METRICS_PORT does not spend

    meter = prometheus.PrometheusMeter(dispatcher.__version__, settings.gateway_id)
    return meter, partial(prometheus.metrics_service, settings.metrics_host, settings.metrics_port, meter)


def _as_json(state: RealtimeState) -> dict[str, object]:
    return {
        "path": state.path,
        "status": state.status,
        "since": rfc3339_ms(state.since),
        "cause": state.cause,
        "gaps": state.gaps,
    }


def _gateway_as_json(state: GatewayState) -> dict[str, object]:
    return {
        "status": state.status,
        "since": rfc3339_ms(state.since),
        "cause": state.cause,
        "version": state.version,
        "boot_id": state.boot_id,
        "outages": state.outages,
    }
