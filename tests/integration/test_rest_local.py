"""The REST client against a real PostgREST on a real database."""

import math
import threading
import uuid
from collections.abc import Iterator

import pytest

from dispatcher.errors import BadKey, RestError, ServiceUnavailable
from dispatcher.local.api import Api
from dispatcher.supabase.rest import RestClient
from dispatcher.supabase.rest_payload import equals, one_of, quoted
from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed


@pytest.fixture
def rest(api: Api) -> Iterator[RestClient]:
    client = RestClient(api.url, api.keys.service_role_key)
    yield client
    client.close()


def make_function(database: Database, text: str) -> None:
    database.admin.execute(text.encode())
    database.admin.execute("notify pgrst, 'reload schema'")


def test_a_function_of_ours_answers(rest: RestClient, seed: Seed) -> None:
    seed.gateway("local")
    params = {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "nobody", "p_identity": {}, "p_settings": {}}
    assert rest.rpc("register_dispatcher_instance", params) == {"code": "unknown_gateway", "known": ["local"]}


def test_ff16_all_rows_are_read_past_the_servers_cap(
    rest: RestClient, seed: Seed, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = seed.agent("ada")
    database.admin.execute(
        """insert into public.agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, dedup_key, created_at)
           select %s, %s, 'ada', 'heartbeat', n::text, now() - make_interval(secs => (1300 - n / 3))
             from generate_series(1, 1205) as n""",
        (DEFAULT_TENANT, agent),
    )
    read_page = rest._select
    pages: list[int] = []

    def claim_fifty_between_pages(*args: object) -> list[dict[str, object]]:
        page = read_page(*args)  # type: ignore[arg-type] # passed on as given
        pages.append(len(page))
        database.admin.execute(
            """update public.agent_inbox_items set status = 'leased'
                where id in (select id from public.agent_inbox_items where status = 'pending'
                              order by created_at limit 50)"""
        )
        return page

    monkeypatch.setattr(rest, "_select", claim_fifty_between_pages)
    query = {"select": "id,created_at", "status": "eq.pending", "tenant_id": equals(DEFAULT_TENANT)}
    rows = rest.select_all("agent_inbox_items", query, key=("created_at", "id"), page=5000)
    assert pages == [1000, 205, 0]
    assert len({row["id"] for row in rows}) == 1205
    moments = [(row["created_at"], row["id"]) for row in rows]
    assert moments == sorted(moments)


def test_ff22_reserved_characters_find_their_own_row_and_no_other(rest: RestClient, seed: Seed) -> None:
    odd = 'ops,lead(1)"x" \\ + & é'
    seed.agent(odd)
    seed.agent("ops")

    def slugs(filter_text: str) -> list[str]:
        return [row["slug"] for row in rest.select("agents", {"select": "slug", "slug": filter_text})]

    assert slugs(equals(odd)) == [odd]
    assert slugs(equals("ops")) == ["ops"]
    assert slugs(one_of([odd])) == [odd]
    assert sorted(slugs(one_of([odd, "ops", "null", ""]))) == sorted([odd, "ops"])
    assert slugs(one_of([])) == []
    either = {"select": "slug", "or": f"(slug.eq.{quoted(odd)},slug.eq.nobody)"}
    assert [row["slug"] for row in rest.select_all("agents", either, key=("slug",), page=1)] == [odd]
    paged = rest.select_all("agents", {"select": "slug"}, key=("slug",), page=1)
    assert sorted(row["slug"] for row in paged) == sorted([odd, "ops"])


def test_ff22_a_time_with_a_plus_is_a_time(rest: RestClient, seed: Seed, database: Database) -> None:
    item = seed.item("ada")
    moment = database.value("select created_at from public.agent_inbox_items where id = %s", (item,))
    query = {"select": "id", "created_at": f"lte.{moment.isoformat()}"}
    assert rest.select("agent_inbox_items", query) == [{"id": str(item)}]


def test_ff26_unstorable_text_and_numbers_are_cleaned_on_the_way(rest: RestClient, database: Database) -> None:
    make_function(
        database,
        """create function public.echo(p_text text, p_cost numeric, p_more jsonb) returns jsonb language sql
           as $$ select jsonb_build_object('text', p_text, 'cost', p_cost, 'more', p_more) $$""",
    )
    params = {"p_text": "ok\x00\ud800", "p_cost": math.nan, "p_more": {"tail": "a\x00b", "n": [math.inf]}}
    assert rest.rpc("echo", params) == {"text": "ok", "cost": None, "more": {"tail": "ab", "n": [None]}}


def test_ff19_a_function_that_is_not_there_yet_is_waited_for(rest: RestClient, database: Database) -> None:
    with pytest.raises(RestError) as caught:
        rest.rpc("not_there", {"p": 1}, timeout=0.3)
    assert (caught.value.code, caught.value.retryable) == ("PGRST202", True)
    text = "create function public.not_there(p integer) returns integer language sql as 'select p'"
    migration = threading.Timer(0.3, make_function, (database, text))
    migration.start()
    assert rest.rpc("not_there", {"p": 7}) == 7
    migration.join()


def test_errors_of_the_database_keep_their_code(rest: RestClient, database: Database) -> None:
    make_function(
        database,
        """create function public.refuse() returns void language plpgsql
           as $$ begin raise exception 'broken contract' using errcode = 'HQ001', hint = 'mend it'; end $$""",
    )
    with pytest.raises(RestError, match=r"broken contract \(hint: mend it\)") as caught:
        rest.rpc("refuse", {}, retry=True)
    assert (caught.value.code, caught.value.retryable) == ("HQ001", False)


def test_a_void_function_answers_none(rest: RestClient, database: Database) -> None:
    make_function(database, "create function public.nothing() returns void language sql as 'select'")
    assert rest.rpc("nothing", {}) is None


@pytest.mark.parametrize("key", ["anon", "broken", "sb_secret_unknown"])
def test_a_key_without_the_right_is_named(api: Api, key: str) -> None:
    client = RestClient(api.url, api.keys.anon_key if key == "anon" else key)
    params = {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "local", "p_identity": {}, "p_settings": {}}
    try:
        with pytest.raises(BadKey, match="SUPABASE_SERVICE_ROLE_KEY"):
            client.rpc("register_dispatcher_instance", params)
    finally:
        client.close()


def test_ff21_a_restart_of_postgrest_is_survived(api: Api, rest: RestClient, seed: Seed) -> None:
    seed.agent("ada")
    api.rest.stop()
    restart = threading.Timer(0.5, api.rest.start)
    restart.start()
    assert [row["slug"] for row in rest.select("agents", {"select": "slug"})] == ["ada"]
    restart.join()


def test_ff21_database_sessions_that_are_cut_cost_no_idempotent_call(
    rest: RestClient, seed: Seed, database: Database
) -> None:
    seed.gateway("local")
    params = {"p_tenant_id": str(uuid.uuid4()), "p_gateway": "x", "p_identity": {}, "p_settings": {}}
    for _ in range(5):
        database.admin.execute(
            """select pg_terminate_backend(pid) from pg_stat_activity
                where datname = current_database() and usename = 'authenticator' and state = 'idle'"""
        )
        assert rest.rpc("register_dispatcher_instance", params, retry=True)["code"] == "unknown_gateway"


def test_a_project_that_is_gone_is_unavailable(api: Api, rest: RestClient) -> None:
    rest.warm()
    api.stop()
    with pytest.raises(ServiceUnavailable, match="cannot reach"):
        rest.rpc("dispatcher_status", {}, retry=True, timeout=0.5)
