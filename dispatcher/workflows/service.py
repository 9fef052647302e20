"""The tick: stops, hands out, retries, times out and recovers runs. Each phase is a call; this says in which order."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from dispatcher import events
from dispatcher.errors import DispatcherError, ServiceUnavailable, is_held
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff, jittered
from dispatcher.runtime.health import Health
from dispatcher.workflows.model import COUNTS, PhaseAnswer, RowError, StopOrder
from dispatcher.workflows.store import WorkflowStore

log = get_logger(__name__)

BUDGET_CAUSE: Final = "budgets"
_OPEN: Final = (events.BUDGETS_FAILED_OPEN, "Budgets cannot be evaluated, runs are dispatched without them")
_UNENFORCED: Final = (events.BUDGETS_UNENFORCED, "Budgets hold runs back, but what else they do fails")
# The phase that hands out queued runs.
DISPATCHED: Final = "dispatched"
# How long one beat goes on while there is more to do; what is left then waits for the next one, which comes at once.
BEAT_SECONDS: Final = 1.0
# How soon to look again when another daemon's pass was under way: it may have begun before what we were hinted of.
BUSY_SECONDS: Final = 0.25
SHORTEST_WAIT: Final = 0.05
# A phase has waited in the database for what another session holds.
HELD_SECONDS: Final = 0.8


class ProcessStopper:
    """Stops the processes of runs that were ended from outside, each once."""

    def __init__(self, stop_process: Callable[[str, str], bool]) -> None:
        self._stop_process = stop_process
        # Orders come from two loops, and again until the process is gone.
        self._told: set[UUID] = set()

    def stop(self, orders: Iterable[StopOrder]) -> None:
        """Asks for the end of each and returns at once; a repeated order changes nothing. Thread-safe."""
        for order in orders:
            if not self._stop_process(str(order.wake_id), order.cause):
                self._told.discard(order.wake_id)
            elif order.wake_id not in self._told:
                self._told.add(order.wake_id)
                self._tell(order)

    @staticmethod
    def _tell(order: StopOrder) -> None:
        log.warning(
            events.WORKFLOW_PROCESS_STOPPED,
            msg=f"Stopping a process: {order.cause}",
            wake_id=str(order.wake_id),
            cause=order.cause,
        )


class Ticker:
    """One `beat` is one tick: each phase that is due, pass by pass. `next_interval` says when the next is due."""

    def __init__(
        self,
        store: WorkflowStore,
        *,
        interval: float,
        stopper: ProcessStopper,
        health: Health,
        on_dispatched: Callable[[], None],
        is_stopping: Callable[[], bool],
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._interval = interval
        self._stopper = stopper
        self._health = health
        self._on_dispatched = on_dispatched
        self._is_stopping = is_stopping
        self._draw = draw
        self._clock = clock
        self._failures = Backoff(base=1.0, cap=max(1.0, interval))
        # For what is due and cannot be moved: a row that is locked, or raises.
        self._stuck = Backoff(base=1.0, cap=max(1.0, interval))
        self._last: _Tick | None = None
        self._told: frozenset[RowError] = frozenset()
        self._failed_phases: frozenset[str] = frozenset()

    def beat(self) -> None:
        """One tick. Raises what the first look raises; what a phase raises is told, and the others go on."""
        self._last = None
        tick = _Tick(self._clock())
        look = self._store.look_at_runs()
        self._failures.reset()
        self._stopper.stop(look.stops)
        self._run_phases(tick, look.due)
        self._finish(tick)
        self._last = tick

    def _run_phases(self, tick: _Tick, due: Sequence[str]) -> None:
        """In turns, one pass of each phase: however much one has to do, the others go on."""
        turns = deque(due)
        while turns and not self._is_stopping():
            if tick.passes >= len(due) and self._clock() - tick.started >= BEAT_SECONDS:
                tick.is_unfinished = True
                return
            phase = turns.popleft()
            answer = self._run(tick, phase)
            if answer is None:
                continue
            if phase != DISPATCHED and answer.did_something and DISPATCHED not in turns:
                turns.append(DISPATCHED)  # a slot may have become free
            if answer.again:
                turns.append(phase)

    def _run(self, tick: _Tick, phase: str) -> PhaseAnswer | None:
        """One pass. What it raises is its own fault: it is kept, and there is no answer."""
        tick.passes += 1
        try:
            answer = self._store.run_phase(phase)
        except ServiceUnavailable as error:
            # One slow phase is its own fault; when the next call hears nothing either, nobody is there.
            if any(isinstance(known, ServiceUnavailable) for known in tick.failures.values()):
                raise
            tick.failures[phase] = error
            return None
        except DispatcherError as error:
            tick.failures[phase] = error
            return None
        tick.add(answer)
        if answer.notifies:
            self._on_dispatched()
        return answer

    def _finish(self, tick: _Tick) -> None:
        seconds = self._clock() - tick.started
        if not tick.busy or tick.did_something:
            self._tell_of_budgets(tick)
            self._tell_of_errors(tick.errors.values())
            self._tell(tick, seconds)
        self._tell_of_failures(tick.failures)
        if tick.busy and not tick.did_something:
            return
        try:
            note = self._store.note_tick(tick.facts(seconds))
        except DispatcherError as error:
            text = f"Could not keep what the tick did: {error}"
            log.warning(events.WORKFLOW_STEP_FAILED, msg=text, phase="note", run_id=None, error=str(error))
        else:
            tick.next_in = note.next_in
            self._stopper.stop(note.stops)

    def next_interval(self) -> float:
        """Seconds to the next tick: soon after a busy or failed one, and when a run is due by itself."""
        last = self._last
        if last is None:
            return self._failures.next_delay()
        if last.busy:
            return jittered(BUSY_SECONDS, 0.5, self._draw)
        if last.is_unfinished:
            return SHORTEST_WAIT
        return min(self._interval, self._seconds_to_next(last))

    def _seconds_to_next(self, last: _Tick) -> float:
        waits_for_somebody = bool(last.locked or last.failures) or (last.next_in is not None and last.next_in <= 0)
        if last.did_something or not waits_for_somebody:
            self._stuck.reset()
            return self._interval if last.next_in is None else max(last.next_in, 0.0) + SHORTEST_WAIT
        if any(is_held(error) for error in last.failures.values()):
            return HELD_SECONDS
        return self._stuck.next_delay()

    def _tell_of_budgets(self, tick: _Tick) -> None:
        error = tick.budget_error
        if error is None:
            if not tick.failures and self._health.clear_cause(BUDGET_CAUSE):
                log.info(events.BUDGETS_BACK, msg="Budgets are evaluated again")
            return
        event, what = _OPEN if tick.budgets_open else _UNENFORCED
        text = f"{what}: {error}"
        if self._health.add_cause(BUDGET_CAUSE, text):
            log.error(event, msg=text, error=error)

    def _tell_of_errors(self, errors: Iterable[RowError]) -> None:
        """Each once, for as long as it lasts."""
        current = frozenset(errors)
        for error in sorted(current - self._told, key=lambda one: (one.phase, one.run_id or "")):
            log.error(
                events.WORKFLOW_STEP_FAILED,
                msg=f"A run could not be handled ({error.phase}): {error.error}",
                phase=error.phase,
                run_id=error.run_id,
                error=error.error,
            )
        self._told = current

    def _tell_of_failures(self, failures: Mapping[str, DispatcherError]) -> None:
        """Each in the log and in health, for as long as its phase fails."""
        for phase, error in failures.items():
            if self._health.add_cause(f"workflow_{phase}", f"workflow phase {phase}: {error}"):
                text = f"Workflow phase {phase} failed: {error}"
                log.error(events.WORKFLOW_STEP_FAILED, msg=text, phase=phase, run_id=None, error=str(error))
        for phase in self._failed_phases - failures.keys():
            self._health.clear_cause(f"workflow_{phase}")
        self._failed_phases = frozenset(failures)

    def _tell(self, tick: _Tick, seconds: float) -> None:
        counts = {name: number for name, number in (*tick.counts.items(), ("stopped", tick.stopped)) if number}
        (log.info if tick.did_something else log.debug)(
            events.WORKFLOW_TICK,
            msg="Tick: " + (", ".join(f"{number} {name}" for name, number in counts.items()) or "nothing to do"),
            **{name: tick.counts[name] for name in COUNTS},
            held=tick.held,
            stopped=tick.stopped,
            warned=tick.warned,
            duration_s=round(seconds, 3),
        )


class _Tick:
    """What one tick has found and done so far."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.passes = 0
        self.counts: Counter[str] = Counter()
        self.stopped = self.warned = 0
        # As the last pass that hands out runs saw them.
        self.held = self.locked = 0
        self.held_by: Mapping[str, object] = {}
        self.blockers: Mapping[str, object] = {}
        self.errors: dict[tuple[str, str | None], RowError] = {}
        self.failures: dict[str, DispatcherError] = {}
        self.budget_error: str | None = None
        self.budgets_open = False
        self.busy = False
        self.is_unfinished = False
        self.next_in: float | None = None

    def add(self, answer: PhaseAnswer) -> None:
        """One pass more."""
        self.busy = self.busy or answer.busy
        self.counts.update(answer.counts)
        self.stopped += answer.stopped
        self.warned += answer.warned
        self.errors |= {(error.phase, error.run_id): error for error in answer.errors}
        self.budget_error = self.budget_error or answer.budget_error
        self.budgets_open = self.budgets_open or answer.budgets_open
        if answer.phase == DISPATCHED and not answer.busy:
            self.held, self.locked = answer.held, answer.locked
            self.held_by, self.blockers = answer.held_by, answer.blockers

    @property
    def did_something(self) -> bool:
        """Whether a run changed its state."""
        return any(self.counts.values()) or bool(self.stopped)

    def facts(self, seconds: float) -> dict[str, object]:
        """What `runs stats` and `status` show of it."""
        return {
            **{name: self.counts[name] for name in COUNTS},
            "budget_enforcement": {"held": self.held, "stopped": self.stopped, "warned": self.warned},
            "held_by": dict(self.held_by),
            "blockers": dict(self.blockers),
            "budget_error": self.budget_error,
            "errors": len(self.errors) + len(self.failures),
            "ms": round(seconds * 1000),
        }
