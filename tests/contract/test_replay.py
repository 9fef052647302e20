"""The recordings of the real server, frame by frame, against the local one.

Client frames go out as they were recorded. Before the first event of each recorded transaction, that transaction is
done again in the database, from the event itself. Then each server frame must equal the recorded one as text, but
for times, message ids and the numbers of entries (see `Masks`). Frames are compared in order within a topic; between
topics the real server's order is a race too.

Not replayed here:

| scenario                                  | reason, and where it is tested instead                             |
|-------------------------------------------|--------------------------------------------------------------------|
| filters                                   | the recorder cut its flood of frames; its notes: test_filters.py   |
| frame_too_big, server_sigterm, _sigkill   | no frames, only a close code: test_faults.py, test_raw.py          |
| connect_*, vsn_*                          | handshakes: test_connect.py                                        |
| too_many_users, too_many_joins            | several sockets and rates over seconds: test_connect.py            |
| too_many_channels, tenant_disconnect_*    | replayed too, on a server of their own: test_connect.py            |
| row_committed_before_join_*               | a race with the poll; the bound is tested: test_delivery.py        |
| cold_start_gap, two_clients_*, db_*       | timing, several sockets, outages: test_delivery.py, test_outage.py |
| db_event_rate_limit                       | 10,000 rows over a minute: test_delivery.py with a small window    |
| publication_changed_live                  | a minute of heartbeats: test_delivery.py                           |
| cdc_worker_*, join_while_db_down          | need the real server's processes; as faults: test_faults.py        |
| py_*, js_* (other than *_normal)          | what the clients do, not the server: test_python_client.py,        |
|                                           | test_javascript_client.py                                          |
| bcast_db_fast                             | the tail of an outage, without a join: test_outage.py              |
"""

import re
from typing import Any

import psycopg
import pytest

from tests.contract import recordings
from tests.contract.local_realtime import LocalRealtime
from tests.contract.replay import Replay
from tests.support.database import Database

ELSEWHERE = re.compile(r"filters|frame_too_big|connect_.*|vsn_.*|server_sigterm|too_many_channels|tenant_disconnect_.*")
SCENARIOS = [name for name in recordings.names() if not ELSEWHERE.fullmatch(name)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_server_answers_as_recorded(
    name: str,
    shared_realtime: LocalRealtime,
    shared_database: Database,
    tables: psycopg.Connection[Any],
) -> None:
    Replay(name, shared_realtime, shared_database).run()
