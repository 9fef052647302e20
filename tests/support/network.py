"""A company's network on loopback: an authority of its own, TLS in front of a server, a proxy as the only way out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.loops import end_loop

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START_DEADLINE = 10.0


@dataclass(frozen=True)
class Authority:
    """A certificate authority nobody else knows: its certificate, and one of a server it has signed."""

    ca_file: Path
    server_file: Path

    @classmethod
    def make(cls, folder: Path, *hosts: str) -> Authority:
        """Writes both into `folder`; the server is good for these hosts."""
        folder.mkdir()
        made = cls(folder / "ca.pem", folder / "server.pem")
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("Test authority", ca_key, ca_key, "Test authority", [])
        server = _certificate(hosts[0], key, ca_key, "Test authority", list(hosts))
        made.ca_file.write_bytes(_pem(ca))
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        made.server_file.write_bytes(private + _pem(server))
        return made


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, issuer: str, hosts: list[str]
) -> x509.Certificate:
    now, day = datetime.now(UTC), timedelta(days=1)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), False)
    else:
        builder = builder.add_extension(_SIGNS, critical=True)
    return builder.sign(signer, hashes.SHA256())


_SIGNS = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class _Listener:
    """A server on loopback in a loop of its own thread."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-network", daemon=True)
        self._server: asyncio.Server | None = None

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(START_DEADLINE)

    def stop(self) -> None:
        end_loop(self._loop, self._thread, self._server)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve_quietly, "127.0.0.1", 0, ssl=self._context)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _serve_quietly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


class TlsFront(_Listener):
    """TLS in front of `127.0.0.1:upstream_port`."""

    def __init__(self, authority: Authority, upstream_port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.server_file)
        super().__init__(context)
        self._upstream_port = upstream_port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _join(reader, writer, self._upstream_port)


class ForwardProxy(_Listener):
    """An HTTP proxy: CONNECT, and requests with a whole URL. It alone knows where names lead: to `upstream_port`.

    `asked` has the first line of each request it has let pass; `refused` counts those without user and password.
    """

    def __init__(self, upstream_port: int, user_and_password: str = "") -> None:
        super().__init__()
        self.asked: list[str] = []
        self.refused = 0
        self._upstream_port = upstream_port
        self._wanted = base64.b64encode(user_and_password.encode()).decode() if user_and_password else ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, _, rest = head.partition("\r\n")
        if self._wanted and f"proxy-authorization: basic {self._wanted}".lower() not in rest.lower():
            self.refused += 1
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        self.asked.append(first)
        if first.startswith("CONNECT "):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _join(reader, writer, self._upstream_port)
        else:
            await _join(reader, writer, self._upstream_port, _in_origin_form(first, rest))


def _in_origin_form(first: str, rest: str) -> bytes:
    method, url, version = first.split(" ")
    path = "/" + url.partition("://")[2].partition("/")[2]
    kept = [line for line in rest.split("\r\n") if not line.lower().startswith(("proxy-", "connection:"))]
    return "\r\n".join([f"{method} {path} {version}", "Connection: close", *kept]).encode("latin-1")


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream_port: int, first: bytes = b""
) -> None:
    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
    try:
        up_writer.write(first)
        await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
    finally:
        up_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def running(listener: _Listener) -> Iterator[None]:
    """Listens meanwhile."""
    listener.start()
    try:
        yield
    finally:
        listener.stop()
