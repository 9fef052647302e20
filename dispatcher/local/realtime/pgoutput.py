"""Decoder of PostgreSQL's `pgoutput` stream, protocol version 1, text values. Pure: bytes in, values out."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_ACTIONS = {"I": "INSERT", "U": "UPDATE", "D": "DELETE"}


class Unchanged:
    """Stands for a TOASTed value that an UPDATE left alone and the log therefore does not hold."""


UNCHANGED: Final = Unchanged()
Value = str | None | Unchanged


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as the log describes it: published columns in order, and whether each is of the key."""

    id: int
    schema: str
    name: str
    columns: tuple[str, ...]
    key: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One row change. `old` is None when the log holds none; `old_is_full` tells a whole row from a key."""

    relation: Relation
    action: str
    committed: datetime
    new: tuple[Value, ...] | None
    old: tuple[Value, ...] | None
    old_is_full: bool

    def new_values(self) -> dict[str, str | None]:
        """The new row by column. An unchanged TOASTed value is the old row's, else absent."""
        return _known(self.relation, self.new, self.old if self.old_is_full else None)

    def old_values(self) -> dict[str, str | None]:
        """What is known of the old row: all, or its key, which an UPDATE that kept it has in the new row."""
        if self.old is not None and self.old_is_full:
            return _known(self.relation, self.old, None)
        known = _known(self.relation, self.old if self.old is not None else self.new, None)
        keys = {name for name, is_key in zip(self.relation.columns, self.relation.key, strict=True) if is_key}
        return {name: value for name, value in known.items() if name in keys}


def _known(
    relation: Relation, row: tuple[Value, ...] | None, fallback: tuple[Value, ...] | None
) -> dict[str, str | None]:
    known: dict[str, str | None] = {}
    for position, (name, written) in enumerate(zip(relation.columns, row or (), strict=False)):
        value = fallback[position] if fallback and isinstance(written, Unchanged) else written
        if not isinstance(value, Unchanged):
            known[name] = value
    return known


class Decoder:
    """Remembers tables from one batch to the next, as the protocol demands."""

    def __init__(self) -> None:
        self._relations: dict[int, Relation] = {}
        self._committed = _EPOCH

    def changes(self, messages: Iterable[bytes], wanted: frozenset[int]) -> Iterator[Change]:
        """Row changes of the tables in `wanted` (object ids), in commit order. Others are not even parsed."""
        for message in messages:
            kind = chr(message[0])
            if kind == "B":
                self._committed = _EPOCH + timedelta(microseconds=struct.unpack_from("!q", message, 9)[0])
            elif kind == "R":
                relation = _relation(message)
                self._relations[relation.id] = relation
            elif kind in _ACTIONS and _relation_id(message) in wanted:
                yield self._change(kind, message)

    def _change(self, kind: str, message: bytes) -> Change:
        relation = self._relations[_relation_id(message)]
        rows = dict(_rows(message))
        old = rows.get("O", rows.get("K"))
        return Change(relation, _ACTIONS[kind], self._committed, rows.get("N"), old, "O" in rows)


def _relation_id(message: bytes) -> int:
    return int.from_bytes(message[1:5], "big")


def _relation(message: bytes) -> Relation:
    schema, position = _text(message, 5)
    name, position = _text(message, position)
    count = int.from_bytes(message[position + 1 : position + 3], "big")
    position += 3
    columns, key = [], []
    for _ in range(count):
        key.append(bool(message[position] & 1))
        column, position = _text(message, position + 1)
        columns.append(column)
        position += 8
    return Relation(_relation_id(message), schema, name, tuple(columns), tuple(key))


def _text(message: bytes, position: int) -> tuple[str, int]:
    end = message.index(0, position)
    return message[position:end].decode(), end + 1


def _rows(message: bytes) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """The tuples of an I, U or D message, each after its letter: N new, O old row, K old key."""
    position = 5
    while position < len(message):
        kind = chr(message[position])
        values, position = _row(message, position + 1)
        yield kind, values


def _row(message: bytes, position: int) -> tuple[tuple[Value, ...], int]:
    count = int.from_bytes(message[position : position + 2], "big")
    position += 2
    values: list[Value] = []
    for _ in range(count):
        value, position = _value(message, position)
        values.append(value)
    return tuple(values), position


def _value(message: bytes, position: int) -> tuple[Value, int]:
    kind = message[position : position + 1]
    if kind == b"n":
        return None, position + 1
    if kind == b"u":
        return UNCHANGED, position + 1
    size = int.from_bytes(message[position + 1 : position + 5], "big")
    start = position + 5
    return message[start : start + size].decode(), start + size
