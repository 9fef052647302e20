"""`dispatcher wake <agent>`: one wake by hand, through the same gates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dispatcher.cli.connection import Operator, gate_settings, operator, refuse_unknown_agent
from dispatcher.cli.output import print_json, print_line

WAIT_SECONDS = 10.0
ASK_AGAIN_SECONDS = 0.2


def command(
    agent: Annotated[str, typer.Argument(help="Slug or id of the agent.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which gates would refuse.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Ask for one wake. Ends with 1 and the reason when a gate refuses, or another session holds what claims need."""
    with operator() as gateway:
        outcome = _ask(gateway, agent, dry_run)
    if as_json:
        print_json(outcome)
    else:
        print_line(describe(outcome, dry_run))
    if outcome["blocked"] or outcome["held"] or not (dry_run or outcome["woken"]):
        raise typer.Exit(1)


def _ask(gateway: Operator, agent: str, dry_run: bool) -> dict[str, Any]:
    answer = gateway.call("request_wake", p_agent=agent, p_dry_run=dry_run, p_settings=gate_settings(gateway.settings))
    refuse_unknown_agent(answer, agent)
    woken = not dry_run and answer["requested"] and not answer["blocked"] and _wait_for_wake(gateway, answer)
    return {**answer, "woken": woken, "held": None if woken else gateway.held() or None}


def _wait_for_wake(gateway: Operator, answer: Mapping[str, Any]) -> bool:
    """Whether a daemon started a wake of the agent since the request."""
    if not answer["daemons"]:
        return False
    query = {
        "select": "id",
        "agent_id": f"eq.{answer['agent_id']}",
        "claimed_at": f"gte.{answer['now']}",
        "limit": "1",
    }
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := gateway.rows("agent_wakes", query)) and time.monotonic() < deadline:
        time.sleep(ASK_AGAIN_SECONDS)
    return bool(found)


def describe(outcome: Mapping[str, Any], dry_run: bool) -> str:
    """One line for people."""
    agent = outcome["agent"]
    if outcome["blocked"]:
        retry = outcome["retry_in"]
        only_time = retry and retry > 0 and len(outcome["blocked"]) == 1  # several gates: waiting alone opens none
        when = f" It opens in {retry:.0f} s." if only_time else ""
        waits = " It waits for a slot." if outcome["requested"] else ""
        return f"{agent} is not woken: {', '.join(outcome['blocked'])}.{when}{waits}"
    if outcome["held"]:
        queued = "would be queued" if dry_run else "is queued"
        return f"{agent} {queued}, but no claim goes through: {outcome['held']}."
    if dry_run:
        return f"{agent} would be woken."
    if outcome["woken"]:
        return f"{agent} was woken."
    if not outcome["daemons"]:
        return f"{agent} may be woken and is queued, but no daemon of this gateway has sent a heartbeat lately."
    return f"{agent} may be woken and is queued; no daemon has taken it yet."
