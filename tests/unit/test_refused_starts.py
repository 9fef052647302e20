"""A start that cannot be made: whose fault it is, said once and briefly; and who owns an id that two agents come to."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.agents.registry import MAX_SLUG_LENGTH, normalise_id, resolve_id, resolve_ids
from dispatcher.errors import InvalidAgentId, SpawnError
from dispatcher.inbox.book import WakeBook
from dispatcher.inbox.launcher import Launcher
from dispatcher.inbox.model import Ended, Grant, Report
from dispatcher.inbox.namesakes import Namesakes
from tests.support.gateway import no_hold
from tests.unit.test_inbox_parts import grant

HUGE = "x" * 200_000


class Processes:
    """Stands in for the supervisor: notes what would be started."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.started: list[str] = []

    def start(self, wake_id: str, agent: str, *_: object, **_options: object) -> Any:
        if self.error is not None:
            raise self.error
        self.started.append(agent)

    def stop(self, wake_id: str, cause: str) -> bool:
        return False


def launched(one: Grant, error: Exception | None = None) -> tuple[list[str], list[Report]]:
    """What was started, and what was reported."""
    reports: list[Report] = []
    processes = Processes(error)
    launcher = Launcher(
        book=WakeBook(),
        executable="/bin/true",
        host_id="host",
        resolve_agent=lambda workspace, slug: resolve_id((), workspace, slug),
        child_environment=lambda _wake_id: {},
        namesakes=Namesakes(lambda: ()),
        hold=no_hold(),
    )
    launcher.connect(processes, reports.append)
    launcher.launch(one)
    return processes.started, reports


@pytest.mark.parametrize(
    ("fields", "ending", "cause"),
    [
        ({"model_override": HUGE}, "item_refused", "model_override has 200000 characters, more than 200"),
        ({"thinking_override": HUGE}, "item_refused", "thinking_override has 200000 characters, more than 200"),
        ({"agent_slug": HUGE}, "agent_refused", "a slug of 200000 characters"),
        ({"agent_slug": f"ada{'!' * 200_000}"}, "agent_refused", "a slug of 200003 characters"),
        ({"agent_slug": "!!!"}, "agent_refused", "nothing OpenClaw keeps"),
        ({"agent_slug": "y" * 65}, "agent_refused", "an agent id of 65 characters"),
        ({"agent_slug": "a\x00b"}, "agent_refused", "control characters"),
        ({"workspace_slug": HUGE}, "agent_refused", "a slug of 200000 characters"),
    ],
)
def test_c29_a_start_nobody_can_make_is_refused_with_the_cause_first(
    fields: dict[str, Any], ending: str, cause: str
) -> None:
    started, [report] = launched(dataclasses.replace(grant(), **fields))
    assert started == []
    assert isinstance(report, Ended)
    assert report.ending == ending
    assert report.error is not None
    assert cause in report.error[:100]
    assert len(report.error) < 250


def test_c29_what_the_host_cannot_do_is_nobodys_fault() -> None:
    _, [report] = launched(grant(), SpawnError("cannot start openclaw: not found"))
    assert isinstance(report, Ended)
    assert report.ending == "spawn_failed"


def test_c29_an_override_that_is_no_text_is_ignored_as_before() -> None:
    assert launched(dataclasses.replace(grant(), model_override=7, thinking_override="--help"))[0] == ["ada"]


# ------------------------------------------------------------------------------------------- namesakes

WINNERS: list[tuple[list[str], tuple[str, ...], str | None, str]] = [
    (["dev-ops", "dev.ops"], (), "hq", "dev-ops"),
    (["dev.ops", "Dev Ops"], (), "hq", "Dev Ops"),  # no slug is as OpenClaw writes it: the first one
    (["dev.ops", "dev-ops", "dev ops"], ("dev-ops",), None, "dev-ops"),
    (["ada", "hq-ada"], ("hq-ada",), "hq", "hq-ada"),
    (["DEV-OPS", "dev-ops"], ("hq/dev-ops",), "hq", "dev-ops"),
]


def claim(namesakes: Namesakes, agent_id: UUID, slug: str, known: tuple[str, ...], workspace: str | None) -> UUID:
    wake_id = uuid4()
    namesakes.claim(wake_id, agent_id, slug, workspace, resolve_id(known, workspace, slug))
    return wake_id


@pytest.mark.parametrize(("slugs", "known", "workspace", "winner"), WINNERS)
def test_c30_one_of_several_agents_with_one_id_is_woken_always_the_same(
    slugs: list[str], known: tuple[str, ...], workspace: str | None, winner: str
) -> None:
    agents = {uuid4(): slug for slug in slugs}
    for seed in range(5):
        namesakes = Namesakes(lambda: known)
        namesakes.replace(agents)
        for agent_id, slug in random.Random(seed).sample(list(agents.items()), len(agents)):
            if slug == winner:
                namesakes.leave(claim(namesakes, agent_id, slug, known, workspace))
            else:
                with pytest.raises(InvalidAgentId, match=f"agent '{winner}'"):
                    claim(namesakes, agent_id, slug, known, workspace)


def test_c30_two_processes_never_hold_one_id_though_the_owner_came_second() -> None:
    first, owner = uuid4(), uuid4()
    namesakes = Namesakes(lambda: ())
    wake_id = claim(namesakes, first, "dev.ops", (), "hq")  # nobody has heard of the other one yet
    with pytest.raises(SpawnError, match=r"'dev\.ops' still runs"):
        claim(namesakes, owner, "dev-ops", (), "hq")
    namesakes.leave(wake_id)
    claim(namesakes, owner, "dev-ops", (), "hq")
    with pytest.raises(InvalidAgentId, match="'dev-ops'"):
        claim(namesakes, first, "dev.ops", (), "hq")


def test_c30_an_adopted_process_holds_its_id() -> None:
    namesakes = Namesakes(lambda: ())
    adopted = uuid4()
    namesakes.hold(adopted, uuid4(), "dev.ops")
    with pytest.raises(SpawnError):
        claim(namesakes, uuid4(), "dev-ops", (), "hq")


def test_c30_an_agent_that_was_renamed_or_deleted_gives_its_id_free() -> None:
    first, second = uuid4(), uuid4()
    namesakes = Namesakes(lambda: ())
    namesakes.replace({first: "dev-ops", second: "dev.ops"})
    with pytest.raises(InvalidAgentId):
        claim(namesakes, second, "dev.ops", (), "hq")
    namesakes.replace({first: "operations", second: "dev.ops"})
    claim(namesakes, second, "dev.ops", (), "hq")


def test_c30_a_refused_start_holds_nothing() -> None:
    namesakes = Namesakes(lambda: ())
    reports: list[Report] = []
    launcher = Launcher(
        book=WakeBook(),
        executable="/bin/true",
        host_id="host",
        resolve_agent=lambda workspace, slug: resolve_id((), workspace, slug),
        child_environment=lambda _wake_id: {},
        namesakes=namesakes,
        hold=no_hold(),
    )
    launcher.connect(Processes(SpawnError("no")), reports.append)
    launcher.launch(dataclasses.replace(grant(), agent_id=uuid4(), agent_slug="dev.ops"))
    claim(namesakes, uuid4(), "dev-ops", (), None)


def test_ids_of_many_agents_are_those_of_each() -> None:
    known = ("hq/ada", "bob", "x" * 300)
    slugs = ["ada", "bob", "Eve!", "!!!", "y" * 65, "z" * (MAX_SLUG_LENGTH + 1)]

    def alone(slug: str) -> str | None:
        answer: Callable[[], str] = lambda: normalise_id(resolve_id(known, "hq", slug))  # noqa: E731
        try:
            return answer()
        except InvalidAgentId:
            return None

    assert resolve_ids(known, "hq", slugs) == {slug: found for slug in slugs if (found := alone(slug)) is not None}
