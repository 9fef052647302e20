"""OpenClaw's Gateway as it was recorded, on a real socket: handshake, refusals, answers, events, and its bad days."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from dispatcher.openclaw.hold import GatewayHold
from dispatcher.openclaw.state import GatewayState

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "openclaw"
TOKEN = "kit-token"
BACKWARDS = 4
Answer = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


def recorded(what: str, direction: str = "<-") -> dict[str, Any]:
    """A copy of the first recorded frame of that name."""
    for line in (RECORDINGS / "rpc-frames.jsonl").read_text().splitlines():
        entry = json.loads(line)
        frame = entry["frame"]
        if (entry["what"], entry["direction"]) == (what, direction) and frame.get("type") != "event":
            return dict(frame)
    raise LookupError(what)


def payload(what: str) -> dict[str, Any]:
    """What a recorded answer carried."""
    return dict(recorded(what)["payload"])


def error(what: str) -> dict[str, Any]:
    """What a recorded refusal said."""
    return dict(recorded(what)["error"])


RESTARTING = {
    "code": "UNAVAILABLE",
    "message": "sessions.list unavailable during gateway restart",
    "retryable": True,
    "retryAfterMs": 1000,
    "details": {"method": "sessions.list", "reason": "gateway-restarting", "phase": "accepting"},
}
WORK_START_CHANGED = {
    "code": "UNAVAILABLE",
    "message": 'Session "agent:linus:main" changed while starting work. Retry. | SESSION_WORK_START_CHANGED',
}


class ScriptedGateway:
    """Answers by method name; `requests` are those it got. Any method may be given another answer at any time.

    Requests of the method `backwards` are answered when there are four, the last one first.
    `day`: `ready`, `starting` (refuses connect), `draining` (refuses every request, and new connections with 503).
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.token = TOKEN
        self.protocol = 4
        self.boot_id = str(uuid4())
        self.day = "ready"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.connections: list[ServerConnection] = []
        self.connected = 0
        self.answers: dict[str, Answer] = {
            "sessions.list": payload("idle: which sessions have a turn"),
            "tasks.list": {"tasks": []},
            "agents.list": {"agents": [{"id": "main"}, {"id": "ada", "workspace": "/srv/ada"}]},
        }
        self.refusals: dict[str, dict[str, Any]] = {}
        self.backwards = ""
        self._kept: list[dict[str, Any]] = []
        self._answering = threading.Event()
        self._answering.set()
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    def config(self, **gateway: object) -> dict[str, Any]:
        """What its openclaw.json would say."""
        auth = {"mode": "token", "token": self.token}
        return {"gateway": {"mode": "local", "port": self.port, "auth": auth, **gateway}}

    def start(self) -> "ScriptedGateway":
        server = serve(self._serve, "127.0.0.1", self.port, process_request=self._admit, compression=None)
        self.port = server.socket.getsockname()[1]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """As kill -9: connections are gone, nobody listens."""
        self.go_on()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(5)
            self._server = None
        self.drop()

    def restart(self) -> None:
        """The next process on the same port."""
        self.boot_id = str(uuid4())
        self.day = "ready"
        self.start()

    def drop(self) -> None:
        """Every open connection is lost."""
        for connection in list(self.connections):
            with suppress(OSError):
                connection.socket.shutdown(2)

    def hang(self) -> None:
        """As SIGSTOP: what is asked from now on is answered after `go_on`."""
        self._answering.clear()

    def go_on(self) -> None:
        self._answering.set()

    def tell(self, event: str, payload: object) -> None:
        """An event to everybody."""
        text = json.dumps({"type": "event", "event": event, "payload": payload, "seq": 1}, separators=(",", ":"))
        for connection in list(self.connections):
            connection.send(text)

    def asked(self, method: str) -> list[dict[str, Any]]:
        return [params for name, params in list(self.requests) if name == method]

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        if self.day == "draining":
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "Gateway websocket admission closed")
        return None

    def _serve(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        self.connected += 1
        with suppress(ConnectionClosed):
            self._answering.wait()
            challenge = {"type": "event", "event": "connect.challenge", "payload": {"nonce": str(uuid4()), "ts": 1}}
            connection.send(json.dumps(challenge, separators=(",", ":")))
            for text in connection:
                frame = json.loads(text)
                self.requests.append((frame["method"], frame["params"]))
                self._answering.wait()
                for asked in self._ripe(frame):
                    for answer in self._answers_to(asked):
                        connection.send(json.dumps({"type": "res", "id": asked["id"], **answer}))
                if frame["method"] == "connect" and self._refusal_of_connect(frame["params"]) is not None:
                    connection.close(1008, "refused")
        self.connections.remove(connection)

    def _ripe(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        """What is to be answered now."""
        if frame["method"] != self.backwards:
            return [frame]
        self._kept.append(frame)
        if len(self._kept) < BACKWARDS:
            return []
        kept, self._kept = self._kept, []
        return kept[::-1]

    def _answers_to(self, frame: dict[str, Any]) -> Iterator[dict[str, Any]]:
        refusal = self._refusal(frame)
        if refusal is not None:
            yield {"ok": False, "error": refusal}
            return
        if frame["method"] == "connect":
            yield {"ok": True, "payload": self._hello()}
            return
        answer = self.answers[frame["method"]]
        yield {"ok": True, "payload": answer(frame["params"]) if callable(answer) else answer}

    def _refusal(self, frame: dict[str, Any]) -> dict[str, Any] | None:
        if frame["method"] == "connect":
            return self._refusal_of_connect(frame["params"])
        if self.day == "draining":
            return RESTARTING
        return self.refusals.get(frame["method"])

    def _refusal_of_connect(self, params: dict[str, Any]) -> dict[str, Any] | None:
        if self.day == "starting":
            return error("connect while the Gateway is starting")
        if not params["minProtocol"] <= self.protocol <= params["maxProtocol"]:
            details = {"code": "PROTOCOL_MISMATCH", "expectedProtocol": self.protocol}
            return {"code": "INVALID_REQUEST", "message": "protocol mismatch", "details": details}
        if params["auth"].get("token") != self.token:
            return error("wrong token: connect")
        return self.refusals.get("connect")

    def _hello(self) -> dict[str, Any]:
        hello = payload("handshake: connect")
        scopes = ["operator.read", "operator.write", "operator.admin"]
        return {**hello, "server": {**hello["server"], "bootId": self.boot_id}, "auth": {"scopes": scopes}}


def no_hold() -> GatewayHold:
    """Where there is no Gateway to look at."""
    return GatewayHold(lambda: GatewayState("unused", datetime.now(UTC)))


def said(name: str) -> str:
    """What a recorded `openclaw agent` printed on both streams."""
    parts = [RECORDINGS / f"{name}.json", RECORDINGS / f"{name}.stderr.txt"]
    return "".join(part.read_text() for part in parts if part.exists())


@contextmanager
def scripted_gateway(port: int = 0) -> Iterator[ScriptedGateway]:
    """A running one, gone at the end."""
    gateway = ScriptedGateway(port).start()
    try:
        yield gateway
    finally:
        gateway.stop()
