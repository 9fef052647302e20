"""C10: a side write that failed is said in the log and in health, until it has stopped for a while."""

import pytest
import structlog

from dispatcher.instance.faults import CAUSE, QUIET_SECONDS, FaultWatch
from dispatcher.instance.model import SideFault
from dispatcher.runtime.health import Health


@pytest.fixture
def health() -> Health:
    return Health()


def test_c10_a_failed_side_write_is_logged_once_and_degrades_health(health: Health) -> None:
    watch = FaultWatch(health)
    with structlog.testing.capture_logs() as lines:
        watch.note([SideFault(7, "notification agent_stalled", "no such function (42883)")])
        watch.note([])
    assert [(line["event"], line["side_write"]) for line in lines] == [
        ("side_write.failed", "notification agent_stalled")
    ]
    assert any("42883" in cause for cause in health.snapshot()["causes"])
    assert watch.last_id == 7


def test_c10_health_recovers_once_nothing_failed_for_a_while(health: Health) -> None:
    now = [100.0]
    watch = FaultWatch(health, now=lambda: now[0])
    watch.note([SideFault(1, "hint", "away")])
    now[0] += QUIET_SECONDS
    watch.note([])
    assert health.snapshot()["causes"]
    now[0] += 1
    watch.note([])
    assert health.snapshot()["causes"] == []
    assert not health.clear_cause(CAUSE)
