"""What each hint path subscribes to, and what its frames mean: pure, no socket.

A frame is a hint. Everything in it may be missing (the server trims rows over 1 MiB to their short columns),
so a hint without an agent means "look at all of them".
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from realtime.types import RealtimeChannelOptions, RealtimePostgresChangesListenEvent

from dispatcher.supabase.realtime_health import Path, Trouble

_INSERT = RealtimePostgresChangesListenEvent.Insert
_UPDATE = RealtimePostgresChangesListenEvent.Update
_ACTIONABLE = ("pending", "failed")  # compared, not hashed: a frame may hold anything
_TOKEN_WORDS = ("jwt", "token", "unauthorized", "role`", "claims")
_LIMIT_WORDS = ("ratelimit", "too many")


@dataclass(frozen=True)
class Hint:
    """Somebody may be wakeable. agent_id None: look at all; item_id: the first of `item_ids`, if any.

    Kind `run` is about workflow runs and names nobody.
    """

    kind: Literal["inbox", "agent", "budget", "instance", "run"]
    agent_id: str | None
    item_id: str | None
    path: Path
    item_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class CanaryFrame:
    """Our own heartbeat came back. nonce None: by our row, which does not say which heartbeat it was."""

    nonce: str | None


@dataclass(frozen=True)
class Entry:
    """One table of a postgres_changes subscription."""

    event: RealtimePostgresChangesListenEvent
    table: str
    filter: str


@dataclass(frozen=True)
class ChannelPlan:
    """One channel to join. Its path is ready when the essential one is; `canary`: heartbeats come here."""

    topic: str
    options: RealtimeChannelOptions
    entries: tuple[Entry, ...] = ()
    essential: bool = True
    canary: bool = True

    @property
    def tables(self) -> str:
        """The tables it listens to, for a message."""
        return ", ".join(sorted({entry.table for entry in self.entries})) or self.topic


def broadcast_plan(topic: str) -> list[ChannelPlan]:
    """The private channel of a gateway; `replication_ready` asks the server to say when events flow."""
    options: RealtimeChannelOptions = {
        "config": {
            "broadcast": {"ack": False, "self": False, "replication_ready": True},
            "presence": {"key": "", "enabled": False},
            "private": True,
        }
    }
    return [ChannelPlan(topic, options)]


def changes_plan(tenant_id: str, instance_id: str, *, split: bool) -> list[ChannelPlan]:
    """The channels of postgres_changes.

    A subscription is all or nothing: one table outside the publication silences its whole channel. New items
    and the canary that vouches for them share one, the rest another; with `split` (after a refusal) each one
    stands alone.
    """
    of_tenant = f"tenant_id=eq.{tenant_id}"
    new_items = Entry(_INSERT, "agent_inbox_items", of_tenant)
    canary = Entry(_UPDATE, "dispatcher_instances", f"id=eq.{instance_id}")
    others = [Entry(_UPDATE, table, of_tenant) for table in ("agent_inbox_items", "agents", "agent_budgets")]
    # A project may not publish it yet: alone, its refusal costs nothing else.
    new_runs = _changes_channel([Entry(_INSERT, "workflow_runs", of_tenant)], essential=False, canary=False)
    if not split:
        return [
            _changes_channel([new_items, canary]),
            _changes_channel(others, essential=False, canary=False),
            new_runs,
        ]
    return [
        _changes_channel([new_items], canary=False),
        _changes_channel([canary], essential=False),
        *(_changes_channel([entry], essential=False, canary=False) for entry in others),
        new_runs,
    ]


def _changes_channel(entries: list[Entry], *, essential: bool = True, canary: bool = True) -> ChannelPlan:
    # The topic is public, so it is unguessable; and new each time, so no frame of an earlier join fits it.
    options: RealtimeChannelOptions = {
        "config": {
            "broadcast": {"ack": False, "self": False},
            "presence": {"key": "", "enabled": False},
            "private": False,
        }
    }
    return ChannelPlan(f"dispatcher:{uuid.uuid4().hex}", options, tuple(entries), essential, canary)


def read_broadcast(event: object, body: object, instance_id: str) -> Hint | CanaryFrame | None:
    """What a broadcast says, whatever it holds; None when it is not for us."""
    payload = _mapping(body)
    if event == "canary":
        ours = payload.get("instance_id") in (None, instance_id)
        return CanaryFrame(_text(payload, "nonce")) if ours else None
    if event == "inbox":
        return _inbox_hint(_text(payload, "agent_id"), _item_ids(payload), "broadcast")
    if event == "agent":
        return Hint("agent", _text(payload, "agent_id"), None, "broadcast")
    if event == "run":
        return Hint("run", None, None, "broadcast")
    return None


def read_change(body: object, instance_id: str) -> Hint | CanaryFrame | None:
    """What a change of a row says, whatever it holds; None when it makes nobody wakeable."""
    data = _mapping(body)
    record = _mapping(data.get("record"))
    table, event = data.get("table"), data.get("type")
    if table == "dispatcher_instances":
        return CanaryFrame(None) if record.get("id") in (None, instance_id) else None
    if table == "agents":
        return Hint("agent", _text(record, "id"), None, "postgres_changes")
    if table == "agent_budgets":
        return Hint("budget", _text(record, "agent_id"), None, "postgres_changes")
    if table == "workflow_runs":
        return Hint("run", None, None, "postgres_changes")
    if table != "agent_inbox_items" or (event == _UPDATE and record.get("status", "pending") not in _ACTIONABLE):
        return None
    item_id = _text(record, "id")
    return _inbox_hint(_text(record, "agent_id"), (item_id,) if item_id else (), "postgres_changes")


def _inbox_hint(agent_id: str | None, item_ids: tuple[str, ...], path: Path) -> Hint:
    return Hint("inbox", agent_id, item_ids[0] if item_ids else None, path, item_ids)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _item_ids(payload: Mapping[str, Any]) -> tuple[str, ...]:
    several = payload.get("item_ids")
    if isinstance(several, list):
        return tuple(item for item in several if isinstance(item, str))
    only = _text(payload, "item_id")
    return (only,) if only else ()


def _text(payload: Mapping[str, Any], name: str) -> str | None:
    value = payload.get(name)
    return value if isinstance(value, str) and value else None


def read_refusal(text: str) -> tuple[Trouble, str]:
    """What kind of trouble the server's words are: JSON of an error reply, system message or phx_error."""
    payload = _json_object(text)
    words = str(payload.get("message") or payload.get("reason") or text or "closed by the server")[:500]
    if payload.get("extension") == "postgres_changes":
        return Trouble.MISCONFIGURED, words
    lowered = words.lower()
    if any(word in lowered for word in _LIMIT_WORDS):
        return Trouble.OVERLOADED, words
    return (Trouble.REFUSED if any(word in lowered for word in _TOKEN_WORDS) else Trouble.CHANNEL), words


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
