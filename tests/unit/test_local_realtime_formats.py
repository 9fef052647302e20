"""The pure parts of the local Realtime: frames, filters, entries, tokens, Elixir literals."""

import json
import time
from contextlib import suppress
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.local.realtime import elixir, filters, frames, subscriptions, tokens
from dispatcher.local.realtime.filters import Filter, FilterRefused
from dispatcher.local.realtime.frames import BinaryPush, Message
from dispatcher.local.realtime.subscriptions import EntryRefused
from dispatcher.local.realtime.tokens import TokenRefused

SECRET = "a secret of more than thirty-two bytes"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.text(), st.text(), JSON, st.none() | st.text(), st.none() | st.text())
def test_what_a_client_encodes_is_decoded(topic: str, event: str, payload: Any, ref: Any, join_ref: Any) -> None:
    old = json.dumps({"topic": topic, "event": event, "payload": payload, "ref": ref, "join_ref": join_ref})
    new = json.dumps([join_ref, ref, topic, event, payload])
    expected = Message(join_ref, ref, topic, event, payload)
    assert frames.decode("1.0.0", old) == frames.decode("2.0.0", new) == expected


@given(st.binary(max_size=40))
def test_binary_junk_is_ignored_or_a_broadcast(data: bytes) -> None:
    message = frames.decode("2.0.0", data)
    assert message is None or message.event == "broadcast"
    assert frames.decode("1.0.0", data) is None


@pytest.mark.parametrize("text", ["", "not json", "1", "null", "[]", '[null,"9","phoenix","heartbeat"]', "[" * 100_000])
def test_what_is_no_frame_is_ignored(text: str) -> None:
    assert frames.decode("1.0.0", text) is None
    assert frames.decode("2.0.0", text) is None


def test_frames_of_one_version_mean_nothing_to_the_other() -> None:
    assert frames.decode("1.0.0", '[null,"9","phoenix","heartbeat",{}]') is None
    assert frames.decode("2.0.0", '{"topic":"phoenix","event":"heartbeat","payload":{},"ref":"1"}') is None


def test_payload_is_spliced_as_it_is() -> None:
    payload = '{"n": 12345678901234567890.10}'
    assert frames.encode("1.0.0", "7", None, "t", "e", payload) == (
        '{"ref":null,"payload":{"n": 12345678901234567890.10},"event":"e","topic":"t"}'
    )
    assert frames.encode("2.0.0", "7", None, "t", "e", payload) == ('["7",null,"t","e",{"n": 12345678901234567890.10}]')


def test_binary_broadcast_travels_from_client_to_client() -> None:
    names = [b"1", b"2", b"realtime:room", b"hi", b""]
    sent = bytes([3, *map(len, names), 1]) + b"".join(names) + b'{"a":1}'
    message = frames.decode("2.0.0", sent)
    assert message == Message("1", "2", "realtime:room", "broadcast", BinaryPush("hi", b"", 1, b'{"a":1}'))
    assert message is not None
    assert frames.encode_binary_broadcast(message.topic, message.payload) == (
        bytes([4, 13, 2, 0, 1]) + b'realtime:roomhi{"a":1}'
    )
    assert frames.json_push_of(message.payload) == '{"event":"hi","payload":{"a":1},"type":"broadcast"}'


@pytest.mark.parametrize("payload", ["str", "", [1], None, {}, BinaryPush("x", b"", 0, b"\x00")])
def test_broadcast_that_has_no_json_form_reaches_nobody(payload: Any) -> None:
    assert frames.json_push_of(payload) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n=eq.1", [Filter("n", "eq", "1")]),
        ("n=not.eq.1", [Filter("n", "eq", "1", negated=True)]),
        ("n=gt.0,n=lt.3", [Filter("n", "gt", "0"), Filter("n", "lt", "3")]),
        ("v=eq.1.5", [Filter("v", "eq", "1.5")]),
        ('v=eq."d,e"', [Filter("v", "eq", "d,e")]),
        (r'v=eq."a\"b"', [Filter("v", "eq", 'a"b')]),
        ("n=in.(1,3)", [Filter("n", "in", "{1,3}", values=("1", "3"))]),
        ("n=not.in.(1,3)", [Filter("n", "in", "{1,3}", True, ("1", "3"))]),
        ('v=in.(a,b c,"d,e")', [Filter("v", "in", "{a,b c,d,e}", values=("a", "b c", "d,e"))]),
        ("v=match.^(a,b)$", [Filter("v", "match", "^(a,b)$")]),
        ("ok=is.true", [Filter("ok", "is", "true")]),
    ],
)
def test_filter_is_understood(text: str, expected: list[Filter]) -> None:
    assert list(filters.parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("agent_id=foo.1", 'Error parsing `filter` params: ["foo", "1"]'),
        ("agent_id", 'Error parsing `filter` params: ["agent_id"]'),
        ("n=in.1,2", "Error parsing `filter` params: `in` filter value must be wrapped by parentheses"),
        ("tags=eq.{x,y}", 'Error parsing `filter` params: ["y}"]'),
        (
            "n=gt.1,,n=lt.3",
            "Error parsing `filter` params: filter must not contain empty segments (check for extra commas)",
        ),
        ("or=(n.eq.1,n.eq.2)", 'Error parsing `filter` params: ["(n", "eq.1,n.eq.2)"]'),
    ],
)
def test_filter_is_refused_in_the_real_words(text: str, words: str) -> None:
    with pytest.raises(FilterRefused) as caught:
        filters.parse(text)
    assert str(caught.value) == words


@given(st.text())
def test_any_filter_is_understood_or_refused(text: str) -> None:
    with suppress(FilterRefused):
        assert all(one.operator in filters.OPERATORS for one in filters.parse(text))


def test_more_than_a_hundred_values_are_too_many() -> None:
    assert len(filters.parse(f"n=in.({','.join(map(str, range(100)))})")[0].values) == 100
    with pytest.raises(FilterRefused, match="100"):
        filters.parse(f"n=in.({','.join(map(str, range(101)))})")


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4))
def test_entry_id_is_the_same_for_the_same_entry_and_never_zero(params: dict[str, Any]) -> None:
    turned = dict(reversed(params.items()))
    assert subscriptions.entry_id(params) == subscriptions.entry_id(turned)
    assert 1 <= subscriptions.entry_id(params) <= 134_217_727


def test_entry_is_echoed_whole_with_its_id_first() -> None:
    [entry] = subscriptions.entries_of({"postgres_changes": [{"table": "t", "schema": "s", "zzz": None}]})
    assert list(entry.echo().items()) == [("id", entry.id), ("schema", "s"), ("table", "t"), ("zzz", None)]


@pytest.mark.parametrize(
    ("config", "count"), [({}, 0), ({"postgres_changes": {"event": "*"}}, 0), ({"postgres_changes": []}, 0)]
)
def test_what_is_no_list_of_entries_counts_as_none(config: dict[str, Any], count: int) -> None:
    assert len(subscriptions.entries_of(config)) == count


def test_entry_that_is_no_object_is_refused() -> None:
    with pytest.raises(EntryRefused, match='UnknownErrorOnChannel: expected a map, got: "x"'):
        subscriptions.entries_of({"postgres_changes": ["x"]})


@pytest.mark.parametrize(
    ("topic", "params"),
    [
        ("public", {"schema": "public"}),
        ("public:plain", {"schema": "public", "table": "plain"}),
        ("public:plain:a=eq.b:c", {"schema": "public", "table": "plain", "filter": "a=eq.b:c"}),
    ],
)
def test_old_topics_spell_an_entry(topic: str, params: dict[str, str]) -> None:
    [entry] = subscriptions.legacy_entries_of(topic)
    assert entry.params == params


@pytest.mark.parametrize(("event", "action"), [("insert", "INSERT"), ("*", "*"), ("nonsense", "*"), (None, "*")])
def test_event_names_are_case_blind_and_unknown_ones_mean_all(event: str | None, action: str) -> None:
    entry = subscriptions.entries_of({"postgres_changes": [{"event": event, "schema": "s", "table": "t"}]})[0]
    assert subscriptions.understand(entry).action == action


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (None, "nil"),
        (True, "true"),
        (5, "5"),
        ('a"b', r'"a\"b"'),
        ([("n", "eq", "1", False)], '[{"n", "eq", "1", false}]'),
        ({"b": None, "a": [1]}, '%{"a" => [1], "b" => nil}'),
    ],
)
def test_values_are_written_as_elixir_writes_them(value: Any, literal: str) -> None:
    assert elixir.inspect(value) == literal


def encoded(algorithm: str = "HS256", secret: str = SECRET, **claims: Any) -> str:
    return jwt.encode(claims, secret, algorithm)


def soon() -> int:
    return int(time.time()) + 60


@pytest.mark.parametrize(
    ("token", "at_connect", "in_push"),
    [
        ("abc", "The token provided is not a valid JWT", "The token provided is not a valid JWT"),
        (
            encoded(role="anon", exp=soon(), secret="another secret of thirty-two bytes"),
            "Failed to validate JWT signature",
            ":signature_error",
        ),
        (
            encoded(role="anon"),
            "Fields `role` and `exp` are required in JWT",
            "Fields `role` and `exp` are required in JWT",
        ),
        (
            encoded("none", "", role="anon", exp=soon()),
            "Failed to generate JWT signer, check your JWT secret or JWKS configuration",
            "Failed to generate JWT signer, check your JWT secret or JWKS configuration",
        ),
        (encoded(role="anon", exp=1), "Token has expired", None),
    ],
    ids=range(5),  # the tokens hold the time; workers of one run must agree on names
)
def test_token_is_refused_in_the_real_words(token: str, at_connect: str, in_push: str | None) -> None:
    with pytest.raises(TokenRefused) as caught:
        tokens.verify(token, SECRET)
    assert caught.value.at_connect == at_connect
    assert in_push is None or caught.value.in_push == in_push


def test_good_token_gives_role_and_time() -> None:
    token = tokens.verify(encoded(role="authenticated", exp=soon(), aud="x", iat=soon()), SECRET)
    assert token.role == "authenticated"
    assert 0 < token.seconds_left() <= 60


@pytest.mark.parametrize("value", ["sb_secret_x", "sb_publishable_x", None, 5, {}])
def test_keys_of_the_new_style_and_non_texts_give_way_to_the_api_key(value: object) -> None:
    assert tokens.own_token(value) is None
