"""What went wrong for others, tried on a real PostgREST. Numbers: docs/explanation/field-failures.md."""

import json
import re

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.cli.wakes import COLUMNS
from dispatcher.errors import RestError
from dispatcher.local.api import Api
from dispatcher.supabase.rest import RestClient
from tests.support.daemon import ROOT
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

EXTRA_RELATIONS = """
    alter table agent_wakes add column rescued_by uuid references agents (id);
    alter table agent_inbox_items add column reviewer_id uuid references agents (id);
    alter table agent_inbox_items add column parent_task_id uuid references tasks (id);
    alter table inbox_item_leases add column former_wake_id uuid references agent_wakes (id);
    alter table agents add column home_gateway_id uuid references gateways (id);
    alter table workflow_runs add column reviewer_wake_id uuid references agent_wakes (id);
    create view wakes_of_agents as
      select wake.*, agent.slug from agent_wakes wake join agents agent on agent.id = wake.agent_id;
    grant all on wakes_of_agents to service_role;
    notify pgrst, 'reload schema';
"""


def test_ff24_a_second_foreign_key_breaks_no_command(
    api: Api, database: Database, seed: Seed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every read of a table that the operator's commands make; what the daemon asks, it asks of functions."""
    item = seed.item("ada")
    database.execute(
        """insert into inbox_item_leases (item_id, tenant_id, agent_id, attempt, leased_until)
           select id, tenant_id, agent_id, 1, now() from agent_inbox_items"""
    )
    database.admin.execute(EXTRA_RELATIONS)
    wait_until(lambda: embed_is_ambiguous(api), 10)
    point_commands_at(api, monkeypatch)
    commands = [
        ["status", "--json"],
        ["inbox", "list", "--json"],
        ["inbox", "show", str(item), "--json"],
        ["wake", "ada", "--dry-run", "--json"],
        ["wakes", "--json"],
        ["inbox", "expire", str(item), "--json"],
        ["inbox", "requeue", str(item), "--json"],
        ["runs", "list", "--json"],
        ["runs", "stats", "--json"],
        ["routing", "list", "--json"],
        ["budgets", "list", "--json"],
        ["budgets", "ledger", "--json"],
    ]
    codes = {" ".join(command): run_command_line(command) for command in commands}
    assert {command for command, code in codes.items() if code} == set()
    printed = capsys.readouterr()
    assert "PGRST201" not in printed.out + printed.err


def test_items_that_are_left_alone_are_named_with_the_reason(
    api: Api, seed: Seed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed = seed.item("ada", status="done"), seed.item("ada", status="failed")
    point_commands_at(api, monkeypatch)
    assert run_command_line(["inbox", "requeue", str(done), str(failed)]) == 1
    printed = capsys.readouterr()
    assert "1 item(s) requeued" in printed.out
    assert f"Not requeued, because only failed and dead_letter items of this gateway are: {done}" in printed.err
    assert run_command_line(["inbox", "expire", str(done), "--json"]) == 1
    assert str(done) in capsys.readouterr().err


def test_inbox_requeue_brings_a_stalled_agent_back(
    api: Api, database: Database, seed: Seed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_commands_at(api, monkeypatch)
    item = seed.item("ada")
    database.execute(
        """insert into agent_wake_state (agent_id, tenant_id, consecutive_failures, stalled_at)
           select id, tenant_id, 5, clock_timestamp() from agents"""
    )
    assert database.value("select dispatcher.mark_agent_stalled(id) from agents") == 1
    assert database.value("select status::text from agent_inbox_items") == "failed"
    assert run_command_line(["wake", "ada", "--dry-run", "--json"]) == 1
    assert "stalled" in json.loads(capsys.readouterr().out)["blocked"]
    assert run_command_line(["inbox", "requeue", "--agent", "ada", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["requeued"], answer["item_ids"]) == (1, [str(item)])
    assert database.value("select status::text from agent_inbox_items") == "pending"
    assert run_command_line(["wake", "ada", "--dry-run"]) == 0
    assert capsys.readouterr().out == "ada would be woken.\n"


def test_what_rows_hold_does_not_steer_the_terminal(
    api: Api, seed: Seed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_commands_at(api, monkeypatch)
    seed.item("ada", summary="a\x1b[2J\u202eb\nc")
    seed.agent("ev\x1b]0;il\n\x07")
    assert run_command_line(["inbox", "list"]) == 0
    assert r"a\x1b[2J\u202eb\nc" in capsys.readouterr().out
    assert run_command_line(["wake", "nobody"]) == 1
    assert capsys.readouterr().err.endswith("Known ones: ada, ev" + r"\x1b]0;il\n\x07" + ".\n")
    assert run_command_line(["wake", "ev\x1b]0;il\n\x07", "--dry-run"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(r"ev\x1b]0;il\n\x07 is not woken: ")
    assert printed.count("\n") == 1


def test_wakes_are_listed_with_what_they_did(
    api: Api, database: Database, seed: Seed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_commands_at(api, monkeypatch)
    wake = {"tenant_id": seed.tenant_id, "gateway_id": seed.gateway(), "path": "event", "deadline_at": "2100-01-01"}
    seed.insert("agent_wakes", agent_id=seed.agent("bob"), **wake)
    started, ended = "2026-11-30 12:00:00+00", "2026-11-30 12:01:30.25+00"
    done = {"state": "failed", "claimed_at": started, "started_at": started, "ended_at": ended, "exit_code": 3}
    ada = seed.agent("ada")
    seed.insert("agent_wakes", agent_id=ada, error="it\x1b[1m broke", item_ids=[seed.item("ada")], **wake, **done)
    usage = {"run_id": "r", "provider": "p", "model": "m", "cost_total_usd": 0.125, "occurred_at": ended}
    seed.insert("agent_usage", agent_id=ada, **usage)
    assert run_command_line(["wakes"]) == 0
    heading, _, living, failed = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert heading.split() == list(COLUMNS)
    assert living.split()[:3] == ["bob", "event", "starting"]
    assert failed.split()[:3] == ["ada", "event", "failed"]
    assert failed.split(maxsplit=8)[4:] == ["90.3", "3", "1", "0.125", r"it\x1b[1m broke"]
    assert run_command_line(["wakes", "--agent", "ada", "--limit", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["count"], answer["wakes"][0]["cost_usd"]) == (1, 0.125)
    assert run_command_line(["wakes", "--agent", "eve"]) == 1
    assert "No agent 'eve' on this gateway. Known ones: ada, bob." in capsys.readouterr().err


def point_commands_at(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"SUPABASE_URL": api.url, "SUPABASE_SERVICE_ROLE_KEY": api.keys.service_role_key, "GATEWAY_ID": "local"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def embed_is_ambiguous(api: Api) -> bool:
    """Whether PostgREST has seen the new relations: from then on they do break an embed."""
    rest = RestClient(api.url, api.keys.service_role_key)
    try:
        rest.select("agent_wakes", {"select": "id,agents(slug)"})
    except RestError as error:
        return error.code == "PGRST201"
    finally:
        rest.close()
    return False


def test_ff24_no_query_of_ours_embeds() -> None:
    """`table(column)` in a select is an embed; the daemon and the commands ask for flat rows or call functions."""
    sources = [*(ROOT / "dispatcher").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    selects = [
        (path.name, found)
        for path in sources
        if "local" not in path.relative_to(ROOT).parts
        for found in re.findall(r"""["']select["']:\s*["']([^"']*)["']""", path.read_text(encoding="utf-8"))
    ]
    assert selects
    assert [one for one in selects if "(" in one[1]] == []
