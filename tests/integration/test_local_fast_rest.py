"""The fast way through the gateway: several calls on one connection, odd upstreams, the hand-over to aiohttp."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from dispatcher.local.api import Api
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


@contextmanager
def connected(api: Api) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as client:
        yield client


def request(api: Api, path: str, method: str = "GET", body: bytes = b"", extra: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\napikey: {api.keys.service_role_key}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_replies(client: socket.socket, number: int) -> list[bytes]:
    """Status lines of so many replies."""
    data = b""
    while data.count(b"HTTP/1.1 ") < number or not data.endswith((b"0\r\n\r\n", b"}", b"\r\n\r\n", b"]")):
        block = client.recv(65536)
        assert block, data
        data += block
    return [part.split(b"\r\n")[0] for part in data.split(b"HTTP/1.1 ")[1:]]


def test_calls_sent_in_one_go_are_answered_in_order(api: Api, seed: Seed) -> None:
    seed.agent("ada")
    with connected(api) as client:
        paths = ["/rest/v1/agents?select=slug", "/rest/v1/nothing", "/rest/v1/gateways?select=slug"]
        client.sendall(b"".join(request(api, path) for path in paths))
        assert [line[:3] for line in read_replies(client, 3)] == [b"200", b"404", b"200"]


def test_a_call_that_comes_in_pieces_is_put_together(api: Api, database: Database, seed: Seed) -> None:
    body = json.dumps({"slug": "x", "name": "ü", "gateway_id": str(seed.gateway())}).encode()
    data = request(api, "/rest/v1/agents", "POST", body, "Content-Type: application/json\r\n")
    with connected(api) as client:
        for position in range(0, len(data), 50):
            client.sendall(data[position : position + 50])
        assert read_replies(client, 1)[0].startswith(b"201")
    assert database.value("select name from public.agents") == "ü"


def test_a_connection_goes_on_after_something_else_was_asked(api: Api) -> None:
    with connected(api) as client:
        paths = ["/rest/v1/agents", "/__local/status", "/rest/v1/agents"]
        for path in paths:
            client.sendall(request(api, path))
            assert read_replies(client, 1)[0].startswith(b"200")


def test_a_fault_switched_on_reaches_connections_that_are_open(api: Api) -> None:
    headers = {"apikey": api.keys.service_role_key}
    with httpx.Client(base_url=api.url, headers=headers, trust_env=False) as client:
        assert client.get("/rest/v1/agents").status_code == 200
        api.faults(rest={"fail": 1})
        assert [client.get("/rest/v1/agents").status_code for _ in range(2)] == [503, 200]


def test_many_at_once_get_their_own_answers(api: Api, seed: Seed) -> None:
    slugs = [f"agent-{number}" for number in range(20)]
    for slug in slugs:
        seed.agent(slug)
    answers: dict[str, set[str]] = {}

    def ask(slug: str) -> None:
        with httpx.Client(base_url=api.url, trust_env=False, timeout=20) as client:
            headers = {"apikey": api.keys.service_role_key}
            query = {"slug": f"eq.{slug}", "select": "slug"}
            replies = [client.get("/rest/v1/agents", params=query, headers=headers) for _ in range(20)]
            answers[slug] = {reply.text for reply in replies}

    threads = [threading.Thread(target=ask, args=(slug,)) for slug in slugs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {slug: {f'[{{"slug":"{slug}"}}]'} for slug in slugs}


def test_a_client_that_leaves_does_not_disturb_the_next(api: Api, database: Database) -> None:
    database.execute("create function public.nap() returns int language sql as 'select 1 from pg_sleep(0.5)'")
    database.execute("notify pgrst, 'reload schema'")
    headers = {"apikey": api.keys.service_role_key}
    url = f"{api.url}/rest/v1/rpc/nap"
    wait_until(lambda: httpx.post(url, headers=headers, trust_env=False).status_code == 200)
    for _ in range(5):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, headers=headers, trust_env=False, timeout=0.1)
    assert httpx.post(url, headers=headers, trust_env=False, timeout=10).json() == 1


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"", b"HTTP/1.1 502"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b""),
        (b"nonsense\r\n\r\n", b""),
    ],
)
def test_a_reply_that_breaks_off_is_never_passed_for_whole(api: Api, reply: bytes, expected: bytes) -> None:
    port = api.rest.port
    api.rest.stop()
    with socket.socket() as upstream:
        upstream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        upstream.bind(("127.0.0.1", port))
        upstream.listen()
        with connected(api) as client:
            client.sendall(request(api, "/rest/v1/agents"))
            served, _ = upstream.accept()
            assert b"GET /agents HTTP/1.1" in served.recv(65536)
            served.sendall(reply)
            served.close()
            received = read_to_the_end(client, stop_at=expected)
    assert received.startswith(expected)
    assert b"100\r\n\r\nhalf" not in received or not expected


def read_to_the_end(client: socket.socket, stop_at: bytes) -> bytes:
    """Until the connection breaks, or this has come."""
    data = b""
    try:
        while block := client.recv(65536):
            data += block
            if stop_at and stop_at in data:
                return data
    except ConnectionResetError:
        pass
    return data
