"""Whatever a function answers to a command: one line and an exit code, never a traceback or an empty table."""

from __future__ import annotations

import types
import typing
import uuid
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, get_args, get_origin, get_type_hints

import pytest
import typing_extensions

from dispatcher.cli.answers import SHAPES
from dispatcher.cli.main import run_command_line
from dispatcher.supabase.rest import RestClient
from tests.unit.test_answers import BODIES, changed, named_functions, places
from tests.unit.test_house_command_line import environment, set_all  # noqa: F401 - a fixture

ID = str(uuid.uuid4())
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "request_wake": ("wake", "ada"),
    "requeue_inbox_items": ("inbox", "requeue"),
    "expire_inbox_items": ("inbox", "expire", ID),
    "release_inbox_item": ("inbox", "release", ID),
    "list_inbox_items": ("inbox", "list"),
    "dispatcher_status": ("status",),
    "list_wakes": ("wakes",),
    "list_workflow_runs": ("runs", "list"),
    "show_workflow_run": ("runs", "show", ID),
    "enqueue_workflow_run": ("runs", "enqueue", "t"),
    "cancel_workflow_run": ("runs", "cancel", ID),
    "retry_workflow_run": ("runs", "retry", ID),
    "correct_workflow_usage": ("runs", "usage", ID, "--cost-usd", "1"),
    "workflow_stats": ("runs", "stats"),
    "set_workflow_route": ("routing", "set", "t", "ada"),
    "remove_workflow_route": ("routing", "remove", "t"),
    "seed_workflow_routes": ("routing", "seed"),
    "list_budgets": ("budgets", "list"),
    "set_budget": ("budgets", "set", "b", "--cap-usd", "1"),
    "deactivate_budget": ("budgets", "deactivate", "b"),
    "budget_ledger": ("budgets", "ledger"),
}


def test_every_function_a_command_calls_has_a_shape_and_a_command_here() -> None:
    """What keeps the tests below complete: add the answer of a new function to dispatcher/cli/answers.py."""
    assert named_functions("cli", {"call", "call_for_tenant", "rpc"}) == set(SHAPES) == set(COMMANDS)


def smallest(shape: Any) -> Any:
    """The least that has the shape: each list with one element."""
    origin, inside = get_origin(shape), get_args(shape)
    if typing_extensions.is_typeddict(shape):
        hints = get_type_hints(shape, include_extras=True)
        return {name: smallest(part) for name, part in hints.items() if get_origin(part) is not NotRequired}
    if origin is Literal:
        return inside[0]
    if origin in {types.UnionType, typing.Union}:
        return smallest(inside[0])
    if origin is list:
        return [smallest(inside[0])]
    return {dict: {"x": None}, str: "x", bool: True, int: 1, float: 1.0}.get(origin or shape)


@pytest.fixture
def said(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command against one answer; its exit code and what it printed to stderr."""
    set_all(request.getfixturevalue("environment"))
    monkeypatch.setattr("dispatcher.cli.wake.WAIT_SECONDS", 0.0)
    bodies: list[Any] = [None]
    monkeypatch.setattr(RestClient, "rpc", lambda *_arguments, **_options: bodies[0])
    monkeypatch.setattr(RestClient, "select", lambda *_arguments, **_options: [])

    def run(function: str, body: Any, *more: str) -> tuple[int, str]:
        bodies[0] = body
        code = run_command_line([*COMMANDS[function], *more])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("body", BODIES, ids=repr)
@pytest.mark.parametrize("function", SHAPES)
def test_c11_a_command_says_which_call_was_answered_by_nonsense(said: Any, function: str, body: Any) -> None:
    code, err = said(function, body)
    assert code not in {0, 2}
    assert err.startswith(f"dispatcher: {function}: malformed answer: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "shape"), [(function, shape) for function, shapes in SHAPES.items() for shape in shapes], ids=str
)
def test_c11_a_command_needs_no_more_of_an_answer_than_its_shape_says(said: Any, function: str, shape: Any) -> None:
    good = smallest(shape)
    for arguments in ((), ("--json",)):
        code, err = said(function, good, *arguments)
        assert code in {0, 1, 2, 78}
        assert "malformed" not in err
    for path in places(good):
        for odd in (..., None, 5, "x", [5]):
            said(function, changed(good, path, odd))  # what it raises beside an error of ours fails here
