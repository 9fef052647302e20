"""Reports, corrections, releases, retries and new days in any order: the books balance with a small model."""

import contextlib
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dispatcher.local.postgres import PostgresServer
from tests.support.database import cloned
from tests.support.workflows import Workflows, fresh_workflows

CONFIGURED = Decimal("0.5")
COSTS = st.sampled_from(["0", "0.01", "0.3", "0.5", "0.7", "4"]).map(Decimal)
ACTS = (
    *("take", "take", "report", "report", "complete", "fail", "release", "fall_silent"),
    *("correct", "retry", "lost_report", "cancel", "new_day"),
)


@dataclass
class Account:
    """What one claim has cost so far."""

    session: str
    reserved: Decimal
    booked: Decimal = Decimal(0)
    reported: bool = False
    worked: bool = False


@dataclass
class Run:
    """A run as far as money goes; `account` is its present claim, `lost` those it has left behind."""

    state: str = "queued"
    account: Account | None = None
    lost: list[Account] = field(default_factory=list)


class Books(RuleBasedStateMachine):
    """The functions beside the model. `workflows` opens an empty database."""

    workflows: ClassVar[Callable[[], contextlib.AbstractContextManager[Workflows]]]

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.real = self.stack.enter_context(type(self).workflows())
        self.real.route(max_concurrent=100)
        self.real.settings = {"workflow_cost_estimate_usd": float(CONFIGURED)}
        self.real.set()
        self.runs: dict[uuid.UUID, Run] = {}
        self.today = self.earlier = Decimal(0)
        self.sessions = itertools.count(1)

    def teardown(self) -> None:
        self.stack.close()

    @initialize(number=st.integers(1, 3))
    def begin(self, number: int) -> None:
        self.budget = self.real.budget(1_000_000)
        for _ in range(number):
            self.runs[self.real.run()] = Run()

    # One rule with a choice, not a rule per choice: Hypothesis would leave most of those out of most examples.
    @rule(what=st.sampled_from(ACTS), which=st.integers(0, 2), cost=COSTS | st.none(), again=st.booleans())
    def step(self, what: str, which: int, cost: Decimal | None, again: bool) -> None:
        key = list(self.runs)[which % len(self.runs)]
        before = self.total()
        getattr(self, what)(key, self.runs[key], cost)
        if again and what in ("report", "complete", "correct", "lost_report"):
            getattr(self, what)(key, self.runs[key], cost)  # a lost answer is asked for again
        if what == "take":
            assert self.total() >= before  # work was added

    def total(self) -> Decimal:
        return self.today + sum((self.open_rest(run) for run in self.runs.values()), Decimal(0))

    @staticmethod
    def open_rest(run: Run) -> Decimal:
        if run.account is None or run.state not in ("dispatched", "running"):
            return Decimal(0)
        return max(run.account.reserved - run.account.booked, Decimal(0))

    def book(self, account: Account, total: Decimal) -> None:
        self.today += total - account.booked
        account.booked = total

    def assume(self, account: Account) -> None:
        """It ends without a report: what was reserved counts, at least what is configured."""
        if not account.reported:
            self.book(account, max(account.reserved, CONFIGURED))

    def take(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.state != "queued":
            return
        assert self.real.tick()["errors"] == []
        for one, other in self.runs.items():
            row = self.real.row(one)
            if other.state == "queued" and row["status"] == "dispatched":
                other.state, other.account = "dispatched", Account("", row["reserved_usd"])
        assert run.account is not None
        run.account.session = f"s{next(self.sessions)}"
        assert self.real.claim(key, run.account.session)["code"] == "ok"
        self.real.heartbeat(key, run.account.session)
        run.state, run.account.worked = "running", True

    def say(self, run: Run, cost: Decimal | None) -> dict[str, Any]:
        """Usage of a call, as the model books it."""
        assert run.account is not None
        if cost is None:
            return {}
        self.book(run.account, cost)
        run.account.reported = True
        return {"p_usage": {"cost_usd": float(cost)}}

    def report(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.account is None or not run.account.session or cost is None:
            return
        before = run.account.booked
        answer = self.real.usage(key, run.account.session, cost_usd=float(cost))
        self.say(run, cost)
        assert Decimal(str(answer["booked"]["cost_usd"])) == cost - before

    def complete(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        self.finish(key, run, cost, "completed")

    def fail(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        self.finish(key, run, cost, "failed")

    def finish(self, key: uuid.UUID, run: Run, cost: Decimal | None, how: str) -> None:
        if run.state == how and how == "completed" and run.account is not None:
            usage = {} if cost is None else {"p_usage": {"cost_usd": float(cost)}}
            assert self.real.complete(key, run.account.session, **usage)["code"] == "already"
            if cost is not None and not run.account.reported:
                self.say(run, cost)  # what was not known yet is news, also in a repeat
        if run.state != "running":
            return
        assert run.account is not None
        call = self.real.complete if how == "completed" else self.real.fail
        assert call(key, run.account.session, **self.say(run, cost))["code"] == "ok"
        self.assume(run.account)
        run.state = how

    def give_back(self, key: uuid.UUID, run: Run) -> None:
        assert run.account is not None
        self.assume(run.account)
        run.state = str(self.real.status(key))  # the fourth time it fails
        if run.state == "queued":
            run.lost.append(run.account)
            run.account = None

    def release(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.state == "running":
            assert run.account is not None
            assert self.real.release(key, run.account.session)["code"] == "ok"
            self.give_back(key, run)

    def fall_silent(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.state == "running":
            self.real.shift(key, "last_heartbeat_at", 601), self.real.shift(key, "claimed_at", 700)
            self.real.phase("released")
            self.give_back(key, run)

    def cancel(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.state in ("running", "queued", "dispatched"):
            self.real.call("cancel_workflow_run", p_tenant_id=self.real.tenant, p_run_id=key, p_actor="op")
            if run.account is not None and run.account.worked:
                self.assume(run.account)
            run.state = "cancelled"

    def correct(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if cost is None:
            return
        answer = self.real.call(
            "correct_workflow_usage",
            p_tenant_id=self.real.tenant,
            p_run_id=key,
            p_usage={"cost_usd": float(cost)},
            p_actor="op",
        )
        has_account = run.account is not None and run.account.worked
        assert answer["code"] == ("ok" if has_account else "nothing_booked")
        if has_account:
            self.say(run, cost)

    def retry(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if run.state == "failed":
            self.real.call("retry_workflow_run", p_tenant_id=self.real.tenant, p_run_id=key, p_actor="op")
            assert run.account is not None
            run.lost.append(run.account)
            run.state, run.account = "queued", None

    def lost_report(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        if not run.lost or cost is None:
            return
        answer = self.real.usage(key, run.lost[-1].session, cost_usd=float(cost))
        assert (answer["code"], answer["usage_booked"]) == ("not_yours", True)
        self.book(run.lost[-1], cost)

    def new_day(self, key: uuid.UUID, run: Run, cost: Decimal | None) -> None:
        self.real.book_back()
        self.earlier, self.today = self.earlier + self.today, Decimal(0)

    @invariant()
    def the_books_balance(self) -> None:
        listed = self.real.call("list_budgets", p_tenant_id=self.real.tenant)["budgets"]
        [budget] = [one for one in listed if one["id"] == str(self.budget)]
        found = (Decimal(str(budget["settled_usd"])), Decimal(str(budget["reserved_usd"])))
        assert found == (self.today, self.total() - self.today)

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        booked = self.real.database.value("select coalesce(sum(cost_usd), 0) from workflow_bookings")
        accounts = [
            account
            for run in self.runs.values()
            for account in (*run.lost, *([run.account] if run.account is not None else []))
        ]
        assert booked == self.today + self.earlier == sum((account.booked for account in accounts), Decimal(0))


@pytest.mark.timeout(240)
def test_the_books_follow_the_model(cluster: PostgresServer, migrated_template: str) -> None:
    with cloned(cluster, migrated_template) as database:
        run_state_machine_as_test(
            type("BooksHere", (Books,), {"workflows": staticmethod(lambda: fresh_workflows(database))}),
            settings=settings(
                max_examples=12,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
