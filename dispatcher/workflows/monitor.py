"""Watches running runs: one whose session is gone gets one new process in its attempt, as a wake like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final

from dispatcher import events
from dispatcher.agents.openclaw_calls import OpenclawCommand
from dispatcher.agents.registry import possible_ids
from dispatcher.clock import SYSTEM_CLOCK
from dispatcher.errors import DispatcherError
from dispatcher.logs import get_logger
from dispatcher.workflows.message import respawn_message
from dispatcher.workflows.model import Respawn, Suspect
from dispatcher.workflows.service import ProcessStopper
from dispatcher.workflows.sessions import SessionRow, is_live_task, judge, lists_sessions, read_sessions, rows_of
from dispatcher.workflows.store import WorkflowStore

log = get_logger(__name__)

LONGEST_INTERVAL: Final = 30.0
# A silent run is looked at from 60 % of STALE_CLAIM_SECONDS on and released at all of it: twice in between, at least.
LOOKS_BEFORE_RELEASE: Final = 5
# Questions about one suspect's tasks; each takes a second or two.
MAX_TASKS_ASKED: Final = 3
Claim = Callable[[Suspect], Respawn]
"""Asks for the new process of an orphan; what is granted is booked as a wake of this daemon before it returns."""
Launch = Callable[[Respawn, str], None]
"""Starts the process of a granted wake with this message."""


def monitor_interval(stale_claim_seconds: float) -> float:
    """Seconds between two beats."""
    return min(LONGEST_INTERVAL, max(0.5, stale_claim_seconds / LOOKS_BEFORE_RELEASE))


class Monitor:
    """One `beat` looks once. What two daemons could decide at once is not decided here: the database grants."""

    def __init__(
        self,
        store: WorkflowStore,
        openclaw: OpenclawCommand,
        stopper: ProcessStopper,
        claim: Claim,
        launch: Launch,
        *,
        known_agents: Callable[[], Sequence[str]],
        is_stopping: Callable[[], bool],
        now: Callable[[], datetime] = SYSTEM_CLOCK.now,
    ) -> None:
        self._store = store
        self._openclaw = openclaw
        self._stopper = stopper
        self._claim = claim
        self._launch = launch
        self._known_agents = known_agents
        self._is_stopping = is_stopping
        self._now = now

    def beat(self) -> None:
        """Looks at the silent runs of this gateway's agents. Raises what the store's call raises."""
        watch = self._store.watch()
        self._stopper.stop(watch.stops)
        sessions = self._sessions() if watch.suspects else None
        for suspect in watch.suspects:
            self._look_at(suspect, sessions, watch.orphan_after)

    def _look_at(self, suspect: Suspect, sessions: Sequence[SessionRow] | None, orphan_after: float) -> None:
        """One suspect that raises does not stop the others."""
        try:
            if sessions is not None and self._is_gone(suspect, sessions, orphan_after) and not self._is_stopping():
                self._respawn(suspect)
        except DispatcherError as error:
            log.error(
                events.WORKFLOW_STEP_FAILED,
                msg=f"Could not look after a silent run of {suspect.agent_id}: {error}",
                phase="monitor",
                run_id=str(suspect.run_id),
                error=str(error),
            )

    def _sessions(self) -> list[SessionRow] | None:
        """What OpenClaw says; None when it cannot be asked: unknown is not gone."""
        failure, document = self._ask_for_sessions()
        if failure:
            log.warning(
                events.WORKFLOW_MONITOR_BLIND,
                msg=f"OpenClaw does not say which sessions live: {failure}",
                error=failure,
            )
            return None
        return read_sessions(document, self._now())

    def _ask_for_sessions(self) -> tuple[str, Any]:
        """Why there is no answer (empty when there is one), and the answer; silence is none."""
        try:
            result, document = self._openclaw.ask("sessions", "--all-agents", marker="monitor")
        except DispatcherError as error:
            return str(error), None
        if not result.failure and not lists_sessions(document):
            return "an answer that lists no sessions", None
        return result.failure, document

    def _is_gone(self, suspect: Suspect, sessions: Sequence[SessionRow], orphan_after: float) -> bool:
        agent_ids = possible_ids(self._known_agents(), suspect.workspace_slug, suspect.agent_id)
        named = rows_of(suspect, sessions, agent_ids)
        if judge(suspect, named, orphan_after) != "gone":
            return False
        names = dict.fromkeys([suspect.session_id or "", *(row.key for row in named)])
        asked = [name for name in names if name and not name.startswith("-")][:MAX_TASKS_ASKED]
        return not any(self._may_have_task(name) for name in asked)

    def _may_have_task(self, name: str) -> bool:
        """Whether OpenClaw knows a task by a session's name or key that is not over, or could not say in time."""
        result, document = self._openclaw.ask("tasks", "show", name, marker="monitor")
        return result.exit_code is None or (not result.failure and is_live_task(document))

    def _respawn(self, suspect: Suspect) -> None:
        respawn = self._claim(suspect)
        silent_for = None if suspect.silent_for is None else round(suspect.silent_for, 1)
        facts = {"agent": suspect.agent_id, "run_id": str(suspect.run_id), "silent_for_s": silent_for}
        if reason := respawn.refusal:
            text = f"Run {suspect.run_id} is an orphan, but {suspect.agent_id} may not be woken for it ({reason})"
            log.info(events.WORKFLOW_ORPHAN_WAITS, msg=text, reason=reason, **facts)
            return
        text = f"Run {suspect.run_id} lost its session; {suspect.agent_id} gets a new process for it"
        wake_id = str(respawn.grant.uuid("wake_id"))
        log.warning(events.WORKFLOW_RESPAWNED, msg=text, wake_id=wake_id, attempt=suspect.attempt, **facts)
        self._launch(respawn, respawn_message(suspect.run_id, suspect.workflow_type, respawn.session_id))
