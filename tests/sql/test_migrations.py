"""The migrations as an operator without our runner applies them: plain psql, in name order, twice in a row."""

import subprocess
from pathlib import Path

import pytest

from dispatcher.local import account
from dispatcher.supabase.migrate.files import body
from dispatcher.supabase.statements import split_statements
from tests.conftest import MIGRATIONS, YOURHQ
from tests.support.database import Database

FILES = sorted(MIGRATIONS.glob("*.sql"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_c04_each_file_is_one_transaction_with_a_lock_timeout(file: Path) -> None:
    """Plain psql stops anywhere, and waits as long as it is let: the file itself has to bound both."""
    statements = [statement.text for statement in split_statements(file.read_text())]
    assert (statements[0], statements[1], statements[-1]) == ("begin", "set local lock_timeout = '3s'", "commit")
    assert body(file.name, split_statements(file.read_text()))


def psql(database: Database, *files: Path) -> None:
    command = [str(account.programs(None) / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.url]
    for file in files:
        done = subprocess.run([*command, "-f", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{file.name}: {done.stderr}"


def objects(database: Database) -> list[dict]:
    """Every relation, function, trigger, policy and enum of schema public, with what defines it."""
    return database.rows(
        """select 'function' as kind, oid::regprocedure::text as name, md5(pg_get_functiondef(oid)) as body
             from pg_proc where pronamespace::regnamespace::text in ('public', 'dispatcher')
           union all select 'column', attrelid::regclass || '.' || attname,
                  format_type(atttypid, atttypmod) || attnotnull
             from pg_attribute join pg_class on pg_class.oid = attrelid
            where relnamespace::regnamespace::text in ('public', 'dispatcher') and attnum > 0 and relkind in ('r', 'v')
           union all select 'trigger', tgrelid::regclass || '.' || tgname, pg_get_triggerdef(oid)
             from pg_trigger where not tgisinternal
           union all select 'policy', tablename || '.' || policyname, coalesce(qual, '') from pg_policies
           union all select 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
             from pg_constraint where connamespace::regnamespace::text in ('public', 'dispatcher')
           union all select 'rights', oid::regclass::text, concat(relacl::text, relrowsecurity)
             from pg_class where relnamespace = 'public'::regnamespace and relkind in ('r', 'v', 'S')
           union all select 'enum', enumtypid::regtype || '.' || enumlabel, enumsortorder::text from pg_enum
           order by 1, 2, 3"""
    )


@pytest.mark.parametrize("yourhq", [False, True], ids=["empty", "yourhq"])
def test_psql_applies_them_twice(empty_database: Database, yourhq: bool) -> None:
    if yourhq:
        psql(empty_database, YOURHQ)
    before = objects(empty_database)
    psql(empty_database, *FILES)
    once = objects(empty_database)
    psql(empty_database, *FILES)
    assert objects(empty_database) == once
    # What was there is there still, unchanged.
    assert [row for row in before if row not in once] == []


TABLES_OF_YOURHQ = (
    "agent_budgets",
    "agent_inbox_items",
    "agent_usage",
    "agents",
    "notifications",
    "task_relations",
    "tasks",
)


def test_both_ways_lead_to_the_same_functions_and_tables(database: Database, yourhq_database: Database) -> None:
    ours = {(row["kind"], row["name"]) for row in objects(database) if row["kind"] in ("function", "trigger")}
    theirs = {(row["kind"], row["name"]) for row in objects(yourhq_database)}
    # A table of YourHQ's takes a row that names another tenant's, as ever; it does not count.
    refused = {("trigger", f"{name}.dispatcher_tenant") for name in TABLES_OF_YOURHQ}
    assert ours - theirs == refused
