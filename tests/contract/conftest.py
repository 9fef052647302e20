"""A local Realtime on the recordings' tables; one for the whole session, further ones for tests that need their own."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from dispatcher.local.realtime import Limits
from tests.contract.local_realtime import LocalRealtime
from tests.support.database import Database, cloned

EMPTY = "truncate events, plain, secret, denied, nopk, odd, notpub, realtime.messages"
_SCHEMA = (Path(__file__).parent / "schema.sql").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def recorded_template(cluster: PostgresServer, empty_template: str) -> Iterator[str]:
    """Name of a database with the recordings' tables, to clone."""
    with cloned(cluster, empty_template) as database:
        database.execute(_SCHEMA)
        database.close()
        yield database.name


@pytest.fixture(scope="session")
def shared_database(cluster: PostgresServer, recorded_template: str) -> Iterator[Database]:
    with cloned(cluster, recorded_template) as database, closing(database):
        yield database


@pytest.fixture(scope="session")
def shared_realtime(shared_database: Database) -> Iterator[LocalRealtime]:
    with LocalRealtime(shared_database.url, limits=Limits(tenants=frozenset(["localhost"]))) as realtime:
        yield realtime


@pytest.fixture(scope="session")
def reused_database(cluster: PostgresServer, recorded_template: str) -> Iterator[Database]:
    with cloned(cluster, recorded_template) as database, closing(database):
        yield database


@pytest.fixture
def recorded_database(reused_database: Database) -> Database:
    """The recordings' tables, empty. The database itself is used again: leave its schema as it is."""
    reused_database.execute(EMPTY)
    return reused_database


@pytest.fixture
def realtime(recorded_database: Database) -> Iterator[LocalRealtime]:
    """A server of the test's own, for faults and shutdowns."""
    with LocalRealtime(recorded_database.url) as realtime:
        yield realtime


@pytest.fixture
def own_database(cluster: PostgresServer, recorded_template: str) -> Iterator[Database]:
    """A fresh database with the recordings' tables, for tests that change its schema or take it away."""
    with cloned(cluster, recorded_template) as database:
        yield database


@pytest.fixture
def own_realtime(own_database: Database) -> Iterator[LocalRealtime]:
    with LocalRealtime(own_database.url) as realtime:
        yield realtime


@pytest.fixture
def tables(shared_database: Database) -> psycopg.Connection[dict[str, object]]:
    """The shared database with its tables emptied."""
    shared_database.execute(EMPTY)
    return shared_database.admin
