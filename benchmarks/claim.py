"""What a granted claim costs on a young connection, against a function that does nothing, turn by turn in one run.

    .venv/bin/python benchmarks/claim.py [--connections 20] [--calls 10]

A pool of connections at low traffic is always young: each call may be among the first of its connection. Prints, for the
n-th call of a connection, the medians of claim and no-op and what lies between them: on connections that did nothing
before, and on connections on which a function that nobody waits for (a heartbeat, a report, a sweep) came first.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations

MIGRATIONS = Path(__file__).resolve().parents[1] / "supabase" / "migrations"
TENANT = uuid.UUID(int=0)
IDENTITY = {"hostname": "bench", "host_id": "bench", "pid": 1, "pid_started_at": 1.0, "version": "0"}
SETTINGS = {"wake_cooldown": 0, "max_concurrent_wakes": 10_000}
CLAIM = "select public.claim_wakes(p_instance_id => %s, p_claims => %s, p_request => %s)"


class Bench:
    """A database with many agents that have work, and a registered daemon."""

    def __init__(self, server: PostgresServer, agents: int) -> None:
        self.url = server.url()
        self.admin = psycopg.connect(self.url, autocommit=True)
        self.admin.execute("create function public.bench_noop() returns void language sql as ''")
        self.admin.execute("insert into gateways (slug, label) values ('bench', 'bench')")
        self.admin.execute(
            "insert into agents (gateway_id, name, slug) select id, 'a' || n, 'a' || n"
            " from gateways, generate_series(1, %s) as n",
            [agents],
        )
        self.admin.execute(
            "insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)"
            " select id, slug, 'heartbeat', slug || ':' || n from agents, generate_series(1, 20) as n"
        )
        self.admin.execute("vacuum analyze")
        register = "select public.register_dispatcher_instance(%s, 'bench', %s, %s) ->> 'instance_id'"
        [self.instance] = self._row(register, TENANT, Jsonb(IDENTITY), Jsonb(SETTINGS))
        self.agents = iter([row[0] for row in self.admin.execute("select id from agents").fetchall()])

    def _row(self, query: str, *parameters: object) -> tuple[object, ...]:
        row = self.admin.execute(query.encode(), parameters).fetchone()
        assert row is not None
        return row

    def turns(self, warmed: bool, calls: int) -> Iterator[tuple[float, float]]:
        """Milliseconds of a no-op and of a granted claim, `calls` times on one fresh connection."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.prepare_threshold = None
            connection.execute("set role service_role")
            if warmed:
                beat = "select public.heartbeat_dispatcher_instance(%s, '{}', %s, '{}')"
                connection.execute(beat, [self.instance, uuid.uuid4()])
            for _ in range(calls):
                claim = Jsonb([{"agent_id": str(next(self.agents)), "path": "event", "item_ids": []}])
                started = time.perf_counter()
                connection.execute("select public.bench_noop()").fetchall()
                between = time.perf_counter()
                answer = connection.execute(CLAIM, [self.instance, claim, uuid.uuid4()]).fetchone()
                ended = time.perf_counter()
                assert answer is not None
                assert answer[0][0]["granted"], answer
                yield (between - started) * 1000, (ended - between) * 1000
        self.admin.execute("update agent_wakes set state = 'lost', ended_at = now() where ended_at is null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=20)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = PostgresServer(Path(directory), password=secrets.token_hex(8), durable=False)
        try:
            server.start()
            server.bootstrap()
            apply_migrations(server.url(), MIGRATIONS)
            measure(Bench(server, 2 * options.connections * options.calls), options.connections, options.calls)
        finally:
            server.destroy()


def measure(bench: Bench, connections: int, calls: int) -> None:
    """Young and warmed connections in turn, so that an hour of the machine touches both alike."""
    found: dict[bool, list[list[tuple[float, float]]]] = {False: [], True: []}
    for _, warmed in itertools.product(range(connections), (False, True)):
        found[warmed].append(list(bench.turns(warmed, calls)))
    for warmed, rows in found.items():
        print("after a heartbeat on the connection" if warmed else "on a connection that did nothing before")
        print("  call   no-op    claim   between")
        for number, turns in enumerate(zip(*rows, strict=True), 1):
            noop, claim = (statistics.median(turn[kind] for turn in turns) for kind in (0, 1))
            print(f"  {number:4}  {noop:5.2f} ms {claim:5.2f} ms {claim - noop:5.2f} ms")


if __name__ == "__main__":
    main()
