"""What stands still beside the daemon for a minute, and whether anybody else notices: a true 60 s, 50 agents each.

    .venv/bin/python benchmarks/held.py [--scenario insert,unread] [--seconds 60] [--agents 50]

insert  A transaction inserts items for three agents and stays open, while those three also have work to be woken for.
unread  Nobody reads the daemon's stdout, a pipe of 4 KiB, at log level debug.

Fifty agents get one item each, spread over the time: half of as many before, as many meanwhile, half of as many
afterwards. Prints the median from the commit of an item to the start of its process, and to the moment the end of its
wake can be read in the database, both ways, and their ratios. Ends with 1 above 1.5, or when a wake is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from support import StandIn, describe, new_key, running_daemon, running_stack
from throughput import make_agents

from dispatcher.local.stack import Stack

MOST_RATIO = 1.5
HELD_AGENTS = 3
LONGEST_SECONDS = 30.0
SMALLEST_PIPE = 4096
INSERT = (
    "insert into agent_inbox_items (agent_id, agent_slug, event_type, summary, dedup_key)"
    " select id, slug, 'task_comment_mention', 'bench', %s from agents where slug = %s"
)
ENDED = (
    "select wake.state from agent_wakes as wake join agents on agents.id = wake.agent_id"
    " where agents.slug = %s and wake.ended_at is not null"
)


@dataclass
class Figures:
    """Milliseconds from the commit of an item to its process, and to the end of its wake in the database."""

    to_start: list[float] = field(default_factory=list)
    to_end: list[float] = field(default_factory=list)


class Wakes:
    """Gives agents their items one after another and looks what becomes of them."""

    def __init__(self, connection: psycopg.Connection, stand_in: StandIn, gateway: str) -> None:
        self._connection = connection
        self._stand_in = stand_in
        self._gateway = gateway
        self._next = HELD_AGENTS + 1

    def measure(self, number: int, seconds: float, figures: Figures) -> None:
        """One item each for the next `number` agents, evenly over `seconds`."""
        begun = time.monotonic()
        for turn in range(number):
            time.sleep(max(0.0, begun + turn * seconds / number - time.monotonic()))
            self._wake(f"{self._gateway}-{self._next}", figures)
            self._next += 1
        time.sleep(max(0.0, begun + seconds - time.monotonic()))

    def _wake(self, slug: str, figures: Figures) -> None:
        self._connection.execute(INSERT, (new_key(), slug))
        committed = time.time_ns()
        started = self._stand_in.wait_for(f"hq/{slug}", committed - 5_000_000, LONGEST_SECONDS)
        if started is None:
            raise SystemExit(f"{slug} was not woken within {LONGEST_SECONDS:g} s")
        figures.to_start.append((started - committed) / 1e6)
        while not self._connection.execute(ENDED, (slug,)).fetchone():
            if time.time_ns() - committed > LONGEST_SECONDS * 1e9:
                raise SystemExit(f"the end of {slug}'s wake was not reported within {LONGEST_SECONDS:g} s")
            time.sleep(0.001)
        figures.to_end.append((time.time_ns() - committed) / 1e6)


def compare(
    name: str, wakes: Wakes, held: contextlib.AbstractContextManager[None], number: int, seconds: float
) -> bool:
    """Measures before, meanwhile and afterwards; prints, and answers whether the ratios hold."""
    free, beside = Figures(), Figures()
    wakes.measure(5, 1.0, Figures())  # connections and plans
    wakes.measure(number // 2, seconds / 2, free)
    with held:
        wakes.measure(number, seconds, beside)
    wakes.measure(number - number // 2, seconds / 2, free)
    print(f"{name}: {len(beside.to_end)} of {number} agents woken, ended and reported in the {seconds:g} s")
    ratios = []
    for what in ("to_start", "to_end"):
        print(f"  {what:<8} (ms)  free:   {describe(getattr(free, what))}")
        print(f"  {what:<8} (ms)  beside: {describe(getattr(beside, what))}")
        ratios.append(statistics.median(getattr(beside, what)) / statistics.median(getattr(free, what)))
    print(f"  ratios of the medians: {ratios[0]:.2f} to the start, {ratios[1]:.2f} to the end   (goal: at most 1.5)")
    return all(ratio <= MOST_RATIO for ratio in ratios)


@contextlib.contextmanager
def open_insert(stack: Stack, gateway: str) -> Iterator[None]:
    """A transaction that has inserted items for the first agents and does not end; they have other work as well."""
    held = [f"{gateway}-{number + 1}" for number in range(HELD_AGENTS)]
    with psycopg.connect(stack.info.db_url) as holder, psycopg.connect(stack.info.db_url, autocommit=True) as other:
        for slug in held:
            holder.execute(INSERT, (new_key(), slug))
            other.execute(INSERT, (new_key(), slug))
        yield
        holder.rollback()


def insert(number: int, seconds: float) -> bool:
    """Beside an INSERT that stays open."""
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        directory = stack.directory / "bench"
        stand_in = StandIn(directory)
        make_agents(connection, "insert", HELD_AGENTS + 5 + 2 * number)
        with running_daemon(stack, stack.info.api_url, directory, "insert", OPENCLAW_BIN=stand_in.path):
            wakes = Wakes(connection, stand_in, "insert")
            return compare("insert", wakes, open_insert(stack, "insert"), number, seconds)


class Pipe:
    """Copies the daemon's output to a file, through a pipe of 4 KiB that is read only when told to."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        self._lines = process.stdout
        self._log = log
        self._may_read = threading.Event()
        self._may_read.set()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        with self._log.open("wb", buffering=0) as log:
            for line in self._lines:
                self._may_read.wait()
                log.write(line)

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Meanwhile nobody reads."""
        self._may_read.clear()
        yield
        self._may_read.set()


def unread(number: int, seconds: float) -> bool:
    """Beside a stdout that nobody reads."""
    with running_stack() as stack, psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        directory = stack.directory / "bench"
        stand_in = StandIn(directory)
        make_agents(connection, "unread", HELD_AGENTS + 5 + 2 * number)
        settings = {"OPENCLAW_BIN": stand_in.path, "LOG_LEVEL": "debug"}
        with piped_daemon(stack, directory, **settings) as pipe:
            holds = compare("unread", Wakes(connection, stand_in, "unread"), pipe.unread(), number, seconds)
        lines = [json.loads(line) for line in (directory / "daemon.log").read_text().splitlines()]
        lost = sum(line["lines"] for line in lines if line["event"] == "log.dropped")
        ended = sum(line["event"] == "wake.ended" for line in lines)
        print(
            f"  afterwards the log has {len(lines)} lines, {ended} of them ends of wakes; {lost} were dropped, as it says"
        )
        return holds


@contextlib.contextmanager
def piped_daemon(stack: Stack, directory: Path, **settings: object) -> Iterator[Pipe]:
    """`dispatcher run` whose output goes through a `Pipe` to daemon.log."""
    pipes: list[Pipe] = []

    def with_pipe(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, **{**options, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL})
        pipes.append(Pipe(process, directory / "daemon.log"))
        return process

    with running_daemon(stack, stack.info.api_url, directory, "unread", with_pipe, **settings):
        yield pipes[0]
    pipes[0].reader.join(10)


SCENARIOS = {"insert": insert, "unread": unread}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default=",".join(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--agents", type=int, default=50)
    arguments = parser.parse_args()
    held = [SCENARIOS[name](arguments.agents, arguments.seconds) for name in arguments.scenario.split(",")]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
