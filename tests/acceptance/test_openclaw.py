"""The real `openclaw`, without a Gateway: what it answers, and what the daemon makes of it. Off unless asked for.

`openclaw` must be on PATH, with the Node it needs: `npm install openclaw@2026.9.6` in a folder of your own.
"""

import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from dispatcher.agents.openclaw_calls import OpenclawCommand
from dispatcher.workflows.sessions import is_live_task, read_sessions
from tests.acceptance.conftest import StartDaemon
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.openclaw, pytest.mark.timeout(300)]


@pytest.fixture
def openclaw() -> str:
    """Its path."""
    found = shutil.which("openclaw")
    assert found is not None, "openclaw is not on PATH"
    return found


@pytest.fixture
def command(openclaw: str, tmp_path: Path) -> OpenclawCommand:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENCLAW_HOME": str(tmp_path)}
    return OpenclawCommand(openclaw, lambda _marker: {**environment, "OPENCLAW_NO_RESPAWN": "1"})


def test_a_wake_without_a_gateway_fails_backs_off_and_leaves_nothing(
    openclaw: str, tmp_path: Path, database: Database, seed: Seed, start_daemon: StartDaemon
) -> None:
    seed.item("ada")
    daemon = start_daemon(OPENCLAW_BIN=openclaw, OPENCLAW_HOME=tmp_path, HOME=tmp_path, WAKE_COOLDOWN=30)
    [started] = daemon.wait_for("wake.started")
    [ended] = daemon.wait_for("wake.ended", deadline=120)
    assert (ended["ending"], ended["exit_code"]) == ("exited", 1)
    assert daemon.wait_for("wake.backoff")[0]["failures"] == 1
    assert not psutil.pid_exists(started["pid"])
    assert daemon.children() == []
    row = database.row("select status::text, attempt_count, leased_until from agent_inbox_items")
    assert row == {"status": "pending", "attempt_count": 0, "leased_until": None}


def test_a_stop_in_the_middle_of_a_wake_leaves_nothing(
    openclaw: str, tmp_path: Path, database: Database, seed: Seed, start_daemon: StartDaemon
) -> None:
    seed.item("ada")
    daemon = start_daemon(OPENCLAW_BIN=openclaw, OPENCLAW_HOME=tmp_path, HOME=tmp_path, SHUTDOWN_GRACE=0)
    daemon.wait_for("wake.started")
    time.sleep(0.5)  # into its start, which takes seconds
    family = daemon.children()
    assert family
    assert daemon.stop() == 0
    wait_until(lambda: not any(process.is_running() for process in family), 10)
    assert database.value("select state from agent_wakes") in ("interrupted", "failed")


def test_what_it_says_of_sessions_and_tasks_is_read(command: OpenclawCommand) -> None:
    result, document = command.ask("sessions", "--all-agents", marker="m")
    assert result.failure == ""
    assert isinstance(document, dict)
    assert isinstance(document["sessions"], list)
    assert read_sessions(document, datetime.now(UTC)) == []
    result, document = command.ask("tasks", "show", "agent:main:main", marker="m")
    assert result.exit_code is not None  # it could say
    assert not is_live_task(document)


def test_a_system_event_without_a_gateway_is_a_failure_with_words(command: OpenclawCommand) -> None:
    result = command.system_event("main", "hello", "m")
    assert result.failure
    assert "no output" not in result.failure
