"""Brings a database to the state the project's migration files describe, and says whether it is there.

Each file is one transaction, together with its row in `dispatcher.migrations`. A file whose content differs from
what is recorded, and every file after it, is applied again: all of them can be applied twice.
"""

from dispatcher.supabase.migrate.apply import Applied, apply_migrations, check_schema
from dispatcher.supabase.migrate.files import migrations_directory, read_migrations

__all__ = [
    "Applied",
    "apply_migrations",
    "check_schema",
    "migrations_directory",
    "read_migrations",
]
