"""The runbook's commands, each run against the local stack."""

import re
import shlex
from pathlib import Path

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.local.api import Api
from tests.integration.test_field_failures import point_commands_at
from tests.support.database import Database
from tests.support.seed import Seed

RUNBOOK = Path(__file__).resolve().parents[2] / "docs" / "runbook" / "README.md"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", RUNBOOK.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("dispatcher ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_c34_c37_a_command_of_the_runbook_does_its_work(
    command: str, api: Api, database: Database, seed: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_commands_at(api, monkeypatch)
    seed.items("ada", 2, status="dead_letter", attempt_count=3)
    database.execute("update agent_inbox_items set failed_at = now()")
    seed.item("ada")
    [held] = database.call("lease_inbox_item", {"p_agent_id": seed.agent("ada")})
    words = [str(held["id"]) if word == "ITEM" else word for word in shlex.split(command, comments=True)]
    assert run_command_line(words[1:]) == 0
    pending = database.value("select count(*) from agent_inbox_items where status = 'pending'")
    takes_dead = "--dead" in words and "--dry-run" not in words
    assert pending == (2 if takes_dead else 1 if "release" in words else 0)
