"""One HTTP/1.1 request and its answer on a kept connection, with nothing on the way that a function call does not need.

Between a hint and the start of an agent lies one call. `httpx`, `httpcore` and `h11` take half a millisecond of it,
twice that after a rest; written and read here it takes a fifth. Sockets, TLS and their errors are `httpcore`'s. An
answer of the plain kind (one head, one length) is read here; every other one (chunks, interim answers, no length) is
left to `h11`.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import h11
import httpcore
import httpx

_HEAD_END: Final = b"\r\n\r\n"
_READ_SIZE: Final = 65536
_LONGEST_HEAD: Final = 65536
_NO_BODY: Final = frozenset({204, 304})


@dataclass(frozen=True)
class Limits:
    """Seconds: for a free connection, to connect, for each write and read, and when all of it must be over."""

    pool: float
    connect: float
    write: float
    read: float
    ends_at: float
    """On the monotonic clock."""

    def within(self, seconds: float) -> float:
        """`seconds`, or what is left of the whole where that is less; never 0, which would not wait at all."""
        return max(0.05, min(seconds, self.ends_at - time.monotonic()))


@dataclass(frozen=True)
class Answer:
    """What came back. Names of headers are in lower case; of several with one name the last counts."""

    status: int
    headers: Mapping[bytes, bytes]
    content: bytes

    @property
    def is_plain_json(self) -> bool:
        """Whether the content can be read as it stands, as the JSON of a result."""
        kind = self.headers.get(b"content-type", b"")
        return self.status == httpx.codes.OK and b"json" in kind and b"content-encoding" not in self.headers


class _Connection:
    """A stream and when it was last used."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self.stream = stream
        self.used_at = time.monotonic()

    def is_stale(self, idle: float) -> bool:
        """Whether it has rested too long, or the server has closed it (or said what nobody asked for)."""
        return time.monotonic() - self.used_at > idle or bool(self.stream.get_extra_info("is_readable"))


class Wire:
    """Keeps connections to one server, the one used last first, and exchanges requests for answers. Thread-safe.

    Errors are those of `httpx`.

    Args:
        url: of the server, with the path that precedes every request's own.
        headers: sent with every request.
        ssl_context: for https.
        max_connections: how many calls may be under way at once.
        idle: seconds after which a connection is not used again.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], ssl_context: ssl.SSLContext, *, max_connections: int, idle: float
    ) -> None:
        address = httpx.URL(url)
        self._is_tls = address.scheme == "https"
        self._host = address.raw_host.decode()
        self._port = address.port or (443 if self._is_tls else 80)
        self._path = address.raw_path.rstrip(b"/")
        self._ssl_context = ssl_context
        self._idle = idle
        fixed = {"Host": address.netloc.decode(), **headers}
        self._fixed = b"".join(f"{name}: {value}\r\n".encode() for name, value in fixed.items())
        self._backend = httpcore.SyncBackend()
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._free: list[_Connection] = []
        self._is_closed = False

    def exchange(self, method: str, path: str, content: bytes, limits: Limits) -> Answer:
        """Sends one request and reads its answer.

        Raises:
            httpx.TransportError: as `httpx` raises them; of an answer that breaks the protocol RemoteProtocolError.
        """
        with self._slot(limits), _errors_of_httpx():
            connection = self._take() or self._connect(limits)
            try:
                connection.stream.write(self.request(method, path, content), limits.within(limits.write))
                answer, may_go_on = _read_answer(connection.stream, limits)
            except BaseException:
                connection.stream.close()
                raise
            self._give_back(connection, may_go_on)
            return answer

    def close(self) -> None:
        """Closes what is free, and what is in use at the end of its call."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for connection in free:
            connection.stream.close()

    @contextlib.contextmanager
    def _slot(self, limits: Limits) -> Iterator[None]:
        if not self._slots.acquire(timeout=limits.within(limits.pool)):
            raise httpx.PoolTimeout("all connections are in use")
        try:
            yield
        finally:
            self._slots.release()

    def request(self, method: str, path: str, content: bytes) -> bytes:
        """The bytes of a request."""
        line = b"%s %s%s HTTP/1.1\r\n" % (method.encode(), self._path, path.encode())
        return b"%s%sContent-Length: %d\r\n\r\n%s" % (line, self._fixed, len(content), content)

    def _take(self) -> _Connection | None:
        while True:
            with self._lock:
                if not self._free:
                    return None
                connection = self._free.pop()
            if not connection.is_stale(self._idle):
                return connection
            connection.stream.close()

    def _connect(self, limits: Limits) -> _Connection:
        stream = self._backend.connect_tcp(self._host, self._port, limits.within(limits.connect))
        if self._is_tls:
            stream = stream.start_tls(self._ssl_context, self._host, limits.within(limits.connect))
        return _Connection(stream)

    def _give_back(self, connection: _Connection, may_go_on: bool) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            if may_go_on and not self._is_closed:
                self._free.append(connection)
                return
        connection.stream.close()


def _read_answer(stream: httpcore.NetworkStream, limits: Limits) -> tuple[Answer, bool]:
    """The answer, and whether the connection may be used again."""
    received = b""
    while (end := received.find(_HEAD_END)) < 0:
        if len(received) > _LONGEST_HEAD:
            raise httpcore.RemoteProtocolError("the head of the answer is too long")
        received += _read(stream, limits)
    head = _plain_head(received[:end])
    if head is None:
        return _read_by_h11(stream, received, limits)
    status, headers, length = head
    pieces, left = [received[end + len(_HEAD_END) :]], length - (len(received) - end - len(_HEAD_END))
    while left > 0:
        pieces.append(_read(stream, limits))
        left -= len(pieces[-1])
    if left < 0:
        raise httpcore.RemoteProtocolError("the answer is longer than it says")
    return Answer(status, headers, b"".join(pieces)), headers.get(b"connection", b"").lower() != b"close"


def _plain_head(head: bytes) -> tuple[int, dict[bytes, bytes], int] | None:
    """Status, headers and length of the body; None for what is not of the plain kind."""
    first, *lines = head.split(b"\r\n")
    if not first.startswith(b"HTTP/1.1 ") or not first[9:12].isdigit() or len(lines) > 100:
        return None
    status = int(first[9:12])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = headers.get(b"content-length", b"")
    is_plain = len(headers) == len(lines) and length.isdigit() and len(length) < 12 and status >= 200
    if not is_plain or b"transfer-encoding" in headers or status in _NO_BODY:
        return None
    return status, headers, int(length)


def _read_some(stream: httpcore.NetworkStream, limits: Limits) -> bytes:
    """The next piece; empty at the end of the stream. Who sends a byte now and then is not waited for for ever."""
    if limits.ends_at <= time.monotonic():
        raise httpcore.ReadTimeout("the time of the call is over")
    return stream.read(_READ_SIZE, limits.within(limits.read))


def _read(stream: httpcore.NetworkStream, limits: Limits) -> bytes:
    piece = _read_some(stream, limits)
    if not piece:
        raise httpcore.RemoteProtocolError("Server disconnected without sending a response.")
    return piece


def _read_by_h11(stream: httpcore.NetworkStream, received: bytes, limits: Limits) -> tuple[Answer, bool]:
    """What `_read_answer` answers, for any answer HTTP/1.1 allows to a POST."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "-"), ("Content-Length", "0")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(received)
    status, headers, pieces = 0, {}, []
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            parser.receive_data(_read_some(stream, limits))
        elif isinstance(event, h11.Response):
            status, headers = event.status_code, dict(event.headers)
        elif isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
        elif not isinstance(event, h11.InformationalResponse):
            raise httpcore.RemoteProtocolError("Server disconnected without sending a response.")
    may_go_on = parser.their_state is h11.DONE and not parser.trailing_data[0]
    return Answer(status, headers, b"".join(pieces)), may_go_on


@contextlib.contextmanager
def _errors_of_httpx() -> Iterator[None]:
    try:
        yield
    except h11.RemoteProtocolError as error:
        raise httpx.RemoteProtocolError(str(error)) from error
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error
