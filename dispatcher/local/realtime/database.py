"""The connection for questions beside the log and the broadcasts: subscriptions, rights, publication."""

import asyncio
import json
import re
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from dispatcher.local.realtime.filters import FilterRefused
from dispatcher.local.realtime.subscriptions import Wanted
from dispatcher.local.realtime.tokens import Token

Connection = AsyncConnection[TupleRow]

_SUBSCRIBE = "select realtime.local_subscribe(%s, %s, %s, %s::jsonb, %s)::bigint[]"
_PROBE = """
  insert into realtime.messages (topic, extension, event, payload, private)
  values (%s, 'broadcast', 'authorization', '{}', true) returning id
"""
_IMPERSONATE = """
  select set_config('realtime.topic', %s, true), set_config('request.jwt.claims', %s, true),
    set_config('role', %s, true)
"""
_TRANSLATED = re.compile(r"(?<!^)(?=[A-Z])")


async def connect(db_url: str, purpose: str) -> Connection:
    """A connection of the server's own, in autocommit mode. Raises psycopg.OperationalError."""
    attempt = asyncio.ensure_future(
        AsyncConnection.connect(db_url, autocommit=True, application_name=f"realtime_{purpose}", connect_timeout=5)
    )
    try:
        return await asyncio.shield(attempt)
    except asyncio.CancelledError:
        # Cancelled itself, psycopg leaves its socket open, and the server a process that no DROP DATABASE can pass
        # until authentication_timeout.
        with suppress(psycopg.Error):
            await (await attempt).close()
        raise


def claims_text(token: Token) -> str:
    """The claims as policies see them in `request.jwt.claims`."""
    return json.dumps(dict(token.claims))


class Database:
    """Asks one question at a time and finds back by itself: each question after an outage connects anew."""

    def __init__(self, db_url: str) -> None:
        self._db_url = db_url
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """Give the connection back."""
        async with self._turn:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None

    async def tables_of(self, wanted: Wanted, role: str) -> frozenset[int]:
        """Object ids of the tables an entry subscribes to. Raises `FilterRefused`, with the client's text."""
        conditions = [
            {
                "column": one.column,
                "operator": one.operator,
                "value": one.value,
                "values": one.values or [one.value],
            }
            for one in wanted.filters
        ]
        select = list(wanted.select) if wanted.select is not None else None
        arguments = (role, wanted.schema, wanted.table, json.dumps(conditions), select)
        try:
            row = await self._one(_SUBSCRIBE, arguments)
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            raise FilterRefused(_exception_text(wanted, error)) from error
        if not row or not row[0]:
            raise FilterRefused(_PREFIX + _DISABLED + wanted.inspected())
        return frozenset(row[0])

    async def publication(self) -> str | None:
        """A text that changes with the set of published tables."""
        row = await self._one("select realtime.local_published_state()", ())
        return row[0] if row else None

    async def rights_on(self, topic: str, token: Token) -> tuple[bool, bool]:
        """Whether the token's role may read and write a private topic, by policies on realtime.messages."""
        async with self._turn:
            connection = await self._connected()
            async with connection.transaction(force_rollback=True):
                probe = await (await connection.execute(_PROBE, (topic,))).fetchone()
                await connection.execute(_IMPERSONATE, (topic, claims_text(token), token.role))
                visible = await connection.execute("select 1 from realtime.messages where id = %s", probe)
                readable = await visible.fetchone() is not None
                return readable, await _can_insert(connection, topic)

    async def _one(self, query: str, arguments: tuple[Any, ...]) -> TupleRow | None:
        async with self._turn:
            connection = await self._connected()
            return await (await connection.execute(query.encode(), arguments)).fetchone()

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = await connect(self._db_url, "control")
        return self._connection


async def _can_insert(connection: Connection, topic: str) -> bool:
    try:
        async with connection.transaction():
            await connection.execute(_PROBE.rpartition("returning")[0].encode(), (topic,))
    except psycopg.errors.InsufficientPrivilege:
        return False
    return True


_PREFIX = "Unable to subscribe to changes with given parameters. "
_DISABLED = "Please check Realtime is enabled for the given connect parameters: "
_FAILED = "An exception happened so please check your connect parameters: "


def _exception_text(wanted: Wanted, error: psycopg.Error) -> str:
    condition = _TRANSLATED.sub("_", type(error).__name__).lower()
    message = error.diag.message_primary or str(error)
    return f"{_PREFIX}{_FAILED}{wanted.inspected()}. Exception: ERROR {error.sqlstate} ({condition}) {message}"
