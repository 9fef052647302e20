"""The agent's commands taken apart: settings, token file, what is sent, and what they may ask of Python."""

import ast
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.text import printable

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FILES = sorted(SCRIPTS.glob("hq_*.py"))
COMMANDS = ["hq_inbox_process", "hq_inbox_done", "hq_inbox_fail", "hq_escalate", "hq_inbox_post"]
ZERO = "00000000-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The shared pieces, imported as the commands import them: from their own folder."""
    sys.path.insert(0, str(SCRIPTS))
    names = ["hq_settings", "hq_network", "hq_client", "hq_lease_book", "hq_command"]
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name in names:
            sys.modules.pop(name, None)


# ---------------------------------------- what they are made of


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_script_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_script_needs_the_standard_library_and_its_siblings_only(path: Path) -> None:
    siblings = {file.stem for file in FILES}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in siblings | set(sys.stdlib_module_names), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_union_written_with_a_bar_is_never_evaluated(path: Path) -> None:
    """Python 3.9 takes `X | None` in annotations that stay text, and nowhere else."""
    source = path.read_text(encoding="utf-8")
    assert "from __future__ import annotations" in source
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            assert not [part for part in ast.walk(node.value) if isinstance(part, ast.BitOr)]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_skill_tells_of_every_command(name: str) -> None:
    assert f"skills/hq/scripts/{name}.py" in (SCRIPTS / "SKILL.md").read_text(encoding="utf-8")


# ---------------------------------------- settings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("  export A = 1 ", {"A": "1"}),
        ("A=one # two", {"A": "one"}),
        ("A=one#two", {"A": "one#two"}),
        ("A=#two", {"A": ""}),
        ("A='one # two' # three", {"A": "one # two"}),
        ('A="one\\n\\"two\\""', {"A": 'one\n"two"'}),
        ("A='it\\n'", {"A": "it\\n"}),
        ('A="unclosed', {"A": '"unclosed'}),
        ("A=", {"A": ""}),
        ("A=x=y", {"A": "x=y"}),
        ("# A=1", {}),
        ("A", {}),
        ("1A=1", {}),
        ("\ufeffA=1\r", {"A": "1"}),
        ("A=1\r\nB=2\r\nA=3", {"A": "3", "B": "2"}),
    ],
)
def test_a_dotenv_file_is_read(
    modules: dict[str, ModuleType], tmp_path: Path, line: str, expected: dict[str, str]
) -> None:
    path = tmp_path / "gateway.env"
    path.write_bytes(line.encode())
    assert modules["hq_settings"].read_env_file(path) == expected


@given(st.binary(max_size=300))
def test_no_dotenv_file_is_too_strange(modules: dict[str, ModuleType], content: bytes) -> None:
    settings = modules["hq_settings"]
    lines = content.decode("utf-8", "replace").splitlines()
    for match in filter(None, map(settings.ASSIGNMENT.match, lines)):
        assert isinstance(settings.unquote(match.group(2)), str)


def test_an_unreadable_file_says_nothing(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    assert modules["hq_settings"].read_env_file(tmp_path) == {}
    assert modules["hq_settings"].read_env_file(tmp_path / "absent") == {}


def test_a_slug_cannot_name_a_file_elsewhere(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    secret_files = modules["hq_settings"].secret_files
    for slug in ("../../etc/x", "..", ".hidden", "a/b", "a\\b", "a\x00b"):
        assert [path.name for path in secret_files([tmp_path], tmp_path, slug)] == ["gateway.env"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "missing SUPABASE_URL and SUPABASE_SERVICE_ROLE_KEY"),
        ({"SUPABASE_URL": "http://h"}, "missing SUPABASE_SERVICE_ROLE_KEY"),
        ({"SUPABASE_URL": "ftp://h", "SUPABASE_SERVICE_ROLE_KEY": "k"}, "SUPABASE_URL must begin"),
        ({"SUPABASE_URL": "http://", "SUPABASE_SERVICE_ROLE_KEY": "k"}, "SUPABASE_URL must begin"),
        ({"SUPABASE_URL": "http://h", "SUPABASE_SERVICE_ROLE_KEY": "a b"}, "SUPABASE_SERVICE_ROLE_KEY holds"),
        ({"TENANT_ID": "7"}, "TENANT_ID must be a uuid"),
        ({"HQ_CALL_TIMEOUT": "soon"}, "HQ_CALL_TIMEOUT must be"),
        ({"HQ_CALL_TIMEOUT": "nan"}, "HQ_CALL_TIMEOUT must be"),
    ],
)
def test_a_fault_is_named(modules: dict[str, ModuleType], values: dict[str, str], words: str) -> None:
    assert any(words in fault for fault in modules["hq_settings"].find_faults("ada", values))


def test_the_key_is_in_no_text_form(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    environ = {"SUPABASE_URL": "http://h", "SUPABASE_SERVICE_ROLE_KEY": "KEY-123", "HOME": str(tmp_path)}
    assert "KEY-123" not in repr(modules["hq_settings"].load_settings(environ | {"AGENT_SLUG": "ada"}))


# ---------------------------------------- the token file


def test_the_newest_200_tokens_are_kept(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    book = modules["hq_lease_book"].LeaseBook((tmp_path,), "ada")
    for number in range(70):
        book.remember({f"item-{number}-{part}": f"token-{number}" for part in range(3)})
    assert book.token("item-0-0") is None
    assert book.token("item-69-2") == "token-69"
    assert len(json.loads((tmp_path / "leases-ada.json").read_text())["leases"]) == 200


def test_c25_a_lease_belongs_to_the_wake_it_was_taken_in(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    books = {wake: modules["hq_lease_book"].LeaseBook((tmp_path,), "ada", wake) for wake in ("w1", "w2", "w3", None)}
    books["w1"].remember({"item": "first"})
    books["w2"].remember({"item": "second"})
    assert [books[wake].token("item") for wake in ("w1", "w2", "w3", None)] == ["first", "second", None, None]
    books["w2"].remember({"item": "third"})
    assert (books["w1"].token("item"), books["w2"].token("item")) == ("first", "third")


def test_c25_without_a_wake_an_open_lease_before_another_makes_both_need_their_token(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    book = modules["hq_lease_book"].LeaseBook((tmp_path / "a", tmp_path / "b"), "ada")
    book.remember({"item": "first"})
    assert (book.token("item"), book.is_shared("item")) == ("first", False)
    book.remember({"item": "second"})
    assert (book.token("item"), book.is_shared("item")) == (None, True)
    book.close("second")
    assert book.token("item") is None
    book.close("first")
    assert (book.token("item"), book.is_shared("item")) == ("second", False)
    book.remember({"item": "third"})
    assert book.token("item") == "third"
    book.forget("third")
    assert book.token("item") == "second"


def test_damaged_notes_are_left_out(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = [{"item": "a", "token": "t", "wake": 7}, {"item": 1, "token": "t"}, {"item": "b"}, None, "x"]
    (tmp_path / "leases-ada.json").write_text(json.dumps({"leases": rows}))
    book = modules["hq_lease_book"].LeaseBook((tmp_path,), "ada")
    assert (book.token("a"), book.token("b")) == ("t", None)


def test_s19_notes_that_are_a_pipe_or_endless_are_left_out(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    for name in ("pipe", "large"):
        assert modules["hq_lease_book"].read_leases(tmp_path / name) == []


def test_a_folder_that_cannot_be_written_is_passed_over(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    lease_book = modules["hq_lease_book"]
    book = lease_book.LeaseBook((tmp_path / "file" / "below", tmp_path / "good"), "ada")
    book.remember({"item": "token"})
    assert book.token("item") == "token"
    with pytest.raises(OSError, match="file"):
        lease_book.LeaseBook((tmp_path / "file" / "below",), "ada").remember({"item": "token"})


@given(st.text(max_size=80), st.text(max_size=80))
def test_every_slug_has_a_file_name_of_its_own(modules: dict[str, ModuleType], one: str, other: str) -> None:
    file_part = modules["hq_lease_book"].file_part
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", file_part(one))
    assert (file_part(one) == file_part(other)) == (one == other)


def test_a_write_cut_short_leaves_the_file_as_it_was(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_book = modules["hq_lease_book"]
    book = lease_book.LeaseBook((tmp_path,), "ada")
    book.remember({"item": "token"})

    def refuse(_self: Path, _target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(lease_book.Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        book.remember({"other": "token"})
    assert book.token("item") == "token"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["leases-ada.json", "leases-ada.lock"]


# ---------------------------------------- what is printed

STEERING = "a\x1b[2J\t\x7f\x9b\u061c\u200e\u202e\u2066\u2028\u2029\udc9b"


def test_s16_documents_keep_their_letters_and_steer_nothing(
    modules: dict[str, ModuleType], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    document = {"summary": f"{STEERING} ü 漢", STEERING: [STEERING]}
    modules["hq_command"].emit(document)
    printed = capfdbinary.readouterr().out.decode("utf-8")
    assert printed.count("ü 漢") == 1
    assert all(line.isprintable() for line in printed.split("\n"))
    assert json.loads(printed) == document


@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=50))
def test_s16_no_text_steers(modules: dict[str, ModuleType], text: str) -> None:
    shown = modules["hq_command"].steerless(text)
    assert printable(shown.replace("\n", "")) == shown.replace("\n", "")


# ---------------------------------------- what is sent


TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=50)
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(JSON_LIKE)
def test_ff26_whatever_is_sent_is_json_a_database_takes(modules: dict[str, ModuleType], value: Any) -> None:
    text = json.dumps(modules["hq_client"].clean(value), allow_nan=False)
    assert "\\u0000" not in text.replace("\\\\", "")
    json.loads(text)
    json.dumps(modules["hq_client"].clean(value), ensure_ascii=False).encode("utf-8")


def test_ff26_text_is_cleaned_and_numbers_nobody_knows_are_null(modules: dict[str, ModuleType]) -> None:
    clean = modules["hq_client"].clean
    assert clean("ok\x00\ud800 \U0001f600") == "ok\ufffd \U0001f600"
    assert clean({"a": math.nan, "b": [math.inf, -math.inf, 1.5]}) == {"a": None, "b": [None, None, 1.5]}
