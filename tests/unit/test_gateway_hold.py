"""What `openclaw agent` answered, whose fault that is, and when claims are held: no I/O."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.inbox.book import BookedWake
from dispatcher.inbox.launcher import ending_by
from dispatcher.openclaw.answer import Kind, read_answer
from dispatcher.openclaw.hold import GatewayHold
from dispatcher.openclaw.state import GatewayState, Status
from tests.support.gateway import said

WAKE = BookedWake(uuid4(), uuid4(), uuid4(), "ada")
WITH_OVERRIDE = BookedWake(uuid4(), uuid4(), uuid4(), "ada", has_override=True)

# Each recording with its exit code, whose fault it is, and words of the cause.
RECORDED: list[tuple[str, int, Kind, str]] = [
    ("agent-ok", 0, "ok", ""),
    ("agent-ok-first", 0, "ok", ""),
    ("agent-ok-background-command-left", 0, "ok", ""),
    ("agent-ok-through-drain", 0, "ok", ""),
    ("agent-behind-resumed-turn", 0, "ok", ""),
    ("agent-gateway-down", 1, "environment", "Gateway not reachable at ws://127.0.0.1:18789 (ECONNREFUSED)"),
    ("agent-gateway-hung", 1, "environment", "(ETIMEDOUT)"),
    ("agent-gateway-draining", 1, "environment", "websocket admission closed"),
    ("agent-gateway-killed", 1, "unknown", "gateway closed (1006"),
    ("agent-queued-too-long", 1, "unknown", "gateway timeout after 35000ms"),
    ("agent-session-work-start-changed", 1, "busy", "SESSION_WORK_START_CHANGED"),
    ("agent-invalid-thinking", 1, "override", "Invalid thinking level"),
    ("agent-unsupported-thinking", 1, "override", 'Thinking level "high" is not supported'),
    ("agent-unknown-provider", 1, "override", "Unknown model: nosuchprov/x"),
    ("agent-timeout-model", 1, "timeout", "Request timed out"),
    ("agent-timeout-exec", 0, "timeout", "Exec failed"),
    ("agent-aborted-by-other", 1, "agent", "timeout, aborted, rpc"),
    ("agent-empty", 1, "agent", "couldn't generate a response"),
    ("agent-no-reply", 1, "agent", "couldn't generate a response"),
    ("agent-unknown-agent", 1, "agent", 'Unknown agent id "nosuch"'),
    ("agent-key-of-other-agent", 1, "agent", "does not match session key"),
    ("agent-provider-400", 1, "agent", "provider rejected"),
    ("agent-provider-401", 1, "agent", "HTTP 401"),
    ("agent-provider-429", 1, "agent", "rate limit"),
    ("agent-provider-500", 1, "agent", "HTTP 500"),
]


@pytest.mark.parametrize(("name", "exit_code", "kind", "words"), RECORDED)
def test_g6_g8_g9_each_recorded_end_is_told_apart_and_says_why(
    name: str, exit_code: int, kind: Kind, words: str
) -> None:
    text = said(name)
    for printed in (text, f"(node:7) a warning\n{text}", text.replace("\n", "\r\n")):
        answer = read_answer(printed.encode(), exit_code)
        assert answer is not None
        assert answer.kind == kind
        assert words in answer.text
        assert "\n" not in answer.text
        assert ("runId" in text) == (answer.run_id is not None)


def test_what_a_turn_quotes_decides_nothing() -> None:
    """An agent's own command that cannot reach something is no outage of the Gateway."""
    text = said("agent-timeout-exec").replace("Exec failed", "Exec failed: ECONNREFUSED, gateway not reachable")
    answer = read_answer(text.encode(), 0)
    assert answer is not None
    assert answer.kind == "timeout"
    answer = read_answer(text.replace('"paused"', '"working"').encode(), 1)
    assert answer is not None
    assert answer.kind == "agent"


@pytest.mark.parametrize(("output", "exit_code"), [(b"", 0), (b"", 1), (b"hello", 0), (b"", None), (b"\xff{", None)])
def test_an_end_without_an_answer_is_judged_by_its_exit_code(output: bytes, exit_code: int | None) -> None:
    assert read_answer(output, exit_code) is None


@pytest.mark.parametrize(
    "output",
    [b"{", b"[]", b"{}", b'{"status": 7}', b'{"error": null}', b'{"result": 1, "status": "error"}', b"{" * 9999],
)
def test_what_is_no_answer_is_the_agents_failure_with_what_it_said(output: bytes) -> None:
    answer = read_answer(b"boom\n" + output, 1)
    assert answer is not None
    assert answer.kind == "agent"
    assert answer.text


def test_g1_a_shell_that_cannot_find_node_is_a_fault_of_the_environment() -> None:
    answer = read_answer(b"/usr/bin/env: 'node': No such file or directory\n", 127)
    assert answer is not None
    assert answer.kind == "environment"


def test_the_ending_is_whose_fault_it_is() -> None:
    def ending(name: str, code: int, wake: BookedWake = WAKE) -> str:
        answer = read_answer(said(name).encode(), code)
        assert answer is not None
        return ending_by(answer, wake)

    assert ending("agent-ok", 0) == "exited"
    assert ending("agent-gateway-down", 1) == "interrupted"
    assert ending("agent-session-work-start-changed", 1) == "interrupted"
    assert ending("agent-timeout-exec", 0) == "timed_out"
    assert ending("agent-unsupported-thinking", 1) == "exited"
    assert ending("agent-unsupported-thinking", 1, WITH_OVERRIDE) == "item_refused"
    assert ending("agent-empty", 1, WITH_OVERRIDE) == "exited"


class Outage:
    """A hold with a clock, a link and an executable of its own, and what it told."""

    def __init__(self) -> None:
        self.at = 100.0
        self.status: Status = "ready"
        self.there = True
        self.causes: list[str | None] = []
        self.over: list[list[UUID]] = []
        self.hold = GatewayHold(
            lambda: GatewayState(self.status, datetime.now(UTC), "why"),
            can_start=lambda: self.there,
            on_cause=self.causes.append,
            on_over=self.over.append,
            now=lambda: self.at,
        )


@pytest.fixture
def outage() -> Outage:
    return Outage()


@pytest.mark.parametrize("status", ["down", "hung", "starting", "draining"])
def test_g1_claims_are_held_while_the_gateway_is_away_and_each_agent_is_news_once(outage: Outage, status: Any) -> None:
    ada, bob = uuid4(), uuid4()
    assert outage.hold.cause is None
    outage.status = status
    assert outage.hold.cause == f"OpenClaw's Gateway is {status}: why"
    assert [outage.hold.keep(who) for who in (ada, bob, ada)] == [True, True, False]
    outage.status = "ready"
    outage.hold.came_back()
    assert [set(held) for held in outage.over] == [{ada, bob}]
    assert outage.hold.cause is None
    assert outage.hold.keep(ada)  # the next outage is another one


@pytest.mark.parametrize("status", ["ready", "connecting", "barred", "unused"])
def test_nothing_is_held_where_the_gateway_may_take_work(outage: Outage, status: Any) -> None:
    outage.status = status
    assert outage.hold.cause is None
    assert outage.over == []


def test_g1_what_wakes_meet_together_counts_once_and_ever_longer_after_that(outage: Outage) -> None:
    outage.status = "barred"
    for rest in (2.0, 4.0, 8.0):
        for _ in range(5):
            outage.hold.met("cannot reach it")
        assert outage.hold.cause == "cannot reach it"
        outage.at += rest - 0.1
        assert outage.hold.cause == "cannot reach it"
        outage.at += 0.2
        assert outage.hold.cause is None
    for _ in range(100):
        outage.hold.met("cannot reach it")
        outage.at += 60.1
        assert outage.hold.cause is None
    outage.hold.reached()
    outage.hold.met("again")
    outage.at += 2.1
    assert outage.hold.cause is None


def test_g1_a_missing_openclaw_holds_until_it_is_there_again(outage: Outage) -> None:
    outage.there = False
    outage.hold.missed("cannot start openclaw: not found")
    outage.at += 3600
    assert outage.hold.cause == "cannot start openclaw: not found"
    outage.there = True
    assert outage.hold.cause is None
    assert outage.causes == ["cannot start openclaw: not found", None]
    outage.hold.missed("its interpreter is missing")  # openclaw itself is there
    assert outage.hold.cause == "its interpreter is missing"
    outage.at += 2.1
    assert outage.hold.cause is None


def test_the_links_return_ends_what_wakes_met(outage: Outage) -> None:
    outage.hold.met("cannot reach it")
    outage.hold.keep(WAKE.agent_id)
    assert 0 < outage.hold.ask_again <= 5
    outage.hold.came_back()
    assert outage.hold.cause is None
    assert outage.over == [[WAKE.agent_id]]
    assert outage.causes == ["cannot reach it", None]
