"""`dispatcher inbox …`: the operator's hands on items."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import typer

from dispatcher.cli.connection import operator, refuse_unknown_agent
from dispatcher.cli.main import new_app
from dispatcher.cli.output import print_json, print_line, print_table
from dispatcher.errors import DispatcherError

app = new_app(no_args_is_help=True, help="List, show, requeue, release and expire inbox items.")

STATUSES = ("pending", "leased", "done", "dead_letter", "failed")
COLUMNS = (
    *("id", "agent", "event_type", "status", "attempt_count", "max_attempts", "created_at"),
    *("leased_until", "last_failure_reason", "summary"),
)

NOT_RELEASED: Final = {
    "not_found": "no item of this gateway has this id.",
    "not_leased": "nobody holds a lease of it.",
    "busy": "somebody changes it at the moment. Try again.",
}


def _since(value: str | None) -> str | None:
    """An option's callback: an age, or a time in ISO 8601."""
    if value is None or re.fullmatch(r"\d{1,6}[smhd]", value, re.ASCII):
        return value
    try:
        return datetime.fromisoformat(value).isoformat()
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is neither a time nor an age such as 30m, 2h or 7d") from error


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
def requeue(  # noqa: PLR0917 - one parameter for each option
    items: Annotated[
        list[UUID] | None,
        typer.Argument(help="Item ids; none: all that a stall set aside, with --agent also what a chain limit did."),
    ] = None,
    agent: Agent = None,
    dead: Annotated[
        bool,
        typer.Option("--dead", help="Bring back what was given up: dead letters, and failed without attempts left."),
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", callback=_since, help="With --dead: given up since then; a time, or an age: 30m, 2h, 7d."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be brought back.")] = False,
    as_json: Json = False,
) -> None:
    """Bring failed or dead items back to pending, and clear their agents' stall."""
    if since and not dead:
        raise typer.BadParameter("goes with --dead", param_hint="--since")
    if dead and items:
        raise typer.BadParameter(
            "goes with --agent and --since; items are brought back by id without it", param_hint="--dead"
        )
    options: dict[str, Any] = {"p_agent": agent, "p_dead": dead, "p_since": since, "p_dry_run": dry_run}
    with operator() as gateway:
        ids = _texts(items)
        answer = _in_passes(lambda: gateway.call("requeue_inbox_items", p_item_ids=ids, **options), "requeued")
    refuse_unknown_agent(answer, agent)
    if dry_run:
        _tell_found(answer, as_json)
        return
    if not (as_json or dead or items) and answer["dead_letters_left"]:
        _tell_dead_letters(answer["dead_letters_left"], agent)
    _tell(answer, "requeued", as_json, items or [], "only failed and dead_letter items of this gateway are")


@app.command("release")
def release(
    item: Annotated[UUID, typer.Argument(help="Item id.")],
    reason: Annotated[str | None, typer.Option("--reason", help="Kept in the notification.")] = None,
    as_json: Json = False,
) -> None:
    """End the lease of an item, whoever holds it: it is pending again, and the attempt is given back."""
    with operator() as gateway:
        answer = gateway.call("release_inbox_item", p_item_id=str(item), p_reason=reason)
    if as_json:
        print_json(answer)
    elif answer["applied"]:
        print_line(f"Released: {item} is pending again. Its old token closes nothing any more.")
    if not answer["applied"]:
        print_line(f"Not released: {NOT_RELEASED[answer['code']]}", to_stderr=True)
        raise typer.Exit(1)


@app.command("expire")
def expire(
    items: Items,
    reason: Annotated[str | None, typer.Option("--reason", help="Recorded with the item.")] = None,
    as_json: Json = False,
) -> None:
    """End open items for good: failed, no attempts left, with a reason."""
    with operator() as gateway:
        ids = _texts(items)
        answer = _in_passes(lambda: gateway.call("expire_inbox_items", p_item_ids=ids, p_reason=reason), "expired")
    _tell(answer, "expired", as_json, items, "only pending and failed items of this gateway are")


def _texts(items: Sequence[UUID] | None) -> list[str] | None:
    """Item ids as JSON takes them; None when none were named."""
    return [str(item) for item in items] if items else None


def _in_passes(one_pass: Callable[[], Mapping[str, Any]], verb: str) -> Mapping[str, Any]:
    """The answers of all passes as one; a pass is at most 500 items, and each but the last is told on stderr."""
    done: dict[str, None] = {}
    while True:
        answer = one_pass()
        if answer["code"] != "ok":
            return answer
        before = len(done)
        done.update(dict.fromkeys(answer["item_ids"]))
        if not answer["again"] or len(done) == before:
            return {**answer, verb: len(done), "item_ids": list(done)}
        print_line(f"{len(done)} item(s) {verb} so far ...", to_stderr=True)


def _tell_found(answer: Mapping[str, Any], as_json: bool) -> None:
    """What a requeue would bring back."""
    if as_json:
        print_json(answer)
        return
    print_line(f"{answer['found']} item(s) would be requeued.")
    for item in answer["found_ids"]:
        print_line(f"  {item}")


def _tell_dead_letters(number: int, agent: str | None) -> None:
    """Which items a requeue leaves alone unless it is told to take them."""
    command = "dispatcher inbox requeue --dead" + (f" --agent {agent}" if agent else "")
    print_line(f"{number} item(s) that were given up are not taken: `{command}` brings them back.", to_stderr=True)


def _tell(answer: Mapping[str, Any], verb: str, as_json: bool, asked: Sequence[UUID], which: str) -> None:
    """What was done, and which of those `asked` for were left alone, with the reason; exit 1 when there are any."""
    if as_json:
        print_json(answer)
    else:
        print_line(f"{answer[verb]} item(s) {verb}.")
    if answer["busy"]:
        print_line(
            f"{answer['busy']} item(s) not {verb}: somebody holds them at the moment. Try again.", to_stderr=True
        )
    left_alone = [str(item) for item in asked if str(item) not in answer["item_ids"]]
    if left_alone:
        print_line(f"Not {verb}, because {which}: {', '.join(left_alone)}", to_stderr=True)
    if left_alone or answer["busy"]:
        raise typer.Exit(1)
