"""`dispatcher routing …`: which agent runs a workflow type, and how many at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dispatcher.cli.arguments import MAX_INTEGER, told_agent
from dispatcher.cli.connection import operator
from dispatcher.cli.main import new_app
from dispatcher.cli.output import print_json, print_line, print_table
from dispatcher.errors import DispatcherError
from dispatcher.workflows.model import MAX_PRIORITY

app = new_app(no_args_is_help=True, help="List, set, remove and seed the routes of workflow types.")

COLUMNS = ("workflow_type", "agent_id", "priority", "max_concurrent", "timeout_minutes")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Type = Annotated[str, typer.Argument(metavar="TYPE", help="Workflow type.")]


@app.command("list")
def list_routes(as_json: Json = False) -> None:
    """List the routes of this tenant."""
    with operator() as gateway:
        query = {
            "select": ",".join((*COLUMNS, "created_at")),
            "tenant_id": f"eq.{gateway.settings.tenant_id}",
            "order": "priority.desc,workflow_type",
        }
        routes = gateway.rows("workflow_agent_routing", query)
    if as_json:
        print_json({"count": len(routes), "routes": routes})
        return
    print_table(COLUMNS, [[route[name] for name in COLUMNS] for route in routes])


@app.command("set")
def set_route(
    workflow_type: Type,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Slug of the agent that runs it.", callback=told_agent)],
    *,
    priority: Annotated[
        int | None,
        typer.Option("--priority", help="Higher goes first; new routes: 0.", min=-MAX_PRIORITY, max=MAX_PRIORITY),
    ] = None,
    max_concurrent: Annotated[
        int | None,
        typer.Option("--max-concurrent", min=0, max=MAX_INTEGER, help="Runs at once, 0 disables; new routes: 1."),
    ] = None,
    timeout_minutes: Annotated[
        int | None,
        typer.Option("--timeout-minutes", min=1, max=MAX_INTEGER, help="Time a run may take; new routes: 60."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Route a workflow type to an agent; what is not given keeps its value."""
    with operator() as gateway:
        answer = gateway.call_for_tenant(
            "set_workflow_route",
            p_workflow_type=workflow_type,
            p_agent=agent,
            p_priority=priority,
            p_max_concurrent=max_concurrent,
            p_timeout_minutes=timeout_minutes,
        )
    if not answer["applied"]:
        raise typer.BadParameter("; ".join(answer["faults"]))
    _tell(answer, as_json, f"{workflow_type} goes to {agent}, at most {answer['route']['max_concurrent']} at once.")


@app.command("remove")
def remove_route(workflow_type: Type, as_json: Json = False) -> None:
    """Take a route away; queued runs of the type wait for another one."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("remove_workflow_route", p_workflow_type=workflow_type)
    if not answer["applied"]:
        raise DispatcherError(f"{workflow_type!r} has no route.")
    _tell(answer, as_json, f"{workflow_type} has no route any more.")


@app.command("seed")
def seed_routes(as_json: Json = False) -> None:
    """Add the reference routes, where a type has none yet."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("seed_workflow_routes")
    if "seeded" not in answer:
        raise DispatcherError("; ".join(answer["faults"]))
    _tell(answer, as_json, f"{answer['seeded']} route(s) added.")


def _tell(answer: Mapping[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        print_json(answer)
    else:
        print_line(text)
