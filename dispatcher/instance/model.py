"""This daemon as the database knows it, and the live wakes that nobody here attends to. Frozen rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dispatcher.answers import Answer
from dispatcher.runtime.metrics import BACKLOG_AGES, RUN_STATUSES


@dataclass(frozen=True, slots=True)
class Schema:
    """Answer of `dispatcher_schema`. `drift`: the first objects that differ from what the migrations make."""

    revision: int
    fingerprint: str
    drift: tuple[str, ...]

    @classmethod
    def read(cls, answer: Answer) -> Schema:
        """Raises MalformedAnswer."""
        return cls(answer.count("revision"), answer.text("fingerprint"), tuple(map(str, answer.list("drift"))))


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer of `register_dispatcher_instance`."""

    instance_id: UUID
    gateway_id: UUID
    gateway_slug: str
    topic: str
    broadcast_available: bool
    open_wakes: tuple[OpenWake, ...]

    @classmethod
    def read(cls, answer: Answer) -> Registration:
        """Raises MalformedAnswer."""
        return cls(
            instance_id=answer.uuid("instance_id"),
            gateway_id=answer.uuid("gateway_id"),
            gateway_slug=answer.text("gateway_slug"),
            topic=answer.text("topic"),
            broadcast_available=answer.flag("broadcast_available"),
            open_wakes=tuple(OpenWake.read(row) for row in answer.parts("open_wakes")),
        )


@dataclass(frozen=True, slots=True)
class SideFault:
    """A side write (a notification, an event, a hint) that failed; `id` grows."""

    id: int
    side_write: str
    error: str

    @classmethod
    def read(cls, row: Answer) -> SideFault:
        """Raises MalformedAnswer."""
        return cls(row.count("id"), row.text("side_write")[:100], row.text("error")[:500])


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answer of `heartbeat_dispatcher_instance`.

    `fenced` are wakes this instance no longer owns, `unattended` those it owns and did not name among its live ones,
    `faults` side writes that failed since the last heartbeat.
    """

    renewed: int
    broadcast_available: bool
    fenced: tuple[UUID, ...]
    unattended: tuple[OpenWake, ...]
    orphaned: frozenset[UUID]
    faults: tuple[SideFault, ...] = ()

    @classmethod
    def read(cls, answer: Answer) -> Heartbeat:
        """Raises MalformedAnswer."""
        return cls(
            renewed=answer.count("renewed"),
            broadcast_available=answer.flag("broadcast_available"),
            fenced=answer.uuids("fenced"),
            unattended=tuple(OpenWake.read(row) for row in answer.parts("unattended")),
            orphaned=frozenset(answer.uuids("orphaned")),
            faults=tuple(SideFault.read(row) for row in answer.parts("faults")) if answer.value("faults") else (),
        )


@dataclass(frozen=True, slots=True)
class Adoption:
    """Answer of `adopt_wake` when it was applied. `deadline_in` in seconds, negative when it is over; None: unknown."""

    claim_token: UUID
    agent_id: UUID
    deadline_in: float | None

    @classmethod
    def read(cls, answer: Answer) -> Adoption | None:
        """None when it was not applied. Raises MalformedAnswer."""
        if not answer.flag("applied"):
            return None
        return cls(answer.uuid("claim_token"), answer.uuid("agent_id"), answer.seconds_or_none("deadline_in"))


@dataclass(frozen=True, slots=True)
class OpenWake:
    """A live wake nobody here attends to. Times in seconds, None where nobody knows; pids likewise.

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
    deadline_in: float | None
    owner_stopped: bool
    owner_host_id: str | None
    owner_pid: int | None
    owner_pid_started_at: float | None
    owner_silent_for: float | None

    @classmethod
    def read(cls, row: Answer) -> OpenWake:
        """`row` as `open_wake_facts` builds it. Raises MalformedAnswer."""
        return cls(
            wake_id=row.uuid("wake_id"),
            claim_token=row.uuid("claim_token"),
            claim_request=row.uuid_or_none("claim_request"),
            agent_id=row.uuid("agent_id"),
            agent_slug=row.text("agent_slug"),
            host_id=row.text_or_none("host_id"),
            hostname=row.text_or_none("hostname"),
            pid=row.pid_or_none("pid"),
            pid_started_at=row.seconds_or_none("pid_started_at"),
            deadline_in=row.seconds_or_none("deadline_in"),
            owner_stopped=row.text("owner_state") in ("stopped", "lost"),
            owner_host_id=row.text_or_none("owner_host_id"),
            owner_pid=row.pid_or_none("owner_pid"),
            owner_pid_started_at=row.seconds_or_none("owner_pid_started_at"),
            owner_silent_for=row.seconds_or_none("owner_silent_for"),
        )

    @property
    def is_over(self) -> bool:
        """Whether its time is up for certain."""
        return self.deadline_in is not None and self.deadline_in < 0


def read_gauges(answer: Answer) -> dict[str, Any]:
    """Answer of `dispatcher_gauges`, as the meter takes it: {"backlog", "runs", "held"}. Raises MalformedAnswer."""
    backlog, runs = answer.part("backlog"), answer.part("runs")
    rest = {
        "oldest_seconds": backlog.seconds_or_none("oldest_seconds"),
        "waiting_for_paused": backlog.count("waiting_for_paused"),
    }
    return {
        "backlog": {age: backlog.count(age) for age in BACKLOG_AGES} | rest,
        "runs": {status: runs.count(status) for status in RUN_STATUSES},
        "held": answer.count("held"),
    }


def read_holders(answer: Answer) -> list[str]:
    """Each thing in an answer of `dispatcher_holders`, and who holds it. Raises MalformedAnswer."""
    return [row.text("text") for row in answer.parts("held")]
