"""What must be true before the first file: the right database, the right role, and names that nobody else has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dispatcher.errors import UnfitDatabase
from dispatcher.supabase.migrate.files import Migration

if TYPE_CHECKING:
    import psycopg

# The tables of YourHQ that the files make only where they are absent, and by which columns one knows them.
BASE_TABLES: Final[Mapping[str, Sequence[str]]] = {
    "tenants": ("id", "name", "slug"),
    "workspace": ("id", "tenant_id", "slug", "default_hard_cutoff"),
    "gateways": ("id", "tenant_id", "slug", "label"),
    "agents": ("id", "tenant_id", "gateway_id", "slug", "name", "status"),
    "tasks": ("id", "tenant_id", "title", "status"),
    "task_relations": ("source_task_id", "target_task_id", "relation_type"),
    "agent_inbox_items": ("id", "tenant_id", "agent_id", "agent_slug", "event_type", "status", "dedup_key"),
    "agent_budgets": ("agent_id", "tenant_id", "monthly_limit_usd", "hard_cutoff", "status"),
    "agent_usage": ("agent_id", "tenant_id", "run_id", "cost_total_usd", "occurred_at"),
    "notifications": ("id", "tenant_id", "type", "title", "entity_type", "entity_id"),
}
_CREATED: Final = re.compile(
    r"create\s+(?:table\s+if\s+not\s+exists|or\s+replace\s+function)\s+public\.(\w+)", re.IGNORECASE
)

_ROLES: Final = """
    select name from unnest(array['anon', 'authenticated', 'service_role']) as name
     where not exists (select from pg_catalog.pg_roles where rolname = name)"""
_RIGHTS: Final = """
    select current_user,
           has_schema_privilege('public', 'create'),
           case when to_regnamespace('dispatcher') is null then has_database_privilege(current_database(), 'create')
                else (select pg_has_role(nspowner, 'usage') from pg_catalog.pg_namespace where nspname = 'dispatcher')
           end"""
_NOT_OWNED: Final = """
    select 'table ' || relation.relname, owner.rolname from pg_catalog.pg_class as relation
      join pg_catalog.pg_roles as owner on owner.oid = relation.relowner
     where relation.relnamespace = 'public'::regnamespace and relation.relkind in ('r', 'p')
       and relation.relname = any (%(names)s) and not pg_has_role(relation.relowner, 'usage')
    union all
    select 'function ' || proc.proname, owner.rolname from pg_catalog.pg_proc as proc
      join pg_catalog.pg_roles as owner on owner.oid = proc.proowner
     where proc.pronamespace = 'public'::regnamespace and proc.proname = any (%(names)s)
       and not pg_has_role(proc.proowner, 'usage')
     order by 1"""
_HAS_US: Final = """
    select to_regclass('dispatcher.migrations') is not null
        or to_regproc('public.register_dispatcher_instance') is not null"""
_TAKEN: Final = """
    select relname from pg_catalog.pg_class
     where relnamespace = 'public'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f') and relname = any (%(names)s)
    union
    select proname || '()' from pg_catalog.pg_proc
     where pronamespace = 'public'::regnamespace and proname = any (%(names)s)
     order by 1"""
_COLUMNS: Final = """
    select class.relname, array_agg(attribute.attname::text)
      from pg_catalog.pg_class as class
      join pg_catalog.pg_attribute as attribute
        on attribute.attrelid = class.oid and attribute.attnum > 0 and not attribute.attisdropped
     where class.relnamespace = 'public'::regnamespace and class.relname = any (%(names)s)
     group by class.relname"""


def refuse_unfit_database(connection: psycopg.Connection[Any], migrations: Sequence[Migration]) -> None:
    """Look before anything is created.

    Raises:
        UnfitDatabase: a role of Supabase is missing, this role may not do what the files do, or a table or function
            of somebody else has a name of ours. Names all of it.
    """
    _refuse_missing_roles(connection)
    names = created_names(migrations)
    _refuse_wrong_role(connection, [*names, *BASE_TABLES])
    _refuse_taken_names(connection, [name for name in names if name not in BASE_TABLES])
    _refuse_other_base_tables(connection)


def created_names(migrations: Iterable[Migration]) -> list[str]:
    """Tables and functions of schema public that the files create, each once, in order."""
    statements = (statement.text for migration in migrations for statement in migration.statements)
    return list(dict.fromkeys(match[1] for text in statements if (match := _CREATED.match(text))))


def missing_columns(present: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """By table of `present`, the columns it would need to be the YourHQ table of its name; none: left out."""
    missing = {
        table: [name for name in BASE_TABLES[table] if name not in set(columns)] for table, columns in present.items()
    }
    return {table: names for table, names in missing.items() if names}


def _refuse_missing_roles(connection: psycopg.Connection[Any]) -> None:
    missing = [row[0] for row in connection.execute(_ROLES).fetchall()]
    if missing:
        raise UnfitDatabase(f"this is not a Supabase database: it has no role {', '.join(missing)}")


def _refuse_wrong_role(connection: psycopg.Connection[Any], names: Sequence[str]) -> None:
    row = connection.execute(_RIGHTS).fetchone()
    assert row is not None
    role, may_use_public, may_use_schema = row
    faults = [] if may_use_public else ["it may not create in schema public"]
    if not may_use_schema:
        faults.append("it may not create the schema dispatcher, or does not own it")
    others = connection.execute(_NOT_OWNED, {"names": list(names)}).fetchall()
    faults += [f"{what} belongs to {owner}" for what, owner in others]
    if faults:
        raise UnfitDatabase(
            f"the role {role} cannot migrate this database: {'; '.join(faults)}. "
            "Nothing was created. Connect as the owner of the tables (on Supabase: postgres)"
        )


def _refuse_taken_names(connection: psycopg.Connection[Any], names: Sequence[str]) -> None:
    # In this order: another run that has just begun must not look like another application.
    taken = [row[0] for row in connection.execute(_TAKEN, {"names": list(names)}).fetchall()]
    known = connection.execute(_HAS_US).fetchone()
    if taken and not (known and known[0]):
        raise UnfitDatabase(
            f"schema public has objects of another application under names of the dispatcher: {', '.join(taken)}. "
            "Nothing was created. Rename them, or use another database"
        )


def _refuse_other_base_tables(connection: psycopg.Connection[Any]) -> None:
    found = dict(connection.execute(_COLUMNS, {"names": list(BASE_TABLES)}).fetchall())
    other = [f"{table} has no {', '.join(columns)}" for table, columns in missing_columns(found).items()]
    if other:
        raise UnfitDatabase(
            f"schema public has tables under names of YourHQ's that are not YourHQ's: {'; '.join(other)}. "
            "Nothing was created. Rename them, or use another database"
        )
