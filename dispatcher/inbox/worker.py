"""Turns hints into claims: several at once when they pile up, one at once when they do not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from dispatcher import events
from dispatcher.errors import DispatcherError, RestError, is_held
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.hints import Hints, LocalAgents
from dispatcher.inbox.model import Claim, Refusal, Verdict
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.openclaw.hold import GATE, GatewayHold
from dispatcher.runtime.backoff import exponential, jittered
from dispatcher.runtime.health import LoopHealth
from dispatcher.runtime.repeats import Repeats
from dispatcher.runtime.service import Service

log = get_logger(__name__)

# After a call that failed its agents are looked at again after this, doubled each time.
RETRY_SECONDS: Final = 3.0
# The call has waited for what another session holds.
HELD_SECONDS: Final = 0.5
# As long as no answer comes it may come back any moment; what is refused time after time is not asked often.
LONGEST_OUTAGE_REST: Final = 5.0
LONGEST_REST: Final = 60.0


class ClaimTroubles:
    """What the workers know together of claims that fail: how long to leave off, and whether to say so. Thread-safe."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._failures = 0
        self._until = 0.0
        self._is_over = threading.Event()
        self.repeats = Repeats()

    def failed(self, error: DispatcherError) -> float:
        """Counts one more; how long (s) nobody claims."""
        with self._lock:
            self._failures += 1
            delay = jittered(self._rest_after(error), 0.25, self._draw)
            self._until = time.monotonic() + delay
            self._is_over.clear()
            return delay

    def _rest_after(self, error: DispatcherError) -> float:
        if is_held(error):
            return HELD_SECONDS
        longest = LONGEST_REST if isinstance(error, RestError) and not error.retryable else LONGEST_OUTAGE_REST
        return exponential(self._failures, RETRY_SECONDS, longest)

    def over(self) -> None:
        """The database answers again: whoever leaves off goes on."""
        with self._lock:
            self._failures = 0
            self._until = 0.0
            self._is_over.set()
        self.repeats.over()

    def leave_off(self) -> None:
        """Waits until claiming is worth another try."""
        with self._lock:
            seconds = self._until - time.monotonic()
        if seconds > 0:
            self._is_over.wait(seconds)


class WakeWorker(Service):
    """Takes hints and claims. Two of them run, so that a call that hangs does not hold up the next agent."""

    def __init__(
        self,
        name: str,
        *,
        hints: Hints,
        store: InboxStore,
        agents: LocalAgents,
        decisions: Decisions,
        health: LoopHealth,
        troubles: ClaimTroubles,
        hold: GatewayHold,
    ) -> None:
        super().__init__(name)
        self._hints = hints
        self._store = store
        self._agents = agents
        self._decisions = decisions
        self._health = health
        self._troubles = troubles
        self._hold = hold

    def request_stop(self) -> None:
        """As in `Service`; also ends the wait after a failure."""
        super().request_stop()
        self._troubles.over()

    def run_service(self) -> None:
        """Works until asked to stop."""
        while not self.stopping.is_set():
            self._troubles.leave_off()
            claims = self._hints.take()
            if claims and self._hold.cause is not None:
                self._keep_back(claims)
            elif claims and not self.stopping.is_set():
                with self._health.at_work():
                    self._claim(claims)
            elif self._hints.is_closed:
                self.stopping.wait()  # nothing comes any more, and no wait for it blocks

    def _claim(self, claims: list[Claim]) -> None:
        try:
            verdicts = self._store.claim(claims)
        except DispatcherError as error:
            self._put_off(claims, error)
            return
        self._health.succeeded()
        self._troubles.over()
        self._note_foreign(verdicts)
        self._decisions.act_on(verdicts)

    def _keep_back(self, claims: list[Claim]) -> None:
        """The Gateway takes no work: nobody is asked, and each agent is told of once."""
        news = [claim.agent_id for claim in claims if self._hold.keep(claim.agent_id)]
        for claim in claims:
            self._hints.later(claim.agent_id, self._hold.ask_again)
        self._decisions.act_on([Refusal(agent_id, self._agents.slug(agent_id), GATE) for agent_id in news])

    def _put_off(self, claims: list[Claim], error: DispatcherError) -> None:
        """The database could not be asked: the agents are looked at again, later each time."""
        self._health.failed(error)
        delay = self._troubles.failed(error)
        for claim in claims:
            self._hints.later(claim.agent_id, delay)
        repeats = self._troubles.repeats.news(str(error))
        if repeats is None:
            return
        log.warning(
            events.WAKE_CLAIM_FAILED,
            msg=f"Could not claim {len(claims)} wake(s), trying again in {delay:.0f} s: {error}",
            agents=len(claims),
            error=str(error),
            repeats=repeats,
        )

    def _note_foreign(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Refusal) and verdict.reason == "not_local":
                self._agents.note_foreign(verdict.agent_id)
