"""One HTTP request to HQ: whose certificates are believed, through which proxy, how long it may take, why it failed.

A proxy is used only where SUPABASE_PROXY names it: one of the environment would carry the key. SSL_CERT_FILE and
SSL_CERT_DIR are honoured, SUPABASE_CA_FILE is believed beside them. A redirect is never followed.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Optional
from urllib.parse import SplitResult, unquote, urlsplit

from hq_settings import Settings

LARGEST_ANSWER = 64 * 1024 * 1024
# OpenSSL's codes for a chain that ends at an authority nobody here knows.
UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
OTHER_HOST = frozenset({62, 64})


class UnreachableError(Exception):
    """No answer came; the text says why and which setting to look at. `retryable`: it may work in a moment."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True)
class Request:
    """What is asked: `path` comes behind the path of `base`, the URL of the service."""

    base: str
    method: str
    path: str
    body: Optional[bytes]  # noqa: UP045 - Python 3.9
    headers: Mapping[str, str]

    @property
    def target(self) -> SplitResult:
        """The parts of the base URL."""
        return urlsplit(self.base)


def exchange(settings: Settings, request: Request) -> tuple[int, bytes]:
    """Status and body of the answer, within `settings.call_timeout` seconds once it is connected.

    Raises UnreachableError.
    """
    try:
        connection = connection_to(request.target, settings)
        try:
            with ended_after(connection, settings.call_timeout):
                return ask(connection, settings, request)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        text = why_not(error, request.target, settings)
        raise UnreachableError(text, retryable=not is_of_certificate(error)) from None


def ask(connection: http.client.HTTPConnection, settings: Settings, request: Request) -> tuple[int, bytes]:
    """Send the request and read the answer."""
    deadline = time.monotonic() + settings.call_timeout
    target = request.target
    where, headers = f"{target.path}{request.path}", dict(request.headers)
    if settings.proxy and target.scheme == "http":
        where = f"http://{target.netloc}{where}"
        headers.update(proxy_headers(urlsplit(settings.proxy)))
    connection.request(request.method, where, request.body, headers)
    with connection.getresponse() as response:
        return response.status, read_before(response, deadline)


def connection_to(target: SplitResult, settings: Settings) -> http.client.HTTPConnection:
    """A connection, not yet opened, to the target or to the proxy on the way to it."""
    proxy = urlsplit(settings.proxy) if settings.proxy else None
    near, timeout = proxy or target, settings.call_timeout
    host, port = near.hostname or "", near.port or (80 if proxy else None)
    if target.scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=timeout)
    connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=tls_context(settings))
    if proxy:
        connection.set_tunnel(target.hostname or "", target.port or 443, headers=proxy_headers(proxy))
    return connection


def tls_context(settings: Settings) -> ssl.SSLContext:
    """Believes the authorities of the system, of SSL_CERT_FILE or SSL_CERT_DIR, and of SUPABASE_CA_FILE."""
    context = ssl.create_default_context()
    if settings.ca_file:
        context.load_verify_locations(settings.ca_file)
    return context


def proxy_headers(proxy: SplitResult) -> dict[str, str]:
    """User and password of the proxy's URL as a header."""
    if not proxy.username:
        return {}
    words = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(words).decode('ascii')}"}


@contextlib.contextmanager
def ended_after(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Hang up after so long, however slowly bytes trickle in: a time-out of the socket begins anew with each byte."""

    def hang_up() -> None:
        with contextlib.suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_before(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole answer, or `TimeoutError` at the deadline however slowly it trickles in."""
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(65536):
        size += len(piece)
        pieces.append(piece)
        if size > LARGEST_ANSWER:
            raise http.client.HTTPException("the answer is too large")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer took too long")
    return b"".join(pieces)


def is_of_certificate(error: BaseException) -> bool:
    """Whether another try would fail in the same way."""
    return isinstance(error, ssl.SSLCertVerificationError)


def why_not(error: Exception, target: SplitResult, settings: Settings) -> str:
    """Why there is no answer, in words that name the setting to look at."""
    cause = cause_of(error, target.hostname or "")
    if settings.proxy:
        near = urlsplit(settings.proxy)
        return f"through the proxy of SUPABASE_PROXY ({near.hostname}:{near.port or 80}): {cause}"
    return cause if is_of_certificate(error) else cause + hint_at_proxy(target)


def cause_of(error: Exception, host: str) -> str:
    """What went wrong, and what to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return cause_of_certificate(error, host)
    if isinstance(error, ssl.SSLError):
        return f"no TLS is spoken there ({error.reason or error}): is SUPABASE_URL http or https?"
    if isinstance(error, socket.gaierror):
        return f"a name cannot be resolved ({error.strerror}): check SUPABASE_URL and DNS"
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused: check SUPABASE_URL and whether it is up"
    if "407" in str(error):
        return "the proxy wants a user and a password (407): give them in SUPABASE_PROXY"
    return repr(error)


def cause_of_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    """What is wrong with the certificate, and what to do."""
    if error.verify_code in UNKNOWN_AUTHORITY:
        return (
            f"the certificate of {host} is from an authority unknown here ({error.verify_message}): "
            "name the file of that authority's certificate in SUPABASE_CA_FILE"
        )
    if error.verify_code in OTHER_HOST:
        return f"the certificate is not one of {host}: check SUPABASE_URL"
    return f"the certificate of {host} is not valid ({error.verify_message})"


def hint_at_proxy(target: SplitResult) -> str:
    """That the environment names a proxy, which may be the way out but is not used unasked."""
    names = (f"{target.scheme}_proxy", "all_proxy")
    found = [given for name in names for given in (name.upper(), name) if os.environ.get(given)]
    host = target.hostname or ""
    if not found or host == "localhost" or host.startswith("127.") or host == "::1":
        return ""
    return f" (the environment names a proxy, {found[0]}, which is used only where SUPABASE_PROXY names it)"
