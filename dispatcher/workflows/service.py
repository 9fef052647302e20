"""The tick: one call hands out, retries, times out and recovers runs; this is when it is made, and what follows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Final
from uuid import UUID

from dispatcher import events
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff, jittered
from dispatcher.runtime.health import Health
from dispatcher.workflows.model import RowError, StopOrder, TickAnswer
from dispatcher.workflows.store import WorkflowStore

log = get_logger(__name__)

BUDGET_CAUSE: Final = "budgets"
_OPEN: Final = (events.BUDGETS_FAILED_OPEN, "Budgets cannot be evaluated, runs are dispatched without them")
_UNENFORCED: Final = (events.BUDGETS_UNENFORCED, "Budgets hold runs back, but what else they do fails")
# Ticks in one beat while each says there is more to do; what is left then waits for the next beat.
MAX_ROUNDS: Final = 50
# How soon to look again when another daemon's pass was under way: it may have begun before what we were hinted of.
BUSY_SECONDS: Final = 0.25
SHORTEST_WAIT: Final = 0.05


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
    """One `beat` is one tick, or several while there is more to do. `next_interval` says when the next is due."""

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
    ) -> None:
        self._store = store
        self._interval = interval
        self._stopper = stopper
        self._health = health
        self._on_dispatched = on_dispatched
        self._is_stopping = is_stopping
        self._draw = draw
        self._failures = Backoff(base=1.0, cap=max(1.0, interval))
        # For what is due and cannot be moved: a row that is locked, or raises.
        self._stuck = Backoff(base=1.0, cap=max(1.0, interval))
        self._last: TickAnswer | None = None
        self._told: frozenset[RowError] = frozenset()

    def beat(self) -> None:
        """Ticks until there is nothing more to do at once. Raises what the call raises."""
        self._last = None
        for _ in range(MAX_ROUNDS):
            started = time.monotonic()
            answer = self._store.tick()
            self._failures.reset()
            self._last = answer
            self._follow(answer, time.monotonic() - started)
            if answer.busy or not answer.again or self._is_stopping():
                return

    def next_interval(self) -> float:
        """Seconds to the next tick: soon after a busy or failed one, and when a run is due by itself."""
        last = self._last
        if last is None:
            return self._failures.next_delay()
        if last.busy:
            return jittered(BUSY_SECONDS, 0.5, self._draw)
        if last.again:
            return SHORTEST_WAIT
        return min(self._interval, self._seconds_to_next(last))

    def _seconds_to_next(self, last: TickAnswer) -> float:
        if last.next_in is None or last.next_in > 0 or last.did_something:
            self._stuck.reset()
            return self._interval if last.next_in is None else max(last.next_in, 0.0) + SHORTEST_WAIT
        return self._stuck.next_delay()

    def _follow(self, answer: TickAnswer, seconds: float) -> None:
        self._stopper.stop(answer.stops)
        if answer.busy:
            return
        self._tell_of_budgets(answer.budget_error, answer.budgets_open)
        self._tell_of_errors(answer.errors)
        self._tell(answer, seconds)
        if answer.notifies:
            self._on_dispatched()

    def _tell_of_budgets(self, error: str | None, is_open: bool) -> None:
        if error is None:
            if self._health.clear_cause(BUDGET_CAUSE):
                log.info(events.BUDGETS_BACK, msg="Budgets are evaluated again")
            return
        event, what = _OPEN if is_open else _UNENFORCED
        text = f"{what}: {error}"
        if self._health.add_cause(BUDGET_CAUSE, text):
            log.error(event, msg=text, error=error)

    def _tell_of_errors(self, errors: Iterable[RowError]) -> None:
        """Each once, for as long as it lasts."""
        current = frozenset(errors)
        for error in sorted(current - self._told, key=lambda one: (one.phase, one.run_id or "")):
            if error.phase in ("budgets", "enforcement"):
                continue
            log.error(
                events.WORKFLOW_STEP_FAILED,
                msg=f"A run could not be handled ({error.phase}): {error.error}",
                phase=error.phase,
                run_id=error.run_id,
                error=error.error,
            )
        self._told = current

    def _tell(self, answer: TickAnswer, seconds: float) -> None:
        counts = {name: number for name, number in answer.counts.items() if number}
        (log.info if answer.did_something else log.debug)(
            events.WORKFLOW_TICK,
            msg="Tick: " + (", ".join(f"{number} {name}" for name, number in counts.items()) or "nothing to do"),
            **answer.counts,
            held=answer.held,
            stopped=answer.stopped,
            warned=answer.warned,
            duration_s=round(seconds, 3),
        )
