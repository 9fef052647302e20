"""Applies files: which ones, each whole or not at all, waiting politely for whoever holds what they need."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dispatcher.errors import MigrationBlocked, MigrationError
from dispatcher.supabase.migrate.blockers import BlockerWatch
from dispatcher.supabase.migrate.columns import refuse_lost_columns
from dispatcher.supabase.migrate.connect import connect, lost
from dispatcher.supabase.migrate.definitions import read_definitions, record_changes
from dispatcher.supabase.migrate.files import Migration, read_migrations
from dispatcher.supabase.migrate.preflight import BASE_TABLES, refuse_unfit_database
from dispatcher.supabase.migrate.state import (
    Finding,
    Recorded,
    SchemaState,
    listed,
    read_ledger,
    read_shared_ledger,
    read_state,
    write_ledger,
)
from dispatcher.supabase.statements import Statement

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[Any]

# Any fixed number does, as long as nothing else in the project locks on it.
_LOCK: Final = 7_223_150_648_112
_LONGEST_WAIT: Final = 3.0
# Long enough to see who holds the lock; 0 would mean to wait without end.
_SHORTEST_WAIT: Final = 0.25
# The runner sets its own, see `_set_timeouts`.
_SETS_LOCK_TIMEOUT: Final = re.compile(r"set\s+local\s+lock_timeout\b", re.IGNORECASE)
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0
PATIENCE_SECONDS: Final = 120.0
_REPLACED: Final = re.compile(r"create\s+or\s+replace\s+(function|view)\s+((?:\w+\.)?\w+)", re.IGNORECASE)
# Added to what the server says, by SQLSTATE.
_ADVICE: Final[Mapping[str, str]] = {
    "42703": ". If an earlier build made the table: add the column as the file's `create table` has it, then run"
    " `dispatcher migrate` again"
}
_OVERLOADS: Final = """
    select proc.oid::regprocedure::text from pg_catalog.pg_proc as proc
      join pg_catalog.pg_namespace as namespace on namespace.oid = proc.pronamespace
     where namespace.nspname || '.' || proc.proname = %s"""

Teller = Callable[[str], None]


@dataclass(frozen=True)
class Applied:
    """A migration this call applied, or would apply in a dry run; `why` is `new`, `changed` or `again`."""

    version: str
    name: str
    why: str = "new"


class _Conflict(Exception):  # noqa: N818 - it is caught here, and is no error by then
    """A statement cannot replace the function or view `name` that an earlier version made."""

    def __init__(self, statement: Statement, kind: str, name: str) -> None:
        super().__init__(name)
        self.statement = statement
        self.kind = kind
        self.name = name


def _silent(_line: str) -> None:
    """Tell nobody."""


def apply_migrations(
    db_url: str,
    directory: Path,
    *,
    dry_run: bool = False,
    again: bool = False,
    patience: float = PATIENCE_SECONDS,
    tell: Teller = _silent,
) -> list[Applied]:
    """Apply what is new or changed and everything after it; then see that the database is what the files make.

    Two at once are safe: each file is applied by one of them. Where the database differs from the files although they
    were applied, all are applied once more.

    Args:
        db_url: of the role that owns the tables; a direct connection or a pooler of either mode.
        directory: see `migrations_directory`.
        dry_run: only say what would be applied; writes nothing.
        again: apply all of them. Every file leaves alone what is there and makes what is gone.
        patience: seconds that the whole call may lose to others: the tries that ended without their lock, and the
            pauses between tries. Its work is not bounded, nor a wait that ends with the lock (3 s each at most).
        tell: gets a line for each thing an operator should know while it happens.

    Raises:
        MigrationError: a statement was refused, or the database still differs, or is open to strangers.
        MigrationBlocked: patience ran out; names who holds what.
        UnfitDatabase: told before anything was created.
        ServiceUnavailable: the database could not be reached.
        SettingsError: the URL cannot be read, or psycopg is not installed (ExtraMissing).
    """
    migrations = read_migrations(directory)
    with closing(connect(db_url)) as connection, BlockerWatch(lambda: connect(db_url)) as watch:
        runner = _Runner(connection, watch, patience, tell)
        ledger = runner.read_when_free(partial(_read_before, connection, migrations), "what is applied")
        if dry_run:
            return plan(migrations, ledger, again=again)
        connection.add_notice_handler(lambda notice: _tell_warning(notice, tell))
        runner.read_when_free(partial(refuse_unfit_database, connection, migrations), "the database")
        applied = list(runner.apply(migrations, ledger, again=again))
        applied += _mend(runner, connection, migrations, tell)
        _refuse_wrong_state(runner.read_when_free(partial(read_state, connection), "the schema"), tell)
        _tell_shared_ledger(connection, migrations, tell)
        return applied


def check_schema(db_url: str, directory: Path) -> tuple[list[Applied], SchemaState]:
    """What `apply_migrations` would apply, and what the checks find now. Writes nothing. Raises as it does.

    Waits for whoever holds what it reads for about as long as one try of `apply_migrations`.
    """
    migrations = read_migrations(directory)
    with closing(connect(db_url)) as connection, BlockerWatch(lambda: connect(db_url)) as watch:
        runner = _Runner(connection, watch, _LONGEST_WAIT, _silent)
        ledger = runner.read_when_free(partial(read_ledger, connection), "what is applied")
        state = runner.read_when_free(partial(read_state, connection), "the schema")
        return plan(migrations, ledger, again=False), state


def _read_before(connection: Connection, migrations: Sequence[Migration]) -> Mapping[str, Recorded]:
    refuse_lost_columns(connection, migrations, list(BASE_TABLES))
    return read_ledger(connection)


def plan(migrations: Sequence[Migration], ledger: Mapping[str, Recorded], *, again: bool) -> list[Applied]:
    """The first file that is new or changed, and all after it: a later one may stand on what it makes."""
    for place, migration in enumerate(migrations):
        if again or _differs(migration, ledger):
            return [Applied(each.version, each.name, _why(each, ledger)) for each in migrations[place:]]
    return []


def _differs(migration: Migration, ledger: Mapping[str, Recorded]) -> bool:
    recorded = ledger.get(migration.label)
    return recorded is None or recorded.checksum != migration.checksum


def _why(migration: Migration, ledger: Mapping[str, Recorded]) -> str:
    if migration.label not in ledger:
        return "new"
    return "changed" if _differs(migration, ledger) else "again"


class Patience:
    """Seconds that may still be lost to others; spent by whoever waits in vain or pauses."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left = seconds

    def spend(self, seconds: float) -> None:
        """Take this from what is left."""
        self.left = max(0.0, self.left - seconds)

    def longest_wait(self) -> float:
        """Seconds to wait for one lock now: 3 at most, and never 0, which PostgreSQL takes for no limit."""
        return max(_SHORTEST_WAIT, min(_LONGEST_WAIT, self.left))

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before the next tries: doubled each time, at most 10, never more than is left."""
        pause = _FIRST_PAUSE
        while self.left > 0:
            taken = min(pause, self.left)
            self.spend(taken)
            yield taken
            pause = min(pause * 2, _LONGEST_PAUSE)


class _Runner:
    """Applies files one after the other over one connection."""

    def __init__(self, connection: Connection, watch: BlockerWatch, patience: float, tell: Teller) -> None:
        self._connection = connection
        self._watch = watch
        self._patience = Patience(patience)
        self._tell = tell
        self._statement_began = time.monotonic()

    def apply(
        self, migrations: Sequence[Migration], ledger: Mapping[str, Recorded], *, again: bool
    ) -> Iterator[Applied]:
        """Apply what is planned by `ledger`; yields what this call applied and not somebody else since it was read."""
        todo = {each.version: each for each in plan(migrations, ledger, again=again)}
        for migration in migrations:
            planned = todo.get(migration.version)
            if planned and self._apply_when_free(migration, ledger.get(migration.label)):
                self._tell(f"applied {planned.version} {planned.name} ({planned.why})")
                yield planned
            # A file must not depend on what an earlier one did to the session: by psql each would have its own.
            self._connection.execute("discard all")

    def read_when_free(self, read: Callable[[], Any], what: str) -> Any:
        """The answer of `read`, which changes nothing: its waits are bounded and told as those of a file are."""

        def once() -> Any:
            with self._connection.transaction():
                self._set_timeouts()
                self._watch.follow(_backend(self._connection))
                self._statement_began = time.monotonic()
                return read()

        return self._when_free(once, what, f"{what} could not be read")

    def _apply_when_free(self, migration: Migration, before: Recorded | None) -> bool:
        refusal = f"{migration.label} was not applied and nothing of the file was kept"
        return bool(self._when_free(partial(self._apply_making_way, migration, before), migration.label, refusal))

    def _when_free(self, work: Callable[[], Any], what: str, refusal: str) -> Any:
        from psycopg.errors import DeadlockDetected, LockNotAvailable, OperationalError  # noqa: PLC0415 - an extra

        pauses = self._patience.pauses()
        while True:
            try:
                return work()
            except (LockNotAvailable, DeadlockDetected) as error:
                self._patience.spend(time.monotonic() - self._statement_began)
                pause = next(pauses, None)
                if pause is None:
                    raise self._blocked(refusal) from error
                self._tell(f"{what} waits: {self._watch.describe()}. Trying again in {pause:.3g} s")
                time.sleep(pause)
            except OperationalError as error:
                raise lost(what, error) from error

    def _blocked(self, refusal: str) -> MigrationBlocked:
        return MigrationBlocked(
            f"{refusal}: others have held this run up for {self._patience.seconds:g} s in all: "
            f"{self._watch.describe()}. Run again when the lock is free"
        )

    def _apply_making_way(self, migration: Migration, before: Recorded | None) -> bool:
        """Starts over with a drop for each object of an earlier version that cannot be replaced in place."""
        drops: dict[Statement, tuple[str, ...]] = {}
        while True:
            try:
                return self._apply_once(migration, before, drops)
            except _Conflict as conflict:
                if conflict.statement in drops:
                    raise MigrationError(f"{migration.label}: {conflict.name} cannot be replaced") from conflict
                drops[conflict.statement] = self._drops_of(conflict)

    def _drops_of(self, conflict: _Conflict) -> tuple[str, ...]:
        if conflict.kind == "view":
            return (f"drop view {conflict.name}",)
        rows = self._connection.execute(_OVERLOADS, (conflict.name,)).fetchall()
        return tuple(f"drop function {signature}" for (signature,) in rows)

    def _apply_once(
        self, migration: Migration, before: Recorded | None, drops: Mapping[Statement, Sequence[str]]
    ) -> bool:
        """True when this call applied it. The lock ends with the transaction, so a pooler cannot keep it."""
        connection = self._connection
        with connection.transaction():
            self._set_timeouts()
            self._watch.follow(_backend(connection))
            self._statement_began = time.monotonic()
            connection.execute("select pg_advisory_xact_lock(%s)", (_LOCK,))
            recorded = read_ledger(connection).get(migration.label)
            if recorded and recorded != before and recorded.checksum == migration.checksum:
                return False  # somebody else's run did, since this one made its plan
            definitions = read_definitions(connection)
            for statement in migration.statements:
                if _SETS_LOCK_TIMEOUT.match(statement.text):
                    continue
                for drop in drops.get(statement, ()):
                    self._execute(migration, Statement(drop, statement.line, statement.column))
                self._execute(migration, statement)
            record_changes(connection, definitions)
            write_ledger(connection, migration.label, migration.checksum)
        return True

    def _set_timeouts(self) -> None:
        """And what the files ask for: `dispatcher.lock_tables` its patience, the record who keeps it."""
        wait = f"{int(self._patience.longest_wait() * 1000)}ms"
        self._connection.execute(
            "select set_config('lock_timeout', %(wait)s, true), set_config('dispatcher.lock_patience', %(wait)s, true),"
            " set_config('statement_timeout', '0', true), set_config('dispatcher.runner', 'on', true)",
            {"wait": wait},
        )

    def _execute(self, migration: Migration, statement: Statement) -> None:
        self._statement_began = time.monotonic()
        _execute(self._connection, migration, statement)


def _backend(connection: Connection) -> int:
    """The server process of this transaction; a pooler tells its clients another number."""
    row = connection.execute("select pg_backend_pid()").fetchone()
    assert row is not None
    pid: int = row[0]
    return pid


def _execute(connection: Connection, migration: Migration, statement: Statement) -> None:
    import psycopg  # noqa: PLC0415 - an extra, see connect.py

    try:
        connection.execute(statement.text.encode())
    except psycopg.OperationalError:
        raise
    except (psycopg.errors.InvalidFunctionDefinition, psycopg.errors.InvalidTableDefinition) as error:
        replaced = _REPLACED.match(statement.text)
        if replaced is None:
            raise MigrationError(_describe(migration, statement, error)) from error
        raise _Conflict(statement, replaced[1].lower(), replaced[2]) from error
    except psycopg.Error as error:
        raise MigrationError(_describe(migration, statement, error)) from error


def _describe(migration: Migration, statement: Statement, error: psycopg.Error) -> str:
    offset = int(error.diag.statement_position or 1) - 1
    line, column = statement.locate(offset)
    reason = error.diag.message_primary or str(error)
    state = f" ({error.sqlstate})" if error.sqlstate else ""
    detail = f"; {error.diag.message_detail}" if error.diag.message_detail else ""
    hint = f"; hint: {error.diag.message_hint}" if error.diag.message_hint else ""
    advice = _ADVICE.get(error.sqlstate or "", "")
    return f"{migration.label}.sql, line {line}, column {column}: {reason}{state}{detail}{hint}{advice}"


def _mend(runner: _Runner, connection: Connection, migrations: Sequence[Migration], tell: Teller) -> list[Applied]:
    """Applies every file again where the database differs from what they make, or is open to strangers."""
    state = runner.read_when_free(partial(read_state, connection), "the schema")
    faults = state.drift + state.exposed
    if not faults:
        return []
    tell(f"the database is not what the files make: {listed(faults)}. Applying every file again")
    ledger = runner.read_when_free(partial(read_ledger, connection), "what is applied")
    return list(runner.apply(migrations, ledger, again=True))


def _refuse_wrong_state(state: SchemaState, tell: Teller) -> None:
    if state.open_neighbours:
        tell(
            f"warning: tables without row level security that the dispatcher did not make: "
            f"{listed(state.open_neighbours)}. If nobody else needs them open: alter table … enable row level security"
        )
    if state.exposed:
        raise MigrationError(
            f"open to strangers after the last file: {listed(state.exposed)}{_what_to_type(state.exposed)}"
        )
    if state.drift:
        raise MigrationError(
            f"the database differs from what the files make, and applying them again did not mend it: "
            f"{listed(state.drift)}{_what_to_type(state.drift)}"
        )


def _what_to_type(findings: Sequence[Finding]) -> str:
    remedies = [f"  {finding.remedy};" for finding in findings if finding.remedy]
    if not remedies:
        return ". Rename or drop these objects, then run `dispatcher migrate` again"
    return "\n".join([". Type this as the owner, then run `dispatcher migrate` again:", *remedies])


def _tell_shared_ledger(connection: Connection, migrations: Sequence[Migration], tell: Teller) -> None:
    versions = read_shared_ledger(connection, [each.version for each in migrations])
    if versions:
        tell(
            "note: an earlier build wrote its versions into supabase_migrations.schema_migrations. "
            f"If `supabase db push` refuses them, run: supabase migration repair --status reverted {' '.join(versions)}"
        )


def _tell_warning(notice: psycopg.errors.Diagnostic, tell: Teller) -> None:
    if notice.severity_nonlocalized == "WARNING":
        tell(f"warning: {notice.message_primary}")
