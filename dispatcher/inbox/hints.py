"""Hints: which agents may have work, heard of from Realtime, from verdicts and from the clock."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final
from uuid import UUID

from dispatcher.inbox.book import WakeBook
from dispatcher.inbox.model import Claim, Path
from dispatcher.runtime.wakeup import DueTimes, Wakeup

MAX_CLAIMS_PER_CALL: Final = 25
LONGEST_WAIT: Final = 0.5
REMEMBERED: Final = 10_000
ECHO_SECONDS: Final = 15.0
# In a payload: the agent itself changed, so what was known of its gates is not known any more.
CHANGED: Final = "changed"


class LocalAgents:
    """Which agents are this gateway's. An unknown one is asked about once; the answer is kept until it changes."""

    def __init__(self) -> None:
        self._local: Mapping[UUID, str] = {}
        self._foreign: set[UUID] = set()
        self._lock = threading.Lock()

    def replace(self, slugs: Mapping[UUID, str]) -> None:
        """All agents of the gateway by id, each with its slug."""
        with self._lock:
            self._local = dict(slugs)
            self._foreign -= slugs.keys()

    def slug(self, agent_id: UUID) -> str | None:
        """None for one that is not known to be here."""
        return self._local.get(agent_id)

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


class RestingAgents:
    """Agents whose gates are known to be shut until some moment, whatever is inserted for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[UUID, float] = {}

    def rest(self, agent_id: UUID, seconds: float) -> None:
        now = time.monotonic()
        with self._lock:
            if len(self._until) >= REMEMBERED:
                self._until = {agent: until for agent, until in self._until.items() if until > now}
            self._until[agent_id] = now + seconds

    def end(self, agent_id: UUID) -> None:
        with self._lock:
            self._until.pop(agent_id, None)

    def seconds_left(self, agent_id: UUID) -> float:
        """0.0 for one that does not rest."""
        with self._lock:
            until = self._until.get(agent_id)
            left = 0.0 if until is None else until - time.monotonic()
            if left <= 0.0:
                self._until.pop(agent_id, None)
            return max(0.0, left)


class Hints:
    """Where hints land, and which of them are worth a question. Every method is cheap and safe in any thread.

    An agent with a wake of ours is not asked about before that wake's end, and one that rests not before the end of
    its rest: a thousand items in that time cost no call.
    """

    def __init__(self, agents: LocalAgents, due: DueTimes[UUID], book: WakeBook) -> None:
        self.items = HintedItems()
        self._agents = agents
        self._due = due
        self._book = book
        self._resting = RestingAgents()
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
        self._waiting.set(agent_id, [CHANGED])

    def later(self, agent_id: UUID, seconds: float) -> None:
        self._due.schedule_in(agent_id, seconds)

    def rest(self, agent_id: UUID, seconds: float) -> None:
        """For so long no item of this agent changes the answer: hints of items until then make one look after it.

        0 ends the rest.
        """
        self._resting.rest(agent_id, seconds)

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
            wait = 0.0
            agent_id, named = hint
            if self._is_put_off(agent_id, CHANGED in named):
                continue
            items = tuple(item for item in named if isinstance(item, UUID))
            path: Path = "event" if items else "due"
            claims.append(Claim(agent_id, path, items))
        return claims

    def _is_put_off(self, agent_id: UUID, has_changed: bool) -> bool:
        if self._book.defer(agent_id):
            return True
        # Not ended when the change is heard of: the answer that made it rest may be older and yet come later.
        if has_changed:
            self._resting.end(agent_id)
        seconds = self._resting.seconds_left(agent_id)
        if seconds:
            self._due.schedule_in(agent_id, seconds)
        return bool(seconds)
