"""Broadcast from the database: rows of `realtime.messages`, sent within a millisecond of their commit.

A connection of its own listens, so nothing here waits for the log of changes.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psycopg

from dispatcher.local.realtime import database
from dispatcher.local.realtime.database import Connection
from dispatcher.local.realtime.frames import dumps
from dispatcher.local.realtime.timings import Timings

log = logging.getLogger(__name__)

# In the order of the notifications, which is the order of commits and, within one, of statements.
_FETCH = """
  select m.id::text, m.topic, m.private, m.event, m.payload::text
  from unnest(%s::uuid[]) with ordinality as announced (id, n)
  join realtime.messages as m on m.id = announced.id and m.extension = 'broadcast'
  order by announced.n
"""
_PRUNE = "delete from realtime.messages where id = any (%s::uuid[])"
_LEFT_BEHIND = "delete from realtime.messages where inserted_at < localtimestamp - interval '1 hour'"


@dataclass(frozen=True, slots=True)
class DatabaseBroadcast:
    """One sent message. `payload` is JSON text, already with its id, as `realtime.send` stored it."""

    id: str
    topic: str
    private: bool
    event: str
    payload: str

    def frame_payload(self) -> str:
        """The payload of the `broadcast` frame."""
        return (
            f'{{"event":{dumps(self.event)},"meta":{{"id":{dumps(self.id)}}},'
            f'"payload":{self.payload},"type":"broadcast"}}'
        )


class BroadcastListener:
    """Hands every committed message to `deliver`, then removes it from the table.

    `lost` is called when the connection ended by itself. What was sent meanwhile is never delivered, as on
    the real server.
    """

    def __init__(
        self,
        db_url: str,
        timings: Timings,
        *,
        deliver: Callable[[DatabaseBroadcast], None],
        lost: Callable[[], None],
    ) -> None:
        self._db_url = db_url
        self._timings = timings
        self._deliver = deliver
        self._lost = lost
        self._delivered: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.ready = asyncio.Event()

    def start(self) -> None:
        """Begin to listen; `ready` is set while the connection stands."""
        self._tasks = [
            asyncio.create_task(self._run(), name="realtime-broadcasts"),
            asyncio.create_task(self._prune(), name="realtime-prune"),
        ]

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _run(self) -> None:
        while True:
            try:
                async with await database.connect(self._db_url, "broadcasts") as connection:
                    await self._listen(connection)
            except psycopg.OperationalError as error:
                log.warning("broadcasts from the database are out of reach: %s", error)
                if self.ready.is_set():
                    self._lost()
            except Exception:
                log.exception("listening for broadcasts failed; it starts anew")
            finally:
                self.ready.clear()
            await asyncio.sleep(self._timings.database_retry)

    async def _listen(self, connection: Connection) -> None:
        await connection.execute("listen realtime_messages")
        self.ready.set()
        while True:
            announced = [notification.payload async for notification in connection.notifies(stop_after=1)]
            await self._fetch(connection, announced)

    async def _fetch(self, connection: Connection, announced: Sequence[str]) -> None:
        cursor = await connection.execute(_FETCH, (list(announced),))
        for row in await cursor.fetchall():
            self._deliver(DatabaseBroadcast(*row))
        self._delivered.extend(announced)

    async def _prune(self) -> None:
        """On a connection of its own: a removal must not delay the next message."""
        while True:
            try:
                async with await database.connect(self._db_url, "prune") as connection:
                    await connection.execute("set synchronous_commit = off")
                    await connection.execute(_LEFT_BEHIND)
                    await self._keep_pruning(connection)
            except psycopg.Error as error:
                log.debug("delivered broadcasts are not removed: %s", error)
            await asyncio.sleep(self._timings.database_retry)

    async def _keep_pruning(self, connection: Connection) -> None:
        while True:
            await asyncio.sleep(self._timings.prune)
            if self._delivered:
                gone, self._delivered = self._delivered, []
                await connection.execute(_PRUNE, (gone,))
