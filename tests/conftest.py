"""What every test may ask for.

cluster          session: a PostgreSQL without fsync
database         a clone of a migrated database: `.url`, `.connect(role, claims)`, `.rows/.row/.value(sql)`
yourhq_database  the same on top of a YourHQ v0.2.3 schema
empty_database   a Supabase project before its first migration
seed             rows: `seed.agent("ada")`, `seed.item("ada", status="failed")`
api              PostgREST, Realtime and gateway on `database`: `api.url`, `api.keys.service_role_key`,
                 `api.faults(realtime={...}, rest={...})`, `api.rest.stop()`; Realtime by `Timings.quick`
project_keys     session: the keys behind `api`
stub_agent       an executable for OPENCLAW_BIN: `.path`, `.order(mode="hang")`, `.calls()`, `.events("item")`
connect          `database.connect`: another connection, in a role
wait_until       `wait_until(lambda: ..., deadline=5)`
"""

import dataclasses
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import structlog
from hypothesis import settings as hypothesis_settings
from psycopg import sql

from dispatcher import logs
from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.postgres import PostgresServer
from dispatcher.local.stub import StubAgent
from dispatcher.supabase.migrate import apply_migrations
from tests.support import waiting
from tests.support.api import running_api
from tests.support.database import Connection, Database, cloned
from tests.support.seed import Seed

ROOT = Path(__file__).resolve().parents[1]
MIGRATIONS = ROOT / "supabase" / "migrations"
YOURHQ = ROOT / "tests" / "fixtures" / "yourhq_v0_2_3.sql"
# A busy machine is no fault of the code: how long one example takes says nothing here.
hypothesis_settings.register_profile("house", deadline=None)
hypothesis_settings.load_profile("house")

KINDS = ("unit", "sql", "integration", "acceptance", "contract", "functions")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's directory says its kind."""
    for item in items:
        kind = item.path.relative_to(ROOT / "tests").parts[0]
        if kind in KINDS:
            item.add_marker(kind)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    directory = tmp_path_factory.mktemp("cluster")
    server = PostgresServer(directory, password=secrets.token_hex(24), durable=False)
    try:
        server.start()
        server.bootstrap()
        yield server
    finally:
        server.destroy()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """`configure_logging` owns state of the whole process: a command run in one test must not silence the next."""
    root = logging.root
    before = (list(root.handlers), sys.excepthook, threading.excepthook, sys.unraisablehook, logs._sink)
    level = root.level
    yield
    root.handlers, sys.excepthook, threading.excepthook, sys.unraisablehook, logs._sink = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    logging.raiseExceptions = True
    structlog.reset_defaults()


def _template(cluster: PostgresServer, name: str) -> str:
    with psycopg.connect(cluster.url(), autocommit=True) as admin:
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    cluster.bootstrap(name)
    return name


@pytest.fixture(scope="session")
def empty_template(cluster: PostgresServer) -> str:
    return _template(cluster, "template_empty")


@pytest.fixture(scope="session")
def migrated_template(cluster: PostgresServer) -> str:
    name = _template(cluster, "template_migrated")
    apply_migrations(cluster.url(name), MIGRATIONS)
    return name


@pytest.fixture(scope="session")
def yourhq_template(cluster: PostgresServer) -> str:
    name = _template(cluster, "template_yourhq")
    with psycopg.connect(cluster.url(name), autocommit=True) as admin:
        admin.execute(YOURHQ.read_bytes())
    apply_migrations(cluster.url(name), MIGRATIONS)
    return name


@pytest.fixture
def empty_database(cluster: PostgresServer, empty_template: str) -> Iterator[Database]:
    with cloned(cluster, empty_template) as database:
        yield database


@pytest.fixture
def database(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as database:
        yield database


@pytest.fixture
def yourhq_database(cluster: PostgresServer, yourhq_template: str) -> Iterator[Database]:
    with cloned(cluster, yourhq_template) as database:
        yield database


@pytest.fixture
def seed(database: Database) -> Seed:
    return Seed(database)


@pytest.fixture(scope="session")
def project_keys(cluster: PostgresServer) -> Keys:
    return dataclasses.replace(Keys.generate(), database_password=cluster.password)


@pytest.fixture
def api(database: Database, project_keys: Keys, tmp_path: Path) -> Iterator[Api]:
    with running_api(database, project_keys, tmp_path) as started:
        yield started


@pytest.fixture
def connect(database: Database) -> Callable[..., Connection]:
    return database.connect


@pytest.fixture
def wait_until() -> Callable[..., object]:
    return waiting.wait_until


@pytest.fixture
def stub_agent(tmp_path: Path) -> Iterator[StubAgent]:
    stub = StubAgent(tmp_path / "stub")
    try:
        yield stub
    finally:
        stub.kill_all()
