"""`dispatcher status`: who runs, who is awake, and why everybody else is not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dispatcher.cli.connection import Operator, gate_settings, operator
from dispatcher.cli.output import print_json, print_line, print_table

WATCH_SECONDS = 2.0


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Print again every two seconds, until interrupted.")] = False,
) -> None:
    """Show instances, live wakes, waitlist, backlog, and gate by gate why each agent sleeps."""
    with operator() as gateway:
        _show(read_status(gateway), as_json)
        while watch:
            time.sleep(WATCH_SECONDS)
            _show(read_status(gateway), as_json)


def read_status(gateway: Operator) -> Mapping[str, Any]:
    """The answer of `dispatcher_status`, and what another session holds (`held`, None when nothing)."""
    status = gateway.call("dispatcher_status", p_settings=gate_settings(gateway.settings))
    return {**status, "held": gateway.held() or None}


def _show(status: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    if status["held"]:
        print_line(f"No claim goes through: {status['held']}.")
    _show_instances(status)
    _show_work(status)
    _show_agents(status)


def _show_instances(status: Mapping[str, Any]) -> None:
    rows = [
        (
            one["hostname"],
            one["pid"],
            one["state"],
            one["health"].get("status"),
            one["realtime"].get("status"),
            one["realtime"].get("path"),
            one["last_heartbeat_at"],
            one["last_sweep_at"],
        )
        for one in status["instances"]
    ]
    running = sum(one["state"] == "running" for one in status["instances"])
    columns = ("host", "pid", "state", "health", "realtime", "path", "last heartbeat", "last sweep")
    print_table(columns, rows, title=f"Gateway {status['gateway']}: {running} daemon(s) running")


def _show_work(status: Mapping[str, Any]) -> None:
    wakes = [(w["agent"], w["state"], w["path"], w["pid"], w["seconds"]) for w in status["wakes"]]
    print_table(("agent", "state", "path", "pid", "seconds"), wakes, title=f"Live wakes: {len(wakes)}")
    backlog = status["backlog"]
    print_table(
        ("items", "under 1 min", "under 1 h", "over 1 h", "oldest (s)", "of paused agents", "agents awaiting a slot"),
        [(backlog["items"], backlog["under_1m"], backlog["under_1h"], backlog["over_1h"], backlog["oldest_seconds"],
          backlog["waiting_for_paused"], len(status["waitlist"]))],
        title="Backlog",
    )  # fmt: skip


def _show_agents(status: Mapping[str, Any]) -> None:
    rows = [
        (
            agent["agent"],
            agent["status"],
            agent["items"],
            ", ".join(agent["blocked"]) or "may be woken",
            agent["retry_in"],
            agent["failures"],
            agent["last_end"],
            agent["last_wake_at"],
        )
        for agent in status["agents"]
    ]
    columns = (
        "agent",
        "status",
        "items",
        "why not awake",
        "retry in (s)",
        "failures",
        "last end",
        "last wake",
    )
    print_table(columns, rows, title="Agents")
