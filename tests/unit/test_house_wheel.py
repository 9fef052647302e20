"""The wheel carries what the code asks for, and nothing of the repository's own tools."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=100)
    [wheel] = directory.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def names(directory: str, pattern: str) -> set[str]:
    return {path.name for path in (REPOSITORY / directory).glob(pattern)}


def inside(contents: set[str], directory: str) -> set[str]:
    return {name.removeprefix(directory) for name in contents if name.startswith(directory)}


def test_migrations_are_inside(contents: set[str]) -> None:
    assert inside(contents, "dispatcher/_migrations/") == names("supabase/migrations", "*.sql") != set()


def test_scripts_of_agents_are_inside_and_ours_are_not(contents: set[str]) -> None:
    wanted = names("scripts", "*.py") | names("scripts", "SKILL.md")
    assert inside(contents, "dispatcher/_scripts/") == wanted
    assert "hq_inbox_process.py" in wanted


def test_data_of_the_package_is_inside(contents: set[str]) -> None:
    assert inside(contents, "dispatcher/local/sql/") == names("dispatcher/local/sql", "*.sql") != set()
    assert "dispatcher/py.typed" in contents


def test_nothing_else_is_installed(contents: set[str]) -> None:
    assert {name.partition("/")[0] for name in contents if ".dist-info/" not in name} == {"dispatcher"}
