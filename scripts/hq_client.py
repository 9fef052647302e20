"""Calls of HQ's database functions over HTTP, with deadlines and a few spread retries.

Every function called from here is safe to repeat: leases carry a token of the caller's, closing answers
`already`, posts are known by an id of their own. So a call whose answer was lost is simply made again.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import time
from collections.abc import Mapping
from typing import Any

from hq_network import Request, UnreachableError, exchange
from hq_settings import Settings

ATTEMPTS = 4
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
# Connection trouble, rollback by the database, lack of resources, shutdown; PostgREST's own of the same kind.
RETRYABLE_CODES = ("08", "40", "53", "57", "PGRST000", "PGRST001", "PGRST002", "PGRST003", "PGRST202")
HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class ServiceError(Exception):
    """HQ could not be reached or refused the call: exit 1."""

    def __init__(self, message: str, code: str = "service_failed", *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


class KeyRefusedError(ServiceError):
    """HQ does not take the key of the settings."""


class HqClient:
    """One agent's line to HQ. `call` returns the function's JSON object or raises `ServiceError`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def call(self, function: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Call a database function; repeat what failed in passing, at growing, spread intervals."""
        body = json.dumps(clean(dict(params)), allow_nan=False).encode("ascii")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._call_once(function, body)
            except ServiceError as fault:
                if attempt == ATTEMPTS or not fault.retryable:
                    raise
                time.sleep(random.uniform(0.5, 1.0) * 0.25 * 2**attempt)  # noqa: S311 - spreads load, keeps no secret
        raise AssertionError("the last attempt returns or raises")

    def _call_once(self, function: str, body: bytes) -> dict[str, Any]:
        request = Request(self._settings.url, "POST", f"/rest/v1/rpc/{function}", body, self._headers())
        try:
            status, answer = exchange(self._settings, request)
        except UnreachableError as error:
            text = self._masked(f"HQ did not answer: {error}")
            raise ServiceError(text, "unreachable", retryable=error.retryable) from None
        if status == 200:
            return settled(parsed(answer))
        raise self._refusal(function, status, answer)

    def _headers(self) -> dict[str, str]:
        key = self._settings.key
        headers = {"apikey": key, "Content-Type": "application/json", "Accept": "application/json"}
        # A project may list another schema first.
        headers.update({"Content-Profile": "public", "Accept-Profile": "public"})
        # A new-style key (sb_secret_...) is no JWT: as a bearer token it would be refused.
        if not key.startswith("sb_"):
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _refusal(self, function: str, status: int, answer: bytes) -> ServiceError:
        code, message = refusal_words(answer)
        retryable = status in RETRYABLE_STATUS or code.startswith(RETRYABLE_CODES)
        if code == "PGRST202":
            message = f"the database does not know {function}: apply the dispatcher's migrations ({message})"
        if status == http.client.PROXY_AUTHENTICATION_REQUIRED:
            message = "the proxy wants a user and a password: give them in SUPABASE_PROXY"
        if status in (401, 403):
            text = self._masked(f"the key was refused: {message} (HTTP {status})")
            return KeyRefusedError(text, code or f"http_{status}", retryable=retryable)
        return ServiceError(self._masked(f"{message} (HTTP {status})"), code or f"http_{status}", retryable=retryable)

    def _masked(self, text: str) -> str:
        return text.replace(self._settings.key, "***")[:1000]


def parsed(answer: bytes) -> dict[str, Any]:
    """The JSON object of an answer; a page of a proxy in its place is a fault."""
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServiceError("HQ answered with something that is not a JSON object: is SUPABASE_URL right?", "not_json")
    return document


def settled(document: dict[str, Any]) -> dict[str, Any]:
    """The answer, unless somebody held the rows it needed: then nothing was changed, and it is asked for again."""
    if document.get("code") == "busy":
        message = "somebody else holds this item or agent at the moment; nothing was changed, try again in a minute"
        raise ServiceError(message, "busy", retryable=True)
    return document


def refusal_words(answer: bytes) -> tuple[str, str]:
    """Code and message of PostgREST's error document, or what stands in its place."""
    try:
        document = json.loads(answer)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        return "", "HQ refused the call"
    return str(document.get("code") or ""), str(document.get("message") or "HQ refused the call")


def clean(value: Any) -> Any:
    """The value without what no database takes: NUL dropped, half characters replaced, NaN as null."""
    if isinstance(value, str):
        return HALF_CHARACTER.sub("\ufffd", value.replace("\x00", ""))
    if isinstance(value, dict):
        return {clean(str(name)): clean(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
