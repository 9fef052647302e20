"""The operator's functions: bring back, end, release, look; what somebody holds is left alone and counted."""

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed

pytestmark = pytest.mark.kept_database


class Operator:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.connection = database.connect("service_role")

    def call(self, function: str, **arguments: Any) -> Any:
        scope = {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "local"}
        [row] = self.database.call(function, scope | arguments, on=self.connection)
        [value] = row.values()
        return value

    def requeue(self, *ids: uuid.UUID, agent: str | None = None, **options: Any) -> Any:
        return self.call("requeue_inbox_items", p_agent=agent, p_item_ids=list(ids) or None, **options)

    def statuses(self) -> list[str]:
        return [row["status"] for row in self.database.rows("select status from agent_inbox_items order by created_at")]


@pytest.fixture
def operator(database: Database, seed: Seed) -> Operator:
    seed.agent("ada")
    return Operator(database)


SPENT: dict[str, Any] = {"status": "failed", "attempt_count": 5, "max_attempts": 3}


def test_c34_y10_requeue_dead_brings_back_all_that_was_given_up(operator: Operator, seed: Seed) -> None:
    seed.items("ada", 2, status="dead_letter", attempt_count=3)
    seed.item("ada", **SPENT)  # as an older daemon gave up: 5 of 3
    resting = seed.item("ada", status="failed", attempt_count=1)
    other = seed.item("bob", status="dead_letter")
    plain = operator.requeue(agent="ada")
    assert (plain["requeued"], plain["dead_letters_left"]) == (0, 3)
    look = operator.requeue(agent="ada", p_dead=True, p_dry_run=True)
    assert (look["found"], look["requeued"], len(look["found_ids"])) == (3, 0, 3)
    assert "pending" not in operator.statuses()
    assert operator.requeue(agent="ada", p_dead=True)["requeued"] == 3
    rows = operator.database.rows("select id, status, attempt_count from agent_inbox_items where status <> 'pending'")
    assert {row["id"] for row in rows} == {resting, other}
    assert operator.requeue(p_dead=True)["item_ids"] == [str(other)]


def test_c34_since_counts_from_when_an_item_was_given_up(operator: Operator, seed: Seed) -> None:
    old, new = seed.items("ada", 2, status="dead_letter")
    operator.database.execute(
        "update agent_inbox_items set failed_at = now() - interval '3 hours' where id = %s", [old]
    )
    operator.database.execute("update agent_inbox_items set failed_at = now() - interval '1 hour' where id = %s", [new])
    assert operator.requeue(p_dead=True, p_since="infinity")["requeued"] == 0
    assert operator.requeue(p_dead=True, p_since="2h")["item_ids"] == [str(new)]
    assert operator.requeue(p_dead=True, p_since="2020-01-01T00:00:00")["item_ids"] == [str(old)]
    with pytest.raises(psycopg.Error) as caught:
        operator.requeue(p_dead=True, p_since="soon")
    assert caught.value.sqlstate == "OD002"


def test_c34_what_an_operator_ended_comes_back_by_its_id_alone(operator: Operator, seed: Seed) -> None:
    item = seed.item("ada")
    assert operator.call("expire_inbox_items", p_item_ids=[item], p_reason=None)["expired"] == 1
    assert operator.requeue(p_dead=True)["requeued"] == 0
    assert operator.database.value("select count(*) from notifications") == 0
    assert operator.requeue(item)["requeued"] == 1


def test_c2_requeue_and_expire_leave_alone_what_somebody_holds(operator: Operator, seed: Seed) -> None:
    held, free = seed.items("ada", 2, status="dead_letter")
    bob = seed.item("bob", status="dead_letter")
    operator.requeue(agent="bob")  # makes the row of its state
    holder = operator.database.connect(autocommit=False)
    holder.execute("select from agent_inbox_items where id = %s for update", [held])
    holder.execute(
        "select from agent_wake_state where agent_id = (select id from agents where slug = 'bob') for update"
    )
    operator.connection.execute("set statement_timeout = '1s'")
    answer = operator.requeue(p_dead=True)
    assert (answer["item_ids"], answer["busy"]) == ([str(free)], 2)
    expired = operator.call("expire_inbox_items", p_item_ids=[held, free], p_reason="x")
    assert (expired["item_ids"], expired["busy"]) == ([str(free)], 0)
    assert operator.call("release_inbox_item", p_item_id=held)["code"] == "busy"
    holder.rollback()
    assert set(operator.requeue(p_dead=True)["item_ids"]) == {str(held), str(bob)}


def test_c2_a_pass_is_five_hundred_items(operator: Operator, seed: Seed) -> None:
    operator.database.execute(
        "insert into agent_inbox_items (agent_id, agent_slug, event_type, dedup_key, status)"
        " select id, slug, 'heartbeat', 'many:' || n, 'dead_letter' from agents, generate_series(1, 1100) n"
    )
    passes = []
    while (answer := operator.requeue(p_dead=True))["again"]:
        passes.append(answer["requeued"])
    assert [*passes, answer["requeued"]] == [500, 500, 100]


def test_c37_release_ends_a_lease_gives_the_attempt_back_and_voids_the_token(
    operator: Operator, seed: Seed, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher()
    item = seed.item("ada")
    leased = operator.database.call(
        "lease_inbox_items", {"p_tenant_id": DEFAULT_TENANT, "p_agent_slug": "ada", "p_lease_seconds": 6 * 3600}
    )[0]["lease_inbox_items"]["items"][0]
    agent = operator.database.value("select id from agents where slug = 'ada'")
    assert daemon.claim(agent)["skip_reason"] == "active_lease"
    assert operator.call("release_inbox_item", p_item_id=item, p_reason="gone home")["code"] == "ok"
    row = operator.database.row("select * from agent_inbox_items")
    assert (row["status"], row["attempt_count"], row["leased_until"]) == ("pending", 0, None)
    late = {"p_item_id": item, "p_lease_token": uuid.UUID(leased["lease_token"]), "p_outcome": "done"}
    assert operator.database.call("close_inbox_item", late)[0]["close_inbox_item"]["code"] == "lease_lost"
    note = operator.database.row("select * from notifications")
    assert (note["type"], note["body"], note["meta"]["item_id"]) == ("lease_released", "gone home", str(item))
    assert daemon.claim(agent)["granted"] is True
    assert operator.call("release_inbox_item", p_item_id=item)["code"] == "not_leased"
    assert operator.call("release_inbox_item", p_item_id=uuid.uuid4())["code"] == "not_found"


def test_c36_items_nobody_may_take_now_are_no_backlog(
    operator: Operator, seed: Seed, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher()
    seed.items("ada", 2)
    seed.items("idle", 3)
    operator.database.execute("update agents set status = 'paused' where slug = 'idle'")
    operator.database.execute(
        "update agent_inbox_items set created_at = now() - interval '2 days' where agent_slug = 'idle'"
    )
    elsewhere = seed.insert("tenants", id=uuid.uuid4(), slug="b", name="B")["id"]
    seed.crossed_item("ada", elsewhere)
    backlog = daemon.call("dispatcher_gauges", p_instance_id=daemon.id)["backlog"]
    assert (backlog["items"], backlog["over_1h"], backlog["waiting_for_paused"]) == (2, 0, 3)
    assert backlog["oldest_seconds"] < 60


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "294276-12-31"])
def test_c9_one_odd_row_is_one_odd_line(
    operator: Operator, seed: Seed, dispatcher: Callable[..., Dispatcher], moment: str
) -> None:
    daemon = dispatcher()
    agent = seed.agent("ada")
    assert daemon.claim(agent, seed.item("ada"))["granted"]
    operator.database.execute(
        "update agent_inbox_items set created_at = %s, leased_until = %s, failed_at = %s", [moment] * 3
    )
    operator.database.execute("update agent_wakes set claimed_at = %s, started_at = %s", [moment] * 2)
    seed.item("ada")
    settings = {"p_settings": psycopg.types.json.Jsonb({})}
    [shown] = operator.database.call(
        "dispatcher_status", {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "local"} | settings
    )
    assert shown["dispatcher_status"]["code"] == "ok"
    assert len(operator.call("list_inbox_items", p_agent=None, p_status=None, p_limit=None)["items"]) == 2
    assert len(operator.call("list_wakes", p_agent=None, p_limit=-1)["wakes"]) == 1


def test_c12_null_in_every_argument_is_an_answer_with_a_code(operator: Operator) -> None:
    nothing = {"p_tenant_id": None, "p_gateway": None}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("requeue_inbox_items", {"p_agent": None, "p_item_ids": None, "p_dead": None, "p_dry_run": None}),
        ("expire_inbox_items", {"p_item_ids": None, "p_reason": None}),
        ("release_inbox_item", {"p_item_id": None, "p_reason": None}),
        ("list_inbox_items", {"p_agent": None, "p_status": None, "p_limit": None}),
        ("list_wakes", {"p_agent": None, "p_limit": None}),
        ("request_wake", {"p_agent": None, "p_dry_run": None, "p_settings": None}),
        ("dispatcher_status", {"p_settings": None}),
    ]
    for function, arguments in calls:
        assert operator.call(function, **nothing, **arguments)["code"] == "unknown_gateway"
        assert operator.call(function, **arguments)["code"] in ("ok", "not_found", "unknown_agent"), function
