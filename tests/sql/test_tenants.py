"""Two tenants in one database: nothing of one is read, written, blocked or slowed by what the other may write.

YourHQ lets every signed-in user write rows of the own tenant that name another tenant's agent, task or gateway. Such
rows are made here for every foreign key the catalog has, and every public function is called beside them.
"""

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations
from tests.conftest import MIGRATIONS
from tests.sql.conftest import Dispatcher
from tests.support.database import Connection, Database, cloned
from tests.support.seed import Seed
from tests.support.tenants import (
    WITHOUT_KEY,
    YOURHQS,
    A,
    B,
    Reference,
    fill_for_both,
    fill_the_rest,
    references,
    slug_references,
)
from tests.support.world import Function, Side, call, calls_of, populate, public_functions

# Functions that read a table past its view, each mention bound to the tenant of one row of agents: the hot path.
HOT: Final = {"read_gate_facts", "lock_agent", "wake_grant", "write_wake", "agents_with_work", "gateway_backlog"}
# What says nothing of a tenant or an instance: whoever calls shows the token of the lease.
BY_TOKEN_ALONE: Final = {"close_inbox_item", "escalate_inbox_item"}

# -- one place where tenants meet


def test_s11_functions_read_tables_of_yourhqs_through_their_views_alone(database: Database) -> None:
    views = [
        row["relname"]
        for row in database.rows(
            "select relname from pg_class where relkind = 'v' and relnamespace = 'dispatcher'::regnamespace"
            " and to_regclass('public.' || relname) is not null"
        )
    ]
    assert {"agents", "agent_inbox_items", "agent_budgets", "agent_usage"} <= set(views)
    names = [rf"public\.{view}" for view in views] + [r"dispatcher\.inbox_due_of_pair"]
    reads = re.compile(rf"(?:from|join|update|using|,)\s+(?:only\s+)?({'|'.join(names)})\b(.*)", re.DOTALL)
    sources = "select proname, prosrc from pg_proc where pronamespace::regnamespace::text in ('public', 'dispatcher')"
    past = set()
    for row in database.rows(sources):
        for found in reads.finditer(row["prosrc"]):
            bound = re.split(r"\b(?:from|join)\b", found[2])[0]
            is_known = row["proname"] in HOT or row["proname"].startswith("tenant_of_")  # the triggers that refuse
            if not is_known or ("tenant_id" not in bound and found[1] != "public.agents"):
                past.add((row["proname"], found[1]))
    # What YourHQ's own callers call is theirs, also where we made it.
    assert {name for name, _ in past} <= {"lease_inbox_item", "complete_inbox_item", "fail_inbox_item"}


# -- rows of a tenant that name the other's


@dataclass
class Pair:
    """The same world twice: as it is, and with rows of tenant B that name A's agents, tasks and gateways."""

    plain: Database
    crossed: Database
    side: Side
    functions: list[Function]


@pytest.fixture(scope="module", params=["supabase", "yourhq"])
def pair(
    request: pytest.FixtureRequest, cluster: PostgresServer, migrated_template: str, yourhq_template: str
) -> Iterator[Pair]:
    template = migrated_template if request.param == "supabase" else yourhq_template
    with cloned(cluster, template) as world:
        sides = populate(world)
        fill_for_both(world, sides)
        functions = public_functions(world)
        world.close()
        with cloned(cluster, world.name) as plain, cloned(cluster, world.name) as crossed:
            for reference in references(crossed):
                if reference.relation in YOURHQS:
                    plant(crossed, reference)
            for reference in slug_references(crossed):
                if reference.relation in YOURHQS:
                    name_by_slug(crossed, reference)
            yield Pair(plain, crossed, sides["a"], functions)


def plant(crossed: Database, reference: Reference) -> None:
    """Copies every row of B's for every row of A's that the column may name: the copy says B and names A's."""
    query = """
        insert into public.{relation}
        select (jsonb_populate_record(null::public.{relation}, to_jsonb(theirs) || jsonb_build_object(
                 'id', gen_random_uuid(), 'dedup_key', gen_random_uuid(), 'run_id', gen_random_uuid(),
                 'slug', gen_random_uuid(), {column}, named.id, 'created_at', now() - interval '1 hour'))).*
          from public.{relation} as theirs, public.{target} as named
         where theirs.tenant_id = {b} and named.tenant_id = {a}
            on conflict do nothing"""
    with crossed.connect() as connection, connection.transaction():
        connection.execute("set local session_replication_role = replica")
        names = {"relation": sql.Identifier(reference.relation), "target": sql.Identifier(reference.target)}
        values = {"column": sql.Literal(reference.column), "a": sql.Literal(A), "b": sql.Literal(B)}
        copied = connection.execute(sql.SQL(query).format(**names, **values)).rowcount
    assert copied > 0, reference


def name_by_slug(crossed: Database, reference: Reference) -> None:
    """Every row of B's, also one for B's own agent, says the slug of an agent of A's."""
    query = """
        update public.{relation} as theirs
           set {column} = (select slug from agents where tenant_id = {a} order by md5(theirs.id::text || slug) limit 1)
         where tenant_id = {b}"""
    with crossed.connect() as connection, connection.transaction():
        connection.execute("set local session_replication_role = replica")
        names = {"relation": sql.Identifier(reference.relation), "column": sql.Identifier(reference.column)}
        values = {"a": sql.Literal(A), "b": sql.Literal(B)}
        assert connection.execute(sql.SQL(query).format(**names, **values)).rowcount > 0, reference


COPY: Final = """
    insert into public.{relation} overriding system value
    select (jsonb_populate_record(null::public.{relation}, kept.row || jsonb_build_object({column}::text, %s::uuid))).*
      from kept limit 1"""


def is_refused(connection: Connection, reference: Reference, named: uuid.UUID) -> bool:
    """Whether a row of B's, written anew, may not name that row."""
    names = {"relation": sql.Identifier(reference.relation), "column": sql.Literal(reference.column)}
    try:
        with connection.transaction():
            connection.execute(sql.SQL(COPY).format(**names), [named])
    except psycopg.Error as error:
        if error.sqlstate == "OD020":
            return True
        raise
    return False


def test_s2_s3_s11_a_table_of_ours_refuses_a_row_that_names_another_tenant(
    cluster: PostgresServer, migrated_template: str, yourhq_template: str
) -> None:
    """For every foreign key the catalog has, so that a new table is taken up by itself. YourHQ's own are theirs."""
    for template in (migrated_template, yourhq_template):
        with cloned(cluster, template) as database:
            sides = populate(database)
            fill_for_both(database, sides)
            fill_the_rest(database, sides["a"])
            fill_the_rest(database, sides["c"])
            ours = [row["name"] for row in database.rows("select name from dispatcher.owned_objects")]
            found = {one: refuses(database, one) for one in references(database) + WITHOUT_KEY}
            assert len(found) > 25
            expected = {one: f"public.{one.relation}" in ours or one.relation not in YOURHQS for one in found}
            assert {one: refused for one, refused in found.items() if refused != expected[one]} == {}


def refuses(database: Database, reference: Reference) -> bool:
    """Whether a row of B's that is written anew may not name a row of A's, while it may name one of B's."""
    connection = database.connect(autocommit=False)
    names = {"relation": sql.Identifier(reference.relation), "column": sql.Identifier(reference.column)}

    def run(query: str, *values: object) -> psycopg.Cursor[dict[str, Any]]:
        text = sql.SQL(query).format(target=sql.Identifier(reference.target), **names)
        return connection.execute(text, values or None)

    [of_a, of_b] = [
        run("select id from public.{target} where tenant_id = %s limit 1", tenant).fetchall()[0]["id"]
        for tenant in (A, B)
    ]
    run("set session_replication_role = replica")
    run("create temp table kept (row jsonb) on commit drop")
    run("insert into kept select to_jsonb(one) from public.{relation} as one where tenant_id = %s", B)
    # A copy must differ from what stands there by its tenants alone.
    run("delete from public.{relation} where tenant_id = %s or {column} = %s", B, of_a)
    if reference.relation == reference.target:
        back = (
            "jsonb_populate_record(null::public.{relation}, row || jsonb_build_object('id', %s::uuid, 'slug', 'back'))"
        )
        run(f"insert into public.{{relation}} select ({back}).* from kept limit 1", of_b)
        run("update kept set row = row || jsonb_build_object('id', gen_random_uuid(), 'slug', 'copy')")
    run("set session_replication_role = origin")
    assert not is_refused(connection, reference, of_b), reference
    run("set session_replication_role = replica")
    run("delete from public.{relation} where tenant_id = %s and {column} = %s", B, of_b)
    run("set session_replication_role = origin")
    refused = is_refused(connection, reference, of_a)
    connection.rollback()
    connection.close()
    return refused


TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*")
UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
CLOCK: Final = re.compile(r"(^ms$|seconds|_in$|_for$|^age$|^at$|_after$)")


def known_ids(database: Database) -> set[str]:
    return set(UUID.findall(str(state_of(database.admin, tables(database), A))))


def comparable(value: Any, known: set[str], key: str = "") -> Any:
    """A value without what differs from one call to the next: the clock, and ids that the call has made."""
    if isinstance(value, Mapping):
        return {name: comparable(one, known, name) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one, known, key) for one in value]
    if isinstance(value, int | float) and CLOCK.search(key):
        return "a number"
    if value is None or isinstance(value, bool | int | float):
        return value
    text = TIME.sub("a time", str(value))
    return UUID.sub(lambda found: found[0] if found[0] in known else "a new id", text)


def tables(database: Database) -> list[str]:
    return [
        row["relname"]
        for row in database.rows(
            "select relname from pg_class join pg_attribute on attrelid = pg_class.oid and attname = 'tenant_id'"
            " where relkind = 'r' and relnamespace = 'public'::regnamespace order by relname"
        )
    ]


def state_of(connection: Connection, names: list[str], tenant: uuid.UUID) -> dict[str, list[Any]]:
    """Every row of a tenant, by table."""
    one = (
        "select {name} as name, jsonb_agg(to_jsonb(row) order by to_jsonb(row)::text) as rows"
        " from public.{table} as row where tenant_id = {tenant}"
    )
    parts = [
        sql.SQL(one).format(name=sql.Literal(name), table=sql.Identifier(name), tenant=sql.Literal(tenant))
        for name in names
    ]
    return {row["name"]: row["rows"] or [] for row in connection.execute(sql.SQL(" union all ").join(parts))}


def sorted_state(state: Mapping[str, list[Any]], known: set[str]) -> dict[str, list[str]]:
    return {name: sorted(str(comparable(row, known)) for row in rows) for name, rows in state.items()}


def outcome(connection: Connection, function: Function, arguments: dict[str, object]) -> Any:
    """What a call answers: its answer, or the error it raises."""
    try:
        with connection.transaction():
            return call(connection, function, arguments)
    except psycopg.Error as error:
        return {"error": error.sqlstate, "message": str(error).splitlines()[0]}


def test_s2_s3_s5_s11_no_function_minds_rows_of_another_tenant(pair: Pair) -> None:
    """Answers and what is written are the same with and without them; they themselves are left alone."""
    known, names = known_ids(pair.plain), tables(pair.plain)
    differs, touched = {}, {}
    for function in pair.functions:
        for name, arguments in calls_of(function, pair.side):
            found = []
            for database in (pair.plain, pair.crossed):
                connection = database.connect("service_role", autocommit=False)
                before = state_of(connection, names, B)
                answer = comparable(outcome(connection, function, arguments), known)
                connection.execute("reset role")
                found.append((answer, sorted_state(state_of(connection, names, A), known)))
                if before != state_of(connection, names, B):
                    touched[name] = database.name
                connection.rollback()
                connection.close()
            if found[0] != found[1]:
                differs[name] = found
    assert differs == {}
    assert touched == {}


def test_s11_no_function_of_one_tenant_touches_the_other(pair: Pair) -> None:
    """Every function, called for tenant B with everything else of A's: A's rows stay, and nothing of them is told."""
    names = tables(pair.plain)
    other = foreign_scope(pair)
    touched, told = [], []
    for function in pair.functions:
        if not {"p_tenant_id", "p_instance_id"} & set(function.arguments):
            assert function.name in BY_TOKEN_ALONE or not function.arguments, function.name
            continue
        for name, arguments in calls_of(function, pair.side):
            connection = pair.plain.connect("service_role", autocommit=False)
            before = state_of(connection, names, A)
            crossed = arguments | {key: other[key] for key in other.keys() & arguments.keys()}
            answer = outcome(connection, function, crossed)
            connection.execute("reset role")
            if before != state_of(connection, names, A):
                touched.append(name)
            if "secret-of-a" in str(answer):
                told.append(name)
            connection.rollback()
            connection.close()
    assert touched == []
    assert told == []


def foreign_scope(pair: Pair) -> dict[str, object]:
    instance = pair.plain.value("select id from dispatcher_instances where tenant_id = %s", [B])
    return {"p_tenant_id": B, "p_instance_id": instance, "p_gateway": "apart"}


# -- many rows of the other tenant


FLOOD: Final = 20_000
READ: Final = """
    select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::integer
      from pg_stat_xact_user_tables where relname = 'agent_inbox_items'"""


@pytest.fixture(scope="module")
def flooded(pair: Pair, cluster: PostgresServer) -> Iterator[Database]:
    """The crossed world, where B has written many items, of every state, for one agent of A's."""
    pair.crossed.close()
    with cloned(cluster, pair.crossed.name) as database:
        with database.connect() as connection, connection.transaction():
            connection.execute("set local session_replication_role = replica")
            connection.execute(
                "insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, status, dedup_key,"
                " created_at, attempt_count, leased_at, leased_until, failed_at, completed_at)"
                " select %s, agents.id, 'x', 'heartbeat', (enum_range(null::inbox_item_status))[n %% 5 + 1], n || slug,"
                " now() - interval '3 days', n %% 4, now(), now() + interval '1 hour', now(), now()"
                " from agents, generate_series(1, %s) as n where agents.tenant_id = %s",
                [B, FLOOD, A],
            )
        database.execute("analyze")
        yield database


def test_s4_no_function_reads_the_rows_of_another_tenant(pair: Pair, flooded: Database) -> None:
    """By the rows that are read, which no load of this machine changes."""
    read = {}
    for function in pair.functions:
        for name, arguments in calls_of(function, pair.side):
            connection = flooded.connect("service_role", autocommit=False)
            before = connection.execute(READ).fetchone()
            outcome(connection, function, arguments)
            after = connection.execute(READ).fetchone()
            assert before is not None
            assert after is not None
            read[name] = after["coalesce"] - before["coalesce"]
            connection.rollback()
            connection.close()
    assert {name: rows for name, rows in read.items() if rows > FLOOD / 100} == {}


def test_s2_a_user_reaches_no_agent_of_another_tenant(cluster: PostgresServer, yourhq_template: str) -> None:
    """As it was found: a user of B puts a text into the inbox of A's agent, with a real claim, on YourHQ's tables."""
    with cloned(cluster, yourhq_template) as database:
        seed = Seed(database)
        agent, theirs = seed.agent("ada"), seed.agent("bob", "theirs", B)
        user = database.connect("authenticated", {"app_metadata": {"tenant_id": str(B)}})
        insert = "insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, summary, dedup_key)"
        for number, name in enumerate((agent, theirs)):
            user.execute(f"{insert} values (%s, %s, 'x', 'heartbeat', 'injected', %s)".encode(), [B, name, str(number)])
        daemon = Dispatcher(database)
        assert daemon.claim(agent)["skip_reason"] == "no_actionable_work"
        leased = daemon.call("lease_inbox_items", p_tenant_id=A, p_agent_slug="ada")
        assert leased["items"] == []
        [bobs] = daemon.call("lease_inbox_items", p_tenant_id=B, p_agent_slug="bob")["items"]
        assert bobs["summary"] == "injected"


@pytest.mark.own_database
def test_s6_a_database_of_an_earlier_build_reads_the_right_claim_once_migrated(database: Database) -> None:
    """There every signed-in user was taken for the default tenant."""
    database.execute(
        "create or replace function current_tenant_id() returns uuid language sql stable set search_path = '' as"
        " $$ select coalesce((nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'tenant_id')::uuid,"
        " '00000000-0000-0000-0000-000000000000') $$"
    )
    user = database.connect("authenticated", {"app_metadata": {"tenant_id": str(B)}})
    assert user.execute("select public.current_tenant_id() as tenant").fetchall() == [{"tenant": A}]
    apply_migrations(database.url, MIGRATIONS)
    assert user.execute("select public.current_tenant_id() as tenant").fetchall() == [{"tenant": B}]


# -- what one row may do


ODD_TIMES: Final = ("infinity", "-infinity", "294276-12-31", "4713-01-01 BC")


def test_s1_s9_one_odd_row_of_a_user_is_one_odd_line(cluster: PostgresServer, yourhq_template: str) -> None:
    """As it was found: a signed-in user writes rows no clock has shown, and every function goes on for everybody."""
    with cloned(cluster, yourhq_template) as database:
        side = populate(database)["a"]
        functions = public_functions(database)
        user = database.connect("authenticated", {"app_metadata": {"tenant_id": str(A)}})
        for number, moment in enumerate(ODD_TIMES):
            for status in ("pending", "leased", "failed", "done"):
                user.execute(
                    b"insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, status, dedup_key,"
                    b" created_at, leased_at, leased_until, failed_at, completed_at, updated_at)"
                    b" values (%(a)s, %(agent)s, 'x', 'heartbeat', %(status)s, %(key)s, %(at)s, %(at)s, %(at)s, %(at)s,"
                    b" %(at)s, %(at)s)",
                    {"a": A, "agent": side.agents["idle"], "status": status, "key": f"{number} {status}", "at": moment},
                )
        failed = {}
        for function in functions:
            for name, arguments in calls_of(function, side):
                connection = database.connect("service_role", autocommit=False)
                connection.execute("select")  # opens the transaction that is undone
                answer = outcome(connection, function, arguments)
                if isinstance(answer, dict) and ("error" in answer or answer.get("code") == "error"):
                    failed[name] = answer
                connection.rollback()
                connection.close()
        assert failed == {}
        daemon = Dispatcher(database, gateway="shared", max_concurrent_wakes=50)
        answer = daemon.claim(side.agents["idle"])
        assert answer["granted"], answer["skip_reason"]


def test_s8_no_row_makes_an_answer_large(cluster: PostgresServer, yourhq_template: str) -> None:
    """As it was found: sixty blockers with titles of megabytes, an override of many, a text of the same size."""
    large = 3_000_000
    with cloned(cluster, yourhq_template) as database:
        seed = Seed(database)
        agent = seed.agent("ada")
        daemon = Dispatcher(database)
        task = seed.task("t" * large, description="d" * large)
        for _ in range(60):
            blocker = {"source_task_id": task, "target_task_id": seed.task("b" * large), "relation_type": "blocked_by"}
            seed.insert("task_relations", tenant_id=A, **blocker)
        context = {"model_override": "m" * large, "thinking_override": ["t" * large]}
        item = seed.item(agent, "task_assignment", task_id=task, summary="s" * large, context=context)
        grant = daemon.claim(agent, item)
        assert grant["granted"]
        assert len(str(grant)) < 60_000
        daemon.started(grant)
        leased = daemon.call("lease_inbox_items", p_tenant_id=A, p_agent_slug="ada")
        assert len(leased["items"]) == 1
        assert len(str(leased)) < 220_000
        assert leased["items"][0]["context"]["context_too_large"] > 2 * large
        database.execute("update agent_inbox_items set context = jsonb_build_object('last_failure_reason', summary)")
        listed = daemon.call(
            "list_inbox_items", p_tenant_id=A, p_gateway="local", p_agent=None, p_status=None, p_limit=10
        )
        assert len(str(listed)) < 5_000
