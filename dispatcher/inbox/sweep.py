"""The sweep: the net under every hint. Each phase is a call of its own; this says in which order, and what follows."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dispatcher import events
from dispatcher.answers import Answer
from dispatcher.errors import DispatcherError, ServiceUnavailable, is_held
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.hints import HintedItems, LocalAgents
from dispatcher.inbox.model import Grant, Look, PhaseAnswer, Verdict
from dispatcher.inbox.namesakes import Namesakes
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff
from dispatcher.runtime.health import Health

log = get_logger(__name__)

SILENT_AFTER: Final = 3
# A phase settles 500 rows a call. So many calls in one sweep: then the other phases have their turn, and the next sweep
# comes soon. The listing of agents is not cut short: who waits longest is known only when all are listed. Its bound is
# for an answer that never says it is the last one.
PASSES: Final = 4
LISTING: Final = "listed"
MOST_PAGES: Final = 2_000
SOON: Final = 0.05
# After a sweep that met what another session holds: each of its calls has waited for it.
HELD_SECONDS: Final = 0.8
SILENT_CAUSE: Final = "realtime_silent"


# Steps after which an item wakes nobody, and why; which items, and for whom, says `dispatcher inbox list`.
_SET_ASIDE: Final = {
    "expired": "older than STALE_ITEM_AGE_HOURS",
    "dead": "no attempts left",
    "chained": "at the end of a chain of wakes",
    "stalled": "their agent is stalled",
}


class Sweeper:
    """One `beat` is one sweep. `interval` says when the next is due."""

    def __init__(
        self,
        store: InboxStore,
        agents: LocalAgents,
        namesakes: Namesakes,
        hinted: HintedItems,
        decisions: Decisions,
        *,
        claim_limit: Callable[[], int],
        interval: float,
        degraded_interval: float,
        is_realtime_well: Callable[[], bool],
        settle_open_wakes: Callable[[Sequence[Answer]], None],
        on_broadcast_available: Callable[[bool], None],
        health: Health,
        is_stopping: Callable[[], bool] = lambda: False,
        on_swept: Callable[[float, Mapping[str, int]], None] = lambda _seconds, _counts: None,
    ) -> None:
        self._store = store
        self._agents = agents
        self._namesakes = namesakes
        self._hinted = hinted
        self._decisions = decisions
        self._claim_limit = claim_limit
        self._interval = interval
        self._degraded_interval = degraded_interval
        self._is_realtime_well = is_realtime_well
        self._settle_open_wakes = settle_open_wakes
        self._on_broadcast_available = on_broadcast_available
        self._health = health
        self._is_stopping = is_stopping
        self._on_swept = on_swept
        self._failures = Backoff(base=1.0, cap=degraded_interval)
        self._silence = SilenceWatch()
        self._is_unfinished = False
        self._met_held = False
        self._failed_phases: frozenset[str] = frozenset()
        self.sweeps = 0

    def beat(self) -> None:
        """Sweeps once. Raises what the first look raises; the next beat then comes soon."""
        self._failures.attempts += 1
        sweep = _Sweep(was_realtime_well=self._is_realtime_well())
        look = self._look()
        self._failures.reset()
        self._agents.replace(look.slugs)
        self._namesakes.replace(look.slugs)
        self._on_broadcast_available(look.broadcast_available)
        for phase in look.due:
            if self._is_stopping():
                return
            self._run(phase, sweep)
        if self._is_stopping():
            return
        self._settle_open_wakes(look.open_wakes)
        self._finish(sweep, look)

    def _look(self) -> Look:
        try:
            self._met_held = False
            return self._store.look()
        except DispatcherError as error:
            self._met_held = is_held(error)
            raise

    def _run(self, phase: str, sweep: _Sweep) -> None:
        """All passes of one phase. What it raises is its own fault; the other phases go on."""
        cursor: object = None
        try:
            for number in itertools.count(1):
                answer = self._store.sweep_phase(phase, cursor, self._claim_limit())
                self._follow(answer, sweep)
                cursor = answer.cursor
                if not answer.again or self._is_stopping():
                    return
                if number >= (MOST_PAGES if phase == LISTING else PASSES):
                    sweep.is_unfinished = True
                    return
        except ServiceUnavailable as error:
            # One slow phase is its own fault; when the next call hears nothing either, nobody is there.
            if any(isinstance(known, ServiceUnavailable) for known in sweep.errors.values()):
                raise
            sweep.errors[phase] = error
        except DispatcherError as error:
            sweep.errors[phase] = error

    def _follow(self, answer: PhaseAnswer, sweep: _Sweep) -> None:
        sweep.counts.update(answer.counts)
        sweep.verdicts += answer.verdicts
        # Nobody asked for a wake of an agent whose items rest: its next time is noted, and that is all.
        self._decisions.act_on(answer.verdicts, untold=("no_actionable_work",))

    def _finish(self, sweep: _Sweep, look: Look) -> None:
        self._is_unfinished = sweep.is_unfinished
        self._met_held = any(is_held(error) for error in sweep.errors.values())
        self._watch_for_silence(sweep)
        self._tell(sweep, look)
        self._note(sweep)
        self.sweeps += 1
        self._on_swept(sweep.seconds, sweep.counts)

    def _note(self, sweep: _Sweep) -> None:
        facts = {
            **sweep.counts,
            "errors": {phase: str(error) for phase, error in sweep.errors.items()},
            "ms": round(sweep.seconds * 1000),
        }
        try:
            self._store.note_sweep(facts)
        except DispatcherError as error:
            log.warning(
                events.SWEEP_STEP_FAILED, msg="Could not keep what the sweep did", phase="note", error=str(error)
            )

    def next_interval(self) -> float:
        """Seconds to the next sweep: soon after a failed one, often while Realtime is not known to be well."""
        if self._met_held:
            return HELD_SECONDS
        if self._failures.attempts:
            attempts = self._failures.attempts
            delay = self._failures.next_delay()
            self._failures.attempts = attempts
            return delay
        if self._is_unfinished:
            return SOON
        well = self._is_realtime_well() and not self._silence.is_silent
        return self._interval if well else min(self._interval, self._degraded_interval)

    def note_hint(self) -> None:
        """A hint of an item came: Realtime speaks."""
        if self._silence.heard():
            self._health.clear_cause(SILENT_CAUSE)

    def note_subscribed(self) -> None:
        """What came before a subscription has no hint, and the sweep that follows finds it: that is no silence."""
        self._silence.excuse_next_sweep()

    def _watch_for_silence(self, sweep: _Sweep) -> None:
        found = [v for v in sweep.verdicts if isinstance(v, Grant) and v.path == "sweep"]
        missed = [grant for grant in found if not self._hinted.knows(grant.item_ids)]
        if self._silence.swept(len(missed) if sweep.was_realtime_well else 0):
            text = f"Realtime is silent: {SILENT_AFTER} items were found by the sweep alone"
            self._health.add_cause(SILENT_CAUSE, text)
            log.warning(
                events.REALTIME_SILENT,
                msg=f"{text}; check the publication, the trigger and the key's rights",
                found_by_sweep=len(missed),
            )

    def _tell(self, sweep: _Sweep, look: Look) -> None:
        self._tell_of_errors(sweep.errors)
        for step, why in _SET_ASIDE.items():
            if number := sweep.counts.get(step, 0):
                log.warning(events.SWEEP_SET_ASIDE, msg=f"{number} item(s) set aside: {why}", step=step, items=number)
        if number := sweep.counts.get("alerted", 0):
            log.warning(
                events.SWEEP_OFTEN_WOKEN,
                msg=f"{number} agent(s) were woken more often than ALERT_WAKES_PER_HOUR; notifications name them",
                agents=number,
            )
        granted = sum(isinstance(verdict, Grant) for verdict in sweep.verdicts)
        log.info(
            events.SWEEP_FINISHED,
            msg=f"Sweep of {len(look.slugs)} agents: {granted} woken, {sweep.counts.get('waiting', 0)} waiting",
            agents=len(look.slugs),
            woken=granted,
            duration_s=round(sweep.seconds, 3),
            **sweep.counts,
        )

    def _tell_of_errors(self, errors: Mapping[str, DispatcherError]) -> None:
        """Each in the log and in health, for as long as its phase fails."""
        for phase, error in errors.items():
            if self._health.add_cause(f"sweep_{phase}", f"sweep phase {phase}: {error}"):
                log.error(events.SWEEP_STEP_FAILED, msg=f"Sweep phase {phase} failed", phase=phase, error=str(error))
        for phase in self._failed_phases - errors.keys():
            self._health.clear_cause(f"sweep_{phase}")
        self._failed_phases = frozenset(errors)


class _Sweep:
    """What one sweep has found and done so far."""

    def __init__(self, *, was_realtime_well: bool) -> None:
        self.was_realtime_well = was_realtime_well
        self.counts: Counter[str] = Counter()
        self.verdicts: list[Verdict] = []
        self.errors: dict[str, DispatcherError] = {}
        self.is_unfinished = False
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


class SilenceWatch:
    """Counts items that only sweeps found while Realtime claimed to be well. Pure."""

    def __init__(self) -> None:
        self._missed = 0
        self._excused = True
        self.is_silent = False

    def swept(self, missed: int) -> bool:
        """A sweep found `missed` items no hint had named. True once, when that makes it silent."""
        if self._excused:
            self._excused = False
            return False
        self._missed += missed
        becomes_silent = not self.is_silent and self._missed >= SILENT_AFTER
        self.is_silent = self.is_silent or becomes_silent
        return becomes_silent

    def heard(self) -> bool:
        """A hint arrived. True when that ends a silence."""
        was_silent, self.is_silent, self._missed = self.is_silent, False, 0
        return was_silent

    def excuse_next_sweep(self) -> None:
        self._excused = True
