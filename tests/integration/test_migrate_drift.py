"""What somebody changed in a migrated database without changing a name: rights, definitions, columns."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dispatcher.cli.main import run_command_line
from dispatcher.errors import MigrationError
from dispatcher.local import account
from dispatcher.supabase.migrate import apply_migrations, check_schema
from dispatcher.supabase.schema_version import FINGERPRINT
from tests.conftest import MIGRATIONS
from tests.support.database import Database

READ_RIGHTS = """
    select string_agg(concat_ws(' ', kind, name, column_name, grantee, privilege), chr(10)
                      order by kind, name, column_name, grantee, privilege)
      from dispatcher.granted_rights()"""


def check(database: Database, capsys: pytest.CaptureFixture[str]) -> str:
    """What `--check` prints; it has to find something."""
    capsys.readouterr()
    assert run_command_line(["migrate", "--check", "--db-url", database.url]) == 1
    return capsys.readouterr().out


def is_well(database: Database) -> bool:
    pending, state = check_schema(database.url, MIGRATIONS)
    return not (pending or state.drift or state.exposed)


# What the service role lost, and how that is named.
LOST = {
    "usage on schema dispatcher to service_role": "revoke usage on schema dispatcher from service_role",
    "usage on schema public to service_role": "revoke usage on schema public from service_role, public",
    "execute on function public.claim_wakes": "revoke execute on function public.claim_wakes from service_role",
    "execute on function public.dispatcher_schema()": (
        "revoke all on function public.dispatcher_schema from service_role"
    ),
    "execute on function dispatcher.find_gateway": (
        "revoke execute on function dispatcher.find_gateway from service_role"
    ),
    "select on table public.agent_wakes to service_role": "revoke select on public.agent_wakes from service_role",
    "insert, update on table public.workflow_runs": "revoke insert, update on public.workflow_runs from service_role",
    "select on table public.agents to service_role": (
        "revoke select on public.agents from service_role; grant select (id) on public.agents to service_role"
    ),
    "select on table dispatcher.inbox_due": "revoke select on dispatcher.inbox_due from service_role",
    "select on table dispatcher.recorded_objects": "revoke all on dispatcher.recorded_objects from service_role",
    "usage on sequence public.dispatcher_faults_id_seq": (
        "revoke usage on sequence public.dispatcher_faults_id_seq from service_role"
    ),
    "select on column public.workflow_runs.status to authenticated": (
        "revoke select (status) on public.workflow_runs from authenticated"
    ),
}


def test_f1_each_lost_right_is_named_and_given_back(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    before = database.value(READ_RIGHTS)
    database.execute("; ".join(LOST.values()))
    found = check(database, capsys)
    assert [name for name in LOST if f"differs: right {name}" not in found] == []
    assert run_command_line(["migrate", "--db-url", database.url]) == 0
    assert is_well(database)
    lost = set(before.splitlines()) - set(database.value(READ_RIGHTS).splitlines())
    # A project's default privileges give more than the files do; only what the files give comes back.
    assert {line for line in lost if not line.startswith("table dispatcher.")} <= {
        "sequence public.dispatcher_faults_id_seq service_role update"
    }


def test_f1_every_right_that_the_files_give_is_missed_when_it_goes(database: Database) -> None:
    """One at a time, each in a transaction that is undone."""
    rights = database.rows("select name, definition from dispatcher.expected_objects() where kind = 'right'")
    unseen = []
    connection = database.connect(autocommit=False)
    for right in rights:
        grantee, kind, name = right["name"].split(" ", 2)
        table, _, column = name.rpartition(".")
        what = f"({column}) on table {table}" if kind == "column" else f"on {kind} {name}"
        connection.execute(f"revoke {right['definition']} {what} from {grantee}".encode())
        found = connection.execute("select name from dispatcher.missing_rights()").fetchall()
        if [row["name"] for row in found] != [f"{right['definition']} on {kind} {name} to {grantee}"]:
            unseen.append(right["name"])
        connection.rollback()
    assert len(rights) > 200
    assert unseen == []


def test_f1_a_right_that_goes_again_ends_migrate_with_its_name(database: Database) -> None:
    database.execute(
        "create function public.close() returns event_trigger language plpgsql as"
        " $$ begin execute 'revoke select on public.agents from service_role'; end $$"
    )
    database.execute("create event trigger close on ddl_command_end when tag in ('GRANT') execute function close()")
    with pytest.raises(MigrationError, match=r"select on table public\.agents to service_role missing") as caught:
        apply_migrations(database.url, MIGRATIONS, again=True)
    assert str(caught.value).endswith("\n  grant select on table public.agents to service_role;")


# What strangers got, and how that is named.
OPENED = {
    "schema dispatcher: usage is granted to anon": "grant usage on schema dispatcher to anon",
    "schema dispatcher: usage is granted to authenticated": "grant usage on schema dispatcher to authenticated",
    "schema dispatcher: create, usage is granted to public": "grant all on schema dispatcher to public",
    "public.agent_wakes: insert is granted to authenticated": "grant insert on public.agent_wakes to authenticated",
    "public.inbox_item_leases: select is granted to authenticated": (
        "grant select on public.inbox_item_leases to authenticated"
    ),
    "public.workflow_claims.claim_token: select is granted to authenticated": (
        "grant select (claim_token) on public.workflow_claims to authenticated"
    ),
    "public.audit_log: insert is granted to authenticated": "grant insert on public.audit_log to authenticated",
    "dispatcher.inbox_due: select is granted to anon": "grant select on dispatcher.inbox_due to anon",
    "dispatcher.migrations: select is granted to public": "grant select on dispatcher.migrations to public",
    "public.claim_wakes": "grant execute on function public.claim_wakes to anon",
    "dispatcher.find_gateway(uuid,text): execute is granted to public": (
        "grant execute on function dispatcher.find_gateway to public"
    ),
    "public.workflow_run_events_id_seq: usage is granted to authenticated": (
        "grant usage on sequence public.workflow_run_events_id_seq to authenticated"
    ),
}


def test_f5_each_right_too_many_is_named_and_taken_back(database: Database, capsys: pytest.CaptureFixture[str]) -> None:
    before = database.value(READ_RIGHTS)
    database.execute("; ".join(OPENED.values()))
    found = check(database, capsys)
    assert [name for name in OPENED if f"open: {name}" not in found] == []
    assert run_command_line(["migrate", "--db-url", database.url]) == 0
    assert database.value(READ_RIGHTS) == before
    assert is_well(database)


def test_f5_what_another_role_gave_on_is_named_with_the_line_to_type(database: Database) -> None:
    database.execute(
        "do $$ begin create role giver; exception when duplicate_object then null; end $$;"
        " grant usage on schema dispatcher to giver with grant option;"
        " set role giver; grant usage on schema dispatcher to anon; reset role"
    )
    try:
        with pytest.raises(MigrationError, match="schema dispatcher: usage is granted to anon by giver") as caught:
            apply_migrations(database.url, MIGRATIONS, again=True)
        [line] = str(caught.value).splitlines()[1:]
        assert line.strip() == "revoke grant option for usage on schema dispatcher from giver cascade;"
        database.execute(line)
        apply_migrations(database.url, MIGRATIONS)
        assert is_well(database)
    finally:
        database.execute("drop owned by giver")


# A change that keeps the name, and what is named.
MENDED = {
    "policy public.agents.tenant_isolation differs": "alter policy tenant_isolation on agents using (true)",
    "policy public.agent_wakes.tenant_reads differs": (
        "drop policy tenant_reads on agent_wakes; create policy tenant_reads on agent_wakes using (true)"
    ),
    "policy public.tasks.tenant_isolation differs": "alter policy tenant_isolation on tasks to service_role",
    "policy realtime.messages.dispatcher_budget_topic differs": (
        "alter policy dispatcher_budget_topic on realtime.messages using (true)"
    ),
    "view public.audit_log differs": "alter view audit_log set (security_invoker = false)",
    "view dispatcher.inbox_due differs": "alter view dispatcher.inbox_due reset (security_invoker)",
    "view dispatcher.taken_wakes differs": (
        "do $$ begin execute 'create or replace view dispatcher.taken_wakes with (security_invoker = true) as select *"
        " from (' || rtrim(pg_get_viewdef('dispatcher.taken_wakes'::regclass), ';') || ') as changed limit 7'; end $$"
    ),
    "function public.claim_wakes": "alter function claim_wakes reset search_path",
    "function dispatcher.find_gateway(uuid,text) differs": "alter function dispatcher.find_gateway security definer",
    "function dispatcher.must_abort(text) differs": "alter function dispatcher.must_abort parallel unsafe",
    "trigger public.agents.dispatcher_agent_hint differs": (
        "create or replace trigger dispatcher_agent_hint after update of status on agents"
        " for each row execute function dispatcher.hint_agent_change()"
    ),
    "trigger public.workflow_runs.workflow_runs_guard differs": "alter table workflow_runs disable trigger user",
}
TOLD = {
    "policy public.agents.everybody added": "create policy everybody on agents for select to anon using (true)",
    "default public.workflow_runs.status differs": "alter table workflow_runs alter column status set default 'failed'",
    "default public.agent_wakes.path differs": "alter table agent_wakes alter column path set default 'event'",
    "default public.agent_wakes.claim_token differs": "alter table agent_wakes alter column claim_token drop default",
    "constraint public.agent_wakes.agent_wakes_agent_id_fkey differs": (
        "alter table agent_wakes drop constraint agent_wakes_agent_id_fkey,"
        " add constraint agent_wakes_agent_id_fkey foreign key (agent_id) references agents on delete restrict"
    ),
    "constraint public.budgets.budgets_one_cap differs": (
        "alter table budgets drop constraint budgets_one_cap, add constraint budgets_one_cap check (true)"
    ),
    "constraint public.budgets.budgets_period_check missing": (
        "alter table budgets drop constraint budgets_period_check"
    ),
    "constraint public.tenants.tenants_slug_key differs": (
        "alter table tenants drop constraint tenants_slug_key, add constraint tenants_slug_key unique (slug, name)"
    ),
    "index public.agent_wakes.agent_wakes_one_live_per_agent differs": (
        "drop index agent_wakes_one_live_per_agent; create index agent_wakes_one_live_per_agent on agent_wakes (id)"
    ),
    "index public.agent_inbox_items.agent_inbox_items_open_of differs": (
        "drop index agent_inbox_items_open_of; create index agent_inbox_items_open_of on agent_inbox_items (agent_id)"
    ),
    "column public.workflow_runs.session_id differs": "alter table workflow_runs alter column session_id type varchar",
    "column public.agents.name differs": "alter table agents alter column name drop not null",
    "owner table public.budgets differs": "alter table budgets owner to supabase_admin",
    "owner function public.stop_dispatcher_instance(uuid) differs": (
        "alter function stop_dispatcher_instance owner to supabase_admin"
    ),
}
DEFINITIONS = "select kind, name, definition from dispatcher.object_definitions() order by 1, 2"


def test_f2_a_definition_that_changed_under_its_name_is_named_and_mended(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    before = database.rows(DEFINITIONS)
    database.execute("; ".join(MENDED.values()))
    found = check(database, capsys)
    assert [name for name in MENDED if f"differs: {name}" not in found] == []
    assert run_command_line(["migrate", "--db-url", database.url]) == 0
    assert database.rows(DEFINITIONS) == before
    assert is_well(database)


def test_f2_what_no_file_mends_is_named_with_the_line_that_does(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    before = database.rows(DEFINITIONS)
    database.execute("; ".join(TOLD.values()))
    found = check(database, capsys)
    assert [name for name in TOLD if f"differs: {name}" not in found] == []
    with pytest.raises(MigrationError, match="Type this as the owner") as caught:
        apply_migrations(database.url, MIGRATIONS)
    for line in str(caught.value).splitlines()[1:]:
        database.execute(line)
    assert database.rows(DEFINITIONS) == before
    assert run_command_line(["migrate", "--db-url", database.url]) == 0
    assert is_well(database)


def test_f2_a_change_that_is_meant_is_kept_once_the_record_is_emptied(database: Database) -> None:
    database.execute("drop index agent_wakes_ended; create index agent_wakes_ended on agent_wakes (ended_at, id)")
    database.execute("delete from dispatcher.recorded_objects")
    apply_migrations(database.url, MIGRATIONS)
    assert is_well(database)
    assert "(ended_at, id)" in database.value("select pg_get_indexdef('agent_wakes_ended'::regclass)")


def test_f2_the_record_follows_what_a_file_of_a_new_version_changes(database: Database, tmp_path: Path) -> None:
    """And only that: what somebody else had changed before is still told."""
    files = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, files)
    [tables] = files.glob("*_wake_tables.sql")
    change = "alter table public.agent_wakes alter column chain_depth set default 1;\ncommit;"
    tables.write_text(tables.read_text().replace("commit;", change))
    database.execute("alter table agent_wakes alter column item_ids drop default")
    with pytest.raises(MigrationError, match=r"did not mend it: default public\.agent_wakes\.item_ids differs\. Type"):
        apply_migrations(database.url, files)
    database.execute("alter table agent_wakes alter column item_ids set default '{}'")
    assert apply_migrations(database.url, files) == []
    assert check_schema(database.url, files)[1].drift == ()


@pytest.mark.parametrize("stop", [4, None], ids=["half of them", "all"])
def test_f2_plain_psql_leaves_no_false_record(database: Database, tmp_path: Path, stop: int | None) -> None:
    """Files of a new version by psql, all or some, then ours: what they changed is what is right."""
    files = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, files)
    [tables] = files.glob("*_wake_tables.sql")
    change = "alter table public.agent_wakes alter column chain_depth set default 1;\ncommit;"
    tables.write_text(tables.read_text().replace("commit;", change))
    [version] = files.glob("*_schema_version.sql")
    version.write_text(version.read_text().replace(FINGERPRINT, "f" * 64))
    psql = [str(account.programs(None) / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.url]
    for file in sorted(files.glob("*.sql"))[:stop]:
        subprocess.run([*psql, "-f", str(file)], check=True, capture_output=True)
    apply_migrations(database.url, files)
    assert check_schema(database.url, files)[1].drift == ()
