"""What the workflow functions answer, as frozen rows. Shapes are those of `supabase/migrations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.answers import Answer

# As the tables check it, either way from 0.
MAX_PRIORITY: Final = 1_000_000
COUNTS: Final = ("dispatched", "retried", "released", "failed", "timed_out")


@dataclass(frozen=True, slots=True)
class StopOrder:
    """A live wake of ours whose run was ended from outside: its process is to be stopped."""

    wake_id: UUID
    cause: str


@dataclass(frozen=True, slots=True)
class RowError:
    """A phase of a tick, or one run in it, that raised; the rest went on."""

    phase: str
    run_id: str | None
    error: str


@dataclass(frozen=True, slots=True)
class Look:
    """Answer of phase `look`: the phases that have something to do, in their order."""

    due: tuple[str, ...]
    stops: tuple[StopOrder, ...]

    @classmethod
    def read(cls, answer: Answer) -> Look:
        """Raises MalformedAnswer."""
        return cls(tuple(str(phase) for phase in answer.list("due")), stop_orders(answer))


@dataclass(frozen=True, slots=True)
class PhaseAnswer:
    """Answer of one pass of a phase of `dispatch_workflows`.

    `busy`: another daemon's pass is under way, nothing was done. `locked`: groups of runs that another session holds.
    `held_by`: the names of the budgets that hold each type; `blockers`: why they do (`budget`, `estimate_over_cap`).
    `budgets_open`: whether the `budget_error` had runs dispatched without their budgets.
    """

    phase: str
    busy: bool
    again: bool
    counts: Mapping[str, int]
    held: int
    stopped: int
    warned: int
    locked: int
    held_by: Mapping[str, object]
    blockers: Mapping[str, object]
    errors: tuple[RowError, ...]
    budget_error: str | None
    budgets_open: bool

    @property
    def notifies(self) -> bool:
        """Whether agents are to be told of something new."""
        return bool(self.counts["dispatched"] or self.counts["retried"])

    @property
    def did_something(self) -> bool:
        """Whether a run changed its state."""
        return any(self.counts.values()) or bool(self.stopped)

    @classmethod
    def read(cls, answer: Answer) -> PhaseAnswer:
        """Raises MalformedAnswer."""
        return cls(
            phase=answer.text("phase"),
            busy=answer.flag("busy"),
            again=answer.flag("again"),
            counts={name: answer.count(name) for name in COUNTS},
            held=answer.count("held"),
            stopped=answer.count("stopped"),
            warned=answer.count("warned"),
            locked=answer.count("locked"),
            held_by=answer.part("held_by").fields if answer.value("held_by") is not None else {},
            blockers=answer.part("blockers").fields if answer.value("blockers") is not None else {},
            errors=tuple(_row_error(row) for row in answer.parts("errors")),
            budget_error=answer.text_or_none("budget_error"),
            budgets_open=answer.value("budgets_open") is True,
        )


@dataclass(frozen=True, slots=True)
class Note:
    """Answer of phase `note`. `next_in`: seconds until something is due by itself, None when nothing is."""

    next_in: float | None
    stops: tuple[StopOrder, ...]

    @classmethod
    def read(cls, answer: Answer) -> Note:
        """Raises MalformedAnswer."""
        return cls(answer.seconds_or_none("next_in"), stop_orders(answer))


def _row_error(row: Answer) -> RowError:
    error = f"{row.text_or_none('error')} ({row.text_or_none('error_code')})"
    return RowError(row.text("phase"), row.text_or_none("run_id"), error)


def stop_orders(answer: Answer) -> tuple[StopOrder, ...]:
    """The `stop_wakes` of an answer. Raises MalformedAnswer."""
    orders = answer.parts("stop_wakes")
    return tuple(StopOrder(order.uuid("wake_id"), order.text_or_none("cause") or "") for order in orders)


@dataclass(frozen=True, slots=True)
class Notification:
    """A dispatch its agent is to be told of, claimed by this daemon. `tries` counts this one."""

    id: UUID
    claim_token: UUID
    run_id: UUID
    workflow_type: str
    agent_id: str
    workspace_slug: str | None
    attempt: int
    tries: int

    @classmethod
    def read(cls, row: Answer) -> Notification:
        """Raises MalformedAnswer."""
        return cls(
            id=row.uuid("id"),
            claim_token=row.uuid("claim_token"),
            run_id=row.uuid("run_id"),
            workflow_type=row.text("workflow_type"),
            agent_id=row.text("agent_id"),
            workspace_slug=row.text_or_none("workspace_slug"),
            attempt=row.count("attempt"),
            tries=row.count("tries"),
        )


@dataclass(frozen=True, slots=True)
class Outbox:
    """Answer of `claim_workflow_notifications`. `next_in`: seconds until another is due, None when none is."""

    due: tuple[Notification, ...]
    next_in: float | None

    @classmethod
    def read(cls, answer: Answer) -> Outbox:
        """Raises MalformedAnswer."""
        due = tuple(Notification.read(row) for row in answer.parts("notifications"))
        return cls(due, answer.seconds_or_none("next_in"))


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of a notification; `error` is empty when it was sent."""

    notification: Notification
    error: str

    def as_json(self) -> dict[str, object]:
        return {
            "id": str(self.notification.id),
            "claim_token": str(self.notification.claim_token),
            "sent": not self.error,
            "error": self.error or None,
        }


@dataclass(frozen=True, slots=True)
class Suspect:
    """A running run of one of our agents that has been silent (seconds) for longer than a heartbeat takes.

    `silent_for` is None where nobody knows for how long.
    """

    run_id: UUID
    claim_token: UUID
    workflow_type: str
    agent_id: str
    workspace_slug: str | None
    session_id: str | None
    attempt: int
    silent_for: float | None

    @classmethod
    def read(cls, row: Answer) -> Suspect:
        """Raises MalformedAnswer."""
        return cls(
            run_id=row.uuid("run_id"),
            claim_token=row.uuid("claim_token"),
            workflow_type=row.text("workflow_type"),
            agent_id=row.text("agent_id"),
            workspace_slug=row.text_or_none("workspace_slug"),
            session_id=row.text_or_none("session_id"),
            attempt=row.count("attempt"),
            silent_for=row.seconds_or_none("silent_for"),
        )


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer of `monitor_workflows`. `orphan_after`: the silence (s) that makes a run a suspect."""

    suspects: tuple[Suspect, ...]
    stops: tuple[StopOrder, ...]
    orphan_after: float

    @classmethod
    def read(cls, answer: Answer) -> Watch:
        """Raises MalformedAnswer."""
        suspects = tuple(Suspect.read(row) for row in answer.parts("suspects"))
        orphan_after = answer.seconds_or_none("orphan_after")
        if orphan_after is None:
            raise answer.fault("orphan_after", "is no time")
        return cls(suspects, stop_orders(answer), orphan_after)


@dataclass(frozen=True, slots=True)
class Respawn:
    """Answer of `respawn_workflow_run`. `refusal` is the reason when no process is granted.

    `grant` is for the inbox slice to read, which starts wakes; `session_id` the session the new process is to use.
    """

    refusal: str | None
    grant: Answer
    session_id: str

    @classmethod
    def read(cls, answer: Answer) -> Respawn:
        """Raises MalformedAnswer."""
        if not answer.flag("granted"):
            return cls(answer.text("skip_reason"), answer, "")
        return cls(None, answer, answer.part("run").text("session_id"))
