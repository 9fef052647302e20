"""Frame to start: the daemon against the floor (`floor.py`), turn by turn in one run, on two gateways of one stack.

    .venv/bin/python benchmarks/wake_latency.py [--wakes 60] [--round-trip-ms 0,40]

Prints, per round trip time, how long each takes from the hint's frame (as a third subscriber of the same topic sees it)
and from the insert's commit to the first instruction of the agent's process, the ratio of the medians, and how many
HTTP calls the daemon made before the start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb
from support import Proxy, StandIn, describe, new_key, running_daemon, running_stack
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from dispatcher.inbox.settings import WAKE_SETTINGS

SETTINGS = {
    **dict.fromkeys(WAKE_SETTINGS, 0),
    "max_wake_cooldown": 900,
    "max_consecutive_failures": 1000,
    "max_concurrent_wakes": 1000,
    "agent_process_timeout": 300,
    "lease_seconds": 120,
    "instance_timeout": 3600,
}


class Frames:
    """A subscriber of a gateway's topic: when did the hint about an item arrive?"""

    def __init__(self, url: str, key: str, topics: list[str]) -> None:
        self.seen: dict[str, int] = {}
        address = f"{url.replace('http', 'ws', 1)}/realtime/v1/websocket?apikey={key}&vsn=1.0.0"
        self._socket = connect(address, compression=None, proxy=None, max_size=None)
        broadcast = {"ack": False, "self": False, "replication_ready": True}
        for topic in topics:
            payload = {"config": {"broadcast": broadcast, "private": True}}
            frame = {"topic": f"realtime:{topic}", "event": "phx_join", "payload": payload, "ref": "1", "join_ref": "1"}
            self._socket.send(json.dumps(frame))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(ConnectionClosed):
            self._read_all()

    def _read_all(self) -> None:
        for text in self._socket:
            now = time.time_ns()
            frame = json.loads(text)
            if frame["event"] == "broadcast" and frame["payload"]["event"] == "inbox":
                self.seen.setdefault(frame["payload"]["payload"]["item_id"], now)


@dataclass
class Figures:
    """Milliseconds of one contender."""

    from_frame: list[float] = field(default_factory=list)
    from_commit: list[float] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)


def make_gateway(connection: psycopg.Connection, slug: str, agents: int) -> tuple[str, list[tuple[str, str]]]:
    """A gateway with agents; its topic, and (id, slug) of each agent."""
    [gateway] = connection.execute(
        "insert into gateways (slug, label) values (%s, %s) returning id", (slug, slug)
    ).fetchone()
    rows = connection.execute(
        "insert into agents (gateway_id, slug, name) select %s, %s || n, 'bench' from generate_series(1, %s) n"
        " returning id::text, slug",
        (gateway, f"{slug}-", agents),
    ).fetchall()
    return f"gateway:{gateway}", rows


def insert(connection: psycopg.Connection, agent: tuple[str, str]) -> tuple[str, int]:
    """One item; its id and when its commit was acknowledged."""
    row = connection.execute(
        "insert into agent_inbox_items (agent_id, agent_slug, event_type, summary, dedup_key)"
        " values (%s, %s, 'task_comment_mention', 'bench', %s) returning id::text",
        (*agent, new_key()),
    ).fetchone()
    return row[0], time.time_ns()


def measure(
    contenders: dict, stand_in: StandIn, frames: Frames, connection: psycopg.Connection, wakes: int
) -> dict[str, Figures]:
    """Turn by turn: an item for the daemon, an item for the floor."""
    figures = {name: Figures() for name in contenders}
    for number in range(-3, wakes):  # the first three warm up connections and plans
        for name, (agents, proxy) in contenders.items():
            agent = agents[number]
            item, committed = insert(connection, agent)
            started = stand_in.wait_for(f"hq/{agent[1]}", committed - 5_000_000, 10)
            if started is None:
                raise SystemExit(f"{name} did not start {agent[1]}")
            if number >= 0:
                figures[name].from_frame.append((started - frames.seen[item]) / 1e6)
                figures[name].from_commit.append((started - committed) / 1e6)
                figures[name].calls.append(len(proxy.calls_between(committed - 2_000_000, started)))
            time.sleep(0.12)
    return figures


def run(wakes: int, round_trip_ms: float) -> None:
    with ExitStack() as exits:
        stack = exits.enter_context(running_stack())
        directory = stack.directory / "bench"
        stand_in = StandIn(directory)
        port = int(stack.info.api_url.rsplit(":", 1)[1])
        daemon_proxy, floor_proxy = Proxy(port, round_trip_ms), Proxy(port, round_trip_ms)
        connection = exits.enter_context(psycopg.connect(stack.info.db_url, autocommit=True))
        daemon_topic, daemon_agents = make_gateway(connection, "daemon", wakes + 3)
        floor_topic, floor_agents = make_gateway(connection, "floor", wakes + 3)
        frames = Frames(stack.info.api_url, stack.info.service_role_key, [daemon_topic, floor_topic])
        settings = {"OPENCLAW_BIN": stand_in.path, "MAX_CONCURRENT_WAKES": 50}
        exits.enter_context(running_daemon(stack, daemon_proxy.url, directory, "daemon", **settings))
        exits.enter_context(running_floor(stack, floor_proxy.url, floor_topic, connection, stand_in.path))
        contenders = {"daemon": (daemon_agents, daemon_proxy), "floor": (floor_agents, floor_proxy)}
        figures = measure(contenders, stand_in, frames, connection, wakes)
    report(figures, round_trip_ms)


def running_floor(stack, url: str, topic: str, connection: psycopg.Connection, executable: Path) -> ExitStack:
    """The floor as a process, registered as an instance so that it makes the very same claim call."""
    identity = {"hostname": "floor", "host_id": "floor", "pid": 0, "version": "0", "instance_id": str(uuid.uuid4())}
    connection.execute(
        "select register_dispatcher_instance(%s, 'floor', %s, %s)", (uuid.UUID(int=0), Jsonb(identity), Jsonb(SETTINGS))
    )
    program = [sys.executable, str(Path(__file__).with_name("floor.py"))]
    arguments = [url, stack.info.service_role_key, topic, identity["instance_id"], str(executable)]
    process = subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, text=True)
    exits = ExitStack()
    exits.callback(process.wait)
    exits.callback(process.terminate)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit("the floor did not start")
    return exits


def report(figures: dict[str, Figures], round_trip_ms: float) -> None:
    daemon, floor = figures["daemon"], figures["floor"]
    print(f"\nround trip {round_trip_ms:g} ms")
    for name, one in figures.items():
        print(f"  {name:<7} frame to start (ms):  {describe(one.from_frame)}")
        print(f"  {name:<7} commit to start (ms): {describe(one.from_commit)}")
    ratio = statistics.median(daemon.from_frame) / statistics.median(floor.from_frame)
    print(f"  ratio of the medians, frame to start: {ratio:.2f}   (goal: at most 1.5 at 0 ms, 1.2 at 40 ms)")
    print(f"  HTTP calls before the start: median {statistics.median(daemon.calls):g}, max {max(daemon.calls)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wakes", type=int, default=60)
    parser.add_argument("--round-trip-ms", default="0,40")
    arguments = parser.parse_args()
    for round_trip_ms in arguments.round_trip_ms.split(","):
        run(arguments.wakes, float(round_trip_ms))


if __name__ == "__main__":
    main()
