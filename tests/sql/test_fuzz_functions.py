"""No argument and no row stops a function: a refusal or a named error, never a broken fence, never a NULL.

The functions and their arguments come from the catalog and from tests/support/world.py: a new one is covered by itself.
"""

import contextlib
import copy
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Connection, Database, cloned
from tests.support.world import Function, Side, arguments_of, call, calls_of, populate, public_functions

LONG: Final = "x" * 1_000_000
WRONG: Final = uuid.UUID(int=99)
# Each value as text, as it stands in a JSON body; PostgREST casts it to the type of the argument.
BAD: Final[dict[str, tuple[str | None, ...]]] = {
    "uuid": (None, str(WRONG), "no-uuid", ""),
    "text": (None, "", LONG, "infinity", "NaN", "'; --", "\x01"),
    "boolean": (None, "maybe"),
    "integer": (None, "0", "-1", "2147483647", "-2147483648", "NaN"),
    "bigint": (None, "0", "-1", "9223372036854775807", "-9223372036854775808"),
    "numeric": (None, "0", "-1", "1e300", "NaN", "Infinity", "-Infinity"),
    "double precision": (None, "0", "-1", "1e300", "NaN", "Infinity", "-Infinity"),
    "timestamp with time zone": (None, "infinity", "-infinity", "294276-12-31 23:59:59Z", "4713-01-02 00:00:00Z BC"),
    "jsonb": (None, "null", "[]", "{}", '""', "1e300", "[null]", "[[]]", '[{"a":1}]', json.dumps(LONG), '"\\ud800"'),
    "uuid[]": (None, "{}", "{NULL}", "{" + str(WRONG) + "}", "{no-uuid}"),
    "text[]": (None, "{}", "{NULL}", '{""}', "{" + LONG + "}"),
}
# What may stand in a JSON document, at the place of any of its values.
BAD_JSON: Final = (None, "", -1, 0, 1e300, 99999999999, "NaN", "infinity", str(WRONG), LONG, [], {}, [None], True)
# A malformed argument (22), one that breaks a rule of a table (23), a broken contract (OD).
NAMED: Final = re.compile("22...|23...|OD00.")
ABSURD: Final = re.compile(r'"?-?(infinity|nan)"?[,}\]]', re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """A populated database and a connection of a caller, all of whose calls are taken back."""

    database: Database
    sides: dict[str, Side]
    functions: dict[str, Function]
    caller: Connection


@pytest.fixture(scope="module")
def world(cluster: PostgresServer, migrated_template: str) -> Iterator[World]:
    with cloned(cluster, migrated_template) as database:
        sides = populate(database)
        caller = database.connect("service_role")
        caller.execute("set statement_timeout = '8s'")
        yield World(database, sides, {function.name: function for function in public_functions(database)}, caller)


def variants(function: Function, arguments: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """The call with one argument, or one value inside a JSON argument, made bad; and which."""
    for name, kind in zip(function.arguments, function.types, strict=True):
        for value in BAD[kind]:
            yield f"{name} = {str(value)[:40]!r}", {**arguments, name: value}
        given = arguments[name]
        if isinstance(given, Jsonb):
            for path, document in mutated(given.obj):
                yield f"{name}{path}", {**arguments, name: json.dumps(document)}


def mutated(document: Any) -> Iterator[tuple[str, Any]]:
    """A document with each of its values in turn made bad, or missing."""
    for path in paths(document):
        for value in BAD_JSON:
            changed = copy.deepcopy(document)
            holder = changed
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = value
            yield f"{list(path)} = {str(value)[:40]!r}", changed


def paths(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in entries:
        yield (*before, key)
        yield from paths(value, (*before, key))


def complaint(connection: Connection, function: Function, arguments: dict[str, object]) -> str:
    """What is wrong with what a call does; empty when it answers or refuses by name."""
    try:
        with connection.transaction(force_rollback=True):
            answer = call(connection, function, arguments)
    except psycopg.Error as error:
        return "" if NAMED.fullmatch(error.sqlstate or "") else f"{error.sqlstate} {error.diag.message_primary}"
    if answer is None and function.result != "void":
        return "NULL"
    return ""


def test_c12_every_bad_argument_is_refused_or_named(world: World) -> None:
    faults = []
    for function in world.functions.values():
        for what, arguments in variants(function, arguments_of(function, world.sides["a"])):
            why = complaint(world.caller, function, arguments)
            faults += [f"{function.name} {what}: {why[:150]}"] if why else []
    assert not faults, "\n".join(faults)


# ------------------------------------------------------------------------------------------- fences

# What proves that the caller owns what it changes: the argument, or the keys in a JSON argument.
FENCES: Final[dict[str, str]] = {
    "adopt_wake": "p_claim_token",
    "close_inbox_item": "p_lease_token",
    "complete_workflow_run": "p_session",
    "escalate_inbox_item": "p_lease_token",
    "fail_workflow_run": "p_session",
    "finish_workflow_notifications": "p_results",
    "heartbeat_workflow_run": "p_session",
    "release_workflow_run": "p_session",
    "report_wakes": "p_reports",
    "report_workflow_usage": "p_session",
    "respawn_workflow_run": "p_claim_token",
}
PROTECTED: Final = (
    "select * from agent_wakes where agent_id = %(busy)s",
    "select * from agent_inbox_items where id = %(leased)s",
    "select * from inbox_item_leases where item_id = %(leased)s",
    "select * from workflow_runs where id = any (%(runs)s)",
    "select * from workflow_claims where run_id = any (%(runs)s)",
    "select * from workflow_notifications where run_id = any (%(runs)s)",
    "select * from budgets where id = %(budget)s",
)


def protected(connection: Connection, side: Side) -> list[Any]:
    """What a live wake, a leased item, held runs and a budget are at this moment."""
    ids = {"busy": side.agents["busy"], "leased": side.items["leased"], "budget": side.budget}
    ids["runs"] = [side.runs[name] for name in ("running", "silent", "dispatched")]  # type: ignore[assignment]
    return [connection.execute(query.encode(), ids).fetchall() for query in PROTECTED]


def wrong_tokens(given: object) -> Iterator[object]:
    """The proof of ownership made wrong, empty, NULL or missing."""
    if not isinstance(given, Jsonb):
        yield from (None, WRONG if isinstance(given, uuid.UUID) else "another-session")
        return
    [entry] = given.obj
    yield from (Jsonb([{**entry, "claim_token": token}]) for token in (None, str(WRONG)))
    yield Jsonb([{name: value for name, value in entry.items() if name != "claim_token"}])


def test_c12_the_table_of_fences_names_every_function_with_a_token(world: World) -> None:
    with_token = {
        function.name
        for function in world.functions.values()
        if function.changes and {"p_claim_token", "p_lease_token", "p_reports", "p_results"} & set(function.arguments)
    }
    assert with_token - {"lease_inbox_items"} == set(FENCES)  # a lease makes its token


@pytest.mark.parametrize("name", FENCES)
def test_c12_no_fence_opens_without_its_token(world: World, name: str) -> None:
    function, side = world.functions[name], world.sides["a"]
    arguments = arguments_of(function, side)
    before = protected(world.caller, side)
    with world.caller.transaction(force_rollback=True):
        call(world.caller, function, arguments)
        assert protected(world.caller, side) != before, "with the right token it does its work"
    for wrong in wrong_tokens(arguments[FENCES[name]]):
        with world.caller.transaction(force_rollback=True):
            answer = call(world.caller, function, {**arguments, FENCES[name]: wrong})
            assert protected(world.caller, side) == before, (wrong, answer)


@pytest.mark.parametrize("name", [name for name, fence in FENCES.items() if fence == "p_session"])
def test_c12_no_run_is_changed_with_another_claims_token(world: World, name: str) -> None:
    function, side = world.functions[name], world.sides["a"]
    before = protected(world.caller, side)
    with world.caller.transaction(force_rollback=True):
        answer = call(world.caller, function, {**arguments_of(function, side), "p_claim_token": WRONG})
        assert protected(world.caller, side) == before, answer


# ------------------------------------------------------------------------------------------- rows of others

PLANTED: Final[dict[str, tuple[object, ...]]] = {
    "timestamp with time zone": ("infinity", "-infinity", "294276-12-31 23:59:59Z", "4713-01-02 00:00:00Z BC"),
    "integer": (2147483647, -2147483648, 0),
    "bigint": (9223372036854775807, -9223372036854775808),
    "numeric": ("NaN", "99999", "-99999"),
    "jsonb": (
        "null",
        "[]",
        '"text"',
        json.dumps({"model_override": LONG, "task_id": 1, "last_failure_reason": [LONG]}),
    ),
    "text": ("", "x" * 100_000, "\x01\u202e"),
    "date": ("infinity", "-infinity", "4713-01-02 BC"),
    "double precision": ("NaN", "Infinity", "-Infinity", "1e300"),
}
# Tables that others may write, and which of their rows are side a's.
OF_OTHERS: Final = {
    "agent_inbox_items": "starts_with(agent_slug, 'a-')",
    "agents": "starts_with(slug, 'a-')",
    "agent_budgets": "agent_id in (select id from public.agents where starts_with(slug, 'a-'))",
    "tasks": "id in (select task_id from public.agent_inbox_items where starts_with(agent_slug, 'a-'))",
    "workflow_runs": "workflow_type = 'a-type'",
    "workflow_agent_routing": "workflow_type = 'a-type'",
    "budgets": "scope_id = 'a-type'",
}
COLUMNS: Final = """
    select column_name as name, data_type as type from information_schema.columns
     where table_schema = 'public' and table_name = %s order by ordinal_position"""


def readers(world: World, side: str) -> Iterator[tuple[str, Function, dict[str, object]]]:
    """Every public read, every phase of sweep and tick, and the calls a daemon makes all the time."""
    always = {"sweep_inbox", "dispatch_workflows", "claim_wakes", "heartbeat_dispatcher_instance", "lease_inbox_items"}
    for function in world.functions.values():
        if not function.changes or function.name in always:
            for name, arguments in calls_of(function, world.sides[side]):
                yield name, function, arguments


def planted(world: World, table: str) -> Iterator[tuple[str, str, object]]:
    for column in world.database.rows(COLUMNS, [table]):
        for value in PLANTED.get(column["type"], ()):
            yield column["name"], column["type"], value


def plant(connection: Connection, table: str, column: str, kind: str, value: object) -> bool:
    """Writes a value into a column of side a's rows; False where the table refuses it."""
    query = sql.SQL("update public.{} set {} = {}::{} where {}").format(
        sql.Identifier(table), sql.Identifier(column), sql.Placeholder(), sql.SQL(kind), sql.SQL(OF_OTHERS[table])
    )
    with contextlib.suppress(psycopg.Error), connection.transaction():
        return connection.execute(query, [value]).rowcount > 0
    return False


@pytest.mark.parametrize("table", OF_OTHERS)
def test_c09_no_value_in_a_row_stops_a_read_a_sweep_or_a_tick(world: World, table: str) -> None:
    faults, written = [], 0
    for column, kind, value in planted(world, table):
        with world.caller.transaction(force_rollback=True):
            if not plant(world.caller, table, column, kind, value):
                continue
            written += 1
            for name, function, arguments in readers(world, "a"):
                why = unreadable(world.caller, function, arguments)
                faults += [f"{column} = {str(value)[:40]}: {name}: {why[:300]}"] if why else []
    assert written > 5
    assert not faults, "\n".join(faults)


def unreadable(connection: Connection, function: Function, arguments: dict[str, object]) -> str:
    """What is wrong with an answer over odd rows: an error, also inside it, or an absurd value; else empty."""
    try:
        with connection.transaction(force_rollback=True):
            answer = call(connection, function, arguments)
    except psycopg.Error as error:
        return f"{error.sqlstate} {error.diag.message_primary}"
    text = json.dumps(answer)
    if answer is None or ABSURD.search(text):
        return f"absurd: {text[:200]}"
    return text[:200] if '"error_code"' in text else ""
