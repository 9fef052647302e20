"""What the workflow functions answer, as frozen rows. Shapes are those of `supabase/migrations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

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
class TickAnswer:
    """Answer of `dispatch_workflows`. `next_in`: seconds until something is due by itself, None when nothing is.

    `budgets_open`: whether the `budget_error` had runs dispatched without their budgets.
    """

    busy: bool
    counts: Mapping[str, int]
    held: int
    stopped: int
    warned: int
    errors: tuple[RowError, ...]
    budget_error: str | None
    budgets_open: bool
    again: bool
    next_in: float | None
    stops: tuple[StopOrder, ...]

    @property
    def notifies(self) -> bool:
        """Whether agents are to be told of something new."""
        return bool(self.counts["dispatched"] or self.counts["retried"])

    @property
    def did_something(self) -> bool:
        """Whether this tick is worth a line for people."""
        return any(self.counts.values()) or bool(self.stopped)

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> TickAnswer:
        enforcement = answer.get("budget_enforcement", {})
        return cls(
            busy=answer["busy"],
            counts={name: int(answer.get(name, 0)) for name in COUNTS},
            held=enforcement.get("held", 0),
            stopped=enforcement.get("stopped", 0),
            warned=enforcement.get("warned", 0),
            errors=tuple(_row_error(error) for error in answer.get("errors", ())),
            budget_error=answer.get("budget_error"),
            budgets_open=answer.get("budgets_open", False),
            again=answer.get("again", False),
            next_in=None if answer.get("next_in") is None else float(answer["next_in"]),
            stops=stop_orders(answer),
        )


def _row_error(row: Mapping[str, Any]) -> RowError:
    return RowError(row["phase"], row.get("run_id"), f"{row['error']} ({row['error_code']})")


def stop_orders(answer: Mapping[str, Any]) -> tuple[StopOrder, ...]:
    """The `stop_wakes` of an answer."""
    return tuple(StopOrder(UUID(order["wake_id"]), order["cause"]) for order in answer["stop_wakes"])


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
    def from_json(cls, row: Mapping[str, Any]) -> Notification:
        return cls(
            id=UUID(row["id"]),
            claim_token=UUID(row["claim_token"]),
            run_id=UUID(row["run_id"]),
            workflow_type=row["workflow_type"],
            agent_id=row["agent_id"],
            workspace_slug=row["workspace_slug"],
            attempt=row["attempt"],
            tries=row["tries"],
        )


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
    """A running run of one of our agents that has been silent (seconds) for longer than a heartbeat takes."""

    run_id: UUID
    claim_token: UUID
    workflow_type: str
    agent_id: str
    workspace_slug: str | None
    session_id: str | None
    attempt: int
    silent_for: float

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Suspect:
        return cls(
            run_id=UUID(row["run_id"]),
            claim_token=UUID(row["claim_token"]),
            workflow_type=row["workflow_type"],
            agent_id=row["agent_id"],
            workspace_slug=row["workspace_slug"],
            session_id=row["session_id"],
            attempt=row["attempt"],
            silent_for=float(row["silent_for"]),
        )


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer of `monitor_workflows`. `orphan_after`: the silence (s) that makes a run a suspect."""

    suspects: tuple[Suspect, ...]
    stops: tuple[StopOrder, ...]
    orphan_after: float

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Watch:
        suspects = tuple(Suspect.from_json(row) for row in answer["suspects"])
        return cls(suspects, stop_orders(answer), float(answer["orphan_after"]))
