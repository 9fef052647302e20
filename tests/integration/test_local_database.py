"""The test cluster is a Supabase project: its roles, its default rights, its way of sending."""

import json

import psycopg
import pytest

from tests.support.database import Database
from tests.support.seed import Seed


def test_a_seeded_item_brings_everything_it_needs(database: Database, seed: Seed) -> None:
    item = seed.item("ada")
    row = database.row("select status::text, agent_slug from public.agent_inbox_items where id = %s", (item,))
    assert row == {"status": "pending", "agent_slug": "ada"}


def test_a_clone_starts_without_the_rows_of_another_test(database: Database) -> None:
    assert database.value("select count(*) from public.agent_inbox_items") == 0


@pytest.mark.parametrize("role", ["anon", "authenticated", "service_role"])
def test_new_functions_and_tables_are_open_by_name_until_revoked(empty_database: Database, role: str) -> None:
    empty_database.execute("create table public.things (id int)")
    empty_database.execute("create function public.answer() returns int language sql as 'select 42'")
    empty_database.execute("revoke all on function public.answer() from public")
    visitor = empty_database.connect(role)
    assert visitor.execute("select public.answer() as answer").fetchone() == {"answer": 42}
    assert visitor.execute("select count(*) from public.things").fetchone() == {"count": 0}
    empty_database.execute(f"revoke all on function public.answer() from {role}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        visitor.execute("select public.answer()")


def test_service_role_passes_row_security_and_anon_does_not(empty_database: Database) -> None:
    empty_database.execute("create table public.things (id int)")
    empty_database.execute("alter table public.things enable row level security")
    empty_database.execute("insert into public.things values (1)")
    seen = {
        role: empty_database.connect(role).execute("select id from public.things").fetchall()
        for role in ("anon", "authenticated", "service_role")
    }
    assert seen == {"anon": [], "authenticated": [], "service_role": [{"id": 1}]}


def test_authenticator_can_become_each_role_and_nothing_else(empty_database: Database) -> None:
    url = empty_database.cluster.url(empty_database.name, "authenticator")
    with psycopg.connect(url, autocommit=True) as connection:
        for role in ("anon", "authenticated", "service_role"):
            connection.execute(f"set role {role}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("set role postgres")


def test_claims_are_what_auth_functions_read(empty_database: Database) -> None:
    subject = "00000000-0000-0000-0000-00000000002a"
    connection = empty_database.connect("authenticated", {"sub": subject})
    row = connection.execute("select auth.uid()::text as uid, auth.role() as role").fetchone()
    assert row == {"uid": subject, "role": "authenticated"}


def test_send_writes_a_message_and_announces_it_at_commit(empty_database: Database) -> None:
    listener = empty_database.connect()
    listener.execute("listen realtime_messages")
    empty_database.execute("select realtime.send('{\"a\": 1}', 'inbox', 'gateway:x', true)")
    [heard] = listener.notifies(timeout=5, stop_after=1)
    message = empty_database.row("select id::text, topic, event, extension, private, payload from realtime.messages")
    assert message == {
        "id": heard.payload,
        "topic": "gateway:x",
        "event": "inbox",
        "extension": "broadcast",
        "private": True,
        "payload": {"a": 1, "id": heard.payload},
    }


def test_an_error_in_send_is_only_a_warning(empty_database: Database) -> None:
    notices: list[str] = []
    connection = empty_database.connect()
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    connection.execute("select realtime.send('{}', 'inbox', null, true)")
    assert [text.split(":")[0] for text in notices] == ["ErrorSendingBroadcastMessage"]
    assert empty_database.value("select count(*) from realtime.messages") == 0


def test_the_bootstrap_can_run_again(empty_database: Database) -> None:
    empty_database.cluster.bootstrap(empty_database.name)
    empty_database.execute("select realtime.send('{}', 'again', 't')")
    payload = empty_database.value("select payload::text from realtime.messages")
    assert set(json.loads(payload)) == {"id"}
