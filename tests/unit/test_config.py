from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.config import Settings, jwt_claims, load_settings, settings_table
from dispatcher.errors import ConfigurationPending, SettingsError


def jwt(role: str | None) -> str:
    def part(claims: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")

    claims: dict[str, object] = {"iss": "test"} if role is None else {"iss": "test", "role": role}
    return f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}.c2lnbmF0dXJl"


KEY = jwt("service_role")
GOOD = {"SUPABASE_URL": "http://localhost:8000", "SUPABASE_SERVICE_ROLE_KEY": KEY, "GATEWAY_ID": "gw-1"}


@pytest.fixture
def load(tmp_path: Path):
    """Loads settings from the given variables, in an empty home and working directory."""

    def _load(**environ: str) -> Settings:
        return load_settings({"HOME": str(tmp_path), **environ}, cwd=tmp_path)

    return _load


def faults_of(load, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(**environ)
    assert caught.value.exit_code == 78
    return caught.value.faults


def test_defaults_are_those_of_the_specification(load, tmp_path: Path) -> None:
    settings = load(**GOOD)
    assert settings.tenant_id == UUID(int=0)
    assert settings.openclaw_home == tmp_path / ".openclaw"
    assert (settings.reconcile_interval, settings.degraded_reconcile_interval) == (120, 10)
    assert (settings.wake_cooldown, settings.max_wake_cooldown) == (30, 900)
    assert (settings.max_consecutive_failures, settings.max_concurrent_wakes) == (5, 2)
    assert (settings.agent_process_timeout, settings.stale_item_age_hours) == (300, 24)
    assert (settings.lease_seconds, settings.shutdown_grace, settings.heartbeat_interval) == (120, 20, 10)
    assert settings.realtime_mode == "auto"
    assert settings.heartbeat_file is None
    assert settings.metrics_port is None
    assert settings.agent_env_passthrough == ()


def test_numbers_that_go_to_sql_are_whole(load) -> None:
    settings = load(**GOOD, WAKE_COOLDOWN="7", LEASE_SECONDS="60")
    assert json.dumps([settings.wake_cooldown, settings.lease_seconds]) == "[7, 60]"


def test_every_fault_is_named_at_once_with_value_and_range(load) -> None:
    faults = faults_of(
        load,
        SUPABASE_URL="ftp://x",
        WAKE_COOLDOWN="-1",
        RECONCILE_INTERVAL="soon",
        MAX_CONCURRENT_WAKES="2.5",
        WAIT_FOR_CONFIG="maybe",
        REALTIME_MODE="radio",
        LOG_LEVEL="loud",
        METRICS_PORT="70000",
        TENANT_ID="7",
        AGENT_ENV_PASSTHROUGH="GOOD,not-good",
    )
    named = {fault.split("=")[0].split(":")[0] for fault in faults}
    assert named == {
        *("SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY", "GATEWAY_ID", "WAKE_COOLDOWN", "RECONCILE_INTERVAL"),
        *("MAX_CONCURRENT_WAKES", "WAIT_FOR_CONFIG", "REALTIME_MODE", "LOG_LEVEL", "METRICS_PORT"),
        *("TENANT_ID", "AGENT_ENV_PASSTHROUGH"),
    }
    assert all("allowed: " in fault for fault in faults)
    (cooldown,) = [fault for fault in faults if fault.startswith("WAKE_COOLDOWN")]
    assert cooldown.startswith("WAKE_COOLDOWN=-1: ")
    assert cooldown.endswith("allowed: 0 to 86400, whole")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e3", "0x10", "1_000", "٣", "", " "])
def test_only_plain_numbers_are_numbers(load, value: str) -> None:
    if value.strip():
        assert len(faults_of(load, **GOOD, SHUTDOWN_GRACE=value, WAKE_COOLDOWN=value)) == 2
    else:
        assert load(**GOOD, SHUTDOWN_GRACE=value, WAKE_COOLDOWN=value).wake_cooldown == 30


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("1", True), ("YES", True), ("off", False), ("0", False)]
)
def test_booleans_are_strict(load, value: str, expected: bool) -> None:
    assert load(**GOOD, WAIT_FOR_CONFIG=value).wait_for_config is expected


@pytest.mark.parametrize("value", ["2", "y", "t", "truee", "none"])
def test_what_is_no_boolean_is_a_fault(load, value: str) -> None:
    assert faults_of(load, **GOOD, WAIT_FOR_CONFIG=value)


@pytest.mark.parametrize(
    ("given_url", "kept"),
    [
        ("https://abc.supabase.co", "https://abc.supabase.co"),
        ("https://abc.supabase.co/", "https://abc.supabase.co"),
        (" http://127.0.0.1:54321\n", "http://127.0.0.1:54321"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_project_urls(load, given_url: str, kept: str) -> None:
    assert load(**{**GOOD, "SUPABASE_URL": given_url}).supabase_url == kept


@pytest.mark.parametrize(
    "url",
    [
        "abc.supabase.co",
        "https://",
        "https://a.co/rest/v1",
        "https://a.co?x=1",
        "https://u:p@a.co",
        "http://a b",
        "http://a:99999",
        "file:///etc",
    ],
)
def test_what_is_no_project_url_is_a_fault(load, url: str) -> None:
    (fault,) = faults_of(load, **{**GOOD, "SUPABASE_URL": url})
    assert fault.startswith("SUPABASE_URL=")
    assert "u:p@" not in fault


def test_a_new_style_key_is_accepted(load) -> None:
    assert load(**{**GOOD, "SUPABASE_SERVICE_ROLE_KEY": "sb_secret_abcdefgh1234"}).gateway_id == "gw-1"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (jwt("anon"), "anon key"),
        (jwt("authenticated"), "authenticated"),
        (jwt(None), "no known role"),
        ("sb_publishable_abcdefgh1234", "publishable"),
        ("sb_secret_x1", "neither"),
        ("hello", "neither"),
        ("a.b.c", "neither"),
        (KEY + " x", "characters"),
    ],
)
def test_a_wrong_key_is_a_fault_that_says_which_it_is_and_never_shows_it(load, key: str, says: str) -> None:
    (fault,) = faults_of(load, **{**GOOD, "SUPABASE_SERVICE_ROLE_KEY": key})
    assert says in fault
    assert key not in fault
    assert fault.startswith("SUPABASE_SERVICE_ROLE_KEY=(hidden)")


@pytest.mark.parametrize("name", ["GATEWAY_ID", "OPENCLAW_BIN", "METRICS_HOST"])
@pytest.mark.parametrize("key", [KEY, "sb_secret_abcdefgh1234"])
def test_a_key_in_the_place_of_a_name_is_a_fault_that_does_not_show_it(load, name: str, key: str) -> None:
    """What is shown in errors and by `check` must not be a key that was pasted into the wrong line."""
    [fault] = faults_of(load, **{**GOOD, name: key})
    assert fault.startswith(f"{name}=(hidden): this is a key")
    assert key not in fault


def test_the_key_is_not_in_what_settings_print(load) -> None:
    settings = load(**GOOD)
    assert KEY not in repr(settings)
    assert KEY not in str(settings.model_dump())
    assert settings.secret_values() == (KEY,)


def test_environment_beats_dotenv_beats_gateway_env(tmp_path: Path) -> None:
    secrets = tmp_path / ".openclaw" / "secrets"
    secrets.mkdir(parents=True)
    (secrets / "gateway.env").write_text(
        "\ufeff# written by the installer\n"
        'export SUPABASE_URL="http://from-gateway" # the url\n'
        f"SUPABASE_SERVICE_ROLE_KEY='{KEY}'\n"
        "GATEWAY_ID=from-gateway\nWAKE_COOLDOWN=1\nMAX_WAKE_COOLDOWN=3\n"
    )
    (tmp_path / ".env").write_text("WAKE_COOLDOWN=2\nRECONCILE_INTERVAL=7\nMAX_WAKE_COOLDOWN=\n")
    (secrets / "gateway.env").chmod(0o600)
    environ = {"HOME": str(tmp_path), "GATEWAY_ID": "default", "RECONCILE_INTERVAL": "5"}
    settings = load_settings(environ, cwd=tmp_path)
    assert settings.supabase_url == "http://from-gateway"
    assert settings.reconcile_interval == 5
    assert settings.wake_cooldown == 2
    assert settings.max_wake_cooldown == 3
    assert settings.gateway_id == "from-gateway"
    assert settings.supabase_service_role_key.get_secret_value() == KEY


def test_y8_default_is_the_gateway_of_that_name_where_no_file_names_another(tmp_path: Path) -> None:
    assert load_settings({**GOOD, "HOME": str(tmp_path), "GATEWAY_ID": "default"}, cwd=tmp_path).gateway_id == "default"


def test_a_dollar_in_a_value_is_a_dollar(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GATEWAY_ID=a${HOME}b\n")
    assert load_settings({**GOOD, "HOME": "/x", "GATEWAY_ID": ""}, cwd=tmp_path).gateway_id == "a${HOME}b"


@pytest.mark.parametrize("place", ["secrets", ".openclaw/secrets"])
def test_openclaw_home_may_be_the_home_or_the_state_directory(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "gateway.env").write_text("GATEWAY_ID=found\n")
    environ = {**GOOD, "GATEWAY_ID": "", "OPENCLAW_HOME": str(tmp_path)}
    assert load_settings(environ, cwd=tmp_path).gateway_id == "found"


def test_files_that_cannot_be_read_are_faults(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({**GOOD, "HOME": str(tmp_path)}, cwd=tmp_path)
    assert caught.value.faults == [f"{tmp_path / '.env'}: cannot be read (not UTF-8 text)"]


def test_s19_a_pipe_of_authorities_is_not_waited_for(load, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ca.pem")
    [fault] = faults_of(load, **GOOD, SUPABASE_CA_FILE=str(tmp_path / "ca.pem"))
    assert "cannot be read (no regular file)" in fault


def test_missing_configuration_is_waited_for_only_when_asked_to_and_nothing_else_is_wrong(load) -> None:
    with pytest.raises(ConfigurationPending) as pending:
        load(WAIT_FOR_CONFIG="true", SUPABASE_URL="http://x")
    assert len(pending.value.faults) == 2
    for environ in ({}, {"WAIT_FOR_CONFIG": "false"}, {"WAIT_FOR_CONFIG": "true", "WAKE_COOLDOWN": "x"}):
        with pytest.raises(SettingsError) as caught:
            load(**environ)
        assert not isinstance(caught.value, ConfigurationPending)


def test_intervals_that_would_lose_instances_or_leases_are_faults(load) -> None:
    faults = faults_of(load, **GOOD, HEARTBEAT_INTERVAL="100")
    assert [fault.split("=")[0] for fault in faults] == ["INSTANCE_TIMEOUT", "LEASE_SECONDS"]


def test_paths_are_absolute_and_know_the_home(load, tmp_path: Path) -> None:
    settings = load(**GOOD, AGENT_OUTPUT_DIR="~/out", OPENCLAW_HOME="~", OPENCLAW_BIN="~/bin/openclaw")
    assert settings.agent_output_dir == tmp_path / "out"
    assert settings.openclaw_home == tmp_path
    assert settings.openclaw_bin == str(tmp_path / "bin/openclaw")


def test_lists_are_comma_separated(load) -> None:
    assert load(**GOOD, AGENT_ENV_PASSTHROUGH=" A, B_2,,C ").agent_env_passthrough == ("A", "B_2", "C")


def test_the_table_documents_every_setting(load) -> None:
    rows = settings_table()
    assert [row.name.lower() for row in rows] == list(Settings.model_fields)
    assert all(row.allowed and row.meaning for row in rows)
    assert {row.name for row in rows if row.required} == {
        "SUPABASE_URL",
        "SUPABASE_SERVICE_ROLE_KEY",
        "GATEWAY_ID",
    }
    by_name = {row.name: row for row in rows}
    assert (by_name["WAKE_COOLDOWN"].default, by_name["WAKE_COOLDOWN"].unit) == ("30", "s")
    assert by_name["SUPABASE_SERVICE_ROLE_KEY"].secret


@given(st.dictionaries(st.sampled_from([row.name for row in settings_table()]), st.text(max_size=40)))
def test_whatever_is_set_the_answer_is_settings_or_faults(environ: dict[str, str]) -> None:
    faults: list[str] = []
    settings = None
    try:
        settings = load_settings({"HOME": "/nonexistent", **environ}, cwd=Path("/nonexistent"))
    except SettingsError as error:
        faults = error.faults
    assert (settings is None) == bool(faults)
    assert all(fault.isprintable() for fault in faults)


@given(st.text(max_size=200))
def test_any_text_can_be_asked_for_claims(text: str) -> None:
    assert jwt_claims(text) is None or isinstance(jwt_claims(text), dict)
