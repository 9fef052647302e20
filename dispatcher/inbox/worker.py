"""Turns hints into claims: several at once when they pile up, one at once when they do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dispatcher import events
from dispatcher.errors import DispatcherError
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.hints import Hints, LocalAgents
from dispatcher.inbox.model import Claim, Refusal, Verdict
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import jittered
from dispatcher.runtime.health import LoopHealth
from dispatcher.runtime.service import Service

log = get_logger(__name__)

RETRY_SECONDS: Final = 3.0


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
    ) -> None:
        super().__init__(name)
        self._hints = hints
        self._store = store
        self._agents = agents
        self._decisions = decisions
        self._health = health

    def run_service(self) -> None:
        """Works until asked to stop."""
        while not self.stopping.is_set():
            claims = self._hints.take()
            if claims and not self.stopping.is_set():
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
        self._note_foreign(verdicts)
        self._decisions.act_on(verdicts)

    def _put_off(self, claims: list[Claim], error: DispatcherError) -> None:
        """The database could not be asked: the agents are looked at again soon, spread out."""
        self._health.failed(error)
        for claim in claims:
            self._hints.later(claim.agent_id, jittered(RETRY_SECONDS, 0.5))
        log.warning(
            events.WAKE_CLAIM_FAILED,
            msg=f"Could not claim {len(claims)} wake(s), trying again soon: {error}",
            agents=len(claims),
            error=str(error),
        )

    def _note_foreign(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Refusal) and verdict.reason == "not_local":
                self._agents.note_foreign(verdict.agent_id)
