"""The migration files: which there are, what they contain, and what of them runs inside the runner's transaction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dispatcher.errors import DispatcherError, MigrationError
from dispatcher.supabase.statements import Statement, split_statements

_FILE_NAME: Final = re.compile(r"(?P<version>\d+)_(?P<name>.+)\.sql")
_BEGIN: Final = re.compile(r"begin(\s+(work|transaction))?", re.IGNORECASE)
_END: Final = re.compile(r"(commit|end|rollback|abort)(\s+(work|transaction))?|start\s+transaction", re.IGNORECASE)
_PACKAGE: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Migration:
    """One file: `20261130120000_what.sql` has the version 20261130120000 and the name `what`.

    `statements` are those between its `begin` and its `commit`; `checksum` is the SHA-256 of the whole file, in hex.
    """

    version: str
    name: str
    checksum: str
    statements: tuple[Statement, ...] = field(repr=False)

    @property
    def label(self) -> str:
        """The name of the file without `.sql`: what the ledger records."""
        return f"{self.version}_{self.name}"


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
    """A directory's migrations, first to last; other files are passed over, as by the Supabase CLI.

    Raises:
        MigrationError: two files have one version, or a file is not one transaction.
    """
    found = [_read(path) for path in sorted(directory.glob("*.sql"))]
    migrations = [migration for migration in found if migration]
    _refuse_shared_versions(migrations)
    return migrations


def _read(path: Path) -> Migration | None:
    match = _FILE_NAME.fullmatch(path.name)
    if not match:
        return None
    content = path.read_bytes()
    statements = body(path.name, split_statements(content.decode("utf-8")))
    return Migration(match["version"], match["name"], hashlib.sha256(content).hexdigest(), tuple(statements))


def body(file: str, statements: Sequence[Statement]) -> Sequence[Statement]:
    """The statements between the first `begin` and the last `commit`, which the runner's transaction stands for.

    Raises:
        MigrationError: the file is not one transaction: the ledger could not be written with it, all or nothing.
    """
    framed = len(statements) >= 2 and _BEGIN.fullmatch(statements[0].text) and statements[-1].text.lower() == "commit"
    inner = statements[1:-1] if framed else statements
    for statement in inner:
        if _BEGIN.fullmatch(statement.text) or _END.fullmatch(statement.text):
            raise MigrationError(f"{file}, line {statement.line}: {statement.text} inside the file's one transaction")
    if not framed:
        raise MigrationError(f"{file}: the file must begin with `begin;` and end with `commit;`")
    return inner


def _refuse_shared_versions(migrations: Sequence[Migration]) -> None:
    seen: dict[str, Migration] = {}
    for migration in migrations:
        first = seen.setdefault(migration.version, migration)
        if first is not migration:
            raise MigrationError(f"{first.label}.sql and {migration.label}.sql have the same version")
