"""A WebSocket client without any opinion: sends texts, sorts what comes by topic."""

import json
import time
from collections import defaultdict, deque
from typing import Any, Self

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

DEADLINE = 10.0


class RawClient:
    """One connection. `expect` takes the next frame of a topic; frames of other topics wait their turn."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, open_timeout: float = 10) -> None:
        self.connection: ClientConnection = connect(
            url,
            additional_headers=headers,
            compression=None,
            max_size=None,
            proxy=None,
            ping_interval=None,
            open_timeout=open_timeout,
        )
        self.v2 = "vsn=2.0.0" in url
        self.waiting: defaultdict[str, deque[str]] = defaultdict(deque)
        self._ref = 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, text: str | bytes) -> None:
        self.connection.send(text)

    def push(self, topic: str, event: str, payload: Any, ref: str | None = None, join_ref: Any = None) -> str:
        """A frame in the connection's version; returns its ref."""
        if ref is None:
            self._ref += 1
            ref = str(self._ref)
        frame = {"topic": topic, "event": event, "payload": payload, "ref": ref, "join_ref": join_ref}
        self.send(json.dumps([join_ref, ref, topic, event, payload] if self.v2 else frame))
        return ref

    def join(self, topic: str, *changes: dict[str, Any], token: str | None = None, **config: Any) -> str:
        """A join; returns its ref. The reply is left to the caller."""
        payload: dict[str, Any] = {"config": {"postgres_changes": list(changes), **config}}
        if token is not None:
            payload["access_token"] = token
        self._ref += 1
        return self.push(topic, "phx_join", payload, str(self._ref), str(self._ref))

    def subscribe(self, topic: str, *changes: dict[str, Any], token: str | None = None, **config: Any) -> str:
        """A join whose reply and whose "Subscribed to PostgreSQL" have come."""
        ref = self.join(topic, *changes, token=token, **config)
        assert self.reply(topic)["status"] == "ok"
        assert self.payload(topic, "system")["message"] == "Subscribed to PostgreSQL"
        return ref

    def listen(self, topic: str, *, token: str | None = None, **broadcast: Any) -> str:
        """A join of a private topic for broadcasts, ready."""
        ref = self.join(topic, token=token, private=True, broadcast={"replication_ready": True, **broadcast})
        assert self.reply(topic)["status"] == "ok"
        assert self.payload(topic, "system")["message"] == "Replication connection established"
        return ref

    def expect(self, topic: str, deadline: float = DEADLINE) -> str:
        """The next frame of the topic, as text. Raises TimeoutError or ConnectionClosed."""
        end = time.monotonic() + deadline
        while not self.waiting[topic]:
            self._receive(end - time.monotonic())
        return self.waiting[topic].popleft()

    def message(self, topic: str, deadline: float = DEADLINE) -> dict[str, Any]:
        """The next frame of the topic, parsed: join_ref (v2), ref, topic, event, payload."""
        return self.parse(self.expect(topic, deadline))

    def payload(self, topic: str, event: str, deadline: float = DEADLINE) -> Any:
        """The payload of the topic's next frame, which must be of this event."""
        message = self.message(topic, deadline)
        assert message["event"] == event, message
        return message["payload"]

    def reply(self, topic: str) -> Any:
        """The payload of the next frame, which must be a reply."""
        return self.payload(topic, "phx_reply")

    def parse(self, text: str) -> dict[str, Any]:
        frame = json.loads(text)
        if isinstance(frame, list):
            return dict(zip(("join_ref", "ref", "topic", "event", "payload"), frame, strict=True))
        return dict(frame)

    def sync(self) -> None:
        """A heartbeat and its reply: whatever the server had queued before has arrived then."""
        ref = self.push("phoenix", "heartbeat", {})
        while self.message("phoenix")["ref"] != ref:
            pass

    def rest(self) -> list[str]:
        """After a heartbeat: every frame that nobody expected."""
        self.sync()
        return [frame for frames in self.waiting.values() for frame in frames]

    def close_code(self, deadline: float = DEADLINE) -> int:
        """Wait until the server has closed; the code, 1006 without a close frame."""
        end = time.monotonic() + deadline
        try:
            while True:
                self._receive(end - time.monotonic())
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else 1006

    def _receive(self, left: float) -> None:
        if left <= 0:
            raise TimeoutError
        data = self.connection.recv(timeout=left)
        text = data if isinstance(data, str) else data.decode("latin-1")
        try:
            topic = str(self.parse(text)["topic"])
        except (ValueError, KeyError):
            topic = "?"
        self.waiting[topic].append(text)
