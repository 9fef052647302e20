"""`dispatcher inbox …`: the operator's hands on items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

import typer

from dispatcher.cli.connection import operator, refuse_unknown_agent
from dispatcher.cli.main import new_app
from dispatcher.cli.output import print_json, print_line, print_table
from dispatcher.errors import DispatcherError

app = new_app(no_args_is_help=True, help="List, show, requeue and expire inbox items.")

STATUSES = ("pending", "leased", "done", "dead_letter", "failed")
COLUMNS = (
    *("id", "agent", "event_type", "status", "attempt_count", "max_attempts", "created_at"),
    *("leased_until", "last_failure_reason", "summary"),
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Agent = Annotated[str | None, typer.Option("--agent", help="Slug of an agent.")]
Items = Annotated[list[UUID], typer.Argument(help="Item ids.")]


@app.command("list")
def list_items(
    agent: Agent = None,
    status: Annotated[str | None, typer.Option("--status", help="One of: " + ", ".join(STATUSES))] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    as_json: Json = False,
) -> None:
    """List the newest items of this gateway's agents."""
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(f"{status!r} is none of {', '.join(STATUSES)}", param_hint="--status")
    with operator() as gateway:
        answer = gateway.call("list_inbox_items", p_agent=agent, p_status=status, p_limit=limit)
    refuse_unknown_agent(answer, agent)
    items = answer["items"]
    if as_json:
        print_json({"count": len(items), "items": items})
        return
    print_table(COLUMNS, [[item[name] for name in COLUMNS] for item in items])


@app.command("show")
def show_item(item: Annotated[UUID, typer.Argument(help="Item id.")], as_json: Json = False) -> None:
    """Show one item whole, with its lease and origin."""
    with operator() as gateway:
        scope = {"tenant_id": f"eq.{gateway.settings.tenant_id}"}
        items = gateway.rows("agent_inbox_items", {"select": "*", "id": f"eq.{item}", **scope})
        if not items:
            raise DispatcherError(f"No item {item} in this tenant.")
        columns = "wake_id,attempt,leased_at,leased_until,closed_at,outcome"
        leases = gateway.rows("inbox_item_leases", {"select": columns, "item_id": f"eq.{item}"})
        origins = gateway.rows("inbox_item_origins", {"select": "*", "item_id": f"eq.{item}"})
    shown = {**items[0], "lease": leases[0] if leases else None, "origin": origins[0] if origins else None}
    if as_json:
        print_json(shown)
        return
    print_table(("field", "value"), shown.items())


@app.command("requeue")
def requeue(
    items: Annotated[
        list[UUID] | None,
        typer.Argument(help="Item ids; none: all that a stall set aside, with --agent also what a chain limit did."),
    ] = None,
    agent: Agent = None,
    as_json: Json = False,
) -> None:
    """Bring failed or dead items back to pending, and clear their agents' stall."""
    with operator() as gateway:
        if agent:
            refuse_unknown_agent(gateway.call("list_inbox_items", p_agent=agent, p_status=None, p_limit=1), agent)
        ids = [str(item) for item in items] if items else None
        answer = gateway.call("requeue_inbox_items", p_agent=agent, p_item_ids=ids)
    _tell(answer, "requeued", as_json, items or [], "only failed and dead_letter items of this gateway are")


@app.command("expire")
def expire(
    items: Items,
    reason: Annotated[str | None, typer.Option("--reason", help="Recorded with the item.")] = None,
    as_json: Json = False,
) -> None:
    """End open items for good: failed, no attempts left, with a reason."""
    with operator() as gateway:
        answer = gateway.call("expire_inbox_items", p_item_ids=[str(item) for item in items], p_reason=reason)
    _tell(answer, "expired", as_json, items, "only pending and failed items of this gateway are")


def _tell(answer: Any, verb: str, as_json: bool, asked: Sequence[UUID], which: str) -> None:
    """What was done, and which of those `asked` for were left alone, with the reason; exit 1 when there are any."""
    if as_json:
        print_json(answer)
    else:
        print_line(f"{answer[verb]} item(s) {verb}.")
    left_alone = [str(item) for item in asked if str(item) not in answer["item_ids"]]
    if left_alone:
        print_line(f"Not {verb}, because {which}: {', '.join(left_alone)}", to_stderr=True)
        raise typer.Exit(1)
