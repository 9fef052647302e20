from datetime import UTC, datetime
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dispatcher.supabase.realtime_health import (
    PATHS,
    Canary,
    Path,
    PathHealth,
    Phase,
    RealtimeState,
    RealtimeTimings,
    Status,
    Trouble,
    connection_delay,
    paths_wanted,
    summary,
)

TIMINGS = RealtimeTimings()


def path(name: Path = "broadcast", draw: float = 0.0) -> PathHealth:
    return PathHealth(name, TIMINGS, lambda: draw)


def ready_path(now: float = 0.0) -> PathHealth:
    health = path()
    health.want(now)
    health.joining(now)
    health.ready(now)
    return health


# ------------------------------------------------------------------------------------ canary


@pytest.mark.parametrize(
    ("story", "overdue"),
    [
        ([], False),
        ([("expect", "a", 0.0)], True),
        ([("expect", "a", 6.0)], False),
        ([("expect", "a", 0.0), ("seen", "a", 1.0)], False),
        ([("seen", "a", 0.0), ("expect", "a", 0.1)], False),  # the frame overtook the answer
        ([("seen", "b", 0.0), ("expect", "a", 0.1)], True),
        ([("expect", "a", 0.0), ("expect", "b", 0.5), ("seen", "b", 1.0)], False),  # vouches for a as well
        ([("expect", "a", 0.0), ("expect", "b", 0.5), ("seen", "a", 1.0)], True),
        ([("expect", "a", 0.0), ("seen", None, 1.0)], False),  # our row, whichever heartbeat
        ([("seen", None, 0.0), ("expect", "a", 0.1)], False),
        ([("seen", None, -9.0), ("expect", "a", 0.1)], True),  # the row of the heartbeat before
        ([("expect", "a", 0.0), ("forget", "a", 0.0)], False),
        ([("expect", "a", 0.0), ("clear", "", 0.0)], False),
    ],
)
def test_a_canary_is_overdue_when_nothing_vouches_for_it(
    story: list[tuple[str, str | None, float]], overdue: bool
) -> None:
    canary = Canary(patience=5.0)
    for what, nonce, now in story:
        if what == "seen":
            canary.seen(nonce, now)
        elif what == "clear":
            canary.clear()
        elif what == "forget":
            canary.forget(nonce or "")
        else:
            canary.expect(nonce or "", now)
    assert canary.overdue(7.0) is overdue


# ------------------------------------------------------------------------------------ one path


def test_a_path_that_is_not_confirmed_in_time_has_failed() -> None:
    health = path()
    health.want(0.0)
    assert health.is_due(0.0)
    health.joining(0.0)
    assert health.fault(TIMINGS.ready) is None
    assert health.fault(TIMINGS.ready + 0.1) == (Trouble.CHANNEL, "not confirmed by the server within 15 s")


def test_deafness_is_cured_by_a_rejoin_first_and_a_fresh_client_second() -> None:
    health = ready_path()
    health.canary.expect("a", 1.0)
    fault = health.fault(6.1)
    assert fault is not None
    assert fault[0] is Trouble.DEAF
    health.lost(6.1, *fault)
    assert (health.is_deaf, health.needs_fresh_client, health.gaps) == (True, False, 1)
    health.joining(7.0)
    health.ready(7.1)
    assert (health.is_well, health.is_deaf) == (False, True)  # its word is not enough this time
    health.canary.expect("b", 8.0)
    health.lost(13.1, Trouble.DEAF, "deaf")
    assert (health.needs_fresh_client, health.is_due(13.2)) == (True, False)
    health.disconnected(13.2)
    assert (health.needs_fresh_client, health.is_due(13.2)) == (False, True)  # it has one now


def test_a_canary_that_comes_back_makes_a_suspect_well() -> None:
    health = ready_path()
    health.lost(1.0, Trouble.DEAF, "deaf")
    health.joining(2.0)
    health.ready(2.1)
    health.canary_seen("x", 3.0)
    assert (health.is_well, health.attempts, health.cause) == (True, 0, None)


def test_without_canaries_time_makes_a_suspect_well() -> None:
    health = ready_path()
    health.lost(1.0, Trouble.DEAF, "deaf")
    health.joining(2.0)
    health.ready(2.0)
    moments = (2.0 + TIMINGS.settle, 2.1 + TIMINGS.settle)
    assert [(health.fault(now), health.is_well) for now in moments] == [(None, False), (None, True)]


def test_a_lost_socket_is_not_the_fault_of_the_path() -> None:
    health = ready_path()
    health.disconnected(5.0)
    assert (health.attempts, health.gaps, health.phase) == (0, 1, Phase.WAITING)
    assert health.is_due(5.0)


@pytest.mark.parametrize("trouble", Trouble)
@pytest.mark.parametrize("draw", [0.0, 0.999])
def test_every_retry_is_delayed_jittered_and_bounded(trouble: Trouble, draw: float) -> None:
    health = path(draw=draw)
    health.want(0.0)
    for attempt in (*range(1, 20), 2000):
        health.attempts = attempt - 1
        health.joining(0.0)
        health.lost(0.0, trouble, "x")
        assert 0.4 <= health.retry_at <= 1.2 * max(TIMINGS.retry_cap, TIMINGS.misconfigured)


def test_a_refused_token_and_a_wrong_configuration_are_never_hot_loops() -> None:
    for trouble, least in ((Trouble.REFUSED, 2.5), (Trouble.MISCONFIGURED, 48.0), (Trouble.OVERLOADED, 24.0)):
        health = ready_path()
        health.lost(0.0, trouble, "x")
        assert health.retry_at >= least
        assert not health.needs_fresh_client


@pytest.mark.parametrize("failures", [1, 2, 5, 2000])
def test_fresh_clients_are_spread_and_bounded(failures: int) -> None:
    early, late = (connection_delay(failures, TIMINGS, lambda draw=draw: draw) for draw in (0.0, 0.999))  # type: ignore[misc] # a lambda with a default
    assert 0.5 <= early < late <= TIMINGS.reconnect_cap


class PathMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: gaps are counted, retries are due some time, well means ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.health = path(draw=0.5)
        self.losses = 0
        self.nonces = 0

    @rule(seconds=st.floats(0.01, 120.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        fault = self.health.fault(self.now)
        if fault is not None:
            self._lose(*fault)

    @rule()
    def want(self) -> None:
        self.health.want(self.now)

    @rule()
    def unwant(self) -> None:
        self.health.unwant(self.now)

    @precondition(lambda self: self.health.is_due(self.now))
    @rule()
    def join(self) -> None:
        self.health.joining(self.now)

    @precondition(lambda self: self.health.phase is Phase.JOINING)
    @rule()
    def confirm(self) -> None:
        self.health.ready(self.now)
        assert self.health.phase is Phase.READY

    @precondition(lambda self: self.health.phase is Phase.READY)
    @rule(comes_back=st.booleans())
    def beat(self, comes_back: bool) -> None:
        self.nonces += 1
        self.health.canary.expect(str(self.nonces), self.now)
        if comes_back:
            self.health.canary_seen(str(self.nonces), self.now)
            assert self.health.is_well

    @precondition(lambda self: self.health.phase in {Phase.JOINING, Phase.READY})
    @rule(trouble=st.sampled_from(Trouble))
    def lose(self, trouble: Trouble) -> None:
        self._lose(trouble, "cause")

    @rule()
    def disconnect(self) -> None:
        self.losses += self.health.phase is Phase.READY
        self.health.disconnected(self.now)
        assert not self.health.needs_fresh_client

    def _lose(self, trouble: Trouble, cause: str) -> None:
        self.losses += self.health.phase is Phase.READY
        self.health.lost(self.now, trouble, cause)
        assert not self.health.is_due(self.now)

    @invariant()
    def gaps_are_the_losses_while_ready(self) -> None:
        assert self.health.gaps == self.losses

    @invariant()
    def a_waiting_path_is_joined_some_time(self) -> None:
        if self.health.phase is Phase.WAITING:
            assert self.health.retry_at <= self.now + 1.2 * TIMINGS.misconfigured

    @invariant()
    def well_means_ready_and_deaf_means_not_well(self) -> None:
        assert not self.health.is_well or self.health.phase is Phase.READY
        assert not (self.health.is_well and self.health.is_deaf)

    @invariant()
    def nothing_overdue_survives_a_ready_path(self) -> None:
        if self.health.phase is not Phase.READY:
            assert not self.health.canary.overdue(self.now + 1_000)


TestPathMachine = PathMachine.TestCase
TestPathMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# ------------------------------------------------------------------------------------ the two together


def broadcast_in(condition: str) -> PathHealth:
    health = path()
    if condition == "off":
        return health
    health.want(0.0)
    if condition == "waiting":
        return health
    health.joining(0.0)
    if condition == "joining":
        return health
    if condition == "unconfirmed":
        health.lost(15.1, Trouble.CHANNEL, "not confirmed")
        return health
    health.ready(1.0)
    if condition == "deaf":
        health.lost(9.0, Trouble.DEAF, "deaf")
    if condition == "unproven":
        health.lost(9.0, Trouble.DEAF, "deaf")
        health.joining(10.0)
        health.ready(10.1)
    if condition == "dropped":
        health.disconnected(9.0)
    return health


def changes_in(condition: str) -> PathHealth:
    other = path("postgres_changes")
    if condition == "ready":
        other.want(0.0)
        other.joining(0.0)
        other.ready(0.0)
    return other


@pytest.mark.parametrize(
    ("condition", "joins_beside", "keeps_beside"),
    [
        ("off", False, True),
        ("waiting", False, True),
        ("joining", False, True),
        ("ready", False, False),
        ("dropped", False, True),
        ("unconfirmed", True, True),
        ("deaf", True, True),
        ("unproven", True, True),
    ],
)
def test_auto_has_changes_stand_in_while_broadcast_is_not_well(
    condition: str, joins_beside: bool, keeps_beside: bool
) -> None:
    for changes, beside in (("off", joins_beside), ("ready", keeps_beside)):
        wanted = paths_wanted(
            "auto", broadcast_available=True, broadcast=broadcast_in(condition), changes=changes_in(changes)
        )
        assert wanted == (frozenset(PATHS) if beside else frozenset({"broadcast"}))


def test_without_broadcast_or_without_choice_there_is_one_path() -> None:
    paths = {"broadcast": broadcast_in("deaf"), "changes": changes_in("ready")}
    assert paths_wanted("auto", broadcast_available=False, **paths) == {"postgres_changes"}
    for mode in PATHS:
        for available in (True, False):
            assert paths_wanted(mode, broadcast_available=available, **paths) == {mode}


@pytest.mark.parametrize(
    ("broadcast", "changes", "connection", "expected"),
    [
        ("waiting", "off", None, ("none", "connecting", None)),
        ("waiting", "off", "refused", ("none", "down", "refused")),
        ("joining", "off", None, ("none", "connecting", None)),
        ("ready", "off", None, ("broadcast", "ready", None)),
        ("deaf", "off", None, ("none", "deaf", "broadcast: deaf")),
        ("unproven", "off", None, ("broadcast", "deaf", "broadcast: deaf")),
        ("unconfirmed", "off", None, ("none", "down", "broadcast: not confirmed")),
        ("unconfirmed", "ready", None, ("postgres_changes", "ready", "broadcast: not confirmed")),
        ("unproven", "ready", None, ("both", "ready", "broadcast: deaf")),
    ],
)
def test_the_state_says_what_carries_hints_and_what_is_wrong(
    broadcast: str, changes: str, connection: str | None, expected: tuple[str, Status, str | None]
) -> None:
    said = summary({"broadcast": broadcast_in(broadcast), "postgres_changes": changes_in(changes)}, connection)
    assert said == expected
    assert said[1] in get_args(Status)


def test_notes_are_told_beside_a_ready_path() -> None:
    paths: dict[Path, PathHealth] = {"broadcast": ready_path(), "postgres_changes": path("postgres_changes")}
    assert summary(paths, None, ["agents: not published"]) == ("broadcast", "ready", "agents: not published")


def test_a_state_is_a_value() -> None:
    moment = datetime(2026, 11, 30, tzinfo=UTC)
    assert RealtimeState("both", "ready", moment, None, 0) == RealtimeState("both", "ready", moment, None, 0)
