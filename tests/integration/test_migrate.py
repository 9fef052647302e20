"""Migrations: in order, each once, each whole or not at all, by however many at a time."""

import sys
import threading
from pathlib import Path

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.errors import DispatcherError, ServiceUnavailable
from dispatcher.local.postgres import free_port
from dispatcher.supabase.migrate import (
    Applied,
    MigrationError,
    apply_migrations,
    migrations_directory,
)
from tests.support.database import Database
from tests.support.waiting import wait_until

HISTORY = "select version, name, statements from supabase_migrations.schema_migrations order by version"
COLUMNS = """
    select table_name, column_name, data_type from information_schema.columns
     where table_schema = 'public' order by table_name, ordinal_position"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "migrations"
    place.mkdir()
    write(
        place,
        "20260101000000_first.sql",
        "create table public.a (id int);\n-- more;\ninsert into public.a values (1);",
    )
    write(place, "20260102000000_second.sql", "insert into public.a values (2);")
    return place


def write(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text(script)


def ids(database: Database) -> list[int]:
    return [row["id"] for row in database.rows("select id from public.a order by id")]


def has_history(database: Database) -> bool:
    return bool(database.value("select to_regclass('supabase_migrations.schema_migrations') is not null"))


def test_each_is_applied_once_and_recorded_as_the_supabase_cli_does(empty_database: Database, directory: Path) -> None:
    applied = apply_migrations(empty_database.url, directory)
    assert applied == [Applied("20260101000000", "first"), Applied("20260102000000", "second")]
    assert apply_migrations(empty_database.url, directory) == []
    assert ids(empty_database) == [1, 2]
    assert empty_database.rows(HISTORY) == [
        {
            "version": "20260101000000",
            "name": "first",
            "statements": ["create table public.a (id int)", "insert into public.a values (1)"],
        },
        {
            "version": "20260102000000",
            "name": "second",
            "statements": ["insert into public.a values (2)"],
        },
    ]


def test_what_the_supabase_cli_recorded_is_not_applied_again(empty_database: Database, directory: Path) -> None:
    empty_database.execute("create table public.a (id int)")
    empty_database.execute("create schema supabase_migrations")
    empty_database.execute("create table supabase_migrations.schema_migrations (version text primary key)")
    empty_database.execute("insert into supabase_migrations.schema_migrations values ('20260101000000')")
    assert apply_migrations(empty_database.url, directory) == [Applied("20260102000000", "second")]
    assert ids(empty_database) == [2]


def test_two_at_once_share_the_work(empty_database: Database, directory: Path) -> None:
    for number in range(3, 20):
        write(directory, f"202602{number:02}000000_more.sql", f"insert into public.a values ({number});")
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
    write(directory, "20260103000000_slow.sql", "lock table public.gate; insert into public.a values (3);")
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
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    wait_until(lambda: empty_database.value(waiting) == 2)
    holder.rollback()
    for thread in threads:
        thread.join(30)
    assert sorted(len(result) for result in results) in ([0, 3], [1, 2])
    assert ids(empty_database) == [1, 2, 3]


@pytest.mark.parametrize(
    ("script", "place", "reason"),
    [
        (
            "insert into public.a values (3);\n\nselect nonsense;",
            "line 3, column 8",
            '"nonsense" does not exist',
        ),
        ("select 1;\nselec 2;", "line 2, column 1", 'syntax error at or near "selec"'),
        ("select 1;\n\n  do $$ begin raise 'no luck'; end $$;", "line 3, column 3", "no luck"),
    ],
)
def test_a_failing_one_names_its_place_and_leaves_nothing(
    empty_database: Database, directory: Path, script: str, place: str, reason: str
) -> None:
    write(directory, "20260103000000_bad.sql", script)
    with pytest.raises(MigrationError) as caught:
        apply_migrations(empty_database.url, directory)
    assert str(caught.value).startswith(f"20260103000000_bad.sql, {place}: ")
    assert reason in str(caught.value)
    assert ids(empty_database) == [1, 2]
    assert [row["name"] for row in empty_database.rows(HISTORY)] == ["first", "second"]


def test_what_one_does_to_the_session_does_not_reach_the_next(empty_database: Database, directory: Path) -> None:
    write(directory, "20260101500000_rude.sql", "set search_path = ''; set timezone = 'Asia/Tokyo';")
    write(
        directory,
        "20260103000000_after.sql",
        "create table zone as select current_setting('timezone') as name;",
    )
    apply_migrations(empty_database.url, directory)
    assert empty_database.value("select name from public.zone") == "UTC"


def test_a_dry_run_names_what_is_left_and_writes_nothing(empty_database: Database, directory: Path) -> None:
    assert len(apply_migrations(empty_database.url, directory, dry_run=True)) == 2
    assert not has_history(empty_database)


def test_two_files_of_one_version_are_refused(empty_database: Database, directory: Path) -> None:
    write(directory, "20260102000000_twin.sql", "select 1;")
    with pytest.raises(MigrationError, match=r"second\.sql and .*twin\.sql have the same version"):
        apply_migrations(empty_database.url, directory)
    assert not has_history(empty_database)


def test_files_of_another_shape_are_passed_over(empty_database: Database, directory: Path) -> None:
    write(directory, "notes.sql", "nonsense")
    write(directory, "README.md", "nonsense")
    assert len(apply_migrations(empty_database.url, directory)) == 2


def test_an_unreachable_database_is_unavailable(directory: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="cannot connect to the database"):
        apply_migrations(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres", directory)


def test_a_missing_library_names_its_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DispatcherError, match=r"openclaw-dispatcher\[migrate\]"):
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


def test_the_projects_own_apply_to_an_empty_project_and_over_yourhq(
    database: Database, yourhq_database: Database
) -> None:
    for each in (database, yourhq_database):
        assert apply_migrations(each.url, migrations_directory()) == []
        assert len(each.rows(HISTORY)) == len(list(migrations_directory().glob("*.sql")))


def test_the_command_says_what_it_did(
    empty_database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPABASE_DB_URL", empty_database.url)
    assert run_command_line(["migrate", "--dry-run"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert run_command_line(["migrate"]) == 0
    done = capsys.readouterr().out.splitlines()
    assert [line.replace("would apply", "applied") for line in planned] == done
    assert run_command_line(["migrate"]) == 0
    assert capsys.readouterr().out == "up to date\n"


def test_what_was_dropped_comes_back_when_all_are_applied_again(
    database: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUPABASE_DB_URL", database.url)
    before = database.rows(COLUMNS)
    kept = database.value("insert into tenants (name, slug) values ('kept', 'kept') returning id")
    database.execute("drop table budgets, budget_events cascade")
    assert run_command_line(["migrate"]) == 0
    assert capsys.readouterr().out == "up to date\n"
    assert run_command_line(["migrate", "--again"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(migrations_directory().glob("*.sql")))
    assert database.rows(COLUMNS) == before
    assert database.value("select count(*) from tenants where id = %s", [kept]) == 1


def test_the_command_needs_a_database(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "SUPABASE_DB_URL"):
        monkeypatch.delenv(name, raising=False)
    assert run_command_line(["migrate"]) == 78
    assert "--db-url" in capsys.readouterr().err
