"""Hints, the launcher and the reporter, without a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Self
from uuid import UUID, uuid4

import pytest

from dispatcher.errors import ServiceUnavailable, ShuttingDown, SpawnError
from dispatcher.inbox.book import WakeBook
from dispatcher.inbox.decisions import Decisions
from dispatcher.inbox.launcher import Launcher
from dispatcher.inbox.model import Ended, Grant, Refusal, Report, ReportAnswer, ReportResult, Verdict
from dispatcher.inbox.reporter import Reporter
from dispatcher.inbox.worker import HintedItems, Hints, LocalAgents, WakeWorker
from dispatcher.runtime.health import Health
from dispatcher.runtime.wakeup import DueTimes
from tests.support.waiting import wait_until

ITEM = UUID(int=1)
AGENT = UUID(int=2)


def grant() -> Grant:
    nothing: dict[str, Any] = dict.fromkeys(("event_type", "summary", "item_created_at", "blockers_error"))
    nothing |= dict.fromkeys(("model_override", "thinking_override", "workspace_slug"))
    return Grant(
        wake_id=uuid4(),
        claim_token=uuid4(),
        agent_id=AGENT,
        agent_slug="ada",
        path="event",
        item_ids=(ITEM,),
        blockers=(),
        **nothing,
    )


# ------------------------------------------------------------------------------------------ hints


@pytest.mark.parametrize(
    ("paths", "echoes"),
    [
        ("ab", [False, True]),
        ("aa", [False, False]),
        # A second event of the item, moments later, heard on both paths again: news once more, from whichever is first.
        ("abab", [False, True, False, True]),
        ("abba", [False, True, False, True]),
        ("aabb", [False, False, True, False]),
    ],
)
def test_each_hint_has_one_echo(paths: str, echoes: list[bool]) -> None:
    items = HintedItems()
    assert [items.is_echo(ITEM, path) for path in paths] == echoes
    assert items.knows([ITEM])


def test_closed_hints_give_nothing_not_even_what_was_waiting() -> None:
    due: DueTimes[UUID] = DueTimes()
    hints = Hints(LocalAgents(), due)
    hints.item(AGENT, [ITEM], "broadcast")
    hints.later(uuid4(), 0.0)
    hints.close()
    assert hints.take() == []


def test_a_worker_without_hints_to_come_waits_for_its_stop() -> None:
    takes: list[float] = []

    class Counting(Hints):
        def take(self) -> list[Any]:
            takes.append(time.monotonic())
            return super().take()

    hints = Counting(LocalAgents(), DueTimes())
    unused: Any = None
    worker = WakeWorker(
        "inbox", hints=hints, store=unused, agents=unused, decisions=unused, health=Health().loop("claims", None)
    )
    hints.close()
    worker.start()
    wait_until(lambda: bool(takes), what="a first look")
    assert not worker.join(0.3)
    assert len(takes) == 1
    worker.request_stop()
    assert worker.join(10)


# ------------------------------------------------------------------------------------------ launcher


@pytest.mark.parametrize(
    ("error", "ending"), [(ShuttingDown("no more"), "interrupted"), (SpawnError("no file"), "spawn_failed")]
)
def test_a_start_that_met_a_stop_is_no_failure_of_the_agent(error: Exception, ending: str) -> None:
    class Refusing:
        def start(self, *_args: object, **_options: object) -> Any:
            raise error

        def stop(self, wake_id: str, cause: str) -> bool:
            return False

    reports: list[Report] = []
    launcher = Launcher(
        book=WakeBook(),
        executable="/bin/true",
        host_id="host",
        resolve_agent=lambda _workspace, slug: slug,
        child_environment=lambda _wake_id: {},
    )
    launcher.connect(Refusing(), reports.append)
    launcher.launch(grant())
    assert [report.ending for report in reports if isinstance(report, Ended)] == [ending]


def test_what_cannot_be_counted_is_started_all_the_same() -> None:
    launched: list[Grant] = []

    def fail(_reason: str) -> None:
        raise RuntimeError("the meter is broken")

    verdicts = [grant(), Refusal(uuid4(), "bob", "cooldown(1s)"), grant()]
    decisions = Decisions(launched.append, DueTimes(), on_decision=fail)
    with pytest.raises(RuntimeError):
        decisions.act_on(verdicts)
    assert len(launched) == 2


# ------------------------------------------------------------------------------------------ reporter


class Database:
    """Answers reports; refuses those of `bad` wakes until told otherwise."""

    def __init__(self) -> None:
        self.bad: dict[UUID, str] = {}
        self.calls: list[list[UUID]] = []
        self.away = 0
        self.grants: list[Verdict] = []

    def report(self, reports: Sequence[Report], _claim_limit: int) -> ReportAnswer:
        self.calls.append([report.wake_id for report in reports])
        if self.away:
            self.away -= 1
            raise ServiceUnavailable("away")
        results = [self._result(report) for report in reports]
        verdicts, self.grants = self.grants, []
        return ReportAnswer(results, verdicts)

    def _result(self, report: Report) -> ReportResult:
        error = self.bad.get(report.wake_id)
        code = "ok" if error is None else "error"
        return ReportResult(report.wake_id, "ended", applied=error is None, code=code, error=error)


class Desk:
    """A running reporter and what came out of it."""

    def __init__(self, database: Database, on_result: Callable[[ReportResult], None] = lambda _result: None) -> None:
        self.results: list[ReportResult] = []
        self.verdicts: list[tuple[float, Verdict]] = []
        self.health = Health()
        self._on_result = on_result
        store: Any = database
        self.reporter = Reporter(
            store,
            WakeBook(),
            2,
            on_verdicts=lambda verdicts: self.verdicts.extend((time.monotonic(), one) for one in verdicts),
            on_result=self._note,
            health=self.health.loop("reports", None),
        )

    def _note(self, result: ReportResult) -> None:
        self.results.append(result)
        self._on_result(result)

    def __enter__(self) -> Self:
        self.reporter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.reporter.request_stop()
        assert self.reporter.join(10)
        assert self.reporter.error is None


def ended() -> Ended:
    return Ended(uuid4(), uuid4(), "exited", 0)


def test_grants_and_other_reports_do_not_wait_for_a_refused_one() -> None:
    database = Database()
    good, bad, later = ended(), ended(), ended()
    database.bad[bad.wake_id] = "broken row"
    database.grants = [grant()]
    with Desk(database) as desk:
        desk.reporter.put(bad)
        wait_until(lambda: len(desk.verdicts) == 1, what="the grant of the same answer")
        desk.reporter.put(good)
        wait_until(lambda: any(one.wake_id == good.wake_id and one.applied for one in desk.results), what="the good")
        wait_until(lambda: sum(bad.wake_id in call for call in database.calls) >= 2, what="a second try")
        database.bad.clear()
        wait_until(lambda: any(one.wake_id == bad.wake_id and one.applied for one in desk.results), what="the bad")
        desk.reporter.put(later)
        wait_until(lambda: any(one.wake_id == later.wake_id for one in desk.results), what="the last")


def test_a_refused_report_rests_longer_each_time_while_others_come_and_go() -> None:
    database = Database()
    bad = ended()
    database.bad[bad.wake_id] = "broken row"
    tries: list[float] = []

    def note(result: ReportResult) -> None:
        if result.wake_id == bad.wake_id:
            tries.append(time.monotonic())

    with Desk(database, note) as desk:
        desk.reporter.put(bad)

        def go_on() -> bool:
            desk.reporter.put(ended())
            return len(tries) >= 3

        wait_until(go_on, what="three tries")
        database.bad.clear()
    first, second = tries[1] - tries[0], tries[2] - tries[1]
    assert 0.35 <= first < second
    assert second >= 0.75


def test_a_refused_report_is_tried_once_more_at_a_stop() -> None:
    database = Database()
    bad = ended()
    database.bad[bad.wake_id] = "broken row"
    with Desk(database) as desk:
        desk.reporter.put(bad)
        wait_until(lambda: len(desk.results) >= 1, what="a refusal")
        database.bad.clear()
    assert desk.results[-1].applied


def test_an_answer_that_cannot_be_acted_on_loses_nothing_else() -> None:
    database = Database()
    reports = [ended() for _ in range(3)]
    database.away = 1  # so that all three go out together

    def fail_first(result: ReportResult) -> None:
        if result.wake_id == reports[0].wake_id:
            raise RuntimeError("no")

    database.grants = [grant()]
    with Desk(database, fail_first) as desk:
        writers = [Thread(target=desk.reporter.put, args=(report,)) for report in reports]
        for writer in writers:
            writer.start()
        wait_until(lambda: len(desk.results) == 3 and len(desk.verdicts) == 1, what="all results and the grant")
