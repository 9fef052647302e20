"""The Gateway asked by `openclaw gateway call`: where the link is barred. A second and 200 MB a call, one at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Final

from dispatcher.agents.openclaw_calls import CallResult, OpenclawCommand
from dispatcher.errors import GatewayError, GatewaySilent, GatewayUnavailable, SpawnError
from dispatcher.openclaw.frames import read_error

MARKER: Final = "gateway-call"
TRANSPORT_ERROR: Final = "gateway_transport_error"


class CommandLineCalls:
    """As `GatewayCalls`. Never two at once: a second one waits for the first, for as long as it may take itself."""

    def __init__(self, command: OpenclawCommand) -> None:
        self._command = command
        self._turn = threading.Lock()

    def __call__(self, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        if not self._turn.acquire(timeout=timeout):
            raise GatewayUnavailable(f"{method}: the command line was busy for {timeout:g} s")
        try:
            arguments = ("gateway", "call", method, "--params", json.dumps(params), "--timeout", f"{timeout * 500:.0f}")
            result, document = self._command.ask(*arguments, marker=MARKER)
        except SpawnError as error:
            raise GatewayUnavailable(f"{method}: {error}") from None
        finally:
            self._turn.release()
        return payload_of(method, result, document)


def payload_of(method: str, result: CallResult, document: object) -> Any:
    """What the Gateway answered.

    Raises:
        GatewayUnavailable: the command line could not reach it.
        GatewaySilent: no answer came in time.
        GatewayRefused: it does not want this request.
    """
    if isinstance(document, Mapping) and document.get("ok") is False and isinstance(document.get("error"), Mapping):
        raise _error(method, document["error"])
    if result.failure:
        raise GatewaySilent(f"{method}: {result.failure}")
    return document


def _error(method: str, error: Mapping[str, Any]) -> GatewayError:
    text = f"{method}: {error.get('message') or 'no reason given'}"[:300]
    if error.get("type") != TRANSPORT_ERROR:
        return read_error({**error, "message": text})
    reached = error.get("kind") == "timeout" or "outcome is unknown" in text
    return GatewaySilent(text) if reached else GatewayUnavailable(text)
