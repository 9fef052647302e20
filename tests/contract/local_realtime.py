"""A local Realtime in a thread of its own, for clients that speak real sockets."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, Self, TypeVar

from aiohttp import web

from dispatcher.local.keys import Keys
from dispatcher.local.realtime import Faults, Limits, RealtimeServer, Timings
from tests.support.loops import end_loop

Result = TypeVar("Result")
PATHS = ("/realtime/v1/websocket", "/socket/websocket")


class LocalRealtime:
    """A context manager: serving while entered."""

    def __init__(
        self, database_url: str, *, timings: Timings | None = None, limits: Limits | None = None, port: int = 0
    ) -> None:
        self.keys = Keys.generate()
        self.faults = Faults()
        self.server = RealtimeServer(
            database_url,
            self.keys.jwt_secret,
            timings=timings or Timings.quick(),
            limits=limits,
            faults=self.faults,
        )
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local-realtime")
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """What a client library is given."""
        return f"http://localhost:{self.port}"

    def websocket_url(self, *, host: str = "localhost", path: str = PATHS[0], **query: str) -> str:
        """The address of the WebSocket."""
        pairs = "&".join(f"{name}={value}" for name, value in query.items())
        return f"ws://{host}:{self.port}{path}?{pairs}"

    def set_faults(self, **changes: object) -> Mapping[str, Any]:
        """As the HTTP front sets them, from another thread."""
        return self.faults.update(changes)

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._in_loop(self._stop())
        end_loop(self._loop, self._thread, None)

    def close_server(self, code: int = 1012) -> None:
        """The server's own shutdown; `__exit__` may still follow."""
        self._in_loop(self.server.close(code))

    async def _start(self) -> None:
        await self.server.start()
        await self.server.wait_until_ready()
        application = web.Application()
        for path in PATHS:
            application.router.add_get(path, self.server.handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self.server.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _in_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)
