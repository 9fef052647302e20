"""What the wake functions answer, as frozen rows. Shapes are those of `supabase/migrations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

Path = Literal["event", "sweep", "waitlist", "due", "command", "workflow"]
Ending = Literal["exited", "timed_out", "interrupted", "lost", "spawn_failed"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A request to wake one agent. `item_ids` are the items whose hints led here."""

    agent_id: UUID
    path: Path
    item_ids: tuple[UUID, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "agent_id": str(self.agent_id),
            "path": self.path,
            "item_ids": [str(item) for item in self.item_ids],
        }


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim that was granted: the wake exists in the database and its process is to be started.

    `message` is what the agent is told where that is not about its inbox (path `workflow`), and `timeout_seconds` how
    long its process may run where that is not AGENT_PROCESS_TIMEOUT.
    """

    wake_id: UUID
    claim_token: UUID
    agent_id: UUID
    agent_slug: str
    workspace_slug: str | None
    path: Path
    item_ids: tuple[UUID, ...]
    event_type: str | None
    summary: str | None
    item_created_at: str | None
    model_override: object
    thinking_override: object
    blockers: tuple[str, ...]
    blockers_error: str | None
    chain_depth: int = 0
    message: str | None = None
    timeout_seconds: float | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Grant:
        """`row` as `public.wake_grant` builds it."""
        return cls(
            wake_id=UUID(row["wake_id"]),
            claim_token=UUID(row["claim_token"]),
            agent_id=UUID(row["agent_id"]),
            agent_slug=row["agent_slug"],
            workspace_slug=row["workspace_slug"],
            path=row["path"],
            item_ids=tuple(UUID(item) for item in row["item_ids"]),
            event_type=row["event_type"],
            summary=row["summary"],
            item_created_at=row["item_created_at"],
            model_override=row["model_override"],
            thinking_override=row["thinking_override"],
            blockers=tuple(str(title) for title in row["blockers"]),
            blockers_error=row["blockers_error"],
            chain_depth=row["chain_depth"],
            timeout_seconds=row.get("timeout_seconds"),
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A claim that was refused. `reason` is the gate's; `retry_in` (seconds) is set when waiting alone opens it.

    `failures` are the agent's in a row; None when the answer does not say.
    """

    agent_id: UUID
    agent_slug: str | None
    reason: str
    retry_in: float | None = None
    error: str | None = None
    failures: int | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Refusal:
        error = f"{row['error']} ({row['error_code']})" if row.get("error") else None
        return cls(
            UUID(row["agent_id"]),
            row.get("agent_slug"),
            row["skip_reason"],
            row.get("retry_in"),
            error,
            row.get("failures"),
        )


Verdict = Grant | Refusal


def verdict_from_json(row: Mapping[str, Any]) -> Verdict:
    """One element of the array that `claim_wakes` answers."""
    return Grant.from_json(row) if row["granted"] else Refusal.from_json(row)


def verdicts_from_json(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """All elements of such an array."""
    return [verdict_from_json(row) for row in rows]


@dataclass(frozen=True, slots=True)
class Started:
    """Report: the process of a wake runs."""

    wake_id: UUID
    claim_token: UUID
    host_id: str
    pid: int
    pid_started_at: float | None

    def as_json(self) -> dict[str, object]:
        return {
            "report": "started",
            "wake_id": str(self.wake_id),
            "claim_token": str(self.claim_token),
            "host_id": self.host_id,
            "pid": self.pid,
            "pid_started_at": self.pid_started_at,
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """Report: the process of a wake is gone. `exit_code` is None when nobody could wait for it (adopted child)."""

    wake_id: UUID
    claim_token: UUID
    ending: Ending
    exit_code: int | None = None
    error: str | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "report": "ended",
            "wake_id": str(self.wake_id),
            "claim_token": str(self.claim_token),
            "ending": self.ending,
            "exit_code": self.exit_code,
            "error": self.error,
        }


Report = Started | Ended


@dataclass(frozen=True, slots=True)
class ReportResult:
    """What became of one report. `state` and what follows are set for an applied end."""

    wake_id: UUID
    report: str
    applied: bool
    code: str
    state: str | None = None
    agent_id: UUID | None = None
    agent_slug: str | None = None
    failures: int = 0
    next: str | None = None
    retry_in: float | None = None
    error: str | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ReportResult:
        return cls(
            wake_id=UUID(row["wake_id"]),
            report=row["report"],
            applied=row["applied"],
            code=row["code"],
            state=row.get("state"),
            agent_id=UUID(row["agent_id"]) if row.get("agent_id") else None,
            agent_slug=row.get("agent_slug"),
            failures=row.get("consecutive_failures") or 0,
            next=row.get("next"),
            retry_in=row.get("retry_in"),
            error=row.get("error"),
        )


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer of `report_wakes`: a result per report, and what was claimed off the waitlist."""

    results: list[ReportResult]
    verdicts: list[Verdict]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> ReportAnswer:
        return cls([ReportResult.from_json(row) for row in answer["results"]], verdicts_from_json(answer["claims"]))


@dataclass(frozen=True, slots=True)
class SweepAnswer:
    """Answer of `sweep_inbox`."""

    agent_ids: frozenset[UUID]
    verdicts: list[Verdict]
    open_wakes: list[Mapping[str, Any]]
    broadcast_available: bool
    errors: list[Mapping[str, Any]]
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> SweepAnswer:
        names = ("expired", "buried", "chained", "stalled", "queued", "waiting", "pruned", "ms")
        return cls(
            agent_ids=frozenset(UUID(agent) for agent in answer["agent_ids"]),
            verdicts=verdicts_from_json([*answer["claims"], *answer["skipped"]]),
            open_wakes=answer["open_wakes"],
            broadcast_available=answer["broadcast_available"],
            errors=answer["errors"],
            counts={name: int(answer[name]) for name in names if answer.get(name) is not None},
        )
