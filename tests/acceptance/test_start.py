"""A start that cannot succeed says why, what to do, and ends with the right code."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.stub import StubAgent
from dispatcher.supabase.schema_version import REVISION
from tests.acceptance.conftest import settings_for
from tests.support.api import running_api
from tests.support.daemon import PROGRAM, DaemonProcess, base_environment
from tests.support.database import Database
from tests.support.seed import Seed


def run(directory: Path, settings: Mapping[str, str], command: str = "run") -> tuple[int, str]:
    """Runs `dispatcher <command>` to its end; exit code and everything it printed."""
    home = {
        "HOME": str(directory),
        "OPENCLAW_HOME": str(directory / "oc"),
        "HEARTBEAT_FILE": str(directory / "hb.json"),
    }
    done = subprocess.run(
        [*PROGRAM, command],
        env=base_environment() | home | settings,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["run", "check"])
def test_three_bad_settings_are_named_in_one_message(
    api: Api, stub_agent: StubAgent, tmp_path: Path, command: str
) -> None:
    bad = {"WAKE_COOLDOWN": "soon", "MAX_CONCURRENT_WAKES": "0", "SUPABASE_URL": "ftp://x"}
    code, output = run(tmp_path, settings_for(api, stub_agent) | bad, command)
    assert code == 78
    assert all(name in output for name in bad)
    assert api.keys.service_role_key not in output


def test_an_unknown_gateway_names_the_known_ones(api: Api, seed: Seed, stub_agent: StubAgent, tmp_path: Path) -> None:
    seed.gateway("east"), seed.gateway("west")
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"GATEWAY_ID": "nrth"})
    assert code == 78
    assert "nrth" in output
    assert "east, west" in output


def test_a_wrong_key(api: Api, stub_agent: StubAgent, tmp_path: Path) -> None:
    head, body, signature = api.keys.service_role_key.split(".")
    wrong = f"{head}.{body}.{signature[::-1]}"
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"SUPABASE_SERVICE_ROLE_KEY": wrong})
    assert code == 78
    assert "SUPABASE_SERVICE_ROLE_KEY" in output
    assert wrong not in output


def test_the_anon_key_is_told_apart(api: Api, stub_agent: StubAgent, tmp_path: Path) -> None:
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"SUPABASE_SERVICE_ROLE_KEY": api.keys.anon_key})
    assert code == 78
    assert "anon" in output


def test_an_unreachable_url(api: Api, stub_agent: StubAgent, tmp_path: Path) -> None:
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"SUPABASE_URL": "http://127.0.0.1:9"})
    assert code == 69
    assert "http://127.0.0.1:9" in output


def test_a_missing_openclaw(api: Api, seed: Seed, stub_agent: StubAgent, tmp_path: Path) -> None:
    seed.gateway()
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"OPENCLAW_BIN": "no-such-openclaw"})
    assert code == 78
    assert "no-such-openclaw" in output
    assert "OPENCLAW_BIN" in output


def test_missing_migrations(
    empty_database: Database, project_keys: Keys, stub_agent: StubAgent, tmp_path: Path
) -> None:
    with running_api(empty_database, project_keys, tmp_path) as api:
        code, output = run(tmp_path, settings_for(api, stub_agent))
    assert code == 78
    assert "dispatcher migrate" in output


def revision_becomes(database: Database, revision: int) -> None:
    """The database says so, as one that another version has migrated."""
    source = database.value("select pg_get_functiondef('public.dispatcher_schema()'::regprocedure)")
    database.execute(source.replace(f"'revision', {REVISION},", f"'revision', {revision},"))
    database.execute("notify pgrst, 'reload schema'")


def test_c06_a_database_of_an_earlier_version_is_refused(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, tmp_path: Path
) -> None:
    seed.gateway("oslo")
    revision_becomes(database, REVISION - 1)
    code, output = run(tmp_path, settings_for(api, stub_agent))
    assert code == 78
    assert f"revision {REVISION - 1} of the dispatcher's schema, this version needs {REVISION}" in output
    assert "dispatcher migrate" in output
    assert database.value("select count(*) from dispatcher_instances") == 0


def test_c06_a_database_changed_by_hand_is_told_and_served(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, tmp_path: Path
) -> None:
    seed.agent("ada")
    database.execute("drop index agent_inbox_items_open_of")
    daemon = DaemonProcess(tmp_path / "daemon", settings_for(api, stub_agent)).ready()
    try:
        [line] = daemon.wait_for("schema.differs")
        assert "index public.agent_inbox_items.agent_inbox_items_open_of missing" in line["msg"]
        assert line["level"] == "warning"
    finally:
        assert daemon.stop() == 0


def test_a_gateway_named_in_the_gateways_own_file(api: Api, seed: Seed, stub_agent: StubAgent, tmp_path: Path) -> None:
    seed.gateway("west")
    (tmp_path / "oc" / "secrets").mkdir(parents=True)
    (tmp_path / "oc" / "secrets" / "gateway.env").write_text("# ours\nexport GATEWAY_ID='wst'\n")
    settings = settings_for(api, stub_agent) | {"GATEWAY_ID": "default"}
    code, output = run(tmp_path, settings)
    assert (code, "'wst'" in output, "west" in output) == (78, True, True)


def test_waiting_for_configuration_says_so_in_a_json_line(tmp_path: Path) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "dispatcher", "run"],
        env=base_environment() | {"WAIT_FOR_CONFIG": "true", "HOME": str(tmp_path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert waiting.stdout is not None
        line = waiting.stdout.readline()
        assert '"event": "config.waiting"' in line
        assert "SUPABASE_URL" in line
        assert waiting.poll() is None
    finally:
        waiting.terminate()
        assert waiting.wait(10) == 0
        waiting.stdout.close()


def test_the_daemon_leaves_no_trace_of_the_key(api: Api, seed: Seed, stub_agent: StubAgent, tmp_path: Path) -> None:
    """Not in argv, not in the heartbeat file, not in what health prints."""
    seed.gateway()
    code, output = run(tmp_path, settings_for(api, stub_agent) | {"LOG_LEVEL": "debug", "OPENCLAW_BIN": os.devnull})
    assert code == 78
    assert api.keys.service_role_key not in output


@pytest.mark.parametrize("command", ["run", "status"])
def test_s7_a_folder_that_names_another_project_gets_no_key(tmp_path: Path, command: str) -> None:
    (tmp_path / "oc" / "secrets").mkdir(parents=True)
    key = "sb_secret_recognisable_1234"
    (tmp_path / "oc" / "secrets" / "gateway.env").write_text(
        f"SUPABASE_URL=http://127.0.0.1:9\nSUPABASE_SERVICE_ROLE_KEY={key}\nGATEWAY_ID=gw\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        (tmp_path / ".env").write_text(f"SUPABASE_URL=http://127.0.0.1:{elsewhere.getsockname()[1]}\n")
        code, output = run(tmp_path, {}, command)
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    assert code == 78
    assert f"SUPABASE_URL is from {tmp_path}/.env" in output
    assert key not in output


def test_s7_a_key_that_others_may_read_is_told_at_the_start(
    api: Api, seed: Seed, stub_agent: StubAgent, tmp_path: Path
) -> None:
    seed.agent("ada")
    settings = settings_for(api, stub_agent)
    pair = {name: settings.pop(name) for name in ("SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY")}
    secrets = Path(settings.get("OPENCLAW_HOME", str(tmp_path / "oc"))) / "secrets"
    secrets.mkdir(parents=True)
    path = secrets / "gateway.env"
    path.write_text("".join(f"{name}={value}\n" for name, value in pair.items()))
    path.chmod(0o644)
    daemon = DaemonProcess(tmp_path / "daemon", {"OPENCLAW_HOME": str(tmp_path / "oc"), **settings}).ready()
    try:
        [line] = daemon.wait_for("config.key_exposed")
        assert (line["level"], str(path) in line["msg"]) == ("warning", True)
        assert pair["SUPABASE_SERVICE_ROLE_KEY"] not in json.dumps(daemon.lines)
    finally:
        assert daemon.stop() == 0
