"""The parts of the stack for chaos tests, and what a killed run leaves behind."""

import os
import pwd
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from dispatcher.cli.local import project_stack
from dispatcher.errors import DispatcherError
from dispatcher.local import account, children
from dispatcher.local import stack as stack_module
from dispatcher.local.postgres import PidFile, PostgresServer, free_port, parse_pid_file
from dispatcher.local.stack import Stack
from tests.support.waiting import wait_until

PASSWORD = "0123456789abcdef"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="is about what root starts")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = project_stack(tmp_path / "stack", durable=False)
    try:
        stack.start()
        yield stack
    finally:
        if stack.started:
            stack.postgres.destroy()
        stack.stop()


@pytest.fixture(scope="module")
def used_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A cluster for all tests here: making one takes longer than most of them."""
    server = PostgresServer(tmp_path_factory.mktemp("server"), password=PASSWORD, durable=False)
    yield server
    server.destroy()


@pytest.fixture
def server(used_before: PostgresServer) -> Iterator[PostgresServer]:
    used_before.start()
    yield used_before
    used_before.stop("immediate")


def status_of(stack: Stack) -> int:
    headers = {"apikey": stack.keys.service_role_key}
    return httpx.get(f"{stack.info.api_url}/rest/v1/agents", headers=headers, trust_env=False).status_code


def can_query(server: PostgresServer) -> bool:
    with psycopg.connect(server.url()) as connection:
        return connection.execute("select 1").fetchone() == (1,)


def test_parts_stop_and_start_again_on_their_ports(stack: Stack) -> None:
    ports = (stack.api.rest.port, stack.postgres.port)
    assert status_of(stack) == 200
    stack.stop_rest()
    assert status_of(stack) == 502
    stack.start_rest()
    assert status_of(stack) == 200
    stack.stop_postgres("immediate")
    # PostgREST says 400 where it takes the server's end for the call's own fault; `rest_errors` knows that, too.
    assert status_of(stack) in {400, 500, 503}
    stack.start_postgres()
    wait_until(lambda: status_of(stack) == 200, 40, poll=0.05)
    assert (stack.api.rest.port, stack.postgres.port) == ports


def test_a_stop_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    stack = project_stack(tmp_path / "stack", durable=False)
    before = set(psutil.Process().children(recursive=True))  # the cluster of other tests in this process
    with stack:
        family = set(psutil.Process().children(recursive=True)) - before
        postgres = stack.postgres
    assert family
    assert not [process for process in family if process.is_running()]
    assert "local-gateway" not in {thread.name for thread in threading.enumerate()}
    postgres.destroy()


def test_a_failed_preparation_leaves_nothing_running(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("no luck")

    stack = Stack(tmp_path / "stack", prepare=fail, durable=False)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(RuntimeError, match="no luck"):
        stack.start()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    account.remove_data(tmp_path / "stack" / "postgres")


def test_an_occupied_port_is_passed_over(server: PostgresServer) -> None:
    server.stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", server.port))
        taken.listen()
        occupied = server.port
        server.start()
        assert server.port != occupied
        assert can_query(server)


def test_a_port_lost_in_the_last_moment_is_passed_over(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections still rest on it
        taken.bind(("127.0.0.1", server.port))
        taken.listen()
        monkeypatch.setattr("dispatcher.local.postgres.is_port_free", lambda _: True)
        server.start()
        assert can_query(server)


def test_a_server_left_by_a_killed_run_is_ended_by_the_next(server: PostgresServer) -> None:
    leftover = server.process
    assert leftover is not None
    server.process = None  # as if we were another run
    server.start()
    assert leftover.wait(10) == 0
    assert can_query(server)


def test_a_stale_pid_file_never_costs_another_process_its_life(server: PostgresServer) -> None:
    data = (server.directory / "postgres").resolve()
    server.stop()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        started = int(psutil.Process(bystander.pid).create_time())
        (data / "postmaster.pid").write_text(f"{bystander.pid}\n{data}\n{started}\n1\n\n127.0.0.1\n1 1\nready   \n")
        server.start()
        assert bystander.poll() is None
        assert can_query(server)
        bystander.kill()


def test_a_leftover_is_ended_only_if_it_is_the_same_process() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        who = children.identity(sleeper.pid)
        children.end_leftover(children.Identity(who.pid, who.started_at - 100), signal.SIGTERM)
        assert sleeper.poll() is None
        children.end_leftover(who, signal.SIGTERM)
        assert not children.is_alive(who)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", None),
        ("12\n/data\n", None),
        ("12\n/data\n1700000000\n5432\n", PidFile(12, "/data", 1700000000, "")),
        ("-12\n/d\n1700000000\n1\n\n*\n1 2\nstarting\n", PidFile(-12, "/d", 1700000000, "starting")),
        ("12\n/d\n1700000000\n1\n\n*\n1 2\nready   \n", PidFile(12, "/d", 1700000000, "ready")),
    ],
)
def test_a_pid_file_is_read_only_when_whole(text: str, parsed: PidFile | None) -> None:
    assert parse_pid_file(text) == parsed


def test_a_wrong_password_is_refused(server: PostgresServer) -> None:
    url = server.url().replace(PASSWORD, "wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url)


def test_it_listens_on_loopback_alone(server: PostgresServer) -> None:
    assert server.process is not None
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(server.process.pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_a_server_that_cannot_start_says_why(server: PostgresServer) -> None:
    server.stop()
    data = (server.directory / "postgres").resolve()
    settings = data / "postgresql.auto.conf"
    before = settings.read_text()
    settings.write_text("nonsense = 1\n")
    with pytest.raises(children.ChildError, match="unrecognized configuration parameter"):
        server.start()
    settings.write_text(before)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives data to another account")


@only_root
def test_reach_is_judged_for_the_account_not_for_us(tmp_path: Path) -> None:
    nobody = account.server_account()
    assert nobody is not None
    assert account.can_reach(Path("/usr/bin/env"), nobody)
    (tmp_path / "inner").mkdir(mode=0o755)
    tmp_path.chmod(0o700)
    assert not account.can_reach(tmp_path / "inner", nobody)


@only_root
def test_programs_out_of_reach_are_copied_once_and_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Path(f"/var/tmp/dispatcher-test-programs-{os.getpid()}")
    monkeypatch.setattr(account, "_SHARED_PROGRAMS", shared)
    monkeypatch.setattr(account, "can_reach", lambda *_: False)
    try:
        programs = account.programs(account.server_account())
        assert programs.is_relative_to(shared)
        made = programs.stat().st_ino
        assert account.programs(account.server_account()).stat().st_ino == made
        nobody = account.server_account()
        assert nobody is not None
        for name in ("postgres", "initdb", "psql"):
            subprocess.run(
                [programs / name, "--version"], check=True, user=nobody.uid, group=nobody.gid, capture_output=True
            )
    finally:
        subprocess.run(["rm", "-rf", shared], check=True)


@only_root
def test_data_of_a_deleted_directory_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_OUTSIDE", tmp_path)
    monkeypatch.setattr(account, "can_reach", lambda *_: False)
    nobody = account.server_account()
    places = {name: tmp_path / name / "postgres" for name in ("deleted", "living", "new")}
    data = {name: account.data_directory(places[name], nobody) for name in ("deleted", "living")}
    places["deleted"].unlink()
    long_ago = time.time() - 3600
    for each in data.values():
        os.utime(each.parent / "owner", (long_ago, long_ago))
    account.data_directory(places["new"], nobody)
    assert {name: each.exists() for name, each in data.items()} == {"deleted": False, "living": True}


def test_two_free_ports_are_not_the_same_when_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        assert free_port() != taken.getsockname()[1]


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    entry = pwd.getpwnam("nobody")
    return subprocess.run(
        command, user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], cwd="/", capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip


@as_root
def test_s15_the_database_of_root_is_no_other_accounts(server: PostgresServer) -> None:
    """Whoever runs as the server's account reads its memory and rewrites who may come in: it has to be its own."""
    assert server.process is not None
    owner = psutil.Process(server.process.pid).uids().real
    assert owner == pwd.getpwnam(account.ACCOUNT).pw_uid
    assert owner not in {0, pwd.getpwnam("nobody").pw_uid}
    data = (server.directory / "postgres").resolve()
    for command in (
        ("cat", str(data / "pg_hba.conf")),
        ("sh", "-c", f"echo >>{data}/pg_hba.conf"),
        ("cat", f"/proc/{server.process.pid}/environ"),
        ("kill", "-HUP", str(server.process.pid)),
    ):
        assert as_nobody(*command).returncode != 0, command


@as_root
def test_s15_data_of_an_earlier_account_is_handed_over(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "base" / "1").mkdir(parents=True)
    (data / "base" / "file").write_text("")
    nobody = pwd.getpwnam("nobody")
    for path in (data, *data.rglob("*")):
        os.chown(path, nobody.pw_uid, nobody.pw_gid)
    (data / "of_root").write_text("")
    own = account.server_account()
    assert own is not None
    assert account.data_directory(data, own).stat().st_uid == own.uid
    found = [path for link in [data.resolve()] for path in link.rglob("*")]
    owners = {path.name: path.stat().st_uid for path in found}
    assert owners == {"base": own.uid, "1": own.uid, "file": own.uid, "of_root": 0}
    account.remove_data(data)


def test_s15_what_the_stack_keeps_is_its_users_alone(stack: Stack) -> None:
    assert stat.S_IMODE(stack.directory.stat().st_mode) == 0o700
    modes = {
        path.name: stat.S_IMODE(path.lstat().st_mode) for path in stack.directory.iterdir() if not path.is_symlink()
    }
    assert {"lock", "keys.json", "stack.json", "postgres.log", "postgrest.log"} <= modes.keys()
    assert {mode & 0o077 for name, mode in modes.items() if name != "postgres"} == {0}


def test_s15_the_lock_file_is_for_nobody_else_to_hold(tmp_path: Path) -> None:
    """A lock file that others can open is theirs to hold: one left by an earlier version is closed to them."""
    (tmp_path / "lock").touch(mode=0o644)
    with closing(stack_module._lock(tmp_path)):
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        stack_module._lock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_s15_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """They could put keys of theirs there."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(DispatcherError, match="can be written by other users"):
        Stack(tmp_path / "shared").start()
    if os.geteuid() == 0:
        os.chown(tmp_path / "shared", 65_534, 65_534)
        with pytest.raises(DispatcherError, match="belongs to user 65534"):
            Stack(tmp_path / "shared").start()
