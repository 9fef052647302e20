"""How Supabase is reached: whose certificates are believed, through which proxy, and why it did not work.

The environment's proxies are never used: they would carry the key, and take loopback with them. One that would be
needed is named in the error together with the setting that takes it. `SSL_CERT_FILE` and `SSL_CERT_DIR` are honoured,
as everywhere.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import certifi

from dispatcher.config import Settings

CA_SETTING: Final = "SUPABASE_CA_FILE"
PROXY_SETTING: Final = "SUPABASE_PROXY"
REALTIME_PROXY_SETTING: Final = "REALTIME_PROXY"
# OpenSSL's codes for a chain that ends at an authority nobody here knows.
_UNKNOWN_AUTHORITY: Final = frozenset({2, 18, 19, 20, 21})
_EXPIRED: Final = 10
_OTHER_HOST: Final = frozenset({62, 64})


@dataclass(frozen=True)
class Network:
    """The way to one project.

    `ca_file`: authorities to believe beside those of the system. `proxy`: URL, None for a direct connection.
    `proxy_setting`: the name of the setting it comes from. `environ`: only looked into for words about a failure.
    """

    ca_file: Path | None = None
    proxy: str | None = None
    proxy_setting: str = PROXY_SETTING
    environ: Mapping[str, str] | None = None

    def ssl_context_for(self, url: str) -> ssl.SSLContext:
        """What verifies certificates and host names of that URL; believes nobody where it needs none."""
        return self.ssl_context if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """Believes the authorities of the system and of `ca_file`."""
        context = ssl.create_default_context()  # reads SSL_CERT_FILE and SSL_CERT_DIR
        if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
            context.load_verify_locations(certifi.where())
        if self.ca_file is not None:
            context.load_verify_locations(self.ca_file)
        return context

    def why_not(self, error: BaseException, url: str) -> str:
        """Why `url` could not be reached, and which setting to look at. Holds no password and no key."""
        cause, advice = _cause_of(error, urlsplit(url).hostname or "")
        if self.proxy is not None:
            return f"through the proxy {_without_password(self.proxy)} ({self.proxy_setting}): {cause}; {advice}"
        if _is_of_tls(error):
            return f"{cause}; {advice}"
        return f"{cause}; {advice}{_hint_at_proxy(url, os.environ if self.environ is None else self.environ)}"


def network_of(settings: Settings) -> Network:
    """The way REST takes."""
    return Network(settings.supabase_ca_file, settings.supabase_proxy)


def realtime_network_of(settings: Settings) -> Network:
    """The way Realtime takes: REALTIME_PROXY where it is set, else that of REST."""
    if settings.realtime_proxy is None:
        return network_of(settings)
    return Network(settings.supabase_ca_file, settings.realtime_proxy, REALTIME_PROXY_SETTING)


def _cause_of(error: BaseException, host: str) -> tuple[str, str]:
    """What went wrong below all wrappers, and what to look at."""
    for one in _chain(error):
        if isinstance(one, ssl.SSLCertVerificationError):
            return _cause_of_verification(one, host)
        if isinstance(one, ssl.SSLError):
            return f"no TLS is spoken there ({one.reason or one})", "check whether SUPABASE_URL is http or https"
        if isinstance(one, socket.gaierror):
            return f"a name cannot be resolved ({one.strerror})", "check SUPABASE_URL and DNS"
        if isinstance(one, ConnectionRefusedError):
            return "the connection is refused", "check SUPABASE_URL and whether it is up"
    text = str(error) or next((str(one) for one in _chain(error) if str(one)), type(error).__name__)
    if "407" in text:
        return "the proxy wants a user and a password (407)", f"give them in {PROXY_SETTING}"
    return text, "check SUPABASE_URL and the network"


def _cause_of_verification(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    if error.verify_code in _UNKNOWN_AUTHORITY:
        advice = f"name the file of that authority's certificate in {CA_SETTING}"
        return f"the certificate of {host} is from an authority unknown here ({error.verify_message})", advice
    if error.verify_code in _OTHER_HOST:
        return f"the certificate is not one of {host}", "check SUPABASE_URL"
    if error.verify_code == _EXPIRED:
        return f"the certificate of {host} has expired", "renew it, or set the clock of this host"
    return f"the certificate of {host} is not valid ({error.verify_message})", f"check it, and {CA_SETTING}"


def is_of_certificate(error: BaseException) -> bool:
    """Whether the peer's certificate was refused: the same request would fail in the same way."""
    return any(isinstance(one, ssl.SSLCertVerificationError) for one in _chain(error))


def _is_of_tls(error: BaseException) -> bool:
    return any(isinstance(one, ssl.SSLError) for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, outermost first; of a group, the first member."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = current.exceptions[0] if isinstance(current, BaseExceptionGroup) else None
        current = inner or current.__cause__ or current.__context__


def _hint_at_proxy(url: str, environ: Mapping[str, str]) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    names = (f"{parts.scheme}_proxy", "all_proxy")
    found = next((given for name in names for given in (name.upper(), name) if environ.get(given)), None)
    if found is None or _is_loopback(host) or _is_exempt(host, environ):
        return ""
    return f"; the environment names a proxy ({found}), which is used only where {PROXY_SETTING} names it"


def _is_exempt(host: str, environ: Mapping[str, str]) -> bool:
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = [name.strip().lstrip("*").lstrip(".") for name in given.split(",") if name.strip()]
    return any(not name or host == name or host.endswith(f".{name}") for name in names)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _without_password(proxy: str) -> str:
    parts = urlsplit(proxy)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
