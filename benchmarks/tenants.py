"""What a granted claim costs beside 200,000 items that another tenant wrote for the same agents, against without them.

    .venv/bin/python benchmarks/tenants.py [--rows 200000] [--calls 100]

Two databases on two servers, turn by turn in one run. YourHQ's own table takes such rows; ours refuses them, so that its
triggers are off while they are written. Prints both medians and their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import psycopg
from claim import CLAIM, MIGRATIONS, Bench
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations

FLOOD = (
    "insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, dedup_key, created_at)"
    " select %s, id, slug, 'heartbeat', 'flood:' || slug || ':' || n, now() - interval '1 day'"
    " from agents, generate_series(1, %s / (select count(*) from agents)) as n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        benches = []
        for name in ("without", "beside"):
            server = PostgresServer(Path(directory) / name, password=secrets.token_hex(8), durable=False)
            stack.callback(server.destroy)
            server.start()
            server.bootstrap()
            apply_migrations(server.url(), MIGRATIONS)
            benches.append(Bench(server, options.calls))
        flood(benches[1], options.rows)
        without, beside = measure(benches, options.calls)
    print(f"claim without them   median {without:.2f} ms")
    print(f"claim beside them    median {beside:.2f} ms")
    print(f"ratio                {beside / without:.2f}")


def flood(bench: Bench, rows: int) -> None:
    other = uuid.uuid4()
    bench.admin.execute("insert into tenants (id, name, slug) values (%s, 'other', 'other')", [other])
    bench.admin.execute("set session_replication_role = replica")
    bench.admin.execute(FLOOD.encode(), [other, rows])
    bench.admin.execute("set session_replication_role = origin")
    bench.admin.execute("vacuum analyze")


def measure(benches: list[Bench], calls: int) -> tuple[float, float]:
    found: tuple[list[float], list[float]] = ([], [])
    connections = [psycopg.connect(bench.url, autocommit=True) for bench in benches]
    for connection in connections:
        connection.execute("set role service_role")
    for _ in range(calls):
        for bench, connection, took in zip(benches, connections, found, strict=True):
            claim = Jsonb([{"agent_id": str(next(bench.agents)), "path": "event", "item_ids": []}])
            started = time.perf_counter()
            connection.execute(CLAIM, [bench.instance, claim, uuid.uuid4()]).fetchone()
            took.append((time.perf_counter() - started) * 1000)
    for connection in connections:
        connection.close()
    return statistics.median(found[0]), statistics.median(found[1])


if __name__ == "__main__":
    main()
