"""Whether the database's schema is the one this version was written for."""

from __future__ import annotations

from dispatcher.errors import MigrationsMissing
from dispatcher.instance.model import Schema
from dispatcher.supabase.schema_version import FINGERPRINT, REVISION

_SHOWN = 5
MIGRATE = "run `dispatcher migrate --db-url …`"


def refuse_older(schema: Schema) -> None:
    """Raises MigrationsMissing, which names both revisions, when the database is behind this version."""
    if schema.revision < REVISION:
        raise MigrationsMissing(
            f"The database has revision {schema.revision} of the dispatcher's schema, this version needs {REVISION}: "
            f"{MIGRATE} first."
        )


def difference(schema: Schema) -> str | None:
    """What an operator should know of a schema that is not older; None when there is nothing."""
    if schema.revision > REVISION:
        return (
            f"The database has revision {schema.revision} of the dispatcher's schema, newer than {REVISION}, "
            "which this version was written for: upgrade the daemon."
        )
    if schema.drift:
        first = ", ".join(schema.drift[:_SHOWN]) + (", …" if len(schema.drift) > _SHOWN else "")
        return f"The database is not what the migrations make ({first}): {MIGRATE}."
    if schema.fingerprint != FINGERPRINT:
        return f"The database was migrated by another build of revision {REVISION}: {MIGRATE}."
    return None
