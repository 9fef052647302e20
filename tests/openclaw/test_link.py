"""The link against the real Gateway: what it says, how fast, what it costs, and how it comes back."""

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dispatcher.agents.gateway_calls import CommandLineCalls
from dispatcher.agents.openclaw_calls import OpenclawCommand
from dispatcher.errors import GatewayError
from dispatcher.openclaw.finder import EndpointFinder
from dispatcher.openclaw.gateway import Gateway, Task
from dispatcher.openclaw.link import GatewayLink
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(400)]
KEY = "agent:ada:inbox-test"
CALLS = 50


class Linked:
    """The link as the daemon builds it, on the rig's openclaw.json."""

    def __init__(self, rig: Any, file: Path | None = None) -> None:
        finder = EndpointFinder([file or rig.home / "openclaw.json"], {})
        self.link = GatewayLink(finder.find, changed=finder.signature)
        command = OpenclawCommand(rig.where()["openclaw_bin"], lambda _marker: rig.env)
        self.gateway = Gateway(self.link, CommandLineCalls(command))

    def until(self, status: str, seconds: float = 60) -> None:
        wait_until(lambda: self.link.state.status == status, seconds)


@pytest.fixture
def linked(rig: Any) -> Iterator[Linked]:
    made = Linked(rig)
    made.link.start()
    made.until("ready")
    yield made
    made.link.request_stop()
    assert made.link.join(5)
    assert made.link.error is None


@pytest.fixture
def wake(rig: Any) -> Iterator[Callable[..., threading.Thread]]:
    """Runs `openclaw agent` for ada in a thread."""
    threads: list[threading.Thread] = []

    def start(script: Mapping[str, Any]) -> None:
        rig.script("ada", script)
        arguments = ("agent", "--agent", "ada", "--session-key", "inbox-test", "--message", "[inbox] work", "--json")
        threads.append(threading.Thread(target=rig.cli, args=arguments))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(60)


def milliseconds(call: Callable[[], object], times: int = CALLS) -> float:
    """The median of so many calls, after one that may find the Gateway busy."""
    call()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)


def background(gateway: Gateway) -> list[Task] | None:
    """The background commands of the session; None while the Gateway is too busy to say."""
    with suppress(GatewayError):
        return [task for task in gateway.tasks(KEY) if task.kind == "exec" and task.is_live]
    return None


def runs(gateway: Gateway) -> bool | None:
    """Whether a turn of the session runs; None while the Gateway is too busy to say."""
    with suppress(GatewayError):
        return KEY in gateway.active_sessions()
    return None


def test_a_turn_is_seen_and_ended_within_milliseconds(linked: Linked, wake: Callable[..., None]) -> None:
    gateway = linked.gateway
    assert [agent.agent_id for agent in gateway.agents()] == ["main", "ada", "grace"]
    assert gateway.active_sessions() == frozenset()
    wake({"delay": 60, "text": "late"})
    wait_until(lambda: runs(gateway), 90)
    assert milliseconds(gateway.active_sessions) < 20
    assert milliseconds(lambda: gateway.tasks(KEY)) < 20
    ended = gateway.abort(KEY)
    assert ended.run_id is not None
    wait_until(lambda: runs(gateway) is False, 60)
    assert milliseconds(lambda: gateway.abort(KEY)) < 20
    wait_until(lambda: gateway.session_status(KEY) == "killed", 20)


def test_g4_a_background_command_is_seen_after_its_turn_and_cancelled(
    linked: Linked, wake: Callable[..., None]
) -> None:
    gateway = linked.gateway
    wake({"commands": ["sleep 300"], "exec": {"background": True}})
    wait_until(lambda: background(gateway), 90)
    wait_until(lambda: runs(gateway) is False, 60)
    [task] = background(gateway)
    assert task.title == "sleep 300"
    assert gateway.cancel(task.task_id, "deadline")
    wait_until(lambda: background(gateway) == [], 60)
    assert not gateway.cancel(task.task_id, "deadline")


def test_it_costs_next_to_nothing(rig: Any, linked: Linked) -> None:
    process = psutil.Process()
    time.sleep(10)  # the Gateway's start is over
    memory, began = process.memory_info().rss, sum(process.cpu_times()[:2])
    started = time.monotonic()
    time.sleep(60)
    share = (sum(process.cpu_times()[:2]) - began) / (time.monotonic() - started)
    assert share < 0.001, f"{share:.3%} of a CPU"
    assert process.memory_info().rss - memory < 2 * 2**20


def test_g2_a_killed_gateway_is_linked_again_within_two_seconds_of_its_readiness(rig: Any, linked: Linked) -> None:
    before = linked.link.state.boot_id
    rig.kill_gateway()
    linked.until("down", 10)
    rig.start_gateway()
    linked.until("ready", 2)
    assert linked.link.state.boot_id not in {None, before}
    assert linked.gateway.active_sessions() == frozenset()


def test_g3_a_stopped_gateway_is_hung_and_ready_when_it_goes_on(rig: Any, linked: Linked) -> None:
    os.kill(rig.gateway.pid, signal.SIGSTOP)
    linked.until("hung", 20)
    os.kill(rig.gateway.pid, signal.SIGCONT)
    linked.until("ready", 3)


def test_g1_a_draining_gateway_is_seen_to_drain(rig: Any, linked: Linked, wake: Callable[..., None]) -> None:
    wake({"delay": 12, "text": "late"})
    wait_until(lambda: runs(linked.gateway), 90)
    rig.gateway.terminate()
    linked.until("draining", 15)
    linked.until("down", 60)


def test_a_wrong_token_is_named_and_the_command_line_is_asked(rig: Any, tmp_path: Path) -> None:
    file = tmp_path / "openclaw.json"
    file.write_text((rig.home / "openclaw.json").read_text().replace("kit-token", "wrong-token"))
    barred = Linked(rig, file)
    barred.link.start()
    try:
        barred.until("barred", 10)
        assert "refuses our token" in str(barred.link.state.cause)
        assert [agent.agent_id for agent in barred.gateway.agents()] == ["main", "ada", "grace"]
        assert barred.gateway.active_sessions() == frozenset()
        assert barred.gateway.abort(KEY).run_id is None
    finally:
        barred.link.request_stop()
        assert barred.link.join(5)


def test_another_protocol_is_named(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dispatcher.openclaw.frames.PROTOCOL", 3)
    older = Linked(rig)
    older.link.start()
    try:
        older.until("barred", 10)
        assert "does not speak protocol 3" in str(older.link.state.cause)
    finally:
        older.link.request_stop()
        assert older.link.join(5)
