"""Daemons of long ago go, but not at the cost of a start."""

import uuid

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import Seed

KNOWN = "select array_agg(id) from dispatcher_instances"


def test_an_old_daemon_goes_when_the_last_of_its_wakes_has_gone(database: Database, seed: Seed) -> None:
    """With 100,000 ended wakes of it a start took 13 s, and ran into the statement timeout each time."""
    agent = seed.agent("ada")
    seed.item("ada")
    old = Dispatcher(database)
    grant = old.claim(agent)
    old.started(grant)
    old.ended(grant)
    [first] = database.value(KNOWN)
    database.execute("update dispatcher_instances set last_heartbeat_at = now() - interval '8 days'")
    Dispatcher(database)
    assert first in database.value(KNOWN)
    assert database.value("select instance_id from agent_wakes") == first
    database.execute("delete from agent_wakes where id = %s", [uuid.UUID(grant["wake_id"])])
    Dispatcher(database)
    assert first not in database.value(KNOWN)
