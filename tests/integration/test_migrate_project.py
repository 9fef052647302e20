"""The project's own migrations on real databases: interrupted, old, changed by hand, shared with others, in use."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import psycopg
import pytest
from psycopg import sql

from dispatcher.cli.main import run_command_line
from dispatcher.errors import MigrationError, UnfitDatabase
from dispatcher.local import account
from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import (
    apply_migrations,
    check_schema,
    read_migrations,
)
from dispatcher.supabase.migrate.columns import refuse_lost_columns
from dispatcher.supabase.migrate.preflight import BASE_TABLES
from tests.conftest import MIGRATIONS, ROOT, YOURHQ
from tests.support.database import Database, cloned
from tests.support.seed import Seed

# Columns that a file adds where its table has them no more.
FILES = sorted(MIGRATIONS.glob("*.sql"))
STATEMENTS = [statement for migration in read_migrations(MIGRATIONS) for statement in migration.statements]
_ADDS_A_COLUMN = re.compile(r"alter table (?:public\.)?(\S+) add column if not exists (\w+)")
ADDED = sorted({found.groups() for each in STATEMENTS for found in _ADDS_A_COLUMN.finditer(each.text)})
EXPOSED = "select * from dispatcher.schema_exposure()"
# Read without any function of ours: what a stranger can reach, and what a table lacks, at any moment.
OPEN = """
    select class.relname as name, 'no row level security' as fault from pg_class as class
     where relnamespace in ('public'::regnamespace, to_regnamespace('dispatcher')) and relkind = 'r'
       and not relrowsecurity
    union all
    select class.relname, 'open to anon' from pg_class as class
     where relnamespace in ('public'::regnamespace, to_regnamespace('dispatcher')) and relkind in ('r', 'v', 'S')
       and has_any_privilege(class.oid, class.relkind)
    union all
    select proname, 'anon may call it' from pg_proc
     where pronamespace in ('public'::regnamespace, to_regnamespace('dispatcher'))
       and has_function_privilege('anon', oid, 'execute') and proname <> 'has_any_privilege'"""
HAS_ANY_PRIVILEGE = """
    create function pg_temp.has_any_privilege(relation oid, kind "char") returns boolean language sql as $$
      select case kind when 'S' then has_sequence_privilege('anon', relation, 'usage, select, update')
                       else has_table_privilege('anon', relation, 'select, insert, update, delete, truncate')
             end $$"""


def what_is_open(database: Database) -> list[dict[str, str]]:
    connection = database.connect()
    connection.execute(HAS_ANY_PRIVILEGE)
    return connection.execute(OPEN.replace("has_any_privilege(", "pg_temp.has_any_privilege(").encode()).fetchall()


def dump(database: Database) -> str:
    program = account.programs(None) / "pg_dump"
    command = [str(program), "--schema-only", "--schema=public", "--schema=dispatcher", "--dbname", database.url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r"(?m)^\\(un)?restrict .*$", "", text)


def psql(database: Database, script: str) -> subprocess.CompletedProcess[str]:
    command = [str(account.programs(None) / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.url]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False)


def test_c04_a_file_cut_short_under_psql_leaves_nothing(empty_database: Database) -> None:
    """Line 200 of the base file was after the tables and before their row level security."""
    base = next(path for path in FILES if "base_tables" in path.name)
    ledger = next(path for path in FILES if "ledger" in path.name)
    psql(empty_database, ledger.read_text())
    lines = base.read_text().splitlines(keepends=True)
    for cut in (60, 130, 200, 280, len(lines) - 1):
        psql(empty_database, "".join(lines[:cut]))
        assert empty_database.value("select to_regclass('public.tenants') is null"), f"cut after line {cut}"
    for path in FILES:
        done = psql(empty_database, path.read_text())
        assert done.returncode == 0, done.stderr
    assert empty_database.rows(EXPOSED) == []
    assert what_is_open(empty_database) == []


# Some of the first, then all through.
KILL_AT = [1, 2, 9, 26, *range(40, len(STATEMENTS), max(1, len(STATEMENTS) // 8))]
KILLED_AT = """
import os, signal, sys
from dispatcher.supabase.migrate import apply
from dispatcher.__main__ import main
left, execute = int(sys.argv.pop(1)), apply._execute
def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    execute(*arguments)
apply._execute = counted
sys.exit(main())
"""


@pytest.mark.parametrize("statement", KILL_AT)
def test_c04_a_kill_at_any_statement_leaves_nothing_open_and_nothing_half(
    cluster: PostgresServer, empty_template: str, statement: int
) -> None:
    with cloned(cluster, empty_template) as database:
        command = [sys.executable, "-c", KILLED_AT, str(statement), "migrate", "--db-url", database.url]
        killed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert what_is_open(database) == []
        apply_migrations(database.url, MIGRATIONS)
        assert what_is_open(database) == []
        assert check_schema(database.url, MIGRATIONS)[0] == []


def test_c04_what_we_own_is_closed_again_when_somebody_opened_it(database: Database) -> None:
    database.execute("alter table agents disable row level security")
    database.execute("drop policy tenant_isolation on tasks")
    database.execute("grant select on notifications, agent_wakes to anon")
    told: list[str] = []
    apply_migrations(database.url, MIGRATIONS, tell=told.append)
    assert "public.agents: row level security is off" in told[0]
    assert "public.agent_wakes: select is granted to anon" in told[0]
    assert database.rows(EXPOSED) == []
    assert database.value("select count(*) from pg_policies where tablename = 'tasks'") == 1


def test_c04_what_cannot_be_closed_is_an_error_with_a_name(database: Database) -> None:
    """A grant that comes back by itself: no file can mend that, and the operator has to know."""
    database.execute(
        "create function public.reopen() returns event_trigger language plpgsql as"
        " $$ begin execute 'grant select on public.agents to anon'; end $$"
    )
    database.execute(
        "create event trigger reopen on ddl_command_end when tag in ('CREATE FUNCTION', 'ALTER TABLE', 'REVOKE')"
        " execute function public.reopen()"
    )
    with pytest.raises(
        MigrationError, match=r"open to strangers after the last file: public\.agents: select is granted"
    ):
        apply_migrations(database.url, MIGRATIONS, again=True)


def test_c04_tables_of_yourhq_are_not_ours_to_close(yourhq_database: Database) -> None:
    yourhq_database.execute("alter table tasks disable row level security")
    yourhq_database.execute("grant select on agents to anon")
    told: list[str] = []
    apply_migrations(yourhq_database.url, MIGRATIONS, again=True, tell=told.append)
    assert told[-1].startswith(
        "warning: tables without row level security that the dispatcher did not make: public.tasks"
    )
    assert yourhq_database.value("select not relrowsecurity from pg_class where oid = 'tasks'::regclass")
    assert yourhq_database.value("select has_table_privilege('anon', 'agents', 'select')")
    assert yourhq_database.value("select count(*) from dispatcher.owned_objects where kind = 'table'") == 0


def test_c06_an_earlier_build_is_brought_to_the_present_state(database: Database) -> None:
    """Helpers in public, no ledger of ours, another result type, a view and functions nobody has any more."""
    fresh = dump(database)
    database.execute("drop schema dispatcher cascade")
    database.execute(
        "create function public.inbox_retry_delay(p_attempt int) returns interval language sql as"
        " $$ select make_interval(secs => p_attempt) $$"
    )
    database.execute(
        "create view public.agent_inbox_due as select *, public.inbox_retry_delay(attempt_count) as due"
        " from public.agent_inbox_items"
    )
    database.execute("comment on view public.agent_inbox_due is 'Open items with attempts left and when …'")
    database.execute("drop function public.stop_dispatcher_instance, public.dispatcher_schema")
    database.execute(
        "create function public.stop_dispatcher_instance(p_old uuid) returns int language sql as 'select 1'"
    )
    told: list[str] = []
    apply_migrations(database.url, MIGRATIONS, tell=told.append)
    assert dump(database) == fresh
    assert apply_migrations(database.url, MIGRATIONS) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("drop table budgets, budget_events cascade", "table public.budgets missing"),
        ("drop index agent_inbox_items_open_of", "index public.agent_inbox_items.agent_inbox_items_open_of missing"),
        ("drop trigger dispatcher_agent_hint on agents", "trigger public.agents.dispatcher_agent_hint missing"),
        (
            "alter function dispatcher_gauges(uuid) volatile",
            "function public.dispatcher_gauges(uuid) differs",
        ),
        ("drop function public.fail_inbox_item(uuid, text)", "function public.fail_inbox_item(uuid,text) missing"),
        ("create function dispatcher.theirs() returns int language sql as 'select 1'", "dispatcher.theirs() retired"),
        (
            "create trigger dispatcher_old after update on tasks execute function dispatcher.hint_budget_change()",
            "trigger public.tasks.dispatcher_old retired",
        ),
    ],
)
def test_c06_what_was_changed_by_hand_is_named_and_mended(
    database: Database, capsys: pytest.CaptureFixture[str], change: str, named: str
) -> None:
    fresh = dump(database)
    kept = database.value("insert into tenants (name, slug) values ('kept', 'kept') returning id")
    database.execute(change)
    assert run_command_line(["migrate", "--check", "--db-url", database.url]) == 1
    assert named in capsys.readouterr().out
    assert run_command_line(["migrate", "--db-url", database.url]) == 0
    assert named in capsys.readouterr().out
    assert run_command_line(["migrate", "--check", "--db-url", database.url]) == 0
    assert capsys.readouterr().out == "up to date\n"
    assert sorted(dump(database).splitlines()) == sorted(fresh.splitlines())
    assert database.value("select count(*) from tenants where id = %s", [kept]) == 1


def test_c06_a_table_of_an_earlier_build_without_a_column_is_refused_with_what_to_do(database: Database) -> None:
    database.execute("drop schema dispatcher cascade; alter table workflow_runs drop column queued_at cascade")
    line = "alter table public.workflow_runs add column queued_at timestamptz not null default now();"
    with pytest.raises(UnfitDatabase, match=re.escape(line)):
        apply_migrations(database.url, MIGRATIONS)
    assert database.value("select to_regnamespace('dispatcher') is null")


def test_c06_what_no_file_mends_is_refused_with_a_name(database: Database) -> None:
    database.execute("alter table agent_profiles drop column role")
    with pytest.raises(UnfitDatabase) as caught:
        apply_migrations(database.url, MIGRATIONS)
    database.execute(str(caught.value).splitlines()[-1])
    apply_migrations(database.url, MIGRATIONS)  # the right to read the column went with it
    assert apply_migrations(database.url, MIGRATIONS) == []


def test_f3_every_column_of_ours_that_goes_is_added_or_refused_before_the_first_file(database: Database) -> None:
    """One at a time, each in a transaction that is undone."""
    columns = database.rows(
        """select attrelid::regclass::text as table, attname as name from pg_attribute join pg_class on oid = attrelid
            where relnamespace in ('public'::regnamespace, 'dispatcher'::regnamespace) and relkind = 'r'
              and attnum > 0 and not attisdropped"""
    )
    migrations = read_migrations(MIGRATIONS)
    silent, unnamed = [], list[str]()
    with psycopg.connect(database.url) as connection:
        for table, name in (row.values() for row in columns):
            connection.execute(f'alter table {table} drop column "{name}" cascade'.encode())
            try:
                refuse_lost_columns(connection, migrations, list(BASE_TABLES))
                silent.append((table.removeprefix("public."), name))
            except UnfitDatabase as refusal:
                unnamed += [name] if f" add column {name} " not in str(refusal) else []
            connection.rollback()
    assert len(columns) > 300
    assert unnamed == []
    assert sorted(silent) == ADDED
    for table, name in ADDED:
        database.execute(f"alter table {table} drop column {name} cascade")
    apply_migrations(database.url, MIGRATIONS)
    assert check_schema(database.url, MIGRATIONS)[1].drift == ()


def test_c07_a_writer_holds_the_items_while_migrate_runs(yourhq_database: Database) -> None:
    """It is named; whoever comes meanwhile is served; the migration ends when the writer does."""
    Seed(yourhq_database).item("ada")
    writer = yourhq_database.connect(autocommit=False)
    writer.execute("set application_name = 'long writer'")
    writer.execute("update agent_inbox_items set summary = 'x'")
    told: list[str] = []
    seen: list[bool] = []

    def tell(line: str) -> None:
        told.append(line)
        if "waits" in line and not seen:
            other = yourhq_database.connect()
            other.execute("set statement_timeout = '1s'")
            other.execute(
                "insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key)"
                " select id, slug, 'heartbeat', 'meanwhile' from agents"
            )
            seen.append(True)
            writer.rollback()

    applied = apply_migrations(yourhq_database.url, MIGRATIONS, again=True, tell=tell)
    assert len(applied) == len(FILES)
    assert seen == [True]
    waits = next(line for line in told if "waits" in line)
    assert "agent_inbox_items is held by pid" in waits
    assert "application long writer, idle in transaction" in waits


def test_c07_a_backup_that_reads_is_named_and_the_application_goes_on(database: Database) -> None:
    """Policies of our own tables need a lock that readers hold: the runner gives way, and says to whom."""
    backup = database.connect(autocommit=False)
    backup.execute("set application_name = 'pg_dump'")
    backup.execute("select count(*) from agent_wakes")
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "waits" in line:
            backup.rollback()

    reader = database.connect()
    reader.execute("set statement_timeout = '4s'")
    worker = threading.Thread(target=partial(apply_migrations, database.url, MIGRATIONS, again=True, tell=tell))
    worker.start()
    while worker.is_alive():
        reader.execute("select count(*) from agent_wakes")
    assert "agent_wakes is held by pid" in next(line for line in told if "waits" in line)
    assert "application pg_dump" in next(line for line in told if "waits" in line)
    assert sum(line.startswith("applied") for line in told) == len(FILES)


@pytest.fixture
def owner(cluster: PostgresServer, empty_template: str) -> Iterator[tuple[Database, str]]:
    """A YourHQ database owned by a role that is no superuser; the publication is somebody else's."""
    with cloned(cluster, empty_template) as database:
        database.execute(
            "do $$ begin create role hq_owner login bypassrls; exception when duplicate_object then null; end $$"
        )
        database.execute(sql.SQL("alter role hq_owner password {}").format(sql.Literal(cluster.password)).as_string())
        database.execute(
            sql.SQL("grant create on database {} to hq_owner").format(sql.Identifier(database.name)).as_string()
        )
        database.execute("grant all on schema public to hq_owner")
        database.execute(
            "alter default privileges for role hq_owner in schema public"
            " grant all on tables to anon, authenticated, service_role"
        )
        database.execute(
            "alter default privileges for role hq_owner in schema public"
            " grant all on functions to anon, authenticated, service_role"
        )
        database.execute("create publication supabase_realtime" if not publication(database) else "select 1")
        yield database, cluster.url(database.name, "hq_owner")
        database.execute("drop owned by hq_owner")


def publication(database: Database) -> bool:
    return bool(database.rows("select from pg_publication where pubname = 'supabase_realtime'"))


def test_c08_a_publication_of_another_role_is_a_warning(owner: tuple[Database, str]) -> None:
    database, url = owner
    told: list[str] = []
    applied = apply_migrations(url, MIGRATIONS, tell=told.append)
    assert len(applied) == len(FILES)
    assert any(
        "publication supabase_realtime is not ours to change: agent_inbox_items was not added" in line for line in told
    )
    assert what_is_open(database) == []


def test_yourhq_is_migrated_twice_by_its_owner_beside_writers(owner: tuple[Database, str]) -> None:
    """No superuser, rows written all the while, nothing of YourHQ's changed, and no writer loses."""
    database, url = owner
    with psycopg.connect(url, autocommit=True) as connection:
        fixture = YOURHQ.read_text()
        connection.execute(re.sub(r"(?m)^alter publication.*?;$", "", fixture).encode())
    before = dump(database)
    Seed(database).item("ada")
    stop, errors = threading.Event(), list[str]()
    threads = [threading.Thread(target=write_until, args=(url, stop, errors)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for again in (False, True):
            assert len(apply_migrations(url, MIGRATIONS, again=again)) == len(FILES)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert errors == []
    after = set(dump(database).splitlines())
    assert [line for line in before.splitlines() if line not in after] == []


def write_until(url: str, stop: threading.Event, errors: list[str]) -> None:
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("set statement_timeout = '8s'")
            while not stop.is_set():
                connection.execute("update public.agent_inbox_items set summary = md5(random()::text)")
                connection.execute("update public.agents set meta = '{}'")
    except psycopg.Error as error:
        errors.append(str(error))


def test_y09_a_role_that_owns_nothing_is_told_before_anything_is_created(
    cluster: PostgresServer, yourhq_database: Database
) -> None:
    yourhq_database.execute("drop schema dispatcher cascade")
    yourhq_database.execute("do $$ begin create role stranger login; exception when duplicate_object then null; end $$")
    password = sql.Literal(cluster.password)
    yourhq_database.execute(sql.SQL("alter role stranger password {}").format(password).as_string())
    with pytest.raises(UnfitDatabase) as caught:
        apply_migrations(cluster.url(yourhq_database.name, "stranger"), MIGRATIONS)
    text = str(caught.value)
    assert "the role stranger cannot migrate this database: it may not create in schema public" in text
    assert "table agent_inbox_items belongs to postgres" in text
    assert "Connect as the owner of the tables (on Supabase: postgres)" in text
    assert caught.value.exit_code == 78
    assert yourhq_database.value("select to_regnamespace('dispatcher') is null")


def test_y09_a_database_without_supabases_roles_is_told_so(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatcher.supabase.migrate import preflight  # noqa: PLC0415

    monkeypatch.setattr(preflight, "_ROLES", preflight._ROLES.replace("'anon'", "'no_such_role'"))
    with pytest.raises(UnfitDatabase, match="not a Supabase database: it has no role no_such_role"):
        apply_migrations(empty_database.url, MIGRATIONS)
    assert empty_database.value("select to_regnamespace('dispatcher') is null")


def test_tables_of_another_application_are_told_before_anything_is_created(empty_database: Database) -> None:
    empty_database.execute("create table public.departments (tenant_id uuid, id text, name text)")
    empty_database.execute("create function public.list_budgets(int) returns int language sql as 'select 1'")
    with pytest.raises(UnfitDatabase, match=r"under names of the dispatcher: departments, list_budgets\(\)"):
        apply_migrations(empty_database.url, MIGRATIONS)
    empty_database.execute("drop table public.departments; drop function public.list_budgets(int)")
    empty_database.execute("create table public.tasks (id int, title text)")
    with pytest.raises(UnfitDatabase, match="not YourHQ's: tasks has no tenant_id, status"):
        apply_migrations(empty_database.url, MIGRATIONS)
    assert empty_database.value("select to_regnamespace('dispatcher') is null")


def test_the_command_says_what_it_did(
    empty_database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPABASE_DB_URL", empty_database.url)
    assert run_command_line(["migrate", "--dry-run"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert run_command_line(["migrate"]) == 0
    done = capsys.readouterr().out.splitlines()
    assert [line.replace("would apply", "applied") for line in planned] == done
    assert len(done) == len(FILES)
    assert run_command_line(["migrate"]) == 0
    assert capsys.readouterr().out == "up to date\n"
    assert run_command_line(["migrate", "--again"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FILES)
