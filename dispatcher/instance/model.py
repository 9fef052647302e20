"""This daemon as the database knows it, and the live wakes that nobody here attends to. Frozen rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer of `register_dispatcher_instance`."""

    instance_id: UUID
    gateway_id: UUID
    gateway_slug: str
    topic: str
    broadcast_available: bool
    open_wakes: tuple[OpenWake, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answer of `heartbeat_dispatcher_instance`.

    `fenced` are wakes this instance no longer owns, `unattended` those it owns and did not name among its live ones.
    """

    renewed: int
    broadcast_available: bool
    fenced: tuple[UUID, ...]
    unattended: tuple[OpenWake, ...]
    orphaned: frozenset[UUID]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Heartbeat:
        fenced = tuple(UUID(wake) for wake in answer["fenced"])
        unattended = tuple(OpenWake.from_json(row) for row in answer["unattended"])
        orphaned = frozenset(UUID(wake) for wake in answer["orphaned"])
        return cls(answer["renewed"], answer["broadcast_available"], fenced, unattended, orphaned)


@dataclass(frozen=True, slots=True)
class Adoption:
    """Answer of `adopt_wake` when it was applied. `deadline_in` in seconds; negative when it is over."""

    claim_token: UUID
    agent_id: UUID
    deadline_in: float


@dataclass(frozen=True, slots=True)
class OpenWake:
    """A live wake nobody here attends to. Times in seconds; pids are None where nobody saved them.

    `claim_request` is the id of the call that claimed it.
    """

    wake_id: UUID
    claim_token: UUID
    claim_request: UUID | None
    agent_id: UUID
    agent_slug: str
    host_id: str | None
    hostname: str | None
    pid: int | None
    pid_started_at: float | None
    deadline_in: float
    owner_stopped: bool
    owner_host_id: str | None
    owner_pid: int | None
    owner_pid_started_at: float | None
    owner_silent_for: float | None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> OpenWake:
        """`row` as `public.open_wakes_of_others` builds it."""
        return cls(
            wake_id=UUID(row["wake_id"]),
            claim_token=UUID(row["claim_token"]),
            claim_request=UUID(row["claim_request"]) if row["claim_request"] else None,
            agent_id=UUID(row["agent_id"]),
            agent_slug=row["agent_slug"],
            host_id=row["host_id"],
            hostname=row["hostname"],
            pid=row["pid"],
            pid_started_at=row["pid_started_at"],
            deadline_in=float(row["deadline_in"]),
            owner_stopped=row["owner_state"] in ("stopped", "lost"),
            owner_host_id=row["owner_host_id"],
            owner_pid=row["owner_pid"],
            owner_pid_started_at=row["owner_pid_started_at"],
            owner_silent_for=row["owner_silent_for"],
        )
