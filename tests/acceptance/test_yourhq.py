"""The daemon on a database that a YourHQ operator already has."""

from pathlib import Path

from dispatcher.local.keys import Keys
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import settings_for, working_orders
from tests.support.api import running_api
from tests.support.daemon import DaemonProcess
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


def test_the_daemon_wakes_agents_on_an_existing_yourhq(
    yourhq_database: Database, project_keys: Keys, stub_agent: StubAgent, tmp_path: Path
) -> None:
    seed = Seed(yourhq_database)
    seed.agent("ada")
    with running_api(yourhq_database, project_keys, tmp_path) as api:
        stub_agent.order(**working_orders(api))
        daemon = DaemonProcess(tmp_path / "daemon", settings_for(api, stub_agent)).ready()
        try:
            seed.item("ada")
            daemon.wait_for("wake.started", agent="ada", path="event")
            status = "select status::text from agent_inbox_items"
            wait_until(lambda: yourhq_database.value(status) == "done", 10)
        finally:
            assert daemon.stop() == 0
    assert yourhq_database.value("select state from agent_wakes") == "succeeded"
