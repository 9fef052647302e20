"""The fast way through the gateway: plain REST calls pass as bytes, everything else is left to aiohttp.

A client's connection begins here. As long as it makes simple, authorised REST calls, each is passed on with a few
headers changed and its reply comes back untouched, in a third of a millisecond. At the first request that is anything
else (a WebSocket, a fault switched on, a refusal to word) the connection is given to aiohttp for good.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

from dispatcher.local.http_messages import Reply, Request, Unfit, first_request

PREFIX = b"/rest/v1"
# Headers between the client and us, or that we set anew.
_OURS = frozenset({b"authorization", b"connection", b"keep-alive", b"proxy-connection", b"host"})

Authorise = Callable[[str | None, str | None], str | None]


class Upstream(asyncio.Protocol):
    """One kept-alive connection to PostgREST. Serves one call at a time."""

    def __init__(self, lost: Callable[["Upstream"], None]) -> None:
        self.transport: asyncio.Transport | None = None
        self._lost = lost
        self._call: Call | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, call: "Call", request: bytes) -> None:
        """Send a request; its reply goes to `call`."""
        assert self.transport is not None
        self._call = call
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._call is not None:
            self._call.reply_received(data)

    def connection_lost(self, _: Exception | None) -> None:
        call, self._call = self._call, None
        self._lost(self)
        if call is not None:
            call.upstream_lost()

    def release(self) -> None:
        """The reply is complete."""
        self._call = None

    def abandon(self) -> None:
        """Nobody waits for the reply any more."""
        self._call = None
        if self.transport is not None:
            self.transport.abort()


class Pool:
    """Connections to PostgREST that wait for work; the one used last comes first."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._idle: list[Upstream] = []
        self._all: set[Upstream] = set()

    def take(self) -> Upstream | None:
        """One that waits, if any."""
        return self._idle.pop() if self._idle else None

    async def connect(self) -> Upstream:
        """A new one. Raises OSError when PostgREST is not there."""
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(self._forget), *self._address)
        self._all.add(upstream)
        return upstream

    def give_back(self, upstream: Upstream) -> None:
        """Its reply is complete."""
        if upstream in self._all:
            self._idle.append(upstream)

    def close(self) -> None:
        """Drop all of them."""
        for upstream in list(self._all):
            upstream.abandon()

    def _forget(self, upstream: Upstream) -> None:
        self._all.discard(upstream)
        with suppress(ValueError):
            self._idle.remove(upstream)


class Call:
    """One request on its way, from the client's connection to the last byte of the reply."""

    def __init__(self, client: "FastRest", pool: Pool, request: bytes) -> None:
        self._client = client
        self._pool = pool
        self._request = request
        self._reply = Reply()
        self._begun = False
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Send it, over a new connection when none waits."""
        upstream = self._pool.take()
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def cancel(self) -> None:
        """The client is gone."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._upstream is not None:
            self._upstream.abandon()

    def pause(self, *, paused: bool) -> None:
        """Follow the client's pace."""
        transport = self._upstream.transport if self._upstream else None
        if transport is not None:
            (transport.pause_reading if paused else transport.resume_reading)()

    def reply_received(self, data: bytes) -> None:
        """Pass bytes of the reply on, and notice its end."""
        self._begun = True
        self._client.send(data)
        try:
            self._reply.feed(data)
        except ValueError:
            self.cancel()
            self._client.break_off()
            return
        if self._reply.complete:
            self._finish()

    def upstream_lost(self) -> None:
        """PostgREST ended the connection before the reply was complete."""
        if self._begun:
            self._client.break_off()
        else:
            self._client.answer_bad_gateway()

    async def _connect(self) -> None:
        try:
            upstream = await self._pool.connect()
        except OSError:
            self._client.answer_bad_gateway()
        else:
            self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self._upstream = upstream
        upstream.begin(self, self._request)

    def _finish(self) -> None:
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        upstream.release()
        if not self._reply.closes:
            self._pool.give_back(upstream)
        self._client.call_done(close=self._reply.closes)


class FastRest(asyncio.Protocol):
    """One client's connection, until it wants more than plain REST calls.

    Args:
        pool: ways to PostgREST.
        authorise: (apikey, Authorization) to the Authorization to pass on, None to refuse.
        idle: whether no fault is switched on.
        other: makes the protocol that takes over.
        clients: connections that are open here; each enters and leaves by itself.
    """

    def __init__(
        self,
        pool: Pool,
        authorise: Authorise,
        idle: Callable[[], bool],
        other: Callable[[], asyncio.Protocol],
        clients: "set[FastRest]",
    ) -> None:
        self._pool = pool
        self._authorise = authorise
        self._idle = idle
        self._other = other
        self._clients = clients
        self._buffer = bytearray()
        self._call: Call | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._clients.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._clients.discard(self)
        self._transport = None
        if self._call is not None:
            self._call.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._call is None:
            self._next_request()

    def pause_writing(self) -> None:
        if self._call is not None:
            self._call.pause(paused=True)

    def resume_writing(self) -> None:
        if self._call is not None:
            self._call.pause(paused=False)

    def send(self, data: bytes) -> None:
        """Bytes of a reply, to the client."""
        if self._transport is not None:
            self._transport.write(data)

    def call_done(self, *, close: bool) -> None:
        """The reply is complete; look for the next request."""
        self._call = None
        if close and self._transport is not None:
            self._transport.close()
        elif self._buffer:
            self._next_request()

    def break_off(self) -> None:
        """A reply that cannot be completed: the client must not take it for whole."""
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def answer_bad_gateway(self) -> None:
        """PostgREST is not there, or went away over this request."""
        self.send(_BAD_GATEWAY)
        self.call_done(close=False)

    def _next_request(self) -> None:
        request = first_request(self._buffer)
        if request is Unfit.INCOMPLETE:
            return
        forward = self._translate(request) if isinstance(request, Request) else None
        if forward is None or not isinstance(request, Request):
            self._hand_over()
            return
        del self._buffer[: request.size]
        self._call = Call(self, self._pool, forward)
        self._call.start()

    def _translate(self, request: Request) -> bytes | None:
        """The bytes for PostgREST, None when this is not for the fast way."""
        plain = request.target.startswith(PREFIX + b"/") and b"apikey=" not in request.target
        key = request.header(b"apikey")
        if not plain or key is None or not self._idle():
            return None
        bearer = self._authorise(key, request.header(b"authorization"))
        return None if bearer is None else _rewritten(request, bearer)

    def _hand_over(self) -> None:
        """Give the connection, with what is unread, to the other protocol."""
        assert self._transport is not None
        self._clients.discard(self)
        other = self._other()
        self._transport.set_protocol(other)
        other.connection_made(self._transport)
        other.data_received(bytes(self._buffer))
        self._transport = None


def _rewritten(request: Request, bearer: str) -> bytes:
    lines = [b"%b: %b" % header for header in request.headers if header[0] not in _OURS]
    lines.append(b"host: postgrest")
    lines.append(b"authorization: " + bearer.encode("latin-1"))
    first = b"%b %b HTTP/1.1" % (request.method, request.target[len(PREFIX) :])
    return b"\r\n".join([first, *lines, b"", request.body])


def _bad_gateway() -> bytes:
    body = json.dumps({"message": "An invalid response was received from the upstream server"}).encode()
    head = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


_BAD_GATEWAY = _bad_gateway()
