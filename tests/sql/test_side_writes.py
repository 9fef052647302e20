"""C10: whatever a neighbour does to the tables that tell of things, what they tell of is done and the fault noted."""

from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Connection, Database, cloned
from tests.support.world import Function, Side, call, calls_of, populate, public_functions

# Where rows only tell of what was done.
TELLING: Final = (
    "public.notifications",
    "public.inbox_item_marks",
    "public.dispatcher_faults",
    "public.workflow_run_events",
    "public.budget_events",
    "public.workflow_audit_log",
    "public.workflow_notifications",
    "realtime.messages",
)
RAISES: Final = """
    create function public.neighbour_raises() returns trigger language plpgsql as
    $$ begin raise exception 'pg_net is switched off'; end $$"""
# What these functions write is their work itself.
OWN_WORK: Final = {
    "public.workflow_notifications": {
        "claim_workflow_notifications",
        "dispatch_workflows pruned",
        "finish_workflow_notifications",
    },
    "public.dispatcher_faults": {"sweep_inbox pruned"},
}
# Supabase owns this table: nobody else may put a deferred trigger on it.
IMPOSSIBLE: Final = {("realtime.messages", "deferred trigger")}
# realtime.send contains what its insert raises, as a warning.
WARNED: Final = {"public.dispatcher_faults", "realtime.messages"}
FAULTS: Final = {
    "row trigger": "create trigger bad before insert or update on {0} for each row"
    " execute function public.neighbour_raises()",
    "statement trigger": "create trigger bad after insert or update on {0} execute function public.neighbour_raises()",
    "deferred trigger": "create constraint trigger bad after insert or update on {0} deferrable initially deferred"
    " for each row execute function public.neighbour_raises()",
    "check": "alter table {0} add constraint bad check (false) not valid",
    "no right": "revoke insert, update on {0} from service_role",
}


@pytest.fixture(scope="module")
def world(cluster: PostgresServer, migrated_template: str) -> Iterator[tuple[Database, Side, list[Function]]]:
    with cloned(cluster, migrated_template) as database:
        side = populate(database)["a"]
        # One failure stalls, a day of one wake, a chain of one: whatever is told of is due.
        database.execute("update dispatcher_settings set max_consecutive_failures = 1, max_wake_chain = 1")
        database.execute("update agent_inbox_items set max_attempts = 1 where id = %s", [side.items["leased"]])
        database.execute(
            "insert into inbox_item_origins (item_id, tenant_id, chain_depth) values (%s, %s, 3)",
            [side.items["queued"], side.tenant],
        )
        yield database, side, public_functions(database)


def verdict(connection: Connection, function: Function, arguments: dict[str, object]) -> tuple[Any, bool]:
    """What a call did, as far as its caller acts on it, and whether a fault was noted; all is taken back."""
    with connection.transaction(force_rollback=True):
        connection.execute("set local role service_role")
        answer = call(connection, function, arguments)
        connection.execute("set constraints all immediate")  # as a commit would
        connection.execute("reset role")
        [noted] = connection.execute("select count(*) as faults from public.dispatcher_faults").fetchall()
        return told_of(answer), noted["faults"] > 0


def told_of(answer: Any) -> Any:
    """The part of an answer that says what was done."""
    if isinstance(answer, list):
        return [told_of(entry) for entry in answer]
    if not isinstance(answer, dict):
        return answer if isinstance(answer, bool) else None
    kept = (
        "code",
        "applied",
        "granted",
        "count",
        "state",
        "skip_reason",
        "stopped",
        "dispatched",
        "error_code",
        "status",
    )
    inside = {name: told_of(answer[name]) for name in ("results", "claims", "errors") if name in answer}
    return {name: answer[name] for name in kept if name in answer} | inside


def changing_calls(functions: list[Function], side: Side) -> Iterator[tuple[str, Function, dict[str, object]]]:
    for function in functions:
        if function.changes:
            for name, arguments in calls_of(function, side):
                yield name, function, arguments


def written_by(connection: Connection, table: str, function: Function, arguments: dict[str, object]) -> bool:
    """Whether an undisturbed call writes to a table."""
    with connection.transaction(force_rollback=True):
        before = connection.execute(f"select * from {table}".encode()).fetchall()
        connection.execute("set local role service_role")
        call(connection, function, arguments)
        connection.execute("reset role")
        return connection.execute(f"select * from {table}".encode()).fetchall() != before


@pytest.mark.parametrize(
    ("table", "fault"), [(table, fault) for table in TELLING for fault in FAULTS if (table, fault) not in IMPOSSIBLE]
)
def test_c10_what_is_told_about_is_done_all_the_same(
    world: tuple[Database, Side, list[Function]], table: str, fault: str
) -> None:
    database, side, functions = world
    calls = [one for one in changing_calls(functions, side) if one[0] not in OWN_WORK.get(table, ())]
    connection = database.connect()
    usual = {name: verdict(connection, function, arguments)[0] for name, function, arguments in calls}
    writers = {name for name, function, arguments in calls if written_by(connection, table, function, arguments)}
    wrong = []
    with connection.transaction(force_rollback=True):
        connection.execute(RAISES)
        connection.execute(FAULTS[fault].format(table).encode())
        for name, function, arguments in calls:
            try:
                done, noted = verdict(connection, function, arguments)
            except psycopg.Error as error:
                wrong.append(f"{name}: {error.sqlstate} {error.diag.message_primary}")
                continue
            wrong += [f"{name}: {done} and not {usual[name]}"] if done != usual[name] else []
            lost = name in writers and table not in WARNED and not written_by(connection, table, function, arguments)
            wrong += [f"{name}: no fault was noted"] if lost and not noted else []
    assert not wrong, "\n".join(wrong)


def test_c10_a_broadcast_that_raises_costs_nothing(world: tuple[Database, Side, list[Function]]) -> None:
    database, side, functions = world
    connection = database.connect()
    calls = list(changing_calls(functions, side))
    usual = {name: verdict(connection, function, arguments)[0] for name, function, arguments in calls}
    with connection.transaction(force_rollback=True):
        connection.execute(
            "create or replace function realtime.send(payload jsonb, event text, topic text,"
            " private boolean default true) returns void language plpgsql as"
            " $$ begin raise exception 'no realtime'; end $$"
        )
        outcomes = {name: verdict(connection, function, arguments) for name, function, arguments in calls}
    assert {name: done for name, (done, _) in outcomes.items()} == usual
    assert outcomes["heartbeat_dispatcher_instance"][1], "the canary's fault is noted"
