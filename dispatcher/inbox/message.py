"""The text a woken agent is given. Pure: no I/O, no clock."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dispatcher.inbox.model import Grant, Path

MAX_SUMMARY = 2_000
MAX_TITLE = 200
MAX_TITLES = 20

# Everything that could break out of the line it stands on: controls, line and paragraph separators,
# lone surrogates, and the marks that turn text around.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]+")

_REASONS: dict[Path, str] = {
    "sweep": "Reconciliation: pending inbox items found",
    "due": "Reconciliation: pending inbox items found",
    "command": "Reconciliation: pending inbox items found",
    "waitlist": "Concurrency slot freed: queued inbox items",
    "workflow": "Workflow run lost its session",
}

_STEPS = """Process your inbox:
1. python3 skills/hq/scripts/hq_inbox_process.py
2. Handle each item, then mark done or escalate
3. Continue until inbox is empty or batch limit reached"""


def one_line(text: str, limit: int) -> str:
    """`text` on one line, without control characters, at most `limit` characters."""
    flat = _UNSAFE.sub(" ", text).strip()
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def wake_reason(grant: Grant) -> str:
    """Why the agent is woken, as its message and the log say it."""
    if grant.path != "event":
        return _REASONS[grant.path]
    summary = one_line(grant.summary or "", MAX_SUMMARY)
    return f"New: {summary or grant.event_type or 'inbox item'}"


def blocker_note(titles: Sequence[str]) -> str:
    """The two lines for a task with unresolved blockers; empty without blockers."""
    if not titles:
        return ""
    named = ", ".join(one_line(title, MAX_TITLE) for title in titles[:MAX_TITLES])
    more = f", and {len(titles) - MAX_TITLES} more" if len(titles) > MAX_TITLES else ""
    return (
        f"\nNote: This task has {len(titles)} unresolved blocker(s): {named}{more}."
        "\nConsider working on unblocked tasks first or doing preparatory work."
    )


def wake_message(grant: Grant) -> str:
    """The whole message of a wake."""
    if grant.message is not None:
        return grant.message
    return f"[inbox] {wake_reason(grant)}{blocker_note(grant.blockers)}\n\n{_STEPS}\n".rstrip("\n")
