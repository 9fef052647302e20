"""How fast runs are handed out, and what a tick costs where much is queued, finished and budgeted.

    python benchmarks/dispatch.py [--runs 2000] [--finished 100000] [--queued 10000] [--budgets 200] [--json]

Everything runs against a PostgreSQL of its own on this machine; the last line of each part is the ratio to the least a
queue in this database can cost: a loop of `update … for update skip locked` with the same batch, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations, migrations_directory
from dispatcher.workflows.service import BUSY_SECONDS

TENANT = uuid.UUID(int=0)
BATCH = 10
Connection = psycopg.Connection[dict[str, Any]]

BARE_LOOP = """
update public.bare_queue set status = 'dispatched', dispatched_at = now()
 where id in (select id from public.bare_queue where status = 'queued' order by id limit %s for update skip locked)
"""


class Daemon:
    """One registered daemon over a connection of its own, as service_role."""

    def __init__(self, url: str) -> None:
        self.connection: Connection = psycopg.connect(url, autocommit=True, row_factory=dict_row)
        self.connection.execute("set role service_role")
        identity = {"hostname": "bench", "host_id": "b", "pid": 1, "pid_started_at": 1.0, "version": "0"}
        row = self.connection.execute(
            "select public.register_dispatcher_instance(%s, 'bench', %s, '{}') as answer", (TENANT, Jsonb(identity))
        ).fetchone()
        assert row is not None
        self.id = row["answer"]["instance_id"]

    def phase(self, phase: str, facts: dict[str, Any] | None = None) -> dict[str, Any]:
        row = self.connection.execute(
            "select public.dispatch_workflows(%s, %s, %s) as answer",
            (self.id, phase, None if facts is None else Jsonb(facts)),
        ).fetchone()
        assert row is not None
        answer: dict[str, Any] = row["answer"]
        return answer

    def tick(self) -> dict[str, Any]:
        """One tick as the service makes it: a look, one pass of each phase that is due, a note."""
        tick: dict[str, Any] = {"errors": [], "dispatched": 0}
        for phase in self.phase("look")["due"]:
            answer = self.phase(phase)
            tick |= {**answer, "errors": tick["errors"] + answer["errors"]}
        self.phase("note", {"dispatched": tick["dispatched"]})
        return tick

    def dispatch_all(self) -> None:
        """Ticks until the queue is empty, as the service does: on while there is more, a moment when another has it."""
        while "dispatched" in self.phase("look")["due"]:
            again = True
            while again:
                answer = self.phase("dispatched")
                again = answer["again"]
                if answer["busy"]:
                    time.sleep(BUSY_SECONDS)
            self.phase("note", {"dispatched": 0})


@contextmanager
def project() -> Iterator[str]:
    """A migrated database with one gateway."""
    with tempfile.TemporaryDirectory() as directory:
        server = PostgresServer(Path(directory), password=secrets.token_hex(24), durable=True)
        try:
            server.start()
            server.bootstrap()
            apply_migrations(server.url(), migrations_directory())
            with psycopg.connect(server.url(), autocommit=True) as admin:
                admin.execute("insert into gateways (tenant_id, slug, label) values (%s, 'bench', 'Bench')", (TENANT,))
            yield server.url()
        finally:
            server.destroy()


def in_parallel(calls: list[Callable[[], None]]) -> float:
    """Seconds until all have returned."""
    threads = [threading.Thread(target=call) for call in calls]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def dispatched_per_second(url: str, admin: Connection, runs: int, daemons: int) -> float:
    admin.execute("delete from workflow_runs")
    admin.execute(
        "insert into workflow_runs (workflow_type) select 'type-' || number %% 10 from generate_series(1, %s) as number",
        (runs,),
    )
    admin.execute("vacuum analyze workflow_runs")
    workers = [Daemon(url) for _ in range(daemons)]
    seconds = in_parallel([worker.dispatch_all for worker in workers])
    for worker in workers:
        worker.connection.close()
    [row] = admin.execute(
        "select count(*) as n, max(dispatch_attempts) as most from workflow_runs where status = 'dispatched'"
    )
    assert (row["n"], row["most"]) == (runs, 1), row
    return runs / seconds


def bare_per_second(url: str, admin: Connection, runs: int) -> float:
    admin.execute("drop table if exists bare_queue")
    admin.execute(
        "create table bare_queue (id bigint primary key, status text not null default 'queued', dispatched_at timestamptz)"
    )
    admin.execute("create index on bare_queue (id) where status = 'queued'")
    admin.execute("insert into bare_queue select number from generate_series(1, %s) as number", (runs,))
    admin.execute("vacuum analyze bare_queue")
    with psycopg.connect(url, autocommit=True) as connection:

        def loop() -> None:
            while connection.execute(BARE_LOOP, (BATCH,)).rowcount:
                pass

        return runs / in_parallel([loop])


def fill(admin: Connection, finished: int, queued: int, budgets: int) -> None:
    """A month of finished runs of 50 agents, a long queue, and budgets of every scope and period."""
    admin.execute("delete from workflow_runs")
    admin.execute("truncate workflow_bookings")  # what was spent outlives its run
    admin.execute(
        """insert into agent_profiles (agent_id, department_id)
           select 'agent-' || number, 'department-' || number % 10 from generate_series(0, 49) as number on conflict do nothing"""
    )
    admin.execute(
        """insert into workflow_runs (workflow_type, status, owner_agent_id, cost_estimate, input_tokens, output_tokens, queued_at, claimed_at,
                                      started_at, finished_at, reported_at)
           select 'type-' || number %% 10, 'completed', 'agent-' || number %% 50, 0.01, 1000, 200, at, at, at, at, at
             from (select number, date_trunc('month', now()) + (now() - date_trunc('month', now())) * random() as at
                     from generate_series(1, %s) as number) as past""",
        (finished,),
    )
    admin.execute(
        "insert into workflow_runs (workflow_type) select 'type-' || number %% 10 from generate_series(1, %s) as number",
        (queued,),
    )
    admin.execute(
        """insert into budgets (name, scope, scope_id, period, cap_usd, action_on_exceed)
           select concat_ws(' ', scope, scope_id, period), scope, scope_id, period, 1000000, 'pause_new_runs'
             from (select 'agent' as scope, 'agent-' || number as scope_id from generate_series(0, 49) as number
                   union all select 'department', 'department-' || number from generate_series(0, 9) as number
                   union all select 'project', 'type-' || number from generate_series(0, 9) as number
                   union all select 'fleet', null) as scopes
             cross join (values ('daily'), ('weekly'), ('monthly')) as periods (period)
            order by scope desc, scope_id limit %s""",
        (budgets,),
    )
    admin.execute("vacuum analyze")


def tick_milliseconds(daemon: Daemon, admin: Connection, ticks: int = 10) -> dict[str, Any]:
    times = []
    for _ in range(ticks):
        started = time.perf_counter()
        answer = daemon.tick()
        times.append((time.perf_counter() - started) * 1000)
        assert not answer["errors"], answer["errors"]
        assert answer["dispatched"] == BATCH, answer
    return {
        "median_ms": round(statistics.median(times), 1),
        "max_ms": round(max(times), 1),
        "spend_aggregates": aggregates(daemon),
    }


def aggregates(daemon: Daemon) -> int:
    """How many calls of the spend aggregate one tick makes."""
    connection = daemon.connection
    connection.execute("reset role")
    connection.execute("set track_functions = 'all'")
    numbers = []
    for _ in range(2):
        connection.execute("select pg_stat_force_next_flush()")
        [row] = connection.execute(
            "select coalesce(sum(calls), 0) as n from pg_stat_user_functions where funcname = 'workflow_spend'"
        )
        numbers.append(int(row["n"]))
        daemon.tick()
        connection.execute("select pg_stat_clear_snapshot()")
    connection.execute("set track_functions = 'none'")
    connection.execute("set role service_role")
    return numbers[1] - numbers[0]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with project() as url, psycopg.connect(url, autocommit=True, row_factory=dict_row) as admin:
        admin.execute(
            """insert into workflow_agent_routing (workflow_type, agent_id, max_concurrent)
               select 'type-' || number, 'agent-' || number, 1000000 from generate_series(0, 9) as number"""
        )
        result: dict[str, Any] = {"batch": BATCH, "runs": options.runs}
        for daemons in (1, 4):
            result[f"dispatched_per_s_{daemons}_daemons"] = round(
                dispatched_per_second(url, admin, options.runs, daemons)
            )
        result["bare_loop_per_s"] = round(bare_per_second(url, admin, options.runs))
        result["ratio_to_bare_loop"] = round(result["dispatched_per_s_1_daemons"] / result["bare_loop_per_s"], 3)
        daemon = Daemon(url)
        for name, queued, budgets in (
            ("tick_small", 200, 0),
            ("tick_queued", options.queued, 0),
            ("tick_full_few_queued", 200, options.budgets),
            ("tick_full", options.queued, options.budgets),
        ):
            admin.execute("delete from budgets")
            fill(admin, options.finished if budgets else 0, queued, budgets)
            result[name] = tick_milliseconds(daemon, admin)
        daemon.connection.close()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--finished", type=int, default=100_000)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--budgets", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
