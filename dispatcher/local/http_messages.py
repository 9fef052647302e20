"""As much of HTTP/1.1 as the fast way through the gateway needs, as pure parsing: simple requests, ends of replies."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

_HEAD_END = b"\r\n\r\n"
_LONGEST_HEAD = 32 * 1024
_LONGEST_BODY = 1 << 20
_SIMPLE_METHODS = frozenset({b"GET", b"POST", b"PATCH", b"PUT", b"DELETE"})
# Whoever sends one of these wants more than request and reply.
_SPECIAL_HEADERS = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"te", b"trailer"})

Header = tuple[bytes, bytes]


class Unfit(Enum):
    """Why there is no simple request at the start of a buffer."""

    INCOMPLETE = auto()
    SPECIAL = auto()


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request; header names in lower case; `size` is what it took of the buffer, in bytes."""

    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes
    size: int

    def header(self, name: bytes) -> str | None:
        """The value of the first header of this name."""
        return next((value.decode("latin-1") for key, value in self.headers if key == name), None)


def first_request(buffer: bytes | bytearray) -> Request | Unfit:
    """The first request in the buffer, if it is whole, small, and asks for nothing special."""
    end = buffer.find(_HEAD_END)
    if end < 0:
        return Unfit.SPECIAL if len(buffer) > _LONGEST_HEAD else Unfit.INCOMPLETE
    first, *lines = bytes(buffer[:end]).split(b"\r\n")
    words = first.split(b" ")
    headers = [_header(line) for line in lines]
    if len(words) != 3 or words[2] != b"HTTP/1.1" or words[0] not in _SIMPLE_METHODS:
        return Unfit.SPECIAL
    length = _body_length([header for header in headers if header])
    if length is None or None in headers:
        return Unfit.SPECIAL
    size = end + len(_HEAD_END) + length
    if len(buffer) < size:
        return Unfit.INCOMPLETE
    body = bytes(buffer[size - length : size])
    return Request(words[0], words[1], [header for header in headers if header], body, size)


def _header(line: bytes) -> Header | None:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        return None
    return name.lower(), value.strip()


def _body_length(headers: list[Header]) -> int | None:
    """Bytes of body, None when that is not for us to say."""
    names = [name for name, _ in headers]
    connection = next((value.lower() for name, value in headers if name == b"connection"), b"keep-alive")
    lengths = [value for name, value in headers if name == b"content-length"]
    if connection != b"keep-alive" or len(lengths) > 1 or not _SPECIAL_HEADERS.isdisjoint(names):
        return None
    if not lengths:
        return 0
    return int(lengths[0]) if lengths[0].isdigit() and int(lengths[0]) <= _LONGEST_BODY else None


class Reply:
    """Follows the bytes of one reply and tells when they are all there. Raises ValueError for nonsense."""

    def __init__(self) -> None:
        self.complete = False
        self.closes = False
        self._unread = b""
        self._left = 0
        self._step: Callable[[], bool] = self._read_head

    def feed(self, data: bytes) -> None:
        """Take the next bytes as they came."""
        self._unread += data
        while not self.complete and self._step():
            pass

    def _read_line(self, ending: bytes = b"\r\n") -> bytes | None:
        line, found, rest = self._unread.partition(ending)
        if not found:
            return None
        self._unread = rest
        return line

    def _read_head(self) -> bool:
        head = self._read_line(_HEAD_END)
        if head is None:
            return False
        first, *lines = head.split(b"\r\n")
        headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines)}
        self._plan(int(first.split(b" ")[1]), headers)
        return True

    def _plan(self, status: int, headers: dict[bytes, bytes]) -> None:
        """How the end of the body will be known."""
        self.closes = headers.get(b"connection") == b"close"
        if headers.get(b"transfer-encoding") == b"chunked":
            self._step = self._read_chunk_size
            return
        if b"content-length" not in headers and status not in {204, 304}:
            raise ValueError("a reply without an end")
        self._left = 0 if status in {204, 304} else int(headers[b"content-length"])
        self._step = self._read_rest
        self.complete = self._left == 0

    def _skip(self) -> bool:
        """Pass over bytes of the body; True when none is left."""
        taken = min(self._left, len(self._unread))
        self._unread = self._unread[taken:]
        self._left -= taken
        return self._left == 0

    def _read_rest(self) -> bool:
        self.complete = self._skip()
        return False

    def _read_chunk_size(self) -> bool:
        line = self._read_line()
        if line is None:
            return False
        size = int(line.partition(b";")[0], 16)
        self._left = size + 2  # the line end after the chunk
        self._step = self._read_chunk if size else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if not self._skip():
            return False
        self._step = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._read_line()
        self.complete = line == b""
        return bool(line)
