"""Replays one recorded scenario of the real server against the local one."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jwt

from tests.contract import recordings
from tests.contract.local_realtime import PATHS, LocalRealtime
from tests.contract.raw_client import RawClient
from tests.contract.recordings import Change, Masks
from tests.support.database import Database

_RECORDED, _LOCAL = Masks(), Masks()
_OWNER = "11111111-1111-4111-8111-111111111111"
_CLOSED = re.compile(r"CLOSED \((\d+)")
_CONNECT = re.compile(r"CONNECT (?:ws://[^/]+)?(?P<path>/[^?]+)\?(?P<query>\S+)")


@dataclass(frozen=True)
class Scenario:
    """What the recording alone does not say.

    `tokens`: kinds of the `<jwt>`s in the client's frames, in order; the last one is repeated.
    `statements`: SQL for the transactions that cannot be told from their events, by number from 0.
    `before`: what to do before the first frame with this event, or this system message, is expected.
    """

    tokens: Sequence[str] = ("service_role",)
    prepare: str = ""
    statements: Mapping[int, str] = field(default_factory=dict)
    before: Mapping[str, Callable[[LocalRealtime], object]] = field(default_factory=dict)


_LONG = "insert into plain (id, v, agent_id) values ({}, repeat('x', {}), 'a1')"
_ODD = r"""
  insert into odd values (9007199254740993, 'NaN', 'Infinity', 1.5, 'infinity', '2026-01-01 00:00:00.000001', '[1,4]',
    '10.0.0.1/8', '(1,2)', 'null', 'null', '{{1,2},{3,4}}', '{}', array['{"a":1}', '2']::jsonb[], 'ab', 'xyz', '12.34',
    default, '11:00:00+02', '{3ebeac93-71c5-4ab3-b10f-2cdd26d2a388}', '1010', 'a b c',
    E'tab\tnl\nq"bs\\ emoji 😀 ctl \x01')
"""
_SEND = (
    'select realtime.send(\'{"n": 1, "t": "héllo", "item_id": "i1", "agent_id": "a1"}\', '
    "'wake', 'gateway:g1', true)"
)

SPECIAL: dict[str, Scenario] = {
    "basic_v1": Scenario(tokens=("service_role", "service_role", "other", "other")),
    "basic_v2": Scenario(tokens=("service_role", "service_role", "other", "other")),
    "join_token_bad_signature": Scenario(tokens=("bad_signature",)),
    "join_token_expired": Scenario(tokens=("expired",)),
    "join_token_no_role": Scenario(tokens=("no_role",)),
    "join_token_unknown_role": Scenario(tokens=("unknown_role",)),
    "live_token_expires_v1": Scenario(tokens=("short",)),
    "live_token_expires_v2": Scenario(tokens=("short",)),
    "access_token_push_expired": Scenario(tokens=("service_role", "expired")),
    "access_token_push_bad_signature": Scenario(tokens=("service_role", "bad_signature")),
    "access_token_push_no_role": Scenario(tokens=("service_role", "no_role")),
    "access_token_push_valid_other_role": Scenario(tokens=("service_role", "authenticated")),
    "access_token_push_without_join_ref": Scenario(tokens=("service_role", "other")),
    "py_normal": Scenario(tokens=("service_role", "other")),
    "rls_secret_table": Scenario(tokens=("user_1", "user_2", "anon", "service_role")),
    "no_select_privilege_and_no_pk": Scenario(
        tokens=("authenticated",),
        statements={0: "insert into denied values (1, 'x')", 1: "insert into nopk values ('x')"},
    ),
    "payload_too_large": Scenario(
        statements={2: _LONG.format(1796040573350, 1_050_000), 3: _LONG.format(1796042523350, 3_000_000)}
    ),
    "odd_values": Scenario(
        prepare="insert into plain values (1796041225670, repeat('x', 10000), 'before')", statements={0: _ODD}
    ),
    "channel_crash_v1": Scenario(before={"phx_error": lambda realtime: realtime.set_faults(channel_crash=True)}),
    "channel_crash_v2": Scenario(before={"phx_error": lambda realtime: realtime.set_faults(channel_crash=True)}),
    "tenant_disconnect_operation": Scenario(
        before={"Server requested disconnect": lambda realtime: realtime.set_faults(server_disconnect=True)}
    ),
    "bcast_private": Scenario(statements={0: _SEND}),
    "bcast_public": Scenario(statements={0: "select realtime.send('{\"a\": 2}', 'wake', 'gateway:g2', false)"}),
}


def token(realtime: LocalRealtime, kind: str) -> str:
    """A token of one of the kinds that the recordings were made with."""
    keys = realtime.keys
    special: dict[str, Callable[[], str]] = {
        "other": lambda: keys.token("service_role", seconds=7200),
        "bad_signature": lambda: keys.token("service_role")[:-6] + "AAAAAA",
        "expired": lambda: keys.token("service_role", seconds=-42),
        "short": lambda: keys.token("service_role", seconds=2),
        "no_role": lambda: jwt.encode({"exp": int(time.time()) + 3600}, keys.jwt_secret, "HS256"),
        "no_exp": lambda: jwt.encode({"role": "anon"}, keys.jwt_secret, "HS256"),
        "alg_none": lambda: jwt.encode({"role": "anon", "exp": int(time.time()) + 60}, "", "none"),
        "unknown_role": lambda: keys.token("nosuchrole"),
        "user_1": lambda: keys.token("authenticated", sub=_OWNER),
        "user_2": lambda: keys.token("authenticated", sub=_OWNER.replace("1", "2")),
        "service_role": lambda: keys.service_role_key,
        "anon": lambda: keys.anon_key,
    }
    return special[kind]() if kind in special else keys.token(kind)


class Replay:
    """One scenario on one connection."""

    def __init__(self, name: str, realtime: LocalRealtime, database: Database) -> None:
        self.lines = recordings.lines(name)
        self.scenario = SPECIAL.get(name, Scenario())
        self.realtime = realtime
        self.connection = database.connect()
        self.tokens = list(self.scenario.tokens)
        self.pending = dict(self.scenario.before)
        self.done: set[str | None] = set()
        self.transactions = 0
        self.mismatches: list[tuple[str, str]] = []

    def run(self) -> None:
        if self.scenario.prepare:
            self.connection.execute(self.scenario.prepare.encode())
        with RawClient(self._url()) as client:
            for line in self.lines:
                if line.direction == ">":
                    client.send(self._with_tokens(line.raw))
                elif line.direction == "<":
                    self._expect(client, line.raw)
                elif line.raw == "sent binary 000102":
                    client.send(bytes([0, 1, 2]))
            self._end(client)

    def _end(self, client: RawClient) -> None:
        """Nothing more has come, and the socket is closed if, and as, the recorded one was."""
        found = (_CLOSED.match(line.raw) for line in self.lines)
        code = next((int(match[1]) for match in found if match is not None), 1000)
        if code == 1000:
            assert client.rest() == []
        else:
            assert client.close_code() == code

    def _url(self) -> str:
        found = next((match for line in self.lines if (match := _CONNECT.search(line.raw))), None)
        path, query = (found["path"], found["query"]) if found else (PATHS[0], "apikey=<jwt>&vsn=1.0.0")
        pairs = dict(
            pair.split("=") for pair in query.replace("<jwt>", token(self.realtime, "service_role")).split("&")
        )
        return self.realtime.websocket_url(path=path, **pairs)

    def _with_tokens(self, raw: str) -> str:
        while "<jwt>" in raw:
            kind = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
            raw = raw.replace("<jwt>", token(self.realtime, kind), 1)
        return raw

    def _expect(self, client: RawClient, recorded: str) -> None:
        message = client.parse(recorded)
        told = message["payload"].get("message") if message["event"] == "system" else None
        self._prepare(told or message["event"], recordings.change_in(recorded))
        received = client.expect(message["topic"])
        assert _LOCAL.mask(received) == _RECORDED.mask(recorded)

    def _prepare(self, event: str, change: Change | None) -> None:
        action = self.pending.pop(event, None)
        if action is not None:
            action(self.realtime)
        if change is not None and (change.committed is None or change.committed not in self.done):
            self.done.add(change.committed)
            self._commit(change)
        elif event == "broadcast":
            self._statement()

    def _commit(self, change: Change) -> None:
        """The whole transaction that the event belongs to."""
        if self.transactions in self.scenario.statements:
            self._statement()
            return
        found = (recordings.change_in(line.raw) for line in self.lines if line.direction == "<")
        together = dict.fromkeys(one for one in found if one is not None and one.committed == change.committed)
        with self.connection.transaction():
            for one in together:
                recordings.replay_change(self.connection, one)
        self.transactions += 1

    def _statement(self) -> None:
        self.connection.execute(self.scenario.statements[self.transactions].encode())
        self.transactions += 1
