"""What stands in the database: which files were applied, what differs from them, and what is open to strangers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

LISTED: Final = 20


@dataclass(frozen=True)
class Recorded:
    """A row of the ledger: the SHA-256 of the file as it was applied, and when."""

    checksum: str
    applied_at: datetime


@dataclass(frozen=True)
class Finding:
    """One thing that is not as the files make it; `remedy` is the statement to type where they do not mend it."""

    text: str
    remedy: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class SchemaState:
    """What the checks in the database find.

    `drift` and `exposed` are empty in a good database; `open_neighbours` are tables of YourHQ, and its affair.
    """

    drift: tuple[Finding, ...] = ()
    exposed: tuple[Finding, ...] = ()
    open_neighbours: tuple[str, ...] = ()


def read_ledger(connection: psycopg.Connection[Any]) -> Mapping[str, Recorded]:
    """By name of the file; empty where there is no ledger yet."""
    if not _has_relation(connection, "dispatcher", "migrations"):
        return {}
    rows = connection.execute("select name, checksum, applied_at from dispatcher.migrations").fetchall()
    return {name: Recorded(checksum, applied_at) for name, checksum, applied_at in rows}


def write_ledger(connection: psycopg.Connection[Any], name: str, checksum: str) -> None:
    """Record a file, in the transaction that applies it."""
    connection.execute(
        "insert into dispatcher.migrations (name, checksum) values (%s, %s)"
        " on conflict (name) do update set checksum = excluded.checksum, applied_at = now()",
        (name, checksum),
    )


def read_state(connection: psycopg.Connection[Any]) -> SchemaState:
    """What the checks find; nothing where a database has no checks yet."""
    from psycopg import ProgrammingError  # noqa: PLC0415 - an extra, see connect.py

    row = connection.execute(
        "select coalesce(to_regprocedure('dispatcher.expected_objects()'),"
        " to_regprocedure('public.dispatcher_schema()')) is not null"
    ).fetchone()
    if not (row and row[0]):
        return SchemaState()
    try:
        return _run_checks(connection)
    except ProgrammingError as error:  # one of the checks is gone, or of another version
        return SchemaState((Finding(f"the checks do not run ({error.diag.message_primary})"),))


def _run_checks(connection: psycopg.Connection[Any]) -> SchemaState:
    drift = connection.execute("select kind, name, problem, remedy from dispatcher.schema_drift()").fetchall()
    exposed = connection.execute("select name, fault, remedy from dispatcher.schema_exposure()").fetchall()
    neighbours = connection.execute("select * from dispatcher.open_neighbours()").fetchall()
    return SchemaState(
        tuple(Finding(f"{kind} {name} {problem}", remedy) for kind, name, problem, remedy in drift),
        tuple(Finding(f"{name}: {fault}", remedy) for name, fault, remedy in exposed),
        tuple(name for (name,) in neighbours),
    )


def read_shared_ledger(connection: psycopg.Connection[Any], versions: Sequence[str]) -> list[str]:
    """Those versions that an earlier build wrote into the Supabase CLI's own ledger."""
    if not _has_relation(connection, "supabase_migrations", "schema_migrations"):
        return []
    rows = connection.execute(
        "select version from supabase_migrations.schema_migrations where version = any (%s) order by 1",
        (list(versions),),
    ).fetchall()
    return [version for (version,) in rows]


def listed(findings: Sequence[object]) -> str:
    """One line with the first of them and the number of the others."""
    rest = len(findings) - LISTED
    return ", ".join(map(str, findings[:LISTED])) + (f" and {rest} more" if rest > 0 else "")


def _has_relation(connection: psycopg.Connection[Any], schema: str, name: str) -> bool:
    """Read from the catalog: `to_regclass` may answer from a cache that missed another session's commit."""
    row = connection.execute(
        "select exists (select from pg_catalog.pg_class as class"
        " join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace"
        " where namespace.nspname = %s and class.relname = %s)",
        (schema, name),
    ).fetchone()
    return bool(row and row[0])
