"""postgres_changes: one logical slot, polled by SQL, for all subscriptions of a server."""

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from dispatcher.local.realtime import database, records
from dispatcher.local.realtime.database import Connection
from dispatcher.local.realtime.faults import Faults
from dispatcher.local.realtime.filters import Filter
from dispatcher.local.realtime.pgoutput import Change, Decoder
from dispatcher.local.realtime.records import Event, Table
from dispatcher.local.realtime.subscriptions import Wanted
from dispatcher.local.realtime.timings import Limits, Timings
from dispatcher.local.realtime.tokens import Token

log = logging.getLogger(__name__)

_CLOSE_PATIENCE = 3.0
_MOST_MESSAGES = 2000
_CHUNK = 500
_SNAPSHOT_AFTER = 2_000_000
_POLL = """
  select data from pg_logical_slot_get_binary_changes(
    %s, null, %s, 'proto_version', '1', 'publication_names', 'supabase_realtime')
"""

Deliver = Callable[[Sequence[int], str, str], None]
"""Called with the ids of the entries that matched, the action and the event's data as JSON."""


@dataclass(eq=False, slots=True)
class Subscription:
    """What one channel hears of. `tables` belongs to `wanted`, position by position."""

    wanted: Sequence[Wanted]
    tables: Sequence[frozenset[int]]
    token: Token
    deliver: Deliver
    claims: str = field(init=False)

    def __post_init__(self) -> None:
        self.claims = database.claims_text(self.token)

    @property
    def role(self) -> str:
        """The role whose rights decide what is seen."""
        return self.token.role

    def entries_on(self, relation: int, action: str) -> list[Wanted]:
        """Entries that mean this table and action, filters aside."""
        return [
            one
            for one, tables in zip(self.wanted, self.tables, strict=True)
            if relation in tables and one.action in ("*", action)
        ]


class ChangesReader:
    """Reads the log while anybody is subscribed, and for a while after.

    The slot is temporary: it dies with its connection, and what was committed before the next one exists
    is never delivered, as on the real server.
    """

    def __init__(self, db_url: str, timings: Timings, limits: Limits, faults: Faults) -> None:
        self._db_url = db_url
        self._timings = timings
        self._limits = limits
        self._faults = faults
        self._subscriptions: dict[Subscription, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._connection: Connection | None = None
        self._closing = asyncio.Event()
        self._rate = Rate(limits.max_events_per_second, limits.rate_window)
        self._unused_since = time.monotonic()

    @property
    def warm(self) -> bool:
        """Whether the slot exists."""
        return self._ready.is_set()

    async def run_warm(self) -> None:
        """Start reading unless it is running already; returns once the slot exists.

        Raises:
            OperationalError: the connection it reads by has died; try again.
        """
        self._unused_since = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="realtime-changes")
        await self._ready.wait()
        if self._connection is not None:
            # It may have died since the last poll: whoever is told that it is subscribed must be heard from then on.
            await self._connection.execute("select 1")

    def add(self, subscription: Subscription) -> None:
        """Deliver to it from the next poll on."""
        self._subscriptions[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        """Deliver nothing more to it."""
        self._subscriptions.pop(subscription, None)
        self._unused_since = time.monotonic()

    def has(self, subscription: Subscription) -> bool:
        """Whether it is still delivered to."""
        return subscription in self._subscriptions

    def forget_all(self) -> None:
        """Kill every subscription without telling anybody."""
        self._subscriptions.clear()

    def deny_all(self) -> None:
        """Give every subscription the event that a role without rights gets."""
        for subscription in list(self._subscriptions):
            one = subscription.wanted[0]
            data = records.refused_data(one.schema, one.table, "INSERT", "Error 401: Unauthorized")
            subscription.deliver([one.id], "INSERT", data)

    async def close(self) -> None:
        """Stop reading. The slot is gone when this returns, so the database can be dropped."""
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_CLOSE_PATIENCE)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while not self._is_finished():
            try:
                async with await database.connect(self._db_url, "changes") as connection:
                    await self._read(connection)
            except psycopg.OperationalError as error:
                self._lost(error)
                await self._rest(self._timings.database_retry)
            except Exception:
                log.exception("reading the log of changes failed; it starts anew")
                await self._rest(self._timings.database_retry)
            finally:
                self._ready.clear()

    def _lost(self, error: psycopg.OperationalError) -> None:
        log.warning("the log of changes is out of reach: %s", error)
        if self._faults.changes_die_after_outage:
            self.forget_all()

    def _is_finished(self) -> bool:
        unused = 0.0 if self._subscriptions else time.monotonic() - self._unused_since
        return unused > self._timings.reader_linger or self._closing.is_set()

    async def _rest(self, seconds: float) -> None:
        """Until the time is over, or the server closes."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)

    async def _read(self, connection: Connection) -> None:
        slot = await _create_slot(connection)
        self._connection = connection
        self._ready.set()
        decoder = Decoder()
        restart = Restart()
        while not self._is_finished():
            messages = await _poll(connection, slot)
            delivered = await self._deliver(connection, decoder, messages)
            await restart.advance(connection)
            await self._rest(self._pause(len(messages), delivered))
        # A closed connection takes its slot along too, but only some time later.
        await connection.execute("select pg_drop_replication_slot(%s)", (slot,))

    def _pause(self, messages: int, delivered: bool) -> float:
        if delivered or messages >= _MOST_MESSAGES:
            return 0.0
        if not messages:
            return self._timings.idle_poll
        return random.uniform(*self._timings.unmatched_poll)  # noqa: S311 - a pause, no secret

    async def _deliver(self, connection: Connection, decoder: Decoder, messages: Sequence[bytes]) -> bool:
        """Whether anybody got anything. Subscriptions count as they are now, at poll time."""
        wanted = frozenset[int]().union(*(tables for one in self._subscriptions for tables in one.tables))
        changes = list(decoder.changes(messages, wanted))
        delivered = False
        for start in range(0, len(changes), _CHUNK):
            batch = await _Batch.describe(
                connection,
                changes[start : start + _CHUNK],
                tuple(self._subscriptions),
                self._largest_record(),
            )
            for event in batch.events:
                delivered |= self._hand_out(batch, event)
        return delivered

    def _largest_record(self) -> int:
        return -1 if self._faults.trim_records else self._limits.max_record_bytes

    def _hand_out(self, batch: "_Batch", event: Event) -> bool:
        delivered = False
        for subscription in batch.subscriptions:
            # One that left while the batch was described gets nothing more.
            if subscription not in self._subscriptions:
                continue
            for ids, data in batch.frames(subscription, event):
                if self._faults.rate_limited or not self._rate.allow(len(ids)):
                    continue
                subscription.deliver(ids, event.change.action, data)
                delivered = True
        return delivered


class Restart:
    """Keeps the place near the end of the log from which each poll has to read.

    It moves only past a record of the running transactions, which PostgreSQL writes every 15 s at most. Until then
    every poll reads again all that was written, by any database of the cluster.
    """

    def __init__(self) -> None:
        self._snapshot_at = 0

    async def advance(self, connection: Connection) -> None:
        """Have such a record written when the log has grown enough since the last one."""
        cursor = await connection.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint")
        row = await cursor.fetchone()
        written = int(row[0]) if row else 0
        if written - self._snapshot_at > _SNAPSHOT_AFTER:
            await connection.execute("select pg_log_standby_snapshot()")
            self._snapshot_at = written


class Rate:
    """An average over a window: bursts pass, and what is refused counts too, as on the real server."""

    def __init__(self, limit: float | None, window: float) -> None:
        self._limit = limit
        self._window = window
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def allow(self, count: int = 1) -> bool:
        """Count `count` more, and say whether the average is still within the limit."""
        if self._limit is None:
            return True
        now = time.monotonic()
        self._counts.append((now, count))
        self._total += count
        while self._counts[0][0] < now - self._window:
            self._total -= self._counts.popleft()[1]
        return self._total <= self._limit * self._window


@dataclass(frozen=True, slots=True)
class _Batch:
    """Changes in commit order, made ready for the subscriptions of this moment."""

    events: Sequence[Event]
    tables: Mapping[int, Table]
    subscriptions: Sequence[Subscription]
    hidden: Mapping[str, frozenset[int]]
    """By claims: the events (by their id()) that row level security keeps from them."""

    @classmethod
    async def describe(
        cls,
        connection: Connection,
        changes: Sequence[Change],
        subscriptions: Sequence[Subscription],
        largest: int,
    ) -> "_Batch":
        """Ask all there is to know: one query per table for facts, for values, and per reader for rights."""
        tables: dict[int, Table] = {}
        events: dict[int, Event] = {}
        hidden: defaultdict[str, frozenset[int]] = defaultdict(frozenset)
        for relation, of_table in _by_table(changes).items():
            concerned = [one for one in subscriptions if any(relation in known for known in one.tables)]
            table = await records.read_table(connection, relation, {one.role for one in concerned})
            if table is None:
                continue  # dropped since
            tables[relation] = table
            described = await records.describe(connection, table, of_table, _filters_of(concerned, relation), largest)
            events.update((id(event.change), event) for event in described)
            for claims, unseen in (await _unseen(connection, table, described, concerned)).items():
                hidden[claims] |= unseen
        ordered = [events[id(change)] for change in changes if id(change) in events]
        return cls(ordered, tables, subscriptions, hidden)

    def frames(self, subscription: Subscription, event: Event) -> Iterable[tuple[list[int], str]]:
        """(ids, data) for each frame that this change makes on the subscription's channel."""
        change = event.change
        entries = subscription.entries_on(change.relation.id, change.action)
        if not entries:
            return
        table = self.tables[change.relation.id]
        refused = records.refusal(table, change.action, subscription.role)
        if refused is not None:
            ids = [one.id for one in reversed(entries)]
            yield ids, records.refused_data(table.schema, table.name, change.action, refused)
            return
        if id(event) in self.hidden.get(subscription.claims, ()):
            return
        for select, ids in _matching(entries, event).items():
            yield ids[::-1], event.data(table, subscription.role, select)


def _by_table(changes: Sequence[Change]) -> dict[int, list[Change]]:
    found: defaultdict[int, list[Change]] = defaultdict(list)
    for change in changes:
        found[change.relation.id].append(change)
    return found


def _filters_of(subscriptions: Sequence[Subscription], relation: int) -> list[Filter]:
    found: dict[Filter, None] = {}
    for subscription in subscriptions:
        for one, tables in zip(subscription.wanted, subscription.tables, strict=True):
            if relation in tables:
                found.update(dict.fromkeys(one.filters))
    return list(found)


def _matching(entries: Sequence[Wanted], event: Event) -> dict[tuple[str, ...] | None, list[int]]:
    """Ids of the entries whose filters all hold, by the columns they select: a frame for each selection."""
    found: defaultdict[tuple[str, ...] | None, list[int]] = defaultdict(list)
    for one in entries:
        if all(event.matches[condition] for condition in one.filters):
            found[one.select].append(one.id)
    return found


async def _create_slot(connection: Connection) -> str:
    name = f"supabase_realtime_replication_slot_{connection.info.backend_pid}"
    await connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput', true)", (name,))
    return name


async def _poll(connection: Connection, slot: str) -> list[bytes]:
    async with connection.cursor(binary=True) as cursor:
        await cursor.execute(_POLL, (slot, _MOST_MESSAGES))
        return [row[0] for row in await cursor.fetchall()]


async def _unseen(
    connection: Connection, table: Table, events: Sequence[Event], subscriptions: Sequence[Subscription]
) -> dict[str, frozenset[int]]:
    """By claims: the events whose row that reader may not see. Everybody sees a DELETE, as in reality."""
    judged = [event for event in events if event.change.action != "DELETE"]
    if not table.rls or not table.key or not judged:
        return {}
    readers = {one.claims: one.role for one in subscriptions}
    return {claims: await _unseen_by(connection, table, judged, role, claims) for claims, role in readers.items()}


async def _unseen_by(
    connection: Connection, table: Table, events: Sequence[Event], role: str, claims: str
) -> frozenset[int]:
    rows = [event.change.new_values() for event in events]
    parameters: dict[str, Any] = {
        f"c{position}": [row.get(column.name) for row in rows] for position, column in enumerate(table.key)
    }
    try:
        async with connection.transaction():
            await connection.execute(
                "select set_config('request.jwt.claims', %s, true), set_config('role', %s, true)",
                (claims, role),
            )
            cursor = await connection.execute(visibility_query(table), parameters)
            seen = {row[0] for row in await cursor.fetchall()}
    except (psycopg.ProgrammingError, psycopg.DataError) as error:
        log.warning("rows of %s.%s are hidden from %s: %s", table.schema, table.name, role, error)
        seen = set()
    return frozenset(id(event) for number, event in enumerate(events, 1) if number not in seen)


def visibility_query(table: Table) -> sql.Composed:
    """Numbers (from 1) of the rows, given by key in arrays c0, c1, ..., that the current role can see."""
    positions = range(len(table.key))
    same = (
        sql.SQL("t.{} = v.{}::{}").format(
            sql.Identifier(column.name), sql.Identifier(f"c{position}"), records.type_of(column)
        )
        for position, column in enumerate(table.key)
    )
    return sql.SQL(
        "select n from unnest({arrays}) with ordinality as v({names}, n) "
        "where exists (select from {table} as t where {same})"
    ).format(
        arrays=sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Placeholder(f"c{i}")) for i in positions),
        names=sql.SQL(", ").join(sql.Identifier(f"c{i}") for i in positions),
        table=sql.Identifier(table.schema, table.name),
        same=sql.SQL(" and ").join(same),
    )
