"""One method per SQL function of the workflows slice, as this instance calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol
from uuid import UUID

from dispatcher.answers import Answer
from dispatcher.workflows.model import Delivery, Look, Note, Outbox, PhaseAnswer, Respawn, Suspect, Watch

# A pass over a long queue with many budgets may take longer than an ordinary call.
PHASE_SECONDS: Final = 20.0


class Rpc(Protocol):
    """The part of `RestClient` that a store needs."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class WorkflowStore:
    """The workflow functions. Errors are those of `RestClient.rpc`, and MalformedAnswer."""

    def __init__(self, rest: Rpc, instance_id: Callable[[], UUID]) -> None:
        self._rest = rest
        self._instance_id = instance_id

    def look_at_runs(self) -> Look:
        """Which phases of a tick have something to do."""
        return Look.read(self._call("dispatch_workflows", {"p_phase": "look"}, retry=True))

    def run_phase(self, phase: str) -> PhaseAnswer:
        """One pass of one phase for the tenant; a repeat finds what is left to do."""
        params = {"p_phase": phase}
        return PhaseAnswer.read(self._call("dispatch_workflows", params, retry=True, timeout=PHASE_SECONDS))

    def note_tick(self, facts: Mapping[str, object]) -> Note:
        """Keeps what a tick did, for `runs stats`; answers when the next is due."""
        params = {"p_phase": "note", "p_facts": dict(facts)}
        return Note.read(self._call("dispatch_workflows", params, retry=True))

    def claim_notifications(self, limit: int, lease_seconds: int, known_agents: Iterable[str]) -> Outbox:
        """Up to `limit` notifications that are due."""
        params = {"p_limit": limit, "p_lease_seconds": lease_seconds, "p_known_agents": list(known_agents)}
        # A claim whose answer is lost is free again after its lease.
        return Outbox.read(self._call("claim_workflow_notifications", params, retry=False))

    def finish_notifications(self, deliveries: Sequence[Delivery]) -> None:
        """Tells what became of claimed notifications."""
        params = {"p_results": [delivery.as_json() for delivery in deliveries]}
        self._call("finish_workflow_notifications", params, retry=True).require("finished")

    def watch(self) -> Watch:
        """What the monitor has to look at."""
        return Watch.read(self._call("monitor_workflows", {}, retry=True))

    def respawn(self, suspect: Suspect, request: UUID) -> Respawn:
        """The grant of a new process for an orphan, or why there is none.

        The same `request` gets the same grant.
        """
        params = {
            "p_run_id": str(suspect.run_id),
            "p_claim_token": str(suspect.claim_token),
            "p_request": str(request),
        }
        return Respawn.read(self._call("respawn_workflow_run", params, retry=True))

    def _call(self, function: str, params: dict[str, Any], *, retry: bool, timeout: float | None = None) -> Answer:
        arguments = {"p_instance_id": str(self._instance_id()), **params}
        return Answer.of(function, self._rest.rpc(function, arguments, retry=retry, timeout=timeout))
