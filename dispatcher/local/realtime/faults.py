"""Switches that make the local Realtime misbehave the way the real one, a proxy or a network does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Action = Callable[[str, Any], None]


@dataclass(slots=True)
class Faults:
    """State of the fault switches: JSON in through `update`, JSON out through `as_dict`.

    Switches stay until they are set again; the counters count down by themselves.

    | switch                     | value        | what it does
    |----------------------------|--------------|---
    | drop_events                | int          | the next N event frames (changes, broadcasts) vanish; -1 all
    | duplicate_events           | int          | the next N event frames are sent twice; -1: all
    | delay_events               | seconds      | every event frame is late by this much, order kept
    | silence                    | bool         | WebSocket pings are answered; frames are swallowed both ways
    | rate_limited               | bool         | database changes are consumed and dropped, as over the limit
    | trim_records               | bool         | every record counts as above 1 MiB: 413, long values omitted
    | refuse_join                | text or null | every join gets this reason as an error, after `error_delay`
    | join_delay                 | seconds      | every join reply is late by this much
    | system_delay               | seconds      | "Subscribed to PostgreSQL" comes this much later (cold start)
    | connect_status             | int or null  | every handshake gets this HTTP status (401, 500, ...)
    | changes_die_after_outage   | bool         | a lost database kills all change subscriptions silently, as
    |                            |              | on the real server; a new join or token revives a channel
    | broadcast_dead             | bool         | broadcasts from the database go nowhere; a join that asks for
    |                            |              | `replication_ready` gets the timeout error and phx_close
    | broadcast_dies_after_outage| bool         | a lost database sets `broadcast_dead`

    Actions happen once, at the update; they are not part of `as_dict`.

    | action           | value        | what it does
    |------------------|--------------|---
    | close            | int          | closes every socket: 1000, 1001, 1012, ...; 1006 cuts the connection
    | down_for         | seconds      | cuts every socket and resets every connection attempt for so long
    | changes_dead     | true         | kills the change subscriptions of all channels there are, silently
    | server_disconnect| true         | "Server requested disconnect" on every channel, then close 1012
    | channel_close    | true         | phx_close on every channel
    | channel_crash    | true         | phx_error "channel_crash" on every channel
    | system_error     | text         | a system message with status error on every channel
    | big_frame        | bytes        | a broadcast of that size on every channel
    | unparsable_frame | true or text | a text frame that is not JSON (or the given text) on every socket
    | denied_event     | true         | a 401 change event (no commit_timestamp) on every change subscription
    """

    drop_events: int = 0
    duplicate_events: int = 0
    delay_events: float = 0.0
    silence: bool = False
    rate_limited: bool = False
    trim_records: bool = False
    refuse_join: str | None = None
    join_delay: float = 0.0
    system_delay: float = 0.0
    connect_status: int | None = None
    changes_die_after_outage: bool = False
    broadcast_dead: bool = False
    broadcast_dies_after_outage: bool = False
    _actor: Action | None = field(default=None, repr=False, compare=False)

    def update(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Set switches and perform actions; returns `as_dict()`. ValueError comes before anything changes."""
        for name, value in changes.items():
            _check(name, value)
        for name, value in changes.items():
            self._apply(name, value)
        return self.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """All switches as they stand."""
        return {name: getattr(self, name) for name in SWITCHES}

    def clear(self) -> None:
        """Every switch back to its default."""
        self.update({name: getattr(_DEFAULTS, name) for name in SWITCHES})

    def perform_with(self, actor: Action) -> None:
        """Who carries the actions out, and hears of the switches: called with name and value."""
        self._actor = actor

    def _apply(self, name: str, value: object) -> None:
        if name in SWITCHES:
            setattr(self, name, value)
        if self._actor is not None:
            self._actor(name, value)

    def take_drop(self) -> bool:
        """Whether the event frame at hand is to vanish."""
        taken, self.drop_events = _take(self.drop_events)
        return taken

    def take_duplicate(self) -> bool:
        """Whether the event frame at hand is to be sent twice."""
        taken, self.duplicate_events = _take(self.duplicate_events)
        return taken


def _take(count: int) -> tuple[bool, int]:
    return count != 0, count - 1 if count > 0 else count


SWITCHES = tuple(entry.name for entry in fields(Faults) if not entry.name.startswith("_"))
_DEFAULTS = Faults()
_ACTIONS: Mapping[str, tuple[type, ...]] = {
    "close": (int,),
    "down_for": (int, float),
    "changes_dead": (bool,),
    "server_disconnect": (bool,),
    "channel_close": (bool,),
    "channel_crash": (bool,),
    "system_error": (str,),
    "big_frame": (int,),
    "unparsable_frame": (bool, str),
    "denied_event": (bool,),
}


def _kinds(name: str) -> tuple[type, ...]:
    if name in _ACTIONS:
        return _ACTIONS[name]
    default = getattr(_DEFAULTS, name)
    if default is None:
        return (str, type(None)) if name == "refuse_join" else (int, type(None))
    return (int, float) if isinstance(default, float) else (type(default),)


def _check(name: str, value: object) -> None:
    if name not in SWITCHES and name not in _ACTIONS:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join([*SWITCHES, *_ACTIONS])}")
    kinds = _kinds(name)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"fault {name!r} does not take {value!r}")
