"""Runs, claims, crashes and a budget against a small model: in whatever order things happen, both end up the same."""

import contextlib
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dispatcher.local.postgres import PostgresServer
from tests.support.database import cloned
from tests.support.workflows import Workflows, fresh_workflows

# Every run costs one unit, reported or not, so that the estimate never moves.
UNIT = Decimal("0.2")
LIMIT, RETRIES, RELEASES = 2, 3, 3
ACTIVE = ("dispatched", "claimed", "running")
CHOICES = (
    *(
        "tick",
        "tick",
        "claim",
        "claim",
        "heartbeat",
        "complete",
        "fail",
        "release",
        "fall_silent",
        "enqueue",
        "set_cap",
    ),
    *(
        "cancel",
        "retry",
        "a_lost_session_reports_late",
        "fall_silent_again",
        "take_and_fall_silent",
        "work_and_fall_silent",
        "nobody_survives_it",
        "nobody_survives_it",
    ),
)


@dataclass
class Run:
    """What is known of a run."""

    status: str = "queued"
    attempts: int = 0
    releases: int = 0
    session: str | None = None
    accounted: bool = False
    lost: list[str] = field(default_factory=list)
    booked: set[str] = field(default_factory=set)
    kept: int = 0
    stale: bool = False

    @property
    def units(self) -> int:
        """What it has settled: this claim's unit and those of earlier ones."""
        return self.accounted + len(self.booked) + self.kept


class Model:
    """The rules of the specification in a few lines; `order` is the queue by age."""

    def __init__(self) -> None:
        self.runs: dict[uuid.UUID, Run] = {}
        self.order: list[uuid.UUID] = []
        self.cap: int | None = None

    @property
    def settled(self) -> int:
        return sum(run.units for run in self.runs.values())

    @property
    def reserved(self) -> int:
        return sum(run.status in ACTIVE and not run.accounted for run in self.runs.values())

    def fits(self, without: int = 0) -> bool:
        return self.cap is None or self.settled + self.reserved - without + 1 <= self.cap

    def tick(self) -> None:
        for key in self.order:
            run = self.runs[key]
            active = sum(one.status in ACTIVE for one in self.runs.values())
            if run.status == "queued" and active < LIMIT and self.fits():
                run.status, run.attempts, run.stale = "dispatched", run.attempts + 1, False
        for key in self.order:
            run = self.runs[key]
            if run.stale and run.status == "dispatched":
                self._retry(run)
        for key in self.order:
            run = self.runs[key]
            if run.stale and run.status in ("claimed", "running"):
                self.give_back(run)

    def _retry(self, run: Run) -> None:
        if run.attempts - run.releases > RETRIES:
            run.status = "failed"
        elif self.fits(without=1):
            run.attempts += 1
        else:
            run.status = "queued"
        run.stale = False

    def give_back(self, run: Run) -> None:
        assert run.session is not None
        run.lost.append(run.session)
        if run.releases >= RELEASES:
            run.status, run.accounted = "failed", True
            return
        if run.accounted or run.status == "running":
            run.booked.add(run.session)
        run.status, run.releases, run.session, run.accounted, run.stale = "queued", run.releases + 1, None, False, False

    def end(self, run: Run, status: str) -> None:
        if run.status in ("claimed", "running"):
            run.accounted = True
        run.status, run.stale = status, False


class Life(RuleBasedStateMachine):
    """The functions beside the model. `workflows` opens an empty database."""

    workflows: ClassVar[Callable[[], contextlib.AbstractContextManager[Workflows]]]

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.real = self.stack.enter_context(type(self).workflows())
        self.real.route(max_concurrent=LIMIT)
        self.real.settings = {"workflow_cost_estimate_usd": float(UNIT)}
        self.budget: uuid.UUID | None = None
        self.model = Model()
        self.sessions = itertools.count(1)

    def teardown(self) -> None:
        self.stack.close()

    @initialize(number=st.integers(1, 4), cap=st.none() | st.integers(0, 8))
    def begin(self, number: int, cap: int | None) -> None:
        for _ in range(number):
            self.enqueue()
        self.set_cap(cap)

    # One rule with a choice, not a rule per choice: Hypothesis would leave most of those out of most examples.
    @rule(
        what=st.sampled_from(CHOICES), which=st.integers(0, 3), reports=st.booleans(), cap=st.none() | st.integers(0, 8)
    )
    def step(self, what: str, which: int, reports: bool, cap: int | None) -> None:
        key = self.model.order[which % len(self.model.order)]
        if what in ("heartbeat", "complete", "fail", "work_and_fall_silent", "nobody_survives_it"):
            getattr(self, what)(key, reports)
        elif what == "set_cap":
            self.set_cap(cap)
        elif what in ("tick", "enqueue"):
            getattr(self, what)()
        else:
            getattr(self, what)(key)

    def enqueue(self) -> None:
        key = self.real.run()
        self.model.runs[key] = Run()
        self.model.order.append(key)

    def tick(self) -> None:
        assert self.real.tick()["errors"] == []
        self.model.tick()

    def set_cap(self, cap: int | None) -> None:
        self.model.cap = cap
        if self.budget is not None:
            self.real.database.execute("update budgets set active = false")
        self.budget = None if cap is None else self.real.budget(cap * UNIT, period="monthly")

    def claim(self, key: uuid.UUID) -> None:
        run, session = self.model.runs[key], f"s{next(self.sessions)}"
        got = self.real.claim(key, session)["code"]
        if run.status == "dispatched":
            assert got == "ok"
            run.status, run.session, run.stale = "claimed", session, False
        elif run.status in ("claimed", "running"):
            assert got == "claimed_by_another"
        else:
            assert got == ("not_dispatched" if run.status == "queued" else "finished")

    def heartbeat(self, key: uuid.UUID, reports: bool) -> None:
        run = self.model.runs[key]
        usage = {"cost_usd": float(UNIT)} if reports else None
        got = self.real.heartbeat(key, run.session or "nobody", p_usage=usage)["code"]
        if run.status in ("claimed", "running"):
            assert got == "ok"
            run.status, run.stale = "running", False
            run.accounted |= reports
        else:
            assert got == ("finished" if run.session else "not_yours")
            run.accounted |= reports and run.session is not None

    def complete(self, key: uuid.UUID, reports: bool) -> None:
        self.finish(key, reports, "completed")

    def fail(self, key: uuid.UUID, reports: bool) -> None:
        self.finish(key, reports, "failed")

    def fall_silent_again(self, key: uuid.UUID) -> None:
        """Twice in a row, with whoever takes it in between."""
        for _ in range(2):
            self.fall_silent(key)
            self.tick()
            self.tick()

    def take_and_fall_silent(self, key: uuid.UUID) -> None:
        """Somebody takes it and dies at once."""
        self.tick()
        self.claim(key)
        self.fall_silent(key)
        self.tick()

    def work_and_fall_silent(self, key: uuid.UUID, reports: bool) -> None:
        """Somebody takes it, works, says what it cost or not, and dies."""
        self.tick()
        self.claim(key)
        self.heartbeat(key, reports)
        self.fall_silent(key)
        self.tick()

    def nobody_survives_it(self, key: uuid.UUID, reports: bool) -> None:
        """Whoever takes it dies over it, to the end of its releases."""
        for _ in range(RELEASES + 1):
            self.work_and_fall_silent(key, reports)

    def finish(self, key: uuid.UUID, reports: bool, how: str) -> None:
        run = self.model.runs[key]
        usage = {"cost_usd": float(UNIT)} if reports else None
        call = self.real.complete if how == "completed" else self.real.fail
        got = call(key, run.session or "nobody", p_usage=usage)["code"]
        if run.status in ("claimed", "running"):
            assert got == "ok"
            self.model.end(run, how)
        elif run.session is None:
            assert got == "not_yours"
        else:
            assert got == ("already" if run.status == how else "finished")
            run.accounted |= reports

    def release(self, key: uuid.UUID) -> None:
        run = self.model.runs[key]
        got = self.real.release(key, run.session or "nobody")["code"]
        if run.status in ("claimed", "running"):
            assert got == "ok"
            self.model.give_back(run)
        else:
            assert got == ("finished" if run.session else "not_yours")

    def a_lost_session_reports_late(self, key: uuid.UUID) -> None:
        run = self.model.runs[key]
        lost = [session for session in run.lost if session != run.session]
        if lost:
            got = self.real.complete(key, lost[-1], p_usage={"cost_usd": float(UNIT)})
            assert (got["applied"], got["code"]) == (False, "not_yours")
            run.booked.add(lost[-1])

    def cancel(self, key: uuid.UUID) -> None:
        run = self.model.runs[key]
        got = self.real.call("cancel_workflow_run", p_tenant_id=self.real.tenant, p_run_id=key, p_actor="op")["code"]
        if run.status in ("queued", *ACTIVE):
            assert got == "ok"
            self.model.end(run, "cancelled")
        else:
            assert got == ("already" if run.status == "cancelled" else "finished")

    def retry(self, key: uuid.UUID) -> None:
        run = self.model.runs[key]
        got = self.real.call("retry_workflow_run", p_tenant_id=self.real.tenant, p_run_id=key, p_actor="op")["code"]
        if run.status != "failed":
            assert got == "not_failed"
            return
        assert got == "ok"
        fresh = Run(kept=run.units, lost=[])
        self.model.runs[key] = fresh
        self.model.order.remove(key)
        self.model.order.append(key)

    def fall_silent(self, key: uuid.UUID) -> None:
        """Its agent, or whoever should claim it, is dead for long enough."""
        run = self.model.runs[key]
        if run.status == "dispatched":
            self.real.shift(key, "dispatched_at", 301)
            run.stale = True
        elif run.status in ("claimed", "running"):
            self.real.shift(key, "claimed_at", 700)
            self.real.shift(key, "last_heartbeat_at", 601)
            run.stale = True

    @invariant()
    def the_same_runs(self) -> None:
        rows = self.real.database.rows("select id, status, dispatch_attempts, release_count from workflow_runs")
        found = {row["id"]: (row["status"], row["dispatch_attempts"], row["release_count"]) for row in rows}
        assert found == {key: (run.status, run.attempts, run.releases) for key, run in self.model.runs.items()}

    @invariant()
    def never_too_many(self) -> None:
        assert sum(run.status in ACTIVE for run in self.model.runs.values()) <= LIMIT

    @invariant()
    def the_same_money(self) -> None:
        if self.budget is None:
            return
        listed = self.real.call("list_budgets", p_tenant_id=self.real.tenant)["budgets"]
        [budget] = [one for one in listed if one["id"] == str(self.budget)]
        found = (Decimal(str(budget["settled_usd"])), Decimal(str(budget["reserved_usd"])))
        assert found == (self.model.settled * UNIT, self.model.reserved * UNIT)

    @invariant()
    def every_step_is_in_the_history(self) -> None:
        broken = self.real.database.rows(
            """select run.id from workflow_runs as run
                 left join lateral (select to_status from workflow_run_events
                                     where run_id = run.id order by id desc limit 1) as last on true
                where run.status <> coalesce(last.to_status, 'queued')"""
        )
        assert broken == []


@pytest.mark.timeout(150)
def test_runs_claims_crashes_and_budgets_follow_the_model(cluster: PostgresServer, migrated_template: str) -> None:
    with cloned(cluster, migrated_template) as database:
        run_state_machine_as_test(
            type("LifeHere", (Life,), {"workflows": staticmethod(lambda: fresh_workflows(database))}),
            settings=settings(
                max_examples=12,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
