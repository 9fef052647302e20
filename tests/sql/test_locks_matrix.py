"""Nobody waits for a row that is not theirs: each row that can be locked is held, and each public function called.

The functions come from the catalog and their arguments from tests/support/world.py: a new one is covered by itself.
"""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Connection, Database, cloned
from tests.support.waiting import wait_until
from tests.support.world import Function, Side, call, calls_of, populate, public_functions

COPIES: Final = 10  # most of the time is waiting: the functions share it
SESSIONS: Final = 4
ROUNDS: Final = 500
FAST: Final = 0.2  # seconds above an undisturbed call
# All waits of one call together, whatever is held: far below the default REST_TIMEOUT of 10 s. A second of it is for a
# busy machine.
BOUND: Final = 3.0
# What a daemon calls again by itself says no more than 55P03, lock_not_available: the row is its own.
CALLED_AGAIN: Final = {
    "adopt_wake",
    "dispatch_workflows",
    "heartbeat_dispatcher_instance",
    "note_sweep",
    "register_dispatcher_instance",
    "stop_dispatcher_instance",
    "sweep_inbox",
}
# Every row that one session may hold while others go on, with whom it belongs to.
Holding = Callable[[Database], contextlib.AbstractContextManager[None]]
OWN, SHARED = "agent, item or run", "gateway or tenant"
ROWS: Final = {
    "agents": (OWN, "select from agents where slug like 'a-%' for update"),
    "agent_wake_state": (
        OWN,
        """select from agent_wake_state as state join agents on agents.id = state.agent_id
           where slug like 'a-%' for update of state""",
    ),
    "agent_wakes": (
        OWN,
        """select from agent_wakes as wake join agents on agents.id = wake.agent_id
           where slug like 'a-%' for update of wake""",
    ),
    "agent_budgets": (
        OWN,
        """select from agent_budgets as budget join agents on agents.id = budget.agent_id
           where slug like 'a-%' for update of budget""",
    ),
    "agent_inbox_items": (OWN, "select from agent_inbox_items where agent_slug like 'a-%' for update"),
    "inbox_item_leases": (
        OWN,
        """select from inbox_item_leases as lease join agents on agents.id = lease.agent_id
           where slug like 'a-%' for update of lease""",
    ),
    "inbox_item_marks": (
        OWN,
        """select from inbox_item_marks as mark join agent_inbox_items as item on item.id = mark.item_id
           where agent_slug like 'a-%' for update of mark""",
    ),
    "tasks": (
        OWN,
        """select from tasks join agent_inbox_items as item on item.task_id = tasks.id
           where agent_slug like 'a-%' for update of tasks""",
    ),
    "workflow_agent_routing": (OWN, "select from workflow_agent_routing where workflow_type = 'a-type' for update"),
    "workflow_runs": (OWN, "select from workflow_runs where workflow_type = 'a-type' for update"),
    "workflow_claims": (OWN, "select from workflow_claims where workflow_type = 'a-type' for update"),
    "workflow_notifications": (OWN, "select from workflow_notifications where agent_id like 'a-%' for update"),
    "budgets": (OWN, "select from budgets where scope_id = 'a-type' for update"),
    "dispatcher_gateways": (
        SHARED,
        """select from dispatcher_gateways as lock join gateways on gateways.id = lock.gateway_id
           where slug = 'shared' for update of lock""",
    ),
    "gateways": (SHARED, "select from gateways where slug = 'shared' for update"),
    "dispatcher_instances": (
        SHARED,
        """select from dispatcher_instances as instance join gateways on gateways.id = instance.gateway_id
           where slug = 'shared' for update of instance""",
    ),
    "dispatcher_settings": (
        SHARED,
        """select from dispatcher_settings as settings
           where tenant_id = '00000000-0000-0000-0000-000000000000' for update of settings""",
    ),
    "tenants": (SHARED, "select from tenants where slug = 'default' for update"),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a call: seconds, its answer, or its SQLSTATE."""

    seconds: float
    answer: Any = None
    sqlstate: str | None = None

    def __str__(self) -> str:
        return f"{self.seconds * 1000:.0f} ms, {self.sqlstate or str(self.answer)[:200]}"


@dataclass(frozen=True)
class World:
    """A populated database in several copies, and how long each call takes there while nobody holds anything."""

    copies: list[Database]
    sides: dict[str, Side]
    functions: list[Function]
    undisturbed: dict[tuple[str, str], "Outcome"]

    def shares(self) -> list[tuple[Database, list[Function]]]:
        """Each copy with its share of the functions."""
        return [(copy, self.functions[place :: len(self.copies)]) for place, copy in enumerate(self.copies)]


@pytest.fixture(scope="module")
def world(cluster: PostgresServer, migrated_template: str) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        origin = stack.enter_context(cloned(cluster, migrated_template))
        sides, functions = populate(origin), public_functions(origin)
        origin.close()  # what somebody is connected to cannot be copied
        copies = [stack.enter_context(cloned(cluster, origin.name)) for _ in range(COPIES)]
        connection = caller(copies[0])
        undisturbed = {
            (name, side): baseline(connection, function, arguments)
            for function in functions
            for side in sides
            for name, arguments in calls_of(function, sides[side])
        }
        yield World(copies, sides, functions, undisturbed)


def tried(connection: Connection, function: Function, arguments: dict[str, object]) -> Outcome:
    """One call in a transaction that is taken back, so that the next one finds the same rows."""
    started = time.monotonic()
    try:
        with connection.transaction(force_rollback=True):
            answer = call(connection, function, arguments)
            return Outcome(time.monotonic() - started, answer)
    except psycopg.Error as error:
        return Outcome(time.monotonic() - started, sqlstate=error.sqlstate)


def caller(database: Database) -> Connection:
    connection = database.connect("service_role")
    connection.execute("set statement_timeout = '8s'")
    return connection


@contextlib.contextmanager
def held(database: Database, query: str) -> Iterator[None]:
    """Rows that another session holds in an open transaction."""
    with database.connect(autocommit=False) as holder:
        assert holder.execute(query.encode()).rowcount != 0
        yield
        holder.rollback()


def baseline(connection: Connection, function: Function, arguments: dict[str, object]) -> Outcome:
    return min((tried(connection, function, arguments) for _ in range(2)), key=lambda outcome: outcome.seconds)


def judged_free(connection: Connection, function: Function, arguments: dict[str, object], undisturbed: Outcome) -> str:
    """Why a call that concerns other rows is not answered as if nobody held anything; empty when it is."""
    for _ in range(2):  # a busy machine may spoil one measurement
        outcome = tried(connection, function, arguments)
        if outcome.seconds <= undisturbed.seconds + FAST and outcome.sqlstate == undisturbed.sqlstate:
            return ""
    return f"{outcome} (undisturbed {undisturbed})"


def judged_held(connection: Connection, function: Function, arguments: dict[str, object]) -> str:
    """Why a call that concerns held rows does not end in time with an answer or as busy; empty when it does."""
    outcome = tried(connection, function, arguments)
    limit = min(function.lock_timeout, 3.0) + 0.5
    is_told = outcome.sqlstate is None or (outcome.sqlstate == "55P03" and function.name in CALLED_AGAIN)
    if is_told and outcome.seconds <= limit:
        return ""
    return str(outcome)


def waits_of(world: World, database: Database, functions: list[Function], table: str) -> list[str]:
    """What waits although it should not, of some functions, while the rows of a table are held."""
    whose, query = ROWS[table]
    other = "b" if whose == OWN else "c"
    faults: list[str] = []
    with contextlib.closing(caller(database)) as connection, held(database, query):
        for function in functions:
            for name, arguments in calls_of(function, world.sides[other]):
                why = judged_free(connection, function, arguments, world.undisturbed[name, other])
                faults += [f"{name} for {other}: {why}"] if why else []
            for name, arguments in calls_of(function, world.sides["a"]):
                why = judged_held(connection, function, arguments)
                faults += [f"{name} for a, whose row is held: {why}"] if why else []
    return faults


@pytest.mark.parametrize("table", ROWS)
def test_c01_c02_nobody_waits_for_a_row_that_is_not_theirs(world: World, table: str) -> None:
    with ThreadPoolExecutor(COPIES) as pool:
        tasks = [pool.submit(waits_of, world, copy, functions, table) for copy, functions in world.shares()]
        faults = [fault for task in tasks for fault in task.result()]
    assert not faults, "\n".join(faults)


def test_c12_every_call_of_the_matrix_does_its_work(world: World) -> None:
    """A call that is refused at once would wait for nobody: what the tests above see must be real work."""
    idle = {"claimed_by_another", "fence_lost", "invalid", "lease_lost", "not_found", "not_yours", "unknown_agent"}
    refused = {
        f"{name} for {side}: {outcome}"
        for (name, side), outcome in world.undisturbed.items()
        if outcome.sqlstate or (isinstance(outcome.answer, dict) and outcome.answer.get("code") in idle)
    }
    assert not refused


# ------------------------------------------------------------------------------------------- everything at once


@contextlib.contextmanager
def everything_held(database: Database) -> Iterator[None]:
    """One session holds all rows of the matrix; others wait for some: whoever comes next waits in their queues, too."""
    with contextlib.ExitStack() as stack:
        holder = stack.enter_context(database.connect(autocommit=False))
        for _whose, query in ROWS.values():
            holder.execute(query.encode())
        stack.callback(holder.rollback)
        for table in ("dispatcher_gateways", "dispatcher_instances", "workflow_runs"):
            stack.enter_context(waited_for(database, ROWS[table][1]))
        yield


@contextlib.contextmanager
def waited_for(database: Database, query: str) -> Iterator[None]:
    """A session that waits for rows which somebody holds."""
    with database.connect() as second:
        waiting = threading.Thread(target=_wait_for, args=(second, query))
        waiting.start()
        try:
            wait_until(lambda: _is_waiting(database, second.info.backend_pid), 10)
            yield
        finally:
            second.cancel()
            waiting.join(10)


def _wait_for(connection: Connection, query: str) -> None:
    with contextlib.suppress(psycopg.errors.QueryCanceled):
        connection.execute(query.encode())


def _is_waiting(database: Database, pid: int) -> bool:
    return database.value("select wait_event_type = 'Lock' from pg_stat_activity where pid = %s", [pid]) is True


def judged_bounded(connection: Connection, function: Function, arguments: dict[str, object]) -> str:
    """Why a call takes too long or fails with something else than 55P03; empty when it does not."""
    outcome = tried(connection, function, arguments)
    return "" if outcome.seconds <= BOUND and outcome.sqlstate in {None, "55P03"} else str(outcome)


def unbounded_calls(world: World, database: Database, functions: list[Function], hold: Holding) -> list[str]:
    """Which calls wait for too long while all of that is held."""
    faults: list[str] = []
    with contextlib.closing(caller(database)) as connection, hold(database):
        for function in functions:
            for name, arguments in calls_of(function, world.sides["a"]):
                why = judged_bounded(connection, function, arguments)
                faults += [f"{name}: {why}"] if why else []
    return faults


def unbounded(world: World, hold: Holding) -> list[str]:
    with ThreadPoolExecutor(COPIES) as pool:
        tasks = [pool.submit(unbounded_calls, world, copy, functions, hold) for copy, functions in world.shares()]
        return [fault for task in tasks for fault in task.result()]


def test_f4_all_waits_of_a_call_together_have_one_bound(world: World) -> None:
    faults = unbounded(world, everything_held)
    assert not faults, "\n".join(faults)


TABLES: Final = ("gateways", "agents", "agent_inbox_items", "agent_wakes")


@pytest.mark.faults_expected
@pytest.mark.parametrize("table", TABLES)
def test_f4_nobody_waits_long_for_a_table_that_is_held_as_a_whole(world: World, table: str) -> None:
    faults = unbounded(world, partial(held, query=f"lock table {table} in access exclusive mode"))
    assert not faults, "\n".join(faults)


# ------------------------------------------------------------------------------------------- pairs at once


def called_together(database: Database, world: World, together: threading.Barrier, seed: int) -> Counter[str]:
    """One session's random calls, each begun at the same moment as the others'; how often each SQLSTATE came out.

    Most are taken back, so that there is work left for the next.
    """
    chance = random.Random(seed)
    states: Counter[str] = Counter()
    with contextlib.closing(caller(database)) as connection:
        for _ in range(ROUNDS):
            function = chance.choice(world.functions)
            _, arguments = chance.choice(list(calls_of(function, world.sides[chance.choice("aaab")])))
            together.wait(30)
            try:
                with connection.transaction(force_rollback=chance.random() < 0.9):
                    call(connection, function, arguments)
                states["ok"] += 1
            except psycopg.Error as error:
                states[error.sqlstate or "none"] += 1
    return states


def test_c02_random_pairs_of_functions_never_deadlock(world: World) -> None:
    """Four sessions call any function on the same rows at once: two pairs in each of five hundred rounds."""
    database = world.copies[-1]
    # Before any lock_timeout: a circle must be seen, not be cut short.
    database.execute(f"alter database {database.name} set deadlock_timeout = '20ms'")
    together = threading.Barrier(SESSIONS)
    with ThreadPoolExecutor(SESSIONS) as pool:
        tasks = [pool.submit(called_together, database, world, together, seed) for seed in range(SESSIONS)]
        states = sum((task.result() for task in tasks), Counter[str]())
    # The server counts a deadlock that a handler of ours contained, too.
    database.execute("select pg_stat_force_next_flush()")
    assert database.value("select deadlocks from pg_stat_database where datname = current_database()") == 0
    assert set(states) <= {"ok", "55P03", "OD001", "OD002"}, states
    assert states["ok"] > ROUNDS
