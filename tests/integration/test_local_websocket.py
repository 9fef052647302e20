"""The way to Realtime through the gateway: both paths, both styles of keys, fault switches over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from tests.support.api import running_api
from tests.support.database import Database
from tests.support.waiting import wait_until

PATHS = ("/realtime/v1/websocket", "/socket/websocket")


def dial(api: Api, key: str, path: str = PATHS[0]) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{api.port}{path}?apikey={key}&vsn=1.0.0", proxy=None)


def join(socket: ClientConnection, topic: str) -> None:
    config = {"private": True, "broadcast": {"replication_ready": True}, "postgres_changes": []}
    message = {"topic": f"realtime:{topic}", "event": "phx_join", "ref": "1", "join_ref": "1"}
    socket.send(json.dumps(message | {"payload": {"config": config}}))
    assert receive(socket)["payload"]["status"] == "ok"
    assert receive(socket)["payload"]["message"] == "Replication connection established"


def receive(socket: ClientConnection) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(socket.recv(timeout=10))
    return frame


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["service_role_key", "secret_key"])
def test_a_broadcast_from_the_database_arrives(api: Api, database: Database, path: str, key: str) -> None:
    with dial(api, getattr(api.keys, key), path) as socket:
        join(socket, "gateway:x")
        database.execute("select realtime.send('{\"a\": 1}', 'inbox', 'gateway:x')")
        frame = receive(socket)
    assert (frame["event"], frame["payload"]["event"]) == ("broadcast", "inbox")
    assert frame["payload"]["payload"]["a"] == 1


@pytest.mark.parametrize("key", ["", "nonsense", "sb_secret_wrong"])
def test_a_wrong_key_is_refused_in_the_handshake(api: Api, key: str) -> None:
    with pytest.raises(InvalidStatus) as caught, dial(api, key):
        pass
    assert caught.value.response.status_code == 401


def test_faults_set_over_http_reach_realtime(api: Api, database: Database) -> None:
    with dial(api, api.keys.service_role_key) as socket:
        join(socket, "gateway:x")
        answer = httpx.post(
            f"{api.url}/__local/faults",
            json={"realtime": {"drop_events": 1}},
            headers={"apikey": api.keys.service_role_key},
            trust_env=False,
        )
        assert answer.json()["realtime"]["drop_events"] == 1
        for number in (1, 2):
            database.execute("select realtime.send(jsonb_build_object('n', %s::int), 'e', 'gateway:x')", (number,))
        assert receive(socket)["payload"]["payload"]["n"] == 2


def test_stopping_the_api_says_goodbye(api: Api) -> None:
    with dial(api, api.keys.service_role_key) as socket:
        api.stop()
        with pytest.raises(Exception, match="1012"):
            socket.recv(timeout=10)


def test_stopping_at_once_leaves_no_connection_half_made(
    database: Database, project_keys: Keys, tmp_path: Path
) -> None:
    for _ in range(5):
        with running_api(database, project_keys, tmp_path):
            pass
    others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    wait_until(lambda: database.value(others) == 0, 10)
