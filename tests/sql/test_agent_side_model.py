"""Random walks over lease, close and escalate, held against a small model of what an inbox is."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from dispatcher.local.postgres import PostgresServer
from tests.sql.test_agent_side import Inbox
from tests.support.database import Database, cloned

OUTCOMES = ("done", "failed", "released", "escalated")
MAX_ATTEMPTS = 3


@dataclass
class Item:
    """What the model believes of one item. `holder` is the token that may close it now."""

    status: str = "pending"
    attempts: int = 0
    resting: bool = False
    holder: str | None = None
    closed_by: dict[str, str] = field(default_factory=dict)

    @property
    def leasable(self) -> bool:
        open_now = self.status == "pending" or (self.status == "failed" and not self.resting)
        return self.attempts < MAX_ATTEMPTS and (open_now or (self.status == "leased" and self.holder is None))

    def lease(self, token: str | None) -> None:
        self.status, self.holder, self.attempts = "leased", token, self.attempts + 1
        self.closed_by = {}

    def close(self, token: str, outcome: str) -> str:
        """The code the database is to answer."""
        if token in self.closed_by:
            return "already" if self.closed_by[token] == outcome else "lease_lost"
        if self.status != "leased" or self.holder != token:
            return "lease_lost"
        self.holder = None
        self.closed_by = {token: outcome}
        self.attempts -= outcome == "released"
        self.resting = outcome == "failed"
        spent = "dead_letter" if self.attempts >= MAX_ATTEMPTS else "failed"
        self.status = {"released": "pending", "failed": spent}.get(outcome, "done")
        return "ok"


class Walk(RuleBasedStateMachine):
    """One agent, a few items, and whatever may happen to them."""

    inbox: ClassVar[Inbox]
    tokens: Bundle[tuple[str, str]] = Bundle("tokens")

    @initialize(number=st.integers(1, 3))
    def begin(self, number: int) -> None:
        self.slug = f"walker-{uuid.uuid4()}"
        self.agent_id = self.inbox.seed.agent(self.slug)
        self.items = {str(self.inbox.seed.item(self.agent_id)): Item() for _ in range(number)}

    @rule(target=tokens, limit=st.integers(1, 3))
    def lease(self, limit: int) -> MultipleResults[tuple[str, str]]:
        expected = [item_id for item_id, item in self.items.items() if item.leasable][:limit]
        leased = self.inbox.lease(self.slug, limit)["items"]
        assert [item["inbox_item_id"] for item in leased] == expected
        for item in leased:
            self.items[item["inbox_item_id"]].lease(item["lease_token"])
        return multiple(*((item["inbox_item_id"], item["lease_token"]) for item in leased))

    @rule(lease=tokens, outcome=st.sampled_from(OUTCOMES))
    def close(self, lease: tuple[str, str], outcome: str) -> None:
        item_id, token = lease
        item = {"inbox_item_id": item_id, "lease_token": token}
        answer = self.inbox.escalate(item) if outcome == "escalated" else self.inbox.close(item, outcome)
        assert answer["code"] == self.items[item_id].close(token, outcome)
        assert answer["applied"] == (answer["code"] in ("ok", "already"))

    @rule()
    def a_lease_ends(self) -> None:
        for item_id, item in self.items.items():
            if item.status == "leased":
                item.holder = None
                self.inbox.end_lease(item_id)
                return

    @rule()
    def time_passes(self) -> None:
        self.inbox.database.execute(
            "update public.agent_inbox_items set failed_at = failed_at - interval '1 hour' where agent_id = %s",
            (self.agent_id,),
        )
        for item in self.items.values():
            item.resting = False

    @rule()
    def a_caller_without_tokens_leases(self) -> None:
        """YourHQ's function knows no rest after a failure."""
        for item_id, item in self.items.items():
            if item.leasable or (item.status == "failed" and item.attempts < MAX_ATTEMPTS):
                [taken] = self.inbox.database.call("lease_inbox_item", {"p_agent_id": self.agent_id})
                assert str(taken["id"]) == item_id
                # What this item's last token closed is still on record; that token owns nothing any more.
                closed = item.closed_by
                item.lease(None)
                item.holder, item.closed_by = "somebody without a token", closed
                return

    @rule()
    def the_operator_retries(self) -> None:
        for item_id, item in self.items.items():
            if item.status in ("dead_letter", "failed"):
                self.inbox.database.execute(
                    "update public.agent_inbox_items set status = 'pending', attempt_count = 0 where id = %s",
                    (item_id,),
                )
                item.status, item.attempts, item.resting = "pending", 0, False
                return

    @invariant()
    def the_rows_are_what_the_model_says(self) -> None:
        rows = self.inbox.database.rows(
            "select id, status, attempt_count, completed_at, failed_at, leased_until > now() as live"
            " from public.agent_inbox_items where agent_id = %s",
            (self.agent_id,),
        )
        for row in rows:
            item = self.items[str(row["id"])]
            assert (row["status"], row["attempt_count"]) == (item.status, item.attempts)
            assert bool(row["live"]) == (item.status == "leased" and item.holder is not None)
            assert item.status != "done" or row["completed_at"]


@pytest.fixture(scope="module")
def shared(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    """One database for all walks; every walk has an agent of its own."""
    with cloned(cluster, migrated_template) as database:
        yield database


def test_every_walk_of_leases_and_closes_agrees_with_the_model(shared: Database) -> None:
    Walk.inbox = Inbox(shared)
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
