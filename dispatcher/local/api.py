"""PostgREST, Realtime and the gateway on one database: an embedded Supabase without its database."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from dispatcher.local.gateway import Gateway
from dispatcher.local.keys import Keys
from dispatcher.local.realtime.faults import Faults
from dispatcher.local.realtime.server import RealtimeServer
from dispatcher.local.realtime.timings import Timings
from dispatcher.local.rest import RestServer
from dispatcher.local.rest_faults import RestFaults

Result = TypeVar("Result")

_CLOSE_PATIENCE = 10.0


class Api:
    """Start and stop from any thread; the gateway and Realtime live in an asyncio loop of their own thread.

    Args:
        database_url: of the superuser, for Realtime.
        rest_database_url: of the role `authenticator`, for PostgREST.
        keys: of the project.
        directory: for log files.
        port: of the gateway on 127.0.0.1; 0 lets the system choose.
        rest_port: wanted port of PostgREST itself.
        pool: database connections PostgREST may hold.
        timings: of Realtime; default as the real server's.
    """

    def __init__(
        self,
        database_url: str,
        rest_database_url: str,
        keys: Keys,
        directory: Path,
        *,
        port: int = 0,
        rest_port: int = 0,
        pool: int = 10,
        timings: Timings | None = None,
    ) -> None:
        self.keys = keys
        self.port = port
        self.database_url = database_url
        self.rest = RestServer(
            rest_database_url, keys.jwt_secret, directory / "postgrest.log", port=rest_port, pool=pool
        )
        self.realtime_faults = Faults()
        self.rest_faults = RestFaults()
        self._timings = timings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="local-gateway", daemon=True)
        self._gateway: Gateway | None = None
        self._realtime: RealtimeServer | None = None

    @property
    def url(self) -> str:
        """The base URL of the project."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start all three and return when they serve. Raises OSError when the gateway's port is taken."""
        try:
            self.rest.start()
            self._thread.start()
            self.port = self._in_loop(self._start_front())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all three. The object cannot be started again."""
        if self._thread.is_alive():
            self._in_loop(self._close_front(), _CLOSE_PATIENCE)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_PATIENCE)
        if not self._loop.is_running():
            self._loop.close()
        self.rest.stop()

    def faults(self, **parts: dict[str, object]) -> None:
        """Set fault switches: `faults(realtime={"silence": True}, rest={"down_for": 5})`."""
        self._in_loop(self._set_faults(parts))

    def status(self) -> dict[str, object]:
        """What runs, for people and tests."""
        rest = {"url": self.rest.url, "running": self.rest.running, "ready": self.rest.is_ready()}
        return {"api_url": self.url, "rest": rest, "realtime": {"running": self._realtime is not None}}

    async def _start_front(self) -> int:
        self._realtime = RealtimeServer(
            self.database_url, self.keys.jwt_secret, timings=self._timings, faults=self.realtime_faults
        )
        await self._realtime.start()
        self._gateway = Gateway(
            self.keys,
            self.rest.url,
            self._realtime,
            realtime_faults=self.realtime_faults,
            rest_faults=self.rest_faults,
            status=self.status,
        )
        return await self._gateway.start(self.port)

    async def _close_front(self) -> None:
        """Realtime first: its clients hear a proper close before the listener goes."""
        if self._realtime is not None:
            await self._realtime.close()
            self._realtime = None
        if self._gateway is not None:
            await self._gateway.close()
            self._gateway = None

    async def _set_faults(self, parts: dict[str, dict[str, object]]) -> None:
        switches: dict[str, Faults | RestFaults] = {
            "realtime": self.realtime_faults,
            "rest": self.rest_faults,
        }
        for part, changes in parts.items():
            switches[part].update(changes)

    def _in_loop(self, work: Coroutine[Any, Any, Result], timeout: float = 60.0) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
