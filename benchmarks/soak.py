"""Does the daemon grow? Wakes, hints, sweeps and workflow runs for as long as you like, its memory and descriptors watched.

    .venv/bin/python benchmarks/soak.py [--minutes 20]

Twenty agents, about three wakes and a run every five seconds; items are closed while their agent works. Prints a line a
minute, and at the end the second quarter of the time against the last. Ends with 1 when memory grew by more than 3 %, or
descriptors or threads by more than two.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import psutil
import psycopg
from support import StandIn, new_key, running_daemon, running_stack
from throughput import make_agents

AGENTS = 20
WORK_SECONDS = 0.5
SAMPLE_SECONDS = 5.0
MOST_GROWTH = 0.03
MOST_MORE = 2


@dataclass(frozen=True)
class Sample:
    """Resident memory in MiB, open descriptors, threads."""

    memory: float
    descriptors: int
    threads: int


class Work:
    """What keeps the daemon busy: one `beat` every fifth of a second."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._beats = 0
        make_agents(connection, "soak", AGENTS)
        connection.execute(
            "insert into workflow_agent_routing (tenant_id, workflow_type, agent_id, max_concurrent)"
            " values ('00000000-0000-0000-0000-000000000000', 'soak', 'soak-1', 50)"
        )

    def beat(self) -> None:
        """Closes what agents work on; a new item every third of a second, a new run every five."""
        self._connection.execute(
            "update agent_inbox_items as item set status = 'done', completed_at = now() where item.status = 'pending'"
            " and exists (select from agent_wakes as wake where wake.agent_id = item.agent_id and wake.state = 'running')"
        )
        self._connection.execute(
            "update workflow_runs set status = 'cancelled', finished_at = now() where status = 'dispatched'"
            " and dispatched_at < now() - interval '3 seconds'"
        )
        if self._beats % 2 == 0:
            self._insert_item(f"soak-{1 + self._beats // 2 % AGENTS}")
        if self._beats % 25 == 0:
            self._connection.execute("insert into workflow_runs (workflow_type) values ('soak')")
        self._beats += 1

    def _insert_item(self, agent: str) -> None:
        self._connection.execute(
            "insert into agent_inbox_items (agent_id, agent_slug, event_type, summary, dedup_key)"
            " select id, slug, 'task_comment_mention', 'soak', %s from agents where slug = %s",
            (new_key(), agent),
        )


def sample(process: psutil.Process) -> Sample:
    """The daemon now."""
    with process.oneshot():
        return Sample(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())


def soak(minutes: float) -> list[Sample]:
    """Samples over the whole time."""
    samples: list[Sample] = []
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        stand_in = StandIn(stack.directory / "bench", WORK_SECONDS)
        work = Work(connection)
        settings = {"OPENCLAW_BIN": stand_in.path, "WAKE_COOLDOWN": 1, "MAX_CONCURRENT_WAKES": 10}
        settings |= {"RECONCILE_INTERVAL": 10, "WORKFLOW_POLL_INTERVAL": 10}
        with running_daemon(stack, stack.info.api_url, stack.directory / "bench", "soak", **settings) as daemon:
            process, started = psutil.Process(daemon.pid), time.monotonic()
            while (passed := time.monotonic() - started) < minutes * 60:
                work.beat()
                if passed >= len(samples) * SAMPLE_SECONDS:
                    samples.append(sample(process))
                    if len(samples) % 12 == 0:
                        tell(samples[-1], passed, len(stand_in.started))
                time.sleep(0.2)
    return samples


def tell(one: Sample, passed: float, starts: int) -> None:
    """A line for whoever watches."""
    text = f"{one.memory:.1f} MiB, {one.descriptors} descriptors, {one.threads} threads"
    print(f"{passed / 60:5.1f} min  {text}, {starts} processes started", flush=True)


def has_grown(samples: list[Sample]) -> bool:
    """Compares the second quarter with the last, median by median; prints both."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    grown = False
    for name, most in (("memory", None), ("descriptors", MOST_MORE), ("threads", MOST_MORE)):
        before, after = (statistics.median(getattr(one, name) for one in part) for part in (early, late))
        allowed = before * (1 + MOST_GROWTH) if most is None else before + most
        grown = grown or after > allowed
        print(f"{name}: {before:.1f} in the second quarter, {after:.1f} in the last")
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    if has_grown(soak(parser.parse_args().minutes)):
        raise SystemExit("it grew")


if __name__ == "__main__":
    main()
