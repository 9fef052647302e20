"""What may be sent to PostgREST: text PostgreSQL can store, numbers JSON can spell, exact filters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, time
from decimal import Decimal
from uuid import UUID

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_RESERVED = frozenset(',.:()"\\ ')


def clean_text(text: str) -> str:
    """The text without NUL and lone surrogates: PostgreSQL stores neither, UTF-8 cannot carry the latter.

    Two surrogates that belong together are joined into their character instead of being lost.
    """
    if text.isascii():
        return text.replace("\x00", "")
    if not _UNSTORABLE.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore")
    return joined.replace("\x00", "")


def clean(value: object) -> object:
    """The value as plain JSON data PostgreSQL accepts. Never changes its argument.

    NUL and lone surrogates leave every string and key; NaN and the infinities become None (unknown, not 0);
    UUID, date, time and Decimal become strings; sets and tuples become lists.

    Raises:
        TypeError: for a value with no JSON form (bytes, secrets, objects): those are never sent by accident.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _clean_container(value)


def _clean_container(value: object) -> object:
    if isinstance(value, Mapping):
        return {clean_text(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, Sequence | AbstractSet) and not isinstance(value, bytes | bytearray | memoryview):
        return [clean(item) for item in value]
    return _clean_scalar(value)


def _clean_scalar(value: object) -> object:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value) if value.is_finite() else None
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to PostgREST")


def encode(params: Mapping[str, object]) -> bytes:
    """The arguments of a function call as UTF-8 JSON, cleaned."""
    return json.dumps(clean(params), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def quoted(value: object) -> str:
    """A value inside `in.(…)` or `or=(…)`, in quotes where PostgREST would otherwise read it as syntax."""
    text = clean_text(str(value))
    if text and text.lower() != "null" and not _RESERVED.intersection(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def equals(value: object) -> str:
    """The filter `eq.<value>`; at the top level PostgREST takes the rest literally, so nothing is quoted."""
    return f"eq.{clean_text(str(value))}"


def one_of(values: Iterable[object]) -> str:
    """The filter `in.(…)`. No values: matches nothing (never everything)."""
    return f"in.({','.join(quoted(value) for value in values)})"


def after(columns: Sequence[str], row: Mapping[str, object]) -> str:
    """The `or` filter for the rows after `row` in ascending order of `columns`: immune to rows that leave.

    Args:
        columns: NOT NULL columns that together are unique, in sort order.
        row: the last row seen; must hold every column.

    Raises:
        ValueError: a column is missing or null in the row, so no position follows from it.
    """
    positions = [_position(row, column) for column in columns]
    alternatives = []
    for index, column in enumerate(columns):
        same = [f"{columns[i]}.eq.{positions[i]}" for i in range(index)]
        beyond = f"{column}.gt.{positions[index]}"
        alternatives.append(f"and({','.join([*same, beyond])})" if same else beyond)
    return f"({','.join(alternatives)})"


def _position(row: Mapping[str, object], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise ValueError(f"paging by {column!r} needs that column, not null, in every row that is selected")
    return quoted(value)
