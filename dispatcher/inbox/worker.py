"""Turns hints into claims: several at once when they pile up, one at once when they do not."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from dispatcher import events
from dispatcher.errors import DispatcherError
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.model import Claim, Path, Refusal, Verdict
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import jittered
from dispatcher.runtime.health import LoopHealth
from dispatcher.runtime.service import Service
from dispatcher.runtime.wakeup import DueTimes, Wakeup

log = get_logger(__name__)

MAX_CLAIMS_PER_CALL: Final = 25
LONGEST_WAIT: Final = 0.5
RETRY_SECONDS: Final = 3.0
REMEMBERED: Final = 10_000
ECHO_SECONDS: Final = 15.0


class LocalAgents:
    """Which agents are this gateway's. An unknown one is asked about once; the answer is kept until it changes."""

    def __init__(self) -> None:
        self._local: frozenset[UUID] = frozenset()
        self._foreign: set[UUID] = set()
        self._lock = threading.Lock()

    def replace(self, agent_ids: frozenset[UUID]) -> None:
        with self._lock:
            self._local = agent_ids
            self._foreign -= agent_ids

    def note_foreign(self, agent_id: UUID) -> None:
        with self._lock:
            if len(self._foreign) >= REMEMBERED:
                self._foreign.clear()
            self._foreign.add(agent_id)

    def forget(self, agent_id: UUID) -> None:
        """It may have moved: ask again."""
        with self._lock:
            self._foreign.discard(agent_id)

    def may_be_local(self, agent_id: UUID) -> bool:
        return agent_id in self._local or agent_id not in self._foreign


class HintedItems:
    """The items a hint has spoken of lately: an echo on the other path is dropped, an item no hint named is noticed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By item: the path whose hint has had no echo yet, and when that was.
        self._seen: OrderedDict[UUID, tuple[str | None, float]] = OrderedDict()

    def is_echo(self, item_id: UUID, hint_path: str) -> bool:
        """Whether this item was hinted a moment ago on the other path. Each hint has one echo: the next is news."""
        now = time.monotonic()
        with self._lock:
            path, at = self._seen.pop(item_id, (None, 0.0))
            is_echo = path not in (None, hint_path) and now - at < ECHO_SECONDS
            self._seen[item_id] = (None if is_echo else hint_path, now)
            while len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        return is_echo

    def knows(self, item_ids: Iterable[UUID]) -> bool:
        with self._lock:
            return any(item_id in self._seen for item_id in item_ids)


class Hints:
    """Where hints land. Every method is cheap and safe in any thread."""

    def __init__(self, agents: LocalAgents, due: DueTimes[UUID]) -> None:
        self.items = HintedItems()
        self._agents = agents
        self._due = due
        self._waiting: Wakeup[UUID] = Wakeup()
        self.is_closed = False

    def item(self, agent_id: UUID, item_ids: Iterable[UUID], hint_path: str) -> None:
        """Items of an agent were inserted, or are open again."""
        fresh = [item_id for item_id in item_ids if not self.items.is_echo(item_id, hint_path)]
        if fresh and self._agents.may_be_local(agent_id):
            self._waiting.set(agent_id, fresh)

    def agent(self, agent_id: UUID) -> None:
        """Something about an agent changed that may let it be woken."""
        self._agents.forget(agent_id)
        self._waiting.set(agent_id)

    def later(self, agent_id: UUID, seconds: float) -> None:
        self._due.schedule_in(agent_id, seconds)

    def close(self) -> None:
        """From now on there is nothing to take: what waits is found again by whoever sweeps next."""
        self.is_closed = True
        self._waiting.close()

    def take(self) -> list[Claim]:
        """The next claims to make, at most `MAX_CLAIMS_PER_CALL`; empty after a short wait without any.

        Empty at once when it is closed, also for those that were waiting in here.
        """
        claims = [] if self.is_closed else self._next_claims()
        return [] if self.is_closed else claims

    def _next_claims(self) -> list[Claim]:
        for agent_id in self._due.pop_due():
            self._waiting.set(agent_id)
        claims: list[Claim] = []
        wait = self._due.seconds_to_next(LONGEST_WAIT)
        while len(claims) < MAX_CLAIMS_PER_CALL and (hint := self._waiting.pop(wait)) is not None:
            agent_id, named = hint
            items = tuple(item for item in named if isinstance(item, UUID))
            path: Path = "event" if items else "due"
            claims.append(Claim(agent_id, path, items))
            wait = 0.0
        return claims


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
