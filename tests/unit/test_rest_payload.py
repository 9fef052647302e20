import json
import math
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.supabase.rest_payload import after, clean, clean_text, encode, equals, one_of, quoted

any_text = st.text(st.characters(codec=None), max_size=40)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=20,
)


def test_ff26_nul_lone_surrogates_and_nan_never_reach_the_server() -> None:
    sent = json.loads(encode({"p_text": "ok\x00\ud800", "p_cost": math.nan, "p_\x00name": [math.inf, 1.5]}))
    assert sent == {"p_text": "ok", "p_cost": None, "p_name": [None, 1.5]}


@given(json_like)
def test_whatever_is_cleaned_can_be_sent_and_stored(value: object) -> None:
    text = encode({"p": value}).decode("utf-8")
    assert "\\u0000" not in text
    assert json.loads(text) == json.loads(text, parse_constant=pytest.fail)


@given(st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])))
def test_text_that_is_fit_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == text


def test_surrogates_that_belong_together_become_their_character() -> None:
    assert clean_text("a\ud83d\ude00b\ude00") == "a\U0001f600b"


def test_values_with_a_plain_text_form_are_sent_as_that() -> None:
    moment = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
    identity = UUID(int=7)
    cleaned = clean([identity, moment, Decimal("0.10"), Decimal("NaN"), frozenset({1}), (True, None)])
    assert cleaned == [str(identity), "2026-11-30T12:00:00+00:00", "0.10", None, [1], [True, None]]


@pytest.mark.parametrize("value", [b"bytes", Path("p"), object()])
def test_values_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"p": value})


@pytest.mark.parametrize(
    ("value", "spelled"),
    [
        ("ops", "ops"),
        ('ops,lead(1)"x"', '"ops,lead(1)\\"x\\""'),
        ("back\\slash", '"back\\\\slash"'),
        ("", '""'),
        ("null", '"null"'),
        (" a", '" a"'),
        (12, "12"),
    ],
)
def test_ff22_reserved_characters_are_quoted_inside_lists(value: object, spelled: str) -> None:
    assert quoted(value) == spelled


def test_ff22_an_empty_list_filter_matches_nothing() -> None:
    assert one_of([]) == "in.()"
    assert one_of(["a,b", "c"]) == 'in.("a,b",c)'


def test_ff22_the_plus_of_a_time_zone_survives_the_query_string() -> None:
    query = httpx.QueryParams([("created_at", equals("2026-11-30T12:00:00+00:00"))])
    assert str(query) == "created_at=eq.2026-11-30T12%3A00%3A00%2B00%3A00"


def test_the_position_after_a_row_covers_every_column_in_order() -> None:
    row = {"created_at": "2026-11-30T12:00:00+00:00", "id": 7, "more": None}
    assert after(["id"], row) == "(id.gt.7)"
    assert after(["created_at", "id"], row) == (
        '(created_at.gt."2026-11-30T12:00:00+00:00",and(created_at.eq."2026-11-30T12:00:00+00:00",id.gt.7))'
    )
    with pytest.raises(ValueError, match="more"):
        after(["more"], row)
