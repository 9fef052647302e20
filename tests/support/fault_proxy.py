"""A TCP proxy on loopback that misbehaves on demand: delay, cut, refuse, black hole, half-open.

What it cannot do: a connection to it is always accepted by the kernel, so a lost SYN (a connect timeout) is not
among the faults; a peer that went away shows as one that accepts and says nothing, or as a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from typing import Final, Literal

from tests.support.loops import end_loop

Direction = Literal["up", "down"]
Mode = Literal["pass", "delay", "refuse", "black_hole", "half_open"]

# In which directions nothing passes.
_STALLED: Final[dict[Mode, frozenset[Direction]]] = {
    "pass": frozenset(),
    "delay": frozenset(),
    "refuse": frozenset(),
    "black_hole": frozenset({"up", "down"}),
    "half_open": frozenset({"down"}),
}
_START_DEADLINE: Final = 10.0


class FaultProxy:
    """Passes bytes between clients and `127.0.0.1:upstream_port`; every method may be called from any thread."""

    def __init__(self, upstream_port: int, draw: random.Random | None = None) -> None:
        self.port = 0
        self.mode: Mode = "pass"
        self._upstream_port = upstream_port
        self._draw = draw or random.Random()
        self._delay = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._moved = asyncio.Event()
        self._transports: set[asyncio.WriteTransport] = set()

    @property
    def url(self) -> str:
        """The base URL to give to a client."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> FaultProxy:
        """Listens; returns itself."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_START_DEADLINE)
        return self

    def stop(self) -> None:
        """Cuts everything and ends."""
        self._loop.call_soon_threadsafe(self._abort_all)
        end_loop(self._loop, self._thread, self._server)

    # -- faults

    def heal(self, *, cut: bool = False) -> None:
        """Everything passes again. What was held back is delivered late, or lost with its connection when `cut`."""
        self._enter("pass", cut=cut)

    def delay(self, seconds: float) -> None:
        """Each piece takes `seconds`, give or take half of it."""
        self._delay = seconds
        self._enter("delay")

    def cut(self) -> None:
        """Resets every connection there is; new ones are welcome."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def refuse(self) -> None:
        """Resets every connection there is, and every new one at once."""
        self._enter("refuse", cut=True)

    def black_hole(self) -> None:
        """Connections stay; nothing passes, in neither direction, not even their end."""
        self._enter("black_hole")

    def half_open(self) -> None:
        """Requests arrive, answers do not come back."""
        self._enter("half_open")

    def _enter(self, mode: Mode, *, cut: bool = False) -> None:
        def enter() -> None:
            self.mode = mode
            if cut:
                self._abort_all()
            self._moved.set()
            self._moved = asyncio.Event()

        self._loop.call_soon_threadsafe(enter)

    def _abort_all(self) -> None:
        for transport in list(self._transports):
            _reset(transport)

    # -- passing bytes, in the loop

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._connect(reader, writer)
            writer.close()
        except (OSError, asyncio.CancelledError):
            # Cut, refused, closing, or nobody upstream: the client sees a reset, as behind a balancer without a
            # backend. Not passed on: asyncio would log a handler that ends so as an error.
            _reset(writer.transport)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuse":
            raise ConnectionRefusedError
        with self._known(writer):
            await self._until_passing("up")
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
            with self._known(up_writer):
                try:
                    await self._both(self._pump(reader, up_writer, "up"), self._pump(up_reader, writer, "down"))
                    up_writer.close()
                except (OSError, asyncio.CancelledError):
                    _reset(up_writer.transport)
                    raise

    @contextlib.contextmanager
    def _known(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._transports.add(writer.transport)
        try:
            yield
        finally:
            self._transports.discard(writer.transport)

    @staticmethod
    async def _both(*pumps: Coroutine[None, None, None]) -> None:
        tasks = [asyncio.ensure_future(pump) for pump in pumps]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        while data := await reader.read(65536):
            await self._until_passing(direction)
            if self.mode == "delay":
                await asyncio.sleep(self._delay * self._draw.uniform(0.5, 1.5))
            writer.write(data)
            await writer.drain()
        await self._until_passing(direction)
        if writer.can_write_eof():
            writer.write_eof()

    async def _until_passing(self, direction: Direction) -> None:
        while direction in _STALLED[self.mode]:
            await self._moved.wait()


def _reset(transport: asyncio.WriteTransport) -> None:
    """Ends a connection with a reset where there is still one: lingering for no time is how TCP is told to."""
    connection = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
