"""The gateway in front of PostgREST: who is let in, what is passed on, what the fault switches do."""

from collections.abc import Iterator

import httpx
import pytest

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.postgres import PostgresServer
from tests.support.api import running_api
from tests.support.database import Database, cloned
from tests.support.seed import Seed
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def shared_database(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as shared:
        yield shared


@pytest.fixture(scope="module")
def shared_api(
    shared_database: Database, project_keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    with running_api(shared_database, project_keys, tmp_path_factory.mktemp("api")) as started:
        yield started


@pytest.fixture
def database(shared_database: Database) -> Iterator[Database]:
    """One for all tests here, emptied after each: starting PostgREST anew takes longer than any of them."""
    yield shared_database
    shared_database.execute("truncate public.tenants cascade")


@pytest.fixture
def api(shared_api: Api) -> Iterator[Api]:
    yield shared_api
    shared_api.rest_faults.clear()
    shared_api.realtime_faults.clear()


@pytest.fixture
def http(api: Api) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, trust_env=False, timeout=10) as client:
        yield client


def key_of(api: Api, name: str) -> dict[str, str]:
    return {"apikey": getattr(api.keys, name)}


def test_without_a_key_nobody_comes_in(http: httpx.Client) -> None:
    answer = http.get("/rest/v1/agents")
    assert (answer.status_code, answer.json()["message"]) == (401, "No API key found in request")


@pytest.mark.parametrize("key", ["nonsense", "sb_secret_wrong"])
@pytest.mark.parametrize("authorization", [None, "Bearer nonsense"])
def test_a_wrong_key_is_named_as_such(http: httpx.Client, key: str, authorization: str | None) -> None:
    headers = {"apikey": key} | ({"Authorization": authorization} if authorization else {})
    answer = http.get("/rest/v1/agents", headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (401, "Invalid API key")


@pytest.mark.parametrize("name", ["service_role_key", "secret_key"])
@pytest.mark.parametrize("bearer", [False, True])
def test_a_service_key_of_either_style_reads(http: httpx.Client, api: Api, seed: Seed, name: str, bearer: bool) -> None:
    seed.agent("ada")
    headers = key_of(api, name)
    if bearer:
        headers["Authorization"] = f"Bearer {headers['apikey']}"
    answer = http.get("/rest/v1/agents", params={"select": "slug"}, headers=headers)
    assert answer.json() == [{"slug": "ada"}]


@pytest.mark.parametrize("name", ["anon_key", "publishable_key"])
def test_a_public_key_of_either_style_is_anon(http: httpx.Client, api: Api, seed: Seed, name: str) -> None:
    seed.agent("ada")
    answer = http.get("/rest/v1/agents", headers=key_of(api, name))
    assert answer.status_code == 401
    assert answer.json()["code"] == "42501"


def test_a_token_of_the_callers_own_goes_on_as_it_is(http: httpx.Client, api: Api) -> None:
    headers = key_of(api, "anon_key") | {"Authorization": f"Bearer {api.keys.token('authenticated', seconds=-60)}"}
    answer = http.get("/rest/v1/agents", headers=headers)
    assert (answer.status_code, answer.json()["message"]) == (401, "JWT expired")


def test_query_strings_bodies_and_headers_survive_the_way(
    http: httpx.Client, api: Api, database: Database, seed: Seed
) -> None:
    gateway = str(seed.gateway())
    headers = key_of(api, "service_role_key") | {"Prefer": "return=representation,count=exact"}
    text = 'ü "quoted" a,b & c=d % +'
    made = http.post("/rest/v1/agents", json={"slug": "x", "name": text, "gateway_id": gateway}, headers=headers)
    assert (made.status_code, made.json()[0]["name"]) == (201, text)
    quoted = '"' + text.replace('"', '\\"') + '"'
    found = http.get("/rest/v1/agents", params={"name": f"in.({quoted})", "select": "name"}, headers=headers)
    assert found.json() == [{"name": text}]
    assert found.headers["content-range"] == "0-0/1"
    assert database.value("select name from public.agents where slug = 'x'") == text


def test_a_large_answer_and_a_large_body_pass_whole(http: httpx.Client, api: Api, seed: Seed) -> None:
    headers = key_of(api, "service_role_key")
    long = "é" * 1_500_000
    gateway = str(seed.gateway())
    made = http.post(
        "/rest/v1/agents",
        json={"slug": "x", "name": "x", "gateway_id": gateway, "description": long},
        headers=headers,
    )
    assert made.status_code == 201
    assert http.get("/rest/v1/agents?select=description", headers=headers).json() == [{"description": long}]


def test_head_keeps_the_count_and_has_no_body(http: httpx.Client, api: Api, seed: Seed) -> None:
    seed.agent("ada")
    headers = key_of(api, "service_role_key") | {"Prefer": "count=exact"}
    answer = http.head("/rest/v1/agents", headers=headers)
    assert (answer.status_code, answer.headers["content-range"], answer.content) == (200, "0-0/1", b"")


def test_at_most_a_thousand_rows_come_back(http: httpx.Client, api: Api, database: Database) -> None:
    database.execute("create table public.many as select generate_series(1, 1500) as n")
    database.execute("grant select on public.many to service_role")
    database.execute("notify pgrst, 'reload schema'")
    headers = key_of(api, "service_role_key")

    def rows() -> int:
        answer = http.get("/rest/v1/many", headers=headers)
        return len(answer.json()) if answer.status_code == 200 else 0

    assert wait_until(rows) == 1000


def test_functions_are_not_started(http: httpx.Client, api: Api) -> None:
    answer = http.post("/functions/v1/anything", headers=key_of(api, "anon_key"))
    assert (answer.status_code, answer.json()["message"]) == (503, "not started")


def test_without_postgrest_the_gateway_answers_502_and_then_recovers(http: httpx.Client, api: Api) -> None:
    headers = key_of(api, "service_role_key")
    port = api.rest.port
    api.rest.stop()
    assert http.get("/rest/v1/agents", headers=headers).status_code == 502
    api.rest.start()
    assert api.rest.port == port
    assert http.get("/rest/v1/agents", headers=headers).status_code == 200


@pytest.fixture
def operator(api: Api) -> Iterator[httpx.Client]:
    """Who may set fault switches."""
    with httpx.Client(base_url=api.url, trust_env=False, timeout=10, headers=key_of(api, "service_role_key")) as client:
        yield client


def set_faults(operator: httpx.Client, **parts: object) -> httpx.Response:
    return operator.post("/__local/faults", json=parts)


def test_a_failing_answer_comes_as_often_as_asked_for(http: httpx.Client, api: Api, operator: httpx.Client) -> None:
    headers = key_of(api, "service_role_key")
    body = {"code": "PGRST202", "message": "Could not find the function"}
    answer = set_faults(operator, rest={"fail": 2, "status": 404, "body": body})
    assert answer.json()["rest"]["fail"] == 2
    seen = [http.get("/rest/v1/agents", headers=headers) for _ in range(3)]
    assert [each.status_code for each in seen] == [404, 404, 200]
    assert seen[0].json() == body


def test_a_fault_touches_only_the_paths_it_names(http: httpx.Client, api: Api, operator: httpx.Client) -> None:
    headers = key_of(api, "service_role_key")
    set_faults(operator, rest={"fail": -1, "match": "/gateways"})
    codes = [http.get(f"/rest/v1/{table}", headers=headers).status_code for table in ("agents", "gateways")]
    assert codes == [200, 503]


def test_a_lost_reply_is_a_call_that_was_carried_out(
    http: httpx.Client, api: Api, operator: httpx.Client, database: Database, seed: Seed
) -> None:
    gateway = str(seed.gateway())
    set_faults(operator, rest={"lose_replies": 1})
    with pytest.raises(httpx.TransportError):
        http.post(
            "/rest/v1/agents",
            json={"slug": "x", "name": "x", "gateway_id": gateway},
            headers=key_of(api, "service_role_key"),
        )
    assert database.value("select count(*) from public.agents") == 1


def test_a_cut_connection_carries_nothing_out(http: httpx.Client, api: Api, operator: httpx.Client) -> None:
    headers = key_of(api, "service_role_key")
    set_faults(operator, rest={"cut": 1})
    with pytest.raises(httpx.TransportError):
        http.get("/rest/v1/agents", headers=headers)
    assert http.get("/rest/v1/agents", headers=headers).status_code == 200


def test_down_ends_by_itself(http: httpx.Client, api: Api, operator: httpx.Client) -> None:
    headers = key_of(api, "service_role_key")
    set_faults(operator, rest={"down_for": 0.2})
    with pytest.raises(httpx.TransportError):
        http.get("/rest/v1/agents", headers=headers)
    wait_until(lambda: http.get("/__local/faults").json()["rest"]["down_for"] == 0)
    assert http.get("/rest/v1/agents", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "wanted",
    [
        {"rest": {"nonsense": 1}},
        {"rest": {"fail": "often"}},
        {"nobody": {}},
        {"realtime": {"silence": 3}},
        {"rest": 5},
        [],
    ],
)
def test_a_wrong_fault_changes_nothing(http: httpx.Client, operator: httpx.Client, wanted: object) -> None:
    before = http.get("/__local/faults").json()
    assert operator.post("/__local/faults", json=wanted).status_code == 400
    assert http.get("/__local/faults").json() == before


@pytest.mark.parametrize(
    "sent",
    [
        {"Content-Type": "text/plain"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"apikey": "nonsense"},
        {"apikey": ""},
    ],
    ids=str,
)
def test_s15_a_web_page_cannot_set_faults(http: httpx.Client, operator: httpx.Client, sent: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", **sent}
    answer = operator.post("/__local/faults", content='{"rest": {"fail": -1}}', headers=headers)
    assert answer.status_code == 403
    assert http.get("/__local/faults").json()["rest"]["fail"] == 0


@pytest.mark.parametrize("key", ["anon_key", "publishable_key", None])
def test_s15_without_the_service_key_nobody_sets_faults(http: httpx.Client, api: Api, key: str | None) -> None:
    headers = key_of(api, key) if key else {}
    assert http.post("/__local/faults", json={"rest": {"fail": -1}}, headers=headers).status_code == 403
    assert http.get("/__local/faults", headers={"Host": "evil.example"}).status_code == 403
    assert http.get("/__local/status", headers={"Origin": "http://evil.example"}).status_code == 403


def test_status_tells_what_runs(http: httpx.Client, api: Api) -> None:
    assert http.get("/__local/status").json() == {
        "api_url": api.url,
        "rest": {"url": api.rest.url, "running": True, "ready": True},
        "realtime": {"running": True},
    }
