"""The whole embedded Supabase in one directory: start, stop, refuse to run twice, recover from a kill."""

import fcntl
import json
import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dispatcher.errors import DispatcherError
from dispatcher.local import children
from dispatcher.local.api import Api
from dispatcher.local.keys import Keys, load_keys, write_private
from dispatcher.local.postgres import PostgresServer, StopMode

STATE_FILE = "stack.json"
_WATCH_SECONDS = 0.5


class AlreadyRunningError(DispatcherError):
    """Another process runs the embedded Supabase of this directory; the text names it."""


@dataclass(frozen=True)
class Ports:
    """Ports on 127.0.0.1, 0 for not yet chosen."""

    gateway: int = 0
    rest: int = 0
    database: int = 0


@dataclass(frozen=True)
class StackInfo:
    """What a client needs; the file `stack.json` says the same and more."""

    api_url: str
    db_url: str
    anon_key: str
    service_role_key: str
    functions_url: str


class Stack:
    """An embedded Supabase. Use as a context manager, or call `start` and `stop`.

    Args:
        directory: everything it keeps; made when absent.
        port: of the gateway; 0 takes the port of the last time, if that is free.
        prepare: called with the database URL before the API starts: migrations, first rows.
        durable: False gives up safety against a crash of the machine for speed. Tests only.

    Raises (start):
        AlreadyRunningError: the directory is in use.
        DispatcherError: a part did not start; nothing is left running.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        prepare: Callable[[str], object] | None = None,
        durable: bool = True,
    ) -> None:
        self.directory = directory.absolute()
        self._port = port
        self._prepare = prepare
        self._durable = durable
        self._lock: IO[str] | None = None
        self._keys: Keys | None = None
        self._postgres: PostgresServer | None = None
        self._api: Api | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether everything was started and not yet stopped."""
        return self._api is not None

    @property
    def keys(self) -> Keys:
        """All secrets, also the new-style keys. Only while started."""
        assert self._keys is not None, "the stack is not started"
        return self._keys

    @property
    def postgres(self) -> PostgresServer:
        """The database server. Only while started."""
        assert self._postgres is not None, "the stack is not started"
        return self._postgres

    @property
    def api(self) -> Api:
        """PostgREST, Realtime, gateway and their fault switches. Only while started."""
        assert self._api is not None, "the stack is not started"
        return self._api

    @property
    def info(self) -> StackInfo:
        """What a client needs. Only while started."""
        return StackInfo(
            api_url=self.api.url,
            db_url=self.postgres.url(),
            anon_key=self.keys.anon_key,
            service_role_key=self.keys.service_role_key,
            functions_url=f"{self.api.url}/functions/v1",
        )

    def start(self) -> StackInfo:
        """Start everything and return when it serves."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_a_shared_folder(self.directory)
        self._lock = _lock(self.directory)
        try:
            self._start_parts(_read_state(self.directory))
        except BaseException:
            self.stop()
            raise
        return self.info

    def stop(self) -> None:
        """Stop everything; the data stays for the next start. Harmless when nothing runs."""
        try:
            if self._api is not None:
                self._api.stop()
        finally:
            self._stop_rest_of_it()

    def stop_rest(self) -> None:
        """Stop PostgREST alone; the gateway then answers 502."""
        self.api.rest.stop()

    def start_rest(self) -> None:
        """Start PostgREST again, on the same port."""
        self.api.rest.start()
        self._save_state()

    def stop_postgres(self, mode: StopMode = "fast") -> None:
        """Stop the database alone; `immediate` is a crash."""
        self.postgres.stop(mode)

    def start_postgres(self) -> None:
        """Start the database again, on the same port."""
        self.postgres.start()
        self._save_state()

    def wait(self, stop: threading.Event) -> str | None:
        """Block until `stop` is set (None) or a part ended by itself (its name and the end of its log)."""
        while not stop.wait(_WATCH_SECONDS):
            if not self.postgres.running:
                return f"PostgreSQL ended.\n{children.last_lines(self.postgres.log)}"
            if not self.api.rest.running:
                return f"PostgREST ended.\n{children.last_lines(self.api.rest.log)}"
        return None

    def _start_parts(self, earlier: dict[str, Any]) -> None:
        _end_leftovers(earlier)
        ports = Ports(**earlier.get("ports", {}))
        self._keys = load_keys(self.directory)
        self._postgres = PostgresServer(
            self.directory,
            password=self._keys.database_password,
            port=ports.database,
            durable=self._durable,
        )
        self._postgres.start()
        self._postgres.bootstrap()
        if self._prepare is not None:
            self._prepare(self._postgres.url())
        self._start_api(self._keys, self._postgres, ports)
        self._save_state()

    def _start_api(self, keys: Keys, postgres: PostgresServer, ports: Ports) -> None:
        """On the wanted port or not at all; on the last port when it is free, else on any."""
        try:
            self._start_api_on(self._port or ports.gateway, keys, postgres, ports)
        except OSError as error:
            if self._port:
                reason = error.strerror or str(error)
                raise DispatcherError(f"port {self._port} of 127.0.0.1 cannot be used: {reason}") from error
            self._start_api_on(0, keys, postgres, ports)

    def _start_api_on(self, port: int, keys: Keys, postgres: PostgresServer, ports: Ports) -> None:
        self._api = Api(
            postgres.url(),
            postgres.url(user="authenticator"),
            keys,
            self.directory,
            port=port,
            rest_port=ports.rest,
            pool=20,
        )
        self._api.start()

    def _stop_rest_of_it(self) -> None:
        try:
            if self._postgres is not None:
                self._postgres.stop()
        finally:
            self._api = self._postgres = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _save_state(self) -> None:
        """Ports for the next start, process ids for its recovery, keys and URLs for people and programs."""
        rest = self.api.rest
        ports = Ports(self.api.port, rest.port, self.postgres.port)
        processes = {
            name: asdict(children.identity(process.pid))
            for name, process in (("postgres", self.postgres.process), ("postgrest", rest.process))
            if process is not None and process.poll() is None
        }
        state: dict[str, object] = {
            **asdict(self.info),
            "rest_url": rest.url,
            "publishable_key": self.keys.publishable_key,
            "secret_key": self.keys.secret_key,
            "jwt_secret": self.keys.jwt_secret,
            "pid": os.getpid(),
            "ports": asdict(ports),
            "processes": processes,
        }
        write_private(self.directory / STATE_FILE, state)


def _lock(directory: Path) -> IO[str]:
    """Held open for the life of the stack; the kernel frees it however the process ends."""
    lock = os.fdopen(_own_file(directory / "lock"), "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        earlier = _read_state(directory)
        raise AlreadyRunningError(
            f"{directory} is in use by process {earlier.get('pid', 'unknown')}"
            f" ({earlier.get('api_url', 'starting')}); stop it first, or choose another --dir"
        ) from None
    return lock


def _refuse_a_shared_folder(directory: Path) -> None:
    """Whoever may write there could put keys of theirs in the place of ours."""
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise DispatcherError(f"{directory} belongs to user {found.st_uid}, not to us; choose another --dir")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DispatcherError(f"{directory} can be written by other users; chmod go-w it, or choose another --dir")


def _own_file(path: Path) -> int:
    """A file that nobody else can open: a lock on one that others can read is theirs to take."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def _read_state(directory: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError, json.JSONDecodeError):
        state = json.loads((directory / STATE_FILE).read_text())
        if isinstance(state, dict):
            return state
    return {}


def _end_leftovers(earlier: dict[str, Any]) -> None:
    """Children normally die with their parent; where the system cannot do that, end them by id and start.

    The database is left to its own pid file, which covers a run killed before it saved its state, too.
    """
    leftover = earlier.get("processes", {}).get("postgrest")
    if leftover:
        children.end_leftover(children.Identity(**leftover), signal.SIGTERM)
