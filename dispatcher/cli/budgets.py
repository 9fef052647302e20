"""`dispatcher budgets …`: what workflow runs may cost, what they did cost, and what was done about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn
from uuid import UUID

import typer

from dispatcher.cli.arguments import MAX_TOKENS, MAX_USD, one_of
from dispatcher.cli.connection import Operator, operator
from dispatcher.cli.main import new_app
from dispatcher.cli.output import print_json, print_line, print_table
from dispatcher.errors import DispatcherError
from dispatcher.supabase.rest_payload import equals

app = new_app(no_args_is_help=True, help="List, set and deactivate budgets; their ledger of events.")

SCOPES = ("agent", "department", "project", "fleet")
PERIODS = ("daily", "weekly", "monthly")
ACTIONS = ("warn", "pause_new_runs", "hard_stop")
COLUMNS = (
    *("id", "name", "scope", "scope_id", "period", "period_key", "cap_usd", "settled_usd", "reserved_usd"),
    *("cap_tokens", "settled_tokens", "reserved_tokens", "action_on_exceed", "active", "events", "error"),
)
LEDGER = ("at", "budget", "scope", "scope_id", "period_key", "event_kind", "spend_usd", "cap_usd", "cancelled")
# Where an agent or department may be known from: an agent needs no row of its own to be routed to.
KNOWN_BY: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "agent": (("agents", "slug"), ("agent_profiles", "agent_id"), ("workflow_agent_routing", "agent_id")),
    "department": (("agent_profiles", "department_id"), ("departments", "id")),
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command("list")
def list_budgets(as_json: Json = False) -> None:
    """List all budgets; the active ones with what their period has spent and reserved."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("list_budgets")
    if as_json:
        print_json(answer)
        return
    print_table(COLUMNS, [[_cell(budget.get(name)) for name in COLUMNS] for budget in answer["budgets"]])


def _cell(value: object) -> object:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


@app.command("set")
def set_budget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")],
    *,
    cap_usd: Annotated[float | None, typer.Option("--cap-usd", min=0, max=MAX_USD, help="Most USD per period.")] = None,
    cap_tokens: Annotated[
        int | None, typer.Option("--cap-tokens", min=0, max=MAX_TOKENS, help="Most tokens per period.")
    ] = None,
    scope: Annotated[
        str, typer.Option("--scope", help="One of: " + ", ".join(SCOPES), callback=one_of(SCOPES))
    ] = "fleet",
    scope_id: Annotated[
        str | None, typer.Option("--scope-id", help="Agent slug, department or workflow type; none for fleet.")
    ] = None,
    period: Annotated[
        str, typer.Option("--period", help="One of: " + ", ".join(PERIODS), callback=one_of(PERIODS))
    ] = "monthly",
    timezone: Annotated[str, typer.Option("--timezone", help="Zone in which the period begins.")] = "UTC",
    action: Annotated[
        str, typer.Option("--action", help="One of: " + ", ".join(ACTIONS), callback=one_of(ACTIONS))
    ] = "warn",
    fail_closed: Annotated[bool, typer.Option("--fail-closed", help="Hold runs when it cannot be evaluated.")] = False,
    budget: Annotated[UUID | None, typer.Option("--id", help="Change this budget, whatever its scope was.")] = None,
    as_json: Json = False,
) -> None:
    """Set the budget of a scope and period; there is one active at a time."""
    with operator() as gateway:
        is_known = scope_id is None or _is_known(gateway, scope, scope_id)
        answer = gateway.call_for_tenant(
            "set_budget",
            p_name=name,
            p_scope=scope,
            p_scope_id=scope_id,
            p_period=period,
            p_cap_usd=cap_usd,
            p_cap_tokens=cap_tokens,
            p_action=action,
            p_timezone=timezone,
            p_fail_closed=fail_closed,
            p_budget_id=str(budget) if budget else None,
        )
    if answer["code"] == "invalid":
        raise typer.BadParameter("; ".join(answer["faults"]))
    if not answer["applied"]:
        raise DispatcherError("; ".join(answer.get("faults") or [f"no budget {budget} in this tenant"]))
    _tell(answer, as_json, f"Budget {answer['budget']['id']} ({name}) is set.")
    if not is_known:
        text = f"No {scope} {scope_id!r} is known here yet: until there is one, nothing counts in it."
        print_line(text, to_stderr=True)


def _is_known(gateway: Operator, scope: str, scope_id: str) -> bool:
    """Whether anything in the database names the agent or department; other scopes need no such thing."""
    places = KNOWN_BY.get(scope)
    if places is None:
        return True
    tenant = equals(gateway.settings.tenant_id)
    return any(
        gateway.rows(table, {"select": column, column: equals(scope_id), "tenant_id": tenant, "limit": "1"})
        for table, column in places
    )


@app.command("deactivate")
def deactivate(
    budget: Annotated[str, typer.Argument(metavar="BUDGET", help="Id or name.")], as_json: Json = False
) -> None:
    """End a budget: what it held goes out with the next tick."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("deactivate_budget", p_budget=budget)
    if answer["code"] == "ambiguous":
        _refuse_several(answer, as_json)
    if not answer["applied"]:
        raise DispatcherError(f"No budget {budget!r} in this tenant.")
    _tell(answer, as_json, f"Budget {budget} is not active{' any more' if answer['code'] == 'ok' else ''}.")


def _refuse_several(answer: Mapping[str, Any], as_json: bool) -> NoReturn:
    """A name does not say which budget is meant: name them all, end none."""
    if as_json:
        print_json(answer)
        raise typer.Exit(1)
    found = "; ".join(f"{one['id']} ({_where(one)}, {one['period']})" for one in answer["budgets"])
    raise DispatcherError(f"Several active budgets are called {answer['budget']!r}, say which by its id: {found}")


def _where(budget: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (budget["scope"], budget["scope_id"])))


@app.command("ledger")
def ledger(limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50, as_json: Json = False) -> None:
    """List the latest warnings, pauses, stops and recoveries."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("budget_ledger", p_limit=limit)
    if as_json:
        print_json(answer)
        return
    print_table([name.replace("_", " ") for name in LEDGER], [_ledger_row(event) for event in answer["events"]])


def _ledger_row(event: Mapping[str, Any]) -> list[object]:
    detail = event["detail"]
    cancelled = detail.get("cancelled_runs") or None
    facts = {**event, "spend_usd": detail.get("spend_usd"), "cap_usd": detail.get("cap_usd"), "cancelled": cancelled}
    return [facts[name] for name in LEDGER]


def _tell(answer: Mapping[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print_json(answer)
    else:
        print_line(text)
