"""Who is waited for, as the log and health tell it."""

import pytest

from dispatcher import events
from dispatcher.instance.holders import HolderWatch
from dispatcher.runtime.health import Health

HELD = "a row of tenants is held by pid 7"


class Log:
    """Stands in for the module's logger."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_facts: object) -> None:
        self.events.append(event)

    info = warning


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    kept = Log()
    monkeypatch.setattr("dispatcher.instance.holders.log", kept)
    return kept


def test_f4_what_was_released_while_it_was_asked_about_is_not_told_for_ever(log: Log) -> None:
    health = Health()

    def ask() -> str:
        watch.went_through("claim_wakes")  # another thread's call, meanwhile
        return HELD

    watch = HolderWatch(health, ask)
    watch.met("claim_wakes", None)
    assert health.snapshot()["causes"] == []
    assert log.events == []


def test_f4_a_held_row_is_told_once_and_its_release_too(log: Log) -> None:
    health = Health()
    watch = HolderWatch(health, lambda: HELD)
    for _ in range(2):
        watch.met("claim_wakes", None)
        watch.met("heartbeat", HELD)
    assert len(health.snapshot()["causes"]) == 1
    watch.went_through("claim_wakes")
    assert health.snapshot()["causes"]
    watch.went_through("heartbeat")
    assert health.snapshot()["causes"] == []
    assert log.events == [events.LOCK_HELD, events.LOCK_RELEASED]
