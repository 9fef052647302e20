"""What the daemon asks of OpenClaw's Gateway and tells it to do, over the link, or over its command line where barred.

A turn of a session runs while the session is in the list of active ones: `status: running` alone is stale after a
crash, `activeRunIds` is often left out, and tasks know nothing of turns that OpenClaw starts by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from dispatcher.errors import GatewayRefused
from dispatcher.openclaw.link import CALL_SECONDS, GatewayLink
from dispatcher.openclaw.state import GatewayState

# The command line takes seconds where the link takes milliseconds.
SLOW_SECONDS: Final = 20.0
MOST_ROWS: Final = 1_000
LIVE_TASKS: Final = frozenset({"queued", "running"})


class GatewayCalls(Protocol):
    """Something that asks the Gateway. Raises the errors of `GatewayLink.call`."""

    def __call__(self, method: str, params: Mapping[str, Any], timeout: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the Gateway's tasks. `kind` is `exec` for a background command, `cli` for a turn somebody started.

    `is_ghost`: its Gateway was killed; the row stays `running` for about six minutes, and nothing runs.
    """

    task_id: str
    kind: str
    session_key: str
    run_id: str
    status: str
    title: str
    is_ghost: bool

    @property
    def is_live(self) -> bool:
        """Whether something runs, or is about to, for all we know."""
        return self.status in LIVE_TASKS and not self.is_ghost


@dataclass(frozen=True, slots=True)
class Abort:
    """What became of an abort: the run it ended, None when none ran. A second abort right after the first ends none."""

    run_id: str | None
    status: str


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """An agent as the running Gateway has it."""

    agent_id: str
    workspace: str | None


class Gateway:
    """The verbs. Thread-safe. Each raises GatewayUnavailable, GatewaySilent or GatewayRefused, within its time.

    `slow` is the command line; it is used while the link is barred or unused.
    """

    def __init__(self, link: GatewayLink, slow: GatewayCalls) -> None:
        self._link = link
        self._slow = slow

    @property
    def state(self) -> GatewayState:
        """What is known of the Gateway now."""
        return self._link.state

    @property
    def is_fast(self) -> bool:
        """Whether a call takes milliseconds now."""
        return self._link.state.status not in {"barred", "unused"}

    def look_now(self) -> None:
        """Something went wrong that may be the Gateway's fault: looks at it at once."""
        self._link.look_now()

    def active_sessions(self) -> frozenset[str]:
        """The keys of the sessions in which a turn runs now: ordinary, queued, resumed, or OpenClaw's own."""
        rows = self._rows("sessions.list", {"activeOnly": True, "limit": MOST_ROWS}, "sessions")
        return frozenset(str(row["key"]) for row in rows if row.get("hasActiveRun") is True and row.get("key"))

    def session_status(self, key: str) -> str | None:
        """What the session says of its last turn: `running` may be stale, or a turn about to be resumed; None: none."""
        session = self._ask("sessions.describe", {"key": key}).get("session")
        return str(session.get("status") or "") if isinstance(session, Mapping) else None

    def tasks(self, key: str) -> list[Task]:
        """The turns and background commands of that session that are said to run."""
        return [read_task(row) for row in self._rows("tasks.list", {"sessionKey": key, "status": "running"}, "tasks")]

    def abort(self, key: str) -> Abort:
        """Ends the turn of that session and those queued behind it. Background commands go on."""
        answer = self._ask("sessions.abort", {"key": key})
        run_id = answer.get("abortedRunId")
        return Abort(str(run_id) if run_id else None, str(answer.get("status") or ""))

    def cancel(self, task_id: str, reason: str) -> bool:
        """Kills a background command; whether there was one to kill."""
        return self._ask("tasks.cancel", {"taskId": task_id, "reason": reason}).get("cancelled") is True

    def agents(self) -> list[KnownAgent]:
        """The agents the running Gateway has."""
        rows = self._rows("agents.list", {}, "agents")
        return [KnownAgent(str(row["id"]), _text_or_none(row.get("workspace"))) for row in rows if row.get("id")]

    def _rows(self, method: str, params: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
        rows = self._ask(method, params).get(name)
        if not isinstance(rows, list):
            raise GatewayRefused(f"{method}: the answer has no list of {name}", code="MALFORMED")
        return (row for row in rows if isinstance(row, Mapping))

    def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self._call(method, params)
        if not isinstance(answer, Mapping):
            raise GatewayRefused(f"{method}: the answer is no object", code="MALFORMED")
        return answer

    def _call(self, method: str, params: Mapping[str, Any]) -> Any:
        if self.is_fast:
            return self._link.call(method, params, CALL_SECONDS)
        return self._slow(method, params, SLOW_SECONDS)


def read_task(row: Mapping[str, Any]) -> Task:
    """A row of `tasks.list`. What does not say that it is a ghost may be alive."""
    execution = row.get("execution")
    state = execution.get("state") if isinstance(execution, Mapping) else None
    kind = str(row.get("kind") or row.get("taskKind") or "")
    return Task(
        task_id=str(row.get("taskId") or row.get("id") or ""),
        kind=kind,
        session_key=str(row.get("sessionKey") or row.get("requesterSessionKey") or ""),
        run_id=str(row.get("runId") or ""),
        status=str(row.get("status") or "").lower(),
        title=str(row.get("title") or ""),
        is_ghost=kind == "exec" and state == "unknown",
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
