"""Every table by insert, update, select and delete by whoever comes with a token: nothing of another tenant.

All is found in the catalog: a new table of schema public is tried by itself, and wants a row of both tenants in
tests/support/tenants.py. What a function answers beside the rows that YourHQ's tables take is in test_tenants.py.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from tests.sql.test_rights import HIDDEN, SHARED
from tests.support.database import Database, cloned
from tests.support.tenants import WITHOUT_KEY, YOURHQS, A, B, Reference, both_filled, references, slug_references

TENANTS: Final = (A, B)
RIGHTS: Final = "42501"
NO_UUID: Final = "22P02"  # YourHQ's own current_tenant_id() raises it for a claim that is no id
# How a row that names another tenant's is refused: by its rights, by our trigger, by a key.
REFUSALS: Final = {RIGHTS, "OD020", "23503"}
# What YourHQ's own table makes of it: taken, or an agent's only row of that kind is there already.
TAKEN: Final = {None, "23505"}

TABLES: Final = """
    select relname as name, case when relname = 'tenants' then 'id' else attname end as column
      from pg_class as class
      left join pg_attribute on attrelid = class.oid and attname = 'tenant_id'
     where relkind in ('r', 'p', 'v') and relnamespace = 'public'::regnamespace
     order by relname"""
# What was broadcast to whose gateways.
BROADCASTS: Final = """
    select gateway.tenant_id, hashtextextended(message.id::text, 0)::numeric
      from public.gateways as gateway
      join realtime.messages as message on message.topic = dispatcher.dispatcher_gateway_topic(gateway.id)"""


# -- who comes


@dataclass(frozen=True)
class Actor:
    """Whoever comes with a token: the role PostgREST takes, the claims, and the tenant whose rows are theirs."""

    name: str
    role: str
    app_metadata: dict[str, str]
    own: uuid.UUID | None

    @property
    def claims(self) -> Jsonb:
        return Jsonb({"role": self.role, "sub": str(uuid.UUID(int=9)), "app_metadata": self.app_metadata})

    @property
    def others(self) -> list[uuid.UUID]:
        return [tenant for tenant in TENANTS if tenant != self.own]

    @property
    def denials(self) -> set[str]:
        return {RIGHTS, NO_UUID} if self.name == "malformed" else {RIGHTS}


ACTORS: Final = (
    Actor("anon", "anon", {"tenant_id": str(A)}, None),
    Actor("user_of_a", "authenticated", {"tenant_id": str(A)}, A),
    Actor("user_of_b", "authenticated", {"tenant_id": str(B)}, B),
    Actor("without_a_tenant", "authenticated", {}, A),  # the all-zero tenant, as YourHQ has it
    Actor("malformed", "authenticated", {"tenant_id": "everybody"}, None),
)


# -- what they try

INSERT: Final = "insert into {table} overriding system value select (jsonb_populate_record(null::{table}, %s::jsonb)).*"
SELECT: Final = "select {column} as tenant, count(*) from {table} group by 1"
UPDATE: Final = "update {table} set {column} = {column} where {column} = %s"
DELETE: Final = "delete from {table} where {column} = %s"
TAKE: Final = "update {table} set {column} = %s"
GIVE: Final = "update {table} set {column} = %s where {column} = %s"
NAME: Final = "update {table} set {reference} = %s where {column} = %s"
CHANGES_OF_SHARED: Final = (
    "insert into {table} select * from {table}",
    "update {table} set {column} = {column}",
    "delete from {table}",
)


def copy_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row once more, new in everything that may be there only once."""
    fresh = ("id", "slug", "dedup_key", "run_id")
    return {name: str(uuid.uuid4()) if name in fresh and isinstance(row[name], str) else row[name] for name in row}


@dataclass(frozen=True)
class Table:
    name: str
    column: str  # says whose a row is


def table_of(name: str, column: str | None) -> Table:
    """A table of the catalog; one without tenants stands in SHARED, with its reason."""
    assert column or name in SHARED, f"rows of {name} say of no tenant: whose are they?"
    return Table(name, column or SHARED[name].column)


@dataclass(frozen=True)
class Outcome:
    """What came of a statement before it was undone: the error, or its rows and what each tenant then had."""

    error: str | None
    count: int = 0
    rows: tuple[dict[str, Any], ...] = ()
    digests: dict[uuid.UUID, object] | None = None


class World:
    """A database with rows of both tenants in every table, and one transaction in which everything is undone."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.tables = [table_of(**row) for row in database.rows(TABLES)]
        self.connection = database.connect(autocommit=False)
        self.connection.execute("set constraints all immediate")
        self.before = self.digests()

    @cached_property
    def owned(self) -> set[str]:
        """Tables of YourHQ's that were made here, in this database."""
        rows = self.database.rows("select name from dispatcher.owned_objects")
        return {row["name"].removeprefix("public.") for row in rows}

    @cached_property
    def references(self) -> list[Reference]:
        return references(self.database) + WITHOUT_KEY + slug_references(self.database)

    @cached_property
    def digest(self) -> sql.Composed:
        one = (
            "select {column} as tenant, hashtextextended({name} || kept::text, 0)::numeric as hash from {table} as kept"
        )
        parts = [
            sql.SQL(one).format(
                column=sql.Identifier(table.column), name=sql.Literal(table.name), table=sql.Identifier(table.name)
            )
            for table in self.tables
            if table.name not in SHARED
        ]
        query = "select tenant, count(*), sum(hash) from ({}) as rows group by tenant"
        return sql.SQL(query).format(sql.SQL(" union all ").join([*parts, sql.SQL(BROADCASTS)]))

    def digests(self) -> dict[uuid.UUID, object]:
        """Every row of every table and every broadcast to a gateway, as one number for each tenant."""
        return {row["tenant"]: (row["count"], row["sum"]) for row in self.connection.execute(self.digest)}

    def table(self, name: str) -> Table:
        return next(one for one in self.tables if one.name == name)

    def row(self, table: Table, tenant: uuid.UUID) -> dict[str, Any]:
        """A row of a tenant's."""
        query = sql.SQL("select to_jsonb(kept) as row from {} as kept where {} = %s limit 1")
        query = query.format(sql.Identifier(table.name), sql.Identifier(table.column))
        found = self.connection.execute(query, [tenant]).fetchone()
        assert found, f"tests/support/tenants.py writes no row of {table.name} for tenant {tenant}"
        return found["row"]

    def named(self, reference: Reference, tenant: uuid.UUID) -> str:
        return self.row(self.table(reference.target), tenant)[reference.key]

    def takes(self, reference: Reference) -> bool:
        """Whether the table takes a row that names another tenant's: YourHQ's own, and a slug is no row's."""
        return reference.relation in YOURHQS and (reference.relation not in self.owned or reference.key == "slug")

    def count(self, table: Table, tenant: uuid.UUID | None) -> int:
        query = sql.SQL("select count(*) from {} where {} = %s")
        found = self.connection.execute(
            query.format(sql.Identifier(table.name), sql.Identifier(table.column)), [tenant]
        ).fetchone()
        assert found
        return found["count"]

    def attempt(self, actor: Actor, statement: str, table: Table, *values: object, reference: str = "") -> Outcome:
        """Runs a statement as PostgREST does, looks at what became of everybody's rows, and undoes it."""
        names = {"column": table.column, "reference": reference}
        identifiers = {name: sql.Identifier(value) for name, value in names.items()}
        query = sql.SQL(statement).format(table=sql.Identifier("public", table.name), **identifiers)
        enter = "select set_config('role', %s, true), set_config('request.jwt.claims', %s::jsonb::text, true)"
        try:
            with self.connection.transaction(force_rollback=True):
                self.connection.execute(enter, [actor.role, actor.claims])
                cursor = self.connection.execute(
                    query, [Jsonb(one) if isinstance(one, dict) else one for one in values]
                )
                rows = tuple(cursor.fetchall()) if cursor.description else ()
                self.connection.execute("reset role")
                return Outcome(None, cursor.rowcount, rows, self.digests())
        except psycopg.Error as error:
            return Outcome(error.sqlstate)

    def is_untouched(self, actor: Actor, outcome: Outcome) -> bool:
        """Whether every row of every other tenant stands as before. What raised an error is undone as a whole."""
        after = self.before if outcome.digests is None else outcome.digests
        theirs = (self.before.keys() | after.keys()) - {actor.own}
        return all(after.get(tenant) == self.before.get(tenant) for tenant in theirs)


@pytest.fixture(scope="module", params=["supabase", "yourhq"])
def world(
    request: pytest.FixtureRequest, cluster: PostgresServer, migrated_template: str, yourhq_template: str
) -> Iterator[World]:
    template = migrated_template if request.param == "supabase" else yourhq_template
    with cloned(cluster, template) as database:
        both_filled(database)
        yield World(database)


# -- what must come of it

Tries = Iterator[tuple[str, Outcome, bool]]


def reading(world: World, actor: Actor, table: Table) -> Tries:
    """All of the own rows and no other, or nothing at all."""
    seen = world.attempt(actor, SELECT, table)
    found = {row["tenant"]: row["count"] for row in seen.rows}
    if actor.own is None or table.name in HIDDEN:
        yield "select", seen, found == {} and seen.error in {None, *actor.denials}
    else:
        yield "select", seen, found == {actor.own: world.count(table, actor.own)}


def writing(world: World, actor: Actor, table: Table) -> Tries:
    """No row of another tenant is changed, deleted or made; no own one is given away, and none is taken."""
    for tenant in actor.others:
        for name, statement in (("update theirs", UPDATE), ("delete theirs", DELETE)):
            done = world.attempt(actor, statement, table, tenant)
            yield name, done, done.count == 0 and done.error in {None, *actor.denials}
        made = world.attempt(actor, INSERT, table, copy_of(world.row(table, tenant)))
        yield "insert theirs", made, made.error in actor.denials
        given = world.attempt(actor, GIVE, table, tenant, actor.own)
        yield "give away", given, given.error in {*REFUSALS, *actor.denials} or given.count == 0
    for name, statement in (("take all", TAKE), ("delete all", "delete from {table} where %s is not null")):
        done = world.attempt(actor, statement, table, actor.own or B)
        yield name, done, done.error in {None, *actor.denials} and done.count <= world.count(table, actor.own)


def sharing(world: World, actor: Actor, table: Table) -> Tries:
    """What belongs to no tenant is written by nobody."""
    for statement in CHANGES_OF_SHARED:
        done = world.attempt(actor, statement, table)
        yield statement.split()[0], done, done.error == RIGHTS


def naming(world: World, actor: Actor, reference: Reference) -> Tries:
    """A row of the own tenant names one of another's: refused, unless the table is YourHQ's own, and writable."""
    own = actor.own or B
    [other] = [tenant for tenant in TENANTS if tenant != own]
    table, named = world.table(reference.relation), world.named(reference, other)
    row = copy_of(world.row(table, own)) | {reference.column: named}
    done = {
        "insert": world.attempt(actor, INSERT, table, row),
        "update": world.attempt(actor, NAME, table, named, own, reference=reference.column),
    }
    expected = actor.denials if actor.own is None else TAKEN if world.takes(reference) else REFUSALS
    for name, outcome in done.items():
        is_nothing = name == "update" and actor.own is None and outcome.count == 0
        yield f"{name} with {reference.column} of theirs", outcome, outcome.error in expected or is_nothing


def tries(world: World, actor: Actor, tables: list[Table]) -> Tries:
    """Everything that is tried: its name, what came of it, and whether that is right."""
    for table in tables:
        for part in (sharing,) if table.name in SHARED else (reading, writing):
            for name, outcome, is_right in part(world, actor, table):
                yield f"{table.name}: {name}", outcome, is_right
    for reference in (one for one in world.references if world.table(one.relation) in tables):
        for name, outcome, is_right in naming(world, actor, reference):
            yield f"{reference.relation}: {name}", outcome, is_right


def wrongs(world: World, actor: Actor, tables: list[Table]) -> dict[str, str]:
    """What came out otherwise than it must, or left a row of another tenant otherwise than it was."""
    return {
        name: outcome.error or f"done: {outcome.count} rows"
        for name, outcome, is_right in tries(world, actor, tables)
        if not is_right or not world.is_untouched(actor, outcome)
    }


@pytest.mark.parametrize("actor", ACTORS, ids=lambda actor: actor.name)
def test_s2_s3_s6_s11_nobody_reaches_a_row_of_another_tenant(world: World, actor: Actor) -> None:
    assert wrongs(world, actor, world.tables) == {}
    assert world.digests() == world.before  # every try was undone


def test_there_is_something_to_try(world: World) -> None:
    assert len(world.tables) > 30
    assert len(world.references) > 40
    assert {"tenants", "tasks", "agent_wakes", "workflow_runs", "budgets"} <= {table.name for table in world.tables}


# -- that it would be seen


@dataclass(frozen=True)
class Hole:
    """What opens a table, who then comes through, and which try sees it."""

    table: str
    statement: str
    actor: str
    seen_as: str


HOLES: Final = (
    Hole(
        "agent_wakes", "create policy hole on {table} for select to authenticated using (true)", "user_of_b", "select"
    ),
    Hole("agent_wakes", "drop policy {policy} on {table}", "user_of_a", "select"),
    Hole(
        "departments",
        "grant insert on {table} to authenticated; alter table {table} disable row level security",
        "without_a_tenant",
        "insert theirs",
    ),
    Hole(
        "tasks",
        "grant update on {table} to authenticated; create policy hole on {table} to authenticated using (true)",
        "user_of_b",
        "take all",
    ),
    Hole(
        "agents",
        "grant select, delete on {table} to anon; create policy hole on {table} to anon using (true)",
        "anon",
        "delete theirs",
    ),
    Hole(
        "workflow_approvals",
        "grant insert on {table} to authenticated; create policy hole on {table} to authenticated using (true);"
        " alter table {table} disable trigger dispatcher_tenant",
        "user_of_b",
        "insert with run_id of theirs",
    ),
    Hole("workflow_run_transitions", "grant update on {table} to authenticated", "user_of_a", "update"),
)


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: f"{hole.table}-{hole.actor}")
def test_a_hole_would_be_seen(world: World, hole: Hole) -> None:
    """A matrix of which every statement failed for a reason of its own would be worth nothing."""
    actor = next(one for one in ACTORS if one.name == hole.actor)
    query = "select min(policyname) from pg_policies where tablename = %s and 'authenticated' = any (roles)"
    policy = world.database.value(query, [hole.table])
    names = {"table": sql.Identifier(hole.table), "policy": sql.Identifier(policy or "")}
    assert wrongs(world, actor, [world.table(hole.table)]) == {}
    with world.connection.transaction(force_rollback=True):
        world.connection.execute(sql.SQL(hole.statement).format(**names))
        found = wrongs(world, actor, [world.table(hole.table)])
    assert f"{hole.table}: {hole.seen_as}" in found
