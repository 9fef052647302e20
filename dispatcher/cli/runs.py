"""`dispatcher runs …`: the operator's hands on workflow runs."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import Annotated, Any
from uuid import UUID

import typer

from dispatcher.cli.arguments import MAX_DELAY_SECONDS, MAX_TOKENS, MAX_USD, json_object, told_agent
from dispatcher.cli.connection import operator
from dispatcher.cli.main import new_app
from dispatcher.cli.output import print_json, print_line, print_table, shown_json
from dispatcher.errors import DispatcherError
from dispatcher.workflows.model import MAX_PRIORITY

app = new_app(no_args_is_help=True, help="List, show, enqueue, cancel, retry and correct workflow runs; stats.")

STATUSES = (
    *("queued", "dispatched", "claimed", "running", "waiting_for_approval", "blocked"),
    *("completed", "failed", "timed_out", "cancelled"),
)
COLUMNS = (
    *("id", "workflow_type", "status", "owner_agent_id", "priority", "dispatch_attempts", "created_at"),
    *("cost_estimate", "blocker_type", "last_error"),
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
RunId = Annotated[UUID, typer.Argument(metavar="RUN", help="Run id.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Recorded with the run and in the audit log.")]


@app.command("list")
def list_runs(
    status: Annotated[str | None, typer.Option("--status", help="One of: " + ", ".join(STATUSES))] = None,
    workflow_type: Annotated[str | None, typer.Option("--type", help="Workflow type.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Slug of the agent it is with.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    as_json: Json = False,
) -> None:
    """List the newest runs of this tenant."""
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(f"{status!r} is none of {', '.join(STATUSES)}", param_hint="--status")
    with operator() as gateway:
        answer = gateway.call_for_tenant(
            "list_workflow_runs", p_status=status, p_workflow_type=workflow_type, p_agent=agent, p_limit=limit
        )
    if as_json:
        print_json(answer)
        return
    print_table(COLUMNS, [[run[name] for name in COLUMNS] for run in answer["runs"]])


@app.command("show")
def show_run(run: RunId, as_json: Json = False) -> None:
    """Show one run whole, with its events, claims and notifications."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("show_workflow_run", p_run_id=str(run))
    if answer["code"] == "not_found":
        raise DispatcherError(f"No run {run} in this tenant.")
    if as_json:
        print_json(answer)
        return
    print_table(("field", "value"), [(name, _cell(value)) for name, value in answer["run"].items()])
    for part in ("events", "claims", "bookings", "notifications", "approvals"):
        _print_rows(part, answer[part])


def _cell(value: object) -> object:
    return shown_json(value) if isinstance(value, dict | list) else value


def _print_rows(title: str, rows: list[Mapping[str, Any]]) -> None:
    if rows:
        print_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows], title=title)


@app.command("enqueue")
def enqueue(
    workflow_type: Annotated[str, typer.Argument(metavar="TYPE", help="Workflow type.")],
    *,
    payload: Annotated[str, typer.Option("--input", help="Input as JSON.")] = "{}",
    priority: Annotated[
        int, typer.Option("--priority", help="Higher goes first.", min=-MAX_PRIORITY, max=MAX_PRIORITY)
    ] = 0,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="Pin it to this agent, whatever the route says.", callback=told_agent),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Id of the task it serves.")] = None,
    delay: Annotated[
        float,
        typer.Option("--delay", min=0, max=MAX_DELAY_SECONDS, help="Keep it back for so many seconds."),
    ] = 0,
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key: the same one queues nothing twice.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a run into the queue."""
    arguments = {
        "p_workflow_type": workflow_type,
        "p_input": json_object(payload, "--input"),
        "p_priority": priority,
        "p_initiator": actor(),
        "p_agent": agent,
        "p_task_id": task,
        "p_delay_seconds": delay or None,
        "p_request_key": key,
    }
    with operator() as gateway:
        answer = gateway.call_for_tenant("enqueue_workflow_run", **arguments)
    if answer["code"] == "key_taken":
        raise DispatcherError("; ".join(answer["faults"]))
    if not answer["applied"]:
        raise typer.BadParameter("; ".join(answer["faults"]))
    if as_json:
        print_json(answer)
        return
    print_line(f"{answer['run_id']} is {answer['status']}{' already' if answer['code'] == 'already' else ''}.")
    if answer.get("routed") is False:
        print_line(f"No route takes {workflow_type!r} yet: it waits. See `dispatcher routing set`.")


@app.command("cancel")
def cancel(run: RunId, reason: Reason = None, as_json: Json = False) -> None:
    """Cancel a run that is not finished; a process of ours that works on it is stopped."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("cancel_workflow_run", p_run_id=str(run), p_actor=actor(), p_reason=reason)
    _tell(answer, run, as_json)


@app.command("retry")
def retry(run: RunId, reason: Reason = None, as_json: Json = False) -> None:
    """Start a failed or timed out run anew (override_failure; audited)."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("retry_workflow_run", p_run_id=str(run), p_actor=actor(), p_reason=reason)
    _tell(answer, run, as_json)


@app.command("usage")
def correct_usage(
    run: RunId,
    *,
    cost_usd: Annotated[float | None, typer.Option("--cost-usd", min=0, max=MAX_USD, help="In all.")] = None,
    input_tokens: Annotated[int | None, typer.Option("--input-tokens", min=0, max=MAX_TOKENS, help="In all.")] = None,
    output_tokens: Annotated[int | None, typer.Option("--output-tokens", min=0, max=MAX_TOKENS, help="In all.")] = None,
    session: Annotated[
        str | None, typer.Option("--session", help="A session the run has lost; without it, its present claim.")
    ] = None,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Correct what a run has cost, also after its end; the difference is booked now (audited)."""
    said = {"cost_usd": cost_usd, "input_tokens": input_tokens, "output_tokens": output_tokens}
    usage = {name: value for name, value in said.items() if value is not None}
    if not usage:
        raise typer.BadParameter("say what it has used: --cost-usd, --input-tokens or --output-tokens")
    with operator() as gateway:
        answer = gateway.call_for_tenant(
            "correct_workflow_usage",
            p_run_id=str(run),
            p_usage=usage,
            p_actor=actor(),
            p_reason=reason,
            p_session=session,
        )
    if answer["code"] == "not_found":
        raise DispatcherError(f"No run {run} in this tenant.")
    if answer["code"] == "nothing_booked":
        raise DispatcherError(f"Nobody has worked on run {run} yet{' in that session' if session else ''}.")
    if answer["code"] == "invalid":
        raise typer.BadParameter("; ".join(answer["faults"]))
    if as_json:
        print_json(answer)
        return
    booked = answer["booked"]
    print_line(f"{run}: booked {float(booked['cost_usd']):+.6g} USD and {int(booked['tokens']):+d} tokens.")


@app.command("stats")
def stats(as_json: Json = False) -> None:
    """Show the queue by status and type, notifications, and the last tick."""
    with operator() as gateway:
        answer = gateway.call_for_tenant("workflow_stats")
    if as_json:
        print_json(answer)
        return
    print_table(("status", "runs"), sorted(answer["by_status"].items()), title="Runs")
    columns = ("workflow_type", "agent_id", "queued", "active", "max_concurrent", "oldest_queued_seconds")
    print_table(
        (*columns, "estimate", "blocker", "held_by"),
        [
            [*(row[name] for name in columns), _estimate(row["estimate"]), row["blocker"], ", ".join(row["held_by"])]
            for row in answer["by_type"]
        ],
        title="Types",
    )
    facts = {
        "queued without a route": answer["no_route"],
        "cost of the last 24 h (USD)": answer["cost_last_24h_usd"],
        "tokens of the last 24 h": answer["tokens_last_24h"],
        "notifications": _cell(answer["notifications"]),
        "last tick": _cell(answer["last_tick"]),
    }
    print_table(("fact", "value"), list(facts.items()))


def _estimate(estimate: Mapping[str, Any] | None) -> str:
    """What a run of a type is reckoned with, and where that comes from."""
    if estimate is None:
        return ""
    reports = int(estimate["usd_reports"])
    source = f"median of {reports}" if reports else "setting"
    return f"{float(estimate['usd']):.6g} USD ({source})"


def actor() -> str:
    """Who gives the order, for the audit log."""
    try:
        return f"operator:{getpass.getuser()}"
    except (KeyError, OSError):  # an account without a name, as in many containers
        return "operator"


def _tell(answer: Mapping[str, Any], run: UUID, as_json: bool) -> None:
    if answer["code"] == "not_found":
        raise DispatcherError(f"No run {run} in this tenant.")
    if as_json:
        print_json(answer)
    elif answer["applied"]:
        print_line(f"{run} is {answer['status']}.")
    else:
        print_line(f"Nothing was changed: {run} is {answer['status']}.")
    if not answer["applied"]:
        raise typer.Exit(1)
