"""Keeps the record of definitions in step with the files: what a file changes is recorded in its own transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

# By kind and name; see dispatcher.object_definitions.
Definitions = Mapping[tuple[str, str], str]


def read_definitions(connection: psycopg.Connection[Any]) -> Definitions | None:
    """As they are now; None where there is no record to keep in step, or nothing that reads them."""
    from psycopg import ProgrammingError  # noqa: PLC0415 - an extra, see connect.py

    try:
        with connection.transaction():
            kept = connection.execute(
                "select from dispatcher.recorded_objects where kind = 'record' and definition = 'kept'"
            ).fetchone()
            return _read(connection) if kept is not None else None
    except ProgrammingError:
        return None


def record_changes(connection: psycopg.Connection[Any], before: Definitions | None) -> None:
    """Record what is not as it was `before`: what somebody else had changed stays different from the record."""
    after = _read(connection) if before is not None else {}
    for key in changed(before or {}, after):
        connection.execute("delete from dispatcher.recorded_objects where kind = %s and name = %s", key)
        if key in after:
            connection.execute("insert into dispatcher.recorded_objects values (%s, %s, %s)", (*key, after[key]))


def changed(before: Definitions, after: Definitions) -> list[tuple[str, str]]:
    """What came, went or differs, in order."""
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _read(connection: psycopg.Connection[Any]) -> Definitions:
    rows = connection.execute("select kind, name, definition from dispatcher.object_definitions()").fetchall()
    return {(kind, name): definition for kind, name, definition in rows}
