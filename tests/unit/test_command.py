from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.agents.command import (
    CUT_MARK,
    MAX_COMMAND_BYTES,
    build_argv,
    child_environment,
    command_bytes,
    option_value,
    state_environment,
)

anything = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=2)


def test_the_command_line_is_exactly_that_of_the_specification() -> None:
    assert build_argv("/bin/openclaw", "ws/ada", "[inbox] New: hello", model="m/1", thinking="high") == [
        *("/bin/openclaw", "agent", "--agent", "ws/ada"),
        *("--model", "m/1", "--thinking", "high", "--json", "--message", "[inbox] New: hello"),
    ]
    assert build_argv("openclaw", "ada", "x") == ["openclaw", "agent", "--agent", "ada", "--json", "--message", "x"]


@pytest.mark.parametrize(
    "value", [None, "", "  ", 5, True, ["a"], {"a": 1}, "--help", "-m", "a\nb", "a\x00", "x" * 201]
)
def test_unusable_overrides_are_left_out(value: object) -> None:
    assert option_value(value) is None
    assert build_argv("o", "a", "m", model=value, thinking=value) == build_argv("o", "a", "m")


@pytest.mark.parametrize("value", ["provider/model-1", "high", "a b", "ü"])
def test_usable_overrides_are_kept_as_they_are(value: str) -> None:
    assert option_value(value) == value


@given(st.text(max_size=300), anything, anything)
def test_any_command_line_can_be_handed_to_the_kernel(message: str, model: object, thinking: object) -> None:
    argv = build_argv("openclaw", "ws/ada", message, model=model, thinking=thinking)
    assert argv[:4] == ["openclaw", "agent", "--agent", "ws/ada"]
    assert argv[-2] == "--message"
    for argument in argv:
        assert b"\0" not in argument.encode()


@given(st.sampled_from(["a", "ü", "€", "🦞", "\n"]), st.integers(0, 10))
def test_a_long_message_is_cut_below_the_bound_between_characters(letter: str, more: int) -> None:
    argv = build_argv("openclaw", "ada", letter * (MAX_COMMAND_BYTES + more), model="m")
    assert MAX_COMMAND_BYTES - 8 <= command_bytes(argv) <= MAX_COMMAND_BYTES
    assert argv[-1].endswith(CUT_MARK)
    assert set(argv[-1].removesuffix(CUT_MARK)) == {letter}


def test_line_ends_and_tabs_of_the_message_stay_and_other_controls_go() -> None:
    assert build_argv("o", "a", "1\n2\t3\r\x1b[31m\x85\ud800")[-1] == "1\n2\t3[31m"


ENVIRON = {
    "PATH": "/bin",
    "HOME": "/home/x",
    "LC_ALL": "C.UTF-8",
    "XDG_RUNTIME_DIR": "/run",
    "OPENCLAW_HOME": "/oc",
    "OPENCLAW_GATEWAY_TOKEN": "token",
    "SUPABASE_URL": "http://x",
    "SUPABASE_SERVICE_ROLE_KEY": "the-service-key",
    "OPENCLAW_COPY_OF_IT": "Bearer the-service-key",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "PYTHONPATH": "/src",
    "GATEWAY_ID": "gw",
    "https_proxy": "http://proxy:3128",
    "HTTP_PROXY": "http://user:word@proxy:3128",
    "NO_PROXY": "localhost",
}


def test_the_environment_is_an_allow_list() -> None:
    child = child_environment(ENVIRON, "w-1", secrets=["the-service-key"])
    assert child == {
        "PATH": "/bin",
        "HOME": "/home/x",
        "LC_ALL": "C.UTF-8",
        "XDG_RUNTIME_DIR": "/run",
        "OPENCLAW_HOME": "/oc",
        "OPENCLAW_GATEWAY_TOKEN": "token",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "localhost",
        "OPENCLAW_NO_RESPAWN": "1",
        "DISPATCHER_WAKE_ID": "w-1",
    }


def test_what_is_named_is_passed_on_even_the_key() -> None:
    named = ("SUPABASE_SERVICE_ROLE_KEY", "HTTP_PROXY", "NOT_SET")
    child = child_environment(ENVIRON, "w-1", passthrough=named, secrets=["the-service-key"])
    assert child["SUPABASE_SERVICE_ROLE_KEY"] == "the-service-key"
    assert child["HTTP_PROXY"] == "http://user:word@proxy:3128"
    assert "NOT_SET" not in child


def test_nothing_overrides_the_marker_or_the_protection_against_a_respawn() -> None:
    environ = {"OPENCLAW_NO_RESPAWN": "0", "DISPATCHER_WAKE_ID": "of the daemon itself"}
    child = child_environment(environ, "w-1", passthrough=("DISPATCHER_WAKE_ID",))
    assert child == {"OPENCLAW_NO_RESPAWN": "1", "DISPATCHER_WAKE_ID": "w-1"}


@pytest.mark.parametrize(
    ("environ", "home", "config", "expected"),
    [
        ({"HOME": "/h"}, "/h/.openclaw", "/h/.openclaw/openclaw.json", {}),
        ({"HOME": "/h"}, "/h/.openclaw", None, {}),
        ({}, "/oc", "/oc/.openclaw/openclaw.json", {"OPENCLAW_HOME": "/oc"}),
        ({"OPENCLAW_HOME": "/oc"}, "/oc", "/oc/.openclaw/openclaw.json", {}),
        ({"OPENCLAW_HOME": "/oc"}, "/oc", "/oc/openclaw.json", {"OPENCLAW_STATE_DIR": "/oc"}),
        ({"OPENCLAW_HOME": "/oc", "OPENCLAW_STATE_DIR": "/s"}, "/oc", "/s/openclaw.json", {}),
        (
            {"OPENCLAW_HOME": "/h/.openclaw"},
            "/h/.openclaw",
            "/h/.openclaw/openclaw.json",
            {"OPENCLAW_STATE_DIR": "/h/.openclaw"},
        ),
    ],
)
def test_the_command_line_uses_the_state_whose_registry_we_read(
    environ: dict[str, str], home: str, config: str | None, expected: dict[str, str]
) -> None:
    path = Path(config) if config is not None else None
    assert state_environment(environ, Path(home), path) == expected
