"""A real PostgREST as a direct child."""

import http.client
import os
import signal
import subprocess
import time
from pathlib import Path

from dispatcher.local import children
from dispatcher.local.children import ChildError
from dispatcher.local.postgres import free_port, is_port_free
from dispatcher.local.postgrest_binary import postgrest_binary

_START_DEADLINE = 30.0
_STOP_PATIENCE = 5.0
_POLL = 0.005
_ADDRESS_TAKEN = "resource busy"


class RestServer:
    """PostgREST on 127.0.0.1 with the settings of a Supabase project.

    Args:
        db_url: of the role `authenticator`.
        jwt_secret: at least 32 characters.
        log: file that its output is appended to.
        port: wanted port; another one is taken when it is occupied. 0 lets the system choose.
        pool: database connections it may hold.
    """

    def __init__(self, db_url: str, jwt_secret: str, log: Path, *, port: int = 0, pool: int = 10) -> None:
        self.port = port
        self.admin_port = 0
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._db_url = db_url
        self._jwt_secret = jwt_secret
        self._pool = pool

    @property
    def url(self) -> str:
        """Where it answers, without the gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start it and return when it has read the schema."""
        if self.running:
            return
        for _ in range(5):
            if not self.port or not is_port_free(self.port):
                self.port = free_port()
            self.admin_port = free_port()
            self.process = self._spawn()
            if self._wait_until_ready(self.process):
                return
        raise ChildError(f"PostgREST found no free port.\n{children.last_lines(self.log)}")

    def stop(self) -> None:
        """End it; requests under way are cut off."""
        if self.process is not None:
            children.stop(self.process, signal.SIGTERM, _STOP_PATIENCE)
            self.process = None

    def is_ready(self) -> bool:
        """Whether it has a database connection and a schema now."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return children.spawn(
            [str(postgrest_binary())],
            environment={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **self._settings()},
            log=self.log,
            death_signal=signal.SIGKILL,
        )

    def _settings(self) -> dict[str, str]:
        return {
            "PGRST_DB_URI": self._db_url,
            "PGRST_DB_SCHEMAS": "public",
            "PGRST_DB_EXTRA_SEARCH_PATH": "public,extensions",
            "PGRST_DB_ANON_ROLE": "anon",
            "PGRST_DB_MAX_ROWS": "1000",
            "PGRST_DB_POOL": str(self._pool),
            "PGRST_DB_CHANNEL_ENABLED": "true",
            "PGRST_JWT_SECRET": self._jwt_secret,
            "PGRST_SERVER_HOST": "127.0.0.1",
            "PGRST_SERVER_PORT": str(self.port),
            "PGRST_ADMIN_SERVER_PORT": str(self.admin_port),
            "PGRST_LOG_LEVEL": "warn",
        }

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """True once it serves, False when a port was taken by somebody else meanwhile."""
        deadline = time.monotonic() + _START_DEADLINE
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return self._explain_early_end(process)
            if self.is_ready():
                return True
            time.sleep(_POLL)
        self.stop()
        log = children.last_lines(self.log)
        raise ChildError(f"PostgREST was not ready in {_START_DEADLINE:.0f} s.\n{log}")

    def _explain_early_end(self, process: subprocess.Popen[bytes]) -> bool:
        log = children.last_lines(self.log)
        if _ADDRESS_TAKEN in log:
            self.port = 0
            return False
        raise ChildError(f"PostgREST ended with exit code {process.returncode}.\n{log}")
