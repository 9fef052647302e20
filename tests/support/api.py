"""An embedded Supabase's API on one test database."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.realtime.timings import Timings
from tests.support.database import Database


@contextmanager
def running_api(database: Database, keys: Keys, directory: Path) -> Iterator[Api]:
    """PostgREST, Realtime and gateway; logs go to `directory`."""
    api = Api(
        database.url,
        database.cluster.url(database.name, "authenticator"),
        keys,
        directory,
        pool=10,
        timings=Timings.quick(),
    )
    api.start()
    try:
        yield api
    finally:
        api.stop()
