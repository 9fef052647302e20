"""Applies the project's migrations in name order, each once, each in one transaction.

They are recorded where and as the Supabase CLI records them, so that either may go on after the other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dispatcher.errors import DispatcherError, ServiceUnavailable
from dispatcher.supabase.statements import Statement, split_statements

if TYPE_CHECKING:
    import psycopg

_FILE_NAME = re.compile(r"(?P<version>\d+)_(?P<name>.+)\.sql")
# Any fixed number does, as long as nothing else in the project locks on it.
_LOCK = 7_223_150_648_112
_CONNECT_SECONDS = 10
_PACKAGE = Path(__file__).resolve().parents[1]

_CREATE_HISTORY = """
create schema if not exists supabase_migrations;
create table if not exists supabase_migrations.schema_migrations (version text not null primary key);
alter table supabase_migrations.schema_migrations add column if not exists statements text[];
alter table supabase_migrations.schema_migrations add column if not exists name text;
"""


class MigrationError(DispatcherError):
    """A statement was refused: names file, line and the server's reason. Nothing of its file was kept."""


@dataclass(frozen=True)
class Migration:
    """One file: `20261130120000_what.sql` has the version 20261130120000 and the name `what`."""

    version: str
    name: str
    path: Path


@dataclass(frozen=True)
class Applied:
    """A migration this call applied, or would apply in a dry run."""

    version: str
    name: str


def migrations_directory(package: Path = _PACKAGE) -> Path:
    """The project's migrations: inside an installed wheel, else in the clone around this package.

    Raises:
        DispatcherError: neither is there.
    """
    for candidate in (package / "_migrations", package.parent / "supabase" / "migrations"):
        if candidate.is_dir():
            return candidate
    raise DispatcherError(f"no migrations beside {package}: the installation is incomplete")


def read_migrations(directory: Path) -> list[Migration]:
    """A directory's migrations, first to last; other files are passed over, as by the Supabase CLI."""
    found = [_parse(path) for path in sorted(directory.glob("*.sql"))]
    migrations = [migration for migration in found if migration]
    _refuse_shared_versions(migrations)
    return migrations


def _parse(path: Path) -> Migration | None:
    match = _FILE_NAME.fullmatch(path.name)
    return Migration(match["version"], match["name"], path) if match else None


def _refuse_shared_versions(migrations: list[Migration]) -> None:
    seen: dict[str, Path] = {}
    for migration in migrations:
        if migration.version in seen:
            first = seen[migration.version].name
            raise MigrationError(f"{first} and {migration.path.name} have the same version")
        seen[migration.version] = migration.path


def apply_migrations(db_url: str, directory: Path, *, dry_run: bool = False, again: bool = False) -> list[Applied]:
    """Apply what is not yet recorded. Two at once are safe: the second waits, then finds nothing left to do.

    Args:
        db_url: of a role that may create schemas; a direct connection or a pooler of either mode.
        directory: see `migrations_directory`.
        dry_run: only say what would be applied; writes nothing.
        again: apply what is recorded too. Every file leaves alone what is there and makes what is gone.

    Raises:
        MigrationError: a statement was refused. Earlier files stay applied.
        ServiceUnavailable: the database could not be reached.
        DispatcherError: psycopg is not installed.
    """
    migrations = read_migrations(directory)
    with _connect(db_url) as connection:
        if dry_run:
            recorded = set() if again else _recorded_versions(connection)
            return [Applied(each.version, each.name) for each in migrations if each.version not in recorded]
        _create_history(connection)
        return list(_apply_each(connection, migrations, again))


def _apply_each(connection: "psycopg.Connection", migrations: list[Migration], again: bool) -> Iterator[Applied]:
    for migration in migrations:
        applied = _apply_once(connection, migration, again)
        # A file must not depend on what an earlier one did to the session: by psql each would have its own.
        connection.execute("discard all")
        if applied:
            yield Applied(migration.version, migration.name)


def _apply_once(connection: "psycopg.Connection", migration: Migration, again: bool) -> bool:
    """True when this call applied it. The lock ends with the transaction, so a pooler cannot keep it."""
    with connection.transaction():
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
        if not again and migration.version in _recorded_versions(connection):
            return False
        statements = split_statements(migration.path.read_text(encoding="utf-8"))
        for statement in statements:
            _execute(connection, migration, statement)
        _record(connection, migration, statements)
        return True


def _execute(connection: "psycopg.Connection", migration: Migration, statement: Statement) -> None:
    import psycopg  # noqa: PLC0415 - see _connect

    try:
        connection.execute(statement.text.encode())
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise MigrationError(_describe(migration, statement, error)) from error


def _describe(migration: Migration, statement: Statement, error: "psycopg.Error") -> str:
    offset = int(error.diag.statement_position or 1) - 1
    line, column = statement.locate(offset)
    reason = error.diag.message_primary or str(error)
    state = f" ({error.sqlstate})" if error.sqlstate else ""
    hint = f"; hint: {error.diag.message_hint}" if error.diag.message_hint else ""
    return f"{migration.path.name}, line {line}, column {column}: {reason}{state}{hint}"


def _record(connection: "psycopg.Connection", migration: Migration, statements: list[Statement]) -> None:
    connection.execute(
        "insert into supabase_migrations.schema_migrations (version, name, statements) values (%s, %s, %s)"
        " on conflict (version) do update set statements = excluded.statements",
        (migration.version, migration.name, [statement.text for statement in statements]),
    )


def _create_history(connection: "psycopg.Connection") -> None:
    with connection.transaction():
        connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
        connection.execute("set local client_min_messages = warning")
        connection.execute(_CREATE_HISTORY)


def _recorded_versions(connection: "psycopg.Connection") -> set[str]:
    exists = connection.execute("select to_regclass('supabase_migrations.schema_migrations')").fetchone()
    if exists is None or exists[0] is None:
        return set()
    rows = connection.execute("select version from supabase_migrations.schema_migrations").fetchall()
    return {row[0] for row in rows}


def _connect(db_url: str) -> "psycopg.Connection":
    try:
        import psycopg  # noqa: PLC0415 - an extra: the daemon itself runs without it
    except ImportError as error:
        raise DispatcherError(
            'migrating needs psycopg; install it with: pip install "openclaw-dispatcher[migrate]"'
        ) from error
    try:
        # Prepared statements do not survive a pooler in transaction mode.
        return psycopg.connect(db_url, autocommit=True, prepare_threshold=None, connect_timeout=_CONNECT_SECONDS)
    except psycopg.ProgrammingError as error:  # its text may hold a part of the password
        raise DispatcherError(
            "the database URL cannot be read: write it as postgresql://user:password@host:port/database, "
            "with %XX for special characters"
        ) from error
    except psycopg.OperationalError as error:
        raise ServiceUnavailable(f"cannot connect to the database: {error}") from error
