"""Which agent of the gateway is woken under an OpenClaw id, where the slugs of several come to the same one.

OpenClaw knows agents by ids it normalises: `dev-ops` and `dev.ops` are one agent to it, with one session. Woken as two,
two processes would work in that session at once. So one of them owns the id, always the same one, and the others are
refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from uuid import UUID

from dispatcher.agents.registry import normalise_id, resolve_ids
from dispatcher.errors import InvalidAgentId, SpawnError
from dispatcher.text import shortened

# (known ids, workspace): what the owners were worked out from.
Basis = tuple[tuple[str, ...], str | None]
# Who owns an id: the agent whose slug it is, else one whose slug OpenClaw would not change, else the first by slug.
Rank = tuple[bool, bool, str, UUID]


class Namesakes:
    """The agents of the gateway by OpenClaw id, and the wakes that hold an id now. Thread-safe.

    `known_ids` are those of `openclaw.json`.
    """

    def __init__(self, known_ids: Callable[[], tuple[str, ...]]) -> None:
        self._known_ids = known_ids
        self._lock = threading.Lock()
        self._slugs: dict[UUID, str] = {}
        self._basis: Basis | None = None
        # By OpenClaw id: the agent that owns it, with its slug.
        self._owners: dict[str, tuple[UUID, str]] = {}
        # By wake: whose process it is.
        self._holders: dict[UUID, tuple[UUID, str]] = {}

    def replace(self, slugs: Mapping[UUID, str]) -> None:
        """All agents of the gateway, as a sweep saw them."""
        with self._lock:
            if slugs != self._slugs:
                self._slugs = dict(slugs)
                self._basis = None

    def hold(self, wake_id: UUID, agent_id: UUID, slug: str) -> None:
        """The process of this wake runs, whoever started it."""
        with self._lock:
            self._holders[wake_id] = (agent_id, slug)

    def leave(self, wake_id: UUID) -> None:
        """The process of this wake is gone, or was never started."""
        with self._lock:
            self._holders.pop(wake_id, None)

    def claim(self, wake_id: UUID, agent_id: UUID, slug: str, workspace: str | None, resolved: str) -> None:
        """Holds the id `resolved` for a wake, until `leave`.

        Raises:
            InvalidAgentId: the id is another agent's.
            SpawnError: it is this agent's, but a process of another one still runs under it.
        """
        known = self._known_ids()
        normal = normalise_id(resolved)
        with self._lock:
            self._note(agent_id, slug)
            self._settle((known, workspace))
            owner_id, owner_slug = self._owners.get(normal, (agent_id, slug))
            if owner_id != agent_id:
                raise InvalidAgentId(_text(owner_slug, normal))
            for other in self._others(agent_id, normal, (known, workspace)):
                raise SpawnError(f"a process of {shortened(other)} still runs as OpenClaw's agent {normal}")
            self._holders[wake_id] = (agent_id, slug)

    def _note(self, agent_id: UUID, slug: str) -> None:
        if self._slugs.get(agent_id) != slug:
            self._slugs[agent_id] = slug
            self._basis = None

    def _settle(self, basis: Basis) -> None:
        """Works out the owners anew where what they follow from has changed."""
        if self._basis == basis:
            return
        resolved = resolve_ids(*basis, self._slugs.values())
        ranks: dict[str, Rank] = {}
        for agent_id, slug in self._slugs.items():
            if (normal := resolved.get(slug)) is not None:
                rank = (slug != normal, normalise_id(slug) != slug, slug, agent_id)
                ranks[normal] = min(ranks.get(normal, rank), rank)
        self._owners = {normal: (rank[3], rank[2]) for normal, rank in ranks.items()}
        self._basis = basis

    def _others(self, agent_id: UUID, normal: str, basis: Basis) -> list[str]:
        """The slugs of others that hold the id now."""
        others = [slug for holder, slug in self._holders.values() if holder != agent_id]
        resolved = resolve_ids(*basis, others)
        return [slug for slug in others if resolved.get(slug) == normal]


def _text(owner: str, normal: str) -> str:
    return (
        f"OpenClaw takes it for the agent {shortened(owner)}: both slugs come to its id {normal}. Give one of them "
        "another slug, then requeue its items"
    )
