"""What a join asks for: its postgres_changes entries, their ids, and the subscriptions made of them."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dispatcher.local.realtime import elixir, filters
from dispatcher.local.realtime.filters import Filter, FilterRefused
from dispatcher.local.realtime.frames import dumps

ACTIONS = frozenset(("INSERT", "UPDATE", "DELETE"))


class EntryRefused(Exception):  # noqa: N818 - named for what happened, as in dispatcher.errors
    """The join cannot even be answered with ok. Carries the reason."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One element of `postgres_changes` as the client sent it. Equal ones have the same id, never 0."""

    id: int
    params: Mapping[str, Any]

    def echo(self) -> dict[str, Any]:
        """As the join reply repeats it: the id first, then every key, sorted."""
        return {"id": self.id, **{key: self.params[key] for key in sorted(self.params)}}


@dataclass(frozen=True, slots=True)
class Wanted:
    """An entry understood. `action` "*" means all three; `schema` and `table` may be "*"."""

    id: int
    action: str
    schema: str
    table: str
    filters: tuple[Filter, ...] = ()
    select: tuple[str, ...] | None = None

    def inspected(self) -> str:
        """The connect parameters as the real server's error messages show them."""
        conditions = elixir.inspect([one.inspected() for one in self.filters])
        columns = elixir.inspect(list(self.select) if self.select is not None else None)
        return (
            f"[event: {self.action}, schema: {self.schema}, table: {self.table}, "
            f"filters: {conditions}, select: {columns}]"
        )


def entry_id(params: Mapping[str, Any]) -> int:
    """1..134217727, from the entry alone. The real server hashes too, but with a hash of its own."""
    return (zlib.crc32(dumps({key: params[key] for key in sorted(params)}).encode()) & 0x7FFFFFF) or 1


def entries_of(config: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The entries of a join's `config`. Raises `EntryRefused`; anything but a list counts as none."""
    wanted = config.get("postgres_changes")
    if not isinstance(wanted, list):
        return ()
    for params in wanted:
        if not isinstance(params, dict):
            raise EntryRefused(f"UnknownErrorOnChannel: expected a map, got: {elixir.inspect(params)}")
    return tuple(Entry(entry_id(params), params) for params in wanted)


def legacy_entries_of(topic: str) -> tuple[Entry, ...]:
    """The entry that an old client spells in its topic: `schema`, `schema:table` or `schema:table:filter`."""
    params = dict(zip(("schema", "table", "filter"), topic.split(":", 2), strict=False))
    return (Entry(entry_id(params), params),)


def understand(entry: Entry) -> Wanted:
    """What the entry asks for. Raises `FilterRefused` with the text for the client."""
    params = entry.params
    action = _action_of(params)
    schema, table, condition = params.get("schema"), params.get("table"), params.get("filter", "")
    if "schema" not in params and isinstance(table, str):
        schema = "public"
    if not isinstance(schema, str) or not isinstance(params.get("table", ""), str) or not isinstance(condition, str):
        raise FilterRefused(
            "No subscription params provided. Please provide at least a `schema` or `table` to subscribe to: "
            + elixir.inspect(dict(params))
        )
    select = _select_of(params)
    return Wanted(entry.id, action, schema, table or "*", filters.parse(condition) if condition else (), select)


def _action_of(params: Mapping[str, Any]) -> str:
    action = str(params.get("event", "*")).upper()
    return action if action in ACTIONS else "*"


def _select_of(params: Mapping[str, Any]) -> tuple[str, ...] | None:
    select = params.get("select")
    if select is None:
        return None
    if not isinstance(select, list) or not all(isinstance(name, str) for name in select):
        raise FilterRefused(
            'Error parsing `select` params: expected a list of column name strings, e.g. select: ["col1", "col2"]'
        )
    return tuple(select)
