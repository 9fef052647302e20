"""Columns that a table of ours lost: told before the first file, with the line that brings each back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from dispatcher.errors import UnfitDatabase
from dispatcher.supabase.migrate.files import Migration

if TYPE_CHECKING:
    import psycopg

_TABLE: Final = re.compile(
    r"create\s+table\s+if\s+not\s+exists\s+((?:public|dispatcher)\.\w+)\s*\((.*)\)$", re.DOTALL | re.IGNORECASE
)
_ADDED: Final = re.compile(r"alter\s+table\s+(\S+)\s+add\s+column\s+if\s+not\s+exists\s+(\w+)", re.IGNORECASE)
_NO_COLUMN: Final = {"constraint", "primary", "unique", "check", "foreign", "exclude"}
_PRESENT: Final = """
    select namespace.nspname || '.' || class.relname, array_agg(attribute.attname::text)
      from pg_catalog.pg_class as class
      join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
      left join pg_catalog.pg_attribute as attribute
        on attribute.attrelid = class.oid and attribute.attnum > 0 and not attribute.attisdropped
     where namespace.nspname in ('public', 'dispatcher') and class.relkind in ('r', 'p')
     group by 1"""
_HAS_US: Final = """
    select to_regclass('dispatcher.migrations') is not null
        or to_regproc('public.register_dispatcher_instance') is not null"""
_OWNED: Final = "select name from dispatcher.owned_objects"


def refuse_lost_columns(
    connection: psycopg.Connection[Any], migrations: Sequence[Migration], shared: Sequence[str]
) -> None:
    """Look before the first file; `shared` are tables of YourHQ's, which are ours only where we made them.

    Raises:
        UnfitDatabase: a table of ours has no longer a column that no file adds. Says what to type.
    """
    known = connection.execute(_HAS_US).fetchone()
    if not (known and known[0]):
        return
    present: dict[str, list[str | None]] = dict(connection.execute(_PRESENT).fetchall())
    theirs = {f"public.{name}" for name in shared} - _owned(connection, present)
    lost = [
        f"alter table {table} add column {definition};"
        for table, name, definition in created_columns(migrations)
        if table in present and table not in theirs and name not in present[table]
    ]
    if lost:
        raise UnfitDatabase(
            "tables of the dispatcher lost columns. Nothing was changed. Type this as the owner (where rows are and "
            "a column has no default: without `not null`, fill it, then set it), then run `dispatcher migrate`:\n  "
            + "\n  ".join(lost)
        )


def created_columns(migrations: Sequence[Migration]) -> Iterator[tuple[str, str, str]]:
    """Table, column and definition of each column that a file makes with its table and does not add later."""
    statements = [statement.text for migration in migrations for statement in migration.statements]
    added = {(match[1], match[2]) for text in statements if (match := _ADDED.match(text))}
    for text in statements:
        if table := _TABLE.match(text):
            for part in parts(table[2]):
                name = part.split()[0]
                if name not in _NO_COLUMN and (table[1], name) not in added:
                    yield table[1], name, " ".join(part.split())


def parts(body: str) -> Iterator[str]:
    """What commas outside parentheses and quotes separate."""
    depth, quoted, begin = 0, False, 0
    for place, character in enumerate(body):
        if character == "'":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == "," and depth == 0:
                yield body[begin:place].strip()
                begin = place + 1
    yield body[begin:].strip()


def _owned(connection: psycopg.Connection[Any], present: dict[str, list[str | None]]) -> set[str]:
    if "name" not in present.get("dispatcher.owned_objects", []):
        return set()
    return {name for (name,) in connection.execute(_OWNED).fetchall()}
