"""From text values in the log to the JSON of an event: one query for many rows, JSON spliced, never parsed.

PostgreSQL itself turns each value into JSON (`to_jsonb(text::type)`), so numbers keep every digit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from dispatcher.local.realtime.database import Connection
from dispatcher.local.realtime.filters import Filter
from dispatcher.local.realtime.frames import dumps
from dispatcher.local.realtime.pgoutput import Change

_LONG_VALUE = 64
_OVERHEAD_PER_VALUE = 45
_NOT_IN_JSON = frozenset(("real", "double precision", "numeric"))
_COMPARISONS = {"eq": "=", "neq": "<>", "lt": "<", "lte": "<=", "gt": ">", "gte": ">="}
_TEXT_MATCHES = {"like": "like", "ilike": "ilike", "match": "~", "imatch": "~*"}

Row = Mapping[str, str | None]
Answer = tuple[dict[str, str], list[bool]]
"""A row's values as JSON text, and the verdict of each filter on it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a subscribed table; `readers` are the roles with SELECT on it."""

    name: str
    type: str
    cast: str
    key: bool
    readers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Table:
    """What is needed to write events of one table."""

    id: int
    schema: str
    name: str
    rls: bool
    columns: tuple[Column, ...]

    def column(self, name: str) -> Column | None:
        """The column of that name, or None."""
        return next((column for column in self.columns if column.name == name), None)

    @property
    def key(self) -> tuple[Column, ...]:
        """The primary key's columns."""
        return tuple(column for column in self.columns if column.key)


@dataclass(slots=True)
class Event:
    """A change with its values as JSON text. `matches` holds the verdict of each filter on it."""

    change: Change
    new: dict[str, str]
    old: dict[str, str]
    matches: dict[Filter, bool]
    oversized: bool
    _written: dict[tuple[object, ...], str] = field(default_factory=dict)

    def data(self, table: Table, role: str, select: tuple[str, ...] | None) -> str:
        """The JSON of the event for one role and one selection of columns."""
        columns = _visible(table, role, select)
        key = (tuple(column.name for column in columns), select is None)
        if key not in self._written:
            self._written[key] = _write(self, table, columns)
        return self._written[key]


async def read_table(connection: Connection, relation: int, roles: Iterable[str]) -> Table | None:
    """Facts on a table, or None when it is gone."""
    cursor = await connection.execute("select realtime.local_table(%s::bigint::oid, %s)", (relation, list(roles)))
    row = await cursor.fetchone()
    facts = row[0] if row else None
    if facts is None:
        return None
    columns = tuple(
        Column(one["name"], one["type"], one["cast"], one["key"], frozenset(one["readers"]))
        for one in facts["columns"] or ()
    )
    return Table(relation, facts["schema"], facts["name"], facts["rls"], columns)


async def describe(
    connection: Connection, table: Table, changes: Sequence[Change], filters: Sequence[Filter], largest: int
) -> list[Event]:
    """The changes of one table, all values turned into JSON in one query, every filter decided."""
    rows = [row for change in changes for row in _rows(change)]
    try:
        answers = iter(await _convert(connection, table, rows, filters))
    except (psycopg.DataError, psycopg.ProgrammingError):
        # One value that its own type refuses (json with a zero byte, a changed type) spoils only its row.
        answers = iter([await _convert_alone(connection, table, row, filters) for row in rows])
    return [_event(change, [next(answers) for _ in _rows(change)], filters, largest) for change in changes]


def _rows(change: Change) -> tuple[Row, ...]:
    """The rows that an event shows: the first is the one that filters look at."""
    if change.action == "INSERT":
        return (change.new_values(),)
    if change.action == "DELETE":
        return (change.old_values(),)
    return (change.new_values(), change.old_values())


def _event(change: Change, answers: Sequence[Answer], filters: Sequence[Filter], largest: int) -> Event:
    values, verdicts = answers[0]
    matches = {one: verdict and one.column in values for one, verdict in zip(filters, verdicts, strict=True)}
    new = values if change.action != "DELETE" else {}
    old = answers[-1][0] if change.action != "INSERT" else {}
    return Event(change, new, old, matches, _size(_rows(change)) > largest)


def _size(rows: Sequence[Row]) -> int:
    """About the length of the change in the real server's log format."""
    return sum(
        len((value or "").encode()) + len(name) + _OVERHEAD_PER_VALUE for row in rows for name, value in row.items()
    )


async def _convert(
    connection: Connection, table: Table, rows: Sequence[Row], filters: Sequence[Filter]
) -> list[Answer]:
    parameters: dict[str, Any] = {
        f"c{position}": [row.get(column.name) for row in rows] for position, column in enumerate(table.columns)
    }
    for position, one in enumerate(filters):
        parameters[f"f{position}"] = list(one.values) if one.operator == "in" else one.value
    cursor = await connection.execute(conversion_query(table, filters), parameters)
    names = [column.name for column in table.columns]
    return [
        ({name: text or "null" for name, text in zip(names, texts, strict=True) if name in row}, verdicts)
        for row, (texts, verdicts) in zip(rows, await cursor.fetchall(), strict=True)
    ]


async def _convert_alone(connection: Connection, table: Table, row: Row, filters: Sequence[Filter]) -> Answer:
    try:
        return (await _convert(connection, table, [row], filters))[0]
    except (psycopg.DataError, psycopg.ProgrammingError):
        return {name: dumps(value) for name, value in row.items()}, [False] * len(filters)


def conversion_query(table: Table, filters: Sequence[Filter]) -> sql.Composed:
    """Per row: columns as JSON text, then filters' verdicts. Parameters: arrays c0, c1; values f0, f1."""
    count = len(table.columns)
    texts = [_as_json(column, position) for position, column in enumerate(table.columns)]
    verdicts = [_verdict(table, one, position) for position, one in enumerate(filters)]
    return sql.SQL(
        "select array[{texts}]::text[], array[{verdicts}]::boolean[] "
        "from unnest({arrays}) with ordinality as v({names}, n) order by n"
    ).format(
        texts=sql.SQL(", ").join(texts),
        verdicts=sql.SQL(", ").join(verdicts),
        arrays=sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Placeholder(f"c{i}")) for i in range(count)),
        names=sql.SQL(", ").join(sql.Identifier(f"c{i}") for i in range(count)),
    )


def _as_json(column: Column, position: int) -> sql.Composed:
    value = sql.Identifier("v", f"c{position}")
    if column.cast == "bytea":
        return sql.SQL("to_jsonb(substr({}, 3))::text").format(value)
    converted = sql.SQL("to_jsonb({}::{})::text").format(value, type_of(column))
    if column.cast not in _NOT_IN_JSON:
        return converted
    return sql.SQL("case when {} not in ('NaN', 'Infinity', '-Infinity') then {} end").format(value, converted)


def type_of(column: Column) -> sql.SQL:
    """The type to cast the column's text to, as SQL."""
    # From format_type(), which quotes; a percent sign in a type's name would look like a parameter.
    return sql.SQL(column.cast.replace("%", "%%"))


def _verdict(table: Table, one: Filter, position: int) -> sql.Composable:
    column = table.column(one.column)
    if column is None:
        return sql.SQL("false")
    value = sql.Identifier("v", f"c{table.columns.index(column)}")
    condition = _condition(one, value, type_of(column), sql.Placeholder(f"f{position}"))
    return sql.SQL("coalesce({}({}), false)").format(sql.SQL("not " if one.negated else ""), condition)


def _condition(one: Filter, value: sql.Identifier, kind: sql.SQL, parameter: sql.Placeholder) -> sql.Composed:
    if one.operator in _COMPARISONS:
        operator = sql.SQL(_COMPARISONS[one.operator])
        return sql.SQL("{}::{} {} {}::text::{}").format(value, kind, operator, parameter, kind)
    if one.operator in _TEXT_MATCHES:
        return sql.SQL("{} {} {}::text").format(value, sql.SQL(_TEXT_MATCHES[one.operator]), parameter)
    if one.operator == "in":
        return sql.SQL("{}::{} = any ({}::text[]::{}[])").format(value, kind, parameter, kind)
    if one.operator == "isdistinct":
        return sql.SQL("{}::{} is distinct from {}::text::{}").format(value, kind, parameter, kind)
    return _is_condition(one.value.lower(), value, parameter)


def _is_condition(wanted: str, value: sql.Identifier, parameter: sql.Placeholder) -> sql.Composed:
    # The parameter has to appear; its value is one of four words, checked at subscription.
    used = sql.SQL(" and {}::text is not null").format(parameter)
    if wanted == "null":
        return sql.SQL("{} is null{}").format(value, used)
    return sql.SQL("{}::boolean is {}{}").format(value, sql.SQL(_TRUTH[wanted]), used)


_TRUTH = {"true": "true", "false": "false", "unknown": "unknown"}


def _visible(table: Table, role: str, select: tuple[str, ...] | None) -> list[Column]:
    return [
        column
        for column in table.columns
        if role in column.readers and (select is None or column.key or column.name in select)
    ]


def refusal(table: Table, action: str, role: str) -> str | None:
    """The error that stands instead of the record: no primary key, or no right to it. Never for DELETE."""
    if action == "DELETE":
        return None
    if not table.key:
        return "Error 400: Bad Request, no primary key"
    if any(role not in column.readers for column in table.key):
        return "Error 401: Unauthorized"
    return None


def refused_data(schema: str, table: str, action: str, error: str) -> str:
    """The data of an event whose record may not be shown."""
    return (
        f'{{"table":{dumps(table)},"type":"{action}","record":{{}},"columns":[],"errors":{dumps([error])},'
        f'"schema":{dumps(schema)},"commit_timestamp":null}}'
    )


def _write(event: Event, table: Table, columns: Sequence[Column]) -> str:
    action = event.change.action
    parts = [f'"table":{dumps(table.name)}', f'"type":"{action}"']
    if action != "DELETE":
        parts.append(f'"record":{_object(event, event.new, columns)}')
    described = ", ".join(f'{{"name": {dumps(one.name)}, "type": {dumps(one.type)}}}' for one in columns)
    errors = '["Error 413: Payload Too Large"]' if event.oversized else "null"
    parts += [f'"columns":[{described}]', f'"errors":{errors}', f'"schema":{dumps(table.schema)}']
    parts.append(f'"commit_timestamp":"{timestamp(event.change.committed)}"')
    if action != "INSERT":
        hidden = action == "DELETE" and table.rls
        shown = [column for column in columns if column.key] if hidden else columns
        parts.append(f'"old_record":{_object(event, event.old, shown)}')
    return "{" + ",".join(parts) + "}"


def _object(event: Event, values: Mapping[str, str], columns: Sequence[Column]) -> str:
    """A jsonb object as PostgreSQL prints it: keys by length, then bytewise."""
    names = sorted((one.name for one in columns if one.name in values), key=lambda name: (len(name.encode()), name))
    shown = (name for name in names if not (event.oversized and len(values[name].encode()) > _LONG_VALUE))
    return "{" + ", ".join(f"{dumps(name)}: {values[name]}" for name in shown) + "}"


def timestamp(moment: datetime) -> str:
    """UTC, to the millisecond, as in `commit_timestamp`."""
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
