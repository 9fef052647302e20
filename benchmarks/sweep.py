"""The sweep of 1,000 agents with 100,000 pending items, phase by phase: its time in the database, and the plan of its heart.

    .venv/bin/python benchmarks/sweep.py [--agents 1000] [--items 100]

The ratio compares it with the least that finds the same answer: the oldest open item of every agent, by the same index.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid

import psycopg
from psycopg.types.json import Jsonb
from support import running_stack
from throughput import insert_items, make_agents
from wake_latency import SETTINGS

LEAST = """
select agent.id, oldest.created_at from agents as agent
 cross join lateral (select due.created_at from dispatcher.inbox_due as due where due.agent_id = agent.id
                     order by due.created_at limit 1) as oldest
 where agent.gateway_id = (select id from gateways where slug = 'sweep') order by oldest.created_at"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--items", type=int, default=100)
    arguments = parser.parse_args()
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        make_agents(connection, "sweep", arguments.agents)
        insert_items(connection, "sweep", arguments.items)
        connection.execute("analyze")
        measure(connection)


def measure(connection: psycopg.Connection) -> None:
    instance = uuid.uuid4()
    identity = {"hostname": "bench", "host_id": "bench", "pid": 0, "version": "0", "instance_id": str(instance)}
    settings = SETTINGS | {"max_concurrent_wakes": 2}
    connection.execute(
        "select register_dispatcher_instance(%s, 'sweep', %s, %s)", (uuid.UUID(int=0), Jsonb(identity), Jsonb(settings))
    )
    least = [timed(connection, LEAST) for _ in range(5)]
    sweeps = []
    for _ in range(5):  # each finds everybody unlisted again, as the first sweep after a start does
        connection.execute(
            "update agent_wake_state set waitlisted_at = null, waitlist_path = null, waiting_since = null"
        )
        sweeps.append(sweep(connection, instance))
    settled = [sweep(connection, instance) for _ in range(5)]
    for name, found in (("everybody new to the waitlist", sweeps), ("everybody listed already", settled)):
        whole, longest = (statistics.median(one[kind] for one in found) for kind in (0, 1))
        print(f"sweep, {name + ':':30} median {whole:.0f} ms, its longest call {longest:.0f} ms")
    print(f"least query with the same answer:     median {statistics.median(least):.0f} ms")
    for [line] in connection.execute("explain (analyze, costs off, timing off, summary off) " + LEAST).fetchall():
        print(f"  {line}")


def sweep(connection: psycopg.Connection, instance: uuid.UUID) -> tuple[float, float]:
    """Milliseconds of a whole sweep as the daemon makes it, and of its longest call."""
    calls: list[float] = []

    def call(phase: str, cursor: object = None) -> dict[str, object]:
        started = time.perf_counter()
        query = "select sweep_inbox(%s, %s, %s, 0, %s) as answer"
        row = connection.execute(query, [instance, phase, Jsonb(cursor), uuid.uuid4()]).fetchone()
        calls.append((time.perf_counter() - started) * 1000)
        assert row is not None
        return row[0]

    for phase in call("look")["due"]:
        answer = call(phase)
        while answer["again"]:
            answer = call(phase, answer.get("cursor"))
    return sum(calls), max(calls)


def timed(connection: psycopg.Connection, query: str, *parameters: object) -> float:
    started = time.perf_counter()
    connection.execute(query, parameters or None).fetchall()
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    main()
