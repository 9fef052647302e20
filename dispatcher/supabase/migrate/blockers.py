"""Who keeps the runner waiting: seen from a second connection while it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from dispatcher.errors import DispatcherError

if TYPE_CHECKING:
    import psycopg

_LOOK_SECONDS: Final = 0.1
_QUERY: Final = """
    select activity.pid, activity.usename, activity.application_name, activity.state,
           clock_timestamp() - activity.xact_start,
           (select coalesce(wanted.relation::regclass::text, wanted.locktype) from pg_catalog.pg_locks as wanted
             where wanted.pid = %(pid)s and not wanted.granted limit 1)
      from unnest(pg_catalog.pg_blocking_pids(%(pid)s)) as blocker (pid)
      join pg_catalog.pg_stat_activity as activity on activity.pid = blocker.pid
     order by activity.xact_start nulls last
     limit 3"""


@dataclass(frozen=True)
class Blocker:
    """A session that holds, or waits before us for, what we want. `busy_for` is None where we may not see it."""

    pid: int
    user: str | None
    application: str | None
    state: str | None
    busy_for: timedelta | None
    wanted: str | None

    def __str__(self) -> str:
        since = f", its transaction open for {_seconds(self.busy_for)}" if self.busy_for else ""
        who = f"user {self.user or 'unknown'}, application {self.application or 'without a name'}"
        return f"{self.wanted or 'a lock'} is held by pid {self.pid} ({who}, {self.state or 'state hidden'}{since})"


def _seconds(time: timedelta) -> str:
    return f"{time.total_seconds():.0f} s"


class BlockerWatch:
    """Remembers who last kept a session waiting. Looks ten times a second, on a connection of its own."""

    def __init__(self, connect: Callable[[], psycopg.Connection]) -> None:
        self._connect = connect
        self._pid: int | None = None
        self._seen: list[Blocker] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="migrate-blockers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(5)

    def follow(self, pid: int) -> None:
        """Watch this backend from now on, and forget what was seen."""
        self._seen = []
        self._pid = pid

    def describe(self) -> str:
        """Who held what, one sentence; says so where nobody was seen."""
        return "; ".join(map(str, self._seen)) or "who holds the lock could not be seen"

    def _watch(self) -> None:
        import psycopg  # noqa: PLC0415 - an extra, see connect.py

        try:
            with self._connect() as connection:
                while not self._ended.wait(_LOOK_SECONDS):
                    self._look(connection)
        except (psycopg.Error, DispatcherError):
            return  # names are a courtesy: without them the runner still waits and tries again

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        if self._pid is None:
            return
        found = [Blocker(*row) for row in connection.execute(_QUERY, {"pid": self._pid}).fetchall()]
        self._seen = found or self._seen
