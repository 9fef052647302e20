"""Who may touch a live wake nobody here attends to, and what becomes of it."""

import os
import subprocess
import sys
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from dispatcher.agents import proctable
from dispatcher.agents.command import WAKE_MARKER
from dispatcher.agents.process import stop_strays
from dispatcher.agents.proctable import ProcessIdentity
from dispatcher.inbox.book import BookedWake, WakeBook
from dispatcher.instance.adoption import Adopter, Host, judge
from dispatcher.instance.model import Adoption, OpenWake

HERE = Host("boot-1/4026531836", "gateway-1")
WAKE = OpenWake(
    wake_id=UUID(int=1),
    claim_token=UUID(int=2),
    claim_request=UUID(int=3),
    agent_id=UUID(int=4),
    agent_slug="ada",
    host_id=HERE.host_id,
    hostname=HERE.hostname,
    pid=None,
    pid_started_at=None,
    deadline_in=100.0,
    owner_stopped=False,
    owner_host_id=HERE.host_id,
    owner_pid=10,
    owner_pid_started_at=1.0,
    owner_silent_for=1.0,
)


@pytest.mark.parametrize(
    ("changes", "is_owner_alive", "judgement"),
    [
        ({}, True, "leave"),
        ({"owner_silent_for": 999.0}, True, "leave"),
        ({"deadline_in": -1.0}, True, "leave"),
        # It hangs: what it should have ended would run for ever.
        ({"owner_silent_for": 999.0, "deadline_in": -1.0}, True, "look_here"),
        ({}, False, "look_here"),
        ({}, None, "leave"),
        ({"owner_silent_for": 999.0}, None, "look_here"),
        ({"owner_silent_for": None}, None, "look_here"),
        ({"owner_stopped": True}, None, "look_here"),
        # Another host: silence proves nothing about the child, its deadline does.
        ({"host_id": "other", "hostname": "gateway-2"}, None, "leave"),
        ({"host_id": "other", "hostname": "gateway-2", "owner_silent_for": 999.0}, None, "leave"),
        (
            {"host_id": "other", "hostname": "gateway-2", "owner_silent_for": 999.0, "deadline_in": -1.0},
            None,
            "lost",
        ),
        # Two hosts may share a name: silence under our own name proves no more than elsewhere.
        ({"host_id": "boot-1/7", "owner_silent_for": 999.0}, None, "leave"),
        ({"host_id": "boot-2/7", "owner_silent_for": 999.0}, None, "leave"),
        ({"host_id": "boot-1/7", "owner_silent_for": 999.0, "deadline_in": -1.0}, None, "lost"),
        # Stopped by its own word, and it ended its children first; under another name it may have been cut off.
        ({"host_id": "boot-1/7", "owner_stopped": True}, None, "lost"),
        ({"host_id": "boot-1/7", "hostname": "gateway-2", "owner_stopped": True}, None, "leave"),
    ],
)
def test_judgement(changes: dict[str, object], is_owner_alive: bool | None, judgement: str) -> None:
    assert judge(replace(WAKE, **changes), HERE, 45.0, is_owner_alive) == judgement


CONTAINER = Host("boot-1/4026531836", "0f3c9ad41b7e")


@pytest.mark.parametrize(
    ("changes", "judgement"),
    [
        # The same container in another namespace, or after another boot: it was started again.
        ({"host_id": "boot-1/7", "owner_silent_for": 999.0}, "lost"),
        ({"host_id": "boot-2/7", "owner_silent_for": 999.0}, "lost"),
        ({"host_id": "boot-1/7", "owner_silent_for": 1.0}, "leave"),
        ({"host_id": "boot-1/7", "owner_silent_for": 999.0, "hostname": "0f3c9ad41b7f"}, "leave"),
        ({"owner_silent_for": 999.0}, "look_here"),
    ],
)
def test_a_container_that_was_started_again_does_not_wait_for_the_deadline(
    changes: dict[str, object], judgement: str
) -> None:
    wake = replace(WAKE, **{"hostname": CONTAINER.hostname, **changes})
    assert judge(wake, CONTAINER, 45.0, None) == judgement


class Notes:
    """What an adopter did."""

    def __init__(self, *, is_adoptable: bool = True) -> None:
        self.adopted: list[int] = []
        self.lost: list[str] = []
        self.unstarted: list[str] = []
        self.pauses = 0
        adoption = Adoption(uuid4(), WAKE.agent_id, 10.0) if is_adoptable else None
        self.adopter = Adopter(
            Host(proctable.host_id(), "gateway-1"),
            45.0,
            adopt=lambda wake, process: adoption,
            on_adopted=lambda wake, process, adoption: self.adopted.append(process.pid),
            on_lost=lambda wake: self.lost.append(wake.agent_slug),
            on_unstarted=lambda wake: self.unstarted.append(wake.agent_slug),
            stop_strays=stop_strays,
            pause=self._pause,
        )

    def _pause(self, _seconds: float) -> None:
        self.pauses += 1


@pytest.fixture
def ended_pid() -> int:
    done = subprocess.Popen([sys.executable, "-S", "-c", ""])
    done.wait()
    return done.pid


def here(**changes: object) -> OpenWake:
    return replace(WAKE, wake_id=uuid4(), host_id=proctable.host_id(), owner_host_id=proctable.host_id(), **changes)


def test_a_wake_of_ours_without_a_process_is_given_back_after_a_second_look() -> None:
    notes = Notes()
    notes.adopter.settle_own([here()])
    assert (notes.adopted, notes.lost, notes.unstarted, notes.pauses) == ([], [], ["ada"], 1)


def test_a_wake_of_ours_whose_process_lives_is_adopted_whoever_started_it() -> None:
    notes = Notes()
    notes.adopter.settle_own([here(pid=os.getpid(), pid_started_at=proctable.started_at(os.getpid()))])
    assert (notes.adopted, notes.unstarted) == ([os.getpid()], [])


def test_what_another_adopted_meanwhile_is_left_alone() -> None:
    notes = Notes(is_adoptable=False)
    notes.adopter.settle_own([here(pid=os.getpid(), pid_started_at=proctable.started_at(os.getpid()))])
    assert (notes.adopted, notes.unstarted) == ([], [])


def test_a_dead_owners_wake_without_a_process_is_lost(ended_pid: int) -> None:
    notes = Notes()
    notes.adopter.settle([here(owner_pid=ended_pid, owner_pid_started_at=1.0, pid=ended_pid, pid_started_at=2.0)])
    assert (notes.adopted, notes.lost) == ([], ["ada"])


def test_what_a_dead_process_left_running_is_not_its_wake_and_is_stopped(ended_pid: int) -> None:
    wake = here(owner_pid=ended_pid, owner_pid_started_at=1.0, pid=ended_pid, pid_started_at=2.0)
    stray = subprocess.Popen(["sleep", "60"], env=os.environ | {WAKE_MARKER: str(wake.wake_id)})
    notes = Notes()
    notes.adopter.settle([wake])
    assert (notes.adopted, notes.lost) == ([], ["ada"])
    assert stray.wait(10) < 0


def test_a_wake_whose_pid_was_never_saved_is_found_by_its_marker(ended_pid: int) -> None:
    wake = here(owner_pid=ended_pid, owner_pid_started_at=1.0)
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {WAKE_MARKER: str(wake.wake_id)})
    try:
        notes = Notes()
        notes.adopter.settle([wake])
        assert (notes.adopted, notes.lost) == ([child.pid], [])
    finally:
        child.kill()
        child.wait()


def test_one_wake_that_raises_does_not_stop_the_others() -> None:
    notes = Notes()
    calls: list[str] = []

    def fail_first(wake: OpenWake) -> None:
        calls.append(wake.agent_slug)
        if len(calls) == 1:
            raise RuntimeError("no")

    notes.adopter._on_unstarted = fail_first
    notes.adopter.settle_own([here(), here()])
    assert calls == ["ada", "ada"]


def test_c40_many_wakes_without_a_pid_cost_one_pause_and_one_look_each_time(
    monkeypatch: pytest.MonkeyPatch, ended_pid: int
) -> None:
    scans: list[None] = []
    scan = proctable.marked_processes

    def counted() -> dict[str, list[ProcessIdentity]]:
        scans.append(None)
        return scan()

    monkeypatch.setattr(proctable, "marked_processes", counted)
    wakes = [here(owner_pid=ended_pid, owner_pid_started_at=1.0, agent_slug=f"a{number}") for number in range(80)]
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {WAKE_MARKER: str(wakes[40].wake_id)})
    try:
        notes = Notes()
        notes.adopter.settle(wakes)
    finally:
        child.kill()
        child.wait()
    assert (notes.adopted, len(notes.lost), notes.pauses) == ([child.pid], 79, 1)
    assert len(scans) == 3  # two looks, and one for what the lost ones left running


def test_c40_a_wake_that_one_thread_settles_is_left_to_it() -> None:
    notes = Notes()
    wake = here()
    seen: list[int] = []

    def settle_meanwhile(_seconds: float) -> None:
        notes.adopter.settle_own([wake])
        seen.append(len(notes.unstarted))

    notes.adopter._pause = settle_meanwhile
    notes.adopter.settle_own([wake])
    assert (seen, notes.unstarted) == ([0], ["ada"])
    notes.adopter._pause = lambda _seconds: None
    notes.adopter.settle_own([wake])
    assert notes.unstarted == ["ada"] * 2


def test_c40_a_lost_wake_is_closed_once_and_again_when_it_has_had_another_owner(ended_pid: int) -> None:
    notes = Notes()
    wake = here(owner_pid=ended_pid, owner_pid_started_at=1.0, pid=ended_pid, pid_started_at=2.0)
    notes.adopter.settle([wake])
    notes.adopter.settle([wake])
    assert notes.lost == ["ada"]
    notes.adopter.settle([replace(wake, claim_token=uuid4())])
    assert notes.lost == ["ada"] * 2


def test_c40_an_adopted_wake_is_not_adopted_again_from_an_older_answer() -> None:
    notes = Notes()
    wake = here(pid=os.getpid(), pid_started_at=proctable.started_at(os.getpid()))
    notes.adopter.settle_own([wake])
    notes.adopter.settle_own([wake])
    assert notes.adopted == [os.getpid()]


# ------------------------------------------------------------------------------- the book


def booked(wake_id: UUID) -> BookedWake:
    return BookedWake(wake_id, uuid4(), uuid4(), "ada")


@pytest.mark.parametrize("answers", [True, False], ids=["answered", "unanswered"])
def test_a_wake_is_ours_from_the_question_on(answers: bool) -> None:
    """At no moment is a granted wake neither awaited nor booked: it would be given back while it starts."""
    book, request, wake_id = WakeBook(), uuid4(), uuid4()
    seen: list[bool] = []
    with book.asking(request):
        seen.append(book.may_hold(wake_id, request))
        if answers:
            book.add(booked(wake_id))
    seen.append(book.may_hold(wake_id, request))
    assert seen == [True, answers]
    book.remove(wake_id)
    assert book.may_hold(wake_id, request) is False


def test_a_question_that_fails_is_no_longer_awaited() -> None:
    book, request = WakeBook(), uuid4()

    with pytest.raises(ConnectionError), book.asking(request):
        raise ConnectionError
    assert book.may_hold(uuid4(), request) is False
