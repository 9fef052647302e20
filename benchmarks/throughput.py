"""Slots and backlogs: how near to the ideal the daemon keeps its slots busy, and how soon everybody has had a turn.

    .venv/bin/python benchmarks/throughput.py [--scenario turnover,backlog,burst]

turnover  40 agents get one item each at once; two slots, each agent holds 100 ms. Ideal: slots never wait, and a wake
          costs its hold and the floor (one call and one spawn, measured in the same run).
backlog   1,000 agents with 20 items each, rows interleaved and clustered, cap 50, daemon started afterwards: seconds
          until every agent was woken, and how many RPCs that took.
burst     1,000 inserts for one agent: the cost of a burst grows with agents, not with items.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import psycopg
from support import Proxy, StandIn, new_key, running_daemon, running_stack

from dispatcher.local.stack import Stack
from dispatcher.supabase.rest import RestClient

HOLD_SECONDS = 0.1


def make_agents(connection: psycopg.Connection, gateway: str, number: int) -> None:
    """A gateway with agents `<gateway>-1` … `<gateway>-<number>`."""
    connection.execute("insert into gateways (slug, label) values (%s, %s)", (gateway, gateway))
    connection.execute(
        "insert into agents (gateway_id, slug, name) select id, %s || '-' || n, 'bench'"
        " from gateways, generate_series(1, %s) n where slug = %s",
        (gateway, number, gateway),
    )


def insert_items(connection: psycopg.Connection, gateway: str, each: int, order: str = "k, a") -> int:
    """`each` items for every agent of the gateway in one statement; when it was committed (ns)."""
    connection.execute(
        "insert into agent_inbox_items (agent_id, agent_slug, event_type, summary, dedup_key, created_at)"
        " select id, slug, 'task_comment_mention', 'bench', %s || slug || ':' || k,"
        "        now() - (row_number() over (order by " + order + " desc)) * interval '1 ms'"
        "   from (select agents.id, agents.slug, k, split_part(agents.slug, '-', 2)::int as a from agents"
        "           join gateways on gateways.id = gateway_id, generate_series(1, %s) k where gateways.slug = %s) rows"
        "  order by " + order,
        (new_key(), each, gateway),
    )
    return time.time_ns()


def floor_ms(stack: Stack, executable: Path, turns: int = 40) -> float:
    """Median of one call of a function that does next to nothing, and one spawn, one after the other."""
    rest = RestClient(stack.info.api_url, stack.info.service_role_key)
    times = []
    for _ in range(turns):
        started = time.perf_counter()
        rest.rpc("current_tenant_id", {})
        subprocess.Popen([str(executable), "agent", "--agent", "floor"]).wait()
        times.append((time.perf_counter() - started) * 1000)
    rest.close()
    return statistics.median(times)


def wait_for_all(stand_in: StandIn, gateway: str, number: int, since: int, limit: float) -> dict[str, int]:
    """First start of each agent after `since`; what is missing after `limit` seconds is missing."""
    deadline = time.monotonic() + limit
    while True:
        first: dict[str, int] = {}
        for at, agent in list(stand_in.started):
            if at >= since and agent.startswith(f"hq/{gateway}-"):
                first.setdefault(agent, at)
        if len(first) >= number or time.monotonic() > deadline:
            return first
        time.sleep(0.05)


def turnover(number: int = 40, cap: int = 2) -> None:
    """How busy the slots are."""
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        quick, holding = StandIn(stack.directory / "quick"), StandIn(stack.directory / "bench", HOLD_SECONDS)
        floor = floor_ms(stack, quick.path)
        make_agents(connection, "turnover", number)
        settings = {"OPENCLAW_BIN": holding.path, "MAX_CONCURRENT_WAKES": cap, "WAKE_COOLDOWN": 600}
        with running_daemon(stack, stack.info.api_url, stack.directory / "bench", "turnover", **settings):
            committed = insert_items(connection, "turnover", 1)
            first = wait_for_all(holding, "turnover", number, committed - 5_000_000, 120)
    took = (max(first.values()) - min(first.values())) / 1e9
    rate, ideal = (len(first) - 1) / took, cap / (HOLD_SECONDS + floor / 1000)
    print(f"turnover: {len(first)} of {number} agents in {took:.2f} s, {rate:.1f} wakes/s; floor {floor:.1f} ms")
    print(
        f"  ideal (cap / (hold + floor)) {ideal:.1f} wakes/s: {100 * rate / ideal:.0f} % of it   (goal: at least 80 %)"
    )


def backlog(number: int = 1000, each: int = 20, cap: int = 50) -> None:
    """How soon everybody has had a turn, whatever the order of the rows."""
    for name, order in (("interleaved", "k, a"), ("clustered", "a, k")):
        with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
            stand_in = StandIn(stack.directory / "bench", 0.01)
            proxy = Proxy(int(stack.info.api_url.rsplit(":", 1)[1]))
            make_agents(connection, "backlog", number)
            insert_items(connection, "backlog", each, order)
            connection.execute("analyze")
            started = time.time_ns()
            settings = {"OPENCLAW_BIN": stand_in.path, "MAX_CONCURRENT_WAKES": cap, "WAKE_COOLDOWN": 600}
            with running_daemon(stack, proxy.url, stack.directory / "bench", "backlog", **settings):
                first = wait_for_all(stand_in, "backlog", number, started, 120)
        took = (max(first.values()) - started) / 1e9
        print(f"backlog, rows {name}: {len(first)} of {number} agents woken {took:.1f} s after the daemon's start")
        print(f"  {len(proxy.calls)} RPCs, {len(proxy.calls) / number:.2f} a wake   (goal: all within 10 s)")


def burst(items: int = 1000) -> None:
    """What a burst for one agent costs."""
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        stand_in = StandIn(stack.directory / "bench")
        proxy = Proxy(int(stack.info.api_url.rsplit(":", 1)[1]))
        make_agents(connection, "burst", 1)
        settings = {"OPENCLAW_BIN": stand_in.path, "WAKE_COOLDOWN": 30, "HEARTBEAT_INTERVAL": 20}
        with running_daemon(stack, proxy.url, stack.directory / "bench", "burst", **settings):
            before = len(proxy.calls)
            for _ in range(items):
                insert_items(connection, "burst", 1)
            time.sleep(2)
            calls = [name for _, name in proxy.calls[before:]]
    print(f"burst: {items} inserts for one agent, one by one: {len(calls)} RPCs ({', '.join(sorted(set(calls)))})")


SCENARIOS = {"turnover": turnover, "backlog": backlog, "burst": burst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default=",".join(SCENARIOS))
    for name in parser.parse_args().scenario.split(","):
        SCENARIOS[name]()


if __name__ == "__main__":
    main()
