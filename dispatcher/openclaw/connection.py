"""One WebSocket to the Gateway: the handshake, calls whose answers are matched by id, one reader that never stops."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

import dispatcher
from dispatcher.errors import GatewayRefused, GatewaySilent, GatewayUnavailable
from dispatcher.openclaw.endpoint import Endpoint
from dispatcher.openclaw.frames import (
    CHALLENGE,
    Event,
    Hello,
    Response,
    barred_by,
    connect_params,
    read_frame,
    read_hello,
    request,
)

# The largest frame the Gateway sends is 25 MiB.
MAX_FRAME: Final = 32 * 1024 * 1024
CLOSE_SECONDS: Final = 1.0
HTTP_UNAVAILABLE: Final = 503


class Connection:
    """An open connection; `hello` is what the Gateway said of itself. All methods belong to the loop's thread.

    Make one with `opened`. `closed` is done, with the reason in words, when the connection is gone.
    """

    def __init__(self, socket: ClientConnection, on_event: Callable[[Event], None]) -> None:
        self.hello: Hello
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._socket = socket
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._challenged = asyncio.Event()
        self._reader = asyncio.create_task(self._read(), name="gateway-reader")

    async def greet(self, endpoint: Endpoint) -> None:
        """The handshake.

        Raises:
            GatewayUnavailable: the Gateway starts or is about to stop, or the connection was lost.
            GatewayBarred: it does not let us in.
        """
        await self._wait_for_challenge()
        try:
            payload = await self.call("connect", connect_params(endpoint.auth, dispatcher.__version__))
        except GatewayRefused as error:
            raise barred_by(error) from None
        except GatewaySilent as error:  # nothing was asked for yet
            raise GatewayUnavailable(error.message) from None
        self.hello = read_hello(payload)

    async def _wait_for_challenge(self) -> None:
        challenged = asyncio.ensure_future(self._challenged.wait())
        either: set[asyncio.Future[Any]] = {challenged, self.closed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            challenged.cancel()
        if not self._challenged.is_set():
            raise GatewayUnavailable(self.closed.result())

    async def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """The payload of the answer. Without an end of its own: put a time-out around it.

        Raises:
            GatewayUnavailable: the Gateway is not ready; or the connection is gone, and nothing was sent.
            GatewaySilent: the connection was lost before the answer came.
            GatewayRefused: it does not want this request.
        """
        if self.closed.done():
            raise GatewayUnavailable(self.closed.result())
        number = str(next(self._numbers))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await self._socket.send(request(number, method, params))
            return await answer
        except ConnectionClosed as error:
            raise GatewaySilent(f"{method}: {_closed_words(error)}") from None
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # looked at: it may have come while the request was still on its way

    async def close(self) -> None:
        """Says goodbye, for a moment at most."""
        try:
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._socket.close()
        finally:
            self._socket.transport.abort()  # what a Gateway that reads nothing was still to be sent would keep it open
            self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while True:
                self._take(read_frame(await self._socket.recv()))
        except ConnectionClosed as error:
            reason = _closed_words(error)
        finally:
            self._end(reason)

    def _take(self, frame: Response | Event | None) -> None:
        if isinstance(frame, Response):
            answer = self._waiting.get(frame.id)
            if answer is None or answer.done():  # nobody waits for it any more
                return
            if frame.error is None:
                answer.set_result(frame.payload)
            else:
                answer.set_exception(frame.error)
        elif isinstance(frame, Event):
            if frame.name == CHALLENGE:
                self._challenged.set()
            self._on_event(frame)

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(GatewaySilent(f"the connection was lost before the answer: {reason}"))


async def opened(endpoint: Endpoint, seconds: float, on_event: Callable[[Event], None]) -> Connection:
    """A connection after its handshake, within `seconds`.

    Raises:
        GatewayUnavailable: nobody listens, or the Gateway starts or is about to stop.
        GatewaySilent: somebody listens and does not answer.
        GatewayBarred: it does not let us in.
    """
    connection: Connection | None = None
    try:
        async with asyncio.timeout(seconds):
            # No proxy, whatever the environment says: it is this host. Whether it lives is asked by the link.
            socket = await connect(
                endpoint.url, compression=None, proxy=None, max_size=MAX_FRAME, ping_interval=None, open_timeout=None
            )
            connection = Connection(socket, on_event)
            await connection.greet(endpoint)
            return connection
    except BaseException as error:
        if connection is not None:
            await connection.close()
        if (known := _known_failure(error, seconds)) is not None:
            raise known from None
        raise


def _known_failure(error: BaseException, seconds: float) -> GatewayUnavailable | GatewaySilent | None:
    if isinstance(error, TimeoutError):
        return GatewaySilent(f"the Gateway does not answer within {seconds:g} s")
    if isinstance(error, InvalidStatus):
        return _refused_upgrade(error)
    if isinstance(error, OSError):
        words = os.strerror(error.errno) if error.errno else str(error)
        return GatewayUnavailable(f"nobody listens: {words}")
    if isinstance(error, websockets.WebSocketException | EOFError):
        return GatewayUnavailable(f"the handshake failed: {error}"[:300])
    return None


def _refused_upgrade(error: InvalidStatus) -> GatewayUnavailable:
    status = error.response.status_code
    said = bytes(error.response.body or b"").decode("utf-8", "replace").strip()[:100]
    reason = "gateway-draining" if status == HTTP_UNAVAILABLE else ""
    return GatewayUnavailable(f"the Gateway takes no connection: {said or 'no reason'} (HTTP {status})", reason=reason)


def _closed_words(error: ConnectionClosed) -> str:
    """Why it was closed, as the Gateway put it."""
    if error.rcvd is None:
        return "the connection was lost"
    return f"the Gateway closed the connection: {error.rcvd.reason or 'no reason'} ({error.rcvd.code})"
