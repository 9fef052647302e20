"""The runner of migrations: in order, each whole or not at all, by several at a time, behind whoever holds a lock."""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.errors import (
    DispatcherError,
    MigrationBlocked,
    MigrationError,
    ServiceUnavailable,
    SettingsError,
    UnfitDatabase,
)
from dispatcher.local.postgres import free_port
from dispatcher.supabase.migrate import (
    Applied,
    apply_migrations,
    check_schema,
    migrations_directory,
)
from dispatcher.supabase.migrate.apply import Patience
from tests.conftest import MIGRATIONS
from tests.support.database import Database
from tests.support.waiting import wait_until

LEDGER = Applied("20261130000050", "ledger")
FIRST, SECOND = Applied("20270101000000", "first"), Applied("20270102000000", "second")
WAITING = """
    select count(*) from pg_locks
     where not granted and database = (select oid from pg_database where datname = current_database())"""
RECORDED = "select name from dispatcher.migrations order by name"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "migrations"
    place.mkdir()
    [ledger] = MIGRATIONS.glob("*_ledger.sql")
    (place / ledger.name).write_text(ledger.read_text())
    write(
        place, "20270101000000_first.sql", "create table public.a (id int);\n-- more;\ninsert into public.a values (1);"
    )
    write(place, "20270102000000_second.sql", "insert into public.a values (2);")
    return place


def write(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(f"begin;\n{script}\ncommit;\n")


def ids(database: Database) -> list[int]:
    return [row["id"] for row in database.rows("select id from public.a order by id")]


def recorded(database: Database) -> list[str]:
    return [row["name"].split("_", 1)[1] for row in database.rows(RECORDED)]


def has_ledger(database: Database) -> bool:
    return bool(database.value("select to_regnamespace('dispatcher') is not null"))


def test_each_is_applied_once_and_recorded_with_its_checksum(empty_database: Database, directory: Path) -> None:
    assert apply_migrations(empty_database.url, directory) == [LEDGER, FIRST, SECOND]
    assert apply_migrations(empty_database.url, directory) == []
    assert ids(empty_database) == [1, 2]
    assert recorded(empty_database) == ["ledger", "first", "second"]
    assert {row["length"] for row in empty_database.rows("select length(checksum) from dispatcher.migrations")} == {64}


def test_c05_the_ledger_of_the_supabase_cli_is_left_alone(empty_database: Database, directory: Path) -> None:
    """A host project's own versions stay, and none of ours joins them: its next push would be refused."""
    empty_database.execute("create schema supabase_migrations")
    empty_database.execute(
        "create table supabase_migrations.schema_migrations (version text primary key, statements text[], name text)"
    )
    empty_database.execute("insert into supabase_migrations.schema_migrations values ('20200101000000', '{}', 'own')")
    apply_migrations(empty_database.url, directory)
    rows = empty_database.rows("select version, name from supabase_migrations.schema_migrations")
    assert rows == [{"version": "20200101000000", "name": "own"}]


def test_c05_without_a_ledger_of_the_supabase_cli_none_is_made(empty_database: Database, directory: Path) -> None:
    apply_migrations(empty_database.url, directory)
    assert empty_database.value("select to_regnamespace('supabase_migrations') is null")


def test_c05_versions_of_an_earlier_build_in_the_shared_ledger_are_told(
    empty_database: Database, directory: Path
) -> None:
    empty_database.execute("create schema supabase_migrations")
    empty_database.execute("create table supabase_migrations.schema_migrations (version text primary key)")
    empty_database.execute("insert into supabase_migrations.schema_migrations values ('20270101000000'), ('1999')")
    told: list[str] = []
    assert apply_migrations(empty_database.url, directory, tell=told.append) == [LEDGER, FIRST, SECOND]
    assert told[-1].endswith("supabase migration repair --status reverted 20270101000000")
    assert empty_database.value("select count(*) from supabase_migrations.schema_migrations") == 2


def test_c06_a_changed_file_and_all_after_it_are_applied_again(empty_database: Database, directory: Path) -> None:
    apply_migrations(empty_database.url, directory)
    write(directory, "20270101000000_first.sql", "insert into public.a values (7);")
    again = [Applied(FIRST.version, "first", "changed"), Applied(SECOND.version, "second", "again")]
    assert apply_migrations(empty_database.url, directory, dry_run=True) == again
    assert apply_migrations(empty_database.url, directory) == again
    assert apply_migrations(empty_database.url, directory) == []
    assert ids(empty_database) == [1, 2, 2, 7]


def test_two_at_once_share_the_work(empty_database: Database, directory: Path) -> None:
    for number in range(3, 20):
        write(directory, f"202702{number:02}000000_more.sql", f"insert into public.a values ({number});")
    results: list[list[Applied]] = []
    ready = threading.Barrier(3)

    def migrate() -> None:
        ready.wait()
        results.append(apply_migrations(empty_database.url, directory))

    threads = [threading.Thread(target=migrate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 3
    assert sorted(each.version for result in results for each in result) == sorted(
        path.name.split("_")[0] for path in directory.iterdir()
    )
    assert ids(empty_database) == list(range(1, 20))


def test_the_second_waits_for_one_that_is_under_way(empty_database: Database, directory: Path) -> None:
    write(directory, "20270103000000_slow.sql", "lock table public.gate; insert into public.a values (3);")
    empty_database.execute("create table public.gate ()")
    holder = empty_database.connect(autocommit=False)
    holder.execute("lock table public.gate")
    results: list[list[Applied]] = []
    threads = [
        threading.Thread(target=lambda: results.append(apply_migrations(empty_database.url, directory)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: empty_database.value(WAITING) == 2)
    holder.rollback()
    for thread in threads:
        thread.join(30)
    assert sorted(len(result) for result in results) in ([0, 4], [1, 3], [2, 2])
    assert ids(empty_database) == [1, 2, 3]


@pytest.mark.parametrize(
    ("script", "place", "reason"),
    [
        (
            "insert into public.a values (3);\n\nselect nonsense;",
            "line 4, column 8",
            '"nonsense" does not exist',
        ),
        ("select 1;\nselec 2;", "line 3, column 1", 'syntax error at or near "selec"'),
        ("select 1;\n\n  do $$ begin raise 'no luck'; end $$;", "line 4, column 3", "no luck"),
    ],
)
def test_a_failing_one_names_its_place_and_leaves_nothing(
    empty_database: Database, directory: Path, script: str, place: str, reason: str
) -> None:
    write(directory, "20270103000000_bad.sql", script)
    with pytest.raises(MigrationError) as caught:
        apply_migrations(empty_database.url, directory)
    assert str(caught.value).startswith(f"20270103000000_bad.sql, {place}: ")
    assert reason in str(caught.value)
    assert ids(empty_database) == [1, 2]
    assert recorded(empty_database) == ["ledger", "first", "second"]


def test_what_one_does_to_the_session_does_not_reach_the_next(empty_database: Database, directory: Path) -> None:
    write(directory, "20270101500000_rude.sql", "set search_path = ''; set timezone = 'Asia/Tokyo';")
    write(
        directory,
        "20270103000000_after.sql",
        "create table zone as select current_setting('timezone') as name;",
    )
    apply_migrations(empty_database.url, directory)
    assert empty_database.value("select name from public.zone") == "UTC"


def test_a_dry_run_names_what_is_left_and_writes_nothing(empty_database: Database, directory: Path) -> None:
    assert len(apply_migrations(empty_database.url, directory, dry_run=True)) == 3
    assert not has_ledger(empty_database)


def test_two_files_of_one_version_are_refused(empty_database: Database, directory: Path) -> None:
    write(directory, "20270102000000_twin.sql", "select 1;")
    with pytest.raises(MigrationError, match=r"second\.sql and .*twin\.sql have the same version"):
        apply_migrations(empty_database.url, directory)
    assert not has_ledger(empty_database)


def test_files_of_another_shape_are_passed_over(empty_database: Database, directory: Path) -> None:
    write(directory, "notes.sql", "nonsense")
    write(directory, "README.md", "nonsense")
    assert len(apply_migrations(empty_database.url, directory)) == 3


def test_an_unreachable_database_is_unavailable(directory: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="cannot connect to the database"):
        apply_migrations(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres", directory)


def test_c35_a_missing_library_names_its_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SettingsError, match=r"pip install 'openclaw-dispatcher\[migrate\]'"):
        apply_migrations("postgresql://", directory)


def test_an_installed_package_brings_its_own_migrations(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "dispatcher"
    (package / "_migrations").mkdir(parents=True)
    assert migrations_directory(package) == package / "_migrations"


def test_in_a_clone_they_lie_beside_the_package() -> None:
    assert migrations_directory() == Path(__file__).resolve().parents[2] / "supabase" / "migrations"


def test_an_installation_without_them_says_so(tmp_path: Path) -> None:
    with pytest.raises(DispatcherError, match="incomplete"):
        migrations_directory(tmp_path / "dispatcher")


def test_c04_a_file_that_is_not_one_transaction_is_refused(empty_database: Database, directory: Path) -> None:
    (directory / "20270103000000_loose.sql").write_text("select 1;")
    with pytest.raises(MigrationError, match=r"loose\.sql: the file must begin with `begin;`"):
        apply_migrations(empty_database.url, directory)
    assert not has_ledger(empty_database)


def test_c06_functions_and_views_of_another_shape_are_replaced(empty_database: Database, directory: Path) -> None:
    """42P13 and 42P16: `create or replace` alone cannot change a result type, an argument's name or a column."""
    apply_migrations(empty_database.url, directory)
    empty_database.execute("create function public.f(p_old int) returns int language sql as 'select 1'")
    empty_database.execute("create view public.v as select 1 as old")
    write(
        directory,
        "20270103000000_shapes.sql",
        "create or replace function public.f(p_new int) returns text language sql as $$ select 'new' $$;\n"
        "create or replace view public.v as select 'new' as new;",
    )
    empty_database.execute("create table public.kept as select 1 as one")
    apply_migrations(empty_database.url, directory)
    assert empty_database.row("select public.f(p_new => 1), v.new from public.v") == {"f": "new", "new": "new"}


def test_c06_a_dependent_of_somebody_else_is_named_and_kept(empty_database: Database, directory: Path) -> None:
    empty_database.execute("create function public.f() returns int language sql as 'select 1'")
    empty_database.execute("create view public.their_report as select public.f()")
    write(
        directory,
        "20270103000000_shapes.sql",
        "create or replace function public.f() returns text language sql as $$ select 'new' $$;",
    )
    # The ledger first: without one, the name would be another application's.
    [name] = [path for path in directory.iterdir() if "ledger" in path.name]
    empty_database.execute(name.read_text())
    with pytest.raises(MigrationError, match=r"cannot drop function f\(\).*their_report"):
        apply_migrations(empty_database.url, directory)
    assert empty_database.value("select f from public.their_report") == 1


Holder = Callable[[], None]


@pytest.fixture
def held(empty_database: Database, directory: Path) -> Holder:
    """Somebody holds public.gate, and the last file wants it; the answer lets it go."""
    write(directory, "20270103000000_gate.sql", "alter table public.gate add column more int;")
    empty_database.execute("create table public.gate (id int)")
    holder = empty_database.connect(autocommit=False)
    holder.execute("set application_name = 'the holder'")
    holder.execute("lock table public.gate in row exclusive mode")
    return holder.rollback


def test_c07_who_holds_a_lock_is_named_and_the_file_is_tried_again(
    empty_database: Database, directory: Path, held: Holder
) -> None:
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "waits" in line:
            held()

    assert len(apply_migrations(empty_database.url, directory, tell=tell)) == 4
    [waits] = [line for line in told if "waits" in line]
    assert "20270103000000_gate waits: gate is held by pid " in waits
    assert "user postgres, application the holder, idle in transaction, its transaction open for" in waits


def test_c07_patience_ends_with_a_name_and_an_exit_code(
    empty_database: Database, directory: Path, held: Holder
) -> None:
    with pytest.raises(MigrationBlocked, match="application the holder") as caught:
        apply_migrations(empty_database.url, directory, patience=0.1)
    assert caught.value.exit_code == 69
    assert recorded(empty_database) == ["ledger", "first", "second"]
    held()
    assert len(apply_migrations(empty_database.url, directory)) == 1


def test_c07_nobody_queues_behind_it_for_longer_than_its_lock_timeout(
    empty_database: Database, directory: Path, held: Holder
) -> None:
    """A writer that comes while it waits is behind it in the queue, and goes on when its lock_timeout ends."""
    worker = threading.Thread(target=apply_until_blocked, args=(empty_database.url, directory))
    worker.start()
    wait_until(lambda: empty_database.value(WAITING) > 0)
    writer = empty_database.connect()
    writer.execute("set statement_timeout = '4s'")
    writer.execute("insert into public.gate values (1)")  # ends with an error when it has to wait longer
    worker.join(30)
    assert not worker.is_alive()


def apply_until_blocked(url: str, directory: Path) -> None:
    with pytest.raises(MigrationBlocked):
        apply_migrations(url, directory, patience=3)


@pytest.mark.parametrize("patience", [0, 0.3, 5])
@pytest.mark.usefixtures("held")
def test_f6_patience_bounds_what_the_whole_run_loses(
    empty_database: Database, directory: Path, patience: float
) -> None:
    """Two files wait; every lost try and every pause counts, whichever file it was for."""
    write(directory, "20270104000000_late.sql", "select 1;")
    began = time.monotonic()
    with pytest.raises(MigrationBlocked, match=f"held this run up for {patience:g} s in all: gate is held by"):
        apply_migrations(empty_database.url, directory, patience=patience)
    assert patience <= time.monotonic() - began < patience + 3


def test_f6_patience_is_one_for_all_files() -> None:
    patience = Patience(12)
    first = patience.pauses()
    assert [next(first), patience.longest_wait()] == [0.5, 3.0]
    patience.spend(9)
    assert list(patience.pauses()) == [0.5, 1.0, 1.0]
    assert list(first) == []
    assert patience.longest_wait() == 0.25


def test_f6_the_lock_of_tables_waits_no_longer_than_patience_lets_it(database: Database) -> None:
    holder = database.connect(autocommit=False)
    holder.execute("lock table public.agents in row exclusive mode")
    began = time.monotonic()
    with pytest.raises(MigrationBlocked, match=r"in all: .*agents is held by"):
        apply_migrations(database.url, MIGRATIONS, again=True, patience=1)
    assert time.monotonic() - began < 4


@pytest.mark.parametrize("table", ["agent_wakes", "agents", "dispatcher.migrations"])
@pytest.mark.parametrize("look", [check_schema, partial(apply_migrations, patience=1)])
def test_f6_a_look_at_a_schema_that_is_held_is_bounded_and_names_who_holds_it(
    database: Database, table: str, look: Callable[[str, Path], object]
) -> None:
    """Also where there is nothing to apply: the checks read definitions, and so wait for every table."""
    holder = database.connect(autocommit=False)
    holder.execute(f"lock table {table} in access exclusive mode")
    began = time.monotonic()
    with pytest.raises(MigrationBlocked, match=r"could not be read: others .* is held by pid"):
        look(database.url, MIGRATIONS)
    assert time.monotonic() - began < 8
    holder.rollback()
    look(database.url, MIGRATIONS)


def test_c08_a_parameter_of_another_driver_is_named(directory: Path) -> None:
    url = "postgresql://postgres:geheim@127.0.0.1:1/postgres?pgbouncer=true&sslmode=disable&connection_limit=1"
    with pytest.raises(SettingsError) as caught:
        apply_migrations(url, directory)
    assert "does not know: pgbouncer, connection_limit. Leave them out" in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_c08_an_unreadable_url_says_how_to_write_it(directory: Path) -> None:
    with pytest.raises(SettingsError, match="write it as postgresql://") as caught:
        apply_migrations("postgresql://postgres:50%geheim@127.0.0.1:1/postgres", directory)
    assert "geheim" not in str(caught.value)


def test_a_broken_connection_is_unavailable_and_leaves_nothing(empty_database: Database, directory: Path) -> None:
    write(
        directory, "20270103000000_cut.sql", "insert into a values (3); select pg_terminate_backend(pg_backend_pid());"
    )
    with pytest.raises(ServiceUnavailable, match="during 20270103000000_cut, which left nothing behind"):
        apply_migrations(empty_database.url, directory)
    assert ids(empty_database) == [1, 2]


def test_a_name_of_ours_that_somebody_else_has_is_told_before_the_first_file(
    empty_database: Database, directory: Path
) -> None:
    write(directory, "20270103000000_budgets.sql", "create table if not exists public.budgets (id int);")
    empty_database.execute("create table public.budgets (amount int)")
    with pytest.raises(UnfitDatabase, match=r"under names of the dispatcher: budgets\. Nothing was created"):
        apply_migrations(empty_database.url, directory)
    assert not has_ledger(empty_database)


def test_the_command_needs_a_database(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "SUPABASE_DB_URL"):
        monkeypatch.delenv(name, raising=False)
    assert run_command_line(["migrate"]) == 78
    assert "--db-url" in capsys.readouterr().err
