"""Every answer of every function the daemon calls: read, or one named error. No value ends anything."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import math
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dispatcher
from dispatcher.answers import LARGEST_COUNT, LONGEST_SECONDS, Answer
from dispatcher.errors import DispatcherError, MalformedAnswer, RegistrationRefused
from dispatcher.inbox.book import WakeBook
from dispatcher.inbox.launcher import _age_s
from dispatcher.inbox.model import Claim, Ended, Grant, Refusal, Report, Started
from dispatcher.inbox.store import InboxStore
from dispatcher.instance.model import OpenWake
from dispatcher.instance.store import InstanceStore
from dispatcher.workflows.model import Delivery, Notification, Suspect
from dispatcher.workflows.store import WorkflowStore

ID = UUID(int=1)
NAN = float("nan")
INFINITIES = ["Infinity", "-Infinity", "NaN", math.inf, -math.inf, NAN, 1e309, 10**400, -(10**400)]
BODIES: list[Any] = [[], {}, "", None, 5, True, "x", [None], [[]], [{}], {"code": "ok"}, {"busy": False}, [1, 2]]
# Nobody waits for what these answer.
WITHOUT_ANSWER = {"stop", "note_sweep"}
GIVES_NO_ROW = ("register", {"code": "ok"})


class Rest:
    """Answers every call with `body`, and notes which functions were called."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.called: list[str] = []

    def rpc(self, function: str, params: dict[str, Any], **_options: object) -> Any:
        json.dumps(params, allow_nan=False)
        self.called.append(function)
        return self.body


OPEN_WAKE = {
    **{name: str(ID) for name in ("wake_id", "claim_token", "claim_request", "agent_id")},
    "agent_slug": "ada",
    "host_id": None,
    "hostname": None,
    "pid": 4,
    "pid_started_at": 1.5,
    "deadline_in": 9.0,
    "owner_state": "running",
    "owner_host_id": None,
    "owner_pid": 3,
    "owner_pid_started_at": 1.0,
    "owner_silent_for": 2.0,
}
SAMPLES: dict[Any, Callable[[], Any]] = {
    "UUID": lambda: ID,
    "float": lambda: 1.0,
    "float | None": lambda: 1.0,
    "int": lambda: 1,
    "str": lambda: "x",
    "Iterable[UUID]": lambda: [ID],
    "Iterable[str]": lambda: ["x"],
    "Mapping[str, object]": dict,
    "Sequence[Claim]": lambda: [Claim(ID, "event")],
    "Sequence[Report]": lambda: [Ended(ID, ID, "exited", 0)],
    "Sequence[Delivery]": lambda: [Delivery(Notification(ID, ID, ID, "t", "ada", None, 1, 1), "")],
    "Suspect": lambda: Suspect(ID, ID, "t", "ada", None, "s", 1, 1.0),
    "OpenWake": lambda: OpenWake.read(Answer.of("x", OPEN_WAKE)),
}


def stores(rest: Any) -> list[Any]:
    return [
        InboxStore(rest, lambda: ID, WakeBook()),
        InstanceStore(rest),
        WorkflowStore(rest, lambda: ID),
    ]


def store_calls(rest: Rest) -> dict[str, Callable[[], Any]]:
    """Every public method of every store by its name, with arguments made by their kind."""
    found: dict[str, Callable[[], Any]] = {}
    for store in stores(rest):
        for name, method in inspect.getmembers(store, inspect.ismethod):
            if not name.startswith("_"):
                parameters = inspect.signature(method).parameters.values()
                wanted = [SAMPLES[one.annotation]() for one in parameters if one.default is one.empty]
                found[name] = functools.partial(method, *wanted)
    return found


def named_functions(package: str, methods: Collection[str] = ("rpc", "_call", "_ask")) -> set[str]:
    """The SQL functions the code under `package` calls by name, through one of `methods`."""
    found = set()
    for file in (Path(dispatcher.__file__).parent / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in methods and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    found.add(first.value)
    return found


# One good answer per call of a store, as the SQL makes them.
GRANT = {
    "granted": True,
    "wake_id": str(ID),
    "claim_token": str(ID),
    "agent_id": str(ID),
    "agent_slug": "ada",
    "workspace_slug": "hq",
    "path": "event",
    "item_ids": [str(ID)],
    "event_type": "task",
    "summary": "s",
    "item_created_at": "2026-11-30T12:00:00+00:00",
    "model_override": None,
    "thinking_override": None,
    "blockers": ["b"],
    "blockers_error": None,
    "chain_depth": 0,
    "timeout_seconds": 60.0,
}
REFUSED = {"granted": False, "agent_id": str(ID), "agent_slug": "ada", "skip_reason": "cooldown(5s)", "retry_in": 5.0}
REFUSED |= {"failures": 1, "error": None, "error_code": None}
RESULT = {"wake_id": str(ID), "report": "ended", "applied": True, "code": "ok", "state": "succeeded"}
RESULT |= {"agent_id": str(ID), "agent_slug": "ada", "consecutive_failures": 0, "next": "cooldown(5s)", "retry_in": 5.0}
RESULT |= {"dead_letters": [str(ID)]}
STEP_ERROR = {"phase": "expired", "run_id": None, "error": "boom", "error_code": "P0001"}
STOP = {"wake_id": str(ID), "cause": "run is cancelled"}
RUN = {"run_id": str(ID), "claim_token": str(ID), "workflow_type": "t", "agent_id": "ada", "workspace_slug": None}
GOOD: dict[str, Any] = {
    "claim": [GRANT],
    "report": {"results": [RESULT], "claims": [GRANT, REFUSED]},
    "look": {
        "agents": [{"id": str(ID), "slug": "ada"}],
        "open_wakes": [OPEN_WAKE],
        "broadcast_available": True,
        "due": ["expired"],
    },
    "sweep_phase": {
        "count": 1,
        "again": False,
        "cursor": None,
        "queued": 0,
        "waiting": 0,
        "claims": [GRANT],
        "skipped": [REFUSED],
    },
    "schema": {"revision": 1, "fingerprint": "f", "drift": ["function public.f() differs"]},
    "register": {
        "code": "ok",
        "instance_id": str(ID),
        "gateway_id": str(ID),
        "gateway_slug": "local",
        "topic": "t",
        "broadcast_available": True,
        "open_wakes": [OPEN_WAKE],
    },
    "heartbeat": {
        "renewed": 1,
        "broadcast_available": True,
        "fenced": [str(ID)],
        "unattended": [OPEN_WAKE],
        "orphaned": [str(ID)],
        "faults": [{"id": 1, "side_write": "notification", "error": "boom", "at": "2026-11-30T00:00:00Z"}],
    },
    "adopt": {"applied": True, "claim_token": str(ID), "agent_id": str(ID), "deadline_in": 60.0},
    "holders": {"code": "ok", "held": [{"text": "a row of gateways is held by pid 1"}]},
    "gauges": {
        "backlog": {"under_1m": 1, "oldest_seconds": 5, "waiting_for_paused": 2},
        "runs": {"queued": 1},
        "held": 0,
    },
    "stop": None,
    "note_sweep": None,
    "look_at_runs": {"due": ["dispatched"], "stop_wakes": [STOP]},
    "note_tick": {"next_in": 5.0, "stop_wakes": [STOP]},
    "run_phase": {
        "phase": "dispatched",
        "busy": False,
        "again": True,
        "dispatched": 1,
        "held": 0,
        "held_by": {"code-change": ["All"]},
        "warned": 0,
        "locked": 0,
        "errors": [STEP_ERROR],
        "budget_error": None,
        "budgets_open": False,
    },
    "claim_notifications": {
        "notifications": [RUN | {"id": str(ID), "attempt": 1, "tries": 1}],
        "next_in": 1.0,
    },
    "finish_notifications": {"finished": 1},
    "watch": {
        "suspects": [RUN | {"session_id": "s", "attempt": 1, "silent_for": 400.0}],
        "stop_wakes": [STOP],
        "orphan_after": 360.0,
    },
    "respawn": GRANT | {"run": {"session_id": "respawn-1"}},
}
ODD: list[Any] = [
    *INFINITIES,
    None,
    True,
    "",
    "x",
    -1,
    2**64,
    1.5,
    [],
    {},
    [None],
    "294276-12-31",
    "0044-03-15 BC",
    "\ud800",
]


def test_every_function_the_daemon_calls_is_among_the_samples() -> None:
    """What keeps the tests below complete: a call that is added without a sample fails here."""
    rest = Rest(None)
    assert set(store_calls(rest)) == set(GOOD)
    for call in store_calls(rest).values():
        outcome_of(call)
    named = {name for package in ("inbox", "instance", "workflows") for name in named_functions(package)}
    assert set(rest.called) == named
    assert not named_functions("agents") | named_functions("runtime")


@pytest.mark.parametrize("body", BODIES, ids=repr)
@pytest.mark.parametrize("name", sorted(set(GOOD) - WITHOUT_ANSWER))
def test_c11_an_answer_of_another_shape_is_one_named_error(name: str, body: Any) -> None:
    rest = Rest(body)
    outcome = outcome_of(store_calls(rest)[name])
    [function] = rest.called
    if isinstance(outcome, list):  # one verdict that cannot be read is that claim's own error
        assert [(one.reason, function in one.error) for one in outcome] == [("error", True)]
        return
    assert isinstance(outcome, MalformedAnswer | RegistrationRefused)
    assert len(str(outcome)) < 300
    named = isinstance(outcome, RegistrationRefused) and (name, body) == GIVES_NO_ROW
    assert named or function in str(outcome)


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call answers, or the error it raises."""
    try:
        return call()
    except DispatcherError as error:
        return error


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(document: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy with another value at `path`; ... takes it away."""
    copy = json.loads(json.dumps(document))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if odd is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = odd
    return copy


@pytest.mark.parametrize("name", sorted(set(GOOD) - WITHOUT_ANSWER))
def test_c9_no_value_at_any_place_of_an_answer_raises_anything_else(name: str) -> None:
    rest = Rest(None)
    call = store_calls(rest)[name]
    for path in places(GOOD[name]):
        for odd in (..., *ODD):
            rest.body = changed(GOOD[name], path, odd)
            with contextlib.suppress(MalformedAnswer, RegistrationRefused):
                call()


def test_good_answers_are_read() -> None:
    rest = Rest(None)
    for name, call in store_calls(rest).items():
        rest.body = GOOD[name]
        call()


# ------------------------------------------------------------------------------------------- numbers


def answer(**fields: Any) -> Answer:
    return Answer.of("f", fields)


@pytest.mark.parametrize("odd", INFINITIES, ids=repr)
def test_c9_an_infinite_time_is_no_known_time(odd: Any) -> None:
    assert answer(retry_in=odd).seconds_or_none("retry_in") is None
    assert answer(pid=odd).pid_or_none("pid") is None
    assert 0 <= answer(failures=odd).count("failures") <= LARGEST_COUNT


@given(st.one_of(st.integers(), st.floats(), st.text(max_size=9), st.none(), st.booleans(), st.lists(st.none())))
def test_c9_every_number_is_one_that_can_be_waited_for(value: Any) -> None:
    row = answer(n=value)
    with contextlib.suppress(MalformedAnswer):
        seconds = row.seconds_or_none("n")
        assert seconds is None or -LONGEST_SECONDS <= seconds <= LONGEST_SECONDS
        threading.Event().wait(0 if seconds is None else min(seconds, 0))
        assert 0 <= row.count("n") <= LARGEST_COUNT
        pid = row.pid_or_none("n")
        assert pid is None or 0 < pid < 2**31


def test_a_number_keeps_its_value() -> None:
    row = answer(a=5, b=-2.5, c="1.5", d=7.0, e=2**40)
    assert [row.seconds_or_none(name) for name in "abc"] == [5.0, -2.5, 1.5]
    assert [row.count(name) for name in "ade"] == [5, 7, 2**40]
    assert row.count("missing", 3) == 3
    assert row.count_or_none("missing") is None


@pytest.mark.parametrize(
    "created_at",
    ["infinity", "-infinity", "294276-12-31T00:00:00+00:00", "0044-03-15T00:00:00 BC", "2999-01-01T00:00:00Z"],
)
def test_c9_an_age_nobody_can_know_is_none(created_at: str) -> None:
    assert _age_s(created_at) is None
    assert _age_s("2026-11-30T12:00:00") is None  # without a zone


# ------------------------------------------------------------------------------------------- parts of an answer


def test_c11_a_verdict_that_cannot_be_read_costs_the_others_nothing() -> None:
    book = WakeBook()
    other = uuid4()
    rows = [GRANT | {"wake_id": "x"}, None, GRANT | {"agent_id": str(other), "wake_id": str(other)}]
    verdicts = InboxStore(Rest(rows), lambda: ID, book).claim(
        [Claim(ID, "event"), Claim(ID, "event"), Claim(other, "due")]
    )
    assert [type(verdict) for verdict in verdicts] == [Refusal, Refusal, Grant]
    assert book.ids() == [other]


def test_c11_a_result_that_cannot_be_read_has_its_own_report_sent_again() -> None:
    good = Ended(uuid4(), ID, "exited", 0)
    reports: list[Report] = [Ended(ID, ID, "exited", 0), good, Started(ID, ID, "host", 1, None)]
    mine = RESULT | {"wake_id": str(good.wake_id)}
    rest = Rest({"results": [{"wake_id": str(ID)}, mine, mine], "claims": []})
    answer = InboxStore(rest, lambda: ID, WakeBook()).report(reports, 0)
    assert [(one.wake_id, one.report, one.code) for one in answer.results] == [
        (ID, "ended", "error"),
        (good.wake_id, "ended", "ok"),
        (ID, "started", "error"),
    ]


@pytest.mark.parametrize("body", [{"code": "ok", "instance_id": None}, {"code": "taken"}, {"code": "x" * 500}])
def test_c31_a_registration_that_gives_no_row_is_a_named_error(body: Any) -> None:
    with pytest.raises(RegistrationRefused, match="did not register this daemon"):
        InstanceStore(Rest(body)).register(ID, "local", {}, {})
