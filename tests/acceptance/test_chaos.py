"""Everything is killed, cut and confused at random; nothing may be doubled, lost or left behind.

The run has a process of its own, because it takes over the orphans of killed daemons. `CHAOS_SECONDS` and `CHAOS_SEED`
change its length and its plan; `scripts/chaos` runs the same by hand for as long as wanted.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.chaos.agents import ChaosAgents
from tests.support.chaos.daemons import ChaosDaemon
from tests.support.chaos.evidence import Evidence, LineTail, fault_of_log_line
from tests.support.chaos.run import copy_code, judge_growth
from tests.support.chaos.schedule import Agent, plan
from tests.support.daemon import ROOT
from tests.support.fault_proxy import FaultProxy
from tests.support.loops import end_loop
from tests.support.waiting import wait_until

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = os.environ.get("CHAOS_SEED", "1")
# Stack and daemons start, the last faults end, what is left is worked off: on a machine that does other things too.
AROUND = 570


@pytest.mark.timeout(SECONDS + AROUND + 30)
def test_nothing_is_doubled_lost_or_left_behind() -> None:
    command = [sys.executable, "-m", "tests.support.chaos", "--seconds", f"{SECONDS:g}", "--seed", SEED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + AROUND, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "every invariant held" in done.stdout


# ------------------------------------------------------------------------------- the schedule


def test_a_seed_makes_the_same_plan_again_and_another_seed_another() -> None:
    assert plan(5, 90) == plan(5, 90)
    assert plan(5, 90) != plan(6, 90)
    assert len({fault.kind for fault in plan(5, 600).faults}) > 12
    assert {fault.target for fault in plan(5, 1200).faults} >= {"first", "second", "postgres", "postgrest", "realtime"}


# ------------------------------------------------------------------------------- does it see what it must see?


@pytest.fixture
def evidence() -> Evidence:
    return Evidence(lambda: "")


@pytest.fixture
def agents(tmp_path: Path, evidence: Evidence) -> Iterator[ChaosAgents]:
    copy_code(tmp_path / "code")
    made = ChaosAgents(tmp_path / "agents", tmp_path / "code", evidence)
    yield made
    made.read_log()
    made.kill_all()


def wake(agents: ChaosAgents, agent: str, wake_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [agents.path, "agent", "--agent", f"hq/{agent}", "--message", "[inbox]"],
        env={"PATH": os.environ["PATH"], "DISPATCHER_WAKE_ID": wake_id},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def order(agents: ChaosAgents, behaviour: str, cap: int) -> None:
    names = ("ada", "bob", "cid")
    agents.order([Agent(name, {behaviour: 1.0}) for name in names], {"url": "", "key": ""}, cap, calm=False)


def started(agents: ChaosAgents, evidence: Evidence, children: int) -> None:
    def look() -> bool:
        agents.read_log()
        behaving = sum(many for name, many in evidence.counts.items() if name.startswith("behaviour "))
        return behaving + len(evidence.violations) >= children

    wait_until(look, 20)


def test_a_second_child_of_an_agent_is_seen_and_a_later_one_is_none(agents: ChaosAgents, evidence: Evidence) -> None:
    order(agents, "hang", cap=3)
    first = wake(agents, "ada", "w1")
    started(agents, evidence, 1)
    second = wake(agents, "ada", "w2")
    assert second.wait(20) == 97
    started(agents, evidence, 2)
    [seen] = evidence.violations
    assert seen.invariant == "two live children of one agent"
    assert str(first.pid) in seen.evidence
    # The kernel gives the lock back the moment its holder is dead, and to nobody else.
    first.kill()
    first.wait()
    third = wake(agents, "ada", "w3")
    started(agents, evidence, 3)
    assert len(evidence.violations) == 1
    third.kill()
    third.wait()


def test_one_child_over_the_cap_is_seen(agents: ChaosAgents, evidence: Evidence) -> None:
    order(agents, "hang", cap=2)
    living = [wake(agents, "ada", "w1"), wake(agents, "bob", "w2")]
    started(agents, evidence, 2)
    assert wake(agents, "cid", "w3").wait(20) == 97
    started(agents, evidence, 3)
    assert [seen.invariant for seen in evidence.violations] == ["more than 2 live children"]
    for child in living:
        child.kill()
        child.wait()


def test_a_wake_that_is_started_twice_is_seen(agents: ChaosAgents, evidence: Evidence) -> None:
    order(agents, "crash", cap=2)
    assert wake(agents, "ada", "w1").wait(20) == 1
    assert wake(agents, "ada", "w1").wait(20) == 97
    started(agents, evidence, 2)
    assert [seen.invariant for seen in evidence.violations] == ["one wake was started twice"]


def test_what_a_child_leaves_behind_is_seen(agents: ChaosAgents, evidence: Evidence) -> None:
    order(agents, "fork_exit", cap=2)
    child = wake(agents, "ada", "w1")
    assert child.wait(20) == 0

    def strays() -> list[bool]:
        agents.read_log()
        return [left.is_stray for left in agents.living()]

    assert wait_until(strays, 20) == [True]
    assert agents.kill_all() == 1
    wait_until(lambda: not strays(), 20)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"Traceback (most recent call last):", "not JSON"),
        (b"[1]", "not an object"),
        (b'{"ts": "", "level": "", "daemon": "", "gateway_id": "", "tenant_id": "", "event": ""}', "without msg"),
        (b'{"ts": "", "level": "", "daemon": "", "gateway_id": "", "tenant_id": "", "event": "", "msg": ""}', None),
    ],
)
def test_a_bad_log_line_is_seen(line: bytes, fault: str | None) -> None:
    assert fault_of_log_line(line) == fault


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    assert tail.new_lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.new_lines() == [b"one"]
    assert tail.unfinished == b"tw"
    path.write_bytes(b"one\ntwo\n")
    assert tail.new_lines() == [b"two"]


def test_growth_is_seen(evidence: Evidence) -> None:
    level = [(float(second), 20, 50 << 20) for second in range(60)]
    judge_growth(level, evidence)
    assert evidence.violations == []
    judge_growth([*level, *((60.0 + second, 60, 90 << 20) for second in range(4))], evidence)
    assert [seen.invariant for seen in evidence.violations] == ["no growth of descriptors", "no growth of memory"]


def test_a_daemon_that_ends_by_itself_is_seen_and_started_again(tmp_path: Path, evidence: Evidence) -> None:
    copy_code(tmp_path / "code")
    daemon = ChaosDaemon("first", tmp_path, {"SHUTDOWN_GRACE": "1", "WAKE_COOLDOWN": "many"}, evidence)
    daemon.start()
    daemon.life.process.wait(60)
    daemon.look()
    assert evidence.violations[0].invariant == "a daemon never ends by itself"
    assert daemon.life.number == 2
    daemon.end()


def test_the_clock_of_one_process_is_moved(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("86400")
    program = (
        "import datetime, json, time\n"
        "from datetime import datetime as dt\n"
        "print(json.dumps([time.time(), dt.now(datetime.UTC).timestamp(), dt.now().timestamp(), time.monotonic()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT / "tests/support/chaos/clock"), "CHAOS_CLOCK_FILE": str(clock)},
        capture_output=True,
        text=True,
        check=True,
    )
    *walls, monotonic = json.loads(done.stdout)
    assert all(wall == pytest.approx(time.time() + 86_400, abs=60) for wall in walls)
    assert monotonic == pytest.approx(time.monotonic(), abs=60)


# ------------------------------------------------------------------------------- the fault proxy


class EchoServer:
    """Sends back what it gets; `got` is all of it."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._echo, "127.0.0.1", 0), self._loop)
        self._server = started.result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(100):
                self.got += data
                writer.write(data)
        writer.transport.abort()

    def stop(self) -> None:
        end_loop(self._loop, self._thread, self._server)


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.stop()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(echo.port).start()
    yield proxy
    proxy.stop()


def talk(proxy: FaultProxy, timeout: float = 10.0) -> "closing[socket.socket]":
    return closing(socket.create_connection(("127.0.0.1", proxy.port), timeout))


def said(connection: socket.socket, text: bytes) -> bytes:
    connection.sendall(text)
    return connection.recv(100)


def entered(proxy: FaultProxy, mode: str) -> None:
    wait_until(lambda: proxy.mode == mode, 5)


def test_the_proxy_passes_bytes_both_ways(proxy: FaultProxy) -> None:
    with talk(proxy) as connection:
        assert said(connection, b"hello") == b"hello"


def test_a_black_hole_swallows_and_delivers_late(proxy: FaultProxy, echo: EchoServer) -> None:
    with talk(proxy) as connection:
        assert said(connection, b"before") == b"before"
        proxy.black_hole()
        entered(proxy, "black_hole")
        connection.sendall(b"during")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        assert echo.got == b"before"
        proxy.heal()
        connection.settimeout(10)
        assert connection.recv(100) == b"during"


def test_a_half_open_connection_delivers_and_says_nothing(proxy: FaultProxy, echo: EchoServer) -> None:
    proxy.half_open()
    entered(proxy, "half_open")
    with talk(proxy) as connection:
        connection.sendall(b"executed")
        wait_until(lambda: echo.got == b"executed", 5)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        proxy.heal(cut=True)
        connection.settimeout(10)
        with pytest.raises(ConnectionResetError):
            connection.recv(100)


def test_a_cut_resets_what_there_is_and_welcomes_what_comes(proxy: FaultProxy) -> None:
    with talk(proxy) as connection:
        assert said(connection, b"one") == b"one"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    with talk(proxy) as connection:
        assert said(connection, b"two") == b"two"


def test_refusing_lasts_until_healed(proxy: FaultProxy) -> None:
    proxy.refuse()
    entered(proxy, "refuse")
    with pytest.raises(ConnectionResetError), talk(proxy) as connection:
        said(connection, b"nobody")
    proxy.heal()
    entered(proxy, "pass")
    with talk(proxy) as connection:
        assert said(connection, b"again") == b"again"


def test_a_delay_delays(proxy: FaultProxy) -> None:
    proxy.delay(0.4)
    entered(proxy, "delay")
    with talk(proxy) as connection:
        began = time.monotonic()
        assert said(connection, b"slow") == b"slow"
        assert time.monotonic() - began > 0.4
