"""Who may what: every table, view, sequence and function of ours, with every role, found in the catalog.

Both databases of the project's promise: a fresh Supabase project, where default privileges open whatever is created
to anon and authenticated by name, and one that YourHQ made. Field failure 27.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
import pytest
from psycopg import sql

from dispatcher.local.postgres import PostgresServer
from tests.conftest import YOURHQ
from tests.support.database import Connection, Database, cloned

TENANT: Final = uuid.UUID("11111111-1111-1111-1111-111111111111")
NEIGHBOUR: Final = uuid.UUID("22222222-2222-2222-2222-222222222222")
STRANGER: Final = uuid.UUID("33333333-3333-3333-3333-333333333333")

# What a signed-in user may change, and why.
WRITABLE: Final = {
    "agent_inbox_items": "the dashboard's Retry and Dismiss act with the user's own token, as YourHQ's do",
}
# What a signed-in user may call, and why.
CALLABLE: Final = {"current_tenant_id": "row level security calls it with the caller's rights"}
# What runs with its owner's rights, and why.
DEFINERS: Final = {
    "send_gateway_hint": "whoever inserts an item may not send broadcasts; the hint must go out all the same",
    "hint_inbox_insert": "whoever inserts an item may not send broadcasts",
    "hint_inbox_update": "it marks what was reopened, which whoever updates an item may not touch",
    "note_fault": "a hint that fails in the statement of a person is noted where that person may not write",
    "hint_agent_change": "whoever updates an agent may not send broadcasts",
    "hint_budget_change": "whoever updates a budget may not send broadcasts",
    "hint_workflow_daemons": "whoever queues a run sees neither the instances nor may send to them",
    "hint_workflow_insert": "the same, as the trigger",
    "hint_workflow_update": "the same, as the trigger",
    "hint_workflow_rules": "whoever changes a route or a budget may not send broadcasts",
    "write_run_events": "nobody else may write events of runs",
    "book": "nobody else may write into the books",
    "book_new_runs": "the same, as the trigger",
    "book_changed_runs": "the same, as the trigger",
    "audit_workflow_action": "nobody else may write into the audit log",
    "broadcast_budget_event": "whoever reports a cost may not send broadcasts",
    "sessions_of": "what a session does, and since when, not every role may see",
}
# Relations no signed-in user reads, and why.
HIDDEN: Final = {
    "dispatcher_gateways": "rows that exist to be locked",
    "inbox_item_leases": "lease tokens",
    "inbox_item_marks": "bookkeeping of the sweep",
    "agent_resumptions": "the same",
    "dispatcher_settings": "settings of the daemons",
    "dispatcher_faults": "told by the daemons",
    "workflow_claims": "claim tokens",
    "workflow_notifications": "an outbox between daemons",
    "workflow_respawns": "the same",
}

RELATIONS: Final = """
    select class.relnamespace::regnamespace::text as schema, class.relname as name, class.relkind::text as kind,
           class.relrowsecurity as secured,
           coalesce(class.reloptions, '{}') as options, obj_description(class.oid, 'pg_class') as comment,
           class.relacl::text as acl
      from pg_class as class
     where class.relnamespace::regnamespace::text in ('public', 'dispatcher')
       and class.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
       and not exists (select from pg_depend
                        where objid = class.oid and classid = 'pg_class'::regclass and deptype = 'e')
     order by name"""
FUNCTIONS: Final = """
    select proc.oid, proc.pronamespace::regnamespace::text as schema, proc.proname as name,
           proc.oid::regprocedure::text as signature, proc.prosecdef as definer,
           proc.prorettype = 'trigger'::regtype as is_trigger, coalesce(proc.proconfig, '{}') as config,
           obj_description(proc.oid, 'pg_proc') as comment, proc.proacl::text as acl, md5(proc.prosrc) as source,
           array(select format_type(kind, null) from unnest(proc.proargtypes) with ordinality as argument (kind, place)
                  order by place) as arguments
      from pg_proc as proc
     where proc.pronamespace::regnamespace::text in ('public', 'dispatcher')
       and not exists (select from pg_depend where objid = proc.oid and classid = 'pg_proc'::regclass and deptype = 'e')
     order by signature"""
POLICIES: Final = "select * from pg_policies where schemaname = 'public' order by tablename, policyname"


@dataclass(frozen=True)
class Relation:
    schema: str
    name: str
    kind: str
    secured: bool
    options: tuple[str, ...]
    comment: str | None
    acl: str | None

    @property
    def key(self) -> str:
        """Its name, alone where it stands in public: views of ours carry the names of YourHQ's tables."""
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"

    @property
    def is_table(self) -> bool:
        return self.kind in "rp"


@dataclass(frozen=True)
class Function:
    oid: int
    schema: str
    name: str
    signature: str
    definer: bool
    is_trigger: bool
    config: tuple[str, ...]
    comment: str | None
    acl: str | None
    source: str
    arguments: tuple[str, ...]


class Catalog:
    """What stands in the schemas public and dispatcher."""

    def __init__(self, database: Database) -> None:
        rows = database.rows(RELATIONS)
        found = [Relation(**row | {"options": tuple(row["options"])}) for row in rows]
        self.relations = {one.key: one for one in found}
        rows = database.rows(FUNCTIONS)
        self.functions = {
            row["signature"]: Function(**row | {"config": tuple(row["config"]), "arguments": tuple(row["arguments"])})
            for row in rows
        }
        self.policies = [{name: row[name] for name in row if name != "schemaname"} for row in database.rows(POLICIES)]
        schemas = database.rows(r"select nspname from pg_namespace where nspname !~ '^pg_(toast_)?temp_'")
        self.schemas = {row["nspname"] for row in schemas}


class Project:
    """A migrated database and what stood there before."""

    def __init__(self, database: Database, before: Catalog) -> None:
        self.database = database
        self.before = before
        self.after = Catalog(database)
        self.relations = [one for key, one in self.after.relations.items() if key not in before.relations]
        self.functions = [one for name, one in self.after.functions.items() if name not in before.functions]
        self.tables = [one for one in self.relations if one.is_table]
        self.sequences = [one for one in self.relations if one.kind == "S"]
        self.readable = [one for one in self.relations if one.kind != "S"]

    def may(self, role: str, relation: Relation) -> set[str]:
        """The privileges a role has on a relation, or on any of its columns."""
        if relation.kind == "S":
            return self._privileges("has_sequence_privilege", role, relation, ("USAGE", "SELECT", "UPDATE"))
        columns = ("SELECT", "INSERT", "UPDATE", "REFERENCES")
        return self._privileges("has_any_column_privilege", role, relation, columns) | self._privileges(
            "has_table_privilege", role, relation, ("DELETE", "TRUNCATE", "TRIGGER")
        )

    def _privileges(self, function: str, role: str, relation: Relation, names: tuple[str, ...]) -> set[str]:
        query = f"select name from unnest(%s::text[]) as name where {function}(%s, %s, name)"
        qualified = sql.Identifier(relation.schema, relation.name).as_string(None)
        return {row["name"] for row in self.database.rows(query, [list(names), role, qualified])}

    def may_call(self, role: str, function: Function) -> bool:
        return self.database.value("select has_function_privilege(%s, %s::oid, 'EXECUTE')", [role, function.oid])


def before_yourhq(cluster: PostgresServer, empty_template: str) -> Catalog:
    with cloned(cluster, empty_template) as database:
        database.admin.execute(YOURHQ.read_bytes())
        return Catalog(database)


def before_anything(cluster: PostgresServer, empty_template: str) -> Catalog:
    with cloned(cluster, empty_template) as database:
        return Catalog(database)


@pytest.fixture(scope="module", params=["supabase", "yourhq"])
def project(
    request: pytest.FixtureRequest,
    cluster: PostgresServer,
    empty_template: str,
    migrated_template: str,
    yourhq_template: str,
) -> Iterator[Project]:
    is_ours = request.param == "supabase"
    before = (before_anything if is_ours else before_yourhq)(cluster, empty_template)
    with cloned(cluster, migrated_template if is_ours else yourhq_template) as database:
        yield Project(database, before)


# -- what the catalog says


def test_a_project_opens_by_default_whatever_is_created(project: Project) -> None:
    """Without this every other test here would be worth nothing."""
    connection = project.database.connect(autocommit=False)
    connection.execute("create table public.fresh (id integer)")
    connection.execute("create function public.fresh() returns void language sql as ''")
    [row] = connection.execute(
        """select has_table_privilege('anon', 'public.fresh', 'INSERT') as a,
                  has_table_privilege('authenticated', 'public.fresh', 'DELETE') as b,
                  has_function_privilege('anon', 'public.fresh()', 'EXECUTE') as c"""
    ).fetchall()
    connection.rollback()
    assert set(row.values()) == {True}


def test_there_is_something_to_look_at(project: Project) -> None:
    assert {"agent_wakes", "dispatcher_instances", "workflow_runs"} <= {one.name for one in project.tables}
    assert {"claim_wakes", "enqueue_workflow_run"} <= {one.name for one in project.functions}


def test_ff27_anon_has_nothing(project: Project) -> None:
    assert {one.key: found for one in project.readable if (found := project.may("anon", one))} == {}
    assert [one.signature for one in project.functions if project.may_call("anon", one)] == []
    assert [one for one in project.after.policies if {"anon", "public"} & set(one["roles"])] == [
        one for one in project.before.policies if {"anon", "public"} & set(one["roles"])
    ]


def test_ff27_authenticated_only_reads(project: Project) -> None:
    allowed = {one.key: {"SELECT"} for one in project.readable}
    for name in WRITABLE.keys() & allowed.keys():
        allowed[name] = {"SELECT", "INSERT", "UPDATE", "DELETE"}
    found = {one.key: project.may("authenticated", one) for one in project.readable}
    assert {name: rights for name, rights in found.items() if not rights <= allowed[name]} == {}


def test_ff27_nobody_but_the_service_role_counts(project: Project) -> None:
    """A sequence set back makes every later insert fail."""
    roles = ("anon", "authenticated")
    found = {one.name: rights for one in project.sequences for role in roles if (rights := project.may(role, one))}
    assert found == {}


def test_ff27_authenticated_calls_nothing(project: Project) -> None:
    found = {one.name for one in project.functions if project.may_call("authenticated", one)}
    assert found == CALLABLE.keys() & {one.name for one in project.functions}


def test_service_role_has_everything_it_needs(project: Project) -> None:
    assert [one.signature for one in project.functions if not project.may_call("service_role", one)] == []
    assert [one.name for one in project.relations if "SELECT" not in project.may("service_role", one)] == []


def test_row_level_security_is_on_everywhere(project: Project) -> None:
    assert [one.name for one in project.tables if not one.secured] == []


def test_views_use_the_rights_of_whoever_asks(project: Project) -> None:
    views = [one for one in project.relations if one.kind == "v"]
    assert views
    assert [one.name for one in views if "security_invoker=true" not in one.options] == []
    assert [one.name for one in project.relations if one.kind in "mf"] == []  # these know no row level security


def test_ff27_every_function_pins_its_search_path(project: Project) -> None:
    assert [one.signature for one in project.functions if 'search_path=""' not in one.config] == []


def test_ff27_only_named_functions_run_with_their_owners_rights(project: Project) -> None:
    assert {one.name for one in project.functions if one.definer} == DEFINERS.keys()


def test_one_signature_per_function_name(project: Project) -> None:
    names = [one.name for one in project.after.functions.values()]
    assert {name for name in names if names.count(name) > 1} == set()


def test_every_table_view_and_function_says_what_it_is(project: Project) -> None:
    assert [one.name for one in project.relations if one.kind != "S" and not one.comment] == []
    assert [one.signature for one in project.functions if not one.comment] == []


def test_c05_nothing_of_ours_stands_elsewhere(project: Project) -> None:
    assert project.after.schemas - project.before.schemas == {"dispatcher"}
    roles = [row["rolname"] for row in project.database.rows(
        """select rolname from pg_roles where rolname in ('anon', 'authenticated')
              and has_schema_privilege(oid, 'dispatcher', 'USAGE')"""
    )]  # fmt: skip
    assert roles == []


def test_what_was_there_keeps_its_rights_policies_and_code(project: Project) -> None:
    before, after = project.before, project.after
    ours = {one.key for one in project.relations}
    assert [one for one in after.policies if one["tablename"] not in ours] == before.policies
    rights = {name: (one.acl, one.secured, one.options) for name, one in before.relations.items()}
    assert {
        name: (one.acl, one.secured, one.options) for name, one in after.relations.items() if name in rights
    } == rights
    code = {name: (one.acl, one.definer, one.config, one.source) for name, one in before.functions.items()}
    kept = after.functions.items()
    assert {name: (one.acl, one.definer, one.config, one.source) for name, one in kept if name in code} == code


# -- what happens when one tries


@pytest.fixture(scope="module")
def filled(project: Project) -> Project:
    """A row of two tenants in every table of the database, whatever its constraints say of it."""
    database = project.database
    checks = database.rows(
        """select conrelid::regclass::text as relation, conname from pg_constraint
            where contype = 'c' and connamespace = 'public'::regnamespace and conrelid <> 0"""
    )
    connection = database.connect()
    for check in checks:
        drop = sql.SQL("alter table {} drop constraint {}")
        connection.execute(drop.format(sql.SQL(check["relation"]), sql.Identifier(check["conname"])))
    connection.execute("set session_replication_role = replica")
    for table in (one.name for one in project.after.relations.values() if one.is_table and one.schema == "public"):
        for tenant in (TENANT, NEIGHBOUR):
            insert_anything(connection, table, tenant)
    return project


VALUES: Final = {
    "uuid": "gen_random_uuid()",
    "text": "md5(random()::text)",
    "character varying": "md5(random()::text)",
    "integer": "(random() * 1e9)::integer",
    "bigint": "(random() * 1e9)::bigint",
    "numeric": "0",
    "double precision": "0",
    "boolean": "false",
    "jsonb": "'{}'",
    "date": "current_date",
    "interval": "'1 second'",
    "timestamp with time zone": "clock_timestamp()",
}


def tenant_column(table: str) -> str:
    if table in SHARED:
        return SHARED[table].column
    return "id" if table == "tenants" else "tenant_id"


def columns_of(connection: Connection, table: str) -> list[dict[str, object]]:
    return connection.execute(
        """select attname as name, format_type(atttypid, null) as type, atttypid::regtype::text as full_type,
                  (select typtype::text from pg_type where oid = atttypid) as category,
                  attnotnull and not atthasdef and attidentity = '' as needed
             from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped
              and attgenerated = ''""",
        [f'public."{table}"'],
    ).fetchall()


def insert_anything(connection: Connection, table: str, tenant: uuid.UUID) -> None:
    columns = columns_of(connection, table)
    values = {str(one["name"]): any_value(one) for one in columns if one["needed"]}
    if table not in SHARED:
        values[tenant_column(table)] = f"'{tenant}'"
    names = sql.SQL(", ").join(map(sql.Identifier, values))
    query = sql.SQL("insert into public.{} ({}) select {}")
    connection.execute(query.format(sql.Identifier(table), names, sql.SQL(", ".join(values.values()))))


def any_value(column: dict[str, object]) -> str:
    kind = str(column["type"])
    if column["category"] == "e":
        return f"(enum_range(null::{column['full_type']}))[1]"
    return "'{}'" if kind.endswith("[]") else VALUES[kind]


# Tables that belong to no tenant, a column of theirs, and what they hold.
@dataclass(frozen=True)
class Shared:
    column: str
    reason: str


SHARED: Final = {
    "workflow_run_transitions": Shared("from_status", "the state table: constants of the schema"),
    "migrations": Shared("name", "what was applied to this database"),
    "owned_objects": Shared("name", "what of YourHQ's schema was made here"),
    "recorded_objects": Shared("name", "how definitions are written here"),
    "made_objects": Shared("name", "functions and views that were made here"),
}


def seen(connection: Connection, relation: Relation) -> set[object] | None:
    """The tenants whose rows this connection sees; None when it may not look."""
    column = sql.Identifier(tenant_column(relation.name))
    try:
        rows = connection.execute(
            sql.SQL("select distinct {} as tenant from {}").format(
                column, sql.Identifier(relation.schema, relation.name)
            )
        ).fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return None
    return {row["tenant"] for row in rows}


def as_user_of(project: Project, tenant: uuid.UUID) -> Connection:
    return project.database.connect(
        "authenticated", {"app_metadata": {"tenant_id": str(tenant)}, "sub": str(uuid.uuid4())}
    )


def test_ff27_anon_reads_nothing(filled: Project) -> None:
    anon = filled.database.connect("anon", {"app_metadata": {"tenant_id": str(TENANT)}})
    assert {one.key: found for one in filled.readable if (found := seen(anon, one)) is not None} == {}


def test_a_user_sees_rows_of_the_own_tenant_only(filled: Project) -> None:
    user = as_user_of(filled, TENANT)
    found = {one.key: seen(user, one) for one in filled.readable if one.name not in SHARED}
    # Closed to users altogether, each for its reason; everything else shows its own tenant's row.
    internal = {one.key for one in filled.readable if one.schema == "dispatcher" and one.name not in SHARED}
    assert {name: tenants for name, tenants in found.items() if tenants != {TENANT}} == dict.fromkeys(
        HIDDEN.keys() & found.keys() | internal
    )


def test_a_user_of_another_tenant_sees_nothing(filled: Project) -> None:
    stranger = as_user_of(filled, STRANGER)
    found = {one.key: seen(stranger, one) for one in filled.readable if one.name not in SHARED}
    assert {name: tenants for name, tenants in found.items() if tenants} == {}


def test_service_role_sees_every_tenant(filled: Project) -> None:
    service = filled.database.connect("service_role")
    found = {one.name: seen(service, one) or set() for one in filled.tables if one.name not in SHARED}
    assert {name: tenants for name, tenants in found.items() if not {TENANT, NEIGHBOUR} <= tenants} == {}


@pytest.mark.parametrize("role", ["anon", "authenticated"])
def test_ff27_nobody_but_the_service_role_writes(filled: Project, role: str) -> None:
    connection = filled.database.connect(role, {"app_metadata": {"tenant_id": str(TENANT)}})
    written = [
        f"{statement} {one.name}"
        for one in filled.tables
        if one.name not in WRITABLE or role == "anon"
        for statement, text in statements(one).items()
        if not is_refused(connection, text)
    ]
    assert written == []


def statements(relation: Relation) -> dict[str, sql.Composed]:
    table, tenant = sql.Identifier(relation.schema, relation.name), sql.Identifier(tenant_column(relation.name))
    return {
        "insert": sql.SQL("insert into {} ({}) values (null)").format(table, tenant),
        "update": sql.SQL("update {} set {} = {}").format(table, tenant, tenant),
        "delete": sql.SQL("delete from {}").format(table),
        "truncate": sql.SQL("truncate {} cascade").format(table),
    }


def is_refused(connection: Connection, statement: sql.Composed) -> bool:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    return False


@pytest.mark.parametrize("name", WRITABLE)
def test_what_a_user_may_change_stays_in_the_own_tenant(filled: Project, name: str) -> None:
    user, table = as_user_of(filled, TENANT), sql.Identifier("public", name)
    with user.transaction(force_rollback=True):
        everything = user.execute(sql.SQL("delete from {} returning tenant_id").format(table)).fetchall()
        assert {row["tenant_id"] for row in everything} == {TENANT}
    with pytest.raises(psycopg.errors.InsufficientPrivilege), user.transaction(force_rollback=True):
        user.execute(sql.SQL("update {} set tenant_id = {}").format(table, sql.Literal(NEIGHBOUR)))
    with user.transaction(force_rollback=True):
        hijacked = sql.SQL("update {} set summary = 'x' where tenant_id = {}").format(table, sql.Literal(NEIGHBOUR))
        assert user.execute(hijacked).rowcount == 0


@pytest.mark.parametrize("role", ["anon", "authenticated"])
def test_ff27_no_function_of_ours_can_be_called(filled: Project, role: str) -> None:
    connection = filled.database.connect(role, {"app_metadata": {"tenant_id": str(TENANT)}})
    callable_ones = CALLABLE if role == "authenticated" else {}
    called = [
        one.signature
        for one in filled.functions
        if not one.is_trigger and one.name not in callable_ones and not is_refused(connection, call_of(one))
    ]
    assert called == []


def call_of(function: Function) -> sql.Composed:
    arguments = sql.SQL(", ".join(f"null::{kind}" for kind in function.arguments))
    return sql.SQL("select {}({})").format(sql.Identifier(function.schema, function.name), arguments)


def test_nobody_listens_to_a_private_topic_of_ours_but_the_service_role(filled: Project) -> None:
    """Broadcasts go by row level security on realtime.messages."""
    policies = filled.database.rows(
        "select policyname, roles::text[], cmd, qual from pg_policies where schemaname = 'realtime'"
    )
    assert {row["policyname"] for row in policies} <= {"dispatcher_budget_topic"}
    for policy in policies:
        assert (policy["roles"], policy["cmd"]) == (["authenticated"], "SELECT")
        assert "current_tenant_id" in policy["qual"]


SECRET: Final = """
    select attrelid::regclass::text || '.' || attname as column from pg_attribute
     where attrelid = any (%s::regclass[]) and attnum > 0 and not attisdropped
       and attname ~ '(token|session_id|canary|secret|settings|request|request_key|host_id)$'
       and has_column_privilege('authenticated', attrelid, attnum, 'select')"""


def test_s14_no_user_reads_what_is_for_daemons_alone(project: Project) -> None:
    """Tokens, keys of requests, and what tells of the host."""
    yourhqs = {row["name"] for row in project.database.rows("select name from dispatcher.owned_objects")}
    ours = {f"public.{one.name}" for one in project.tables if one.schema == "public"} - yourhqs
    assert [row["column"] for row in project.database.rows(SECRET, [list(ours)])] == []


def test_s14_a_user_reads_the_other_columns(filled: Project) -> None:
    user = as_user_of(filled, TENANT)
    assert user.execute("select state, error from public.agent_wakes").fetchall()
    for column in ("claim_token", "host_id", "*"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(f"select {column} from public.agent_wakes".encode())


def test_s18_nobody_forges_an_event_or_a_line_of_the_audit_log(filled: Project) -> None:
    service = filled.database.connect("service_role")
    logs = [one for one in filled.relations if one.name in ("workflow_run_events", "workflow_audit_log", "audit_log")]
    assert len(logs) >= 2
    done = [
        f"{statement} {one.name}"
        for one in logs
        for statement, text in statements(one).items()
        if not (one.kind == "v" and statement == "truncate") and not is_refused(service, text)
    ]
    assert done == []


@pytest.mark.parametrize(
    ("claims", "tenant"),
    [
        ({"app_metadata": {"tenant_id": str(TENANT)}}, TENANT),
        ({"tenant_id": str(TENANT)}, uuid.UUID(int=0)),  # not where YourHQ puts it: anybody's own words
        ({"user_metadata": {"tenant_id": str(TENANT)}}, uuid.UUID(int=0)),
        ({"app_metadata": {"tenant_id": ""}}, uuid.UUID(int=0)),
        ({"app_metadata": {}}, uuid.UUID(int=0)),
        ({}, uuid.UUID(int=0)),
    ],
)
def test_s06_a_users_tenant_is_the_claim_that_yourhq_writes(
    project: Project, claims: dict[str, object], tenant: uuid.UUID
) -> None:
    user = project.database.connect("authenticated", claims)
    assert user.execute("select public.current_tenant_id() as tenant").fetchall() == [{"tenant": tenant}]


def test_s06_a_tenant_that_is_none_sees_nothing(filled: Project) -> None:
    """Our function is nobody's tenant then; YourHQ's own refuses the query."""
    user = filled.database.connect("authenticated", {"app_metadata": {"tenant_id": "everybody"}})
    for one in (found for found in filled.readable if found.name not in SHARED):
        try:
            assert not seen(user, one), one.key
        except psycopg.errors.InvalidTextRepresentation:
            assert "agents" in filled.before.relations
