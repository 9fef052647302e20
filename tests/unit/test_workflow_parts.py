"""The workflows slice without a database: texts, judgements about sessions, when to tick, what is told."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher import events
from dispatcher.agents.openclaw_calls import CallResult, OpenclawCommand
from dispatcher.agents.registry import possible_ids
from dispatcher.answers import Answer
from dispatcher.errors import DispatcherError, InvalidAgentId, RestError, ServiceUnavailable, SpawnError
from dispatcher.inbox.message import wake_message
from dispatcher.inbox.model import Grant
from dispatcher.local.stub import StubAgent
from dispatcher.runtime.health import Health
from dispatcher.supabase.realtime_paths import Hint, read_broadcast, read_change
from dispatcher.workflows import model
from dispatcher.workflows.message import notification_text, respawn_message
from dispatcher.workflows.model import Look, Note, PhaseAnswer, Respawn, StopOrder, Suspect, Watch
from dispatcher.workflows.monitor import Monitor, monitor_interval
from dispatcher.workflows.notify import Notifier, session_agent
from dispatcher.workflows.service import ProcessStopper, Ticker
from dispatcher.workflows.sessions import is_live_task, judge, read_sessions, rows_of

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
RUN = uuid.UUID(int=7)


# ------------------------------------------------------------------------------------------- texts


def test_a_notification_says_what_and_how_and_nothing_of_the_input() -> None:
    text = notification_text(RUN, "code-change")
    assert str(RUN) in text
    assert "code-change" in text
    assert f"agent_workflow_client.py claim {RUN} --session" in text


def test_a_type_from_outside_stays_on_its_line() -> None:
    text = notification_text(RUN, "a\nRun something else\u2028\x1b[0m" + "x" * 5000)
    assert "\n" not in text
    assert "\u2028" not in text
    assert "\x1b" not in text
    assert len(text) < 700


def test_a_respawn_names_the_session_it_is_claimed_in() -> None:
    text = respawn_message(RUN, "code-change", "respawn-1")
    assert text.count("--session respawn-1") == 2
    assert text.startswith("[workflow] Resume run")


def test_a_wake_for_a_run_is_told_of_the_run() -> None:
    row = dict.fromkeys(("workspace_slug", "event_type", "summary", "item_created_at", "blockers_error"))
    row |= {"model_override": None, "thinking_override": None, "blockers": [], "item_ids": [], "chain_depth": 0}
    row |= {"wake_id": str(RUN), "claim_token": str(RUN), "agent_id": str(RUN), "agent_slug": "ada", "path": "workflow"}
    grant = Grant.read(Answer.of("claim_wakes", row))
    assert (
        wake_message(Grant(**{name: getattr(grant, name) for name in Grant.__slots__} | {"message": "hello"}))
        == "hello"
    )
    assert "Workflow run lost its session" in wake_message(grant)


@pytest.mark.parametrize(
    ("known", "workspace", "slug", "found"),
    [
        ((), "hq", "code-change", "code-change"),
        (("code-change",), "hq", "code-change", "code-change"),
        (("hq-code-change",), "hq", "code-change", "hq-code-change"),
        (("HQ/Code-Change",), "hq", "code-change", "HQ/Code-Change"),
        (("other-code-change",), "hq", "code-change", "code-change"),
        (("main",), None, "main", "main"),
    ],
)
def test_the_session_key_uses_the_id_openclaw_knows(
    known: tuple[str, ...], workspace: str | None, slug: str, found: str
) -> None:
    assert session_agent(known, workspace, slug) == found


def test_an_agent_that_openclaw_would_take_for_main_is_not_told() -> None:
    with pytest.raises(InvalidAgentId):
        session_agent((), None, "!!!")


# ------------------------------------------------------------------------------------------- sessions


def suspect(session: str | None = "s1", agent: str = "coder") -> Suspect:
    return Suspect(RUN, RUN, "code-change", agent, "hq", session, 1, 400.0)


def listed(age_seconds: float | None, key: str = "agent:coder:s1", **more: object) -> dict[str, Any]:
    age = {} if age_seconds is None else {"ageMs": age_seconds * 1000}
    return {"key": key, "agentId": key.split(":")[1], **age, **more}


@pytest.mark.parametrize(
    ("rows", "judgement"),
    [
        ([], "gone"),
        ([listed(30)], "alive"),
        ([listed(359)], "alive"),
        ([listed(361)], "gone"),
        # another session of the agent is active, its own is listed and silent
        ([listed(500), listed(5, "agent:coder:other")], "gone"),
        # agents name sessions as they like: any recent activity counts
        ([listed(5, "agent:coder:main")], "alive"),
        ([listed(500, "agent:coder:main")], "gone"),
        ([listed(5, "agent:ada:s1")], "gone"),
        ([listed(None)], "unknown"),
        ([listed(None, updatedAt=(NOW - timedelta(seconds=9)).timestamp() * 1000)], "alive"),
        ([listed(None, updatedAt="2026-11-30T11:59:00Z")], "alive"),
        ([listed(None, updatedAt="2026-11-30T11:00:00")], "gone"),
        ([listed(5, "agent:CODER:main", sessionId="s1")], "alive"),
        # as OpenClaw lists an agent of a workspace
        ([listed(5, "agent:hq-coder:main", sessionId="s1")], "alive"),
        ([listed(500, "agent:hq-coder:main", sessionId="s1")], "gone"),
        ([listed(500, status="running")], "alive"),
        ([listed(500, status="done")], "gone"),
    ],
)
def test_what_openclaw_says_of_a_silent_run(rows: list[dict[str, Any]], judgement: str) -> None:
    for document in (rows, {"sessions": rows}, {"sessions": {"x": 1}, "recent": rows}):
        assert judgement_of(document) == judgement


YEAR_MS = 365 * 86_400_000


@pytest.mark.parametrize("key", ["agent:coder:s1", "agent:coder:main"])
@pytest.mark.parametrize(
    "said",
    [
        {"updatedAt": NOW.timestamp() * 1000 + YEAR_MS},
        {"updatedAt": "9999-12-31T23:59:59Z"},
        {"updatedAt": "0001-01-01T00:00:00+14:00"},
        {"updatedAt": 0},
        {"updatedAt": float("inf")},
        {"updatedAt": 10**400},
        {"ageMs": float("nan")},
        {"ageMs": float("inf")},
        {"ageMs": -YEAR_MS},
    ],
    ids=str,
)
def test_s17_a_time_nobody_can_believe_is_no_age(said: dict[str, Any], key: str) -> None:
    """Neither active now, which would keep a dead session for good, nor silent for years, which ends a live one."""
    [row] = read_sessions([listed(None, key, **said)], NOW)
    assert row.age is None
    assert judgement_of([listed(None, key, **said)]) == "unknown"


def test_s17_another_time_of_the_session_may_still_be_believed() -> None:
    [row] = read_sessions([{"key": "agent:coder:s1", "ageMs": float("nan"), "updatedAt": NOW.timestamp() * 1000}], NOW)
    assert row.age == 0
    ahead = (NOW + timedelta(seconds=200)).timestamp() * 1000  # clocks differ
    assert judgement_of([listed(None, updatedAt=ahead)]) == "alive"


def judgement_of(document: Any) -> str:
    ids = possible_ids(["hq/coder"], "hq", "coder")
    return judge(suspect(), rows_of(suspect(), read_sessions(document, NOW), ids), 360)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["key", "agentId", "ageMs", "updatedAt", "sessions", "sessionId"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(json_values)
def test_no_answer_is_too_odd_to_read(document: Any) -> None:
    assert judgement_of(document) in ("gone", "alive", "unknown")
    assert is_live_task(document) in (True, False)


@pytest.mark.parametrize(
    ("document", "live"),
    [
        ({"status": "running"}, True),
        ({"task": {"status": "queued"}}, True),
        ({"status": "succeeded"}, False),
        (None, False),
        ([], False),
        ({"task": 3}, False),
    ],
)
def test_a_task(document: object, live: bool) -> None:
    assert is_live_task(document) is live


# ------------------------------------------------------------------------------------------- the tick


NOTHING: dict[str, Any] = {}


class Script:
    """A store whose ticks go as told: `ticks` maps phases to the passes of each, one mapping per tick.

    A pass that is an exception is raised; `next_in` of a mapping is what the tick ends with.
    """

    def __init__(self, *ticks: Mapping[str, Any] | Exception, stops: Any = ()) -> None:
        self.plan = list(ticks)
        self.stops = list(stops)
        self.calls: list[str] = []
        self.noted: list[Mapping[str, object]] = []
        self._passes: dict[str, list[Any]] = {}
        self._next_in: float | None = None

    def look_at_runs(self) -> Look:
        said = self.plan.pop(0) if len(self.plan) > 1 else self.plan[0]
        if isinstance(said, Exception):
            raise said
        self._next_in = said.get("next_in")
        self._passes = {phase: list(passes) for phase, passes in said.items() if phase != "next_in"}
        return Look.read(Answer.of("look", {"due": list(self._passes), "stop_wakes": self.stops}))

    def run_phase(self, phase: str) -> PhaseAnswer:
        self.calls.append(phase)
        passes = self._passes.get(phase) or [NOTHING]
        said = passes.pop(0) if len(passes) > 1 else passes[0]
        if isinstance(said, Exception):
            raise said
        plain = {"phase": phase, "busy": False, "again": False, "errors": []}
        return PhaseAnswer.read(Answer.of("dispatch_workflows", plain | said))

    def note_tick(self, facts: Mapping[str, object]) -> Note:
        self.noted.append(facts)
        return Note.read(Answer.of("note", {"next_in": self._next_in, "stop_wakes": []}))


class Log:
    """Stands in for a module's logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, Mapping[str, Any]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return lambda event, **facts: self.lines.append((level, event, facts))

    def of(self, event: str) -> list[Mapping[str, Any]]:
        return [facts for _, name, facts in self.lines if name == event]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    kept = Log()
    for module in ("service", "notify", "monitor"):
        monkeypatch.setattr(f"dispatcher.workflows.{module}.log", kept)
    return kept


def ticker(script: Any, **more: Any) -> tuple[Ticker, Health, list[str]]:
    health, woken = Health(), list[str]()
    made = Ticker(
        script,
        interval=30,
        stopper=more.pop("stopper", ProcessStopper(lambda _wake, _cause: True)),
        health=health,
        on_dispatched=lambda: woken.append("notify"),
        is_stopping=more.pop("is_stopping", lambda: False),
        draw=lambda: 0.5,
        clock=more.pop("clock", lambda: 0.0),
    )
    return made, health, woken


def causes(health: Health) -> set[str]:
    return {str(cause) for cause in health.snapshot()["causes"]}


def test_it_goes_on_while_there_is_more(log: Log) -> None:
    script = Script({"dispatched": [{"dispatched": 10, "again": True}, {"dispatched": 3}]}, NOTHING)
    made, _, woken = ticker(script)
    made.beat()
    assert (script.calls, woken, made.next_interval()) == (["dispatched"] * 2, ["notify", "notify"], 30)
    assert script.noted[0]["dispatched"] == 13


def test_c03_every_round_gives_each_phase_a_pass(log: Log) -> None:
    """A hard stop with much to do does not keep other runs from going out."""
    stops = [{"stopped": 500, "again": True}] * 2 + [{"stopped": 7}]
    script = Script({"stopped": stops, "dispatched": [NOTHING]})
    made, *_ = ticker(script)
    made.beat()
    assert script.calls == ["stopped", "dispatched"] * 3
    assert script.noted[0]["budget_enforcement"] == {"held": 0, "stopped": 1007, "warned": 0}


def test_c03_a_phase_that_fails_costs_itself_alone(log: Log) -> None:
    script = Script({"stopped": [RestError("too slow", code="57014")], "timed_out": [{"timed_out": 1}]}, NOTHING)
    made, health, _ = ticker(script)
    made.beat()
    assert script.noted[0]["timed_out"] == 1
    assert any("stopped" in cause for cause in causes(health))
    assert [line["phase"] for line in log.of(events.WORKFLOW_STEP_FAILED)] == ["stopped"]
    made.beat()
    assert causes(health) == set()


def test_an_outage_ends_the_beat(log: Log) -> None:
    away = ServiceUnavailable("away")
    script = Script({"stopped": [away], "dispatched": [away], "timed_out": [NOTHING]})
    made, *_ = ticker(script)
    with pytest.raises(ServiceUnavailable):
        made.beat()
    assert script.calls == ["stopped", "dispatched"]


def test_a_stop_ends_the_rounds_and_an_endless_queue_cannot_hold_the_loop(log: Log) -> None:
    endless = {"dispatched": [{"dispatched": 10, "again": True}]}
    script = Script(endless)
    made, *_ = ticker(script, is_stopping=lambda: len(script.calls) >= 1)
    made.beat()
    assert script.calls == ["dispatched"]
    script = Script(endless)
    made, *_ = ticker(script, clock=lambda: 0.3 * len(script.calls))
    made.beat()
    assert len(script.calls) == 4
    assert made.next_interval() < 0.1


@pytest.mark.parametrize(
    ("said", "interval"),
    [
        (NOTHING, 30),
        ({"next_in": 5.0}, 5.05),
        ({"next_in": 500.0}, 30),
        ({"next_in": "Infinity"}, 30),
        ({"timed_out": [{"timed_out": 1}], "next_in": -3.0}, 0.05),
        ({"dispatched": [{"busy": True}]}, 0.25),
    ],
)
def test_when_the_next_tick_is_due(log: Log, said: dict[str, Any], interval: float) -> None:
    made, *_ = ticker(Script(said))
    made.beat()
    assert made.next_interval() == pytest.approx(interval)


@pytest.mark.parametrize("stuck", [{"next_in": -60.0}, {"dispatched": [{"locked": 1}]}])
def test_what_is_due_and_cannot_be_moved_is_looked_at_less_and_less(log: Log, stuck: dict[str, Any]) -> None:
    """A row that is locked, or raises, must not make every daemon tick without a pause."""
    moved = {"timed_out": [{"timed_out": 1}], "next_in": -60.0}
    made, *_ = ticker(Script(*[stuck] * 8, moved, stuck))
    delays = []
    for _ in range(10):
        made.beat()
        delays.append(made.next_interval())
    assert 0.5 < delays[0] < 1.5
    assert delays[:6] == sorted(delays[:6])
    assert 20 < delays[7] <= 30
    assert delays[8] == pytest.approx(0.05)
    assert delays[9] < 1.5


def test_after_failures_it_comes_back_sooner_than_the_poll_and_later_each_time(log: Log) -> None:
    made, *_ = ticker(Script(ServiceUnavailable("away")))
    delays = []
    for _ in range(4):
        with pytest.raises(ServiceUnavailable):
            made.beat()
        delays.append(made.next_interval())
    assert delays[0] < 2
    assert delays == sorted(delays)
    assert max(delays) <= 30


def test_budgets_that_fail_open_degrade_health_and_are_told_once(log: Log) -> None:
    script = Script({"dispatched": [{"budget_error": "no table", "budgets_open": True}]})
    made, health, _ = ticker(script)
    for _ in range(3):
        made.beat()
    assert len(log.of(events.BUDGETS_FAILED_OPEN)) == 1
    assert log.of(events.WORKFLOW_STEP_FAILED) == []
    assert health.snapshot()["status"] == "degraded"
    script.plan = [NOTHING]
    made.beat()
    assert health.snapshot()["status"] == "ok"
    assert len(log.of(events.BUDGETS_BACK)) == 1


def test_budgets_that_hold_and_cannot_be_written_down_are_not_said_to_be_open(log: Log) -> None:
    made, health, _ = ticker(Script({"dispatched": [{"budget_error": "no events", "budgets_open": False}]}))
    made.beat()
    [line] = log.of(events.BUDGETS_UNENFORCED)
    assert "hold runs back" in line["msg"]
    assert health.snapshot()["status"] == "degraded"
    assert log.of(events.BUDGETS_FAILED_OPEN) == []


def test_ff62_a_bad_run_is_named_once_for_as_long_as_it_is_bad(log: Log) -> None:
    fault = {"phase": "dispatched", "run_id": str(RUN), "error": "boom", "error_code": "P0001"}
    bad = {"dispatched": [{"errors": [fault]}]}
    made, *_ = ticker(Script(bad, bad, NOTHING, bad, NOTHING))
    for _ in range(5):
        made.beat()
    assert [facts["run_id"] for facts in log.of(events.WORKFLOW_STEP_FAILED)] == [str(RUN)] * 2


def test_processes_are_stopped_also_when_another_pass_is_under_way(log: Log) -> None:
    stopped: list[str] = []
    stopper = ProcessStopper(lambda wake, _cause: len(stopped) < 2 and not stopped.append(wake))
    order = {"wake_id": str(RUN), "cause": "run x is cancelled"}
    made, *_ = ticker(Script({"dispatched": [{"busy": True}]}, stops=[order]), stopper=stopper)
    made.beat(), made.beat(), made.beat()
    assert stopped == [str(RUN)] * 2  # it takes its time to end, and the order stands until it has
    assert len(log.of(events.WORKFLOW_PROCESS_STOPPED)) == 1


# ------------------------------------------------------------------------------------------- notify


def note(number: int = 1, agent: str = "coder") -> dict[str, Any]:
    some = str(uuid.UUID(int=number))
    return {
        "id": some, "claim_token": some, "run_id": some, "attempt": 1, "tries": 1, "agent_id": agent,
        "workflow_type": "code-change", "workspace_slug": "hq",
    }  # fmt: skip


class Outbox:
    """Batches to hand out, deliveries that came back."""

    def __init__(self, *batches: list[dict[str, Any]], next_in: float | None = None) -> None:
        self.batches, self.next_in = list(batches), next_in
        self.finished: list[dict[str, Any]] = []

    def claim_notifications(self, limit: int, lease_seconds: int, known: Any) -> Any:
        assert limit == 4
        assert lease_seconds > 30
        rows = self.batches.pop(0) if self.batches else []
        return model.Outbox.read(Answer.of("claim", {"notifications": rows, "next_in": self.next_in}))

    def finish_notifications(self, deliveries: Any) -> None:
        self.finished += [delivery.as_json() for delivery in deliveries]


class Calls:
    """An `openclaw` that answers as told, several at once."""

    def __init__(
        self, result: CallResult | Exception | None = None, document: object = None, task: object = None
    ) -> None:
        self.result = result or CallResult(0, b"")
        self.document = document
        self.task = task
        self.asked: list[tuple[str, ...]] = []
        self.events: list[tuple[str, str]] = []
        self.barrier: threading.Barrier | None = None

    def system_event(self, agent_id: str, text: str, _marker: str) -> CallResult:
        if self.barrier is not None:
            self.barrier.wait(5)
        self.events.append((agent_id, text))
        return self._answer()

    def ask(self, *arguments: str, marker: str) -> tuple[CallResult, object]:
        self.asked.append(arguments)
        return self._answer(), self.task if arguments[0] == "tasks" else self.document

    def _answer(self) -> CallResult:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def notifier(outbox: Any, calls: Any) -> Notifier:
    return Notifier(outbox, calls, lambda: ("coder",), interval=30, is_stopping=lambda: False)


def test_deliveries_run_side_by_side_and_are_reported(log: Log) -> None:
    outbox, calls = Outbox([note(1), note(2), note(3)], next_in=12.0), Calls()
    calls.barrier = threading.Barrier(3)
    made = notifier(outbox, calls)
    made.beat()
    assert [result["sent"] for result in outbox.finished] == [True] * 3
    assert {agent for agent, _ in calls.events} == {"coder"}
    assert made.next_interval() == 12


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (CallResult(1, b"Gateway\nis away"), "exit code 1: Gateway is away"),
        (CallResult(None, b"", "no end within 30 s"), "no end within 30 s"),
        (SpawnError("cannot start openclaw: not found"), "not found"),
    ],
)
def test_a_failure_is_reported_with_its_cause(log: Log, result: Any, words: str) -> None:
    outbox = Outbox([note()])
    notifier(outbox, Calls(result)).beat()
    assert outbox.finished[0]["sent"] is False
    assert words in outbox.finished[0]["error"]
    assert len(log.of(events.WORKFLOW_NOTIFY_FAILED)) == 1


def test_one_agent_that_cannot_be_told_keeps_nobody_else_from_it(log: Log) -> None:
    outbox = Outbox([note(1, "!!!"), note(2)])
    notifier(outbox, Calls()).beat()
    assert [result["sent"] for result in outbox.finished] == [False, True]


# ------------------------------------------------------------------------------------------- monitor


class Watched:
    def __init__(self, *suspects: Suspect, stops: tuple[StopOrder, ...] = ()) -> None:
        self.found = Watch(suspects, stops, 360.0)

    def watch(self) -> Watch:
        return self.found


def monitor(
    store: Any, calls: Any, claim: Callable[[Suspect], Any], launched: list[Any], *, is_stopping: bool = False
) -> Monitor:
    stopper = ProcessStopper(lambda _wake, _cause: True)
    return Monitor(
        store,
        calls,
        stopper,
        claim,
        lambda answer, message: launched.append(message),
        known_agents=lambda: ["hq/coder"],
        is_stopping=lambda: is_stopping,
        now=lambda: NOW,
    )


def granted(_suspect: Suspect) -> Respawn:
    fields = {"granted": True, "wake_id": str(uuid.uuid4()), "run": {"session_id": "respawn-w"}}
    return Respawn.read(Answer.of("respawn_workflow_run", fields))


def test_an_orphan_is_respawned_after_both_questions(log: Log) -> None:
    launched: list[str] = []
    calls = Calls(document={"sessions": []})
    monitor(Watched(suspect()), calls, granted, launched).beat()
    assert [question[0] for question in calls.asked] == ["sessions", "tasks"]
    assert "respawn-w" in launched[0]
    assert log.of(events.WORKFLOW_RESPAWNED)[0]["run_id"] == str(RUN)


def test_without_suspects_openclaw_is_not_asked(log: Log) -> None:
    calls = Calls()
    monitor(Watched(), calls, granted, []).beat()
    assert calls.asked == []


def test_a_stop_in_mid_beat_spends_no_respawn(log: Log) -> None:
    launched: list[str] = []
    monitor(Watched(suspect()), Calls(document=[]), granted, launched, is_stopping=True).beat()
    assert launched == []


def test_a_question_about_tasks_that_was_cut_short_is_no_answer(log: Log) -> None:
    """The sessions say gone; whether a task lives could not be told in time."""

    class CutShort(Calls):
        def ask(self, *arguments: str, marker: str) -> tuple[CallResult, Any]:
            result, document = super().ask(*arguments, marker=marker)
            if arguments[0] == "tasks":
                return CallResult(None, b"", "no end within 20 s"), None
            return result, document

    launched: list[str] = []
    monitor(Watched(suspect()), CutShort(document=[]), granted, launched).beat()
    assert launched == []


def test_tasks_are_asked_for_by_the_key_of_the_session_too(log: Log) -> None:
    calls = Calls(document=[listed(500, "agent:hq-coder:main", sessionId="s1")])
    monitor(Watched(suspect()), calls, granted, []).beat()
    assert [question[2] for question in calls.asked if question[0] == "tasks"] == ["s1", "agent:hq-coder:main"]


@pytest.mark.parametrize(
    "result", [CallResult(1, b"down"), CallResult(0, b"no json here"), CallResult(0, b""), SpawnError("no openclaw")]
)
def test_unknown_is_not_gone(log: Log, result: Any) -> None:
    launched: list[str] = []
    monitor(Watched(suspect()), Calls(result), granted, launched).beat()
    assert launched == []
    assert len(log.of(events.WORKFLOW_MONITOR_BLIND)) == 1


@pytest.mark.parametrize("document", [{"ok": False, "error": "gateway closed"}, {"sessions": {}}, "sessions", 3])
def test_an_answer_without_a_list_is_no_answer(log: Log, document: object) -> None:
    launched: list[str] = []
    monitor(Watched(suspect()), Calls(document=document), granted, launched).beat()
    assert launched == []
    assert len(log.of(events.WORKFLOW_MONITOR_BLIND)) == 1


@pytest.mark.parametrize(("stale", "interval"), [(600, 30), (20, 4), (1, 0.5)])
def test_a_silent_run_is_looked_at_before_it_is_released(stale: float, interval: float) -> None:
    assert monitor_interval(stale) == interval


def test_a_living_session_or_task_is_left_alone(log: Log) -> None:
    launched: list[str] = []
    monitor(Watched(suspect()), Calls(document=[listed(5)]), granted, launched).beat()
    monitor(Watched(suspect()), Calls(document=[], task={"status": "running"}), granted, launched).beat()
    assert launched == []


def test_a_refusal_and_a_failure_concern_one_suspect(log: Log) -> None:
    refused = Respawn.read(Answer.of("respawn", {"granted": False, "skip_reason": "agent_paused"}))
    answers: Iterator[Any] = iter([DispatcherError("away"), refused, granted(suspect())])
    launched: list[str] = []

    def claim(_suspect: Suspect) -> Any:
        said = next(answers)
        if isinstance(said, Exception):
            raise said
        return said

    monitor(Watched(suspect(), suspect(), suspect()), Calls(document=[]), claim, launched).beat()
    assert len(launched) == 1
    assert len(log.of(events.WORKFLOW_STEP_FAILED)) == 1
    assert log.of(events.WORKFLOW_ORPHAN_WAITS)[0]["reason"] == "agent_paused"


# ------------------------------------------------------------------------------------------- calls of openclaw


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[StubAgent]:
    made = StubAgent(tmp_path / "stub", mode="exit")
    yield made
    made.kill_all()


def script_in(folder: Path, body: str) -> str:
    path = folder / "openclaw"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_system_event_exactly(stub: StubAgent) -> None:
    command = OpenclawCommand(str(stub.path), lambda marker: {"PATH": "/bin:/usr/bin", "MARK": marker})
    assert command.system_event("coder", "hello", "m1").failure == ""
    [call] = stub.calls()
    assert call["argv"] == ["system", "event", "--mode", "now", "--session-key", "agent:coder:main", "--text", "hello"]
    assert (call["env"]["MARK"], call["stdin"]) == ("m1", "/dev/null")
    assert call["sid"] == call["pid"]


def test_an_answer_that_is_complete_ends_a_call_that_never_would(tmp_path: Path) -> None:
    path = script_in(tmp_path, 'echo "warning: old"; echo \'{"sessions": []}\'; exec sleep 600')
    result, document = OpenclawCommand(path, lambda _marker: {"PATH": "/bin:/usr/bin"}).ask("sessions", marker="m")
    assert (result.failure, document) == ("", {"sessions": []})


LAST_THREAD_LINGERS = """
import ctypes, os, signal, threading, time
def outlive() -> None:
    told.wait()
    time.sleep(0.3)
    os._exit(0)
def end_first_thread(*_) -> None:
    told.set()
    ctypes.CDLL(None).pthread_exit(None)
told = threading.Event()
threading.Thread(target=outlive).start()
signal.signal(signal.SIGTERM, end_first_thread)
print('{"sessions": []}', flush=True)
while True:
    signal.pause()
"""


def test_a_program_whose_last_thread_lingers_leaves_no_zombie(tmp_path: Path) -> None:
    """As OpenClaw's does: its first thread is gone, so nobody of its family is left, and it cannot be reaped yet."""
    script = tmp_path / "lingers.py"
    script.write_text(LAST_THREAD_LINGERS)
    path = script_in(tmp_path, f'exec {sys.executable} {script} "$@"')
    before = set(psutil.Process().children())
    OpenclawCommand(path, lambda _marker: {"PATH": "/bin:/usr/bin"}).ask("sessions", marker="m")
    assert set(psutil.Process().children()) == before


def test_a_call_is_bounded_and_a_stop_of_the_daemon_ends_it(tmp_path: Path) -> None:
    path = script_in(tmp_path, "exec sleep 600")
    environment = {"PATH": "/bin:/usr/bin"}
    late = OpenclawCommand(path, lambda _marker: environment).run(("x",), 0.3, "m")
    assert (late.exit_code, late.failure) == (None, "no end within 0.3 s")
    stopped = OpenclawCommand(path, lambda _marker: environment, lambda: True).run(("x",), 60, "m")
    assert stopped.failure == "the daemon is stopping"


def test_a_command_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpawnError):
        OpenclawCommand(str(tmp_path / "none"), lambda _marker: {}).system_event("a", "b", "m")


# ------------------------------------------------------------------------------------------- hints


def test_hints_about_runs_are_read() -> None:
    assert read_broadcast("run", {"run_id": "x"}, "me") == Hint("run", None, None, "broadcast")
    change = {"type": "INSERT", "table": "workflow_runs", "record": {"id": "x"}}
    assert read_change(change, "me") == Hint("run", None, None, "postgres_changes")
