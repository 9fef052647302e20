"""The repository keeps the promises that stand outside the code: commands, imports, container."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = ("scripts/demo", "scripts/test", "scripts/check", "scripts/bootstrap", ".ci/run")


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


# ---------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("name", COMMANDS)
def test_command_can_be_run_and_parsed(name: str) -> None:
    assert os.access(REPOSITORY / name, os.X_OK)
    assert run("bash", "-n", name).returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_command_stops_at_the_first_error(name: str) -> None:
    assert "\nset -euo pipefail\n" in text_of(name)


def test_readme_names_the_two_commands() -> None:
    assert {"scripts/demo", "scripts/test"} <= set(re.findall(r"scripts/\w+", text_of("README.md")))


def test_ci_runs_the_checks_and_then_the_tests() -> None:
    steps = re.findall(r"^(?:exec )?(scripts/\w+)", text_of(".ci/run"), re.MULTILINE)
    assert steps == ["scripts/check", "scripts/test"]


def test_bootstrap_explains_an_unknown_purpose() -> None:
    result = run("scripts/bootstrap", "nonsense")
    assert result.returncode == 2
    assert "usage:" in result.stderr
    assert result.stdout == ""


def test_bootstrap_says_what_to_do_without_a_python(tmp_path: Path) -> None:
    clone = bare_clone(tmp_path)
    for tool in ("bash", "dirname"):
        (tmp_path / "bin" / tool).symlink_to(which(tool))
    result = subprocess.run(
        [which("bash"), "scripts/bootstrap", "demo"],
        cwd=clone,
        env={"PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == 1
    assert "No Python 3.11 or newer" in result.stderr


def test_bootstrap_says_what_to_do_without_venv(tmp_path: Path) -> None:
    clone = bare_clone(tmp_path)
    python = tmp_path / "bin" / "python3.14"
    python.write_text('#!/bin/sh\ncase "$*" in *"-m v"*) exit 1 ;; *--version*) echo Python 3.14 ;; esac\n')
    python.chmod(0o755)
    result = subprocess.run(
        ["scripts/bootstrap", "demo"],
        cwd=clone,
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert result.returncode == 1
    assert "apt-get install python3.14-venv" in result.stderr
    assert not (clone / ".venv").exists()


def bare_clone(tmp_path: Path) -> Path:
    """A directory with only what bootstrap reads, and an empty directory for PATH beside it."""
    clone = tmp_path / "clone"
    for name in ("scripts/bootstrap", "pyproject.toml", "requirements/local.txt"):
        target = clone / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, target)
    (tmp_path / "bin").mkdir()
    return clone


def which(tool: str) -> str:
    found = subprocess.run(["/bin/sh", "-c", f"command -v {tool}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


# ------------------------------------------------------------------------------------- who imports whom


def test_import_contracts_hold() -> None:
    result = run(str(Path(sys.executable).parent / "lint-imports"), NO_COLOR="1")
    assert result.returncode == 0, result.stdout


def test_every_part_of_the_package_has_its_place_in_the_layers() -> None:
    layers = tomllib.loads(text_of("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = set(re.findall(r"dispatcher\.(\w+)", " ".join(layers))) | {"local"}
    parts = {path.stem for path in (REPOSITORY / "dispatcher").iterdir() if is_module(path)}
    assert parts - placed == set()


def is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").exists()


# ------------------------------------------------------------------------------------------ dependencies


SETS = {"daemon": ["migrate"], "local": ["local"], "test": ["local", "dev"]}


def locked(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """By package its version and the sums of its files, as a set in `requirements/` has them."""
    text = text_of(f"requirements/{name}.txt").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = [re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; .*?)?((?:\s+--hash=sha256:[0-9a-f]{64})+)", line) for line in lines]
    assert all(pins), "a line is no version with sums"
    return {normal(pin[1]): (pin[2], frozenset(pin[3].split())) for pin in pins if pin}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", SETS)
def test_s20_every_dependency_is_locked_within_its_range(name: str) -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    extras = (row for extra in SETS[name] for row in project["optional-dependencies"][extra])
    pins = locked(name)
    for wanted in map(Requirement, (*project["dependencies"], *extras)):
        assert pins[normal(wanted.name)][0] in wanted.specifier, f"{wanted}: renew with scripts/bootstrap --renew"


@pytest.mark.parametrize("name", ["daemon", "local", "build"])
def test_s20_every_set_is_a_part_of_the_one_that_is_tested(name: str) -> None:
    assert locked(name).items() <= locked("test").items()


def test_s20_what_builds_the_package_is_locked_too() -> None:
    [needed] = tomllib.loads(text_of("pyproject.toml"))["build-system"]["requires"]
    assert needed in text_of("requirements/build.in").splitlines()
    assert locked("build")["hatchling"][0] in Requirement(needed).specifier
    assert "hatchling" in locked("local")  # without build isolation the scripts need it there


def test_s20_no_file_says_where_packages_come_from() -> None:
    for path in (REPOSITORY / "requirements").iterdir():
        assert not re.search(r"https?://|--index|--find-links|--trusted", path.read_text()), path.name


def test_s20_the_scripts_install_nothing_without_its_sum() -> None:
    text = text_of("scripts/bootstrap")
    bootstrap = text[text.index("bootstrap() {") : text.index("lock_set() {")]
    installs = [line.strip() for line in bootstrap.splitlines() if line.strip().startswith("install ")]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-deps --no-build-isolation" in line for line in installs)


# --------------------------------------------------------------------------------------------- container


def dockerfile() -> list[tuple[str, str]]:
    """Instructions with their arguments, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", text_of("Dockerfile"))
    lines = [line.strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(word.upper(), rest) for word, _, rest in (line.partition(" ") for line in lines)]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of one stage of the Dockerfile."""
    found: list[tuple[str, str]] = []
    inside = False
    for word, rest in dockerfile():
        if word == "FROM":
            inside = rest.endswith(f" AS {name}")
        elif inside:
            found.append((word, rest))
    return found


def test_s20_image_is_built_from_bases_named_by_digest() -> None:
    images = [rest.partition("=")[2] for word, rest in dockerfile() if word == "ARG" and "_IMAGE=" in rest]
    assert len(images) == 2
    assert all(re.search(r":\d+\.\d+\.\d+-[\w-]+@sha256:[0-9a-f]{64}$", image) for image in images)


def test_s20_image_installs_no_package_without_its_sum() -> None:
    runs = [rest for word, rest in stage("build") if word == "RUN"]
    installs = [part for rest in runs for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 3
    assert all("--require-hashes" in part or "--no-deps --no-index" in part for part in installs)


@pytest.mark.parametrize("name", ["runtime", "with-openclaw"])
def test_image_runs_as_an_ordinary_user(name: str) -> None:
    users = [rest for word, rest in stage(name) if word == "USER"]
    assert users[-1] == "dispatcher"


def test_image_has_an_init_a_health_check_and_the_daemon() -> None:
    runtime = dict(stage("runtime"))
    assert runtime["ENTRYPOINT"] == '["tini", "--", "dispatcher"]'
    assert runtime["CMD"] == '["run"]'
    assert runtime["HEALTHCHECK"].endswith('CMD ["dispatcher", "health"]')
    assert runtime["STOPSIGNAL"] == "SIGTERM"


def test_image_holds_no_secret() -> None:
    words = " ".join(rest for word, rest in dockerfile() if word in {"ENV", "ARG", "COPY"})
    assert not re.search(r"KEY|SECRET|TOKEN|PASSWORD|\.env", words)
    assert text_of(".dockerignore").splitlines()[1] == "*", "what is copied must be named"


def test_default_image_is_the_plain_daemon() -> None:
    assert [rest for word, rest in dockerfile() if word == "FROM"][-1] == "runtime AS dispatcher"


def test_everything_the_image_copies_is_let_through() -> None:
    allowed = {line[1:] for line in text_of(".dockerignore").splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for word, rest in stage("build") if word == "COPY"]
    assert {name.rstrip("/") for names in copied for name in names} <= allowed


# ----------------------------------------------------------------------------------------- what is in git


def tracked_files() -> list[Path]:
    listed = run("git", "ls-files", "-z").stdout.split("\0")
    return [REPOSITORY / name for name in listed if name and (REPOSITORY / name).is_file()]


def test_no_file_names_a_place_of_one_machine() -> None:
    places = ["/" + "root" + "/"]  # in pieces, so that this file does not name it
    if len(REPOSITORY.parts) > 2:  # a clone in "/src" would find every mention of a source directory
        places.append(f"{REPOSITORY}/")
    naming = [path for path in tracked_files() for place in places if place.encode() in path.read_bytes()]
    assert naming == []


def test_lines_of_sql_fit_the_width_of_the_house() -> None:
    written = [
        file
        for file in (REPOSITORY / "supabase" / "migrations").glob("*.sql")
        if not file.name.endswith(("schema_version.sql", "retired.sql"))
    ]
    assert written
    lines = [
        (file.name, number, line) for file in written for number, line in enumerate(file.read_text().splitlines(), 1)
    ]
    assert [(name, number) for name, number, line in lines if len(line) > 120] == []
