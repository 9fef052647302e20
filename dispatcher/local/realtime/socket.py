"""One WebSocket: reads frames, keeps its channels, writes frames in order."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from aiohttp import WSMsgType, web

from dispatcher.local.realtime import frames, subscriptions, tokens
from dispatcher.local.realtime.changes import Subscription
from dispatcher.local.realtime.channel import PREFIX, Channel, JoinConfig
from dispatcher.local.realtime.filters import FilterRefused
from dispatcher.local.realtime.frames import BinaryPush, Message, dumps
from dispatcher.local.realtime.subscriptions import Entry, EntryRefused, Wanted
from dispatcher.local.realtime.timings import Span
from dispatcher.local.realtime.tokens import Token, TokenRefused

if TYPE_CHECKING:
    from dispatcher.local.realtime.server import RealtimeServer

log = logging.getLogger(__name__)

_SUBSCRIBED = "Subscribed to PostgreSQL"
_REPLICATING = "Replication connection established"
_NOT_REPLICATING = "Replication connection was not established in time"


class JoinRefused(Exception):  # noqa: N818 - named for what happened, as in dispatcher.errors
    """The join is answered with this reason, after the delay. `close_code`: and then the socket goes."""

    def __init__(self, reason: str, *, close_code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.close_code = close_code


@dataclass(frozen=True, slots=True)
class _Close:
    """In the queue of frames: close the socket here."""

    code: int


class Socket:
    """Serves one client from handshake to close.

    A refused join holds up the whole socket for `error_delay`, replies to heartbeats and events of other
    channels included: the real server waits there too.
    """

    def __init__(
        self,
        server: "RealtimeServer",
        websocket: web.WebSocketResponse,
        request: web.Request,
        version: frames.Version,
        api_key: Token,
    ) -> None:
        self._server = server
        self._websocket = websocket
        self._request = request
        self._version = version
        self._api_key = api_key
        self._outgoing: deque[str | bytes | _Close] = deque()
        self._something_to_write = asyncio.Event()
        self._held_up = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.channels: dict[str, Channel] = {}

    async def serve(self) -> None:
        """Until either side closes."""
        writer = asyncio.create_task(self._write(), name="realtime-writer")
        try:
            await self._read()
        finally:
            for channel in list(self.channels.values()):
                self._drop(channel)
            for task in (writer, *self._tasks):
                task.cancel()
            await asyncio.gather(writer, *self._tasks, return_exceptions=True)

    async def close(self, code: int) -> None:
        """Close with a code; 1006 cuts the connection without a close frame."""
        if code == 1006:
            self.cut()
        else:
            await self._websocket.close(code=code)

    async def disconnect(self) -> None:
        """As when the project's settings changed: a system message on every channel, then close 1012."""
        body = {"message": "Server requested disconnect", "status": "ok", "extension": "system"}
        for channel in self.channels.values():
            channel.push("system", dumps(body))
        self._outgoing.append(_Close(1012))

    def cut(self) -> None:
        """Cut the connection."""
        if self._request.transport is not None:
            self._request.transport.abort()

    # Writing

    def send(self, join_ref: Any, ref: Any, topic: str, event: str, payload: str, *, is_event: bool = False) -> None:
        """Queue a frame; `payload` is JSON text. Event frames pass the fault switches."""
        frame = frames.encode(self._version, join_ref, ref, topic, event, payload)
        if is_event:
            self._send_event(frame)
        else:
            self.send_raw(frame)

    def send_client_broadcast(self, topic: str, payload: Any) -> None:
        """A broadcast that another client sent, in the form this client's version takes it."""
        if isinstance(payload, BinaryPush) and self._version == "2.0.0":
            self._send_event(frames.encode_binary_broadcast(topic, payload))
            return
        text = frames.json_push_of(payload)
        if text is not None:
            self._send_event(frames.encode(self._version, None, None, topic, "broadcast", text))

    def _send_event(self, frame: str | bytes) -> None:
        faults = self._server.faults
        if faults.take_drop():
            return
        for _ in range(2 if faults.take_duplicate() else 1):
            if faults.delay_events > 0:
                asyncio.get_running_loop().call_later(faults.delay_events, self.send_raw, frame)
            else:
                self.send_raw(frame)

    def send_raw(self, frame: str | bytes) -> None:
        """Queue a ready frame. A client that does not read is cut off when its queue is full."""
        if len(self._outgoing) >= self._server.limits.max_queued_frames:
            self.cut()
            return
        self._outgoing.append(frame)
        self._something_to_write.set()

    async def _write(self) -> None:
        while True:
            await self._something_to_write.wait()
            self._something_to_write.clear()
            while self._outgoing and not self._held_up:
                frame = self._outgoing.popleft()
                if self._server.faults.silence:
                    continue
                try:
                    await self._put(frame)
                except (ConnectionError, RuntimeError):
                    return  # The reading side finds out and cleans up.

    async def _put(self, frame: str | bytes | _Close) -> None:
        if isinstance(frame, _Close):
            await self.close(frame.code)
        elif isinstance(frame, str):
            await self._websocket.send_str(frame)
        else:
            await self._websocket.send_bytes(frame)

    # Reading

    async def _read(self) -> None:
        while True:
            try:
                message = await self._websocket.receive(timeout=self._server.timings.idle_close)
            except TimeoutError:
                await self.close(1000)
                return
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            if len(message.data) > self._server.limits.max_frame_bytes:
                await self.close(1009)
                return
            if not self._server.faults.silence:
                await self._handle(frames.decode(self._version, message.data))

    async def _handle(self, message: Message | None) -> None:
        if message is None:
            return
        if message.topic == "phoenix" and message.event == "heartbeat":
            self._reply(message, "ok", {})
        elif message.event == "phx_join":
            await self._on_join(message)
        elif message.topic in self.channels:
            await self._on_push(self.channels[message.topic], message)
        elif message.event == "phx_leave":
            self._reply(message, "ok", {})
        else:
            self._reply_unmatched(message)

    def _reply(self, message: Message, status: str, response: dict[str, Any]) -> None:
        body = dumps({"status": status, "response": response})
        self.send(message.join_ref, message.ref, message.topic, "phx_reply", body)

    def _reply_unmatched(self, message: Message) -> None:
        body = dumps({"status": "error", "response": {"reason": "unmatched topic"}})
        self.send(None, message.ref, message.topic, "phx_reply", body)

    # Joining

    async def _on_join(self, message: Message) -> None:
        if self._server.faults.join_delay > 0:
            self._run(self._join_late(message, self._server.faults.join_delay))
        else:
            await self._join(message)

    async def _join_late(self, message: Message, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._join(message)

    async def _join(self, message: Message) -> None:
        if not message.topic.startswith(PREFIX):
            self._reply_unmatched(message)
            return
        try:
            channel = await self._admit(message)
        except JoinRefused as refused:
            await self._refuse(message, refused)
            return
        self._enter(channel, message)

    async def _refuse(self, message: Message, refused: JoinRefused) -> None:
        self._held_up = True
        await asyncio.sleep(self._server.timings.error_delay)
        self._held_up = False
        body = dumps({"status": "error", "response": {"reason": refused.reason}})
        if refused.close_code is not None:
            self._outgoing.appendleft(_Close(refused.close_code))
        self._outgoing.appendleft(
            frames.encode(self._version, message.join_ref, message.ref, message.topic, "phx_reply", body)
        )
        self._something_to_write.set()

    async def _admit(self, message: Message) -> Channel:
        """The channel that the join makes. Raises `JoinRefused`."""
        self._check_limits(message.topic)
        payload = message.payload if isinstance(message.payload, dict) else {}
        token = self._token_of(payload)
        config = payload.get("config")
        if config is not None and not isinstance(config, dict):
            raise JoinRefused("UnknownErrorOnChannel: no function clause matching in Access.get/3")
        channel = Channel(
            socket=self,
            topic=message.topic,
            join_ref=message.join_ref,
            token=token,
            entries=_entries(config, message.topic),
            config=JoinConfig.of(config or {}),
            legacy=config is None,
        )
        if channel.config.private:
            await self._check_rights(channel)
        return channel

    def _check_limits(self, topic: str) -> None:
        if self._server.faults.refuse_join is not None:
            raise JoinRefused(self._server.faults.refuse_join)
        if not self._server.allow_join():
            raise JoinRefused("ClientJoinRateLimitReached: Too many joins per second", close_code=1001)
        if topic not in self.channels and len(self.channels) >= self._server.limits.max_channels_per_socket:
            raise JoinRefused("ChannelRateLimitReached: Too many channels")
        if topic == PREFIX:
            raise JoinRefused("TopicNameRequired: You must provide a topic name")

    def _token_of(self, payload: dict[str, Any]) -> Token:
        text = tokens.own_token(payload.get("access_token") or payload.get("user_token"))
        try:
            return tokens.verify(text or self._api_key.text, self._server.jwt_secret)
        except TokenRefused as refused:
            raise JoinRefused(refused.in_join) from refused

    async def _check_rights(self, channel: Channel) -> None:
        try:
            readable, channel.writable = await self._server.database.rights_on(channel.name, channel.token)
        except psycopg.Error as error:
            log.warning("the rights on a private topic cannot be checked: %s", error)
            raise JoinRefused("UnableToCheckAuthorization: database is not reachable") from error
        if not readable:
            raise JoinRefused(
                f"Unauthorized: You do not have permissions to read from this Channel topic: {channel.name}"
            )

    async def _check_rights_again(self, channel: Channel) -> None:
        """A new token on a private topic may bring fewer rights than the join's."""
        try:
            await self._check_rights(channel)
        except JoinRefused as refused:
            reason = refused.reason.removeprefix("Unauthorized: ")
            channel.system(reason, status="error", extension="system")
            self.close_channel(channel)

    def _enter(self, channel: Channel, message: Message) -> None:
        previous = self.channels.get(channel.topic)
        if previous is not None:
            self._drop(previous)
        self.channels[channel.topic] = channel
        self._server.register(channel)
        self._reply(message, "ok", {"postgres_changes": [entry.echo() for entry in channel.entries]})
        if previous is not None:
            self._announce_close(previous)
        self._begin(channel)

    def _begin(self, channel: Channel) -> None:
        self._watch_token(channel)
        if channel.config.presence:
            channel.push("presence_state", "{}")
        if channel.config.replication_ready:
            self._tell_replication(channel)
        if channel.entries:
            changes, timings = self._server.changes, self._server.timings
            self.subscribe(channel, timings.warm_subscribe if changes.warm else timings.cold_subscribe)

    def _tell_replication(self, channel: Channel) -> None:
        if self._server.broadcasts_flow:
            channel.system(_REPLICATING, extension="system")
        else:
            channel.run("replication", self._wait_for_replication(channel))

    async def _wait_for_replication(self, channel: Channel) -> None:
        if await self._server.wait_for_broadcasts():
            channel.system(_REPLICATING, extension="system")
            return
        channel.system(_NOT_REPLICATING, status="error", extension="system")
        self.close_channel(channel)

    # Changes

    def subscribe(self, channel: Channel, span: Span) -> None:
        """Make the channel's subscription, perhaps anew, after a time within `span`; then tell the client."""
        # A push of a new token does not give up a first subscription that is still on its way.
        name = "subscribe" if channel.subscription is None else "resubscribe"
        delay = random.uniform(*span)  # noqa: S311 - a pause, no secret
        channel.run(name, self._subscribe(channel, delay))

    async def _subscribe(self, channel: Channel, delay: float) -> None:
        await asyncio.sleep(delay + self._server.faults.system_delay)
        try:
            subscription = await self._resolve(channel)
        except FilterRefused as refused:
            self._server.forget(channel)
            channel.system(str(refused), status="error")
            return
        self._server.forget(channel)
        channel.subscription = subscription
        self._server.changes.add(subscription)
        channel.system(_SUBSCRIBED)

    async def _resolve(self, channel: Channel) -> Subscription:
        wanted = [subscriptions.understand(entry) for entry in channel.entries]
        while True:
            try:
                await self._server.changes.run_warm()
                tables = [await self._tables(one, channel.token.role) for one in wanted]
                return Subscription(wanted, tables, channel.token, channel.deliver_change)
            except psycopg.OperationalError:
                await asyncio.sleep(self._server.timings.database_retry)

    async def _tables(self, wanted: Wanted, role: str) -> frozenset[int]:
        return await self._server.database.tables_of(wanted, role)

    # Pushes on a joined channel

    async def _on_push(self, channel: Channel, message: Message) -> None:
        if message.event == "phx_leave":
            self._reply(message, "ok", {})
            self.close_channel(channel)
        elif message.event == "access_token":
            self._on_access_token(channel, message.payload)
        elif message.event == "broadcast":
            self._on_broadcast(channel, message)
        elif message.event == "presence":
            self._on_presence(message)

    def _on_access_token(self, channel: Channel, payload: Any) -> None:
        text = tokens.own_token(payload.get("access_token") if isinstance(payload, dict) else None)
        if text is None or text == channel.token.text:
            return
        try:
            channel.token = tokens.verify(text, self._server.jwt_secret)
        except TokenRefused as refused:
            channel.system(refused.in_push, status="error", extension="system")
            self.close_channel(channel)
            return
        self._watch_token(channel)
        if channel.config.private:
            channel.run("rights", self._check_rights_again(channel))
        if channel.entries:
            self.subscribe(channel, self._server.timings.resubscribe)

    def _on_broadcast(self, channel: Channel, message: Message) -> None:
        if channel.writable and message.payload:
            self._server.relay(channel, message.payload)
        if channel.config.ack:
            self._reply(message, "ok", {})

    def _on_presence(self, message: Message) -> None:
        payload = message.payload if isinstance(message.payload, dict) else {}
        is_track = str(payload.get("event", "")).lower() == "track"
        if is_track and not isinstance(payload.get("payload", {}), dict):
            self._reply(message, "error", {"reason": "Presence track payload must be a map"})
        else:
            self._reply(message, "ok", {})

    # Ends

    def _watch_token(self, channel: Channel) -> None:
        if channel.expiry is not None:
            channel.expiry.cancel()
        left = channel.token.seconds_left()
        if left <= 0:
            channel.system(tokens.expired(channel.token).in_push, status="error", extension="system")
            self.close_channel(channel)
            return
        wait = min(left, self._server.timings.token_check)
        channel.expiry = asyncio.get_running_loop().call_later(wait, self._watch_token, channel)

    def close_channel(self, channel: Channel) -> None:
        """The server's end of a channel: phx_close, whose ref is that of the join."""
        self._announce_close(channel)
        self._drop(channel)

    def _announce_close(self, channel: Channel) -> None:
        self.send(channel.join_ref, channel.join_ref, channel.topic, "phx_close", "{}")

    def crash_channel(self, channel: Channel) -> None:
        """What the client sees when the channel's process dies."""
        self.send(channel.join_ref, channel.join_ref, channel.topic, "phx_error", dumps({"reason": "channel_crash"}))
        self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        channel.end()
        self._server.unregister(channel)
        if self.channels.get(channel.topic) is channel:
            del self.channels[channel.topic]

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name="realtime-late-join")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _entries(config: dict[str, Any] | None, topic: str) -> Sequence[Entry]:
    if config is None:
        return subscriptions.legacy_entries_of(topic.removeprefix(PREFIX))
    try:
        return subscriptions.entries_of(config)
    except EntryRefused as refused:
        raise JoinRefused(str(refused)) from refused
