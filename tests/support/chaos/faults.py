"""Carries out the plan's faults: each target has a thread of its own, in which its faults come one after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import psycopg

from dispatcher.errors import DispatcherError
from dispatcher.local.realtime.faults import SWITCHES
from dispatcher.local.rest_faults import RestFaults
from dispatcher.local.stack import Stack
from tests.support.chaos.daemons import ChaosDaemon
from tests.support.chaos.evidence import Evidence
from tests.support.chaos.schedule import Fault
from tests.support.chaos.work import Bench
from tests.support.fault_proxy import FaultProxy

_RESTART_TRIES: Final = 5
AGENTS: Final = "agents"


class HarnessError(Exception):
    """The run itself cannot go on; says nothing about the product."""


class World:
    """What faults act upon."""

    def __init__(
        self, stack: Stack, daemons: Mapping[str, ChaosDaemon], proxies: Mapping[str, FaultProxy], evidence: Evidence
    ) -> None:
        self.stack = stack
        self.daemons = daemons
        self.proxies = proxies
        self.evidence = evidence


class FaultRunner:
    """`perform` begins a fault in its target's thread; `finish` waits until all are over and undone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._begun: list[tuple[Fault, Future[None]]] = []
        self._over = threading.Event()

    def perform(self, fault: Fault) -> None:
        """Returns at once."""
        thread = self._threads.setdefault(
            fault.target, ThreadPoolExecutor(1, thread_name_prefix=f"fault-{fault.target}")
        )
        self._begun.append((fault, thread.submit(self._carry_out, fault)))
        self._world.evidence.count(f"fault {fault.target if fault.kind != 'pause' else 'agent'} {fault.kind}")

    def finish(self, deadline: float) -> None:
        """No fault lasts longer than this; raises HarnessError for one that could not be carried out."""
        self._over.set()
        end = time.monotonic() + deadline
        for fault, begun in self._begun:
            try:
                begun.result(max(0.1, end - time.monotonic()))
            except Exception as error:
                raise HarnessError(f"{fault}: {type(error).__name__}: {error}") from error
        for thread in self._threads.values():
            thread.shutdown()

    def _carry_out(self, fault: Fault) -> None:
        if self._over.is_set():
            return  # its target was busy with an earlier one until the end
        _CARRIERS[fault.kind](self._world, fault, self._over.wait)


Hold = Callable[[float], object]
"""Waits for the length of a fault, or until the faults are over."""


def _kill(world: World, fault: Fault, hold: Hold) -> None:
    if fault.target == "postgrest":
        _kill_rest(world, fault, hold)
        return
    daemon = world.daemons[fault.target]
    daemon.kill()
    hold(fault.lasts)
    daemon.start()


def _term(world: World, fault: Fault, hold: Hold) -> None:
    daemon = world.daemons[fault.target]
    daemon.stop(fault.facts["signals"])
    hold(fault.lasts)
    daemon.start()


def _freeze(world: World, fault: Fault, _hold: Hold) -> None:
    world.daemons[fault.target].freeze(fault.lasts)


def _kill_rest(world: World, fault: Fault, hold: Hold) -> None:
    process = world.stack.api.rest.process
    if process is not None:
        process.kill()
        process.wait()
    hold(fault.lasts)
    _persistently(world.stack.start_rest)


def _stop(world: World, fault: Fault, hold: Hold) -> None:
    """SIGTERM for PostgREST; `immediate` (a crash) or `fast` for PostgreSQL. Both come back on their ports."""
    if fault.target == "postgrest":
        world.stack.stop_rest()
        hold(fault.lasts)
        _persistently(world.stack.start_rest)
        return
    port = world.stack.postgres.port
    world.stack.stop_postgres(fault.facts["mode"])
    hold(fault.lasts)
    _persistently(world.stack.start_postgres)
    if world.stack.postgres.port != port:
        raise HarnessError(f"somebody else took port {port} while PostgreSQL was down")


def _persistently(start: Callable[[], None]) -> None:
    """PostgREST cannot start while PostgreSQL is away, and both may be."""
    for left in reversed(range(_RESTART_TRIES)):
        try:
            start()
        except DispatcherError:
            if not left:
                raise
        else:
            return


def _terminate_backends(world: World, _fault: Fault, _hold: Hold) -> None:
    """Every connection of PostgREST is lost at once."""
    bench = Bench(world.stack.postgres.url())
    try:
        bench.rows("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'authenticator'")
    except psycopg.Error:
        world.evidence.count("backends not terminated: the database is away")
    finally:
        bench.close()


def _misbehave(world: World, fault: Fault, hold: Hold) -> None:
    world.stack.api.faults(**{fault.target: dict(fault.facts)})
    hold(fault.lasts)
    world.stack.api.faults(**{fault.target: _undone(world, fault)})


def _undone(world: World, fault: Fault) -> dict[str, Any]:
    """The switches that the fault set, as they are by themselves; actions have nothing to be undone."""
    if fault.target == "rest":
        return {name: value for name, value in RestFaults().as_dict().items() if name != "down_for"}
    defaults = type(world.stack.api.realtime_faults)().as_dict()
    return {name: defaults[name] for name in fault.facts if name in SWITCHES}


def _network(fault_of: Callable[[FaultProxy, Fault], None]) -> Callable[[World, Fault, Hold], None]:
    def carry_out(world: World, fault: Fault, hold: Hold) -> None:
        proxies = _proxies_of(world, fault.target)
        for proxy in proxies:
            fault_of(proxy, fault)
        hold(fault.lasts)
        for proxy in proxies:
            proxy.heal(cut=bool(fault.facts.get("cut_at_end")))

    return carry_out


def _proxies_of(world: World, target: str) -> Sequence[FaultProxy]:
    name = target.removesuffix(" network")
    return [world.proxies[each] for each in world.daemons] if name == "everyone" else [world.proxies[name]]


def _clock(world: World, fault: Fault, hold: Hold) -> None:
    daemon = world.daemons[fault.target.removesuffix(" clock")]
    daemon.move_clock(fault.facts["offset"])
    hold(fault.lasts)
    daemon.move_clock(0.0)


def _pause(world: World, fault: Fault, hold: Hold) -> None:
    bench = Bench(world.stack.postgres.url())
    try:
        _set_status(bench, fault.facts["agent"], "paused", tries=1)
        hold(fault.lasts)
        _set_status(bench, fault.facts["agent"], "ready", tries=200)
    finally:
        bench.close()


def _set_status(bench: Bench, agent: str, status: str, tries: int) -> None:
    for left in reversed(range(tries)):
        try:
            bench.rows("update agents set status = %s::agent_status where slug = %s", [status, agent])
        except psycopg.Error:
            if not left and tries > 1:
                raise
            time.sleep(0.3 if tries > 1 else 0)  # between two tries; the database is away
        else:
            return


_CARRIERS: Final[Mapping[str, Callable[[World, Fault, Hold], None]]] = {
    "kill": _kill,
    "term": _term,
    "freeze": _freeze,
    "stop": _stop,
    "terminate_backends": _terminate_backends,
    "misbehave": _misbehave,
    "network_delay": _network(lambda proxy, fault: proxy.delay(fault.facts["seconds"])),
    "network_cut": _network(lambda proxy, _: proxy.cut()),
    "network_refuse": _network(lambda proxy, _: proxy.refuse()),
    "network_black_hole": _network(lambda proxy, _: proxy.black_hole()),
    "network_half_open": _network(lambda proxy, _: proxy.half_open()),
    "clock": _clock,
    "pause": _pause,
}


def proxies_for(stack: Stack, names: Sequence[str], seed: int) -> dict[str, FaultProxy]:
    """One started proxy per name, in front of the stack's gateway."""
    return {name: FaultProxy(stack.api.port, random.Random(f"{seed}/{name}")).start() for name in names}
