"""`dispatcher local up` as a user meets it: one line when ready, nothing left afterwards, however it ends."""

import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from dispatcher.local.postgrest_binary import postgrest_binary
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "dispatcher", "local", "up", "--json")
READY_SECONDS = 60.0


class Up:
    """One run of the command."""

    def __init__(self, directory: Path, *options: str, command: tuple[str, ...] = COMMAND, **popen: Any) -> None:
        self.directory = directory
        self.output = Path(tempfile.mkdtemp()) / "stdout"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--dir", str(directory), *options],
                stdout=output,
                stderr=subprocess.PIPE,
                cwd=popen.pop("cwd", ROOT),
                **popen,
            )
        self.errors = ""

    def ready(self) -> dict[str, str]:
        """What it printed, once it did."""
        wait_until(lambda: self.output.read_text().endswith("\n") or self.ended(), READY_SECONDS)
        assert not self.ended(), self.finish()
        [line] = self.output.read_text().splitlines()
        answer: dict[str, str] = json.loads(line)
        return answer

    def ended(self) -> bool:
        return self.process.poll() is not None

    def family(self) -> list[psutil.Process]:
        """The command and everything it started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.finish()

    def finish(self) -> int:
        _, errors = self.process.communicate(timeout=30)
        self.errors = errors.decode()
        return self.process.returncode


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(family: list[psutil.Process]) -> bool:
    return all(map(is_gone, family))


@pytest.fixture(scope="module")
def used_before() -> Iterator[Path]:
    """A directory after a first run: most tests need not wait for one of their own."""
    with reachable_place() as place:
        run = Up(place / "stack")
        run.ready()
        run.end(signal.SIGTERM)
        shutil.rmtree(run.output.parent)
        yield place / "stack"


@pytest.fixture
def fresh() -> Iterator[Path]:
    """A directory that is not there yet."""
    with reachable_place() as place:
        yield place / "stack"


@pytest.fixture
def directory(fresh: Path, used_before: Path) -> Path:
    subprocess.run(["cp", "-a", used_before, fresh], check=True)
    return fresh


@contextmanager
def reachable_place() -> Iterator[Path]:
    """A place that every account can reach, unlike pytest's own."""
    place = Path(tempfile.mkdtemp(prefix="local-up-"))
    place.chmod(0o755)
    try:
        yield place
    finally:
        for link in place.glob("*/postgres"):
            if link.is_symlink():
                shutil.rmtree(link.resolve().parent)
        shutil.rmtree(place)


@pytest.fixture
def up(fresh: Path) -> Iterator[Callable[..., Up]]:
    runs: list[Up] = []

    def start(*options: str, **popen: Any) -> Up:
        runs.append(Up(fresh, *options, **popen))
        return runs[-1]

    yield start
    for run in runs:
        if not run.ended():
            run.end(signal.SIGTERM)
        shutil.rmtree(run.output.parent)


def agents(info: dict[str, str]) -> list[str]:
    answer = httpx.get(
        f"{info['api_url']}/rest/v1/agents",
        params={"select": "slug", "order": "slug"},
        headers={"apikey": info["service_role_key"]},
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return [row["slug"] for row in answer.json()]


def test_a_first_run_prints_one_line_and_serves_what_it_says(up: Callable[..., Up], fresh: Path) -> None:
    info = up().ready()
    assert list(info) == ["api_url", "db_url", "anon_key", "service_role_key", "functions_url"]
    assert agents(info) == ["ada", "grace"]
    with psycopg.connect(info["db_url"]) as connection:
        rows = connection.execute("select w.slug, g.slug from workspace w, gateways g").fetchall()
    assert rows == [("hq", "local")]
    state = json.loads((fresh / "stack.json").read_text())
    assert info.items() <= state.items()
    assert agents(info | {"service_role_key": state["secret_key"]}) == ["ada", "grace"]


def test_nobody_else_can_read_the_secrets(up: Callable[..., Up], directory: Path) -> None:
    up().ready()
    for name in ("keys.json", "stack.json", "postgres.log", "postgrest.log"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
    assert stat.S_IMODE((directory / "postgres").stat().st_mode) == 0o700


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("directory")
def test_a_signal_ends_it_well_and_all_of_it(up: Callable[..., Up], number: signal.Signals) -> None:
    run = up()
    run.ready()
    family = run.family()
    assert len(family) > 3
    assert run.end(number) == 0, run.errors
    assert all_gone(family)
    assert run.errors == ""


@pytest.mark.usefixtures("directory")
def test_a_second_start_is_quick_and_finds_keys_ports_and_rows_again(up: Callable[..., Up]) -> None:
    first = up()
    before = first.ready()
    with psycopg.connect(before["db_url"], autocommit=True) as connection:
        connection.execute("insert into agents (slug, name) values ('zoe', 'Zoe')")
    first.end(signal.SIGTERM)
    begin = time.monotonic()
    after = up().ready()
    assert time.monotonic() - begin < 10
    assert after == before
    assert agents(after) == ["ada", "grace", "zoe"]


@pytest.mark.usefixtures("directory")
def test_after_a_kill_nothing_is_left_and_the_next_start_recovers(up: Callable[..., Up]) -> None:
    first = up()
    info = first.ready()
    with psycopg.connect(info["db_url"], autocommit=True) as connection:
        connection.execute("insert into agents (slug, name) values ('zoe', 'Zoe')")
    family = first.family()
    first.end(signal.SIGKILL)
    wait_until(lambda: all_gone(family), 10, what="children of the killed command")
    second = up()
    assert agents(second.ready()) == ["ada", "grace", "zoe"]
    assert second.end(signal.SIGTERM) == 0


def test_a_kill_while_it_starts_leaves_nothing_and_spoils_nothing(up: Callable[..., Up]) -> None:
    first = up()
    family: list[psutil.Process] = wait_until(lambda: (found := first.family())[1:] and found)
    first.end(signal.SIGKILL)
    wait_until(lambda: all_gone(family), 10)
    assert agents(up().ready()) == ["ada", "grace"]


def test_a_directory_in_use_is_refused_by_name(up: Callable[..., Up], directory: Path) -> None:
    first = up()
    info = first.ready()
    second = up()
    assert second.finish() == 1
    assert f"{directory} is in use by process {first.process.pid} ({info['api_url']})" in second.errors
    assert agents(info) == ["ada", "grace"]


@pytest.mark.usefixtures("directory")
def test_a_named_port_is_taken_or_refused(up: Callable[..., Up]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = up("--port", str(port))
        assert refused.finish() == 1
        assert f"port {port} of 127.0.0.1 cannot be used" in refused.errors
    assert up("--port", str(port)).ready()["api_url"] == f"http://127.0.0.1:{port}"


def test_no_seed_leaves_the_tables_empty(up: Callable[..., Up]) -> None:
    assert agents(up("--no-seed").ready()) == []


@pytest.mark.parametrize("name", ["postgres", "postgrest"])
@pytest.mark.usefixtures("directory")
def test_a_part_that_dies_ends_the_command_with_its_name(up: Callable[..., Up], name: str) -> None:
    run = up()
    run.ready()
    family = run.family()
    part = next(process for process in family if process.name() == name)
    part.kill()
    assert run.finish() == 1
    assert {"postgres": "PostgreSQL ended", "postgrest": "PostgREST ended"}[name] in run.errors
    wait_until(lambda: all_gone(family), 10)


def test_without_json_people_get_a_table(directory: Path, up: Callable[..., Up]) -> None:
    command = COMMAND[:-1]
    run = up(command=command)
    wait_until(lambda: "Ready." in run.output.read_text(), READY_SECONDS)
    state = json.loads((directory / "stack.json").read_text())
    assert state["service_role_key"] in run.output.read_text()
    assert str(directory) in run.output.read_text()


@pytest.mark.usefixtures("directory")
def test_what_the_operator_set_for_postgres_does_not_reach_it(up: Callable[..., Up]) -> None:
    environment = os.environ | {"PGPORT": "1", "PGDATA": "/nowhere", "PGUSER": "nobody", "PGHOST": "/nowhere"}
    assert agents(up(env=environment).ready()) == ["ada", "grace"]


def interpreter_for(account: pwd.struct_passwd) -> str:
    """A Python of our version that another account can run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            ran = subprocess.run([candidate, "-c", ""], user=account.pw_uid, group=account.pw_gid, check=False)
        except OSError:
            continue
        if ran.returncode == 0:
            return candidate
    pytest.skip(f"no {version} here that {account.pw_name} could run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else; then all other tests show this")
def test_an_ordinary_user_runs_it_as_well(up: Callable[..., Up], fresh: Path) -> None:
    account = pwd.getpwnam("nobody")
    interpreter = interpreter_for(account)
    home = fresh.parent / "home"
    shutil.copytree(ROOT / "dispatcher", home / "dispatcher", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "supabase", home / "supabase")
    cache = home / "cache" / postgrest_binary().parent.name
    cache.mkdir(parents=True)
    shutil.copy(postgrest_binary(), cache / "postgrest")
    fresh.mkdir()
    os.chown(fresh, account.pw_uid, account.pw_gid)
    libraries = Path(psycopg.__file__).parents[1]
    run = up(
        command=(interpreter, *COMMAND[1:]),
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        cwd=home,
        env={
            "PATH": os.defpath,
            "PYTHONPATH": os.pathsep.join([str(home), str(libraries)]),
            "DISPATCHER_CACHE_DIR": str(home / "cache"),
        },
    )
    info = run.ready()
    assert agents(info) == ["ada", "grace"]
    family = run.family()
    assert {process.uids().effective for process in family} == {account.pw_uid}
    assert not (fresh / "postgres").is_symlink()
    assert run.end(signal.SIGTERM) == 0
    assert all_gone(family)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands its data to another account")
def test_root_finds_a_place_for_data_below_a_private_directory(up: Callable[..., Up], fresh: Path) -> None:
    fresh.parent.chmod(0o700)
    first = up()
    before = first.ready()
    data = (fresh / "postgres").resolve()
    assert data.parent.parent == Path("/var/tmp")
    first.end(signal.SIGTERM)
    assert up().ready() == before
    assert (fresh / "postgres").resolve() == data


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands its data to another account")
def test_root_moves_data_that_has_become_unreachable(up: Callable[..., Up], directory: Path) -> None:
    directory.parent.chmod(0o700)
    assert agents(up().ready()) == ["ada", "grace"]
    assert (directory / "postgres").is_symlink()
