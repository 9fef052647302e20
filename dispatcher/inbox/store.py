"""One method per SQL function of the inbox slice. Every call carries a request id, so that a repeat changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from uuid import UUID, uuid4

from dispatcher.answers import Answer
from dispatcher.inbox.book import BookedWake, WakeBook
from dispatcher.inbox.model import Claim, Grant, Look, PhaseAnswer, Report, ReportAnswer, Verdict, verdicts_for


class Rpc(Protocol):
    """The part of `RestClient` that a store needs."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class InboxStore:
    """The wake functions as this instance calls them. Errors are those of `RestClient.rpc`, and MalformedAnswer.

    What a call claims is in the book before the call counts as answered: at no moment is a wake neither.
    """

    def __init__(self, rest: Rpc, instance_id: Callable[[], UUID], book: WakeBook) -> None:
        self._rest = rest
        self._instance_id = instance_id
        self._book = book

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        """One verdict per claim, in order; a repeat within this call hands back the same grants."""
        with self._request() as request:
            params = {"p_claims": [claim.as_json() for claim in claims], "p_request": request}
            return self._booked(verdicts_for(claims, "claim_wakes", self._call("claim_wakes", params)))

    def report(self, reports: Sequence[Report], claim_limit: int) -> ReportAnswer:
        """Tells what happened to wakes and takes up to `claim_limit` agents off the waitlist."""
        with self._request() as request:
            params = {
                "p_reports": [report.as_json() for report in reports],
                "p_claim_limit": claim_limit,
                "p_request": request,
            }
            answer = ReportAnswer.read(reports, "report_wakes", self._call("report_wakes", params))
            self._booked(answer.verdicts)
        return answer

    def look(self) -> Look:
        """Where a sweep begins: the gateway's agents, wakes of others, and which phases have work."""
        return Look.read(Answer.of("sweep_inbox", self._call("sweep_inbox", {"p_phase": "look"})))

    def sweep_phase(self, phase: str, cursor: object = None, claim_limit: int = 0) -> PhaseAnswer:
        """One pass of one phase of a sweep; `cursor` is the one of the pass before it."""
        with self._request() as request:
            params = {"p_phase": phase, "p_cursor": cursor, "p_claim_limit": claim_limit, "p_request": request}
            answer = PhaseAnswer.read(phase, Answer.of("sweep_inbox", self._call("sweep_inbox", params)))
            self._booked(answer.verdicts)
        return answer

    def note_sweep(self, facts: Mapping[str, object]) -> None:
        """Keeps what a sweep did, for `dispatcher status`."""
        self._call("note_sweep", {"p_sweep": facts})

    @contextlib.contextmanager
    def _request(self) -> Iterator[str]:
        request = uuid4()
        with self._book.asking(request):
            yield str(request)

    def _booked(self, verdicts: list[Verdict]) -> list[Verdict]:
        for verdict in verdicts:
            if isinstance(verdict, Grant):
                self._book.add(booked(verdict))
        return verdicts

    def _call(self, function: str, params: dict[str, Any]) -> Any:
        return self._rest.rpc(function, {"p_instance_id": str(self._instance_id()), **params}, retry=True)


def booked(grant: Grant) -> BookedWake:
    """The wake of a grant as the book keeps it."""
    has_override = bool(grant.model_override or grant.thinking_override)
    return BookedWake(grant.wake_id, grant.claim_token, grant.agent_id, grant.agent_slug, has_override=has_override)
