import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.supabase.realtime_health import Trouble
from dispatcher.supabase.realtime_paths import (
    CanaryFrame,
    Hint,
    broadcast_plan,
    changes_plan,
    read_broadcast,
    read_change,
    read_refusal,
)

ME = "11111111-1111-1111-1111-111111111111"
TENANT = "00000000-0000-0000-0000-000000000000"
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def change(event: str, table: str, **record: object) -> dict[str, object]:
    return {"type": event, "table": table, "schema": "public", "record": record}


@pytest.mark.parametrize(
    ("data", "meaning"),
    [
        (
            change("INSERT", "agent_inbox_items", id="i", agent_id="a"),
            Hint("inbox", "a", "i", "postgres_changes", ("i",)),
        ),
        (
            change("UPDATE", "agent_inbox_items", id="i", agent_id="a", status="failed"),
            Hint("inbox", "a", "i", "postgres_changes", ("i",)),
        ),
        (change("UPDATE", "agent_inbox_items", id="i", agent_id="a", status="leased"), None),
        (change("UPDATE", "agent_inbox_items", id="i", agent_id="a", status="done"), None),
        # a status that was trimmed away may be any
        (
            change("UPDATE", "agent_inbox_items", id="i"),
            Hint("inbox", None, "i", "postgres_changes", ("i",)),
        ),
        (change("INSERT", "agent_inbox_items"), Hint("inbox", None, None, "postgres_changes")),
        (change("UPDATE", "agents", id="a"), Hint("agent", "a", None, "postgres_changes")),
        (change("UPDATE", "agent_budgets", agent_id="a"), Hint("budget", "a", None, "postgres_changes")),
        (change("UPDATE", "dispatcher_instances", id=ME), CanaryFrame(None)),
        (change("UPDATE", "dispatcher_instances", id="another"), None),
        (change("INSERT", "something_else", id="x"), None),
        (
            {"type": "INSERT", "table": "agent_inbox_items", "record": None},
            Hint("inbox", None, None, "postgres_changes"),
        ),
    ],
)
def test_a_change_is_read_as_a_hint(data: dict[str, object], meaning: object) -> None:
    assert read_change(data, ME) == meaning


@pytest.mark.parametrize(
    ("event", "payload", "meaning"),
    [
        ("inbox", {"agent_id": "a", "item_id": "i"}, Hint("inbox", "a", "i", "broadcast", ("i",))),
        (
            "inbox",
            {"agent_id": "a", "item_id": "i", "item_ids": ["i", "j"]},
            Hint("inbox", "a", "i", "broadcast", ("i", "j")),
        ),
        ("inbox", {}, Hint("inbox", None, None, "broadcast")),
        ("agent", {"agent_id": "a"}, Hint("agent", "a", None, "broadcast")),
        ("canary", {"instance_id": ME, "nonce": "n"}, CanaryFrame("n")),
        ("canary", {"instance_id": "another", "nonce": "n"}, None),
        ("unheard_of", {"agent_id": "a"}, None),
    ],
)
def test_a_broadcast_is_read_as_a_hint(event: str, payload: dict[str, object], meaning: object) -> None:
    assert read_broadcast(event, payload, ME) == meaning


@given(
    st.sampled_from(["inbox", "agent", "canary"]),
    st.dictionaries(st.sampled_from(["agent_id", "item_id", "item_ids", "nonce"]), anything),
)
def test_no_broadcast_is_too_odd_to_read(event: str, payload: dict[str, Any]) -> None:
    said = read_broadcast(event, payload, ME)
    if isinstance(said, Hint):
        assert said.agent_id is None or isinstance(said.agent_id, str)
        assert all(isinstance(item, str) for item in said.item_ids)


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ({"reason": "InvalidJWTToken: Token has expired 42 seconds ago"}, Trouble.REFUSED),
        ({"reason": "JwtSignatureError: Failed to validate JWT signature"}, Trouble.REFUSED),
        ({"reason": "MalformedJWT: The token provided is not a valid JWT"}, Trouble.REFUSED),
        ({"reason": "InvalidJWTToken: Fields `role` and `exp` are required in JWT"}, Trouble.REFUSED),
        ({"reason": "Unauthorized: You do not have permissions to read from this Channel topic"}, Trouble.REFUSED),
        ({"message": "Token has expired 0 seconds ago", "extension": "system", "status": "error"}, Trouble.REFUSED),
        ({"reason": "ChannelRateLimitReached: Too many channels"}, Trouble.OVERLOADED),
        ({"reason": "ClientJoinRateLimitReached: Too many joins per second"}, Trouble.OVERLOADED),
        ({"reason": "ConnectionRateLimitReached: Too many connected users"}, Trouble.OVERLOADED),
        ({"reason": "channel_crash"}, Trouble.CHANNEL),
        (
            {"message": "Replication connection was not established in time", "extension": "system"},
            Trouble.CHANNEL,
        ),
        (
            {
                "message": 'Unable to subscribe to changes with given parameters. Exception: ERROR 42704 role "x"',
                "extension": "postgres_changes",
            },
            Trouble.MISCONFIGURED,
        ),
    ],
)
def test_the_servers_words_decide_what_kind_of_trouble_it_is(text: dict[str, str], trouble: Trouble) -> None:
    assert read_refusal(json.dumps(text)) == (trouble, text.get("message") or text.get("reason"))


@pytest.mark.parametrize("text", ["", "no reply to the join", "[1]", "closed by the server"])
def test_words_that_are_no_json_are_kept(text: str) -> None:
    assert read_refusal(text) == (Trouble.CHANNEL, text or "closed by the server")


def test_broadcast_joins_one_private_channel_and_asks_for_readiness() -> None:
    [plan] = broadcast_plan("gateway:g")
    assert plan.topic == "gateway:g"
    assert plan.options["config"]["private"]
    assert plan.options["config"]["broadcast"] == {"ack": False, "self": False, "replication_ready": True}


def test_new_items_share_a_channel_with_the_canary_that_vouches_for_them() -> None:
    first, others, runs = changes_plan(TENANT, ME, split=False)
    assert [(entry.table, entry.filter) for entry in first.entries] == [
        ("agent_inbox_items", f"tenant_id=eq.{TENANT}"),
        ("dispatcher_instances", f"id=eq.{ME}"),
    ]
    assert (first.essential, first.canary, others.essential, others.canary) == (True, True, False, False)
    assert (runs.tables, runs.essential, runs.canary) == ("workflow_runs", False, False)


def test_after_a_refusal_each_table_stands_alone() -> None:
    plans = changes_plan(TENANT, ME, split=True)
    assert all(len(plan.entries) == 1 for plan in plans)
    assert [plan.tables for plan in plans if plan.essential] == ["agent_inbox_items"]
    assert [plan.tables for plan in plans if plan.canary] == ["dispatcher_instances"]
    whole = [entry for plan in changes_plan(TENANT, ME, split=False) for entry in plan.entries]
    assert sorted(plan.entries[0].table for plan in plans) == sorted(entry.table for entry in whole)


def test_the_topics_of_changes_cannot_be_guessed_or_met_again() -> None:
    topics = [plan.topic for _ in range(50) for plan in changes_plan(TENANT, ME, split=True)]
    assert len(set(topics)) == len(topics)
    assert all(len(topic) > 32 for topic in topics)


@given(anything, anything, anything)
def test_h4_no_frame_raises(event: Any, payload: Any, record: Any) -> None:
    for kind in (event, "inbox", "agent", "canary", "run"):
        read_broadcast(kind, payload, ME)
    read_change(payload, ME)
    for table in ("agent_inbox_items", "agents", "agent_budgets", "workflow_runs", "dispatcher_instances"):
        read_change({"type": "UPDATE", "table": table, "record": record}, ME)
    read_refusal(json.dumps(payload))
    read_refusal("[" * 200_000)
