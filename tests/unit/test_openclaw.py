from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from dispatcher.agents.openclaw import (
    find_executable,
    installed_version,
    parse_version,
    runs_prompts_twice,
    warn_of_affected_version,
)
from dispatcher.errors import OpenclawMissing


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_name_is_looked_up_on_the_path_and_a_path_is_taken(tmp_path: Path) -> None:
    real = executable(tmp_path / "bin" / "openclaw")
    assert find_executable("openclaw", str(tmp_path / "bin")) == str(real)
    assert find_executable(str(real)) == str(real)


def test_a_missing_or_unusable_executable_is_named(tmp_path: Path) -> None:
    plain = tmp_path / "openclaw"
    plain.write_text("")
    for value, says in (
        ("openclaw", "not found on PATH"),
        (str(tmp_path / "no"), "does not exist"),
        (str(plain), "is not executable"),
    ):
        with pytest.raises(OpenclawMissing, match=says) as caught:
            find_executable(value, str(tmp_path))
        assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("openclaw 2026.9.6", (2026, 9, 6, 0)),
        ("2026.7.1-2\n", (2026, 7, 1, 2)),
        ("OpenClaw v1.2", None),
        ("", None),
    ],
)
def test_versions_are_parsed(text: str, version: tuple[int, int, int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "affected"),
    [
        ("2026.6.10", False),
        ("2026.6.11", True),
        ("2026.7.1", True),
        ("2026.7.1-2", True),
        ("2026.7.1-3", False),
        ("2026.7.2", False),
        ("2026.9.6", False),
    ],
)
def test_field_failure_32_affected_versions_are_known(text: str, affected: bool) -> None:
    version = parse_version(text)
    assert version is not None
    assert runs_prompts_twice(version) is affected


def test_the_installed_version_is_read_without_running_anything(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "node_modules" / "openclaw"
    real = executable(package / "dist" / "openclaw.mjs")
    (package / "package.json").write_text(json.dumps({"name": "openclaw", "version": "2026.7.1-2"}))
    link = tmp_path / "bin" / "openclaw"
    link.parent.mkdir()
    link.symlink_to(real)
    assert installed_version(str(link)) == (2026, 7, 1, 2)
    with capture_logs() as logs:
        assert warn_of_affected_version(str(link))
    assert [(entry["event"], entry["openclaw_version"]) for entry in logs] == [
        ("openclaw.affected_version", "2026.7.1-2")
    ]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"name": "other", "version": "2026.7.1"}'])
def test_no_package_no_version(tmp_path: Path, content: str | None) -> None:
    real = executable(tmp_path / "openclaw")
    if content is not None:
        (tmp_path / "package.json").write_text(content)
    assert installed_version(str(real)) is None
    with capture_logs() as logs:
        assert not warn_of_affected_version(str(real))
    assert logs == []
