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
from dispatcher.cli.runs import actor
from dispatcher.errors import DispatcherError
from dispatcher.supabase.rest_payload import equals

app = new_app(no_args_is_help=True, help="List, set, change and deactivate budgets; their ledger of events.")

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


CapUsd = Annotated[float | None, typer.Option("--cap-usd", min=0, max=MAX_USD, help="Most USD per period.")]
CapTokens = Annotated[int | None, typer.Option("--cap-tokens", min=0, max=MAX_TOKENS, help="Most tokens per period.")]
Scope = Annotated[
    str | None, typer.Option("--scope", help="One of: " + ", ".join(SCOPES) + ".", callback=one_of(SCOPES))
]
ScopeId = Annotated[
    str | None, typer.Option("--scope-id", help="Agent slug, department or workflow type; none for fleet.")
]
Period = Annotated[
    str | None, typer.Option("--period", help="One of: " + ", ".join(PERIODS) + ".", callback=one_of(PERIODS))
]
Timezone = Annotated[str | None, typer.Option("--timezone", help="Zone in which the period begins.")]
Action = Annotated[
    str | None, typer.Option("--action", help="One of: " + ", ".join(ACTIONS) + ".", callback=one_of(ACTIONS))
]
FailClosed = Annotated[
    bool | None, typer.Option("--fail-closed/--fail-open", help="Whether it holds runs when it cannot be evaluated.")
]


@app.command("set")
def set_budget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called.")],
    *,
    cap_usd: CapUsd = None,
    cap_tokens: CapTokens = None,
    scope: Scope = None,
    scope_id: ScopeId = None,
    period: Period = None,
    timezone: Timezone = None,
    action: Action = None,
    fail_closed: FailClosed = None,
    budget: Annotated[UUID | None, typer.Option("--id", help="Change this budget, and call it NAME.")] = None,
    as_json: Json = False,
) -> None:
    """Change the budget of a name, keeping what is not given; or make one (fleet, monthly, UTC, warn)."""
    given = {"p_scope": scope, "p_scope_id": scope_id, "p_period": period, "p_timezone": timezone, "p_action": action}
    with operator() as gateway:
        is_known = scope is None or scope_id is None or _is_known(gateway, scope, scope_id)
        answer = _set(
            gateway,
            p_name=name,
            p_new_name=name if budget else None,
            p_budget_id=str(budget) if budget else None,
            p_cap_usd=cap_usd,
            p_cap_tokens=cap_tokens,
            p_fail_closed=fail_closed,
            **given,
        )
    _tell_set(answer, as_json)
    if not is_known:
        text = f"No {scope} {scope_id!r} is known here yet: until there is one, nothing counts in it."
        print_line(text, to_stderr=True)


@app.command("change")
def change_budget(
    budget: Annotated[str, typer.Argument(metavar="BUDGET", help="Id or name.")],
    *,
    new_name: Annotated[str | None, typer.Option("--name", help="Call it so from now on.")] = None,
    cap_usd: CapUsd = None,
    cap_tokens: CapTokens = None,
    timezone: Timezone = None,
    action: Action = None,
    fail_closed: FailClosed = None,
    as_json: Json = False,
) -> None:
    """Change a budget that is there; what is not given is kept, and what differs is shown."""
    with operator() as gateway:
        answer = _set(
            gateway,
            p_name=budget,
            p_new_name=new_name,
            p_budget_id=budget if _is_id(budget) else None,
            p_only_change=True,
            p_cap_usd=cap_usd,
            p_cap_tokens=cap_tokens,
            p_timezone=timezone,
            p_action=action,
            p_fail_closed=fail_closed,
        )
    _tell_set(answer, as_json)


def _is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


def _set(gateway: Operator, **arguments: object) -> Mapping[str, Any]:
    """What became of it. Raises where nothing was set."""
    answer = gateway.call_for_tenant("set_budget", **arguments, p_actor=actor())
    if answer["code"] == "invalid":
        raise typer.BadParameter("; ".join(answer["faults"]))
    if answer["code"] == "not_found":
        raise DispatcherError(f"No active budget {arguments['p_budget_id'] or arguments['p_name']!r} in this tenant.")
    if answer["code"] == "exists":
        raise DispatcherError("; ".join(answer.get("faults") or ["Another active budget has this scope and period."]))
    return answer


def _tell_set(answer: Mapping[str, Any], as_json: bool) -> None:
    """What was set, each change as before and after."""
    if answer["code"] == "ambiguous":
        _refuse_several(answer, as_json)
    budget = answer["budget"]
    changes = [f"  {name}: {_change(pair)}" for name, pair in sorted(answer["changed"].items())]
    what = "is set" if answer["created"] else "is changed" if changes else "is as it was"
    text = f"Budget {budget['id']} ({budget['name']}, {_where(budget)}, {budget['period']}) {what}."
    _tell(answer, as_json, "\n".join([text, *changes]))


def _change(pair: Any) -> str:
    before, after = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
    return " -> ".join("none" if value is None else str(value) for value in (before, after))


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
        answer = gateway.call_for_tenant("deactivate_budget", p_budget=budget, p_actor=actor())
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
