"""The work of a run: agents, items, and the judgement of what became of each item."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import dict_row

from tests.support.chaos.evidence import Evidence
from tests.support.chaos.schedule import Agent, Insert

GATEWAY: Final = "chaos"
STATEMENT_TIMEOUT: Final = "-c statement_timeout=8000"

# The database's own numbers that must hold at every moment: query → what its rows show.
ALWAYS: Final[Mapping[str, str]] = {
    "select id, attempt_count, max_attempts from agent_inbox_items where attempt_count > max_attempts": (
        "attempts never exceed max_attempts"
    ),
    "select agent_id, count(*) from agent_wakes where ended_at is null group by agent_id having count(*) > 1": (
        "one live wake per agent"
    ),
    "select count(*) as live from agent_wakes where ended_at is null having count(*) > %(cap)s": (
        "live wakes within the cap"
    ),
    """select item_id from inbox_item_leases as lease join agent_inbox_items as item on item.id = item_id
        where closed_at is null and item.status in ('done', 'dead_letter')""": "a finished item has no open lease",
}

# Items by what became of them; `explained` says whether an operator can read from the row why it stands so.
FATE: Final = """
select item.id, item.agent_slug, item.status::text as status, item.attempt_count, item.max_attempts,
       item.context ->> 'last_failure_reason' as reason, state.stalled_at is not null as stalled,
       case item.status::text
         when 'done' then item.completed_at is not null
         when 'dead_letter' then item.context ->> 'last_failure_reason' is not null
         when 'failed' then item.context ->> 'last_failure_reason' is not null
                            and (state.stalled_at is not null or item.attempt_count >= item.max_attempts)
         else false
       end as explained
  from agent_inbox_items as item left join agent_wake_state as state on state.agent_id = item.agent_id
"""


@dataclass(frozen=True)
class Item:
    """An item as it is to be inserted."""

    item_id: uuid.UUID
    agent: str


class Bench:
    """A connection of the run's own to the database, made anew when the database was away. One thread at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[dict[str, Any]] | None = None

    def rows(
        self, query: str, parameters: Mapping[str, object] | Sequence[object] | None = None
    ) -> list[dict[str, Any]]:
        """All rows. Raises psycopg.Error, and forgets the connection then."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self._url, autocommit=True, row_factory=dict_row, connect_timeout=5, options=STATEMENT_TIMEOUT
                )
            cursor = self._connection.execute(query.encode(), parameters)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error:
            self.close()
            raise

    def close(self) -> None:
        """Harmless when it is closed."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def make_agents(bench: Bench, agents: Iterable[Agent]) -> None:
    """Tenant, workspace, gateway and agents; retries of failed items come fast, so that a short run sees them all."""
    bench.rows(
        "insert into tenants (id, name, slug) values (%s, 'Default', 'default') on conflict do nothing",
        [uuid.UUID(int=0)],
    )
    bench.rows("insert into workspace (tenant_id, name, slug) values (%s, 'HQ', 'hq')", [uuid.UUID(int=0)])
    bench.rows("insert into gateways (label, slug) values ('Chaos', %s)", [GATEWAY])
    for agent in agents:
        bench.rows(
            "insert into agents (gateway_id, name, slug) select id, %s, %s from gateways where slug = %s",
            [agent.slug, agent.slug, GATEWAY],
        )
    bench.rows(
        """create or replace function dispatcher.inbox_retry_delay(p_attempt integer) returns interval
           language sql immutable parallel safe set search_path = ''
           as $$ select make_interval(secs => least(4, greatest(p_attempt, 1))) $$"""
    )


class Loader(threading.Thread):
    """Inserts what the plan says when it says so; a batch the database did not take is tried until it does."""

    def __init__(self, url: str, inserts: Sequence[Insert], evidence: Evidence) -> None:
        super().__init__(name="loader", daemon=True)
        self._bench = Bench(url)
        self._inserts = inserts
        self._evidence = evidence
        self._items = [[Item(uuid.uuid4(), insert.agent) for _ in range(insert.count)] for insert in inserts]

    @property
    def planned(self) -> list[Item]:
        """Every item of the plan."""
        return [item for items in self._items for item in items]

    def probe(self, agent: str) -> None:
        """One more item, now; for after the run."""
        item = Item(uuid.uuid4(), agent)
        self._items.append([item])
        self._until_taken([item])

    def run(self) -> None:
        """All inserts, in order."""
        started = time.monotonic()
        for insert, items in zip(self._inserts, self._items, strict=True):
            time.sleep(max(0.0, started + insert.at - time.monotonic()))  # the schedule, not a wait for anything
            self._until_taken(items)
        self._bench.close()

    def _until_taken(self, items: Sequence[Item]) -> None:
        while True:
            try:
                self._insert(items)
            except psycopg.Error:
                self._evidence.count("inserts tried again")
                time.sleep(0.3)  # between two tries; the database is away
            else:
                self._evidence.count("items", len(items))
                return

    def _insert(self, items: Sequence[Item]) -> None:
        """With ids of our own: an insert whose commit nobody confirmed may be made again."""
        self._bench.rows(
            """insert into agent_inbox_items (id, agent_id, agent_slug, event_type, summary, dedup_key)
               select given.id, agent.id, agent.slug, 'heartbeat', 'chaos', given.id::text
                 from unnest(%s::uuid[]) as given (id), agents as agent where agent.slug = %s
               on conflict do nothing""",
            [[item.item_id for item in items], items[0].agent],
        )


def check_always(bench: Bench, cap: int, evidence: Evidence) -> None:
    """What must hold at every moment; nothing is said while the database cannot be asked."""
    for query, invariant in ALWAYS.items():
        try:
            rows = bench.rows(query, {"cap": cap})
        except psycopg.Error:
            return
        if rows:
            evidence.violated(invariant, str(rows[:5]))


def unsettled(bench: Bench) -> list[str]:
    """What has not come to an end yet: items, wakes, the waitlist; empty when all has."""
    items = [row for row in bench.rows(FATE) if not row["explained"]]
    wakes = bench.rows(
        "select id, agent_id, state, instance_id, claimed_at, pid from agent_wakes where ended_at is null"
    )
    waiting = bench.rows("select agent_id, waitlisted_at from agent_wake_state where waitlisted_at is not null")
    return [
        *(f"item {row}" for row in items),
        *(f"wake {row}" for row in wakes),
        *(f"waitlisted {row}" for row in waiting),
    ]


def unwell(bench: Bench, daemons: int) -> list[str]:
    """Daemons that do not say, in a fresh heartbeat, that all of their loops work and Realtime listens; or too few."""
    rows = bench.rows(
        """select pid, health ->> 'status' as health, health -> 'causes' as causes, realtime ->> 'status' as realtime
             from dispatcher_instances where state = 'running' and last_heartbeat_at > now() - interval '10 seconds'"""
    )
    ill = [str(row) for row in rows if row["health"] != "ok" or row["realtime"] != "ready"]
    return ill if len(rows) >= daemons else [*ill, f"{len(rows)} daemons give signs of life"]


def judge_items(bench: Bench, planned: Iterable[Item], evidence: Evidence) -> None:
    """Every item that was inserted is still there and has an end that can be explained."""
    fates = {row["id"]: row for row in bench.rows(FATE)}
    for item in planned:
        if item.item_id not in fates:
            evidence.violated("no item is lost", f"{item} is not in the database")
    for row in fates.values():
        evidence.count(
            f"item {row['status']}" + (f": {row['reason'][:60]}" if row["reason"] and row["status"] != "done" else "")
        )
        if not row["explained"]:
            evidence.violated("every item reaches an explained end", str(row))


def judge_wakes(bench: Bench, evidence: Evidence) -> None:
    """How the wakes ended, for the summary; a wake of a state nobody can explain is a violation."""
    for row in bench.rows("select state, count(*) as many from agent_wakes group by state"):
        evidence.count(f"wake {row['state']}", row["many"])
    for row in bench.rows("select * from inbox_item_leases where closed_at is null"):
        evidence.violated("no lease stays open", str(row))
