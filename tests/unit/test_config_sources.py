"""S7: which place is believed in what; the same rules in the daemon's settings and in the agents' scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dispatcher.config import Settings, load_settings, not_from_folder
from dispatcher.errors import ConfigurationPending, SettingsError

KEY = "sb_secret_abcdefgh1234"
PAIR = f"SUPABASE_URL=http://ours\nSUPABASE_SERVICE_ROLE_KEY={KEY}\n"
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working directory; `home` beside it holds what is the operator's."""
    (tmp_path / "home" / ".openclaw" / "secrets").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def gateway_env(folder: Path, text: str, mode: int = 0o600) -> Path:
    return written(folder.parent / "home" / ".openclaw" / "secrets" / "gateway.env", text, mode)


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def load(folder: Path, **environ: str) -> Settings:
    return load_settings({"HOME": str(folder.parent / "home"), "GATEWAY_ID": "gw", **environ}, cwd=folder)


def faults(folder: Path, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(folder, **environ)
    assert KEY not in str(caught.value)
    return caught.value.faults


# ---------------------------------------------------------------------------------------------- URL and key


@pytest.mark.parametrize("place", ["environment", ".env", "gateway.env"])
def test_s7_url_and_key_of_one_place_are_taken(folder: Path, place: str) -> None:
    environ = {}
    if place == "environment":
        environ = {"SUPABASE_URL": "http://ours", "SUPABASE_SERVICE_ROLE_KEY": KEY}
    elif place == ".env":
        written(folder / ".env", PAIR)
    else:
        gateway_env(folder, PAIR)
    settings = load(folder, **environ)
    assert (settings.supabase_url, settings.supabase_service_role_key.get_secret_value()) == ("http://ours", KEY)


def test_s7_a_folder_does_not_send_the_gateways_key_elsewhere(folder: Path) -> None:
    secrets = gateway_env(folder, PAIR)
    foreign = written(folder / ".env", "SUPABASE_URL=http://elsewhere\n")
    [fault] = faults(folder)
    assert fault.startswith(f"SUPABASE_URL is from {foreign}, SUPABASE_SERVICE_ROLE_KEY from {secrets}: ")
    [fault] = faults(folder, SUPABASE_SERVICE_ROLE_KEY=KEY)
    assert fault.startswith(f"SUPABASE_URL is from {foreign}, SUPABASE_SERVICE_ROLE_KEY from the environment: ")


def test_s7_a_key_without_its_url_goes_nowhere(folder: Path) -> None:
    gateway_env(folder, f"SUPABASE_SERVICE_ROLE_KEY={KEY}\n")
    assert "from the environment" in faults(folder, SUPABASE_URL="http://ours")[0]


def test_s7_the_same_url_said_twice_is_no_contradiction(folder: Path) -> None:
    gateway_env(folder, PAIR)
    assert load(folder, SUPABASE_URL="http://ours/").supabase_url == "http://ours"


def test_s7_a_torn_pair_is_not_waited_for(folder: Path) -> None:
    gateway_env(folder, f"SUPABASE_SERVICE_ROLE_KEY={KEY}\n")
    with pytest.raises(SettingsError) as caught:
        load(folder, SUPABASE_URL="http://ours", WAIT_FOR_CONFIG="true")
    assert not isinstance(caught.value, ConfigurationPending)


# ---------------------------------------------------------------------------------------------- .env of a folder


def test_s7_what_a_folder_may_not_say_is_what_names_places_and_programs() -> None:
    assert not_from_folder() == {
        *("SUPABASE_CA_FILE", "SUPABASE_PROXY", "REALTIME_PROXY"),
        *("OPENCLAW_BIN", "OPENCLAW_HOME", "OPENCLAW_STATE_DIR", "OPENCLAW_CONFIG_PATH", "AGENT_ENV_PASSTHROUGH"),
        *("AGENT_OUTPUT_DIR", "HEARTBEAT_FILE", "METRICS_HOST"),
    }


@pytest.mark.parametrize("name", sorted(not_from_folder()))
def test_s7_a_folder_names_no_place_and_no_program(folder: Path, name: str) -> None:
    gateway_env(folder, PAIR)
    path = written(folder / ".env", f"{name}={folder}/there\n")
    assert [fault for fault in faults(folder) if fault.startswith(f"{name} in {path}: ")]


def test_s7_what_the_environment_says_makes_the_folder_harmless(folder: Path) -> None:
    gateway_env(folder, PAIR)
    written(folder / ".env", "OPENCLAW_BIN=./evil\nWAKE_COOLDOWN=7\n")
    settings = load(folder, OPENCLAW_BIN="/ours/openclaw")
    assert (settings.openclaw_bin, settings.wake_cooldown) == ("/ours/openclaw", 7)


def test_s7_the_gateways_file_may_name_a_program(folder: Path) -> None:
    gateway_env(folder, f"{PAIR}OPENCLAW_BIN=/ours/openclaw\n")
    assert load(folder).openclaw_bin == "/ours/openclaw"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_s7_a_folders_file_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    path = written(folder / ".env", PAIR, mode)
    assert f"{path}: can be written by other users; type: chmod go-w {path}" in faults(folder)


@as_root
@pytest.mark.parametrize("as_link", [False, True])
def test_s7_a_folders_file_of_another_user_is_refused(folder: Path, as_link: bool) -> None:
    path = folder / ".env"
    if as_link:
        path.symlink_to(written(folder / "ours", PAIR))
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    else:
        os.chown(written(path, PAIR), NOBODY, NOBODY)
    assert f"{path}: belongs to another user; remove it, or work in another folder" in faults(folder)


@pytest.mark.parametrize("place", [".env", "gateway.env"])
def test_s19_a_pipe_is_not_waited_for_and_a_large_file_not_read(folder: Path, place: str) -> None:
    path = folder / ".env" if place == ".env" else gateway_env(folder, "")
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    assert f"{path}: cannot be read (no regular file)" in faults(folder)
    path.unlink()
    written(path, "#" * 65_537)
    assert f"{path}: cannot be read (larger than 65536 bytes)" in faults(folder)


def test_a_folder_of_that_name_is_no_settings_file(folder: Path) -> None:
    gateway_env(folder, PAIR)
    (folder / ".env").mkdir()
    assert load(folder).supabase_url == "http://ours"


# ---------------------------------------------------------------------------------------------- the gateway's file


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, True), (0o644, True), (0o660, True)])
def test_s7_a_key_that_others_may_read_is_warned_of(folder: Path, mode: int, is_warned: bool) -> None:
    path = gateway_env(folder, PAIR, mode)
    warnings = load(folder).warnings
    assert bool(warnings) is is_warned
    assert all(str(path) in warning and f"{mode:04o}" in warning and KEY not in warning for warning in warnings)


def test_s7_a_file_without_a_key_may_be_read(folder: Path) -> None:
    gateway_env(folder, "GATEWAY_ID=gw\n", 0o644)
    assert load(folder, SUPABASE_URL="http://ours", SUPABASE_SERVICE_ROLE_KEY=KEY).warnings == ()


def test_s7_a_gateways_file_that_everybody_may_write_is_refused(folder: Path) -> None:
    path = gateway_env(folder, PAIR, 0o606)
    assert f"{path}: can be written by every user; type: chmod o-w {path}" in faults(folder)


@as_root
def test_s7_a_gateways_file_of_another_user_is_warned_of(folder: Path) -> None:
    os.chown(gateway_env(folder, PAIR), NOBODY, NOBODY)
    assert "belongs to user 65534" in load(folder).warnings[0]


# ---------------------------------------------------------------------------------------------- the agents' scripts


@pytest.fixture(scope="module")
def script_settings() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield __import__("hq_settings")
    finally:
        sys.path.remove(str(SCRIPTS))
        sys.modules.pop("hq_settings", None)


@pytest.fixture
def agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of agent `ada` in its workspace."""
    (folder / "agent.json").write_text("{}")
    (folder / "secrets" / "agents").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder / "secrets" / "agents" / "ada.env"


def script_fault(script_settings: ModuleType, folder: Path, **environ: str) -> str:
    with pytest.raises(script_settings.UsageError) as caught:
        script_settings.load_settings(script_environment(folder, **environ))
    assert KEY not in str(caught.value)
    return str(caught.value)


def script_environment(folder: Path, **environ: str) -> dict[str, str]:
    home = folder.parent / "home" / ".openclaw"
    return {"HOME": str(folder.parent / "home"), "OPENCLAW_HOME": str(home), "AGENT_SLUG": "ada", **environ}


def test_s7_scripts_send_a_key_only_to_the_url_beside_it(script_settings: ModuleType, agent: Path) -> None:
    folder = agent.parents[2]
    secrets = gateway_env(folder, f"SUPABASE_SERVICE_ROLE_KEY={KEY}\n")
    written(agent, "SUPABASE_URL=http://elsewhere\n")
    told = script_fault(script_settings, folder)
    assert f"SUPABASE_URL is from {agent}, SUPABASE_SERVICE_ROLE_KEY from {secrets}" in told
    assert "from the environment" in script_fault(script_settings, folder, SUPABASE_URL="http://elsewhere")
    gateway_env(folder, PAIR)
    settings = script_settings.load_settings(script_environment(folder))
    assert (settings.url, settings.key) == ("http://ours", KEY)


@pytest.mark.parametrize("name", ["SUPABASE_PROXY", "SUPABASE_CA_FILE"])
def test_s7_a_workspace_does_not_say_how_the_key_travels(script_settings: ModuleType, agent: Path, name: str) -> None:
    folder = agent.parents[2]
    gateway_env(folder, PAIR)
    written(agent, f"{name}=http://elsewhere:1\n")
    assert f"{name} in {agent} is not taken from a workspace" in script_fault(script_settings, folder)


def test_s7_scripts_refuse_files_that_others_could_have_written(script_settings: ModuleType, agent: Path) -> None:
    folder = agent.parents[2]
    path = gateway_env(folder, PAIR, 0o602)
    assert f"{path} can be written by every user" in script_fault(script_settings, folder)
    gateway_env(folder, "")
    written(agent, PAIR)
    assert script_settings.load_settings(script_environment(folder)).url == "http://ours"
    if os.geteuid() == 0:
        os.chown(agent, NOBODY, NOBODY)
        assert f"{agent} belongs to another user" in script_fault(script_settings, folder)


def test_s19_scripts_wait_for_no_pipe_and_read_no_large_file(script_settings: ModuleType, agent: Path) -> None:
    os.mkfifo(agent)
    assert script_settings.read_env_file(agent) == {}
    assert any("no regular file" in fault for fault in script_settings.network_faults(str(agent), ""))
    agent.unlink()
    written(agent, PAIR + "#" * 65_536)
    assert script_settings.read_env_file(agent) == {}
