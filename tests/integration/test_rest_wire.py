"""The REST client against a server that cuts, stalls and closes at chosen moments."""

import contextlib
import gzip
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from dispatcher.errors import ServiceUnavailable
from dispatcher.supabase.rest import RestClient, Timeouts

Act = Callable[[socket.socket, dict[str, object]], bool]


class WireServer:
    """HTTP/1.1 with keep-alive, just enough of it. `act` gets each request and says whether to keep the connection."""

    def __init__(self) -> None:
        self.act: Act = answer
        self.requests: list[dict[str, object]] = []
        self.connections = 0
        self.lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close_idle(self) -> None:
        """What a server or proxy does to connections it has not heard of for a while."""
        with self.lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def stop(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self.close_idle()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self.lock:
                self.connections += 1
                self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while (body := read_request(connection)) is not None:
                with self.lock:
                    self.requests.append(body)
                if not self.act(connection, body):
                    break
            with self.lock:
                if connection in self._open:
                    self._open.remove(connection)


def read_request(connection: socket.socket) -> dict[str, object] | None:
    """The JSON body of the next request; None when the client has gone."""
    received = b""
    try:
        while b"\r\n\r\n" not in received:
            if not (piece := connection.recv(65536)):
                return None
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0].endswith(b"HTTP/1.1")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        wanted = int(lengths[0].split(b":")[1]) if lengths else 0
        while len(body) < wanted:
            body += connection.recv(65536)
    except OSError:
        return None
    return dict(json.loads(body)) if body else {}


def answer(connection: socket.socket, body: dict[str, object]) -> bool:
    """Answers with what was asked, and keeps the connection."""
    text = json.dumps({"granted": True, "asked": body}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    connection.sendall(head.encode() + text)
    return True


@pytest.fixture
def server() -> Iterator[WireServer]:
    started = WireServer()
    yield started
    started.stop()


@pytest.fixture
def rest(server: WireServer) -> Iterator[RestClient]:
    client = RestClient(server.url, "key", timeouts=Timeouts(call=3.0, read=0.4))
    yield client
    client.close()


def test_a_connection_is_kept_and_can_be_opened_beforehand(server: WireServer, rest: RestClient) -> None:
    rest.warm()
    for _ in range(5):
        rest.rpc("claim_wake", {})
    assert server.connections == 1


def test_a_connection_closed_while_idle_costs_no_call(server: WireServer, rest: RestClient) -> None:
    for _ in range(5):
        assert rest.rpc("claim_wake", {})["granted"]
        server.close_idle()
        assert rest.rpc("claim_wake", {})["granted"]  # noticed before anything was sent: no repeat is needed
    assert len(server.requests) == 10


def test_ff28_an_answer_lost_after_execution_is_fetched_again_with_the_same_token(
    server: WireServer, rest: RestClient
) -> None:
    granted: dict[object, int] = {}
    cut = [True]

    def claim_then_cut(connection: socket.socket, body: dict[str, object]) -> bool:
        granted.setdefault(body["p_claim_request"], len(granted))
        return False if cut and cut.pop() else answer(connection, body)

    server.act = claim_then_cut
    assert rest.rpc("claim_wake", {"p_claim_request": "token-1"}, retry=True)["granted"]
    assert granted == {"token-1": 0}
    assert len(server.requests) == 2


def test_ff28_an_answer_lost_is_an_error_when_a_repeat_could_do_harm(server: WireServer, rest: RestClient) -> None:
    server.act = lambda _connection, _body: False
    with pytest.raises(ServiceUnavailable, match="may have been executed"):
        rest.rpc("claim_wake", {})
    assert len(server.requests) == 1


def test_ff21_a_server_that_stalls_is_left_in_time(server: WireServer, rest: RestClient) -> None:
    release = threading.Event()

    def stall(_connection: socket.socket, _body: dict[str, object]) -> bool:
        release.wait(10)
        return False

    server.act = stall
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="in time"):
        rest.rpc("claim_wake", {}, retry=True)
    assert time.monotonic() - started < 3.5
    assert len(server.requests) >= 2
    release.set()


def test_a_long_call_may_take_the_time_it_was_given(server: WireServer, rest: RestClient) -> None:
    def slowly(connection: socket.socket, body: dict[str, object]) -> bool:
        threading.Event().wait(0.6)  # longer than the client's ordinary patience with one attempt
        return answer(connection, body)

    server.act = slowly
    assert rest.rpc("sweep_inbox", {}, timeout=3.0)["granted"]


def test_a_closed_port_is_named(server: WireServer) -> None:
    client = RestClient(server.url, "key", timeouts=Timeouts(call=0.3))
    server.stop()
    with pytest.raises(ServiceUnavailable, match=r"cannot reach http://127.0.0.1:\d+/rest/v1.*refused"):
        client.rpc("claim_wake", {})
    with pytest.raises(ServiceUnavailable, match="cannot reach"):
        client.warm()
    client.close()


def test_ff29_threads_survive_a_server_that_ends_connections_again_and_again(server: WireServer) -> None:
    client = RestClient(server.url, "key")
    served = Counter[str]()
    failures: list[BaseException] = []

    def close_every_fiftieth(connection: socket.socket, body: dict[str, object]) -> bool:
        with server.lock:
            served[str(body["p_row"])] += 1
            is_last = sum(served.values()) % 50 == 0
        answer(connection, body)
        return not is_last

    def claim(worker: int) -> None:
        try:
            for row in range(200):
                client.rpc("claim_wake", {"p_row": f"{worker}/{row}"}, retry=True)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    server.act = close_every_fiftieth
    threads = [threading.Thread(target=claim, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    client.close()
    assert failures == []
    assert set(served) == {f"{worker}/{row}" for worker in range(8) for row in range(200)}
    assert set(served.values()) <= {1, 2}  # a repeat carries the token of the first try


BODY = b'{"granted": true}'
KIND = b"Content-Type: application/json\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\n" + KIND + b"Content-Length: 17\r\n"
ANSWERS = {
    "plain": (PLAIN + b"\r\n" + BODY, 1),
    "to be closed": (PLAIN + b"Connection: close\r\n\r\n" + BODY, 3),
    "in chunks": (
        b"HTTP/1.1 200 OK\r\n"
        + KIND
        + b"Transfer-Encoding: chunked\r\n\r\n9\r\n"
        + BODY[:9]
        + b"\r\n8\r\n"
        + BODY[9:]
        + b"\r\n0\r\n\r\n",
        1,
    ),
    "after an interim one": (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + PLAIN + b"\r\n" + BODY, 1),
    "with several cookies": (PLAIN + b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n\r\n" + BODY, 1),
    "packed": (
        b"HTTP/1.1 200 OK\r\n"
        + KIND
        + b"Content-Encoding: gzip\r\n"
        + b"Content-Length: %d\r\n\r\n" % len(gzip.compress(BODY, mtime=0))
        + gzip.compress(BODY, mtime=0),
        1,
    ),
    "until the end": (b"HTTP/1.0 200 OK\r\n" + KIND + b"\r\n" + BODY, 3),
}


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(("text", "connections"), ANSWERS.values(), ids=ANSWERS.keys())
def test_every_kind_of_answer_is_read_however_it_is_cut(
    server: WireServer, rest: RestClient, text: bytes, connections: int, pieces: int
) -> None:
    def send_in_pieces(connection: socket.socket, _body: dict[str, object]) -> bool:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = -(-len(text) // pieces)
        for start in range(0, len(text), size):
            connection.sendall(text[start : start + size])
            threading.Event().wait(0.002 if pieces > 1 else 0)
        return connections == 1

    server.act = send_in_pieces
    assert [rest.rpc("claim_wakes", {}) for _ in range(3)] == [{"granted": True}] * 3
    assert server.connections == connections


@pytest.mark.parametrize(
    "text",
    [
        PLAIN + b"\r\n" + BODY + b"{}",
        PLAIN + b"\r\n" + BODY[:5],
        PLAIN + b"Content-Length: 18\r\n\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\n" + KIND + b"Content-Length: many\r\n\r\n" + BODY,
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"",
    ],
    ids=["too long", "too short", "two lengths", "no number", "another protocol", "an endless head", "nothing"],
)
def test_ff28_an_answer_that_breaks_the_protocol_is_none(server: WireServer, rest: RestClient, text: bytes) -> None:
    def send_and_close(connection: socket.socket, _body: dict[str, object]) -> bool:
        with contextlib.suppress(OSError):
            connection.sendall(text)
        return False

    server.act = send_and_close
    with pytest.raises(ServiceUnavailable, match="lost the connection"):
        rest.rpc("claim_wakes", {})
    server.act = answer
    assert rest.rpc("claim_wakes", {})["granted"]
    assert server.connections == 2


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (PLAIN.replace(b"17", b"90000") + b"\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n" + KIND + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"", b"H"),
    ],
    ids=["of a length", "in chunks", "of its head"],
)
def test_ff21_a_server_that_sends_a_byte_now_and_then_is_left_in_time(
    server: WireServer, rest: RestClient, head: bytes, piece: bytes
) -> None:
    has_ended = threading.Event()

    def drip(connection: socket.socket, _body: dict[str, object]) -> bool:
        with contextlib.suppress(OSError):
            connection.sendall(head)
            while not has_ended.wait(0.02):
                connection.sendall(piece)
        return False

    server.act = drip
    errors: list[BaseException] = []

    def call() -> None:
        try:
            rest.rpc("claim_wakes", {}, timeout=0.5)
        except ServiceUnavailable as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(5)
    is_over = not caller.is_alive()
    has_ended.set()
    assert is_over
    assert "in time" in str(errors[0])


def test_a_caller_beyond_the_pool_waits_so_long_and_no_longer(server: WireServer) -> None:
    client = RestClient(server.url, "key", timeouts=Timeouts(call=5.0, pool=0.2), max_connections=1)
    held, release = threading.Event(), threading.Event()

    def hold(connection: socket.socket, body: dict[str, object]) -> bool:
        held.set()
        release.wait(10)
        return answer(connection, body)

    server.act = hold
    first = threading.Thread(target=client.rpc, args=("claim_wakes", {}))
    first.start()
    assert held.wait(5)
    with pytest.raises(ServiceUnavailable, match="connections are in use"):
        client.rpc("claim_wakes", {}, timeout=0.3)
    release.set()
    first.join(5)
    assert client.rpc("claim_wakes", {})["granted"]
    client.close()
