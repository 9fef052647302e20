"""What follows from a verdict: a start, or a log line and a time to look again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from dispatcher import events
from dispatcher.inbox.model import Grant, Refusal, ReportResult, Verdict
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import exponential
from dispatcher.runtime.wakeup import DueTimes

log = get_logger(__name__)

RETRY_AFTER_ERROR = 30.0
BUSY_SECONDS = 0.25
# What all of the gateway need is held: each try waits for it in the database, too.
HELD_SECONDS = 0.5
LONGEST_BUSY_SECONDS = 30.0
SHORTEST_REST = 0.5
# How long a refusal by these gates stands for items to come. What opens them (a slot, a wake's end elsewhere, an
# agent or a budget changed) is a hint or a verdict of its own; the bound is for the one that was not heard.
REST_SECONDS: Mapping[str, float] = {
    "concurrency_limit": 5.0,
    "wake_in_flight": 1.0,
    "agent_paused": 5.0,
    "budget_exceeded": 5.0,
    "daily_limit": 5.0,
}


class Decisions:
    """Acts on verdicts, whichever call brought them. Thread-safe."""

    def __init__(
        self,
        launch: Callable[[Grant], None],
        due: DueTimes[UUID],
        *,
        rest: Callable[[UUID, float], None] = lambda _agent_id, _seconds: None,
        draw: Callable[[], float] = random.random,
        on_decision: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._launch = launch
        self._due = due
        self._rest = rest
        self._draw = draw
        self._on_decision = on_decision
        self._busy: Counter[UUID] = Counter()

    def act_on(self, verdicts: Sequence[Verdict], *, untold: Collection[str] = ()) -> None:
        """Starts what was granted; logs and schedules what was refused. Reasons in `untold` are not logged."""
        for verdict in verdicts:
            if gate_of(_reason(verdict)) != "busy":
                self._busy.pop(verdict.agent_id, None)
            if isinstance(verdict, Grant):
                self._due.cancel(verdict.agent_id)
                self._rest(verdict.agent_id, 0.0)
                self._launch(verdict)
            else:
                self._refused(verdict, untold)
        # Last: what cannot be counted must not keep a grant from its start.
        for verdict in verdicts:
            self._on_decision(gate_of(_reason(verdict)))

    def after_end(self, result: ReportResult) -> None:
        """A wake ended: its agent is due again when its gates will have opened."""
        if result.agent_id is not None:
            self._rest(result.agent_id, 0.0)
        if result.agent_id is not None and result.retry_in is not None:
            self._schedule(result.agent_id, result.retry_in, spread=0.25 if result.failures else 0.0)
        for item_id in result.dead_letters if result.applied else ():
            log.warning(
                events.ITEM_DEAD_LETTER,
                msg=f"An item of {result.agent_slug} was given up; `dispatcher inbox requeue {item_id}` brings it back",
                agent=result.agent_slug,
                item_id=str(item_id),
                wake_id=str(result.wake_id),
            )
        if result.applied and result.next == "stalled":
            self._tell_stall(result)
        elif result.applied and result.failures:
            self._tell_backoff(result)

    def _tell_stall(self, result: ReportResult) -> None:
        # An agent refused at its start has not failed so often: its count only stands at the limit.
        why = f"{result.failures} failed wakes in a row"
        if result.cause is not None:
            why = f"its start was refused: {result.cause}"
        log.error(
            events.AGENT_STALLED,
            msg=f"{result.agent_slug} is stalled: {why}",
            agent=result.agent_slug,
            failures=result.failures,
            cause=result.cause,
        )

    def _tell_backoff(self, result: ReportResult) -> None:
        rest = "" if result.retry_in is None else f"; not woken again for {result.retry_in:.0f} s"
        log.info(
            events.WAKE_BACKOFF,
            msg=f"{result.agent_slug}: {result.state}, {result.failures} in a row{rest}",
            agent=result.agent_slug,
            wake_id=str(result.wake_id),
            state=result.state,
            failures=result.failures,
            retry_in_s=None if result.retry_in is None else round(result.retry_in, 1),
        )

    def _refused(self, refusal: Refusal, untold: Collection[str]) -> None:
        if refusal.reason == "error":
            self._failed(refusal)
            return
        if refusal.reason == "busy":
            seconds = HELD_SECONDS if refusal.held else self._seconds_of_rest(refusal.agent_id)
            refusal = replace(refusal, retry_in=seconds)
        if refusal.retry_in is not None:
            # Refused though its time has come: looked at again, but not without a pause.
            self._schedule(refusal.agent_id, refusal.retry_in if refusal.retry_in > 0 else SHORTEST_REST)
        rest = rest_after(refusal.reason, refusal.retry_in, refusal.failures)
        if rest:
            self._rest(refusal.agent_id, rest)
        if refusal.reason in untold or refusal.agent_slug is None:  # without a slug: another gateway's, or all are held
            return
        log.info(
            events.WAKE_SKIPPED,
            msg=f"Skipping wake for {refusal.agent_slug} ({refusal.reason})",
            agent=refusal.agent_slug,
            reason=refusal.reason,
            retry_in_s=None if refusal.retry_in is None else round(refusal.retry_in, 1),
        )

    def _seconds_of_rest(self, agent_id: UUID) -> float:
        """Another session holds a row of the agent: mostly for milliseconds, sometimes for an hour."""
        self._busy[agent_id] += 1
        return exponential(self._busy[agent_id], BUSY_SECONDS, LONGEST_BUSY_SECONDS)

    def _failed(self, refusal: Refusal) -> None:
        """The gates of one agent raise: it is named, and left alone for a while."""
        self._schedule(refusal.agent_id, RETRY_AFTER_ERROR, spread=0.25)
        log.error(
            events.WAKE_DECISION_FAILED,
            msg=f"Cannot decide about {refusal.agent_slug or refusal.agent_id}: {refusal.error}",
            agent=refusal.agent_slug,
            agent_id=str(refusal.agent_id),
            error=refusal.error,
        )

    def _schedule(self, agent_id: UUID, seconds: float, spread: float = 0.0) -> None:
        """Due in `seconds`, later by up to `spread` of it: agents that failed together do not return together."""
        self._due.schedule_in(agent_id, seconds * (1 + spread * self._draw()) + 0.02)


def rest_after(reason: str, retry_in: float | None, failures: int | None) -> float:
    """For how many seconds this refusal is the answer to any item, 0.0 when the next one may change it.

    A cooldown stands until its end, unless failures made it longer: new work has them forgotten.
    """
    gate = gate_of(reason)
    if gate == "cooldown" and failures == 0:
        return retry_in or 0.0
    return REST_SECONDS.get(gate, 0.0)


def _reason(verdict: Verdict) -> str:
    return "granted" if isinstance(verdict, Grant) else verdict.reason


def gate_of(reason: str) -> str:
    """The gate behind a skip reason, without its numbers: `cooldown(12s)` → `cooldown`."""
    return reason.partition("(")[0]
