"""The agent's line to HQ against servers that misbehave: nothing hangs, nothing leaks, little is repeated."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.test_agent_scripts import COMMANDS, SCRIPTS, ZERO, modules

__all__ = ["modules"]  # a fixture


@contextmanager
def serving(handle: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """An HTTP server on loopback whose every POST is given to `handle`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            handle(self)

        def log_message(self, *_arguments: object) -> None:
            """Say nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def client_of(modules: dict[str, ModuleType], url: str, key: str = "KEY-123", timeout: float = 5) -> Any:
    settings = modules["hq_settings"].Settings("ada", ZERO, url, key, timeout, ())
    return modules["hq_client"].HqClient(settings)


@pytest.fixture
def no_pause(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Retries without waiting; the pauses they would have made."""
    pauses: list[float] = []
    monkeypatch.setattr(modules["hq_client"].time, "sleep", pauses.append)
    return pauses


@pytest.mark.parametrize(("key", "bearer"), [("a.b.c", "Bearer a.b.c"), ("sb_secret_x", None)])
def test_a_new_style_key_is_no_bearer_token(modules: dict[str, ModuleType], key: str, bearer: str | None) -> None:
    seen: list[tuple[str | None, str | None]] = []

    def handle(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.headers["apikey"], handler.headers["Authorization"]))
        reply(handler, 200, b"{}")

    with serving(handle) as url:
        client_of(modules, url, key).call("f", {})
    assert seen == [(key, bearer)]


def test_neither_a_redirect_nor_a_proxy_carries_the_key_away(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    stolen: list[str] = []

    def steal(handler: BaseHTTPRequestHandler) -> None:
        stolen.append(handler.path)
        reply(handler, 200, b"{}")

    with serving(steal) as elsewhere:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, elsewhere)

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            reply(handler, 307, b"", Location=elsewhere)

        with serving(redirect) as url, pytest.raises(modules["hq_client"].ServiceError, match="HTTP 307"):
            client_of(modules, url).call("f", {})
    assert stolen == []


@pytest.mark.parametrize("page", [b"<html>login</html>", b"", b"null", b"[]", b'"ok"', b"\xff"])
def test_a_page_in_place_of_a_json_object_is_a_fault(modules: dict[str, ModuleType], page: bytes) -> None:
    error = modules["hq_client"].ServiceError
    with serving(lambda handler: reply(handler, 200, page)) as url, pytest.raises(error, match="not a JSON object"):
        client_of(modules, url).call("f", {})


@pytest.mark.parametrize("kind", ["silent", "trickling"])
def test_a_call_ends_at_its_deadline(modules: dict[str, ModuleType], no_pause: list[float], kind: str) -> None:
    release = threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        if kind == "trickling":
            handler.send_response(200)
            handler.end_headers()
            while not release.wait(0.02):
                try:
                    handler.wfile.write(b" ")
                except OSError:
                    return
        release.wait(30)

    with serving(hang) as url:
        begun = time.monotonic()
        with pytest.raises(modules["hq_client"].ServiceError, match="did not answer"):
            client_of(modules, url, timeout=0.2).call("f", {})
        assert time.monotonic() - begun < 4
        release.set()
    assert len(no_pause) == 3


def test_an_answer_without_end_is_cut_off(
    modules: dict[str, ModuleType], no_pause: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["hq_network"], "LARGEST_ANSWER", 100_000)
    with (
        serving(lambda handler: reply(handler, 200, b"[" * 200_000)) as url,
        pytest.raises(modules["hq_client"].ServiceError, match="too large"),
    ):
        client_of(modules, url).call("f", {})


def test_ff21_pauses_grow_and_are_spread(modules: dict[str, ModuleType], no_pause: list[float]) -> None:
    with serving(lambda handler: reply(handler, 503, b"")) as url:
        for _ in range(10):
            with pytest.raises(modules["hq_client"].ServiceError):
                client_of(modules, url).call("f", {})
    firsts, seconds, thirds = no_pause[0::3], no_pause[1::3], no_pause[2::3]
    assert max(firsts) <= 0.5 < max(seconds) <= 1 < max(thirds) <= 2
    assert len({round(pause, 3) for pause in firsts}) > 5


@pytest.mark.parametrize(
    ("status", "body", "retried"),
    [
        (503, b"", True),
        (429, b"", True),
        (500, b'{"code": "40001"}', True),
        (400, b'{"code": "57P01"}', True),
        (404, b'{"code": "PGRST202"}', True),
        (400, b'{"code": "22P02"}', False),
        (401, b'{"message": "JWT expired"}', False),
        (403, b"[]", False),
        (404, b"<html>", False),
        (409, b'{"code": null, "message": null}', False),
    ],
)
def test_only_what_may_pass_is_tried_again(
    modules: dict[str, ModuleType], no_pause: list[float], status: int, body: bytes, retried: bool
) -> None:
    with (
        serving(lambda handler: reply(handler, status, body)) as url,
        pytest.raises(modules["hq_client"].ServiceError, match=str(status)),
    ):
        client_of(modules, url).call("f", {})
    assert len(no_pause) == (3 if retried else 0)


def test_an_error_that_repeats_the_key_is_masked(modules: dict[str, ModuleType]) -> None:
    body = json.dumps({"code": "X", "message": "bad key KEY-123 here"}).encode()
    with (
        serving(lambda handler: reply(handler, 401, body)) as url,
        pytest.raises(modules["hq_client"].ServiceError) as caught,
    ):
        client_of(modules, url).call("f", {})
    assert "KEY-123" not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_server_that_is_not_there_is_a_fault(modules: dict[str, ModuleType], no_pause: list[float]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(modules["hq_client"].ServiceError, match="did not answer"):
            client_of(modules, url).call("f", {})
    assert len(no_pause) == 3


def test_only_connection_trouble_is_caught(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_arguments: object) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(http.client.HTTPConnection, "request", wrong)
    with pytest.raises(TypeError, match="ours"):
        client_of(modules, "http://127.0.0.1:1").call("f", {})


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_settings(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"],
        cwd=tmp_path, env={}, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert "usage:" in done.stdout
