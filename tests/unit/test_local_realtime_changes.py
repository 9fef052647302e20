"""Decoding the log, and the pieces of events, without a database."""

import struct
import time
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.local.realtime import records
from dispatcher.local.realtime.changes import Rate
from dispatcher.local.realtime.filters import Filter
from dispatcher.local.realtime.pgoutput import UNCHANGED, Change, Decoder, Relation
from dispatcher.local.realtime.records import Column, Event, Table

COMMITTED = datetime(2026, 11, 30, 11, 47, 35, 624_999, tzinfo=UTC)
EVERYBODY = frozenset({"anon"})
TABLE = Table(
    7,
    "public",
    "t",
    False,
    (
        Column("id", "int8", "bigint", True, EVERYBODY),
        Column("value", "text", "text", False, EVERYBODY),
        Column("b", "text", "text", False, frozenset()),
    ),
)
RELATION = Relation(7, "public", "t", ("id", "value"), (True, False))


def begin() -> bytes:
    micros = (COMMITTED - datetime(2000, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return b"B" + struct.pack("!qqi", 1, micros, 99)


def relation(number: int = 7) -> bytes:
    columns = b"".join(
        bytes([flag]) + name + b"\0" + struct.pack("!ii", 20, -1) for flag, name in ((1, b"id"), (0, b"value"))
    )
    return b"R" + struct.pack("!i", number) + b"public\0t\0d" + struct.pack("!h", 2) + columns


def row(*values: bytes | None) -> bytes:
    parts = (
        b"n" if value is None else b"u" if value == b"?" else b"t" + struct.pack("!i", len(value)) + value
        for value in values
    )
    return struct.pack("!h", len(values)) + b"".join(parts)


def decoded(*messages: bytes, wanted: frozenset[int] = frozenset({7})) -> list[Change]:
    return list(Decoder().changes([begin(), relation(), *messages], wanted))


def on_table(kind: bytes, *rows: bytes) -> bytes:
    return kind + struct.pack("!i", 7) + b"".join(rows)


def test_insert_carries_the_new_row_and_the_time_of_its_commit() -> None:
    [change] = decoded(on_table(b"I", b"N", row(b"1", "é".encode())))
    assert change == Change(RELATION, "INSERT", COMMITTED, ("1", "é"), None, False)


def test_update_of_default_identity_knows_the_old_key_from_the_new_row() -> None:
    [change] = decoded(on_table(b"U", b"N", row(b"1", b"x")))
    assert change.old_values() == {"id": "1"}


def test_update_of_the_key_and_full_identity_carry_their_old_values() -> None:
    key, full = decoded(
        on_table(b"U", b"K", row(b"1", None), b"N", row(b"2", b"x")),
        on_table(b"U", b"O", row(b"1", b"w"), b"N", row(b"1", b"x")),
    )
    assert key.old_values() == {"id": "1"}
    assert full.old_values() == {"id": "1", "value": "w"}


def test_unchanged_toasted_value_is_missing_or_the_old_one() -> None:
    default, full = decoded(
        on_table(b"U", b"N", row(b"1", b"?")),
        on_table(b"U", b"O", row(b"1", b"long"), b"N", row(b"1", b"?")),
    )
    assert default.new == ("1", UNCHANGED)
    assert default.new_values() == {"id": "1"}
    assert full.new_values() == {"id": "1", "value": "long"}


def test_delete_has_no_new_row_and_a_truncate_is_no_change() -> None:
    [change] = decoded(on_table(b"D", b"K", row(b"1", None)), b"T" + struct.pack("!iBi", 1, 0, 7), b"C" + bytes(25))
    assert (change.action, change.new, change.old_values()) == ("DELETE", None, {"id": "1"})


def test_rows_of_other_tables_are_not_even_parsed() -> None:
    assert decoded(b"I" + struct.pack("!i", 8) + b"garbage") == []


def event(action: str = "INSERT", *, oversized: bool = False, **new: str) -> Event:
    change = Change(RELATION, action, COMMITTED, None, None, False)
    return Event(change, new, {"id": "1", "value": '"old"'}, {}, oversized)


def test_keys_are_in_the_order_of_jsonb_and_hidden_columns_are_left_out() -> None:
    data = event(value="12345678.50", id="1", b='"hidden"').data(TABLE, "anon", None)
    assert data == (
        '{"table":"t","type":"INSERT","record":{"id": 1, "value": 12345678.50},'
        '"columns":[{"name": "id", "type": "int8"}, {"name": "value", "type": "text"}],"errors":null,'
        '"schema":"public","commit_timestamp":"2026-11-30T11:47:35.624Z"}'
    )


def test_selection_keeps_the_key() -> None:
    assert '"record":{"id": 1}' in event(id="1", value='"x"').data(TABLE, "anon", ("id",))


def test_oversized_record_keeps_only_short_values() -> None:
    data = event(oversized=True, id="1", value=f'"{"x" * 63}"').data(TABLE, "anon", None)
    assert '"record":{"id": 1}' in data
    assert '"errors":["Error 413: Payload Too Large"]' in data


def test_delete_under_row_level_security_shows_only_the_key() -> None:
    guarded = Table(TABLE.id, TABLE.schema, TABLE.name, True, TABLE.columns)
    assert '"old_record":{"id": 1}' in event("DELETE").data(guarded, "anon", None)
    assert '"old_record":{"id": 1, "value": "old"}' in event("DELETE").data(TABLE, "anon", None)
    assert '"record":' not in event("DELETE").data(TABLE, "anon", None).replace('"old_record":', "")


@pytest.mark.parametrize(
    ("table", "action", "role", "error"),
    [
        (TABLE, "INSERT", "anon", None),
        (TABLE, "INSERT", "stranger", "Error 401: Unauthorized"),
        (TABLE, "DELETE", "stranger", None),
        (Table(8, "public", "nopk", False, ()), "UPDATE", "anon", "Error 400: Bad Request, no primary key"),
    ],
)
def test_records_are_refused_for_want_of_a_key_or_of_rights(
    table: Table, action: str, role: str, error: str | None
) -> None:
    assert records.refusal(table, action, role) == error


def test_names_are_quoted_and_percent_signs_survive_in_the_query() -> None:
    odd = Table(9, "s", "t", False, (Column('a"%', "text", "text", True, EVERYBODY),))
    query = records.conversion_query(odd, [Filter('a"%', "like", "x%")]).as_string()
    assert query == (
        'select array[to_jsonb("v"."c0"::text)::text]::text[], '
        'array[coalesce(("v"."c0" like %(f0)s::text), false)]::boolean[] '
        'from unnest(%(c0)s::text[]) with ordinality as v("c0", n) order by n'
    )


def test_rate_is_an_average_that_lets_bursts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate = Rate(limit=2.0, window=10.0)
    assert [rate.allow() for _ in range(21)] == [True] * 20 + [False]
    now = 111.0
    assert rate.allow(20)
    assert not rate.allow()


def test_no_limit_is_no_limit() -> None:
    assert Rate(None, 1.0).allow(10**9)
