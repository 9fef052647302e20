from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from dispatcher.agents.registry import (
    AgentRegistry,
    normalise_id,
    parse_agent_ids,
    resolve_id,
)
from dispatcher.errors import InvalidAgentId
from dispatcher.openclaw import config_file as module
from dispatcher.openclaw.config_file import config_candidates

VALID = re.compile(r"[a-z0-9_][a-z0-9_-]*")


@pytest.mark.parametrize(
    ("known", "workspace", "slug", "expected"),
    [
        ([], "ws", "ada", "ws/ada"),
        ([], None, "ada", "ada"),
        ([], "", "ada", "ada"),
        (["ada", "ws/ada", "ws-ada"], "ws", "ada", "ada"),
        (["other", "ws/ada"], "ws", "ada", "ws/ada"),
        (["ws-ada"], "ws", "ada", "ws-ada"),
        (["WS-Ada"], "ws", "ada", "WS-Ada"),
        (["other-ada"], "ws", "ada", "ws/ada"),
        (["other/ada"], "ws", "ada", "ws/ada"),
        (["ws"], "ws", "ada", "ws/ada"),
        (["adam", "xada"], "ws", "ada", "ws/ada"),
    ],
)
def test_which_id_an_agent_is_woken_by(known: list[str], workspace: str | None, slug: str, expected: str) -> None:
    assert resolve_id(known, workspace, slug) == expected


@pytest.mark.parametrize("slug", ["!!!", "", " ", "---", "a\nb", "a\x00", "\ud800", "/", "Ω"])
def test_a_slug_openclaw_would_turn_into_another_agent_is_refused(slug: str) -> None:
    with pytest.raises(InvalidAgentId):
        resolve_id([], None, slug)
    if slug:
        with pytest.raises(InvalidAgentId):
            resolve_id([], "ws", slug)


@pytest.mark.parametrize("slug", ["--help", "-x", "--agent=main"])
def test_a_slug_that_looks_like_an_option_never_stands_alone(slug: str) -> None:
    with pytest.raises(InvalidAgentId):
        resolve_id([], None, slug)
    assert resolve_id([], "ws", slug) == f"ws/{slug}"


def test_an_id_longer_than_openclaw_keeps_is_refused() -> None:
    with pytest.raises(InvalidAgentId):
        resolve_id([], "w" * 40, "a" * 24)
    assert resolve_id([], "w" * 40, "a" * 23)


def test_ids_in_the_file_that_are_no_ids_match_nothing() -> None:
    assert resolve_id(["--help", "!!!", "a\nda"], "ws", "help") == "ws/help"


@given(st.lists(st.text(max_size=8), max_size=5), st.none() | st.text(max_size=8), st.text(max_size=8))
def test_whatever_the_slugs_the_id_is_known_or_names_both(known: list[str], workspace: str | None, slug: str) -> None:
    try:
        agent_id = resolve_id(known, workspace, slug)
    except InvalidAgentId:
        return
    assert VALID.fullmatch(normalise_id(agent_id))
    assert not agent_id.startswith("-")
    assert agent_id.isprintable() or not re.search(r"[\x00-\x1f]", agent_id)
    assert agent_id in known or agent_id == (f"{workspace}/{slug}" if workspace else slug)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"agents": {"entries": {"a": {}, "b": {"workspace": "x"}}}}, ["a", "b"]),
        (
            {"agents": {"list": [{"id": "a"}, {"id": "b", "name": "B"}, {"name": "no id"}, "x", {"id": 5}]}},
            ["a", "b"],
        ),
        ({"agents": {"entries": {"a": {}}, "list": [{"id": "b"}]}}, ["a", "b"]),
        ({"agents": {"entries": ["a"], "list": {"b": {}}}}, []),
        ({"agents": []}, []),
        ({}, []),
        ([], []),
        (None, []),
    ],
)
def test_agents_are_found_in_both_forms_of_the_file(config: object, expected: list[str]) -> None:
    assert parse_agent_ids(config) == expected


def write(path: Path, *ids: str) -> None:
    path.write_text(json.dumps({"agents": {"entries": {agent_id: {} for agent_id in ids}}}))


def test_the_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    registry = AgentRegistry([path])
    assert registry.resolve("ws", "ada") == "ws/ada"
    assert registry.config_path() is None
    write(path, "ws-ada")
    assert registry.resolve("ws", "ada") == "ws-ada"
    assert registry.config_path() == path
    stat = path.stat()
    replacement = tmp_path / "new"
    write(replacement, "WS-ada")
    os.utime(replacement, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    replacement.rename(path)  # same size, same time: only the inode tells
    assert registry.resolve("ws", "ada") == "WS-ada"


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "openclaw.json"
    write(path, "ada")
    registry = AgentRegistry([path])
    registry.known_ids()
    monkeypatch.setattr(module, "read_regular_file", lambda *_: pytest.fail("read again"))
    assert registry.known_ids() == ("ada",)


def test_json5_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    path.write_text("// ours\n{agents: {list: [{id: 'ada', /* old */}, ], }, }\n", encoding="utf-8")
    assert AgentRegistry([path]).known_ids() == ("ada",)


def test_s19_a_large_json5_file_is_read_within_a_moment(tmp_path: Path) -> None:
    """The limit's worth of it took a minute, in which no agent was woken. A tenth of that is still too much."""
    entry = "  {{id: 'agent-{0}', workspace: '/srv/agent-{0}', models: ['a', 'b', ], /* ours */ }},\n"
    text = "// ours\n{agents: {list: [\n" + "".join(entry.format(number) for number in range(12_000)) + "]}}"
    assert 0.8 * module.MAX_CONFIG_BYTES < len(text) <= module.MAX_CONFIG_BYTES
    path = tmp_path / "openclaw.json"
    path.write_text(text)
    started = time.process_time()
    assert len(AgentRegistry([path]).known_ids()) == 12_000
    assert time.process_time() - started < 5


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "too large"])
def test_s19_what_is_no_settings_file_is_neither_waited_for_nor_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "openclaw.json"
    write(path, "ada")
    registry = AgentRegistry([path])
    registry.known_ids()
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_text("[" + " " * module.MAX_CONFIG_BYTES + "]")
    with capture_logs() as logs:
        assert [registry.known_ids() for _ in range(3)] == [("ada",)] * 3
    [warning] = logs
    reason = "larger than 1048576 bytes" if kind == "too large" else "no regular file"
    assert warning["event"] == "registry.broken"
    assert warning["msg"] == f"openclaw.json cannot be read ({reason}); keeping the agents it listed before"


def test_s19_a_link_to_the_file_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere.json", "ada")
    (tmp_path / "openclaw.json").symlink_to("elsewhere.json")
    assert AgentRegistry([tmp_path / "openclaw.json"]).known_ids() == ("ada",)


def test_s19_a_slow_read_holds_up_nobody_who_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is not done under the lock: while one thread reads, another with a newer file gets its own answer."""
    path = tmp_path / "openclaw.json"
    write(path, "ada")
    registry = AgentRegistry([path])
    is_reading, may_go_on = threading.Event(), threading.Event()
    read = module.read_regular_file

    def slow(*arguments: Any) -> Any:
        content = read(*arguments)
        if threading.current_thread() is slow_reader:
            is_reading.set()
            assert may_go_on.wait(20)
        return content

    monkeypatch.setattr(module, "read_regular_file", slow)
    slow_reader = threading.Thread(target=registry.known_ids)
    slow_reader.start()
    try:
        assert is_reading.wait(20)
        write(path, "ada", "eve")
        assert registry.known_ids() == ("ada", "eve")
    finally:
        may_go_on.set()
        slow_reader.join(20)
    assert registry.known_ids() == ("ada", "eve")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_broken_file_keeps_the_last_good_and_warns_once(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "openclaw.json"
    write(path, "ada")
    registry = AgentRegistry([path])
    registry.known_ids()
    path.write_bytes(content)
    with capture_logs() as logs:
        assert [registry.known_ids() for _ in range(3)] == [("ada",)] * 3
    assert [entry["event"] for entry in logs] == ["registry.broken"]
    write(path, "eve")
    assert registry.known_ids() == ("eve",)


def test_a_file_that_goes_keeps_the_last_good_and_warns_once(tmp_path: Path) -> None:
    path = tmp_path / "openclaw.json"
    write(path, "ada")
    registry = AgentRegistry([path])
    registry.known_ids()
    path.unlink()
    with capture_logs() as logs:
        assert [registry.known_ids() for _ in range(3)] == [("ada",)] * 3
    assert [entry["log_level"] for entry in logs] == ["warning"]


def test_where_the_file_may_be() -> None:
    home = Path("/oc")
    assert config_candidates(home, None, None) == [
        Path("/oc/openclaw.json"),
        Path("/oc/.openclaw/openclaw.json"),
    ]
    assert config_candidates(home, Path("/s"), None) == [Path("/s/openclaw.json")]
    assert config_candidates(home, Path("/s"), Path("/c.json")) == [Path("/c.json")]
