"""The operator's commands for runs, routes and budgets, over the real PostgREST."""

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.postgres import PostgresServer
from tests.support.api import running_api
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows


@pytest.fixture(scope="module")
def home(
    cluster: PostgresServer, migrated_template: str, project_keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Database, Api]]:
    folder = tmp_path_factory.mktemp("api")
    with cloned(cluster, migrated_template) as database, running_api(database, project_keys, folder) as api:
        yield database, api


@pytest.fixture
def runs(home: tuple[Database, Api]) -> Iterator[Workflows]:
    with fresh_workflows(home[0]) as workflows:
        yield workflows


class Terminal:
    """Types commands; `said` is what came back."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self, *arguments: str, code: int = 0) -> str:
        found = run_command_line(arguments)
        said = self._capsys.readouterr()
        assert found == code, (found, said.out, said.err)
        return said.out + said.err

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.text(*arguments, "--json", code=code))


@pytest.fixture
def terminal(
    home: tuple[Database, Api],
    runs: Workflows,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> Terminal:
    api = home[1]
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "SUPABASE_URL": api.url,
        "SUPABASE_SERVICE_ROLE_KEY": api.keys.service_role_key,
        "GATEWAY_ID": "local",
        "OPENCLAW_HOME": str(tmp_path),
        "WORKFLOW_COST_ESTIMATE_USD": "0.2",
    }.items():
        monkeypatch.setenv(name, value)
    return Terminal(capsys)


def test_routing(terminal: Terminal) -> None:
    assert terminal.json("routing", "seed")["seeded"] == 8
    assert "0 route(s) added" in terminal.text("routing", "seed")
    route = terminal.json("routing", "set", "code-change", "ada", "--max-concurrent", "3")["route"]
    assert (route["agent_id"], route["max_concurrent"], route["timeout_minutes"]) == ("ada", 3, 60)
    assert terminal.json("routing", "list")["count"] == 8
    assert "ada" in terminal.text("routing", "list")
    assert "no route any more" in terminal.text("routing", "remove", "code-change")
    assert "has no route" in terminal.text("routing", "remove", "code-change", code=1)
    terminal.text("routing", "set", "code-change", "ada", "--max-concurrent", "-1", code=2)


def test_runs(terminal: Terminal, runs: Workflows) -> None:
    queued = terminal.text("runs", "enqueue", "code-change")
    assert "No route takes 'code-change' yet" in queued
    runs.route()
    made = terminal.json(
        "runs", "enqueue", "code-change", "--input", '{"a": 1}', "--priority", "4", "--key", "k", "--task", "t"
    )
    run = made["run_id"]
    assert terminal.json("runs", "enqueue", "code-change", "--input", '{"a": 1}', "--key", "k")["run_id"] == run
    refused = terminal.text("runs", "enqueue", "code-change", "--input", '{"a": 2}', "--key", "k", code=1)
    assert "with another input" in " ".join(refused.split())
    row = runs.row(uuid.UUID(run))
    assert (row["input_payload"], row["priority"], row["task_id"]) == ({"a": 1}, 4, "t")
    assert row["initiator"].startswith("operator")
    later = terminal.json("runs", "enqueue", "code-change", "--delay", "60")["run_id"]
    assert runs.row(uuid.UUID(later))["next_attempt_at"] > row["queued_at"]
    assert terminal.json("runs", "list", "--status", "queued", "--limit", "2")["count"] == 2
    assert run in terminal.text("runs", "list")
    assert terminal.json("runs", "show", run)["run"]["id"] == run
    assert '{"a": 1}' in terminal.text("runs", "show", run)
    assert "is cancelled" in terminal.text("runs", "cancel", run, "--reason", "enough")
    assert "Nothing was changed" in terminal.text("runs", "retry", run, code=1)
    failed = runs.run(status="failed")
    assert terminal.json("runs", "retry", str(failed))["status"] == "queued"
    assert terminal.json("runs", "stats")["by_status"]["cancelled"] == 1
    assert "cancelled" in terminal.text("runs", "stats")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("runs", "enqueue", "x", "--input", "{"), 2),
        (("runs", "enqueue", "x", "--input", "[1]"), 2),
        (("runs", "enqueue", " "), 2),
        (("runs", "list", "--status", "odd"), 2),
        (("runs", "show", str(uuid.uuid4())), 1),
        (("runs", "cancel", str(uuid.uuid4())), 1),
        (("runs", "show", "no-uuid"), 2),
    ],
)
def test_what_is_refused(terminal: Terminal, arguments: tuple[str, ...], code: int) -> None:
    terminal.text(*arguments, code=code)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("runs enqueue x --delay inf", "--delay"),
        ("runs enqueue x --delay nan", "--delay"),
        ("runs enqueue x --delay 1e300", "--delay"),
        ("runs enqueue x --agent !!!", "nothing OpenClaw keeps"),
        ("runs enqueue x --agent=--help", "taken for an option"),
        ('runs enqueue x --input {"a":NaN}', "NaN is no number"),
        ('runs enqueue x --input {"a":[-Infinity]}', "-Infinity is no number"),
        ('runs enqueue x --input {"a":1e999}', "1e999 is no number"),
        ('runs enqueue x --input {"a":["\\u0000"]}', "\\u0000"),
        ('runs enqueue x --input {"\\u0000":1}', "\\u0000"),
        (f"runs enqueue {'x' * 201}", "1 to 200 characters"),
        ("routing set x -- --help", "taken for an option"),
        ("routing set x ...", "nothing OpenClaw keeps"),
        ("routing set \t ada", "workflow_type: empty"),
        ("routing set x ada --max-concurrent 2147483648", "--max-concurrent"),
        ("routing set x ada --timeout-minutes 2147483648", "--timeout-minutes"),
        ("budgets set x --cap-usd 1 --period yearly", "'yearly' is none of daily"),
        ("budgets set x --cap-usd 1 --action explode", "'explode' is none of warn"),
        ("budgets set x --cap-usd 1 --timezone Mars/Base", "timezone"),
        ("budgets set x --cap-usd inf", "--cap-usd"),
        ("budgets set x --cap-usd nan", "--cap-usd"),
        ("budgets set x --cap-tokens 9223372036854775808", "--cap-tokens"),
        ("budgets set x --cap-usd 1 --cap-tokens 1", "exactly one of"),
        ("budgets set x", "exactly one of"),
        ("budgets set \t --cap-usd 1", "name: empty"),
        ("budgets set x --cap-usd 1 --scope agent", "scope_id"),
    ],
)
def test_wrong_usage_is_2_and_changes_nothing(terminal: Terminal, runs: Workflows, arguments: str, words: str) -> None:
    said = terminal.text(*(word.replace("\t", " ") for word in arguments.split(" ")), code=2)
    assert words in said
    for table in ("workflow_runs", "workflow_agent_routing", "budgets"):
        assert runs.database.value(f"select count(*) as n from public.{table}") == 0


def test_an_unknown_scope_is_one_fault_that_repeats_it(terminal: Terminal) -> None:
    said = terminal.text("budgets", "set", "x", "--cap-usd", "1", "--scope", "team", code=2)
    assert "'team' is none of agent, department, project, fleet" in said
    assert "scope_id" not in said


def test_an_agent_is_kept_without_the_blanks_around_it(terminal: Terminal, runs: Workflows) -> None:
    run = terminal.json("runs", "enqueue", "x", "--agent", " ada ")["run_id"]
    assert runs.row(uuid.UUID(run))["pinned_agent_id"] == "ada"


def test_budgets(terminal: Terminal, runs: Workflows) -> None:
    runs.done(cost=2)
    terminal.json("budgets", "set", "All", "--cap-usd", "1", "--period", "daily", "--action", "pause_new_runs")
    runs.tick()
    [budget] = terminal.json("budgets", "list")["budgets"]
    assert (budget["name"], float(budget["settled_usd"]), budget["events"]) == ("All", 2.0, ["paused"])
    assert "All" in terminal.text("budgets", "list")
    [event] = terminal.json("budgets", "ledger")["events"]
    assert event["event_kind"] == "paused"
    assert "paused" in terminal.text("budgets", "ledger")
    runs.route(), runs.run()
    runs.tick()
    assert terminal.json("runs", "stats")["by_type"][0]["held_by"] == ["All"]
    [row] = [line for line in terminal.text("runs", "stats").splitlines() if line.startswith(" code-change")]
    assert row.split()[-1] == "All"
    wrong = terminal.text("budgets", "set", "X", "--scope", "agent", "--timezone", "Mars/Base", code=2)
    assert {"scope_id", "cap", "timezone"} <= set(wrong.replace(":", " ").split())
    assert "not active any more" in terminal.text("budgets", "deactivate", "All")
    assert "No budget" in terminal.text("budgets", "deactivate", "nobody", code=1)


def test_m3_a_change_keeps_what_is_not_given_and_shows_before_and_after(terminal: Terminal, runs: Workflows) -> None:
    made = terminal.json(
        "budgets", "set", "All", "--cap-usd", "10", "--action", "hard_stop", "--timezone", "Asia/Tokyo"
    )
    said = terminal.text("budgets", "change", "All", "--cap-usd", "20")
    assert ("cap_usd: 10" in said, "-> 20" in said) == (True, True)
    changed = terminal.json("budgets", "change", made["budget"]["id"], "--name", "Whole", "--fail-closed")
    assert changed["changed"] == {"name": ["All", "Whole"], "fail_closed": [False, True]}
    kept = runs.database.row("select * from public.budgets")
    assert (kept["action_on_exceed"], kept["timezone"], kept["cap_usd"]) == ("hard_stop", "Asia/Tokyo", 20)
    assert "is as it was" in terminal.text("budgets", "set", "Whole", "--cap-usd", "20")
    assert "No active budget" in terminal.text("budgets", "change", "nobody", "--cap-usd", "1", code=1)
    assert "another active budget" in terminal.text("budgets", "set", "Mine", "--cap-usd", "1", code=1)


def test_m17_an_operator_corrects_a_cost(terminal: Terminal, runs: Workflows) -> None:
    run = runs.done(cost=2)
    assert "booked -1.5 USD" in terminal.text("runs", "usage", str(run), "--cost-usd", "0.5", "--reason", "the bill")
    assert [row["source"] for row in terminal.json("runs", "show", str(run))["bookings"]] == ["report", "correction"]
    assert "--cost-usd" in terminal.text("runs", "usage", str(run), code=2)
    assert "Nobody has worked" in terminal.text("runs", "usage", str(runs.run()), "--cost-usd", "1", code=1)


def test_a_name_that_several_active_budgets_have_ends_none(terminal: Terminal, runs: Workflows) -> None:
    runs.route()
    whole = str(runs.budget(1, name="Cap"))
    coder = str(runs.budget(1, scope="agent", scope_id="coder", name="Cap"))
    said = terminal.text("budgets", "deactivate", "Cap", code=1)
    assert {whole in said, coder in said, "fleet, daily" in said, "agent coder, daily" in said} == {True}
    refused = terminal.json("budgets", "deactivate", "Cap", code=1)
    assert (refused["code"], [one["id"] for one in refused["budgets"]]) == ("ambiguous", [whole, coder])
    assert runs.database.value("select count(*) as n from public.budgets where active") == 2
    assert [one["id"] for one in terminal.json("budgets", "deactivate", coder)["budgets"]] == [coder]
    assert "not active any more" in terminal.text("budgets", "deactivate", "Cap")


@pytest.mark.parametrize(
    ("scope", "scope_id", "is_known"),
    [
        ("agent", "coder", True),
        ("agent", "ada", True),
        ("agent", "profiled", True),
        ("agent", "codr", False),
        ("department", "engineering", True),
        ("department", "listed", True),
        ("department", "enginering", False),
        ("project", "not-yet-a-type", True),
    ],
)
def test_a_budget_of_something_unknown_is_set_with_a_warning(
    terminal: Terminal, runs: Workflows, capsys: pytest.CaptureFixture[str], scope: str, scope_id: str, is_known: bool
) -> None:
    runs.route()
    runs.seed.agent("ada")
    runs.seed.insert("departments", tenant_id=runs.tenant, id="listed", name="Listed")
    runs.seed.insert("agent_profiles", tenant_id=runs.tenant, agent_id="profiled", department_id="engineering")
    arguments = ("budgets", "set", "x", "--cap-usd", "1", "--scope", scope, "--scope-id", scope_id, "--json")
    assert run_command_line(arguments) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["budget"]["scope_id"] == scope_id
    assert (f"No {scope} {scope_id!r} is known" in said.err) is not is_known
