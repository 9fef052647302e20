"""The agent's SQL functions: what they answer and write, on our schema and on a YourHQ one."""

import uuid
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.conftest import Dispatcher
from tests.support.database import Connection, Database
from tests.support.seed import DEFAULT_TENANT, Seed

pytestmark = pytest.mark.kept_database

ITEM_KEYS = {
    "inbox_item_id", "event_type", "summary", "task_id", "comment_id", "contact_id",
    "attempt", "leased_until", "lease_token", "context",
}  # fmt: skip
FUNCTIONS = [
    "merge_inbox_context",
    "clean_inbox_reason",
    "find_inbox_agent",
    "lock_inbox_lease",
    "inbox_close_verdict",
    "lease_one_inbox_item",
    "inbox_items_of_lease",
    "lease_due_items",
    "close_leased_item",
    "escalate_leased_item",
    "find_sender_wake",
    "find_posted_item",
    "insert_post",
]
CALLED = ["lease_inbox_items", "close_inbox_item", "escalate_inbox_item", "inbox_overview", "post_inbox_item"]


class Inbox:
    """The calls an agent's scripts make, as service_role, and the rows behind them."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.seed = Seed(database)
        self.agent_id = self.seed.agent("ada")
        self.connection = database.connect("service_role")

    def call(self, function: str, *, on: Connection | None = None, **arguments: Any) -> Any:
        shaped = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in arguments.items()}
        [row] = self.database.call(function, shaped, on=on or self.connection)
        [value] = row.values()
        return value

    def lease(self, slug: str = "ada", limit: int = 1, **arguments: Any) -> Any:
        return self.call("lease_inbox_items", p_tenant_id=DEFAULT_TENANT, p_agent_slug=slug, p_limit=limit, **arguments)

    def leased(self, **arguments: Any) -> Any:
        [item] = self.lease(**arguments)["items"]
        return item

    def close(self, item: Any, outcome: str, reason: str | None = None, **arguments: Any) -> Any:
        return self.call(
            "close_inbox_item",
            p_item_id=item["inbox_item_id"],
            p_lease_token=item["lease_token"],
            p_outcome=outcome,
            p_reason=reason,
            **arguments,
        )

    def escalate(self, item: Any, reason: str = "needs a human") -> Any:
        return self.call(
            "escalate_inbox_item",
            p_item_id=item["inbox_item_id"],
            p_lease_token=item["lease_token"],
            p_reason=reason,
        )

    def post(self, to: str = "bob", sender: str = "ada", **arguments: Any) -> Any:
        given = {"p_event_type": "task_assignment", "p_summary": "please look", "p_context": {}} | arguments
        return self.call(
            "post_inbox_item",
            p_tenant_id=DEFAULT_TENANT,
            p_from_agent_slug=sender,
            p_to_agent_slug=to,
            **given,
        )

    def row(self, item_id: object) -> dict[str, Any]:
        return self.database.row("select * from public.agent_inbox_items where id = %s", (item_id,))

    def lease_row(self, item_id: object) -> dict[str, Any]:
        return self.database.row("select * from public.inbox_item_leases where item_id = %s", (item_id,))

    def end_lease(self, item_id: object) -> None:
        """Let the lease run out, as time would."""
        self.database.execute(
            "update public.agent_inbox_items set leased_until = now() - interval '1 second' where id = %s",
            (item_id,),
        )


@pytest.fixture(params=["database", "yourhq_database"])
def inbox(request: pytest.FixtureRequest) -> Inbox:
    return Inbox(request.getfixturevalue(request.param))


@pytest.fixture
def own(database: Database) -> Inbox:
    """On our own schema only, where the schema makes no difference."""
    return Inbox(database)


def test_a_lease_carries_everything_the_script_prints(inbox: Inbox) -> None:
    task = inbox.seed.task("Write the page", description="all of it")
    item_id = inbox.seed.item(task_id=task, summary="Write", context={"model_override": "m"}, comment_id=uuid.uuid4())
    answer = inbox.lease()
    [item] = answer["items"]
    assert answer["agent"] == {"id": str(inbox.agent_id), "slug": "ada"}
    assert set(item) == ITEM_KEYS
    assert item["inbox_item_id"] == str(item_id)
    assert item["attempt"] == 1
    assert item["context"]["model_override"] == "m"
    assert item["context"]["task"]["title"] == "Write the page"
    assert item["context"]["task"]["description"] == "all of it"
    row, lease = inbox.row(item_id), inbox.lease_row(item_id)
    assert row["status"] == "leased"
    assert row["leased_at"] == lease["leased_at"]
    assert row["leased_until"] == lease["leased_until"]
    assert str(lease["lease_token"]) == item["lease_token"]
    assert lease["wake_id"] is None
    assert (row["leased_until"] - row["leased_at"]).total_seconds() == 120


def test_the_oldest_come_first_and_no_more_than_asked(inbox: Inbox) -> None:
    ids = [str(item_id) for item_id in inbox.seed.items("ada", 4)]
    assert [item["inbox_item_id"] for item in inbox.lease(limit=3)["items"]] == ids[:3]
    assert [item["inbox_item_id"] for item in inbox.lease(limit=3)["items"]] == ids[3:]
    assert inbox.lease(limit=3)["items"] == []


def test_an_unknown_agent_or_another_tenants_is_no_agent_here(own: Inbox) -> None:
    elsewhere = uuid.uuid4()
    own.seed.item(own.seed.agent("eve", gateway="far", tenant_id=elsewhere))
    assert own.lease("nobody") == {"code": "unknown_agent"}
    assert own.lease("eve") == {"code": "unknown_agent"}
    assert own.call("inbox_overview", p_tenant_id=DEFAULT_TENANT, p_agent_slug="eve") == {"code": "unknown_agent"}
    assert len(own.call("lease_inbox_items", p_tenant_id=elsewhere, p_agent_slug="eve")["items"]) == 1


def test_an_item_follows_its_agent_through_a_renaming(own: Inbox) -> None:
    item_id = own.seed.item()
    own.database.execute("update public.agents set slug = 'ada-2' where id = %s", (own.agent_id,))
    assert own.lease("ada") == {"code": "unknown_agent"}
    assert own.leased(slug="ada-2")["inbox_item_id"] == str(item_id)


@pytest.mark.parametrize(
    ("columns", "leasable"),
    [
        ("status = 'pending'", True),
        ("status = 'pending', attempt_count = 3", False),
        ("status = 'failed', attempt_count = 1, failed_at = now() - interval '29 s'", False),
        ("status = 'failed', attempt_count = 1, failed_at = now() - interval '31 s'", True),
        ("status = 'failed', attempt_count = 2, failed_at = now() - interval '59 s'", False),
        ("status = 'failed', attempt_count = 2, failed_at = now() - interval '61 s'", True),
        ("status = 'failed', attempt_count = 3, failed_at = now() - interval '1 day'", False),
        (
            "status = 'failed', attempt_count = 11, max_attempts = 99, failed_at = now() - interval '899 s'",
            False,
        ),
        (
            "status = 'failed', attempt_count = 90, max_attempts = 99, failed_at = now() - interval '901 s'",
            True,
        ),
        (
            # C24: what an agent writes into a reason is text, and no state.
            "status = 'failed', failed_at = now(), context = '{\"last_failure_reason\": \"agent_stalled\"}'",
            False,
        ),
        ("status = 'leased', attempt_count = 1, leased_until = now() + interval '1 s'", False),
        ("status = 'leased', attempt_count = 1, leased_until = now() - interval '1 s'", True),
        ("status = 'leased', attempt_count = 3, leased_until = now() - interval '1 s'", False),
        ("status = 'done', completed_at = now()", False),
        ("status = 'dead_letter'", False),
    ],
)
def test_what_is_due_is_leased_and_nothing_else(own: Inbox, columns: str, leasable: bool) -> None:
    item_id = own.seed.item()
    own.database.execute(f"update public.agent_inbox_items set {columns} where id = %s", (item_id,))
    assert len(own.lease()["items"]) == leasable


def test_limits_outside_the_bounds_are_brought_inside(own: Inbox) -> None:
    own.seed.items("ada", 2)
    assert len(own.lease(limit=0)["items"]) == 1
    item = own.leased(limit=-5, p_lease_seconds=-1)
    row = own.row(item["inbox_item_id"])
    assert (row["leased_until"] - row["leased_at"]).total_seconds() == 1


def test_a_lease_names_the_live_wake_it_is_taken_in(own: Inbox, dispatcher: Callable[..., Dispatcher]) -> None:
    item_id = own.seed.item()
    grant = dispatcher().claim(own.agent_id, item_id)
    own.lease()
    assert str(own.lease_row(item_id)["wake_id"]) == grant["wake_id"]


@pytest.mark.parametrize("outcome", ["done", "failed", "released"])
def test_closing_ends_the_lease_and_a_repeat_changes_nothing(inbox: Inbox, outcome: str) -> None:
    inbox.seed.item()
    item = inbox.leased()
    status, attempt = {"done": ("done", 1), "failed": ("failed", 1), "released": ("pending", 0)}[outcome]
    first = inbox.close(item, outcome, "no luck")
    assert first == {"applied": True, "code": "ok", "status": status, "attempt": attempt, "max_attempts": 3}
    after = inbox.row(item["inbox_item_id"])
    assert inbox.close(item, outcome, "again") == first | {"code": "already"}
    assert inbox.row(item["inbox_item_id"]) == after
    assert after["leased_until"] is None
    assert (after["completed_at"] is not None) == (outcome == "done")
    assert (after["failed_at"] is not None) == (outcome == "failed")
    assert after["context"] == ({"last_failure_reason": "no luck"} if outcome == "failed" else {})
    lease = inbox.lease_row(item["inbox_item_id"])
    assert lease["outcome"] == outcome
    assert lease["closed_at"] is not None


@pytest.mark.parametrize("second", ["done", "failed", "released"])
@pytest.mark.parametrize("first", ["done", "failed", "released"])
def test_a_second_different_outcome_is_refused(own: Inbox, first: str, second: str) -> None:
    own.seed.item()
    item = own.leased()
    own.close(item, first)
    before = own.row(item["inbox_item_id"])
    assert own.close(item, second)["code"] == ("already" if first == second else "lease_lost")
    assert own.row(item["inbox_item_id"]) == before


def test_failing_with_no_attempts_left_makes_a_dead_letter(inbox: Inbox) -> None:
    item_id = inbox.seed.item(attempt_count=2)
    item = inbox.leased()
    assert item["attempt"] == 3
    answer = inbox.close(item, "failed", "broken for good")
    assert (answer["code"], answer["status"]) == ("ok", "dead_letter")
    assert inbox.row(item_id)["context"]["last_failure_reason"] == "broken for good"
    assert inbox.lease_row(item_id)["outcome"] == "dead_letter"
    assert inbox.close(item, "failed")["code"] == "already"


@pytest.mark.parametrize("context", [[1, 2], "text", 7, None], ids=["array", "string", "number", "null"])
def test_a_context_that_is_no_object_is_kept_beside_the_reason(own: Inbox, context: object) -> None:
    item_id = own.seed.item(context=Jsonb(context))
    own.close(own.leased(), "failed", "why")
    assert own.row(item_id)["context"] == {"original_context": context, "last_failure_reason": "why"}


def test_reasons_are_bounded_and_never_empty(own: Inbox) -> None:
    long_id, empty_id = own.seed.items("ada", 2)
    own.close(own.leased(), "failed", "x" * 200_000)
    own.close(own.leased(), "failed", "  ")
    assert len(own.row(long_id)["context"]["last_failure_reason"]) == 4000
    assert own.row(empty_id)["context"]["last_failure_reason"] == "no reason given"


def test_a_wrong_token_item_or_outcome_changes_nothing(own: Inbox) -> None:
    item_id = own.seed.item()
    item = own.leased()
    before = own.row(item_id)
    assert own.close(item | {"lease_token": uuid.uuid4()}, "done")["code"] == "lease_lost"
    assert own.close(item | {"lease_token": None}, "done")["code"] == "lease_lost"
    assert own.close(item, "escalated")["code"] == "invalid"
    assert own.call(
        "close_inbox_item", p_item_id=item_id, p_lease_token=item["lease_token"], p_outcome=None
    )["code"] == "invalid"  # fmt: skip
    unknown = own.close(item | {"inbox_item_id": uuid.uuid4()}, "done")
    assert unknown == {
        "applied": False,
        "code": "not_found",
        "status": None,
        "attempt": None,
        "max_attempts": None,
    }
    assert own.row(item_id) == before


def test_an_ended_lease_closes_nothing_even_when_nobody_else_took_the_item(own: Inbox) -> None:
    item_id = own.seed.item()
    item = own.leased()
    own.end_lease(item_id)
    before = own.row(item_id)
    for answer in (own.close(item, "done"), own.close(item, "failed"), own.escalate(item)):
        assert (answer["applied"], answer["code"]) == (False, "lease_lost")
    assert own.row(item_id) == before


def test_ff43_an_old_token_cannot_touch_what_another_attempt_holds_or_finished(inbox: Inbox) -> None:
    item_id = inbox.seed.item()
    old = inbox.leased()
    inbox.end_lease(item_id)
    new = inbox.leased()
    assert new["attempt"] == 2
    held = inbox.row(item_id)
    for outcome in ("done", "failed", "released"):
        assert inbox.close(old, outcome)["code"] == "lease_lost"
    assert inbox.row(item_id) == held
    inbox.close(new, "done")
    finished = inbox.row(item_id)
    for outcome in ("done", "failed", "released"):
        assert inbox.close(old, outcome)["code"] == "lease_lost"
    assert inbox.escalate(old)["code"] == "lease_lost"
    assert inbox.row(item_id) == finished


def test_ff43_a_token_is_void_once_a_caller_without_tokens_took_the_item_over(inbox: Inbox) -> None:
    item_id = inbox.seed.item()
    old = inbox.leased()
    # The interface's Retry, then a script of YourHQ's own: same attempt number, live lease, no token.
    inbox.database.execute(
        "update public.agent_inbox_items set status = 'pending', attempt_count = 0 where id = %s", (item_id,)
    )
    [taken] = inbox.database.call("lease_inbox_item", {"p_agent_id": inbox.agent_id}, on=inbox.connection)
    assert (taken["id"], taken["attempt_count"]) == (item_id, 1)
    assert inbox.close(old, "done")["code"] == "lease_lost"
    assert inbox.row(item_id)["status"] == "leased"
    inbox.database.call("complete_inbox_item", {"p_item_id": item_id}, on=inbox.connection)
    assert inbox.close(old, "failed")["code"] == "lease_lost"
    assert inbox.row(item_id)["status"] == "done"


def test_the_functions_of_yourhq_go_on_working(inbox: Inbox) -> None:
    first, second = inbox.seed.items("ada", 2)
    inbox.seed.database.execute("update public.agent_inbox_items set max_attempts = 1 where id = %s", (second,))
    taken = [inbox.database.call("lease_inbox_item", {"p_agent_id": inbox.agent_id}) for _ in range(2)]
    assert [rows[0]["id"] for rows in taken] == [first, second]
    inbox.database.call("fail_inbox_item", {"p_item_id": first})
    inbox.database.call("fail_inbox_item", {"p_item_id": second, "p_reason": "gone"})
    assert inbox.row(first)["status"] == "failed"
    assert inbox.row(second)["status"] == "dead_letter"
    assert inbox.row(second)["context"]["last_failure_reason"] == "gone"


def test_ff42_a_renewed_lease_is_still_its_holders_and_nobody_elses(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    item_id = own.seed.item()
    daemon = dispatcher(lease_seconds=60)
    grant = daemon.claim(own.agent_id, item_id)
    daemon.started(grant)
    item = own.leased(p_lease_seconds=2)
    daemon.heartbeat(grant)
    row = own.row(item_id)
    assert (row["leased_until"] - row["leased_at"]).total_seconds() > 55
    assert own.lease()["items"] == []
    assert own.close(item, "done")["code"] == "ok"


def test_escalating_blocks_the_task_tells_the_operator_and_closes_the_item(inbox: Inbox) -> None:
    task = inbox.seed.task("Ship it", status="in_progress")
    item_id = inbox.seed.item(task_id=task, summary="Ship", context={"kept": 1})
    item = inbox.leased()
    answer = inbox.escalate(item, "no access to the server")
    assert answer == {"applied": True, "code": "ok", "status": "done", "attempt": 1, "max_attempts": 3}
    row = inbox.row(item_id)
    assert row["status"] == "done"
    assert row["completed_at"] is not None
    assert row["context"] == {
        "kept": 1, "outcome": "escalated", "escalation_reason": "no access to the server",
    }  # fmt: skip
    assert inbox.lease_row(item_id)["outcome"] == "escalated"
    assert inbox.database.value("select status from public.tasks where id = %s", (task,)) == "blocked"
    note = inbox.database.row("select * from public.notifications")
    assert note["type"] == "agent_escalation"
    assert note["title"] == "Ada needs help: Ship"
    assert note["body"] == "no access to the server"
    assert (note["entity_type"], note["entity_id"]) == ("task", task)
    assert (note["actor_type"], note["actor_agent_id"]) == ("agent", inbox.agent_id)
    assert note["meta"]["inbox_item_id"] == str(item_id)
    assert inbox.escalate(item)["code"] == "already"
    assert inbox.close(item, "done")["code"] == "lease_lost"
    assert inbox.database.value("select count(*) from public.notifications") == 1


@pytest.mark.parametrize("status", ["done", "cancelled"])
def test_escalating_late_does_not_open_an_ended_task_again(own: Inbox, status: str) -> None:
    task = own.seed.task(status=status)
    own.seed.item(task_id=task)
    assert own.escalate(own.leased())["code"] == "ok"
    assert own.database.value("select status from public.tasks where id = %s", (task,)) == status


def test_escalating_an_item_without_a_task_points_at_the_item(own: Inbox) -> None:
    item_id = own.seed.item(summary=None, event_type="heartbeat")
    own.escalate(own.leased())
    note = own.database.row("select title, entity_type, entity_id from public.notifications")
    assert note == {"title": "Ada needs help: heartbeat", "entity_type": "inbox_item", "entity_id": item_id}


def test_the_overview_shows_what_waits_and_leases_nothing(inbox: Inbox) -> None:
    pending = inbox.seed.item()
    inbox.seed.item(status="failed", attempt_count=1, failed_at="now")
    inbox.seed.item(status="failed", attempt_count=3, failed_at="now")
    inbox.seed.item(status="done")
    inbox.seed.item("bob")
    before = inbox.database.rows("select * from public.agent_inbox_items order by id")
    seen = inbox.call("inbox_overview", p_tenant_id=DEFAULT_TENANT, p_agent_slug="ada")
    assert seen["agent"]["slug"] == "ada"
    assert seen["actionable_count"] == 1
    assert seen["by_status"] == {"pending": 1, "failed": 2}
    assert [entry["status"] for entry in seen["items"]] == ["pending", "failed", "failed"]
    assert seen["items"][0]["inbox_item_id"] == str(pending)
    assert [entry["due_at"] is None for entry in seen["items"]] == [False, False, True]
    assert inbox.database.rows("select * from public.agent_inbox_items order by id") == before


def test_the_overview_lists_the_fifty_oldest(own: Inbox) -> None:
    own.seed.items("ada", 60)
    seen = own.call("inbox_overview", p_tenant_id=DEFAULT_TENANT, p_agent_slug="ada")
    assert (seen["actionable_count"], len(seen["items"])) == (60, 50)


def test_ff22_a_slug_with_reserved_characters_finds_its_own_items_only(own: Inbox) -> None:
    hostile = 'ops,lead(1)"x"'
    odd, plain = own.seed.item(hostile), own.seed.item("ops")
    assert [item["inbox_item_id"] for item in own.lease(hostile, limit=9)["items"]] == [str(odd)]
    assert [item["inbox_item_id"] for item in own.lease("ops", limit=9)["items"]] == [str(plain)]
    assert own.lease("op%", limit=9) == {"code": "unknown_agent"}


def test_ff26_hostile_text_goes_in_and_comes_out_unchanged(own: Inbox) -> None:
    summary = "\u202e'; drop table x; --\n\x1b[31m" + "長" * 70_000
    own.seed.item(summary=summary, context={"text": summary})
    item = own.leased()
    assert item["summary"] == summary
    assert item["context"]["text"] == summary
    assert own.close(item, "failed", summary)["code"] == "ok"


def test_a_post_reaches_the_other_agent_and_says_where_it_came_from(
    inbox: Inbox,
) -> None:
    bob, task = inbox.seed.agent("bob"), inbox.seed.task()
    answer = inbox.post(p_context={"task_id": str(task), "why": "you know it"})
    assert (answer["applied"], answer["code"], answer["chain_depth"]) == (True, "ok", 0)
    row = inbox.row(answer["inbox_item_id"])
    assert (row["agent_id"], row["agent_slug"], row["task_id"], row["status"]) == (
        bob,
        "bob",
        task,
        "pending",
    )
    assert row["summary"] == "please look"
    assert row["context"] == {"task_id": str(task), "why": "you know it", "from_agent": "ada"}
    origin = inbox.database.row("select * from public.inbox_item_origins")
    assert (origin["from_agent_id"], origin["wake_id"]) == (inbox.agent_id, None)


@pytest.mark.parametrize("task_id", ["nonsense", "'; drop table tasks"])
def test_a_post_whose_context_calls_something_else_a_task_id_is_still_a_post(own: Inbox, task_id: str) -> None:
    own.seed.agent("bob")
    answer = own.post(p_context={"task_id": task_id})
    assert own.row(answer["inbox_item_id"])["task_id"] is None


def test_f9_a_post_about_a_task_that_is_not_there_or_another_tenants_is_refused(own: Inbox) -> None:
    own.seed.agent("bob")
    stranger = own.seed.tenant("stranger", id=uuid.UUID(int=9))
    for task_id in (str(uuid.UUID(int=7)), str(own.seed.task("theirs", stranger))):
        answer = own.post(p_context={"task_id": task_id})
        assert (answer["applied"], answer["code"]) == (False, "unknown_task")
        assert task_id in answer["detail"]


@pytest.mark.parametrize("summary", ["", " \t\n", None])
def test_f9_a_post_that_says_nothing_is_refused(own: Inbox, summary: str | None) -> None:
    own.seed.agent("bob")
    answer = own.post(p_summary=summary)
    assert (answer["applied"], answer["code"]) == (False, "invalid")
    assert "summary" in answer["detail"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"sender": "nobody"}, "unknown_agent"),
        ({"to": "nobody"}, "unknown_recipient"),
        ({"p_event_type": "gossip"}, "invalid"),
        ({"p_event_type": None}, "invalid"),
        ({"p_context": Jsonb([1])}, "invalid"),
        ({"p_context": Jsonb({"big": "x" * 300_000})}, "invalid"),
        ({"p_request_key": "k" * 501}, "invalid"),
    ],
    ids=["sender", "recipient", "event", "no event", "context", "size", "key"],
)
def test_a_post_that_cannot_be_is_refused_with_its_reason(own: Inbox, arguments: Any, code: str) -> None:
    own.seed.agent("bob")
    answer = own.post(**arguments)
    assert (answer["applied"], answer["code"]) == (False, code)
    assert own.database.value("select count(*) from public.agent_inbox_items") == 0


def test_ff54_a_note_to_oneself_needs_the_word_that_it_is_meant(own: Inbox) -> None:
    assert own.post(to="ada") == {"applied": False, "code": "self_handoff_unmarked", "detail": None}
    assert own.post(to="ada", p_context={"self_handoff": "true"})["code"] == "self_handoff_unmarked"
    assert own.database.value("select count(*) from public.agent_inbox_items") == 0
    assert own.post(to="ada", p_context={"self_handoff": True})["code"] == "ok"


def test_ff54_a_chain_of_wakes_grows_with_every_post(own: Inbox, dispatcher: Callable[..., Dispatcher]) -> None:
    daemon = dispatcher()
    item_id = own.seed.item()
    for depth in range(1, 4):
        grant = daemon.claim(own.agent_id, item_id)
        assert grant["granted"], grant
        daemon.started(grant)
        answer = own.post(to="ada", p_context={"self_handoff": True})
        assert (answer["code"], answer["chain_depth"]) == ("ok", depth)
        origin = own.database.row(
            "select * from public.inbox_item_origins where item_id = %s", (answer["inbox_item_id"],)
        )
        assert str(origin["wake_id"]) == grant["wake_id"]
        own.close(own.leased(), "done")
        daemon.ended(grant)
        item_id = uuid.UUID(answer["inbox_item_id"])


def test_ff54_c27_a_post_belongs_to_the_wake_its_script_knows_for_a_day(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    own.seed.agent("bob")
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, own.seed.item())
    daemon.started(grant)
    daemon.ended(grant)
    wake = {"p_wake_id": uuid.UUID(grant["wake_id"])}
    depths = []
    for age in ("1 second", "61 seconds", "11 minutes", "23 hours", "25 hours"):
        own.database.execute("update public.agent_wakes set ended_at = clock_timestamp() - %s::interval", (age,))
        known, unknown = own.post(p_summary=f"known {age}", **wake), own.post(p_summary=f"unknown {age}")
        depths.append((age, known["chain_depth"], unknown["chain_depth"]))
    assert depths == [
        ("1 second", 1, 1), ("61 seconds", 1, 1), ("11 minutes", 1, 0), ("23 hours", 1, 0), ("25 hours", 0, 0),
    ]  # fmt: skip


def test_c27_a_late_post_counts_from_its_own_wake_although_another_one_lives(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    own.seed.agent("bob")
    daemon = dispatcher()
    first = daemon.claim(own.agent_id, own.seed.item())
    own.database.execute("update public.agent_wakes set chain_depth = 4")
    daemon.started(first)
    daemon.ended(first)
    second = daemon.claim(own.agent_id, path="command")
    assert second["granted"], second
    assert own.post(p_wake_id=uuid.UUID(first["wake_id"]))["chain_depth"] == 5
    assert own.post(p_summary="x", p_wake_id=uuid.UUID(second["wake_id"]))["chain_depth"] == 1
    # Another agent's wake is none of the sender's.
    assert own.post(sender="bob", to="ada", p_wake_id=uuid.UUID(first["wake_id"]))["chain_depth"] == 0


def test_ff54_a_note_to_oneself_is_no_new_context_for_a_failing_agent(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    own.seed.agent("bob")
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, own.seed.item())
    daemon.started(grant)
    daemon.ended(grant, exit_code=1)
    failures = "select consecutive_failures from public.agent_wake_state where agent_id = %s"
    assert own.database.value(failures, (own.agent_id,)) == 1
    own.post(to="ada", p_context={"self_handoff": True})
    own.post(sender="bob", to="ada")
    assert daemon.claim(own.agent_id)["granted"] is True
    assert own.database.value(failures, (own.agent_id,)) == 0


def test_ff68_the_same_post_within_a_wake_is_one_item(own: Inbox, dispatcher: Callable[..., Dispatcher]) -> None:
    own.seed.agent("bob")
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, own.seed.item())
    daemon.started(grant)
    first = own.post()
    assert own.post() == first | {"code": "already"}
    assert own.post(p_summary="another text")["inbox_item_id"] != first["inbox_item_id"]
    assert own.post(p_context={"more": 1})["inbox_item_id"] != first["inbox_item_id"]
    daemon.ended(grant)
    assert own.post() == first | {"code": "already"}
    second = daemon.claim(own.agent_id, path="command")
    assert second["granted"], second
    daemon.started(second)
    assert own.post()["code"] == "ok"


def test_ff68_outside_a_wake_the_same_post_is_one_item_for_some_minutes(own: Inbox) -> None:
    own.seed.agent("bob")
    first = own.post()
    assert own.post() == first | {"code": "already"}
    assert own.post(sender="bob", to="ada")["code"] == "ok"

    def key(at: str) -> str:
        return str(own.call("dispatcher.inbox_content_key", p_wake_id=None, p_content="c", p_at=at))

    same, later = key("2026-11-30 12:09:59Z"), key("2026-11-30 12:10:00Z")
    assert (same == key("2026-11-30 12:00:00Z"), later == same) == (True, False)


@pytest.mark.parametrize(
    ("columns", "swallowed"),
    [
        ("status = 'pending'", True),
        ("status = 'leased', attempt_count = 3, leased_until = now() + interval '1 minute'", True),
        ("status = 'failed', attempt_count = 1, failed_at = now()", True),
        ("status = 'failed', attempt_count = 3, failed_at = now()", False),
        ("status = 'done', completed_at = now()", False),
        ("status = 'dead_letter', failed_at = now()", False),
    ],
)
def test_c26_an_item_swallows_the_same_post_while_it_is_open_and_not_afterwards(
    own: Inbox, columns: str, swallowed: bool
) -> None:
    own.seed.agent("bob")
    first = own.post(p_post_id=uuid.uuid4())
    own.database.execute(f"update public.agent_inbox_items set {columns} where id = %s", (first["inbox_item_id"],))
    again = own.post(p_post_id=uuid.uuid4())
    assert (again["inbox_item_id"] == first["inbox_item_id"], again["code"] == "already") == (swallowed, swallowed)
    assert own.row(again["inbox_item_id"])["status"] != "done"


def test_c26_the_same_call_again_gets_its_own_answer_whatever_became_of_the_item(own: Inbox) -> None:
    own.seed.agent("bob")
    call = {"p_post_id": uuid.uuid4()}
    first = own.post(**call)
    own.close(own.leased(slug="bob"), "done")
    assert own.post(**call) == first | {"code": "already"}
    assert own.post(sender="bob", to="ada", **call)["code"] == "ok"  # an id of another sender's is another call
    assert own.post(p_post_id=uuid.uuid4())["code"] == "ok"


def test_c26_a_request_key_keeps_its_meaning_after_the_item_was_closed(own: Inbox) -> None:
    own.seed.agent("bob")
    first = own.post(p_request_key="report-7", p_post_id=uuid.uuid4())
    own.close(own.leased(slug="bob"), "done")
    assert own.post(p_request_key="report-7", p_post_id=uuid.uuid4()) == first | {"code": "already"}


def test_ff68_a_request_key_is_one_item_per_sender_whatever_the_wake(own: Inbox) -> None:
    own.seed.agent("bob")
    first = own.post(p_request_key="report-7")
    assert own.post(p_request_key="report-7", p_summary="again") == first | {"code": "already"}
    assert own.post(sender="bob", to="ada", p_request_key="report-7")["code"] == "ok"
    assert own.database.value("select count(*) from public.agent_inbox_items") == 2


def test_c24_text_of_an_agent_is_no_state(own: Inbox) -> None:
    """Once `agent_stalled` in the reason meant that the dispatcher had set the item aside: it came again at once."""
    item_id = own.seed.item()
    own.close(own.leased(), "failed", "agent_stalled")
    assert own.row(item_id)["context"]["last_failure_reason"] == "agent_stalled"
    assert own.lease()["items"] == []
    own.database.execute("update public.agent_inbox_items set failed_at = failed_at - interval '31 s'")
    assert own.leased()["attempt"] == 2


def test_c25_a_token_is_bound_to_the_wake_it_was_taken_in(own: Inbox, dispatcher: Callable[..., Dispatcher]) -> None:
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, own.seed.item())
    item = own.leased(p_wake_id=uuid.UUID(grant["wake_id"]))
    before = own.row(item["inbox_item_id"])
    assert own.close(item, "done", p_wake_id=uuid.uuid4())["code"] == "lease_lost"
    refused = own.call(
        "escalate_inbox_item", p_item_id=uuid.UUID(item["inbox_item_id"]), p_lease_token=uuid.UUID(item["lease_token"]),
        p_reason="x", p_wake_id=uuid.uuid4(),
    )  # fmt: skip
    assert refused["code"] == "lease_lost"
    assert own.row(item["inbox_item_id"]) == before
    assert own.close(item, "done", p_wake_id=uuid.UUID(grant["wake_id"]))["code"] == "ok"


def test_c25_an_attempt_whose_agent_has_another_wake_by_now_leases_nothing(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher()
    own.seed.items("ada", 2)
    first = daemon.claim(own.agent_id)
    daemon.started(first)
    daemon.ended(first, "lost", None)
    old = {"p_wake_id": uuid.UUID(first["wake_id"])}
    second = daemon.claim(own.agent_id, path="command")
    assert second["granted"], second
    assert own.lease(**old) == {"code": "wake_over"}
    item = own.leased(p_wake_id=uuid.UUID(second["wake_id"]))
    assert str(own.lease_row(item["inbox_item_id"])["wake_id"]) == second["wake_id"]
    daemon.started(second)
    daemon.ended(second)
    # Nobody else works for the agent: a chat may go on under the name of its last wake.
    own.database.execute("update public.agent_inbox_items set status = 'pending', attempt_count = 0")
    assert own.lease_row(own.leased(**old)["inbox_item_id"])["wake_id"] is None


def test_c22_a_dead_letter_of_an_agent_is_told(inbox: Inbox) -> None:
    item_id = inbox.seed.item(attempt_count=2)
    inbox.close(inbox.leased(), "failed", "broken for good")
    [note] = inbox.database.rows("select * from public.notifications where type = 'dead_letter'")
    assert note["meta"]["item_ids"] == [str(item_id)]
    assert "broken for good" in note["body"]


def test_c22_a_dead_letter_by_yourhqs_own_function_or_by_hand_is_told(own: Inbox) -> None:
    first = own.seed.item(attempt_count=3)
    own.database.call("fail_inbox_item", {"p_item_id": first, "p_reason": "the mail server refused"})
    own.seed.agent("bob")
    for _ in range(2):
        own.seed.item("bob")
    own.database.execute("update public.agent_inbox_items set status = 'dead_letter' where status = 'pending'")
    own.database.execute("update public.agent_inbox_items set status = 'dead_letter', updated_at = now()")
    notes = own.database.rows(
        "select body, meta from public.notifications where type = 'dead_letter' order by created_at"
    )
    assert [note["meta"]["items"] for note in notes] == [
        1,
        2,
    ]  # one for each agent and statement, none when told before
    assert notes[0]["meta"]["item_ids"] == [str(first)]
    assert "the mail server refused" in notes[0]["body"]


def test_c22_a_wake_names_the_item_that_its_agent_failed_by_yourhqs_function(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher()
    item_id = own.seed.item(attempt_count=2)
    grant = daemon.claim(own.agent_id)
    daemon.started(grant)
    own.database.call("lease_inbox_item", {"p_agent_id": own.agent_id, "p_lease_seconds": 60})
    own.database.call("fail_inbox_item", {"p_item_id": item_id})
    ended = daemon.ended(grant)
    assert (ended["state"], ended["dead_letters"]) == ("succeeded", [str(item_id)])


@pytest.mark.own_database
@pytest.mark.faults_expected
def test_c10_a_notification_that_cannot_be_written_stops_no_close(own: Inbox) -> None:
    own.database.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'pg_net is off'; end $$;"
        " create trigger refuse before insert on public.notifications for each row execute function public.refuse()"
    )
    spent, task = own.seed.item(attempt_count=2), own.seed.task()
    own.close(own.leased(), "failed", "why")
    own.seed.item(task_id=task)
    assert own.escalate(own.leased())["code"] == "ok"
    assert own.row(spent)["status"] == "dead_letter"
    assert own.database.value("select status from public.tasks where id = %s", (task,)) == "blocked"
    faults = own.database.rows("select side_write from public.dispatcher_faults order by id")
    assert [fault["side_write"] for fault in faults] == ["notification dead_letter", "notification agent_escalation"]


def test_c2_a_row_somebody_holds_is_busy_after_a_moment_and_nothing_was_changed(own: Inbox) -> None:
    own.seed.agent("bob")
    own.seed.items("ada", 2)
    item = own.leased()
    own.post(p_summary="makes the lock's row")
    before = own.database.rows("select * from public.agent_inbox_items order by id")
    holder = own.database.connect(autocommit=False)
    holder.execute("select from public.agent_inbox_items for update")
    holder.execute("select from public.agents for update")
    for answer in (own.close(item, "done"), own.escalate(item), own.post(p_summary="other")):
        assert (answer["applied"], answer["code"]) == (False, "busy")
    assert own.lease()["items"] == []
    holder.rollback()
    assert own.database.rows("select * from public.agent_inbox_items order by id") == before
    assert own.close(item, "done")["code"] == "ok"


NOTHING = [
    ("lease_inbox_items", {"p_tenant_id": None, "p_agent_slug": None}, "unknown_agent"),
    ("inbox_overview", {"p_tenant_id": None, "p_agent_slug": None}, "unknown_agent"),
    ("close_inbox_item", {"p_item_id": None, "p_lease_token": None, "p_outcome": None}, "invalid"),
    ("close_inbox_item", {"p_item_id": None, "p_lease_token": None, "p_outcome": "done"}, "not_found"),
    ("escalate_inbox_item", {"p_item_id": None, "p_lease_token": None, "p_reason": None}, "not_found"),
    (
        "post_inbox_item",
        {
            "p_tenant_id": None,
            "p_from_agent_slug": None,
            "p_to_agent_slug": None,
            "p_event_type": None,
            "p_summary": None,
        },
        "unknown_agent",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "code"), NOTHING)
def test_c12_null_is_refused_by_name(own: Inbox, function: str, arguments: dict[str, Any], code: str) -> None:
    assert own.call(function, **arguments)["code"] == code


@pytest.fixture(params=["anon", "authenticated"])
def stranger(request: pytest.FixtureRequest, own: Inbox) -> Connection:
    return own.database.connect(request.param)


def test_ff27_only_the_service_role_may_call_them(own: Inbox, stranger: Connection) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        own.call("lease_inbox_items", on=stranger, p_tenant_id=DEFAULT_TENANT, p_agent_slug="ada")
    rights = own.database.rows(
        "select proname, prosecdef, proconfig, has_function_privilege('anon', oid, 'execute')"
        " or has_function_privilege('authenticated', oid, 'execute') as open,"
        " has_function_privilege('service_role', oid, 'execute') as served,"
        " obj_description(oid, 'pg_proc') as comment"
        " from pg_proc where pronamespace::regnamespace::text in ('public', 'dispatcher') and proname = any (%s)",
        (FUNCTIONS + CALLED,),
    )
    assert sorted(right["proname"] for right in rights) == sorted(FUNCTIONS + CALLED)  # one signature per name
    for right in rights:
        assert not right["open"], right
        assert right["served"], right
        assert not right["prosecdef"], right
        bounded = ["lock_timeout=1s"] if right["proname"] in CALLED else []
        assert right["proconfig"] == ['search_path=""', *bounded], right
        assert right["comment"], right


def test_a_hundred_thousand_items_lease_at_once(own: Inbox) -> None:
    own.database.execute(
        "insert into public.agent_inbox_items (agent_id, agent_slug, event_type, dedup_key, created_at,"
        " status, attempt_count, failed_at)"
        " select %s, 'ada', 'heartbeat', 'bulk:' || n, now() - n * interval '1 ms',"
        " case when n %% 2 = 0 then 'failed' else 'pending' end::public.inbox_item_status, 1, now()"
        " from generate_series(1, 100000) as n",
        (own.agent_id,),
    )
    own.database.execute("analyze public.agent_inbox_items")
    [timed] = own.database.rows(
        "explain (analyze, format json) select public.lease_inbox_items(%s, 'ada', 3)", (DEFAULT_TENANT,)
    )
    assert timed["QUERY PLAN"][0]["Execution Time"] < 100
