"""A scripted Realtime server: speaks the Phoenix frames of protocol version 1.0.0 and misbehaves on demand.

For what a well-behaved server cannot be made to do. It runs in a thread; every frame it received is kept.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

Frame = dict[str, Any]


@dataclass
class Script:
    """How to behave from now on. Read anew for every frame.

    refuse_connect: HTTP status for handshakes.
    join_error: reason of every reply to a join; join_reply: whether there is one at all.
    confirm_broadcast, confirm_changes: whether to say that events flow.
    tables: the published ones, None for all.
    heartbeats, leaves: whether to answer them.
    """

    refuse_connect: int | None = None
    join_error: str | None = None
    join_reply: bool = True
    confirm_broadcast: bool = True
    confirm_changes: bool = True
    tables: frozenset[str] | None = None
    heartbeats: bool = True
    leaves: bool = True


@dataclass(eq=False)
class Socket:
    """One connection: the channels joined on it, by topic, with the payload of their join."""

    connection: ServerConnection
    apikey: str
    topics: dict[str, Frame] = field(default_factory=dict)
    join_refs: dict[str, str] = field(default_factory=dict)


class PhoenixServer:
    """Listens on loopback until `stop`. Every method is for the test's thread."""

    def __init__(self) -> None:
        self.script = Script()
        self.frames: list[Frame] = []
        self.sockets: list[Socket] = []
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run_loop, name="phoenix", daemon=True)
        self._thread.start()
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Listens, on the same port as before."""
        self._do(self._open())

    def close(self, code: int = 1012) -> None:
        """Stops listening and ends every connection with that code."""
        self._do(self._close(code))

    def stop(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def drop(self, code: int | None = None) -> None:
        """Ends every connection: with a close frame, or (None) by cutting the line."""
        self._do(self._drop(code))

    def send(self, event: str, payload: Frame, topic: str | None = None, ref: str | None = None) -> None:
        """Sends a frame to every channel, or to those of one topic."""
        for socket in list(self.sockets):
            for joined in list(socket.topics):
                if topic in {None, joined}:
                    self.send_raw(json.dumps({"topic": joined, "event": event, "payload": payload, "ref": ref}))

    def send_raw(self, text: str) -> None:
        """Sends this text to every connection."""
        self._do(self._send_all(text))

    def broadcast(self, event: str, payload: Frame) -> None:
        """A message of `realtime.send`, to every private channel."""
        for topic in self.topics(private=True):
            self.send(
                "broadcast",
                {"type": "broadcast", "event": event, "payload": payload, "meta": {"id": "m"}},
                topic,
            )

    def change(self, event: str, table: str, record: Frame | None, **more: Any) -> None:
        """A change of a row, to every channel with an entry for it."""
        for socket in list(self.sockets):
            for topic, join in list(socket.topics.items()):
                ids = [entry_id(e) for e in entries_of(join) if (e["event"], e["table"]) == (event, table)]
                if ids:
                    data = {"table": table, "type": event, "record": record, "columns": [], "errors": None}
                    data |= {"schema": "public", "commit_timestamp": "2026-11-30T11:47:35.624Z", **more}
                    self.send("postgres_changes", {"data": data, "ids": ids}, topic)

    def confirm(self, topic: str) -> None:
        """Says that events flow on that channel."""
        self.send("system", system(topic, is_private(self.joins(topic)[-1]["payload"])), topic)

    def topics(self, *, private: bool | None = None) -> list[str]:
        """What is joined now."""
        return [
            topic
            for socket in self.sockets
            for topic, join in socket.topics.items()
            if private in {None, is_private(join)}
        ]

    def joins(self, topic: str | None = None) -> list[Frame]:
        """The join frames received so far."""
        return [f for f in list(self.frames) if f["event"] == "phx_join" and topic in {None, f["topic"]}]

    def events(self, name: str) -> list[Frame]:
        """The frames of that event received so far."""
        return [frame for frame in list(self.frames) if frame["event"] == name]

    # -------------------------------------------------------------------------------- in the loop

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _open(self) -> None:
        options: dict[str, Any] = {
            "max_size": None,
            "ping_interval": None,
            "close_timeout": 1,
            "compression": None,
        }
        self._server = await serve(self._serve, "127.0.0.1", self.port, process_request=self._handshake, **options)
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def _close(self, code: int) -> None:
        if self._server is not None:
            self._server.close(close_connections=False)
            await self._drop(code)
            await self._server.wait_closed()
            self._server = None

    async def _drop(self, code: int | None) -> None:
        for socket in list(self.sockets):
            if code is None:
                socket.connection.transport.abort()
            else:
                await socket.connection.close(code)

    def _handshake(self, connection: ServerConnection, _request: Request) -> Response | None:
        status = self.script.refuse_connect
        if status is None:
            return None
        response = connection.respond(status, json.dumps({"error": "Token has expired"}))
        response.headers["Content-Type"] = "application/json"
        return response

    async def _serve(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        [key] = parse_qs(urlsplit(connection.request.path).query)["apikey"]
        socket = Socket(connection, key)
        self.connections += 1
        self.sockets.append(socket)
        try:
            async for text in connection:
                frame = json.loads(text)
                self.frames.append(frame)
                for answer in self._answers(socket, frame):
                    await connection.send(json.dumps(answer))
        except ConnectionClosed:
            pass
        finally:
            self.sockets.remove(socket)

    async def _send_all(self, text: str) -> None:
        for socket in list(self.sockets):
            await socket.connection.send(text)

    def _answers(self, socket: Socket, frame: Frame) -> list[Frame]:
        answer: dict[str, Callable[[Socket, Frame], list[Frame]]] = {
            "heartbeat": self._heartbeat,
            "phx_join": self._join,
            "phx_leave": self._leave,
        }
        return answer.get(frame["event"], lambda _socket, _frame: [])(socket, frame)

    def _heartbeat(self, _socket: Socket, frame: Frame) -> list[Frame]:
        return [reply(frame, {})] if self.script.heartbeats else []

    def _join(self, socket: Socket, frame: Frame) -> list[Frame]:
        topic = frame["topic"]
        if not self.script.join_reply:
            return []
        if self.script.join_error:
            return [reply(frame, {"reason": self.script.join_error}, "error")]
        old_ref = socket.join_refs.get(topic)
        socket.topics[topic], socket.join_refs[topic] = frame["payload"], frame["ref"]
        echoed = [{**entry, "id": entry_id(entry)} for entry in entries_of(frame["payload"])]
        superseded = [closed(topic, old_ref)] if old_ref else []
        return [reply(frame, {"postgres_changes": echoed}), *superseded, *self._confirmation(topic, frame)]

    def _confirmation(self, topic: str, frame: Frame) -> list[Frame]:
        published, entries = self.script.tables, entries_of(frame["payload"])
        wrong = [e["table"] for e in entries if published is not None and e["table"] not in published]
        if wrong:
            text = f"Unable to subscribe to changes with given parameters. [table: {wrong[0]}]"
            return [message(topic, system(topic, private=False) | {"status": "error", "message": text})]
        private = is_private(frame["payload"])
        confirmed = self.script.confirm_broadcast if private else self.script.confirm_changes and entries
        return [message(topic, system(topic, private))] if confirmed else []

    def _leave(self, socket: Socket, frame: Frame) -> list[Frame]:
        topic = frame["topic"]
        if not self.script.leaves:
            return []
        socket.topics.pop(topic, None)
        ref = socket.join_refs.pop(topic, None)
        return [reply(frame, {}), *([closed(topic, ref)] if ref else [])]


def reply(frame: Frame, response: Frame, status: str = "ok") -> Frame:
    payload = {"status": status, "response": response}
    return {"topic": frame["topic"], "event": "phx_reply", "ref": frame["ref"], "payload": payload}


def closed(topic: str, ref: str | None) -> Frame:
    return {"topic": topic, "event": "phx_close", "ref": ref, "payload": {}}


def message(topic: str, payload: Frame) -> Frame:
    return {"topic": topic, "event": "system", "ref": None, "payload": payload}


def system(topic: str, private: bool) -> Frame:
    said = "Replication connection established" if private else "Subscribed to PostgreSQL"
    extension = "system" if private else "postgres_changes"
    channel = topic.removeprefix("realtime:")
    return {"message": said, "status": "ok", "extension": extension, "channel": channel}


def entries_of(join: Frame) -> list[Frame]:
    entries: list[Frame] = join["config"].get("postgres_changes") or []
    return entries


def entry_id(entry: Frame) -> int:
    return 1 + sum(json.dumps(entry, sort_keys=True).encode()) % 100_000


def is_private(join: Frame) -> bool:
    return bool(join["config"]["private"])
