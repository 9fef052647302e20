"""The link to OpenClaw's Gateway on real sockets, against what the real one was recorded to say."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dispatcher.errors import GatewayError, GatewayRefused, GatewaySilent, GatewayUnavailable
from dispatcher.openclaw.finder import EndpointFinder
from dispatcher.openclaw.gateway import Abort, Gateway, KnownAgent
from dispatcher.openclaw.link import GatewayLink
from dispatcher.openclaw.state import GatewayState, LinkTimings
from tests.support.gateway import (
    TOKEN,
    WORK_START_CHANGED,
    ScriptedGateway,
    error,
    payload,
    scripted_gateway,
)
from tests.support.waiting import wait_until

QUICK = LinkTimings(connect=0.5, look=0.1, patience=0.3, give_up=30, away=0.05, barred=60, notice=0.1)
KEY = "agent:ada:inbox-20261130"


class Linked:
    """A link with its configuration file, its states so far, and a command line that notes what it is asked."""

    def __init__(self, file: Path, gateway: ScriptedGateway, timings: LinkTimings = QUICK) -> None:
        self.file = file
        self.states: list[GatewayState] = []
        self.slow_calls: list[str] = []
        self.configure(gateway.config(auth={"mode": "token", "token": TOKEN}))
        finder = EndpointFinder([file], {})
        self.link = GatewayLink(finder.find, changed=finder.signature, on_state=self.states.append, timings=timings)
        self.gateway = Gateway(self.link, self._slow)

    def _slow(self, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        self.slow_calls.append(method)
        return {"sessions": [{"key": "by command line", "hasActiveRun": True}]}

    def configure(self, config: object) -> None:
        self.file.write_text(json.dumps(config))

    def until(self, status: str) -> None:
        wait_until(lambda: self.link.state.status == status, 10)

    @property
    def statuses(self) -> list[str]:
        return [state.status for state in self.states]


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    with scripted_gateway() as started:
        yield started


@pytest.fixture
def start_link(tmp_path: Path) -> Iterator[Callable[..., Linked]]:
    made: list[Linked] = []

    def start(gateway: ScriptedGateway, timings: LinkTimings = QUICK) -> Linked:
        linked = Linked(tmp_path / f"openclaw-{len(made)}.json", gateway, timings)
        made.append(linked)
        linked.link.start()
        return linked

    yield start
    for linked in made:
        linked.link.request_stop()
        assert linked.link.join(5)
        assert linked.link.error is None


@pytest.fixture
def linked(gateway: ScriptedGateway, start_link: Callable[..., Linked]) -> Linked:
    made = start_link(gateway)
    made.until("ready")
    return made


def test_the_link_knows_the_gateway_and_what_runs_there(gateway: ScriptedGateway, linked: Linked) -> None:
    state = linked.link.state
    assert (state.boot_id, state.version, state.outages) == (gateway.boot_id, "2026.9.6", 0)
    assert linked.gateway.active_sessions() == frozenset()
    gateway.answers["sessions.list"] = payload("running: which sessions have a turn")
    gateway.answers["tasks.list"] = payload("running: tasks of the session")
    gateway.answers["sessions.abort"] = payload("end the running turn")
    gateway.answers["tasks.cancel"] = payload("cancel it")
    gateway.answers["sessions.describe"] = {"session": {"key": KEY, "status": "running"}}
    assert linked.gateway.active_sessions() == frozenset({KEY})
    assert [(task.kind, task.is_live) for task in linked.gateway.tasks(KEY)] == [("cli", True)]
    assert linked.gateway.session_status(KEY) == "running"
    assert linked.gateway.abort(KEY) == Abort("wake-11111111-7d39-4a54-9c1b-0d8a1c5f7e21", "aborted")
    assert linked.gateway.cancel("6aa9", "deadline")
    assert linked.gateway.agents() == [KnownAgent("main", None), KnownAgent("ada", "/srv/ada")]
    assert gateway.asked("tasks.list") == [{"sessionKey": KEY, "status": "running"}]
    assert gateway.asked("tasks.cancel") == [{"taskId": "6aa9", "reason": "deadline"}]
    gateway.answers["sessions.describe"] = {"session": None}
    assert linked.gateway.session_status("agent:ada:nope") is None
    assert linked.slow_calls == []


def test_a_flood_of_events_nobody_asked_for_holds_up_no_answer(gateway: ScriptedGateway, linked: Linked) -> None:
    for number in range(2_000):
        gateway.tell("chat", {"deltaText": "word " * 50, "seq": number})
    assert linked.gateway.active_sessions() == frozenset()
    assert linked.link.state.status == "ready"
    assert gateway.connected == 1


def test_answers_are_matched_when_they_come_out_of_order(gateway: ScriptedGateway, linked: Linked) -> None:
    gateway.answers["sessions.describe"] = lambda params: {"session": {"status": params["key"]}}
    gateway.backwards = "sessions.describe"
    found: dict[str, str | None] = {}
    threads = [
        threading.Thread(target=lambda key=key: found.update({key: linked.gateway.session_status(key)}))
        for key in ("a", "b", "c", "d")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert found == {"a": "a", "b": "b", "c": "c", "d": "d"}


def test_an_answer_nobody_waits_for_any_more_is_dropped(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    linked = start_link(gateway, LinkTimings(look=30))
    linked.until("ready")
    gateway.hang()
    with pytest.raises(GatewaySilent, match="no answer within"):
        linked.link.call("tasks.list", {}, 0.05)
    gateway.go_on()
    linked.until("ready")
    assert linked.gateway.active_sessions() == frozenset()


def test_g1_a_gateway_that_dies_and_comes_back_is_linked_again_by_itself(
    gateway: ScriptedGateway, linked: Linked
) -> None:
    before = linked.link.state.boot_id
    gateway.stop()
    linked.until("down")
    assert "nobody listens" in str(linked.link.state.cause) or "lost" in str(linked.link.state.cause)
    with pytest.raises(GatewayUnavailable):
        linked.gateway.active_sessions()
    with capture_logs() as logs:
        gateway.restart()
        linked.until("ready")
    assert linked.link.state.boot_id not in {None, before}
    assert linked.link.state.outages == 1
    assert [line["restarted"] for line in logs if line["event"] == "gateway.linked"] == [True]
    assert linked.gateway.active_sessions() == frozenset()


def test_an_outage_is_told_once_however_long_it_lasts(gateway: ScriptedGateway, linked: Linked) -> None:
    with capture_logs() as logs:
        gateway.stop()
        linked.until("down")
        gateway.day = "starting"
        gateway.start()
        linked.until("starting")
        gateway.day = "ready"
        linked.until("ready")
    told = [line["event"] for line in logs if line["log_level"] in {"info", "warning", "error"}]
    assert told == ["gateway.lost", "gateway.linked", "gateway.ready"]
    assert linked.link.state.outages == 1


def test_g1_a_gateway_that_starts_is_no_ready_one(gateway: ScriptedGateway, start_link: Callable[..., Linked]) -> None:
    gateway.day = "starting"
    linked = start_link(gateway)
    linked.until("starting")
    assert linked.link.state.cause == "gateway starting; retry shortly"
    assert linked.link.state.is_away
    gateway.day = "ready"
    linked.until("ready")


def test_g1_a_gateway_that_drains_is_noticed_on_the_open_connection(gateway: ScriptedGateway, linked: Linked) -> None:
    gateway.day = "draining"
    linked.until("draining")
    with pytest.raises(GatewayUnavailable, match="gateway restart"):
        linked.gateway.active_sessions()
    assert gateway.connected == 1
    gateway.drop()  # a new one is refused with 503 now
    wait_until(lambda: "admission closed" in str(linked.link.state.cause), 5)
    assert linked.link.state.status == "draining"
    gateway.day = "ready"
    linked.until("ready")


def test_a_suspended_gateway_says_so_itself(gateway: ScriptedGateway, linked: Linked) -> None:
    gateway.tell("gateway.suspension", {"phase": "suspended"})
    linked.until("draining")
    gateway.tell("gateway.suspension", {"phase": "accepting"})
    linked.until("ready")


def test_g3_a_gateway_that_hangs_is_noticed_and_its_late_answer_ends_that(
    gateway: ScriptedGateway, linked: Linked
) -> None:
    gateway.hang()
    linked.until("hung")
    started = time.monotonic()
    with pytest.raises(GatewayUnavailable):  # at once: nobody waits for a time-out
        linked.gateway.active_sessions()
    assert time.monotonic() - started < 0.2
    gateway.go_on()
    linked.until("ready")
    assert gateway.connected == 1


def test_a_hung_gateway_is_connected_to_anew_in_the_end(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    linked = start_link(gateway, LinkTimings(connect=0.2, look=0.05, patience=0.1, give_up=0.1, away=0.05))
    linked.until("ready")
    gateway.hang()
    wait_until(lambda: gateway.connected >= 3, 10)
    assert linked.link.state.status == "hung"
    assert linked.link.state.outages == 1
    gateway.go_on()
    linked.until("ready")


def test_g2_a_call_whose_answer_is_lost_with_the_connection_may_have_been_done(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    linked = start_link(gateway, LinkTimings(look=30, away=0.05))
    linked.until("ready")
    gateway.hang()
    outcome: list[GatewayError] = []

    def abort() -> None:
        try:
            linked.gateway.abort(KEY)
        except GatewayError as error:
            outcome.append(error)

    thread = threading.Thread(target=abort)
    thread.start()
    wait_until(lambda: gateway.asked("sessions.abort"), 5)
    gateway.drop()
    thread.join(10)
    assert isinstance(outcome[0], GatewaySilent)


def test_a_refused_call_is_no_outage(gateway: ScriptedGateway, linked: Linked) -> None:
    gateway.refusals["sessions.abort"] = error("call without the scope")
    with pytest.raises(GatewayRefused, match=r"missing scope") as refused:
        linked.gateway.abort(KEY)
    assert (refused.value.code, refused.value.reason) == ("FORBIDDEN", "MISSING_SCOPE")
    gateway.refusals["sessions.abort"] = WORK_START_CHANGED
    with pytest.raises(GatewayRefused, match="SESSION_WORK_START_CHANGED"):
        linked.gateway.abort(KEY)
    gateway.refusals["sessions.list"] = error("call without the scope")  # our look itself
    time.sleep(0.3)
    assert linked.link.state.status == "ready"


@pytest.mark.parametrize("answer", [{}, {"sessions": None}, {"sessions": 7}])
def test_an_answer_of_another_shape_is_one_refused_call(
    gateway: ScriptedGateway, linked: Linked, answer: dict[str, Any]
) -> None:
    gateway.answers["sessions.list"] = answer
    with pytest.raises(GatewayRefused, match=r"no list of sessions"):
        linked.gateway.active_sessions()
    gateway.answers["sessions.list"] = {"sessions": [None, 7, {}, {"key": KEY, "hasActiveRun": True}]}
    assert linked.gateway.active_sessions() == frozenset({KEY})


def barring(gateway: ScriptedGateway, how: str) -> str:
    """Makes the Gateway bar us; what is to be said."""
    if how == "token":
        gateway.token = "another-token"
        return "refuses our token; check gateway.auth.token"
    if how == "protocol":
        gateway.protocol = 3
        return "does not speak protocol 4"
    gateway.refusals["connect"] = error("client id of our own: connect")
    return "refuses us"


@pytest.mark.parametrize("how", ["token", "protocol", "client"])
def test_a_link_that_is_refused_is_named_once_and_the_command_line_is_asked(
    gateway: ScriptedGateway, start_link: Callable[..., Linked], how: str
) -> None:
    words = barring(gateway, how)
    with capture_logs() as logs:
        linked = start_link(gateway, LinkTimings(barred=0.05, away=0.05))
        linked.until("barred")
        wait_until(lambda: len(gateway.asked("connect")) >= 4, 10)
        gateway.stop()
        linked.until("down")
        gateway.start()
        linked.until("barred")
    told = [line for line in logs if line["event"] == "gateway.barred"]
    assert len(told) == 1
    assert words in told[0]["cause"]
    assert not linked.link.state.is_away
    assert linked.gateway.active_sessions() == frozenset({"by command line"})
    assert linked.slow_calls == ["sessions.list"]
    assert "another-token" not in str(logs)
    assert "kit-token" not in str(logs)


def test_a_corrected_openclaw_json_is_noticed_at_once(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    gateway.token = "the-new-one"
    linked = start_link(gateway)
    linked.until("barred")
    linked.configure(gateway.config(auth={"token": "the-new-one"}))
    linked.until("ready")


def test_a_remote_gateway_is_left_to_the_command_line(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    linked = start_link(gateway)
    linked.until("ready")
    linked.configure({"gateway": {"mode": "remote", "remote": {"url": "wss://gw.example"}}})
    gateway.drop()
    linked.until("barred")
    assert "remote" in str(linked.link.state.cause)
    linked.configure({"agents": {}})
    linked.until("unused")
    linked.configure(gateway.config())
    linked.until("ready")


def test_somebody_else_on_its_port_costs_nothing_but_the_link(
    gateway: ScriptedGateway, start_link: Callable[..., Linked]
) -> None:
    port = gateway.port
    gateway.stop()
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as listener:

        def answer_nonsense() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                client.sendall(b"220 mail.example ESMTP\r\n")
                client.close()

        threading.Thread(target=answer_nonsense, daemon=True).start()
        linked = start_link(gateway)
        linked.until("down")
        assert "handshake failed" in str(linked.link.state.cause)
        listener.shutdown(socket.SHUT_RDWR)


def test_a_listener_that_fails_does_not_end_the_link(gateway: ScriptedGateway, tmp_path: Path) -> None:
    def fail(_state: GatewayState) -> None:
        raise ValueError("no")

    file = tmp_path / "openclaw.json"
    file.write_text(json.dumps(gateway.config()))
    link = GatewayLink(EndpointFinder([file], {}).find, on_state=fail, timings=QUICK)
    link.start()
    wait_until(lambda: link.state.status == "ready", 10)
    gateway.stop()
    wait_until(lambda: link.state.status == "down", 10)
    link.request_stop()
    assert link.join(5)
    assert link.error is None


@pytest.mark.parametrize("day", ["ready", "starting", "draining", "hung", "down"])
def test_it_stops_at_once_on_any_day(gateway: ScriptedGateway, start_link: Callable[..., Linked], day: str) -> None:
    linked = start_link(gateway, LinkTimings(look=0.05, patience=0.1))
    linked.until("ready")
    if day == "hung":
        gateway.hang()
    elif day == "down":
        gateway.stop()
    else:
        gateway.day = day
        gateway.drop()
    linked.until(day)
    started = time.monotonic()
    linked.link.request_stop()
    assert linked.link.join(5)
    assert time.monotonic() - started < 2
    with pytest.raises(GatewayUnavailable):
        linked.link.call("sessions.list")


def test_a_link_that_was_never_started_refuses_calls_and_stops(gateway: ScriptedGateway, tmp_path: Path) -> None:
    linked = Linked(tmp_path / "openclaw.json", gateway)
    with pytest.raises(GatewayUnavailable):
        linked.link.call("sessions.list")
    linked.link.look_now()
    linked.link.request_stop()
    linked.link.start()
    assert linked.link.join(5)


def test_a_stop_ends_a_call_that_cannot_be_sent(gateway: ScriptedGateway, linked: Linked) -> None:
    """A Gateway that hangs reads nothing: what is asked then stays in the way to it."""
    gateway.hang()
    with ThreadPoolExecutor(40) as pool:
        calls = [pool.submit(linked.link.call, "agents.list", {"filler": "x" * 900_000}, 20) for _ in range(40)]
        linked.until("hung")
        linked.link.request_stop()
        problems = [call.exception(10) for call in calls]
    assert [problem for problem in problems if not isinstance(problem, GatewayError)] == []
