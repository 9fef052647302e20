"""Recordings of the real server (fixtures/recordings.jsonl): reading, masking, and the SQL that makes their events.

One JSON object a line: scenario, dir (">" client to server, "<" server to client, "#" note), raw. Tokens are
replaced by `<jwt>`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

_FILE = Path(__file__).parent / "fixtures" / "recordings.jsonl"
_REPLY_ID = re.compile(r'(?<=\{"id":)\d+')
_EVENT_IDS = re.compile(r'(?<="ids":\[)[\d,]+(?=\])')
_COMMITTED = re.compile(r'"commit_timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"')
_SECONDS = re.compile(r"(?<=expired )\d+(?= seconds)")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Line:
    direction: str
    raw: str


@cache
def _all() -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for text in _FILE.read_text(encoding="utf-8").splitlines():
        entry = json.loads(text)
        found.setdefault(entry["scenario"], []).append(Line(entry["dir"], entry["raw"]))
    return found


def lines(scenario: str) -> list[Line]:
    return _all()[scenario]


def names() -> list[str]:
    return list(_all())


def notes(scenario: str) -> Iterator[str]:
    return (line.raw for line in lines(scenario) if line.direction == "#")


class Masks:
    """Takes out what may differ: times, message ids, and the numbers of entries.

    Entry ids become "id 1", "id 2" in order of first appearance. One object serves all scenarios of a side, so the
    same entry must have the same id everywhere, and another entry another one, as on the real server.
    """

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def mask(self, raw: str) -> str:
        text = _COMMITTED.sub('"commit_timestamp":"TIME"', raw)
        text = _SECONDS.sub("N", text)
        if '"phx_reply"' in text:
            text = _REPLY_ID.sub(lambda found: self._name(found[0]), text)
        if '"broadcast"' in text:
            text = _UUID.sub("UUID", text)
        return _EVENT_IDS.sub(lambda found: ",".join(self._name(number) for number in found[0].split(",")), text)

    def _name(self, number: str) -> str:
        return self._known.setdefault(number, f"id {len(self._known) + 1}")


@dataclass(frozen=True)
class Change:
    """A recorded database change. `record` and `old_record` are its JSON text, every digit kept."""

    table: tuple[str, str]
    action: str
    committed: str | None
    columns: tuple[str, ...]
    record: str
    old_record: str


def change_in(raw: str) -> Change | None:
    """The database change that a frame reports, or None for any other frame."""
    frame = json.loads(raw)
    payload = frame[4] if isinstance(frame, list) else frame["payload"]
    data = payload.get("data", payload) if isinstance(payload, dict) else {}
    if "commit_timestamp" not in data:
        return None
    return Change(
        table=(data["schema"], data["table"]),
        action=data["type"],
        committed=data["commit_timestamp"],
        columns=tuple(data.get("record", {})),
        record=_object(raw, "record", data),
        old_record=_object(raw, "old_record", data),
    )


def _object(raw: str, key: str, data: dict[str, Any]) -> str:
    if key not in data:
        return "{}"
    start = raw.index(f'"{key}":') + len(key) + 3
    text = raw[start : json.JSONDecoder().raw_decode(raw, start)[1]]
    for column in data["columns"]:
        if column["type"] == "bytea":
            # The server sends the digits without the prefix that PostgreSQL reads.
            text = re.sub(rf'("{column["name"]}": ")', r"\1\\\\x", text)
    return text


def replay_change(connection: psycopg.Connection[Any], change: Change) -> None:
    """Do in the database what the recorded event reports."""
    {"INSERT": _insert, "UPDATE": _update, "DELETE": _delete}[change.action](connection, change)


def _insert(connection: psycopg.Connection[Any], change: Change) -> None:
    columns = sql.SQL(", ").join(sql.Identifier(name) for name in change.columns if name != "g")
    connection.execute(
        sql.SQL(
            "insert into {table} ({columns}) select {columns} from jsonb_populate_record(null::{table}, %s)"
        ).format(table=sql.Identifier(*change.table), columns=columns),
        (change.record,),
    )


def _update(connection: psycopg.Connection[Any], change: Change) -> None:
    assignments = sql.SQL(", ").join(
        sql.SQL("{0} = r.{0}").format(sql.Identifier(name)) for name in change.columns if name != "id"
    )
    connection.execute(
        sql.SQL(
            "update {table} as t set {assignments} from jsonb_populate_record(null::{table}, %s) as r where t.id = r.id"
        ).format(table=sql.Identifier(*change.table), assignments=assignments),
        (change.record,),
    )


def _delete(connection: psycopg.Connection[Any], change: Change) -> None:
    connection.execute(
        sql.SQL(
            "delete from {table} as t using jsonb_populate_record(null::{table}, %s) as r where t.id = r.id"
        ).format(table=sql.Identifier(*change.table)),
        (change.old_record,),
    )
