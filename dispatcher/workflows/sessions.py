"""What OpenClaw says of its sessions, and what that means for a run nobody has heard of lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeGuard

from dispatcher.agents.registry import normalise_id
from dispatcher.workflows.model import Suspect

Judgement = Literal["gone", "alive", "unknown"]

LISTS: Final = ("sessions", "recent", "items", "rows")
LIVE_TASKS: Final = frozenset({"queued", "running"})
AGES: Final = ("ageMs", "age", "lastActiveAgeMs")
MOMENTS: Final = ("updatedAt", "lastInteractionAt")
CLOCKS_DIFFER_BY: Final = 300.0
# Ten years: what is older than OpenClaw was written by a clock that is not set.
LONGEST_AGE: Final = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One session of an agent; `age` in seconds since it was active, None when nobody can know it.

    `agent_id` is normalised, `key` what `tasks show` takes, `is_running` whether a turn is said to be under way,
    `is_dated` whether OpenClaw says a time at all, believable or not.
    """

    agent_id: str
    key: str
    names: frozenset[str]
    age: float | None
    is_running: bool
    is_dated: bool


def read_sessions(document: object, now: datetime) -> list[SessionRow]:
    """The rows of `sessions --all-agents --json`, whatever they are wrapped in."""
    return [_row(entry, now) for entry in _entries(document)]


def lists_sessions(document: object) -> bool:
    """Whether this is an answer at all: a list of sessions, be it empty. What has no list knows nothing."""
    if isinstance(document, Mapping):
        return any(isinstance(document.get(name), list) for name in LISTS)
    return isinstance(document, list)


def _entries(document: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(document, Mapping):
        for name in LISTS:
            if isinstance(document.get(name), list):
                yield from _entries(document[name])
    elif isinstance(document, list):
        yield from (entry for entry in document if isinstance(entry, Mapping))


def _row(entry: Mapping[str, Any], now: datetime) -> SessionRow:
    key = str(entry.get("key") or "")
    parts = key.split(":")
    agent = entry.get("agentId") or (parts[1] if len(parts) > 1 and parts[0] == "agent" else "")
    names = {key, ":".join(parts[2:]), str(entry.get("sessionId") or "")} - {""}
    is_running = str(entry.get("status") or "").lower() == "running"
    is_dated = any(entry.get(name) is not None for name in (*AGES, *MOMENTS))
    return SessionRow(normalise_id(str(agent)), key, frozenset(names), _age(entry, now), is_running, is_dated)


def _age(entry: Mapping[str, Any], now: datetime) -> float | None:
    """Seconds since the session was last active, by the first value that can be believed; None where there is none."""
    for name in AGES:
        age = known_age(_seconds(entry.get(name)))
        if age is not None:
            return age
    for name in MOMENTS:
        moment = _moment(entry.get(name))
        age = known_age(None if moment is None else now.timestamp() - moment)
        if age is not None:
            return age
    return None


def known_age(age: float | None) -> float | None:
    """`age` where somebody can know it; finite, not of another era, and ahead only as far as clocks differ."""
    if age is None or not -CLOCKS_DIFFER_BY <= age <= LONGEST_AGE:
        return None
    return max(0.0, age)


def _seconds(milliseconds: object) -> float | None:
    if not _is_number(milliseconds):
        return None
    try:
        return float(milliseconds) / 1000
    except OverflowError:
        return None


def _moment(value: object) -> float | None:
    """Seconds since 1970 of a number in milliseconds or of an ISO text."""
    if not isinstance(value, str):
        return _seconds(value)
    try:
        return _aware(datetime.fromisoformat(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rows_of(suspect: Suspect, rows: Iterable[SessionRow], agent_ids: Iterable[str]) -> list[SessionRow]:
    """The session of a silent run where OpenClaw lists it, else (agents name theirs as they like) all of its agent's.

    `agent_ids` are the ids its agent may go by, in any spelling.
    """
    ids = {normalise_id(agent_id) for agent_id in agent_ids}
    mine = [row for row in rows if row.agent_id in ids]
    return [row for row in mine if suspect.session_id in row.names] or mine


def judge(suspect: Suspect, named: Iterable[SessionRow], orphan_after: float) -> Judgement:
    """Whether the session that works on a silent run is gone; `named` as `rows_of` answers.

    A second process beside a living one is worse than a wait: any recent activity counts, and a turn that is said
    to run. A session without an age is taken at its word that it exists, and one whose time nobody can believe may be
    active.
    """
    named = list(named)
    if any(row.is_running or (row.age is not None and row.age < orphan_after) for row in named):
        return "alive"
    if any(row.age is None and (row.is_dated or suspect.session_id in row.names) for row in named):
        return "unknown"
    return "gone"


def is_live_task(document: object) -> bool:
    """Whether `tasks show` speaks of a task that is queued or running."""
    if not isinstance(document, Mapping):
        return False
    task = document.get("task", document)
    return isinstance(task, Mapping) and str(task.get("status")).lower() in LIVE_TASKS
