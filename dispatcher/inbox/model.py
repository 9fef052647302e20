"""What the wake functions answer, as frozen rows. Shapes are those of `supabase/migrations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast
from uuid import UUID

from dispatcher.answers import Answer, list_of, malformed
from dispatcher.errors import MalformedAnswer

Path = Literal["event", "sweep", "waitlist", "due", "command", "workflow"]
Ending = Literal["exited", "timed_out", "interrupted", "lost", "spawn_failed", "item_refused", "agent_refused"]


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
    def read(cls, row: Answer) -> Grant:
        """`row` as `wake_grant` builds it. Raises MalformedAnswer."""
        return cls(
            wake_id=row.uuid("wake_id"),
            claim_token=row.uuid("claim_token"),
            agent_id=row.uuid("agent_id"),
            agent_slug=row.text("agent_slug"),
            workspace_slug=row.text_or_none("workspace_slug"),
            path=cast("Path", row.text("path")),
            item_ids=row.uuids("item_ids"),
            event_type=row.text_or_none("event_type"),
            summary=row.text_or_none("summary"),
            item_created_at=row.text_or_none("item_created_at"),
            model_override=row.value("model_override"),
            thinking_override=row.value("thinking_override"),
            blockers=tuple(str(title) for title in row.list("blockers")),
            blockers_error=row.text_or_none("blockers_error"),
            chain_depth=row.count("chain_depth"),
            timeout_seconds=row.seconds_or_none("timeout_seconds"),
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
    # Busy for the whole gateway: what another session holds, and who.
    held: str | None = None

    @classmethod
    def read(cls, row: Answer) -> Refusal:
        """`row` as the claim functions build it. Raises MalformedAnswer."""
        error = row.text_or_none("error")
        return cls(
            row.uuid("agent_id"),
            row.text_or_none("agent_slug"),
            row.text("skip_reason"),
            row.seconds_or_none("retry_in"),
            f"{error} ({row.text_or_none('error_code')})" if error else None,
            row.count_or_none("failures"),
            row.text_or_none("held"),
        )


Verdict = Grant | Refusal


def read_verdict(row: Answer) -> Verdict:
    """One claim's verdict. Raises MalformedAnswer."""
    return Grant.read(row) if row.flag("granted") else Refusal.read(row)


def verdicts_for(claims: Sequence[Claim], function: str, value: object) -> list[Verdict]:
    """One verdict per claim, in order. One that cannot be read refuses its own claim; the others hold.

    A grant nobody could read is handed back: the next heartbeat finds its wake unattended.

    Raises:
        MalformedAnswer: the answer has not one verdict per claim.
    """
    rows = _one_per(claims, function, value, "verdicts")
    return [
        _read_or_refuse(function, row, f"verdict {place}", claim.agent_id)
        for place, (claim, row) in enumerate(zip(claims, rows, strict=True))
    ]


def waitlist_verdicts(answer: Answer, name: str) -> list[Verdict]:
    """The verdicts in that field, about agents nobody named. One that cannot be read refuses the agent it names.

    Raises:
        MalformedAnswer: no list, or a verdict that does not even name its agent.
    """
    verdicts: list[Verdict] = []
    for row in answer.parts(name):
        agent_id = row.uuid("agent_id")
        verdicts.append(_read_or_refuse(answer.function, row.fields, row.place, agent_id))
    return verdicts


def _read_or_refuse(function: str, value: object, place: str, agent_id: UUID) -> Verdict:
    try:
        return read_verdict(Answer.of(function, value, place))
    except MalformedAnswer as fault:
        return Refusal(agent_id, None, "error", error=str(fault))


def _one_per(asked: Sequence[object], function: str, value: object, what: str) -> list[Any]:
    rows = list_of(function, value, what)
    if len(rows) != len(asked):
        raise malformed(function, f"{len(rows)} {what} for {len(asked)} asked for")
    return rows


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
    """What became of one report. `state` and what follows are set for an applied end.

    `cause` says, for an agent that was refused at its start, why; None for every other end.
    """

    wake_id: UUID
    report: str
    applied: bool
    code: str
    state: str | None = None
    agent_id: UUID | None = None
    agent_slug: str | None = None
    failures: int = 0
    cause: str | None = None
    next: str | None = None
    retry_in: float | None = None
    error: str | None = None
    dead_letters: tuple[UUID, ...] = ()

    @classmethod
    def read(cls, row: Answer) -> ReportResult:
        """`row` as `report_wakes` builds it. Raises MalformedAnswer."""
        return cls(
            wake_id=row.uuid("wake_id"),
            report=row.text("report"),
            applied=row.flag("applied"),
            code=row.text("code"),
            state=row.text_or_none("state"),
            agent_id=row.uuid_or_none("agent_id"),
            agent_slug=row.text_or_none("agent_slug"),
            failures=row.count("consecutive_failures"),
            cause=row.text_or_none("cause"),
            next=row.text_or_none("next"),
            retry_in=row.seconds_or_none("retry_in"),
            error=row.text_or_none("error"),
            dead_letters=() if row.value("dead_letters") is None else row.uuids("dead_letters"),
        )


def result_of(report: Report, function: str, value: object, place: int) -> ReportResult:
    """What became of `report`. A result that cannot be read is an error of that report alone: it is sent again."""
    kind = "started" if isinstance(report, Started) else "ended"
    try:
        result = ReportResult.read(Answer.of(function, value, f"results[{place}]"))
    except MalformedAnswer as fault:
        return ReportResult(report.wake_id, kind, applied=False, code="error", error=str(fault))
    if (result.wake_id, result.report) == (report.wake_id, kind):
        return result
    error = str(malformed(function, f"results[{place}] is about another report"))
    return ReportResult(report.wake_id, kind, applied=False, code="error", error=error)


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer of `report_wakes`: a result per report, in order, and what was claimed off the waitlist.

    `claims_busy`: another session held the gateway, so nothing was claimed; look again soon.
    """

    results: list[ReportResult]
    verdicts: list[Verdict]
    claims_busy: bool = False

    @classmethod
    def read(cls, reports: Sequence[Report], function: str, value: object) -> ReportAnswer:
        """Raises MalformedAnswer when it has not one result per report."""
        answer = Answer.of(function, value)
        rows = _one_per(reports, function, answer.list("results"), "results")
        pairs = enumerate(zip(reports, rows, strict=True))
        results = [result_of(report, function, row, place) for place, (report, row) in pairs]
        return cls(results, waitlist_verdicts(answer, "claims"), claims_busy=answer.value("claims_busy") is True)


@dataclass(frozen=True, slots=True)
class Look:
    """Where a sweep begins.

    `slugs` are those of the gateway's agents by id; `open_wakes` are for the instance slice to read; `due` are the
    phases with work.
    """

    slugs: Mapping[UUID, str]
    open_wakes: Sequence[Answer]
    broadcast_available: bool
    due: tuple[str, ...]

    @classmethod
    def read(cls, answer: Answer) -> Look:
        """Raises MalformedAnswer."""
        return cls(
            slugs={row.uuid("id"): row.text_or_none("slug") or "" for row in answer.parts("agents")},
            open_wakes=answer.parts("open_wakes"),
            broadcast_available=answer.flag("broadcast_available"),
            due=tuple(str(phase) for phase in answer.list("due")),
        )


@dataclass(frozen=True, slots=True)
class PhaseAnswer:
    """What one phase of a sweep did, at most 500 rows; `again` when there is more, from `cursor` on."""

    phase: str
    counts: Mapping[str, int]
    again: bool
    cursor: object
    verdicts: list[Verdict]

    @classmethod
    def read(cls, phase: str, answer: Answer) -> PhaseAnswer:
        """Raises MalformedAnswer."""
        lists = [name for name in ("claims", "skipped") if answer.value(name) is not None]
        extra = [name for name in ("queued", "waiting") if answer.value(name) is not None]
        return cls(
            phase=phase,
            counts={phase: answer.count("count"), **{name: answer.count(name) for name in extra}},
            again=answer.flag("again"),
            cursor=answer.value("cursor"),
            verdicts=[verdict for name in lists for verdict in waitlist_verdicts(answer, name)],
        )
