"""Simple requests are recognised whole, and replies are followed to their last byte."""

import pytest

from dispatcher.local.http_messages import Reply, Request, Unfit, first_request

HEAD = b"POST /rest/v1/rpc/f HTTP/1.1\r\nHost: h\r\nApiKey: k\r\n"


def test_a_whole_request_is_taken_and_the_rest_left() -> None:
    data = HEAD + b"Content-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n"
    request = first_request(data)
    assert isinstance(request, Request)
    assert (request.method, request.target, request.body) == (b"POST", b"/rest/v1/rpc/f", b"{}")
    assert data[request.size :] == b"GET / HTTP/1.1\r\n"
    assert request.header(b"apikey") == "k"
    assert request.header(b"absent") is None


def test_every_beginning_of_a_request_is_incomplete() -> None:
    data = HEAD + b"Content-Length: 2\r\n\r\n{}"
    for length in range(len(data)):
        assert first_request(data[:length]) is Unfit.INCOMPLETE


@pytest.mark.parametrize(
    "data",
    [
        b"HEAD /rest/v1/x HTTP/1.1\r\n\r\n",
        b"OPTIONS /rest/v1/x HTTP/1.1\r\n\r\n",
        b"GET /rest/v1/x HTTP/1.0\r\n\r\n",
        b"GET /rest/v1/x\r\n\r\n",
        b"nonsense\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\n\r\n",
        HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\n",
        HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 99999999\r\n\r\n",
        HEAD + b"X: 1\r\n folded\r\n\r\n",
        HEAD + b"Space : 1\r\n\r\n",
        b"GET /" + b"x" * 40_000,
    ],
)
def test_anything_else_is_special(data: bytes) -> None:
    assert first_request(data) is Unfit.SPECIAL


REPLIES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n",
    b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n0\r\nTrailer: 1\r\n\r\n",
]


@pytest.mark.parametrize("data", REPLIES)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_reply_is_complete_with_its_last_byte_and_not_before(data: bytes, step: int) -> None:
    reply = Reply()
    for position in range(0, len(data), step):
        assert not reply.complete
        reply.feed(data[position : position + step])
    assert reply.complete
    assert not reply.closes


def test_a_reply_says_when_it_is_the_last() -> None:
    reply = Reply()
    reply.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert reply.closes


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 two OK\r\n\r\n",
    ],
)
def test_nonsense_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Reply().feed(data)
