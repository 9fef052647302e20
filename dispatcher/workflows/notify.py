"""Tells agents of their runs, off the dispatch path: an event takes seconds and may fail, a dispatch stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dispatcher import events
from dispatcher.agents.openclaw_calls import SYSTEM_EVENT_SECONDS, OpenclawCommand
from dispatcher.agents.registry import normalise_id, resolve_id
from dispatcher.errors import DispatcherError
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff
from dispatcher.workflows.message import notification_text
from dispatcher.workflows.model import Delivery, Notification
from dispatcher.workflows.store import WorkflowStore

log = get_logger(__name__)

AT_ONCE: Final = 4
# Beyond the longest call and its end, so that nobody sends what is being sent.
LEASE_SECONDS: Final = int(SYSTEM_EVENT_SECONDS) + 30
SHORTEST_WAIT: Final = 0.2


class Notifier:
    """One `beat` delivers what is due, a few at a time. `next_interval` says when the next is."""

    def __init__(
        self,
        store: WorkflowStore,
        openclaw: OpenclawCommand,
        known_agents: Callable[[], Sequence[str]],
        *,
        interval: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._store = store
        self._openclaw = openclaw
        self._known_agents = known_agents
        self._interval = interval
        self._is_stopping = is_stopping
        self._next_in: float | None = None
        self._failures = Backoff(base=SHORTEST_WAIT * 10, cap=max(SHORTEST_WAIT * 10, interval))
        self._has_failed = False

    def beat(self) -> None:
        """Delivers until nothing is due. Raises what the store's calls raise."""
        self._has_failed = True
        self._deliver_due()
        self._has_failed = False
        self._failures.reset()

    def next_interval(self) -> float:
        """Seconds to the next look: after a failed one later each time."""
        if self._has_failed:
            return self._failures.next_delay()
        return self._interval if self._next_in is None else min(self._interval, max(SHORTEST_WAIT, self._next_in))

    def _deliver_due(self) -> None:
        while not self._is_stopping():
            outbox = self._store.claim_notifications(AT_ONCE, LEASE_SECONDS, self._known_agents())
            self._next_in = outbox.next_in
            if not outbox.due:
                return
            self._deliver_all(outbox.due)

    def _deliver_all(self, due: Sequence[Notification]) -> None:
        with ThreadPoolExecutor(len(due), thread_name_prefix="notify") as pool:
            deliveries = list(pool.map(self._deliver, due))
        self._store.finish_notifications(deliveries)

    def _deliver(self, notification: Notification) -> Delivery:
        try:
            agent_id = session_agent(self._known_agents(), notification.workspace_slug, notification.agent_id)
            text = notification_text(notification.run_id, notification.workflow_type)
            error = self._openclaw.system_event(agent_id, text, str(notification.id)).failure
        except DispatcherError as problem:
            error = str(problem)
        self._tell(notification, error)
        return Delivery(notification, error)

    def _tell(self, notification: Notification, error: str) -> None:
        facts = {
            "agent": notification.agent_id,
            "run_id": str(notification.run_id),
            "attempt": notification.attempt,
            "tries": notification.tries,
        }
        if error:
            text = f"Could not tell {notification.agent_id} of its run: {error}"
            log.warning(events.WORKFLOW_NOTIFY_FAILED, msg=text, error=error, **facts)
        else:
            log.info(events.WORKFLOW_NOTIFIED, msg=f"Told {notification.agent_id} of its run", **facts)


def session_agent(known: Sequence[str], workspace_slug: str | None, agent_slug: str) -> str:
    """The agent id for a session key: as `openclaw.json` writes it, else the slug itself.

    Raises:
        InvalidAgentId: OpenClaw would take it for another agent.
    """
    found = resolve_id(known, workspace_slug, agent_slug)
    if normalise_id(found) in {normalise_id(agent_id) for agent_id in known}:
        return found
    return resolve_id((), None, agent_slug)
