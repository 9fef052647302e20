"""A database per test: a clone of a template, with connections in the roles of a Supabase project."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from dispatcher.local.postgres import PostgresServer

Connection = psycopg.Connection[dict[str, Any]]


class Database:
    """One database of the test cluster. Its connections are closed when the test ends."""

    def __init__(self, cluster: PostgresServer, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.url = cluster.url(name)
        self._open = ExitStack()
        self._admin: Connection | None = None

    def connect(
        self, role: str | None = None, claims: Mapping[str, object] | None = None, *, autocommit: bool = True
    ) -> Connection:
        """A new connection with rows as dicts: as the superuser, or in a role with claims as by PostgREST."""
        connection = psycopg.connect(self.url, autocommit=True, row_factory=dict_row)
        self._open.callback(connection.close)
        if role:
            connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
            text = json.dumps({"role": role, **(claims or {})})
            connection.execute("select set_config('request.jwt.claims', %s, false)", (text,))
        connection.autocommit = autocommit
        return connection

    @property
    def admin(self) -> Connection:
        """The test's own superuser connection, in autocommit mode."""
        if self._admin is None or self._admin.closed:
            self._admin = self.connect()
        return self._admin

    def rows(self, query: str, parameters: Sequence[object] | Mapping[str, object] = ()) -> list[dict[str, Any]]:
        """All rows of a query, as the superuser."""
        return self.admin.execute(query.encode(), parameters or None).fetchall()

    def row(self, query: str, parameters: Sequence[object] | Mapping[str, object] = ()) -> dict[str, Any]:
        """The only row of a query."""
        [only] = self.rows(query, parameters)
        return only

    def value(self, query: str, parameters: Sequence[object] | Mapping[str, object] = ()) -> Any:
        """The only value of a query's only row."""
        [only] = self.row(query, parameters).values()
        return only

    def execute(self, query: str, parameters: Sequence[object] | Mapping[str, object] = ()) -> int:
        """Run a statement as the superuser; the number of rows it touched."""
        return self.admin.execute(query.encode(), parameters or None).rowcount

    def call(self, function: str, arguments: Mapping[str, object], *, on: Connection | None = None) -> Any:
        """The rows of a function called with named arguments, as PostgREST calls it; of public unless it says."""
        named = sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder(name)) for name in arguments
        )
        query = sql.SQL("select * from {}({})").format(sql.Identifier(*function_path(function)), named)
        return (on or self.admin).execute(query, dict(arguments)).fetchall()

    def close(self) -> None:
        """Close every connection made through this object."""
        self._open.close()


def function_path(function: str) -> tuple[str, str]:
    """Schema and name; `claim_wakes` is public's, `dispatcher.wake_gates` is internal."""
    schema, _, name = function.rpartition(".")
    return schema or "public", name


@contextmanager
def cloned(cluster: PostgresServer, template: str) -> Iterator[Database]:
    """A clone of `template`, dropped afterwards whoever is still connected."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(cluster.url(), autocommit=True) as admin:
        # Half the time of the default, which writes every page into the log as well.
        create = sql.SQL("create database {} template {} strategy file_copy")
        admin.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
    database = Database(cluster, name)
    try:
        yield database
    finally:
        database.close()
        with psycopg.connect(cluster.url(), autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))
