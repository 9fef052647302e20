"""What the operator's functions answer, and the one place where a command finds out that an answer is another.

`Any` is what a command only prints. An answer may hold more than its shape names: `--json` shows it as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal, NotRequired

# From typing itself pydantic takes them as of Python 3.12 only.
from typing_extensions import TypedDict

from dispatcher.answers import Answer, malformed


class UnknownGateway(TypedDict):
    """No gateway has the slug or id that was given."""

    code: Literal["unknown_gateway"]
    known: list[str]


class UnknownAgent(TypedDict):
    """No agent of the gateway has the slug that was given."""

    code: Literal["unknown_agent"]
    known: list[str]


class NotFound(TypedDict):
    """No run has the id that was given."""

    code: Literal["not_found"]


class Invalid(TypedDict):
    """Arguments that were refused, each with the reason."""

    code: Literal["invalid"]
    applied: Literal[False]
    faults: list[str]


class BudgetNotSet(TypedDict):
    """No such budget, or another one in its place."""

    code: Literal["exists", "not_found"]
    applied: Literal[False]
    faults: NotRequired[list[str]]


class WakeRequest(TypedDict):
    code: Literal["ok"]
    agent: Any
    agent_id: str
    blocked: list[str]
    retry_in: float | None
    requested: bool
    daemons: int
    now: str


class Requeued(TypedDict):
    code: Literal["ok"]
    requeued: int
    item_ids: list[str]
    found: int
    found_ids: list[str]
    busy: int
    again: bool
    dead_letters_left: int


class Expired(TypedDict):
    code: Literal["ok"]
    expired: int
    item_ids: list[str]
    busy: int
    again: bool


class LeaseReleased(TypedDict):
    code: Literal["ok"]
    applied: Literal[True]
    wake_id: str | None
    leased_until: Any


class LeaseNotReleased(TypedDict):
    code: Literal["not_found", "not_leased", "busy"]
    applied: Literal[False]
    status: NotRequired[Any]


class ItemRow(TypedDict):
    id: Any
    agent: Any
    event_type: Any
    status: Any
    attempt_count: Any
    max_attempts: Any
    created_at: Any
    leased_until: Any
    last_failure_reason: Any
    summary: Any


class Items(TypedDict):
    code: Literal["ok"]
    items: list[ItemRow]


class InstanceRow(TypedDict):
    hostname: Any
    pid: Any
    state: Any
    health: dict[str, Any]
    realtime: dict[str, Any]
    last_heartbeat_at: Any
    last_sweep_at: Any


class LiveWakeRow(TypedDict):
    agent: Any
    state: Any
    path: Any
    pid: Any
    seconds: Any


class Backlog(TypedDict):
    items: Any
    under_1m: Any
    under_1h: Any
    over_1h: Any
    oldest_seconds: Any
    waiting_for_paused: Any


class AgentRow(TypedDict):
    agent: Any
    status: Any
    items: Any
    blocked: list[str]
    retry_in: Any
    failures: Any
    last_end: Any
    last_wake_at: Any


class GatewayStatus(TypedDict):
    code: Literal["ok"]
    gateway: Any
    instances: list[InstanceRow]
    wakes: list[LiveWakeRow]
    waitlist: list[Any]
    backlog: Backlog
    agents: list[AgentRow]


class WakeRow(TypedDict):
    agent: Any
    path: Any
    state: Any
    claimed_at: Any
    seconds: Any
    exit_code: Any
    items: Any
    cost_usd: Any
    error: Any


class Wakes(TypedDict):
    code: Literal["ok"]
    wakes: list[WakeRow]


class RunRow(TypedDict):
    id: Any
    workflow_type: Any
    status: Any
    owner_agent_id: Any
    priority: Any
    dispatch_attempts: Any
    created_at: Any
    cost_estimate: Any
    blocker_type: Any
    last_error: Any


class Runs(TypedDict):
    runs: list[RunRow]


class ShownRun(TypedDict):
    code: Literal["ok"]
    run: dict[str, Any]
    events: list[dict[str, Any]]
    claims: list[dict[str, Any]]
    bookings: list[dict[str, Any]]
    notifications: list[dict[str, Any]]
    approvals: list[dict[str, Any]]


class Enqueued(TypedDict):
    applied: Literal[True]
    code: str
    run_id: Any
    status: Any


class KeyTaken(TypedDict):
    code: Literal["key_taken"]
    applied: Literal[False]
    faults: list[str]


class RunChange(TypedDict):
    applied: bool
    code: str
    status: Any


class Booked(TypedDict):
    cost_usd: float
    tokens: float


class UsageCorrected(TypedDict):
    code: Literal["ok"]
    booked: Booked


class NothingBooked(TypedDict):
    code: Literal["nothing_booked"]


class Estimate(TypedDict):
    usd: float
    usd_reports: int


class TypeRow(TypedDict):
    workflow_type: Any
    agent_id: Any
    queued: Any
    active: Any
    max_concurrent: Any
    oldest_queued_seconds: Any
    held_by: list[str]
    blocker: str | None
    estimate: Estimate | None


class Stats(TypedDict):
    by_status: dict[str, Any]
    by_type: list[TypeRow]
    no_route: Any
    cost_last_24h_usd: Any
    tokens_last_24h: Any
    notifications: Any
    last_tick: Any


class Route(TypedDict):
    max_concurrent: Any


class RouteSet(TypedDict):
    applied: Literal[True]
    route: Route


class RouteRemoved(TypedDict):
    applied: bool


class RoutesSeeded(TypedDict):
    seeded: int


class BudgetRow(TypedDict):
    id: Any


class Budgets(TypedDict):
    budgets: list[BudgetRow]


class NamedBudget(TypedDict):
    id: Any
    scope: str
    scope_id: str | None
    period: Any


class SetBudget(NamedBudget):
    name: Any


class BudgetSet(TypedDict):
    code: Literal["ok"]
    applied: Literal[True]
    budget: SetBudget
    created: bool
    changed: dict[str, Any]


class SeveralBudgets(TypedDict):
    code: Literal["ambiguous"]
    applied: Literal[False]
    budget: Any
    budgets: list[NamedBudget]


class BudgetEnded(TypedDict):
    code: Literal["ok", "already", "not_found"]
    applied: bool


class LedgerDetail(TypedDict):
    cancelled_run_ids: NotRequired[list[Any]]
    cancelled_runs: NotRequired[Any]


class LedgerRow(TypedDict):
    at: Any
    budget: Any
    scope: Any
    scope_id: Any
    period_key: Any
    event_kind: Any
    detail: LedgerDetail


class Ledger(TypedDict):
    events: list[LedgerRow]


SHAPES: Final[Mapping[str, tuple[Any, ...]]] = {
    "request_wake": (WakeRequest, UnknownGateway, UnknownAgent),
    "requeue_inbox_items": (Requeued, UnknownGateway, UnknownAgent),
    "expire_inbox_items": (Expired, UnknownGateway),
    "release_inbox_item": (LeaseReleased, LeaseNotReleased, UnknownGateway),
    "list_inbox_items": (Items, UnknownGateway, UnknownAgent),
    "dispatcher_status": (GatewayStatus, UnknownGateway),
    "list_wakes": (Wakes, UnknownGateway, UnknownAgent),
    "list_workflow_runs": (Runs,),
    "show_workflow_run": (ShownRun, NotFound),
    "enqueue_workflow_run": (Enqueued, KeyTaken, Invalid),
    "cancel_workflow_run": (RunChange, NotFound),
    "retry_workflow_run": (RunChange, NotFound),
    "correct_workflow_usage": (UsageCorrected, NothingBooked, NotFound, Invalid),
    "workflow_stats": (Stats,),
    "set_workflow_route": (RouteSet, Invalid),
    "remove_workflow_route": (RouteRemoved,),
    "seed_workflow_routes": (RoutesSeeded, Invalid),
    "list_budgets": (Budgets,),
    "set_budget": (BudgetSet, SeveralBudgets, Invalid, BudgetNotSet),
    "deactivate_budget": (SeveralBudgets, BudgetEnded),
    "budget_ledger": (Ledger,),
}
"""By function: the answers it may give, each whole."""


def checked(function: str, value: object) -> Mapping[str, Any]:
    """The answer of an operator's function. Raises MalformedAnswer when it has none of the shapes it may have."""
    fields = Answer.of(function, value).fields
    faults = [fault for shape in SHAPES.get(function, ()) if (fault := _fault(shape, fields)) is not None]
    if len(faults) == len(SHAPES.get(function, ())) > 0:
        raise malformed(function, faults[0])
    return fields


def checked_rows(table: str, rows: list[dict[str, Any]], columns: str) -> list[dict[str, Any]]:
    """Rows of a table, each with the columns that were asked for ("*": whatever it has). Raises MalformedAnswer."""
    wanted = set() if columns == "*" else set(columns.split(","))
    for row in rows:
        if missing := sorted(wanted - row.keys()):
            raise malformed(table, f"a row without {', '.join(missing)}")
    return rows


def _fault(shape: Any, fields: Mapping[str, Any]) -> str | None:
    """The first thing that is wrong with the fields; None when they are of that shape."""
    from pydantic import ValidationError

    try:
        _adapter(shape).validate_python(fields, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place[:100]}: {first['msg'][:100]}"
    return None


@cache
def _adapter(shape: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(shape)
