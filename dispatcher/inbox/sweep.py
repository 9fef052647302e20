"""The sweep: the net under every hint. One call does the database's half; this is the other half."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dispatcher import events
from dispatcher.answers import Answer
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.hints import HintedItems, LocalAgents
from dispatcher.inbox.model import Grant, SweepAnswer
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff
from dispatcher.runtime.health import Health

log = get_logger(__name__)

SILENT_AFTER: Final = 3
# How many items one call of the sweep settles at most, by step: a step that reached it has more to do.
STEP_LIMITS: Final = {"expired": 1000, "buried": 1000, "chained": 1000, "stalled": 500}
SOON: Final = 0.5
SILENT_CAUSE: Final = "realtime_silent"


# Steps after which an item wakes nobody, and why; which items, and for whom, says `dispatcher inbox list`.
_SET_ASIDE: Final = {
    "expired": "older than STALE_ITEM_AGE_HOURS",
    "buried": "no attempts left",
    "chained": "at the end of a chain of wakes",
    "stalled": "their agent is stalled",
}


class Sweeper:
    """One `beat` is one sweep. `interval` says when the next is due."""

    def __init__(
        self,
        store: InboxStore,
        agents: LocalAgents,
        hinted: HintedItems,
        decisions: Decisions,
        *,
        claim_limit: int,
        interval: float,
        degraded_interval: float,
        is_realtime_well: Callable[[], bool],
        settle_open_wakes: Callable[[Sequence[Answer]], None],
        on_broadcast_available: Callable[[bool], None],
        health: Health,
        on_swept: Callable[[float, Mapping[str, int]], None] = lambda _seconds, _counts: None,
    ) -> None:
        self._store = store
        self._agents = agents
        self._hinted = hinted
        self._decisions = decisions
        self._claim_limit = claim_limit
        self._interval = interval
        self._degraded_interval = degraded_interval
        self._is_realtime_well = is_realtime_well
        self._settle_open_wakes = settle_open_wakes
        self._on_broadcast_available = on_broadcast_available
        self._health = health
        self._on_swept = on_swept
        self._failures = Backoff(base=1.0, cap=degraded_interval)
        self._silence = SilenceWatch()
        self._is_unfinished = False
        self.sweeps = 0

    def beat(self) -> None:
        """Sweeps once. Raises what the call raises; the next beat then comes soon."""
        started = time.monotonic()
        self._failures.attempts += 1
        was_well = self._is_realtime_well()
        answer = self._store.sweep(self._claim_limit)
        seconds = time.monotonic() - started
        self._failures.reset()
        self._is_unfinished = any(answer.counts.get(step, 0) >= limit for step, limit in STEP_LIMITS.items())
        self._agents.replace(answer.agent_ids)
        self._on_broadcast_available(answer.broadcast_available)
        self._watch_for_silence(answer, was_well)
        # Nobody asked for a wake of an agent whose items rest: its next time is noted, and that is all.
        self._decisions.act_on(answer.verdicts, untold=("no_actionable_work",))
        self._settle_open_wakes(answer.open_wakes)
        self._tell(answer, time.monotonic() - started)
        self.sweeps += 1
        self._on_swept(seconds, answer.counts)

    def next_interval(self) -> float:
        """Seconds to the next sweep: soon after a failed one, often while Realtime is not known to be well."""
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

    def _watch_for_silence(self, answer: SweepAnswer, was_well: bool) -> None:
        found = [v for v in answer.verdicts if isinstance(v, Grant) and v.path == "sweep"]
        missed = [grant for grant in found if not self._hinted.knows(grant.item_ids)]
        if self._silence.swept(len(missed) if was_well else 0):
            text = f"Realtime is silent: {SILENT_AFTER} items were found by the sweep alone"
            self._health.add_cause(SILENT_CAUSE, text)
            log.warning(
                events.REALTIME_SILENT,
                msg=f"{text}; check the publication, the trigger and the key's rights",
                found_by_sweep=len(missed),
            )

    def _tell(self, answer: SweepAnswer, seconds: float) -> None:
        for error in answer.errors:
            log.error(
                events.SWEEP_STEP_FAILED,
                msg=f"Sweep step {error.phase} failed",
                phase=error.phase,
                error=error.error,
            )
        for step, why in _SET_ASIDE.items():
            if number := answer.counts.get(step, 0):
                log.warning(events.SWEEP_SET_ASIDE, msg=f"{number} item(s) set aside: {why}", step=step, items=number)
        granted = sum(isinstance(verdict, Grant) for verdict in answer.verdicts)
        log.info(
            events.SWEEP_FINISHED,
            msg=f"Sweep of {len(answer.agent_ids)} agents: {granted} woken, {answer.counts.get('waiting', 0)} waiting",
            agents=len(answer.agent_ids),
            woken=granted,
            duration_s=round(seconds, 3),
            **answer.counts,
        )


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
