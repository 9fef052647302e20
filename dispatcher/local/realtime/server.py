"""The local Realtime: sockets in front, PostgreSQL behind, fault switches between."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
from aiohttp import web

from dispatcher.local.realtime import tokens
from dispatcher.local.realtime.broadcasts import BroadcastListener, DatabaseBroadcast
from dispatcher.local.realtime.changes import ChangesReader, Rate
from dispatcher.local.realtime.channel import PREFIX, Channel
from dispatcher.local.realtime.database import Database
from dispatcher.local.realtime.faults import Faults
from dispatcher.local.realtime.frames import Version, dumps
from dispatcher.local.realtime.socket import Socket
from dispatcher.local.realtime.timings import Limits, Timings
from dispatcher.local.realtime.tokens import Token, TokenRefused

log = logging.getLogger(__name__)

_VERSIONS: dict[str, Version] = {"1.0.0": "1.0.0", "2.0.0": "2.0.0"}
_CLOSE_PATIENCE = 1.0
# aiohttp would reset the connection at its limit, and the client never see the 1009: the socket looks for itself.
_MOST_BYTES = 64 * 1024 * 1024


class HandshakeRefused(Exception):  # noqa: N818 - named for what happened, as in dispatcher.errors
    """The HTTP status and the error text that a refused handshake is answered with, after the delay."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status
        self.error = error


class RealtimeServer:
    """Supabase Realtime for one database.

    Args:
        db_url: as a superuser; `bootstrap.sql` and `realtime.sql` must have been run there.
        jwt_secret: the HS256 secret of the API keys and user tokens.
        timings: how long things take, see there.
        limits: how much is allowed, see there.
        faults: switches for tests, see there.
    """

    def __init__(
        self,
        db_url: str,
        jwt_secret: str,
        *,
        timings: Timings | None = None,
        limits: Limits | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.jwt_secret = jwt_secret
        self.timings = timings or Timings()
        self.limits = limits or Limits()
        self.faults = faults or Faults()
        self.database = Database(db_url)
        self.changes = ChangesReader(db_url, self.timings, self.limits, self.faults)
        self._broadcasts = BroadcastListener(
            db_url, self.timings, deliver=self._deliver_broadcast, lost=self._on_broadcasts_lost
        )
        self._sockets: set[Socket] = set()
        self._by_topic: defaultdict[str, dict[Channel, None]] = defaultdict(dict)
        self._joins = Rate(self.limits.max_joins_per_second, self.limits.rate_window)
        self._down_until = 0.0
        self._publication_watch: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Connect to the database in the background; sockets are accepted from now on."""
        self._loop = asyncio.get_running_loop()
        self.faults.perform_with(self._on_fault)
        self._broadcasts.start()
        self._publication_watch = asyncio.create_task(self._watch_publication(), name="realtime-publication")

    async def wait_until_ready(self, deadline: float = 10.0) -> None:
        """Until broadcasts from the database flow. Raises TimeoutError after `deadline` seconds."""
        await asyncio.wait_for(self._broadcasts.ready.wait(), deadline)

    async def close(self, code: int = 1012) -> None:
        """Close every socket with `code` (1012: service restart), then let go of the database."""
        closing = [asyncio.create_task(socket.close(code)) for socket in list(self._sockets)]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_PATIENCE)
        for socket in list(self._sockets):
            socket.cut()
        await self._stop_tasks()
        await self._broadcasts.close()
        await self.changes.close()
        await self.database.close()

    async def _stop_tasks(self) -> None:
        tasks = [task for task in (self._publication_watch, *self._errands) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Handshake

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one connection on the WebSocket path, from handshake to close."""
        if time.monotonic() < self._down_until:
            return _cut(request)
        version = _VERSIONS.get(request.query.get("vsn", "1.0.0"))
        if version is None:
            return web.Response(status=403)
        try:
            api_key = self._admit(request)
        except HandshakeRefused as refused:
            await asyncio.sleep(self.timings.reject_delay)
            return _refusal(refused)
        return await self._serve(request, version, api_key)

    def _admit(self, request: web.Request) -> Token:
        """The API key's token. Raises `HandshakeRefused`."""
        if self.faults.connect_status is not None:
            raise HandshakeRefused(self.faults.connect_status, "Failed to validate JWT signature")
        if self.limits.tenants is not None and _tenant(request) not in self.limits.tenants:
            raise HandshakeRefused(404, "Tenant not found")
        if self.limits.suspended:
            raise HandshakeRefused(403, "Realtime was disabled for this tenant")
        api_key = self._verify(request.headers.get("x-api-key") or request.query.get("apikey"))
        if self.limits.max_users is not None and len(self._sockets) >= self.limits.max_users:
            raise HandshakeRefused(429, "Too many connected users")
        if not self._joins.allow(0):
            raise HandshakeRefused(429, "Too many joins per second")
        return api_key

    def _verify(self, key: str | None) -> Token:
        if not key:
            raise HandshakeRefused(401, "API key is missing")
        try:
            return tokens.verify(key, self.jwt_secret)
        except TokenRefused as refused:
            raise HandshakeRefused(401, refused.at_connect) from refused

    async def _serve(self, request: web.Request, version: Version, api_key: Token) -> web.StreamResponse:
        websocket = web.WebSocketResponse(compress=False, max_msg_size=_MOST_BYTES, timeout=_CLOSE_PATIENCE)
        if not websocket.can_prepare(request).ok:
            return web.Response(status=400)
        await websocket.prepare(request)
        socket = Socket(self, websocket, request, version, api_key)
        self._sockets.add(socket)
        try:
            await socket.serve()
        finally:
            self._sockets.discard(socket)
        return websocket

    # Channels, called by their sockets

    def allow_join(self) -> bool:
        """Count a join; whether the rate is still within the limit."""
        return self._joins.allow()

    def register(self, channel: Channel) -> None:
        """Broadcasts on its topic reach the channel from now on."""
        self._by_topic[channel.topic][channel] = None

    def unregister(self, channel: Channel) -> None:
        """Nothing reaches the channel any more."""
        self.forget(channel)
        channels = self._by_topic.get(channel.topic, {})
        channels.pop(channel, None)
        if not channels:
            self._by_topic.pop(channel.topic, None)

    def forget(self, channel: Channel) -> None:
        """End the channel's subscription to changes, if it has one."""
        if channel.subscription is not None:
            self.changes.remove(channel.subscription)
            channel.subscription = None

    def _channels(self) -> list[Channel]:
        return [channel for channels in self._by_topic.values() for channel in channels]

    # Broadcasts

    @property
    def broadcasts_flow(self) -> bool:
        """Whether a message sent in the database now would arrive."""
        return self._broadcasts.ready.is_set() and not self.faults.broadcast_dead

    async def wait_for_broadcasts(self) -> bool:
        """Wait until they flow; False after `replication_timeout`."""
        deadline = time.monotonic() + self.timings.replication_timeout
        while not self.broadcasts_flow:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(min(0.05, self.timings.replication_timeout / 10))
        return True

    def _deliver_broadcast(self, message: DatabaseBroadcast) -> None:
        if self.faults.broadcast_dead:
            return
        channels = self._by_topic.get(PREFIX + message.topic)
        for channel in channels or ():
            if channel.config.private == message.private:
                channel.socket.send(None, None, channel.topic, "broadcast", message.frame_payload(), is_event=True)

    def relay(self, sender: Channel, payload: Any) -> None:
        """A client's broadcast to all others on the topic, and to itself where it asked for that."""
        for channel in list(self._by_topic.get(sender.topic, ())):
            if channel.config.private != sender.config.private:
                continue
            if channel is not sender or sender.config.self_broadcast:
                channel.socket.send_client_broadcast(channel.topic, payload)

    def _on_broadcasts_lost(self) -> None:
        if self.faults.broadcast_dies_after_outage:
            self.faults.broadcast_dead = True

    # Publication

    async def _watch_publication(self) -> None:
        known: str | None = None
        is_known = False
        while True:
            try:
                state = await self.database.publication()
            except psycopg.Error as error:
                log.debug("the publication cannot be checked: %s", error)
            else:
                if is_known and state != known:
                    self._resubscribe_all()
                known, is_known = state, True
            await asyncio.sleep(self.timings.publication_check)

    def _resubscribe_all(self) -> None:
        for channel in self._channels():
            if channel.subscription is not None and self.changes.has(channel.subscription):
                channel.socket.subscribe(channel, self.timings.warm_subscribe)

    # Faults

    def _on_fault(self, name: str, value: Any) -> None:
        """Carries out an action of `Faults.update`, which may be called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._perform, name, value)

    def _perform(self, name: str, value: Any) -> None:
        if name == "close":
            self._run(*(socket.close(value) for socket in list(self._sockets)))
        elif name == "server_disconnect":
            self._run(*(socket.disconnect() for socket in list(self._sockets)))
        elif name == "down_for":
            self._go_down(value)
        elif name == "unparsable_frame":
            for socket in list(self._sockets):
                socket.send_raw(value if isinstance(value, str) else "{not json")
        elif name == "changes_dead":
            self.changes.forget_all()
        elif name == "denied_event":
            self.changes.deny_all()
        elif name in _ON_CHANNELS:
            for channel in self._channels():
                _ON_CHANNELS[name](channel, value)

    def _go_down(self, seconds: float) -> None:
        self._down_until = time.monotonic() + seconds
        for socket in list(self._sockets):
            socket.cut()

    def _run(self, *errands: Coroutine[Any, Any, None]) -> None:
        for errand in errands:
            task = asyncio.get_running_loop().create_task(errand)
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)


def _tenant(request: web.Request) -> str:
    return request.host.split(":")[0].split(".")[0]


def _refusal(refused: HandshakeRefused) -> web.Response:
    if refused.status >= 500:
        return web.Response(status=refused.status, text="Internal Server Error", content_type="text/html")
    return web.json_response({"error": refused.error}, status=refused.status, dumps=dumps)


def _cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)


def _send_big_frame(channel: Channel, size: int) -> None:
    payload = dumps({"event": "big", "payload": {"a": "b" * size}, "type": "broadcast"})
    channel.socket.send(None, None, channel.topic, "broadcast", payload, is_event=True)


_ON_CHANNELS: dict[str, Callable[[Channel, Any], None]] = {
    "channel_close": lambda channel, _: channel.socket.close_channel(channel),
    "channel_crash": lambda channel, _: channel.socket.crash_channel(channel),
    "system_error": lambda channel, text: channel.system(text, status="error"),
    "big_frame": _send_big_frame,
}
