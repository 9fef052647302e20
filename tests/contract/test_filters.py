"""All filters that were tried on the real server, on the same four rows: what matched there must match here."""

import ast
import json
import re
from typing import Any

import psycopg
import pytest

from tests.contract import recordings
from tests.contract.local_realtime import LocalRealtime
from tests.contract.raw_client import RawClient

_NOTE = re.compile(r"FILTER (?P<filter>.*?) +system=(?P<system>.*) matched n/title/agent=(?P<rows>.*)$")
_ROWS = [(1, "hello", "a", True), (2, "HELLO", "b c", False), (3, "x", "d,e", False), (None, None, "z", False)]
NOTES = [match for note in recordings.notes("filters") if (match := _NOTE.match(note))]


@pytest.fixture(scope="module")
def matched(shared_realtime: LocalRealtime, shared_database: Any) -> dict[str, tuple[str, list[Any]]]:
    """By filter: the system message and the rows that came."""
    with RawClient(shared_realtime.websocket_url(apikey=shared_realtime.keys.service_role_key)) as client:
        systems = {}
        for number, note in enumerate(NOTES):
            entry = {"event": "INSERT", "schema": "public", "table": "events", "filter": note["filter"]}
            client.join(f"realtime:f{number}", entry)
            client.reply(f"realtime:f{number}")
            systems[number] = client.payload(f"realtime:f{number}", "system")["message"]
        client.subscribe("realtime:all", {"event": "INSERT", "schema": "public", "table": "events"})
        _insert_rows(shared_database.admin)
        for _ in _ROWS:
            client.expect("realtime:all")
        client.sync()
        return {
            note["filter"]: (systems[number], _records(client, f"realtime:f{number}"))
            for number, note in enumerate(NOTES)
        }


def _insert_rows(connection: psycopg.Connection[Any]) -> None:
    for n, title, agent, ok in _ROWS:
        connection.execute(
            "insert into events (n, title, agent_id, ok, m, tags, payload, amount) "
            "values (%s, %s, %s, %s, 'ok', '{x,y}', '{\"a\": 1}', 10.50)",
            (n, title, agent, ok),
        )


def _records(client: RawClient, topic: str) -> list[Any]:
    records = [json.loads(frame)["payload"]["data"]["record"] for frame in client.waiting[topic]]
    return [(record["n"], record["title"], record["agent_id"]) for record in records]


def test_every_filter_of_the_recording_is_here() -> None:
    assert len(NOTES) == 26


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note["filter"])
def test_filter_matches_what_it_matched_on_the_real_server(
    note: re.Match[str], matched: dict[str, tuple[str, list[Any]]]
) -> None:
    assert matched[note["filter"]] == (note["system"], ast.literal_eval(note["rows"]) or [])
