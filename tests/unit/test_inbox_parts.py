"""Hints, the launcher and the reporter, without a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Self
from uuid import UUID, uuid4

import pytest

from dispatcher.errors import RestError, ServiceUnavailable, ShuttingDown, SpawnError
from dispatcher.inbox import sweep
from dispatcher.inbox.book import BookedWake, WakeBook
from dispatcher.inbox.decisions import Decisions, rest_after
from dispatcher.inbox.hints import HintedItems, Hints, LocalAgents
from dispatcher.inbox.launcher import Launcher
from dispatcher.inbox.model import (
    Claim,
    Ended,
    Grant,
    Look,
    PhaseAnswer,
    Refusal,
    Report,
    ReportAnswer,
    ReportResult,
    Started,
    Verdict,
)
from dispatcher.inbox.namesakes import Namesakes
from dispatcher.inbox.reporter import Reporter
from dispatcher.inbox.worker import ClaimTroubles, WakeWorker
from dispatcher.runtime.health import Health
from dispatcher.runtime.wakeup import DueTimes
from tests.support.gateway import no_hold
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
    hints = Hints(LocalAgents(), due, WakeBook())
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

    hints = Counting(LocalAgents(), DueTimes(), WakeBook())
    unused: Any = None
    health = Health().loop("claims", None)
    worker = WakeWorker(
        "inbox",
        hints=hints,
        store=unused,
        agents=unused,
        decisions=unused,
        health=health,
        troubles=ClaimTroubles(),
        hold=no_hold(),
    )
    hints.close()
    worker.start()
    wait_until(lambda: bool(takes), what="a first look")
    assert not worker.join(0.3)
    assert len(takes) == 1
    worker.request_stop()
    assert worker.join(10)


@pytest.mark.parametrize(
    ("error", "longest"),
    [
        (RestError("no gateway", status=400), 60.0),
        (ServiceUnavailable("away"), 5.0),
        (RestError("x", retryable=True), 5.0),
    ],
)
def test_c39_claims_that_fail_are_made_ever_more_rarely_until_one_works(error: Any, longest: float) -> None:
    troubles = ClaimTroubles(draw=lambda: 0.5)
    delays = [troubles.failed(error) for _ in range(8)]
    assert delays[0] == 3.0
    assert delays == sorted(delays)
    assert delays[-1] == longest
    waiter = Thread(target=troubles.leave_off)
    waiter.start()
    assert waiter.is_alive()
    troubles.over()
    waiter.join(10)
    assert not waiter.is_alive()
    assert troubles.failed(error) == 3.0


def booked(agent_id: UUID) -> BookedWake:
    return BookedWake(uuid4(), uuid4(), agent_id, "ada")


def test_an_agent_with_a_wake_of_ours_is_not_asked_about_before_its_end() -> None:
    looked_at: list[UUID] = []
    book = WakeBook(on_deferred=looked_at.append)
    hints = Hints(LocalAgents(), DueTimes(), book)
    wake = booked(AGENT)
    book.add(wake)
    hints.item(AGENT, [ITEM], "broadcast")
    assert hints.take() == []
    book.remove(wake.wake_id)
    assert looked_at == [AGENT]


def test_what_came_before_the_end_was_reported_is_answered_by_the_report() -> None:
    """Else every item inserted while its agent works would cost one call more."""
    looked_at: list[UUID] = []
    book = WakeBook(on_deferred=looked_at.append)
    for put_off_late in (False, True):
        wake = booked(AGENT)
        book.add(wake)
        book.defer(AGENT)
        asked_at = time.monotonic()
        if put_off_late:
            book.defer(AGENT)
        book.remove(wake.wake_id, asked_at)
        assert looked_at == [AGENT] * put_off_late


def test_a_second_wake_of_an_agent_keeps_the_look_put_off() -> None:
    looked_at: list[UUID] = []
    book = WakeBook(on_deferred=looked_at.append)
    first, second = booked(AGENT), booked(AGENT)
    book.add(first), book.add(second)
    book.defer(AGENT)
    book.remove(first.wake_id)
    assert looked_at == []
    book.remove(second.wake_id)
    book.remove(second.wake_id)
    assert looked_at == [AGENT]


def test_items_of_a_resting_agent_make_one_look_at_the_end_of_the_rest() -> None:
    hints = Hints(LocalAgents(), DueTimes(), WakeBook())
    hints.rest(AGENT, 0.3)
    for _ in range(5):
        hints.item(AGENT, [uuid4()], "broadcast")
        hints.take()
    claims = [claim for _ in range(3) for claim in hints.take()]
    assert claims == [Claim(AGENT, "due")]


def test_a_change_of_the_agent_ends_its_rest() -> None:
    hints = Hints(LocalAgents(), DueTimes(), WakeBook())
    hints.rest(AGENT, 60)
    hints.item(AGENT, [ITEM], "broadcast")
    hints.agent(AGENT)
    assert hints.take() == [Claim(AGENT, "event", (ITEM,))]


def test_a_change_is_looked_at_though_an_older_answer_comes_after_it() -> None:
    hints = Hints(LocalAgents(), DueTimes(), WakeBook())
    hints.agent(AGENT)
    hints.rest(AGENT, 60)
    assert hints.take() == [Claim(AGENT, "due")]


def test_a_grant_and_the_end_of_a_wake_end_the_rest() -> None:
    rests: list[tuple[UUID, float]] = []
    decisions = Decisions(lambda _grant: None, DueTimes(), rest=lambda agent, seconds: rests.append((agent, seconds)))
    decisions.act_on([Refusal(AGENT, "ada", "concurrency_limit"), grant()])
    decisions.after_end(ReportResult(uuid4(), "ended", True, "ok", "succeeded", AGENT, "ada"))
    assert rests == [(AGENT, 5.0), (AGENT, 0.0), (AGENT, 0.0)]


def test_c01_an_agent_whose_rows_are_held_for_long_is_asked_about_less_often() -> None:
    due: DueTimes[UUID] = DueTimes()
    waits: list[float] = []
    due.schedule_in = lambda _agent, seconds: waits.append(round(seconds - 0.02, 3)) or True  # type: ignore[method-assign]
    decisions = Decisions(lambda _grant: None, due)
    busy = Refusal(AGENT, "ada", "busy", 1.0)
    for verdict in [*[busy] * 9, Refusal(AGENT, "ada", "no_actionable_work"), busy]:
        decisions.act_on([verdict])
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.25]


@pytest.mark.parametrize(
    ("reason", "retry_in", "failures", "seconds"),
    [
        ("cooldown(12s)", 11.5, 0, 11.5),
        ("cooldown(60s)", 60.0, 1, 0.0),  # a new item has the failure forgotten, and with it half of the wait
        ("cooldown(12s)", 11.5, None, 0.0),
        ("active_lease", 90.0, 0, 0.0),  # ends with the item, not with the lease
        ("no_actionable_work", None, 0, 0.0),
        ("concurrency_limit", None, 0, 5.0),
        ("agent_paused", None, 3, 5.0),
    ],
)
def test_how_long_a_refusal_stands(reason: str, retry_in: float | None, failures: int | None, seconds: float) -> None:
    assert rest_after(reason, retry_in, failures) == seconds


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
        namesakes=Namesakes(lambda: ()),
        hold=no_hold(),
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
        kind = "started" if isinstance(report, Started) else "ended"
        return ReportResult(report.wake_id, kind, applied=error is None, code=code, error=error)


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
            lambda: 2,
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


def test_the_end_of_a_wake_never_overtakes_its_start() -> None:
    database = Database()
    start = Started(uuid4(), uuid4(), "h", 1, 1.0)
    database.bad[start.wake_id] = "held"
    with Desk(database) as desk:
        desk.reporter.put(start)
        wait_until(lambda: desk.results, what="the refusal of the start")
        desk.reporter.put(Ended(start.wake_id, start.claim_token, "exited", 0))
        desk.reporter.put(ended())
        wait_until(lambda: len(database.calls) >= 3, what="another try of the start")
        database.bad.clear()
        wait_until(lambda: sum(result.applied for result in desk.results) == 3, what="all three")
    mine = [result.report for result in desk.results if result.applied and result.wake_id == start.wake_id]
    assert mine == ["started", "ended"]


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


# ------------------------------------------------------------------------------------------- sweep


@pytest.mark.parametrize("phase", ["expired", "listed"])
def test_c11_an_answer_that_never_is_the_last_one_does_not_hold_the_sweep(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MOST_PAGES", 20)

    class Endless:
        passes = 0

        def look(self) -> Look:
            return Look({AGENT: "ada"}, (), broadcast_available=True, due=(phase,))

        def sweep_phase(self, phase: str, _cursor: object, _limit: int) -> PhaseAnswer:
            self.passes += 1
            return PhaseAnswer(phase, {phase: 1}, again=True, cursor=None, verdicts=[])

        def note_sweep(self, _facts: object) -> None:
            pass

    store: Any = Endless()
    sweeper = sweep.Sweeper(
        store,
        LocalAgents(),
        Namesakes(lambda: ()),
        HintedItems(),
        Decisions(lambda _grant: None, DueTimes()),
        claim_limit=lambda: 1,
        interval=60,
        degraded_interval=10,
        is_realtime_well=lambda: True,
        settle_open_wakes=lambda _rows: None,
        on_broadcast_available=lambda _available: None,
        health=Health(),
    )
    sweeper.beat()
    assert store.passes == (20 if phase == "listed" else sweep.PASSES)
    assert sweeper.next_interval() < 1
