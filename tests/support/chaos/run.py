"""One chaos run, from the empty directory to the verdict."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psycopg

from dispatcher.cli.local import project_stack
from dispatcher.local.stack import Stack
from tests.support.chaos.agents import ChaosAgents, Child
from tests.support.chaos.daemons import ChaosDaemon
from tests.support.chaos.evidence import Evidence
from tests.support.chaos.faults import AGENTS, FaultRunner, HarnessError, World, proxies_for
from tests.support.chaos.schedule import DAEMONS, STEADY, Plan
from tests.support.chaos.work import (
    GATEWAY,
    Bench,
    Loader,
    check_always,
    judge_items,
    judge_wakes,
    make_agents,
    unsettled,
    unwell,
)
from tests.support.daemon import ROOT

CAP: Final = 4
SETTINGS: Final = {
    "GATEWAY_ID": GATEWAY,
    "MAX_CONCURRENT_WAKES": CAP,
    "WAKE_COOLDOWN": 1,
    "MAX_WAKE_COOLDOWN": 3,
    "MAX_CONSECUTIVE_FAILURES": 3,
    "AGENT_PROCESS_TIMEOUT": 4,
    "SHUTDOWN_GRACE": 2,
    "LEASE_SECONDS": 30,
    "HEARTBEAT_INTERVAL": 1,
    "INSTANCE_TIMEOUT": 5,
    "RECONCILE_INTERVAL": 6,
    "DEGRADED_RECONCILE_INTERVAL": 1.5,
    "REST_TIMEOUT": 5,
}
READY_SECONDS: Final = 120.0
FAULTS_END_SECONDS: Final = 150.0
RECOVERY_SECONDS: Final = 150.0
DRAIN_SECONDS: Final = 150.0
PROBE_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 0.25
EARLY_SECONDS: Final = 30.0
MOST_MORE_DESCRIPTORS: Final = 12
MOST_MORE_BYTES: Final = 20 << 20
_PR_SET_CHILD_SUBREAPER: Final = 36


class Watch(threading.Thread):
    """Looks at everything a few times a second for as long as the run goes on."""

    def __init__(self, daemons: Sequence[ChaosDaemon], agents: ChaosAgents, bench: Bench, evidence: Evidence) -> None:
        super().__init__(name="watch", daemon=True)
        self.over = threading.Event()
        self.sizes: list[tuple[float, int, int]] = []
        self.error: Exception | None = None
        self._daemons = daemons
        self._agents = agents
        self._bench = bench
        self._evidence = evidence

    def run(self) -> None:
        """Until `over` is set."""
        turn = 0
        try:
            while not self.over.wait(LOOK_SECONDS):
                self._look(turn)
                turn += 1
        except Exception as error:  # noqa: BLE001 - a watch that has died sees nothing: the run is void
            self.error = error

    def _look(self, turn: int) -> None:
        self._agents.read_log()
        for daemon in self._daemons:
            daemon.look()
        if turn % 4 == 0:
            self._agents.living()
            check_always(self._bench, CAP, self._evidence)
            self._measure()

    def _measure(self) -> None:
        [steady] = [daemon for daemon in self._daemons if daemon.name == STEADY]
        if (size := steady.size()) is not None:
            self.sizes.append((self._evidence.now, *size))


def judge_growth(sizes: Sequence[tuple[float, int, int]], evidence: Evidence) -> None:
    """The steady daemon in its first half minute and at the quiet end; `sizes`: seconds, descriptors, bytes."""
    early = [sample for sample in sizes if sample[0] < sizes[0][0] + EARLY_SECONDS]
    late = sizes[-4:]
    descriptors, size = max(fds for _, fds, _ in early), max(held for *_, held in early)
    late_descriptors, late_size = min(fds for _, fds, _ in late), min(held for *_, held in late)
    evidence.facts["descriptors of the steady daemon"] = f"{descriptors} early, {late_descriptors} at the end"
    evidence.facts["memory of the steady daemon"] = f"{size >> 20} MiB early, {late_size >> 20} MiB at the end"
    if late_descriptors > descriptors + MOST_MORE_DESCRIPTORS:
        evidence.violated("no growth of descriptors", evidence.facts["descriptors of the steady daemon"])
    if late_size > size + MOST_MORE_BYTES:
        evidence.violated("no growth of memory", evidence.facts["memory of the steady daemon"])


class ChaosRun:
    """`run` does it all. The directory keeps every log; it is removed by whoever made it."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self._done = 0
        self._next_probe = 0.0
        self.evidence = Evidence(self._context)
        self._undo = ExitStack()

    def _context(self) -> str:
        """What is needed to understand, and to repeat, what was just seen."""
        faults = "\n".join(f"  {fault}" for fault in self.plan.faults[: self._done])
        return f"seed {self.plan.seed}, {self.plan.seconds:g} s, in {self.directory}; faults so far:\n{faults}\n"

    def run(self) -> Evidence:
        """Raises HarnessError when the run itself broke down."""
        become_subreaper()
        with self._undo:
            self._set_up()
            self._rage()
            self._calm_down()
            self._judge()
        return self.evidence

    # -- the beginning

    def _set_up(self) -> None:
        copy_code(self.directory / "code")
        self._stack = self._undo.enter_context(project_stack(self.directory / "stack", seed=False))
        self._bench = Bench(self._stack.postgres.url())
        self._undo.callback(self._bench.close)
        make_agents(self._bench, self.plan.agents)
        self._proxies = proxies_for(self._stack, [*DAEMONS, AGENTS], self.plan.seed)
        for proxy in self._proxies.values():
            self._undo.callback(proxy.stop)
        self._agents = ChaosAgents(self.directory / "agents", self.directory / "code", self.evidence)
        self._undo.callback(self._agents.kill_all)
        self._give_orders(calm=False)
        self._start_daemons(self._stack)

    def _give_orders(self, *, calm: bool) -> None:
        rest = {"url": self._proxies[AGENTS].url, "key": self._stack.keys.service_role_key}
        self._agents.order(self.plan.agents, rest, CAP, calm=calm)

    def _start_daemons(self, stack: Stack) -> None:
        self._daemons: dict[str, ChaosDaemon] = {}
        for name in DAEMONS:
            environment = {
                **{setting: str(value) for setting, value in SETTINGS.items()},
                "SUPABASE_URL": self._proxies[name].url,
                "SUPABASE_SERVICE_ROLE_KEY": stack.keys.service_role_key,
                "OPENCLAW_BIN": str(self._agents.path),
                "REALTIME_MODE": self.plan.realtime_modes[name],
            }
            daemon = ChaosDaemon(name, self.directory, environment, self.evidence)
            self._daemons[name] = daemon
            daemon.start()
            self._undo.callback(daemon.end)
        for daemon in self._daemons.values():
            daemon.wait_ready(READY_SECONDS)
        self._watch = Watch(list(self._daemons.values()), self._agents, Bench(stack.postgres.url()), self.evidence)
        self._watch.start()
        self._undo.callback(self._watch.over.set)

    # -- the middle

    def _rage(self) -> None:
        self._loader = Loader(self._stack.postgres.url(), self.plan.inserts, self.evidence)
        self._faults = FaultRunner(World(self._stack, self._daemons, self._proxies, self.evidence))
        self._loader.start()
        started = time.monotonic()
        for fault in self.plan.faults:
            self._sleep_until(started + fault.at)
            self._done += 1
            self._faults.perform(fault)
        self._sleep_until(started + self.plan.seconds)
        self._faults.finish(FAULTS_END_SECONDS)

    def _sleep_until(self, moment: float) -> None:
        """The schedule itself, not a wait for anything."""
        while (left := moment - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self._check_watch()

    def _check_watch(self) -> None:
        if self._watch.error is not None:
            raise HarnessError(f"the watch has died: {self._watch.error!r}") from self._watch.error

    # -- the end

    def _calm_down(self) -> None:
        """Nothing goes wrong any more, whoever can work does: all that was inserted must come to its end."""
        self._give_orders(calm=True)
        self._loader.join(DRAIN_SECONDS)
        self._until_nothing_left(self._unwell, RECOVERY_SECONDS, "every daemon is well again once the faults are over")
        self._until_nothing_left(self._unsettled, DRAIN_SECONDS, "everything comes to its end once the faults are over")

    def _until_nothing_left(self, ask: Callable[[], list[str]], seconds: float, invariant: str) -> None:
        began = time.monotonic()
        left = ["nothing was asked yet"]
        while left and time.monotonic() < began + seconds:
            time.sleep(0.5)  # between two looks, as wait_until does
            self._check_watch()
            try:
                left = ask()
            except psycopg.Error as error:
                left = [f"the database cannot be asked: {error}"]
        self.evidence.facts[invariant] = f"after {time.monotonic() - began:.1f} s"
        for what in left[:10]:
            self.evidence.violated(invariant, what)

    def _unwell(self) -> list[str]:
        """With a little work now and then: a daemon that nobody tells anything cannot know that it hears again."""
        if self.evidence.now > self._next_probe:
            self._next_probe = self.evidence.now + PROBE_SECONDS
            self._loader.probe("good")
        return unwell(self._bench, len(self._daemons))

    def _unsettled(self) -> list[str]:
        return unsettled(self._bench)

    def _judge(self) -> None:
        self._watch.over.set()
        self._watch.join()
        self._check_watch()
        judge_items(self._bench, self._loader.planned, self.evidence)
        judge_wakes(self._bench, self.evidence)
        judge_growth(self._watch.sizes, self.evidence)
        self._stop_daemons()
        self._agents.read_log()
        for child in self._agents.living():
            self._judge_left_over(child)

    def _stop_daemons(self) -> None:
        for daemon in self._daemons.values():
            daemon.look()
            daemon.stop()

    def _judge_left_over(self, child: Child) -> None:
        """What a wake that ended well left behind outlives a daemon that was killed, and no other."""
        starters = {pid for daemon in self._daemons.values() for pid in daemon.well_stopped}
        if child.is_stray and child.starter not in starters:
            self.evidence.count("strays of killed daemons")
        else:
            self.evidence.violated("no child is left", str(child))


def copy_code(directory: Path) -> None:
    """The daemons and agents of a run are those of its beginning, whatever is edited while it goes on."""
    no_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dispatcher", directory / "dispatcher", ignore=no_caches)
    shutil.copytree(Path(__file__).parent, directory / "chaos", ignore=no_caches)


def become_subreaper() -> None:
    """Children of killed daemons come to this process, which buries them, instead of PID 1."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def new_directory() -> Path:
    """A place for one run."""
    return Path(tempfile.mkdtemp(prefix="dispatcher-chaos-"))
