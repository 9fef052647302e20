"""`dispatcher wakes`: what the wakes of the gateway did, and what they cost."""

from __future__ import annotations

from typing import Annotated

import typer

from dispatcher.cli.connection import operator, refuse_unknown_agent
from dispatcher.cli.output import print_json, print_table

COLUMNS = ("agent", "path", "state", "claimed_at", "seconds", "exit_code", "items", "cost_usd", "error")


def command(
    agent: Annotated[str | None, typer.Option("--agent", help="Slug of an agent.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the newest wakes of this gateway, live ones first, with what the agent's usage says they cost."""
    with operator() as gateway:
        answer = gateway.call("list_wakes", p_agent=agent, p_limit=limit)
    refuse_unknown_agent(answer, agent)
    wakes = answer["wakes"]
    if as_json:
        print_json({"count": len(wakes), "wakes": wakes})
        return
    print_table(COLUMNS, [[wake[name] for name in COLUMNS] for wake in wakes])
