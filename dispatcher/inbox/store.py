"""One method per SQL function of the inbox slice. Every call carries a request id, so that a repeat changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from uuid import UUID, uuid4

from dispatcher.inbox.model import Claim, Report, ReportAnswer, SweepAnswer, Verdict, verdicts_from_json


class Rpc(Protocol):
    """The part of `RestClient` that a store needs."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class InboxStore:
    """The wake functions as this instance calls them. Errors are those of `RestClient.rpc`."""

    def __init__(self, rest: Rpc, instance_id: Callable[[], UUID]) -> None:
        self._rest = rest
        self._instance_id = instance_id

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        """One verdict per claim, in order; a repeat within this call hands back the same grants."""
        params = {"p_claims": [claim.as_json() for claim in claims], "p_request": str(uuid4())}
        return verdicts_from_json(self._call("claim_wakes", params))

    def report(self, reports: Sequence[Report], claim_limit: int) -> ReportAnswer:
        """Tells what happened to wakes and takes up to `claim_limit` agents off the waitlist."""
        params = {
            "p_reports": [report.as_json() for report in reports],
            "p_claim_limit": claim_limit,
            "p_request": str(uuid4()),
        }
        return ReportAnswer.from_json(self._call("report_wakes", params))

    def sweep(self, claim_limit: int) -> SweepAnswer:
        """One sweep of the gateway; claims up to `claim_limit` wakes."""
        params = {"p_claim_limit": claim_limit, "p_request": str(uuid4())}
        return SweepAnswer.from_json(self._call("sweep_inbox", params))

    def _call(self, function: str, params: dict[str, Any]) -> Any:
        return self._rest.rpc(function, {"p_instance_id": str(self._instance_id()), **params}, retry=True)
