"""What an operator is told without asking: agents woken unusually often."""

from collections.abc import Callable

import pytest

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import Seed

pytestmark = pytest.mark.kept_database

ALERTS = "select title, body, meta from notifications where type = 'often_woken' order by created_at"


def woken(daemon: Dispatcher, database: Database, seed: Seed, slug: str, times: int) -> None:
    """Wakes of an agent, each for an item that something else than our script inserted."""
    agent = seed.agent(slug)
    for _ in range(times):
        item = seed.item(slug, event_type="task_assignment")
        grant = daemon.claim(agent, item)
        assert (grant["granted"], grant["chain_depth"]) == (True, 0)
        daemon.started(grant)
        database.execute("update agent_inbox_items set status = 'done' where id = %s", [item])
        daemon.ended(grant)


def test_c27_an_agent_woken_unusually_often_is_told_once_an_hour_and_goes_on(
    database: Database, seed: Seed, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher(alert_wakes_per_hour=3)
    woken(daemon, database, seed, "ada", 3)
    woken(daemon, database, seed, "bob", 1)
    assert "alerted" not in daemon.sweep()["due"]
    woken(daemon, database, seed, "ada", 1)
    assert daemon.sweep()["alerted"] == 1
    [alert] = database.rows(ALERTS)
    assert "ada" in alert["title"]
    assert alert["meta"] == {"wakes": 4, "alert_wakes_per_hour": 3}
    woken(daemon, database, seed, "ada", 2)
    daemon.sweep()
    assert len(database.rows(ALERTS)) == 1
    database.execute("update agent_wake_state set often_notified_at = now() - interval '61 minutes'")
    daemon.sweep()
    assert [row["meta"]["wakes"] for row in database.rows(ALERTS)] == [4, 6]


def test_c27_the_alert_is_on_by_default_and_zero_means_never(
    database: Database, seed: Seed, dispatcher: Callable[..., Dispatcher]
) -> None:
    settings = database.row("select * from dispatcher.typed_settings('{}')")
    assert settings["alert_wakes_per_hour"] == 60
    daemon = dispatcher(alert_wakes_per_hour=0)
    woken(daemon, database, seed, "ada", 3)
    assert "alerted" not in daemon.sweep()["due"]


def test_c27_a_held_agent_is_told_of_at_the_next_sweep(
    database: Database, seed: Seed, dispatcher: Callable[..., Dispatcher]
) -> None:
    daemon = dispatcher(alert_wakes_per_hour=1)
    woken(daemon, database, seed, "ada", 2)
    holder = database.connect(autocommit=False)
    holder.execute("select from agent_wake_state for update")
    assert daemon.phase("alerted")["count"] == 0
    holder.rollback()
    assert daemon.phase("alerted")["count"] == 1
