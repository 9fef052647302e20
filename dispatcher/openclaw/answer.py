"""What `openclaw agent --json` answered, and whose fault it is when it went wrong. Pure.

Both streams stand in one output: the answer is one JSON object at the start of a line, and on an error the same is
said once more in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

# `environment`: the Gateway takes no work. `busy`: the session changed in the same moment; the same again may work.
# `unknown`: the request was accepted, and its outcome is not known. `override`: the model or thinking level asked for
# is refused. `timeout`: its time was up. `agent`: anything else.
Kind = Literal["ok", "environment", "busy", "unknown", "override", "timeout", "agent"]

MAX_TEXT: Final = 600
SHOWN_LINES: Final = 3
CANNOT_RUN: Final = frozenset({126, 127})
_DECODER: Final = json.JSONDecoder()
_OBJECT_START: Final = re.compile(r"^\{", re.MULTILINE)

# In the order they are looked for. An accepted request that lost its connection also says "not reachable", say.
_WORDS: Final[tuple[tuple[Kind, re.Pattern[str]], ...]] = (
    ("unknown", re.compile(r"outcome is unknown|closed \(1006|accepted run \S|gateway timeout after", re.IGNORECASE)),
    ("busy", re.compile(r"SESSION_WORK_START_CHANGED")),
    (
        "environment",
        re.compile(
            r"gateway not reachable|ECONNREFUSED|ETIMEDOUT|websocket admission closed|gateway starting"
            r"|gateway is draining|during gateway restart|rejected websocket upgrade \(HTTP 503\)",
            re.IGNORECASE,
        ),
    ),
    ("override", re.compile(r"thinking level|unknown model|model .* is not (?:allowed|supported)", re.IGNORECASE)),
)
TIMED_OUT: Final = "ended by OpenClaw: its time was up"


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """How a turn ended by OpenClaw's own words. `text` says why it went wrong, on one line; empty when it went well."""

    kind: Kind
    run_id: str | None
    text: str


def read_answer(output: bytes, exit_code: int | None) -> AgentAnswer | None:
    """The answer in what a wake printed; None when it printed nothing to go by."""
    said = output.decode("utf-8", "replace")
    document = _document(said)
    if document is None and (not exit_code or not said.strip()):
        return None
    run_id = _text(None if document is None else document.get("runId")) or None
    text = "" if document is None else _error_text(document)
    if exit_code == 0 and not text:
        return AgentAnswer("ok", run_id, "")
    if _timed_out(document):
        return AgentAnswer("timeout", run_id, _line(text) or TIMED_OUT)
    # A shell's codes for a program that cannot be run: `openclaw` is there, the Node it needs is not.
    kind = "environment" if document is None and exit_code in CANNOT_RUN else _kind(document, text, said)
    return AgentAnswer(kind, run_id, _line(text or said))


def _kind(document: Mapping[str, Any] | None, text: str, said: str) -> Kind:
    """By the words of the command itself. What came of a turn may quote anything, a command's own errors among it."""
    if document is None:
        words = said
    elif "error" in document:
        _, _, after = said.rpartition("\n}")
        words = f"{text}\n{after}"
    else:
        return "agent"
    return next((kind for kind, pattern in _WORDS if pattern.search(words)), "agent")


def _document(said: str) -> Mapping[str, Any] | None:
    """The first JSON object that is an answer; warnings may stand before it, words after it."""
    for start in _OBJECT_START.finditer(said):
        try:
            found, _ = _DECODER.raw_decode(said, start.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and ("status" in found or "error" in found):
            return found
    return None


def _error_text(document: Mapping[str, Any]) -> str:
    """The error it names: of the command, of the turn, or of a payload the agent was to say. Empty: none."""
    error = document.get("error")
    if isinstance(error, Mapping):
        return _text(error.get("message")) or "no reason given"
    payloads = _part(document, "result").get("payloads")
    failed = [entry for entry in payloads if _is_error(entry)] if isinstance(payloads, list) else []
    if failed:
        return _text(failed[0].get("text")) or "no reason given"
    status = _text(document.get("status"))
    if status in {"ok", ""}:
        return ""
    details = [_text(document.get(name)) for name in ("summary", "stopReason", "timeoutPhase")]
    return ", ".join([status, *filter(None, details)])


def _timed_out(document: Mapping[str, Any] | None) -> bool:
    """Its own time was up, in a model's silence or in a command; an abort by somebody else is another thing."""
    if document is None:
        return False
    if document.get("status") == "timeout":
        return "stopReason" not in document
    return _part(_part(document, "result"), "meta").get("livenessState") == "paused" and bool(_error_text(document))


def _is_error(entry: object) -> bool:
    return isinstance(entry, Mapping) and entry.get("isError") is True


def _part(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = document.get(name)
    return part if isinstance(part, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _line(text: str) -> str:
    """The first lines as one: advice and addresses follow after them."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " ".join(lines[:SHOWN_LINES])[:MAX_TEXT]
