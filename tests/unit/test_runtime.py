"""The daemon's mechanics, with real threads and a clock of our own."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from structlog.testing import capture_logs

from dispatcher import events
from dispatcher.errors import BadKey, RestError, ServiceUnavailable
from dispatcher.runtime.backoff import Backoff, exponential, jittered
from dispatcher.runtime.group import ServiceGroup
from dispatcher.runtime.health import Health
from dispatcher.runtime.repeats import Repeats
from dispatcher.runtime.service import PeriodicService, Service
from dispatcher.runtime.signals import SignalCollector
from dispatcher.runtime.wakeup import MAX_PAYLOAD, DueTimes, Wakeup
from tests.support.waiting import wait_until

DEADLINE = 10.0
seconds = st.floats(0, 1e6)


class ManualClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.time, UTC)


class Waiting(Service):
    """Runs until it is asked to stop, or until told how to end."""

    def __init__(self, name: str, journal: list[str] | None = None, error: BaseException | None = None) -> None:
        super().__init__(name)
        self.journal = journal if journal is not None else []
        self.raises = error
        self.go = threading.Event()
        if error is not None:
            self.go.set()

    def request_stop(self) -> None:
        super().request_stop()
        self.go.set()

    def run_service(self) -> None:
        self.journal.append(f"{self.name} began")
        self.go.wait(DEADLINE)
        self.journal.append(f"{self.name} ended")
        if self.raises is not None:
            raise self.raises


# -- backoff


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [(0, 30), (1, 30), (2, 60), (3, 120), (5, 480), (6, 900), (2000, 900), (10**9, 900)],
)
def test_field_failure_63_delays_double_to_the_cap_and_never_overflow(attempt: int, expected: float) -> None:
    assert exponential(attempt, 30, 900) == expected


@given(st.integers(0, 10**6), st.floats(0.001, 1e4), st.floats(0.001, 1e6))
def test_delays_grow_and_stay_below_the_cap(attempt: int, base: float, cap: float) -> None:
    this, following = exponential(attempt, base, cap), exponential(attempt + 1, base, cap)
    assert 0 < this <= following <= cap


@given(seconds, st.floats(0, 1), st.floats(0, 1, exclude_max=True))
def test_jitter_stays_within_its_spread(delay: float, spread: float, draw: float) -> None:
    moved = jittered(delay, spread, lambda: draw)
    assert delay * (1 - spread) - 1e-6 <= moved <= delay * (1 + spread) + 1e-6


def test_a_backoff_counts_and_starts_over() -> None:
    backoff = Backoff(1, 10, draw=lambda: 0.5)
    assert [backoff.next_delay() for _ in range(5)] == [1, 2, 4, 8, 10]
    backoff.reset()
    assert backoff.next_delay() == 1


def test_a_backoff_never_passes_its_cap_and_spreads() -> None:
    draws = iter([0.999, 0.0, 0.3])
    delays = [Backoff(100, 10, draw=lambda: next(draws)).next_delay() for _ in range(3)]
    assert max(delays) <= 10
    assert len(set(delays)) == 3


# -- wakeup


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 5), max_size=3))))
def test_hints_are_merged_per_key_in_order_of_arrival(hints: list[tuple[str, list[int]]]) -> None:
    wakeup: Wakeup[str] = Wakeup()
    for key, payload in hints:
        wakeup.set(key, payload)
    taken = wakeup.wait(0)
    assert list(taken) == list(dict.fromkeys(key for key, _ in hints))
    for key, things in taken.items():
        said = [thing for hinted, payload in hints if hinted == key for thing in payload]
        assert list(things) == list(dict.fromkeys(said))
    assert wakeup.wait(0) == {}


def test_a_payload_is_bounded() -> None:
    wakeup: Wakeup[str] = Wakeup()
    for number in range(3 * MAX_PAYLOAD):
        wakeup.set("a", [number])
    assert len(wakeup.wait(0)["a"]) == MAX_PAYLOAD


def test_workers_pop_one_key_each_the_longest_waiting_first() -> None:
    wakeup: Wakeup[str] = Wakeup()
    wakeup.set("a", [1])
    wakeup.set("b")
    wakeup.set("a", [2])
    assert wakeup.pop(0) == ("a", (1, 2))
    assert len(wakeup) == 1
    assert wakeup.pop(0) == ("b", ())
    assert wakeup.pop(0) is None


@pytest.mark.parametrize("method", ["wait", "pop"])
def test_a_waiting_worker_is_woken_by_a_hint_and_by_close(method: str) -> None:
    for act, expected in (
        (lambda wakeup: wakeup.set("a", [1]), {"wait": {"a": (1,)}, "pop": ("a", (1,))}),
        (lambda wakeup: wakeup.close(), {"wait": {}, "pop": None}),
    ):
        wakeup: Wakeup[str] = Wakeup()
        results: list[object] = []
        worker = threading.Thread(target=lambda w=wakeup, r=results: r.append(getattr(w, method)(DEADLINE)))
        worker.start()
        act(wakeup)
        worker.join(DEADLINE)
        assert results == [expected[method]]


def test_no_hint_is_lost_between_many_threads() -> None:
    wakeup: Wakeup[int] = Wakeup()
    writers = [
        threading.Thread(target=lambda base=base: [wakeup.set(n % 7, [base * 100 + n]) for n in range(60)])
        for base in range(4)
    ]
    for writer in writers:
        writer.start()
    seen: set[object] = set()
    while any(writer.is_alive() for writer in writers) or len(wakeup):
        for payload in wakeup.wait(0.01).values():
            seen |= set(payload)
    assert len(seen) == 240


# -- due times


class DueTimesAgainstModel(RuleBasedStateMachine):
    """The queue against a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.due: DueTimes[str] = DueTimes(self.clock)
        self.model: dict[str, float] = {}

    @rule(key=st.sampled_from("abcde"), at=st.integers(900, 1200))
    def schedule(self, key: str, at: int) -> None:
        self.due.schedule(key, at)
        self.model[key] = min(at, self.model.get(key, at))

    @rule(key=st.sampled_from("abcde"))
    def cancel(self, key: str) -> None:
        self.due.cancel(key)
        self.model.pop(key, None)

    @rule(later=st.integers(0, 60))
    def pop(self, later: int) -> None:
        self.clock.time += later
        expected = {key: at for key, at in self.model.items() if at <= self.clock.time}
        popped = self.due.pop_due()
        assert set(popped) == set(expected)
        assert [expected[key] for key in popped] == sorted(expected.values())
        self.model = {key: at for key, at in self.model.items() if key not in expected}

    @invariant()
    def agrees(self) -> None:
        assert len(self.due) == len(self.model)
        assert self.due.next_at() == min(self.model.values(), default=None)


TestDueTimes = DueTimesAgainstModel.TestCase


def test_due_times_say_how_long_to_sleep_and_when_the_next_moved() -> None:
    clock = ManualClock()
    due: DueTimes[str] = DueTimes(clock)
    assert due.seconds_to_next(60) == 60
    assert due.schedule_in("a", 20)
    assert not due.schedule_in("b", 30)
    assert due.schedule_in("c", 10)
    assert due.seconds_to_next(60) == 10
    clock.time += 100
    assert due.seconds_to_next(60) == 0
    assert due.pop_due() == ["c", "a", "b"]


def test_rescheduling_for_ever_does_not_grow_the_queue() -> None:
    due: DueTimes[str] = DueTimes(ManualClock())
    due.schedule("first", 0)
    for at in range(10_000, 0, -1):
        due.schedule("a", at)
    assert len(due._heap) < 100


# -- health


def test_a_fresh_idle_daemon_is_ok() -> None:
    health = Health(ManualClock())
    health.loop("sweep", 120)
    health.loop("claims", None)
    assert health.snapshot()["status"] == "ok"
    assert health.snapshot()["causes"] == []


def test_field_failure_71_a_blocked_loop_is_named() -> None:
    clock = ManualClock()
    health = Health(clock)
    health.loop("sweep", 10).succeeded()
    health.loop("leases", 1000).succeeded()
    clock.time += 5 * 10
    snapshot = health.snapshot()
    assert snapshot["status"] == "failing"
    assert snapshot["loops"]["sweep"]["status"] == "failing"
    assert snapshot["loops"]["leases"]["status"] == "ok"
    assert snapshot["causes"] == ["sweep: last succeeded 50 s ago"]
    health.loop("sweep", 10).succeeded()
    assert health.snapshot()["status"] == "ok"


def test_field_failure_71_failing_claims_are_named() -> None:
    health = Health(ManualClock())
    claims = health.loop("claims", None)
    claims.failed(ValueError("no connection"))
    assert health.snapshot()["status"] == "degraded"
    claims.failed("no connection")
    claims.failed("no connection")
    assert health.snapshot()["status"] == "failing"
    assert health.snapshot()["causes"] == ["claims: 3 failures in a row, last: no connection"]
    claims.succeeded()
    assert health.snapshot()["status"] == "ok"


def test_a_loop_that_never_succeeded_is_late_too() -> None:
    clock = ManualClock()
    health = Health(clock)
    health.loop("realtime", 10)
    clock.time += 50
    assert health.snapshot()["causes"] == ["realtime: has not succeeded yet"]


def test_field_failure_71_work_on_demand_that_does_not_end_is_named() -> None:
    clock = ManualClock()
    health = Health(clock)
    claims = health.loop("claims", None)
    with claims.at_work():
        clock.time += 59
        assert health.snapshot()["status"] == "ok"
        clock.time += 10
        assert health.snapshot()["causes"] == ["claims: stuck for 69 s in one piece of work"]
        assert health.snapshot()["status"] == "failing"
    assert health.snapshot()["status"] == "ok"


def test_field_failure_71_one_of_two_workers_that_hangs_is_enough() -> None:
    clock = ManualClock()
    claims = Health(clock).loop("claims", None)
    hangs, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        with claims.at_work():
            hangs.set()
            may_end.wait(10)

    worker = threading.Thread(target=hang)
    worker.start()
    assert hangs.wait(5)
    clock.time += 61
    with claims.at_work():
        claims.succeeded()
    assert claims.snapshot()["status"] == "failing"
    may_end.set()
    worker.join()
    assert claims.snapshot()["status"] == "ok"


def test_a_loop_that_slows_down_is_measured_by_its_new_pace() -> None:
    clock = ManualClock()
    loop = Health(clock).loop("sweep", 10)
    clock.time += 20
    loop.set_interval(120)
    clock.time += 300
    assert loop.snapshot()["status"] == "ok"
    clock.time += 100
    assert loop.snapshot()["status"] == "failing"


def test_causes_degrade_until_they_are_cleared() -> None:
    health = Health(ManualClock())
    assert health.add_cause("realtime", "the subscription is deaf")
    assert not health.add_cause("realtime", "the subscription is still deaf")
    assert health.snapshot()["status"] == "degraded"
    assert health.snapshot()["causes"] == ["the subscription is still deaf"]
    assert health.clear_cause("realtime")
    assert not health.clear_cause("realtime")
    assert health.snapshot()["status"] == "ok"


def test_a_change_of_health_is_one_line_with_its_causes() -> None:
    health = Health(ManualClock())
    with capture_logs() as logs:
        health.observe()
        health.add_cause("realtime", "the subscription is deaf")
        health.observe()
        health.observe()
        health.clear_cause("realtime")
        assert health.observe() == health.snapshot()
    assert [(entry["event"], entry["log_level"], entry["msg"]) for entry in logs] == [
        ("health.changed", "warning", "Health is degraded: the subscription is deaf"),
        ("health.changed", "info", "Health is ok"),
    ]


def test_c21_it_is_starting_until_all_that_was_awaited_has_come() -> None:
    health = Health(ManualClock())
    health.await_first("sweep", "the first sweep is not done")
    health.await_first("realtime", "Realtime is not subscribed yet")
    health.add_cause("log", "nobody reads the log")
    with capture_logs() as logs:
        health.has_come("sweep")
        seen = health.observe()
        assert (seen["status"], seen["live"]) == ("starting", True)
        assert seen["causes"] == ["Realtime is not subscribed yet", "nobody reads the log"]
        health.clear_cause("log")
        health.has_come("realtime")
        assert health.observe()["status"] == "ok"
    assert [entry["msg"] for entry in logs] == ["Health is ok"]


def test_c21_a_start_that_fails_is_failing_and_live() -> None:
    health = Health(ManualClock())
    health.await_first("sweep", "the first sweep is not done")
    for _ in range(3):
        health.loop("sweep", 10).failed("no connection")
    assert (health.snapshot()["status"], health.snapshot()["live"]) == ("failing", True)


def test_c21_loops_that_fail_for_ever_are_live_and_one_that_stands_still_is_not() -> None:
    clock = ManualClock()
    health = Health(clock, standstill=300)
    sweep, claims = health.loop("sweep", 10), health.loop("claims", None)
    for _ in range(1_000):
        clock.time += 10
        sweep.failed("no connection"), claims.failed("no connection")
    assert (health.snapshot()["status"], health.snapshot()["live"]) == ("failing", True)
    clock.time += 3 * 10 + 301
    seen = health.snapshot()
    assert (seen["live"], seen["loops"]["sweep"]["live"], seen["loops"]["claims"]["live"]) == (False, False, True)


@pytest.mark.parametrize("work", ["turn", "at_work"])
def test_c21_one_turn_may_be_long_and_has_to_end(work: str) -> None:
    clock = ManualClock()
    health = Health(clock, standstill=300)
    loop = health.loop("monitor", None)
    with getattr(loop, work)():
        clock.time += 299
        assert health.snapshot()["live"]
        clock.time += 2
        assert not health.snapshot()["live"]
        assert health.snapshot()["status"] == "failing"
    assert health.snapshot()["live"]


def test_c21_a_beat_that_hangs_stands_still() -> None:
    hanging, clock = threading.Event(), ManualClock()
    health = Health(clock, standstill=300)
    service = PeriodicService("sweep", lambda: hanging.wait(DEADLINE), 1, health=health.loop("sweep", None))
    service.start()
    wait_until(lambda: health.loop("sweep", None)._turn_began is not None, DEADLINE)
    clock.time += 301
    assert not health.snapshot()["live"]
    service.request_stop()
    hanging.set()
    assert service.join(DEADLINE)


def test_health_shows_no_secret() -> None:
    health = Health(ManualClock())
    health.loop("a", None).failed("refused sb_secret_abcdefgh")
    health.add_cause("b", "Authorization: Bearer abcdef")
    assert "abcdef" not in str(health.snapshot())


# -- services


def test_a_service_has_a_named_thread_and_one_life() -> None:
    service = Waiting("sweep")
    names: list[str] = []
    service.start(lambda _service: names.append(threading.current_thread().name))
    assert service.is_alive
    service.request_stop()
    service.request_stop()
    assert service.join(DEADLINE)
    assert names == ["sweep"]
    assert service.error is None


def test_a_service_that_never_started_joins_at_once() -> None:
    service = Waiting("sweep")
    service.request_stop()
    assert service.join(0)


def test_a_group_starts_in_order_and_stops_in_reverse() -> None:
    journal: list[str] = []
    services = [Waiting(name, journal) for name in "abc"]
    group = ServiceGroup(services)
    group.start()
    assert group.stop(DEADLINE) == []
    assert [line for line in journal if line.endswith("ended")] == ["c ended", "b ended", "a ended"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 1), (ValueError("x"), 1), (BadKey("refused"), 78), (ServiceUnavailable("down"), 69)],
)
def test_a_service_that_ends_unasked_is_named_with_its_exit_code(error: BaseException | None, code: int) -> None:
    ending = Waiting("sweep", error=error)
    ending.go.set()
    group = ServiceGroup([Waiting("other"), ending])
    with capture_logs() as logs:
        group.start()
        service = group.wait_for_end(DEADLINE)
    assert service is ending
    assert service.exit_code == code
    assert [(entry["event"], entry["service"], entry["exit_code"]) for entry in logs] == [
        ("service.ended", "sweep", code)
    ]
    group.stop(DEADLINE)


def test_an_error_after_the_request_to_stop_still_counts_as_unasked() -> None:
    service = Waiting("sweep", error=ValueError("x"))
    service.request_stop()
    group = ServiceGroup([service])
    group.start()
    assert group.wait_for_end(DEADLINE) is service


def test_waiting_for_a_group_ends_by_interrupt_and_by_time() -> None:
    group = ServiceGroup([Waiting("a")])
    group.start()
    assert group.wait_for_end(0.01) is None
    group.interrupt()
    assert group.wait_for_end(DEADLINE) is None
    group.stop(DEADLINE)


def test_a_service_that_cannot_start_takes_down_those_before_it() -> None:
    class Unstartable(Waiting):
        def start(self, on_end: Callable[[Service], None] | None = None) -> None:
            raise RuntimeError("can't start new thread")

    first = Waiting("first")
    with pytest.raises(RuntimeError):
        ServiceGroup([first, Unstartable("second")]).start()
    assert not first.is_alive
    assert first.stopping.is_set()


def test_a_stuck_service_is_named_and_does_not_hold_up_the_rest() -> None:
    class Stuck(Waiting):
        def request_stop(self) -> None:
            self.stopping.set()

    stuck, other = Stuck("stuck"), Waiting("other")
    stuck.stop_hold = 0.05
    group = ServiceGroup([other, stuck])
    group.start()
    assert group.stop(1.0) == [stuck]
    assert not other.is_alive
    stuck.go.set()
    assert stuck.join(DEADLINE)


def test_those_stopped_first_are_asked_together_and_share_one_hold() -> None:
    class Stuck(Waiting):
        def request_stop(self) -> None:
            self.stopping.set()

    stuck = [Stuck(f"stuck-{number}") for number in range(6)]
    used = Waiting("used")
    group = ServiceGroup([used, *stuck], stopped_first=stuck)
    group.start()
    stopper = threading.Thread(target=group.stop, args=(DEADLINE,))
    started = time.monotonic()
    stopper.start()
    assert used.stopping.wait(DEADLINE)
    # One hold of 0.5 s, not six.
    assert 0.4 < time.monotonic() - started < 2.0
    for service in stuck:
        service.go.set()
    stopper.join(DEADLINE)
    assert not used.is_alive


def test_those_a_service_uses_go_on_until_it_has_ended() -> None:
    class Slow(Waiting):
        stop_hold = DEADLINE

        def request_stop(self) -> None:
            self.stopping.set()

    journal: list[str] = []
    used, slow = Waiting("used", journal), Slow("slow", journal)
    group = ServiceGroup([used, slow])
    group.start()
    stopper = threading.Thread(target=group.stop, args=(DEADLINE,))
    stopper.start()
    assert slow.stopping.wait(DEADLINE)
    assert not used.stopping.wait(0.6)
    slow.go.set()
    stopper.join(DEADLINE)
    assert journal[-2:] == ["slow ended", "used ended"]


# -- periodic services


def test_a_bad_beat_is_counted_and_the_next_one_comes() -> None:
    health = Health()
    beats = threading.Semaphore(0)
    outcomes = iter([ValueError("first"), ValueError("second"), None])

    def beat() -> None:
        beats.release()
        error = next(outcomes, None)
        if error is not None:
            raise error

    loop = health.loop("sweep", 60)
    service = PeriodicService("sweep", beat, 0.001, health=loop)
    with capture_logs() as logs:
        service.start()
        for _ in range(4):
            assert beats.acquire(timeout=DEADLINE)
        service.request_stop()
        assert service.join(DEADLINE)
    assert [entry["event"] for entry in logs] == ["service.beat_failed"] * 2
    assert loop.snapshot()["failures"] == 0
    assert service.error is None


def test_a_beat_comes_early_when_asked_and_stopping_is_not_waiting() -> None:
    beats = threading.Semaphore(0)
    service = PeriodicService("sweep", beats.release, 3600)
    service.start()
    assert beats.acquire(timeout=DEADLINE)
    service.wake_early()
    assert beats.acquire(timeout=DEADLINE)
    service.request_stop()
    assert service.join(DEADLINE)


def test_a_wake_during_a_beat_is_not_lost() -> None:
    began, go = threading.Semaphore(0), threading.Semaphore(0)

    def beat() -> None:
        began.release()
        go.acquire(timeout=DEADLINE)

    service = PeriodicService("sweep", beat, 3600)
    service.start()
    assert began.acquire(timeout=DEADLINE)
    service.wake_early()
    go.release()
    assert began.acquire(timeout=DEADLINE)
    service.request_stop()
    go.release()
    assert service.join(DEADLINE)


def test_a_fatal_error_ends_the_loop() -> None:
    def beat() -> None:
        raise BadKey("refused")

    service = PeriodicService("sweep", beat, 0.001, fatal=(BadKey,))
    service.start()
    assert service.join(DEADLINE)
    assert isinstance(service.error, BadKey)


@pytest.mark.parametrize(
    ("error", "has_trace"), [(ServiceUnavailable("the database is away"), False), (KeyError("x"), True)]
)
def test_a_beat_that_fails_shows_the_way_through_our_code_where_that_is_at_fault(
    error: Exception, has_trace: bool
) -> None:
    service: PeriodicService

    def beat() -> None:
        service.request_stop()
        raise error

    service = PeriodicService("sweep", beat, 60)
    with capture_logs() as lines:
        service.start()
        assert service.join(DEADLINE)
    [line] = [line for line in lines if line["event"] == events.BEAT_FAILED]
    assert str(error) in line["msg"]
    assert (line["exc_info"] is not None) == has_trace


def test_a_beat_that_failed_is_made_again_soon_and_one_that_worked_at_its_time() -> None:
    """What failed for a moment must not look failed for as long as a long interval."""
    answers = iter([ServiceUnavailable("away"), None])

    def beat() -> None:
        if (answer := next(answers)) is not None:
            raise answer

    service = PeriodicService("monitor", beat, 3600)
    service._beat_once()
    assert service._seconds_to_next() == 5.0
    service._beat_once()
    assert service._seconds_to_next() == 3600


def test_the_interval_is_asked_anew_and_jittered() -> None:
    asked: list[float] = []
    service: PeriodicService

    def interval() -> float:
        asked.append(0.001 * len(asked))
        if len(asked) == 5:
            service.request_stop()
        return asked[-1]

    service = PeriodicService("sweep", lambda: None, interval)
    service.start()
    assert service.join(DEADLINE)
    assert len(asked) == 5


# -- signals


def test_signals_are_collected_counted_and_given_back() -> None:
    before, wakeup_before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    counts: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalCollector() as signals:
        signals.listen(counts.put)
        os.kill(os.getpid(), signal.SIGTERM)
        assert counts.get(timeout=DEADLINE) == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert counts.get(timeout=DEADLINE) == 2
    assert signals.received == (signal.SIGTERM, signal.SIGINT)
    assert signals.count == 2
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == wakeup_before


def test_whoever_listens_late_is_told_of_what_has_come() -> None:
    early: queue.SimpleQueue[int] = queue.SimpleQueue()
    late: list[int] = []
    with SignalCollector() as signals:
        signals.listen(early.put)
        os.kill(os.getpid(), signal.SIGTERM)
        early.get(timeout=DEADLINE)
        signals.listen(late.append)
        assert late == [1]


def test_other_signals_are_none_of_its_business() -> None:
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    try:
        with SignalCollector() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert handled.wait(DEADLINE)
            assert signals.count == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def collected(*numbers: signal.Signals) -> tuple[int, ...]:
    """What is counted when these come one after the other; SIGUSR2 marks the end and is not counted."""
    with SignalCollector() as signals, capture_logs() as lines:
        for said, number in enumerate((*numbers, signal.SIGUSR2), 1):
            os.kill(os.getpid(), number)
            wait_until(lambda said=said: len(lines) == said, DEADLINE)
    assert [line["signal"] for line in lines] == [number.name for number in (*numbers, signal.SIGUSR2)]
    return signals.received


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGINT])
def test_c19_whatever_stops_is_counted_and_named(number: signal.Signals) -> None:
    assert collected(number) == (number,)


def test_c19_a_hangup_that_comes_along_does_not_skip_the_grace() -> None:
    assert collected(signal.SIGTERM, signal.SIGHUP) == (signal.SIGTERM,)
    assert collected(signal.SIGHUP, signal.SIGTERM) == (signal.SIGHUP, signal.SIGTERM)


def test_c19_a_signal_without_meaning_is_named_and_ignored() -> None:
    assert collected(signal.SIGUSR1, signal.SIGALRM) == ()


def test_c19_a_hangup_that_nohup_ignores_stays_ignored_and_a_blocked_stop_is_heard() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with SignalCollector() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: signals.count, DEADLINE)
        assert signals.received == (signal.SIGTERM,)
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_signal_given_to_another_thread_is_told_while_the_main_one_waits() -> None:
    """Python's own handler would run when the main thread's wait is over: never, when it has no end."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    with SignalCollector() as signals:
        signals.listen(told.put)
        elsewhere = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        timer = threading.Timer(0.05, elsewhere.start)
        timer.start()
        assert told.get(timeout=DEADLINE) == 1
        timer.join()


def test_a_signal_ends_the_wait_for_a_group() -> None:
    group = ServiceGroup([Waiting("a")])
    group.start()
    with SignalCollector() as signals:
        signals.listen(lambda _count: group.interrupt())
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        assert group.wait_for_end(DEADLINE) is None
        assert signals.count == 1
        timer.join()
    group.stop(DEADLINE)


# ------------------------------------------------------------------------------------------- repeats


def test_c39_a_trouble_that_stays_is_told_once_and_then_counted() -> None:
    clock = ManualClock()
    repeats = Repeats(60.0, clock)
    told = []
    for _ in range(150):
        told.append(repeats.news("no gateway"))
        clock.time += 1.0
    assert [count for count in told if count is not None] == [0, 59, 59]
    assert repeats.news("another trouble") == 0
    repeats.over()
    assert repeats.news("no gateway") == 0
    for number in range(1000):
        repeats.news(str(number))
    assert len(repeats._told) <= 50


def test_c39_a_beat_that_goes_on_failing_comes_ever_more_rarely_and_is_told_once() -> None:
    answers: list[Exception | None] = [RestError("no gateway", status=400)] * 6 + [None, ServiceUnavailable("away")]

    def beat() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    service = PeriodicService("monitor", beat, 30)
    seconds = []
    with capture_logs() as logs:
        for _ in range(8):
            service._beat_once()
            seconds.append(service._seconds_to_next())
    assert seconds == [5.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0, 5.0]
    assert [entry["msg"].partition(": ")[2] for entry in logs] == ["no gateway", "away"]
