"""The official Realtime client, with its known weaknesses closed off in one place.

What is replaced (`realtime` 2.34.1, all in `realtime/_async`; a test fails when the library moves it):
- `client.connect`, by which it opens its socket: takes the proxy from the environment, ends at 1 MiB.
- `Channel._handle_message`: an exception in it ends the read task for good, and a phx_close meant for an
  earlier join of the same topic closes the present one.
- the iteration over the socket, for broadcasts: the library checks each against all its models and formats it twice
  for a log nobody keeps, 0.2 of the 4 ms from a commit to a start. What is not plainly a broadcast it reads itself.
- its own reconnecting, rejoining and heartbeats: the first gives up after 15 s, the second joins on top of a
  channel that lives, the third never looks for a reply. Our supervisor does all three.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit

import realtime
import websockets
from realtime import AsyncRealtimeChannel, AsyncRealtimeClient
from realtime._async import channel as channel_library
from realtime._async import client as library
from realtime.message import ChannelCloseMessage, ChannelErrorMessage, Message, ServerMessage
from realtime.types import PHOENIX_CHANNEL, BroadcastPayload, ChannelEvents, RealtimeChannelOptions
from websockets.asyncio.client import ClientConnection

from dispatcher import events
from dispatcher.errors import DispatcherError
from dispatcher.logs import get_logger
from dispatcher.supabase.network import Network

MINIMUM_VERSION = (2, 34, 1)
MAX_FRAME_BYTES = 8 * 1024 * 1024
_NEVER = 86_400
# Characters of a broadcast that is read here; one of ours has a few hundred.
_LONGEST_PLAIN = 65_536
_UNRECOGNISED = "Unrecognized message format"
# Two to three errors for every attempt of an outage that may last for days; the supervisor says it once.
_SAID_BY_US = (
    "Connection attempt failed",
    "Connection failed permanently",
    "WebSocket connection closed",
    "Auto-reconnect disabled",
    "join push",
)
_LOGGERS = (library.logger, channel_library.logger)

log = get_logger(__name__)

_socket_options: ContextVar[Mapping[str, Any] | None] = ContextVar("realtime_socket_options", default=None)


def _connect(uri: str, **options: Any) -> websockets.connect:
    """What the library calls to open a socket. Our clients set options; others get the library's."""
    return websockets.connect(uri, **{**options, **(_socket_options.get() or {})})


def require_version(version: str = realtime.__version__) -> None:
    """Raises DispatcherError for a client older than the first one that can be supervised."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if numbers < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise DispatcherError(f"realtime {version} goes deaf without a word; {wanted} or newer is needed")


class _Connection(ClientConnection):
    """A socket whose frames `take` is offered before whoever iterates gets those it leaves."""

    take: Callable[[str | bytes], bool] | None = None

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        async for frame in super().__aiter__():
            if self.take is None or not self.take(frame):
                yield frame


class FencedChannel(AsyncRealtimeChannel):
    """A channel that no exception can end, and that ignores what was meant for an earlier join."""

    def _handle_message(self, message: ServerMessage) -> None:
        if isinstance(message, ChannelCloseMessage | ChannelErrorMessage) and self._is_of_another_join(message.ref):
            return
        with _survived():
            super()._handle_message(message)

    def hear(self, payload: BroadcastPayload) -> None:
        """A broadcast of this topic, as `_handle_message` would hand it on."""
        with _survived():
            for callback in self.broadcast_callbacks:
                callback(payload)

    def _is_of_another_join(self, ref: str | None) -> bool:
        return ref is not None and ref != self.join_push.ref


@contextlib.contextmanager
def _survived() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the read task must survive whatever a frame or a callback does
        log.error(events.LIBRARY, msg="A Realtime frame could not be handled", exc_info=error)


class _HeartbeatEar(AsyncRealtimeChannel):
    """Listens on the topic of heartbeat replies, which the library throws away."""

    def __init__(self, socket: AsyncRealtimeClient) -> None:
        super().__init__(socket, PHOENIX_CHANNEL)
        self.heard_at = 0.0

    def _handle_message(self, message: ServerMessage) -> None:  # noqa: ARG002 - any reply is a sign of life
        self.heard_at = time.monotonic()


class SupervisedClient(AsyncRealtimeClient):
    """One socket, used until the first doubt and then thrown away whole: it never reconnects by itself.

    Args:
        url: the project's URL.
        key: service key; goes into the URL of the socket and into every join.
        timeout: seconds to open the socket, and to wait for the reply to a join.
        network: authorities and proxy; never the environment's.
    """

    def __init__(self, url: str, key: str, *, timeout: float, network: Network) -> None:
        super().__init__(
            realtime_url(url),
            token=key,
            auto_reconnect=False,
            max_retries=1,
            hb_interval=_NEVER,
            timeout=timeout,  # type: ignore[arg-type] # annotated as int, only ever slept on
        )
        self._options: dict[str, Any] = {
            "proxy": network.proxy and with_plain_password(network.proxy),
            "max_size": MAX_FRAME_BYTES,
            "compression": None,
            "close_timeout": 1,
            "create_connection": _Connection,
        }
        if url.strip().startswith("https:"):
            self._options["ssl"] = network.ssl_context
        self._ear = _HeartbeatEar(self)
        self._beat_at = 0.0
        self.channels[PHOENIX_CHANNEL] = self._ear

    async def connect(self) -> None:
        """Opens the socket, once. Raises whatever prevents it."""
        token = _socket_options.set(self._options)
        try:
            await super().connect()
        finally:
            _socket_options.reset(token)
        if isinstance(self._ws_connection, _Connection):
            self._ws_connection.take = self._take

    def _take(self, frame: str | bytes) -> bool:
        """Hands a plain broadcast to its channel; False for every other frame, which is then the library's."""
        heard = _plain_broadcast(frame)
        if heard is None:
            return False
        topic, payload = heard
        channel = self.channels.get(topic)
        if not isinstance(channel, FencedChannel):
            return False
        channel.hear(payload)
        return True

    def channel(self, topic: str, params: RealtimeChannelOptions | None = None) -> FencedChannel:
        """A new channel of that topic, also where an earlier one has not quite gone."""
        fresh = FencedChannel(self, f"realtime:{topic}", params)
        self.channels[fresh.topic] = fresh
        return fresh

    async def beat(self) -> None:
        """Sends a heartbeat."""
        self._beat_at = time.monotonic()
        await self.send(Message(topic=PHOENIX_CHANNEL, event=ChannelEvents.heartbeat, payload={}, ref="heartbeat"))

    @property
    def beat_at(self) -> float:
        """When the last heartbeat was sent (monotonic seconds, 0 for never)."""
        return self._beat_at

    @property
    def beat_is_answered(self) -> bool:
        """Whether the last heartbeat was replied to."""
        return self._ear.heard_at >= self._beat_at

    def death(self) -> str | None:
        """What is wrong with the socket or its read task; None when both live."""
        if not self.is_connected:
            return "the connection was closed"
        if self._listen_task is None or not self._listen_task.done():
            return None
        error = None if self._listen_task.cancelled() else self._listen_task.exception()
        return f"the read task ended: {error}" if error else "the read task ended"

    async def discard(self) -> None:
        """Ends everything it started: timers of channels, tasks, the socket."""
        for channel in list(self.channels.values()):
            channel.rejoin_timer.reset()
            channel.join_push.destroy()
        await self.close()


def _plain_broadcast(frame: str | bytes) -> tuple[str, BroadcastPayload] | None:
    """Topic and payload of a broadcast that has the shape it should; None for any other frame."""
    if isinstance(frame, bytes) or '"broadcast"' not in frame or len(frame) > _LONGEST_PLAIN:
        return None
    try:
        message = json.loads(frame)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("event") != "broadcast" or message.get("ref") is not None:
        return None
    topic, payload = message.get("topic"), message.get("payload")
    if not isinstance(topic, str) or not isinstance(payload, dict):
        return None
    is_whole = isinstance(payload.get("event"), str) and isinstance(payload.get("payload"), dict)
    return (topic, cast("BroadcastPayload", payload)) if is_whole else None


class FrameAlarm(logging.Filter):
    """Notices frames the library could not read, and keeps out of the log their rows and what we say ourselves.

    A filter, not a handler: `configure_logging` takes handlers away. `on_alarm` gets True when the frame says
    that the key may not read the table.
    """

    def __init__(self, on_alarm: Callable[[bool], None]) -> None:
        super().__init__()
        self._on_alarm = on_alarm

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets a record pass, without the frame in it, unless the supervisor reports the same thing once."""
        text = record.msg if isinstance(record.msg, str) else ""
        if text.startswith(_UNRECOGNISED):
            self._on_alarm("Error 401" in text)
            record.msg, record.args = f"{_UNRECOGNISED} ({len(text)} characters left out)", ()
        return not text.startswith(_SAID_BY_US)

    def install(self) -> None:
        """Starts to listen."""
        for logger in _LOGGERS:
            logger.addFilter(self)

    def remove(self) -> None:
        """Stops."""
        for logger in _LOGGERS:
            logger.removeFilter(self)


def with_plain_password(proxy: str) -> str:
    """The same proxy for `websockets`, which takes user and password as they stand, escapes and all.

    A password with `/`, `?` or `#` in it has no such form; the proxy then refuses it, and is named.
    """
    parts = urlsplit(proxy)
    userinfo, at, address = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=f"{unquote(userinfo)}{at}{address}"))
    found = urlsplit(plain)
    wanted = (parts.hostname, unquote(parts.username or ""), unquote(parts.password or ""))
    return plain if (found.hostname, found.username or "", found.password or "") == wanted else proxy


def realtime_url(base_url: str) -> str:
    """Where the library wants to be pointed; it adds `/websocket` itself."""
    trimmed = base_url.strip().rstrip("/")
    return trimmed if trimmed.endswith("/realtime/v1") else f"{trimmed}/realtime/v1"


require_version()
library.connect = _connect  # type: ignore[attr-defined,assignment] # the seam: called from the library's globals
