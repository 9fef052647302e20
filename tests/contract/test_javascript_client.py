"""The official JavaScript client against the local Realtime: a browser's view, and the second wire format."""

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.javascript import packages
from tests.contract.local_realtime import LocalRealtime
from tests.support.database import Database

DEADLINE = 10.0
PLAIN = {"event": "*", "schema": "public", "table": "plain"}
Start = Callable[[], "JavaScript"]


class JavaScript:
    """A node process with one client: commands in, what it hears out, sorted by kind."""

    def __init__(self, directory: Path, realtime: LocalRealtime) -> None:
        script = packages.HERE / "client.mjs"
        argv = [packages.node(), str(script), str(directory), realtime.url, realtime.keys.service_role_key]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard: dict[str, queue.Queue[dict[str, Any]]] = {
            kind: queue.Queue() for kind in ("change", "broadcast", "system", "state", "sent", "left")
        }
        self.reader = threading.Thread(target=self._read, name="javascript-reader")
        self.reader.start()

    def do(self, command: str, **facts: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"command": command, **facts}) + "\n")
        self.process.stdin.flush()

    def next(self, kind: str) -> dict[str, Any]:
        """The next thing heard of this kind. Raises queue.Empty."""
        return self.heard[kind].get(timeout=DEADLINE)

    def ready(self, topic: str = "plain", *changes: dict[str, Any], **config: Any) -> None:
        """Subscribe and wait for "Subscribed to PostgreSQL"."""
        self.do("subscribe", topic=topic, changes=changes or [PLAIN], config=config)
        self.until_state("SUBSCRIBED")
        self.until_system("Subscribed to PostgreSQL")

    def until_state(self, wanted: str) -> None:
        while self.next("state")["state"] != wanted:
            pass

    def until_system(self, wanted: str) -> None:
        while self.next("system")["system"]["message"] != wanted:
            pass

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(DEADLINE)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard = json.loads(line)
            self.heard[heard.pop("kind")].put(heard)


@pytest.fixture(scope="module")
def installed_packages() -> Path:
    return packages.installed()


@pytest.fixture
def start(realtime: LocalRealtime, installed_packages: Path) -> Iterator[Start]:
    running: list[JavaScript] = []

    def start() -> JavaScript:
        running.append(JavaScript(installed_packages, realtime))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.fixture
def javascript(start: Start) -> JavaScript:
    return start()


def test_insert_update_delete_arrive_filtered_and_typed(javascript: JavaScript, recorded_database: Database) -> None:
    javascript.ready("plain", PLAIN, {**PLAIN, "event": "INSERT", "filter": "agent_id=eq.a1"})
    recorded_database.execute("insert into plain values (1, 'x', 'a1')")
    recorded_database.execute("update plain set v = 'y'")
    recorded_database.execute("delete from plain")
    heard = [javascript.next("change") for _ in range(4)]
    assert [one["change"]["eventType"] for one in heard] == ["INSERT", "INSERT", "UPDATE", "DELETE"]
    assert {one["entry"].get("filter") for one in heard[:2]} == {None, "agent_id=eq.a1"}
    assert heard[0]["change"]["new"] == {"id": 1, "v": "x", "agent_id": "a1"}
    assert (heard[2]["change"]["new"]["v"], heard[2]["change"]["old"]) == ("y", {"id": 1})
    assert heard[3]["change"]["old"] == {"id": 1}


def test_role_without_rights_hears_the_error(
    realtime: LocalRealtime, javascript: JavaScript, recorded_database: Database
) -> None:
    javascript.do("auth", token=realtime.keys.token("authenticated"))
    javascript.ready("denied", {**PLAIN, "table": "denied"})
    recorded_database.execute("insert into denied values (1, 'x')")
    assert javascript.next("change")["change"]["errors"] == ["Error 401: Unauthorized"]


def test_private_broadcasts_from_the_database_reach_the_client(
    javascript: JavaScript, recorded_database: Database
) -> None:
    javascript.do("subscribe", topic="gateway:g1", config={"private": True})
    javascript.until_state("SUBSCRIBED")
    recorded_database.execute("select realtime.send('{\"agent_id\": \"a1\"}', 'wake', 'gateway:g1', true)")
    message = javascript.next("broadcast")["message"]
    assert (message["event"], message["payload"]["agent_id"]) == ("wake", "a1")


def test_clients_broadcast_to_each_other_in_binary(start: Start) -> None:
    sender, receiver = start(), start()
    for client in (sender, receiver):
        client.do("subscribe", topic="room", config={"broadcast": {"ack": True}})
        client.until_state("SUBSCRIBED")
    sender.do("send", topic="room", event="hi", payload={"n": 1})
    assert sender.next("sent")["result"] == "ok"
    message = receiver.next("broadcast")["message"]
    assert (message["event"], message["payload"]) == ("hi", {"n": 1})


def test_client_is_back_after_every_kind_of_close(
    realtime: LocalRealtime, javascript: JavaScript, recorded_database: Database
) -> None:
    javascript.ready()
    for number, code in enumerate((1000, 1001, 1006, 1012)):
        realtime.set_faults(close=code)
        javascript.until_state("SUBSCRIBED")
        javascript.until_system("Subscribed to PostgreSQL")
        recorded_database.execute("insert into plain values (%s)", (number,))
        assert javascript.next("change")["change"]["new"]["id"] == number


def test_new_token_makes_the_channel_ready_again(realtime: LocalRealtime, javascript: JavaScript) -> None:
    javascript.ready()
    javascript.do("auth", token=realtime.keys.token("service_role", seconds=7200))
    javascript.until_system("Subscribed to PostgreSQL")


def test_leave_and_join_again_on_the_same_socket(javascript: JavaScript, recorded_database: Database) -> None:
    javascript.ready()
    javascript.do("leave", topic="plain")
    assert javascript.next("left")["result"] == "ok"
    javascript.ready()
    recorded_database.execute("insert into plain values (1)")
    assert javascript.next("change")["change"]["new"]["id"] == 1


def test_bad_filter_is_a_system_error_and_no_reason_to_rejoin(javascript: JavaScript) -> None:
    javascript.do("subscribe", topic="plain", changes=[{**PLAIN, "filter": "nocol=eq.1"}])
    javascript.until_state("SUBSCRIBED")
    assert "invalid column for filter nocol" in javascript.next("system")["system"]["message"]
    assert javascript.heard["state"].empty()
