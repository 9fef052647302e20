"""The stand-in for openclaw does what it is told and tells what it saw."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

MESSAGE = '[inbox] New: "quotes", ümläuts\n\tand a tab'


def start(stub: StubAgent, agent: str = "hq/ada", **options: Any) -> subprocess.Popen[bytes]:
    argv = [str(stub.path), "agent", "--agent", agent, "--message", MESSAGE]
    defaults: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": {"PATH": os.defpath, "FLAG": "1"}}
    return subprocess.Popen(argv, start_new_session=True, **(defaults | options))


def run(stub: StubAgent, agent: str = "hq/ada") -> int:
    return start(stub, agent).wait(10)


def test_it_logs_how_it_was_called(stub_agent: StubAgent) -> None:
    child = start(stub_agent)
    assert child.wait(10) == 0
    [call] = stub_agent.calls()
    assert call["argv"] == ["agent", "--agent", "hq/ada", "--message", MESSAGE]
    assert (call["pid"], call["pgid"], call["sid"], call["ppid"]) == (*[child.pid] * 3, os.getpid())
    assert call["env"]["FLAG"] == "1"
    assert call["stdin"] == "/dev/null"
    assert [event["event"] for event in stub_agent.events()] == ["start", "end"]


@pytest.mark.parametrize(("outcome", "status"), [("done", "done"), ("failed", "failed"), ("leased", "leased")])
def test_it_handles_the_items_of_its_agent(
    stub_agent: StubAgent, api: Api, database: Database, seed: Seed, *, outcome: str, status: str
) -> None:
    mine, other = seed.items("ada", 2), seed.item("grace")
    stub_agent.order(outcome=outcome, rest={"url": api.url, "key": api.keys.service_role_key})
    assert run(stub_agent) == 0
    assert {event["item_id"] for event in stub_agent.events("item")} == {str(item) for item in mine}
    statuses = {row["id"]: row["status"] for row in database.rows("select id, status::text from agent_inbox_items")}
    assert statuses == {mine[0]: status, mine[1]: status, other: "pending"}


def test_a_refused_call_is_a_failure_that_names_the_answer(stub_agent: StubAgent, api: Api) -> None:
    stub_agent.order(rest={"url": api.url, "key": "wrong"})
    child = start(stub_agent, stderr=subprocess.PIPE)
    _, errors = child.communicate(timeout=10)
    assert child.returncode == 1
    assert b"401" in errors


def test_orders_for_one_agent_lie_over_those_for_all(stub_agent: StubAgent) -> None:
    stub_agent.order(mode="exit", exit_code=3, agents={"hq/grace": {"exit_code": 4}})
    assert (run(stub_agent), run(stub_agent, "hq/grace")) == (3, 4)


def test_hang_ends_by_sigterm(stub_agent: StubAgent) -> None:
    stub_agent.order(mode="hang")
    polite = start(stub_agent)
    wait_until(stub_agent.calls)
    polite.terminate()
    assert polite.wait(10) == -signal.SIGTERM


def test_deaf_ends_only_by_sigkill(stub_agent: StubAgent) -> None:
    stub_agent.order(mode="fork", deaf=True)
    child = start(stub_agent)
    wait_until(lambda: stub_agent.events("grandchild"))
    child.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    child.kill()
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("escape", [False, True])
def test_a_grandchild_outlives_a_sigterm_to_the_group(stub_agent: StubAgent, *, escape: bool) -> None:
    stub_agent.order(mode="fork", escape=escape)
    child = start(stub_agent)
    [grandchild] = wait_until(lambda: stub_agent.events("grandchild"))
    assert (grandchild["pgid"] == child.pid) is not escape
    os.killpg(child.pid, signal.SIGTERM)
    child.wait(10)
    assert [process.pid for process in stub_agent.living()] == [grandchild["pid"]]
    stub_agent.kill_all()
    wait_until(lambda: not stub_agent.living())


def test_h6_what_had_no_time_to_log_its_start_is_ended_too(stub_agent: StubAgent) -> None:
    child = start(stub_agent)
    child.send_signal(signal.SIGSTOP)
    stub_agent.log.unlink(missing_ok=True)
    stub_agent.kill_all()
    assert child.wait(10) == -signal.SIGKILL


def test_chatty_fills_both_streams(stub_agent: StubAgent) -> None:
    stub_agent.order(mode="chatty", bytes=200_001)
    child = start(stub_agent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = child.communicate(timeout=10)
    assert (len(output), len(errors)) == (200_001, 200_001)


def test_read_takes_stdin_to_its_end(stub_agent: StubAgent) -> None:
    stub_agent.order(mode="read")
    child = start(stub_agent, stdin=subprocess.PIPE)
    child.communicate(b"x" * 100_000, timeout=10)
    assert [event["bytes"] for event in stub_agent.events("stdin")] == [100_000]


def test_an_interpreter_in_an_odd_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a place with spaces" / ("long" * 30)
    odd.mkdir(parents=True)
    (odd / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(odd / "python"))
    stub = StubAgent(tmp_path / "stub", mode="exit", exit_code=7)
    assert run(stub) == 7
