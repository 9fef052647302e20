"""What the benchmarks share: a stack, a fast stand-in for openclaw, a proxy that counts and delays, statistics."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dispatcher.cli.local import project_stack
from dispatcher.local.stack import Stack

RPC = re.compile(rb"POST /rest/v1/rpc/(\w+)")
# Written in C it would start faster; /bin/sh is on every machine, and its time is the same for everybody compared.
STAND_IN = '#!/bin/sh\necho "$3 $$" > {fifo}\n{hold}'


@contextlib.contextmanager
def running_stack() -> Iterator[Stack]:
    """An embedded Supabase that is gone afterwards. Not durable: the disk is not what is measured."""
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-", ignore_cleanup_errors=True) as directory,
        project_stack(Path(directory), seed=True, durable=False) as stack,
    ):
        yield stack


class StandIn:
    """An executable that says through a FIFO that it runs, then holds for a while. `started` maps agent id to ns."""

    def __init__(self, directory: Path, hold_seconds: float = 0.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "openclaw"
        fifo = directory / "started"
        os.mkfifo(fifo)
        hold = f"exec sleep {hold_seconds}\n" if hold_seconds else ""
        self.path.write_text(STAND_IN.format(fifo=fifo, hold=hold))
        self.path.chmod(0o755)
        self.started: list[tuple[int, str]] = []
        self._changed = threading.Condition()
        # Read-write, so that it never sees an end of file between two writers.
        self._descriptor = os.open(fifo, os.O_RDWR)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with os.fdopen(self._descriptor, encoding="utf-8") as lines:
            for line in lines:
                now = time.time_ns()
                with self._changed:
                    self.started.append((now, line.split()[0]))
                    self._changed.notify_all()

    def wait_for(self, agent: str, since: int, timeout: float) -> int | None:
        """When a process of `agent` started after `since` (ns); None when none did in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(agent, since), timeout)
            return self._find(agent, since)

    def _find(self, agent: str, since: int) -> int | None:
        return next((at for at, name in self.started if name == agent and at >= since), None)


class Proxy:
    """A TCP relay in front of the stack that counts RPCs and, with a round trip time, holds every byte half of it."""

    def __init__(self, port: int, round_trip_ms: float = 0.0) -> None:
        self.calls: list[tuple[int, str]] = []
        self.delay = round_trip_ms / 2000
        self._upstream = port
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if self.delay:
                await asyncio.sleep(self.delay * 2)  # what the handshake would have taken
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
            await asyncio.gather(self._pump(reader, up_writer, True), self._pump(up_reader, writer, False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if count:
                    now = time.time_ns()
                    self.calls += [(now, name.decode()) for name in RPC.findall(data)]
                if self.delay:
                    self._loop.call_later(self.delay, writer.write, data)
                else:
                    writer.write(data)
            await asyncio.sleep(self.delay)
        with contextlib.suppress(OSError):
            writer.close()

    def calls_between(self, start: int, end: int) -> list[str]:
        """Names of the RPCs sent between two moments (ns)."""
        return [name for at, name in self.calls if start <= at <= end]


@contextlib.contextmanager
def running_daemon(
    stack: Stack,
    url: str,
    directory: Path,
    gateway: str,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    **settings: object,
) -> Iterator[subprocess.Popen[bytes]]:
    """`dispatcher run` with the given settings over the defaults, its log in daemon.log; `start` makes the process."""
    (directory / "openclaw-home").mkdir(parents=True, exist_ok=True)
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(directory),
        "SUPABASE_URL": url,
        "SUPABASE_SERVICE_ROLE_KEY": stack.info.service_role_key,
        "GATEWAY_ID": gateway,
        "OPENCLAW_HOME": str(directory / "openclaw-home"),
        "HEARTBEAT_FILE": str(directory / "heartbeat.json"),
        **{name: str(value) for name, value in settings.items()},
    }
    with (directory / "daemon.log").open("wb") as log:
        process = start(
            [sys.executable, "-m", "dispatcher", "run"],
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_for_line(directory / "daemon.log", "realtime.subscribed")
        time.sleep(1.0)  # the sweep that follows a subscription
        yield process
    finally:
        process.terminate()
        process.wait(60)


def wait_for_line(log: Path, text: str, timeout: float = 60.0) -> None:
    """Waits until the log holds `text`."""
    deadline = time.monotonic() + timeout
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise SystemExit(f"the daemon never logged {text}:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def describe(values: Sequence[float]) -> str:
    """Median, 90th percentile and maximum, in milliseconds."""
    ordered = sorted(values)
    p90 = ordered[max(0, -(-9 * len(ordered) // 10) - 1)]
    return f"median {statistics.median(ordered):6.2f}   p90 {p90:6.2f}   max {ordered[-1]:6.2f}   n={len(ordered)}"


def new_key() -> str:
    """A dedup_key nobody used before."""
    return f"bench:{uuid.uuid4()}"


Environment = Mapping[str, str]
