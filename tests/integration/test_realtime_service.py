"""The supervised client against a scripted server: one test per way to go deaf."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import realtime

from dispatcher.supabase.network import Network
from dispatcher.supabase.realtime import Hint, RealtimeService, RealtimeState, RealtimeTimings
from dispatcher.supabase.realtime_paths import changes_plan
from tests.support.phoenix import PhoenixServer, entries_of
from tests.support.waiting import wait_until

# The library itself asks websockets for a property that websockets has deprecated.
pytestmark = pytest.mark.filterwarnings(r"ignore:ConnectionClosed\.\w+ is deprecated")

TENANT = "00000000-0000-0000-0000-000000000000"
INSTANCE = "11111111-1111-1111-1111-111111111111"
TOPIC = "gateway:22222222-2222-2222-2222-222222222222"
AGENT = "33333333-3333-3333-3333-333333333333"
PRIVATE = f"realtime:{TOPIC}"
QUICK = RealtimeTimings(
    connect=2.0,
    join=0.4,
    ready=0.6,
    canary=0.3,
    leave=0.2,
    heartbeat=5.0,
    watch=0.02,
    settle=30.0,
    retry=0.05,
    retry_cap=0.3,
    reconnect_cap=0.3,
    refused=0.2,
    overloaded=0.3,
    misconfigured=0.5,
)


class Listener:
    """A running service and everything it said."""

    def __init__(self, server: PhoenixServer, **options: Any) -> None:
        self.hints: list[Hint] = []
        self.ready: list[str] = []
        self.states: list[RealtimeState] = []
        self.alive = 0
        self.on_hint: Callable[[Hint], None] = self.hints.append
        given: dict[str, Any] = {"mode": "broadcast", "timings": QUICK, "key": "KEY-1", **options}
        available = given.pop("broadcast_available", True)
        self.service = RealtimeService(
            url=server.url,
            gateway_topic=given.pop("gateway_topic", lambda: TOPIC),
            tenant_id=TENANT,
            instance_id=INSTANCE,
            on_hint=self._take,
            on_ready=self.ready.append,
            on_state=self.states.append,
            on_alive=self._count,
            **given,
        )
        self.service.broadcast_available = available

    def _take(self, hint: Hint) -> None:
        self.on_hint(hint)  # asked anew each time: a test may replace it

    def _count(self) -> None:
        self.alive += 1

    @property
    def state(self) -> RealtimeState:
        return self.service.state

    def until(self, status: str, path: str | None = None) -> None:
        wait_until(
            lambda: self.state.status == status and path in {None, self.state.path},
            what=f"{status}/{path}; is {self.state}",
        )


@pytest.fixture
def server() -> Iterator[PhoenixServer]:
    scripted = PhoenixServer()
    yield scripted
    scripted.stop()


CHANGES_CHANNELS = len(changes_plan("tenant", "instance", split=False))
Listen = Callable[..., Listener]


@pytest.fixture
def listen(server: PhoenixServer) -> Iterator[Listen]:
    started: list[Listener] = []

    def start(**options: Any) -> Listener:
        listener = Listener(server, **options)
        listener.service.start()
        started.append(listener)
        return listener

    yield start
    for listener in started:
        listener.service.request_stop()
        assert listener.service.join(5)
        assert listener.service.error is None


def insert(server: PhoenixServer, item: str, agent: str = AGENT) -> None:
    server.change("INSERT", "agent_inbox_items", {"id": item, "agent_id": agent, "status": "pending"})


def test_broadcast_brings_hints_of_its_own_gateway(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready", "broadcast")
    server.broadcast("inbox", {"agent_id": AGENT, "item_id": "i1", "item_ids": ["i1", "i2"]})
    server.broadcast("agent", {"agent_id": AGENT})
    server.broadcast("something_new", {"agent_id": AGENT})
    server.broadcast("inbox", {"agent_id": AGENT, "item_id": "i3"})
    wait_until(lambda: len(listener.hints) == 3)
    assert listener.hints == [
        Hint("inbox", AGENT, "i1", "broadcast", ("i1", "i2")),
        Hint("agent", AGENT, None, "broadcast"),
        Hint("inbox", AGENT, "i3", "broadcast", ("i3",)),
    ]
    [join] = server.joins()
    assert join["topic"] == PRIVATE
    assert join["payload"]["config"]["private"] is True
    assert join["payload"]["config"]["broadcast"]["replication_ready"] is True
    assert listener.ready == ["broadcast"]


def test_changes_bring_hints_of_the_tenant(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="postgres_changes")
    listener.until("ready", "postgres_changes")
    wait_until(lambda: len(listener.ready) == CHANGES_CHANNELS)
    insert(server, "i1")
    for status in ("leased", "done", "failed", "pending"):
        server.change("UPDATE", "agent_inbox_items", {"id": status, "agent_id": AGENT, "status": status})
    server.change("UPDATE", "agents", {"id": AGENT, "status": "ready"})
    server.change("UPDATE", "agent_budgets", {"agent_id": AGENT, "status": "ok"})
    wait_until(lambda: len(listener.hints) == 5)
    assert [(hint.kind, hint.agent_id, hint.item_id) for hint in listener.hints] == [
        ("inbox", AGENT, "i1"),
        ("inbox", AGENT, "failed"),
        ("inbox", AGENT, "pending"),
        ("agent", AGENT, None),
        ("budget", AGENT, None),
    ]
    entries = [entry for join in server.joins() for entry in entries_of(join["payload"])]
    assert {entry["filter"] for entry in entries} == {f"tenant_id=eq.{TENANT}", f"id=eq.{INSTANCE}"}


def test_ff01_a_listener_that_raises_costs_no_later_event(
    server: PhoenixServer, listen: Listen, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = listen()
    seen: list[str | None] = []

    def raise_once(hint: Hint) -> None:
        seen.append(hint.item_id)
        if hint.item_id == "1":
            raise RuntimeError("handler")

    listener.on_hint = raise_once
    listener.until("ready")
    for item in ("1", "2", "3"):
        server.broadcast("inbox", {"agent_id": AGENT, "item_id": item})
    wait_until(lambda: seen == ["1", "2", "3"], 1.0)
    assert capsys.readouterr().out.count("A listener of Realtime failed") == 1
    assert (server.connections, listener.service.clients) == (1, 1)


def test_ff03_it_comes_back_after_any_outage(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    server.close()
    listener.until("down", "none")
    wait_until(lambda: listener.service.clients >= 8)  # far more tries than the library's five
    assert "cannot connect" in (listener.state.cause or "")
    server.open()
    listener.until("ready", "broadcast")
    assert listener.ready == ["broadcast", "broadcast"]
    assert listener.state.gaps == 1


def test_ff04_a_socket_whose_heartbeats_go_unanswered_is_replaced(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(timings=RealtimeTimings(**{**QUICK.__dict__, "heartbeat": 0.2}))
    listener.until("ready")
    wait_until(lambda: len(server.events("heartbeat")) >= 3)
    assert server.connections == 1
    server.script.heartbeats = False
    wait_until(lambda: server.connections == 2, 3 * 0.2 + 1.0)
    server.script.heartbeats = True
    listener.until("ready")


@pytest.mark.parametrize("code", [1000, 1001, 1012, None])
def test_ff05_every_kind_of_close_is_a_drop(server: PhoenixServer, listen: Listen, code: int | None) -> None:
    listener = listen(mode="postgres_changes")
    listener.until("ready")
    wait_until(lambda: len(server.joins()) == CHANGES_CHANNELS)  # ready is told by the first of them
    bindings = [entries_of(join["payload"]) for join in server.joins()]
    server.drop(code)
    wait_until(lambda: server.connections == 2, 5.0)
    listener.until("ready")
    wait_until(lambda: len(server.joins()) == 2 * CHANGES_CHANNELS)
    again = [entries_of(join["payload"]) for join in server.joins()[CHANGES_CHANNELS:]]
    assert sorted(again, key=str) == sorted(bindings, key=str)  # in whatever order the channels join
    insert(server, "after")
    wait_until(lambda: [hint.item_id for hint in listener.hints] == ["after"])


def test_ff05_the_client_is_new_enough() -> None:
    assert tuple(map(int, realtime.__version__.split(".")[:3])) >= (2, 34, 1)


def test_ff07_a_rejoin_carries_the_new_key(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(key="KEY-1")
    listener.until("ready")
    listener.service.set_key("KEY-2")
    wait_until(lambda: [f["payload"]["access_token"] for f in server.events("access_token")] == ["KEY-2"])
    server.drop()
    wait_until(lambda: len(server.joins()) == 2)
    assert server.joins()[-1]["payload"]["access_token"] == "KEY-2"
    assert server.sockets[0].apikey == "KEY-2"


def test_ff07_a_refused_token_backs_off_and_is_told_once(
    server: PhoenixServer, listen: Listen, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script.join_error = "InvalidJWTToken: Token has expired 42 seconds ago"
    listener = listen(timings=RealtimeTimings(**{**QUICK.__dict__, "refused": 0.3, "retry_cap": 5.0}))
    listener.until("down")
    wait_until(lambda: len(server.joins()) == 3)
    assert "Token has expired" in (listener.state.cause or "")
    told = [line for line in capsys.readouterr().out.splitlines() if "Token has expired" in line]
    assert len([line for line in told if "error" in line]) == 1
    server.script.join_error = None
    listener.service.set_key("KEY-2")
    listener.until("ready")
    assert server.joins()[-1]["payload"]["access_token"] == "KEY-2"


def test_ff07_a_key_set_during_the_join_reaches_the_channel(server: PhoenixServer, listen: Listen) -> None:
    server.script.confirm_broadcast = False
    server.script.join_reply = False
    listener = listen(timings=RealtimeTimings(**{**QUICK.__dict__, "join": 5.0, "ready": 5.0}))
    [join] = wait_until(server.joins)
    listener.service.set_key("KEY-2")
    server.script.join_reply = True
    wait_until(lambda: server.sockets and listener.alive)
    ref, topic = join["ref"], join["topic"]
    server.send_raw(
        f'{{"topic":"{topic}","event":"phx_reply","ref":"{ref}",'
        '"payload":{"status":"ok","response":{"postgres_changes":[]}}}'
    )
    wait_until(lambda: [f["payload"]["access_token"] for f in server.events("access_token")] == ["KEY-2"])


def test_ff08_ready_means_the_servers_own_word(server: PhoenixServer, listen: Listen) -> None:
    server.script.confirm_broadcast = False
    listener = listen(timings=RealtimeTimings(**{**QUICK.__dict__, "ready": 5.0}))
    wait_until(lambda: server.topics() == [PRIVATE])
    turns = listener.alive
    wait_until(lambda: listener.alive > turns + 5)
    assert (listener.state.status, listener.ready) == ("connecting", [])
    server.confirm(PRIVATE)
    wait_until(lambda: listener.ready == ["broadcast"])
    listener.until("ready", "broadcast")
    server.confirm(PRIVATE)
    wait_until(lambda: listener.ready == ["broadcast", "broadcast"])


def test_ff08_what_is_never_confirmed_is_joined_again(server: PhoenixServer, listen: Listen) -> None:
    server.script.confirm_broadcast = False
    listener = listen()
    listener.until("down")
    assert "not confirmed" in (listener.state.cause or "")
    wait_until(lambda: len(server.joins()) >= 2)
    assert server.connections == 1  # the first cure is a rejoin on the same socket
    wait_until(lambda: server.connections >= 2)  # the second a fresh client
    server.script.confirm_broadcast = True
    listener.until("ready", "broadcast")


def test_ff10_a_repeated_frame_is_just_a_repeated_hint(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    for _ in range(2):
        server.broadcast("inbox", {"agent_id": AGENT, "item_id": "i1"})
    wait_until(lambda: len(listener.hints) == 2)
    assert listener.hints[0] == listener.hints[1]


def test_ff12_big_and_trimmed_frames_become_hints(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="postgres_changes")
    listener.until("ready")
    big = {"id": "big", "agent_id": AGENT, "status": "pending", "summary": "x" * 1_200_000}
    server.change("INSERT", "agent_inbox_items", big)
    server.change("INSERT", "agent_inbox_items", {"id": "short"}, errors=["Error 413: Payload Too Large"])
    server.change("INSERT", "agent_inbox_items", None)
    wait_until(lambda: len(listener.hints) == 3)
    assert [(hint.agent_id, hint.item_id) for hint in listener.hints] == [
        (AGENT, "big"),
        (None, "short"),
        (None, None),
    ]
    assert server.connections == 1


def test_ff14_a_missing_table_silences_only_itself(server: PhoenixServer, listen: Listen) -> None:
    server.script.tables = frozenset({"agent_inbox_items", "agents", "dispatcher_instances"})
    listener = listen(mode="postgres_changes")
    wait_until(lambda: "agent_budgets" in (listener.state.cause or ""))
    listener.until("ready", "postgres_changes")
    insert(server, "i1")
    server.change("UPDATE", "agents", {"id": AGENT})
    wait_until(lambda: {hint.kind for hint in listener.hints} == {"inbox", "agent"})
    server.script.tables = None
    wait_until(lambda: listener.state.cause is None)  # asked again after a while, on a channel of its own
    server.change("UPDATE", "agent_budgets", {"agent_id": AGENT})
    wait_until(lambda: listener.hints[-1].kind == "budget")
    assert server.connections == 1


def test_ff14_a_table_of_items_that_is_not_published_is_a_configuration_error(
    server: PhoenixServer, listen: Listen
) -> None:
    server.script.tables = frozenset()
    listener = listen(mode="postgres_changes")
    listener.until("down")
    wait_until(lambda: "Unable to subscribe" in (listener.state.cause or ""))
    server.script.tables = None
    listener.until("ready", "postgres_changes")


def test_ff14_rows_the_key_may_not_read_are_noticed(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="postgres_changes")
    listener.until("ready")
    wait_until(lambda: len(listener.ready) == CHANGES_CHANNELS)
    denied = {"errors": ["Error 401: Unauthorized"], "commit_timestamp": None}
    server.change("INSERT", "agent_inbox_items", {}, **denied)
    wait_until(lambda: listener.service.alarms == 1)
    wait_until(
        lambda: len(listener.ready) == CHANGES_CHANNELS + 1
    )  # a frame that cannot be read is followed by a sweep
    wait_until(lambda: "may not read" in (listener.state.cause or ""))


def test_ff15_the_environments_proxy_is_not_used(
    server: PhoenixServer, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "WS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    listener = listen()
    listener.until("ready")


def test_ff15_a_proxy_that_refuses_is_named_by_its_setting(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(network=Network(proxy="http://127.0.0.1:9", proxy_setting="REALTIME_PROXY"))
    listener.until("down")
    assert "REALTIME_PROXY" in (listener.state.cause or "")


def test_a_canary_that_comes_back_is_quiet(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    for nonce in ("n1", "n2", "n3"):
        server.broadcast("canary", {"instance_id": INSTANCE, "nonce": nonce})
        listener.service.expect_canary(nonce)
    server.broadcast("canary", {"instance_id": "another", "nonce": "n9"})
    turns = listener.alive
    wait_until(lambda: listener.alive > turns + 3 * QUICK.canary / QUICK.watch)
    assert (len(server.joins()), listener.state.gaps, listener.hints) == (1, 0, [])


def test_a_missing_canary_is_deafness_cured_by_a_rejoin_on_the_same_socket(
    server: PhoenixServer, listen: Listen
) -> None:
    listener = listen()
    listener.until("ready")
    listener.service.expect_canary("n1")
    wait_until(lambda: len(server.joins()) == 2)
    assert server.connections == 1
    assert any(state.status == "deaf" and "heartbeat" in (state.cause or "") for state in listener.states)
    wait_until(lambda: len(listener.ready) == 2)
    assert listener.state.status == "deaf"  # joined, but not proven yet
    listener.service.expect_canary("n2")
    server.broadcast("canary", {"instance_id": INSTANCE, "nonce": "n2"})
    listener.until("ready")
    assert listener.state.gaps == 1


def test_a_heartbeat_that_began_before_the_path_was_ready_is_no_canary_of_it(
    server: PhoenixServer, listen: Listen
) -> None:
    """Its frame may have been sent a moment before the join: a path that has just begun would be deaf at once."""
    asked_at = time.monotonic()
    listener = listen()
    listener.until("ready")
    listener.service.expect_canary("n1", asked_at)
    time.sleep(QUICK.canary + 0.5)
    assert (len(server.joins()), listener.state.status) == (1, "ready")


def test_a_path_that_stays_deaf_gets_a_fresh_client(server: PhoenixServer, listen: Listen) -> None:
    """A rejoin on the same socket comes first; the fresh client, whose canaries come back, is well again."""
    listener = listen()
    sent = 0

    def beat(*, echo: bool) -> None:
        nonlocal sent
        sent += 1
        listener.service.expect_canary(f"n{sent}")
        if echo:
            server.broadcast("canary", {"instance_id": INSTANCE, "nonce": f"n{sent}"})

    def deaf_until(condition: Callable[[], bool]) -> None:
        wait_until(lambda: beat(echo=False) or condition(), poll=0.05)

    def well() -> bool:
        beat(echo=True)
        return listener.state.status == "ready"

    listener.until("ready")
    deaf_until(lambda: len(server.joins()) == 2)
    assert server.connections == 1
    deaf_until(lambda: server.connections == 2)
    assert any(state.status == "deaf" for state in listener.states)
    wait_until(well, poll=0.05)
    joined = len(server.joins())
    turns = listener.alive
    wait_until(lambda: well() and listener.alive > turns + 3 * QUICK.canary / QUICK.watch, poll=0.05)
    assert (server.connections, len(server.joins())) == (2, joined)


def test_a_canary_by_our_own_row(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="postgres_changes")
    listener.until("ready")
    server.change("UPDATE", "dispatcher_instances", {"id": INSTANCE})
    listener.service.expect_canary("n1")
    turns = listener.alive
    wait_until(lambda: listener.alive > turns + 2 * QUICK.canary / QUICK.watch)
    assert len(server.joins()) == CHANGES_CHANNELS
    listener.service.expect_canary("n2")
    wait_until(lambda: len(server.joins()) == 2 * CHANGES_CHANNELS)


def test_an_announced_heartbeat_that_failed_is_no_deafness(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    listener.service.expect_canary("n1")
    listener.service.forget_canary("n1")
    turns = listener.alive
    wait_until(lambda: listener.alive > turns + 2 * QUICK.canary / QUICK.watch)
    assert len(server.joins()) == 1


def test_auto_without_broadcast_in_the_database_uses_changes(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="auto", broadcast_available=False)
    listener.until("ready", "postgres_changes")
    assert server.topics(private=True) == []
    server.script.confirm_broadcast = False
    listener.service.broadcast_available = True
    wait_until(lambda: PRIVATE in server.topics())
    assert (listener.state.status, listener.state.path) == ("ready", "postgres_changes")  # kept until it is relieved
    server.confirm(PRIVATE)
    listener.until("ready", "broadcast")
    wait_until(lambda: server.topics() == [PRIVATE])


def test_auto_falls_back_when_broadcast_is_not_confirmed_and_returns(server: PhoenixServer, listen: Listen) -> None:
    server.script.confirm_broadcast = False
    listener = listen(mode="auto")
    listener.until("ready", "postgres_changes")
    assert "broadcast: not confirmed" in (listener.state.cause or "")
    joins = len(server.joins(PRIVATE))
    wait_until(lambda: len(server.joins(PRIVATE)) > joins + 2)
    assert server.connections == 1  # the stand-in is well: its socket is left alone
    server.script.confirm_broadcast = True
    listener.until("ready", "broadcast")
    wait_until(lambda: server.topics() == [PRIVATE])


def test_auto_joins_changes_beside_a_deaf_broadcast(server: PhoenixServer, listen: Listen) -> None:
    listener = listen(mode="auto")
    listener.until("ready", "broadcast")
    listener.service.expect_canary("n1")
    listener.until("ready", "both")
    insert(server, "i1")
    wait_until(lambda: [hint.path for hint in listener.hints] == ["postgres_changes"])
    server.broadcast("canary", {"instance_id": INSTANCE, "nonce": "n2"})
    listener.until("ready", "broadcast")
    wait_until(lambda: server.topics() == [PRIVATE])
    assert "broadcast" not in (listener.state.cause or "")


def test_a_phx_close_of_an_earlier_join_is_ignored(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    server.send("phx_close", {}, ref="0")
    server.broadcast("inbox", {"agent_id": AGENT, "item_id": "i1"})
    wait_until(lambda: listener.hints)
    assert len(server.joins()) == 1


@pytest.mark.parametrize(("event", "payload"), [("phx_close", {}), ("phx_error", {"reason": "channel_crash"})])
def test_a_channel_closed_by_the_server_is_joined_again(
    server: PhoenixServer, listen: Listen, event: str, payload: dict[str, str]
) -> None:
    listener = listen()
    listener.until("ready")
    server.send(event, payload, ref=server.joins()[-1]["ref"])
    wait_until(lambda: len(server.joins()) == 2)
    listener.until("ready")
    assert server.connections == 1


def test_a_token_that_expires_on_a_live_channel_is_a_rejoin(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    words = "Token has expired 0 seconds ago"
    server.send("system", {"message": words, "status": "error", "extension": "system", "channel": TOPIC})
    wait_until(lambda: len(server.joins()) == 2)
    listener.until("ready")


def test_an_unanswered_join_ends_in_a_fresh_client(server: PhoenixServer, listen: Listen) -> None:
    server.script.join_reply = False
    listener = listen()
    wait_until(lambda: server.connections >= 2)
    server.script.join_reply = True
    listener.until("ready")


def test_a_leave_that_goes_unanswered_holds_nothing_up(server: PhoenixServer, listen: Listen) -> None:
    server.script.leaves = False
    listener = listen()
    listener.until("ready")
    listener.service.expect_canary("n1")
    wait_until(lambda: len(server.joins()) == 2)
    wait_until(lambda: len(listener.ready) == 2)


def test_a_refused_connection_names_the_key_setting(server: PhoenixServer, listen: Listen) -> None:
    server.script.refuse_connect = 401
    listener = listen(key="KEY-1")
    listener.until("down", "none")
    assert "Token has expired (HTTP 401); check SUPABASE_SERVICE_ROLE_KEY" in (listener.state.cause or "")
    assert "KEY-1" not in (listener.state.cause or "")
    server.script.refuse_connect = None
    listener.until("ready")


def test_a_gateway_that_is_not_known_yet_is_waited_for(server: PhoenixServer, listen: Listen) -> None:
    topics: list[str] = []
    listener = listen(gateway_topic=lambda: topics[-1] if topics else None)
    wait_until(lambda: "not known" in (listener.state.cause or ""))
    topics.append(TOPIC)
    listener.until("ready")
    topics.append("gateway:moved")
    wait_until(lambda: server.topics() == ["realtime:gateway:moved"])
    listener.until("ready")


def test_ff69_neither_rows_nor_the_key_reach_the_log(
    server: PhoenixServer, listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        listener = listen(key="KEY-123")
        listener.until("ready")
        server.send_raw('{"topic":"x","event":"wat","secret_row":"ROW-9"}')
        wait_until(lambda: listener.service.alarms == 1)
        wait_until(lambda: "Unrecognized message format" in caplog.text)
    assert "ROW-9" not in caplog.text
    assert "KEY-123" not in caplog.text


def test_ff71_the_turning_of_the_loop_can_be_watched(server: PhoenixServer, listen: Listen) -> None:
    listener = listen()
    listener.until("ready")
    turns = listener.alive
    wait_until(lambda: listener.alive > turns)
    server.close()
    turns = listener.alive
    wait_until(lambda: listener.alive > turns)  # also while there is no server


def test_it_stops_at_once_in_every_state(server: PhoenixServer) -> None:
    def stop(listener: Listener) -> None:
        listener.service.request_stop()
        assert listener.service.join(3)
        assert listener.service.error is None

    early = Listener(server)
    early.service.request_stop()
    early.service.start()
    stop(early)
    ready = Listener(server)
    ready.service.start()
    ready.until("ready")
    stop(ready)
    server.close()
    lost = Listener(server)
    lost.service.start()
    lost.until("down")
    stop(lost)
    assert "realtime" not in {thread.name for thread in threading.enumerate()}
