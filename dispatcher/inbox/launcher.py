"""From a granted claim to a running process, and from its end to a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Protocol
from uuid import UUID

from dispatcher import events
from dispatcher.agents.command import MAX_OPTION_CHARACTERS, build_argv, option_value
from dispatcher.agents.supervisor import Ending, WakeProcess
from dispatcher.answers import LONGEST_SECONDS
from dispatcher.errors import DispatcherError, ExecutableMissing, InvalidAgentId, ItemRefused, ShuttingDown
from dispatcher.inbox import model
from dispatcher.inbox.book import BookedWake, WakeBook
from dispatcher.inbox.message import wake_message, wake_reason
from dispatcher.inbox.model import Ended, Grant, Report, ReportResult, Started
from dispatcher.inbox.namesakes import Namesakes
from dispatcher.logs import get_logger, redact
from dispatcher.openclaw.answer import AgentAnswer, read_answer
from dispatcher.openclaw.hold import GatewayHold
from dispatcher.text import shortened

log = get_logger(__name__)

# A clock that differs by more from the database's says nothing about an age.
LARGEST_SKEW: Final = 86_400.0
MAX_CAUSE: Final = 1_000


class Starts(Protocol):
    """The part of `Supervisor` that a launch needs."""

    def start(
        self,
        wake_id: str,
        agent: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_seconds: float | None = None,
        on_started: Callable[[WakeProcess], object],
    ) -> WakeProcess: ...

    def stop(self, wake_id: str, cause: str) -> bool: ...


class Launcher:
    """Starts granted wakes and reports what became of them. Called from any thread."""

    def __init__(
        self,
        *,
        book: WakeBook,
        executable: str,
        host_id: str,
        resolve_agent: Callable[[str | None, str], str],
        child_environment: Callable[[str], Mapping[str, str]],
        namesakes: Namesakes,
        hold: GatewayHold,
        on_held: Callable[[UUID], None] = lambda _agent_id: None,
        on_started: Callable[[str, float], None] = lambda _path, _latency_s: None,
    ) -> None:
        self._book = book
        self._executable = executable
        self._host_id = host_id
        self._resolve_agent = resolve_agent
        self._child_environment = child_environment
        self._namesakes = namesakes
        self._hold = hold
        self._on_held = on_held
        self._on_started = on_started
        self._open = True
        self._supervisor: Starts
        self._report: Callable[[Report], None]

    def connect(self, supervisor: Starts, report: Callable[[Report], None]) -> None:
        """Names the two it works with; they need its methods, so they are made after it."""
        self._supervisor = supervisor
        self._report = report

    def close(self) -> None:
        """From now on a grant is handed back instead of started."""
        self._open = False

    def launch(self, grant: Grant) -> None:
        """Starts the process of a grant; a spawn that fails is reported as such and never raises."""
        if not self._open:
            self._hand_back(grant, "the daemon is stopping")
            return
        if (cause := self._hold.cause) is not None:  # claimed a moment before
            self._hand_back(grant, cause)
            self._on_held(grant.agent_id)
            return
        try:
            self._spawn(grant)
        except ShuttingDown:
            self._namesakes.leave(grant.wake_id)
            self._hand_back(grant, "the daemon is stopping")
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one agent's spawn concerns that agent alone
            self._namesakes.leave(grant.wake_id)
            self._refuse(grant, error)

    def _note_start(self, grant: Grant, child: WakeProcess) -> None:
        """Comes before `on_end` even for a process that ends at once, so the database hears of the start first."""
        self._book.note_pid(grant.wake_id, child.pid)
        self._report(Started(grant.wake_id, grant.claim_token, self._host_id, child.pid, child.started_at))
        self._tell(grant, child)

    def _spawn(self, grant: Grant) -> None:
        agent = self._resolve_agent(grant.workspace_slug, grant.agent_slug)
        model, thinking = _override(grant, "model_override"), _override(grant, "thinking_override")
        argv = build_argv(self._executable, agent, wake_message(grant), model=model, thinking=thinking)
        self._namesakes.claim(grant.wake_id, grant.agent_id, grant.agent_slug, grant.workspace_slug, agent)
        wake_id = str(grant.wake_id)
        self._supervisor.start(
            wake_id,
            grant.agent_slug,
            argv,
            self._child_environment(wake_id),
            timeout_seconds=grant.timeout_seconds,
            on_started=lambda child: self._note_start(grant, child),
        )

    def _hand_back(self, grant: Grant, why: str) -> None:
        self._report(Ended(grant.wake_id, grant.claim_token, "interrupted", error=why[:MAX_CAUSE]))

    def _refuse(self, grant: Grant, error: Exception) -> None:
        ending = ending_of(error, grant)
        if isinstance(error, ExecutableMissing):
            self._hold.missed(str(error))
            self._on_held(grant.agent_id)
        log.error(
            events.WAKE_SPAWN_FAILED,
            msg=f"Could not start {shortened(grant.agent_slug)}: {error}",
            error=str(error)[:MAX_CAUSE],
            ending=ending,
            wake_id=str(grant.wake_id),
            item_id=str(grant.item_ids[0]) if ending == "item_refused" else None,
            agent=grant.agent_slug,
            exc_info=None if isinstance(error, DispatcherError) else error,
        )
        self._report(Ended(grant.wake_id, grant.claim_token, ending, error=str(error)[:MAX_CAUSE]))

    def _tell(self, grant: Grant, child: WakeProcess) -> None:
        if grant.blockers_error:
            log.warning(
                events.WAKE_BLOCKERS_UNKNOWN,
                msg="Could not look up blockers; woke without the note",
                agent=grant.agent_slug,
                error=grant.blockers_error,
            )
        age_s = _age_s(grant.item_created_at)
        log.info(
            events.WAKE_STARTED,
            msg=f"Woke {grant.agent_slug}",
            agent=grant.agent_slug,
            reason=wake_reason(grant),
            path=grant.path,
            wake_id=str(grant.wake_id),
            item_id=str(grant.item_ids[0]) if grant.item_ids else None,
            pid=child.pid,
            item_age_ms=None if age_s is None else round(age_s * 1000, 1),
            **_shown_overrides(grant),
        )
        if age_s is not None:
            self._on_started(grant.path, age_s)

    def on_end(self, process: WakeProcess, ending: Ending) -> None:
        """The process is gone: report how. Called by its waiter thread."""
        self._namesakes.leave(UUID(process.wake_id))
        wake = self._book.get(UUID(process.wake_id))
        if wake is None:
            return
        answer = read_answer(ending.output, ending.exit_code) if ending.kind == "exited" else None
        kind = _ENDINGS[ending.kind] if answer is None else ending_by(answer, wake)
        cause = ending.cause or ("" if answer is None else cause_of(answer))
        self._note_gateway(wake, ending, answer)
        self._report(Ended(wake.wake_id, wake.claim_token, kind, ending.exit_code, cause or None))
        log.info(
            events.WAKE_ENDED,
            msg=f"{wake.agent_slug} ended ({kind}, exit code {ending.exit_code}) after {ending.duration_s:.1f} s",
            agent=wake.agent_slug,
            wake_id=str(wake.wake_id),
            ending=kind,
            exit_code=ending.exit_code,
            duration_s=round(ending.duration_s, 3),
            cause=cause or None,
            run_id=None if answer is None else answer.run_id,
        )

    def _note_gateway(self, wake: BookedWake, ending: Ending, answer: AgentAnswer | None) -> None:
        """Before the end is reported: nothing may be claimed by that report while the Gateway is away."""
        if answer is not None and answer.kind == "environment":
            self._hold.met(cause_of(answer))
            self._on_held(wake.agent_id)
        elif ending.exit_code == 0 or answer is not None:
            self._hold.reached()

    def stop_fenced(self, wake_id: UUID) -> None:
        """This wake has ended for the database, or has another owner: stop the child if it lives, forget it."""
        wake = self._book.get(wake_id)
        self._book.remove(wake_id)
        # Also when it was forgotten before: the process may have been in its start then.
        if not self._supervisor.stop(str(wake_id), "fence lost"):
            return
        agent = wake.agent_slug if wake is not None else None
        log.warning(
            events.LEASE_LOST,
            msg=f"The wake of {agent or 'an agent'} is not ours any more; stopping its process",
            agent=agent,
            wake_id=str(wake_id),
        )

    def on_result(self, result: ReportResult) -> None:
        """The database's answer to a report."""
        if result.report == "started" and result.code == "fence_lost":
            self.stop_fenced(result.wake_id)


_ENDINGS: dict[str, model.Ending] = {
    "exited": "exited",
    "timed_out": "timed_out",
    "stopped": "interrupted",
    "lost": "lost",
}


def ending_of(error: Exception, grant: Grant) -> model.Ending:
    """Whose fault a start that failed is: the first item's, the agent's, or nobody's who could mend it in a row."""
    if isinstance(error, ItemRefused) and grant.item_ids:
        return "item_refused"
    if isinstance(error, ExecutableMissing):
        return "interrupted"
    return "agent_refused" if isinstance(error, InvalidAgentId) else "spawn_failed"


def ending_by(answer: AgentAnswer, wake: BookedWake) -> model.Ending:
    """Whose fault the end of a turn is: nobody's where the Gateway took no work, the item's where it asks for what the
    Gateway refuses, else the agent's.
    """
    if answer.kind in {"environment", "busy"}:
        return "interrupted"
    if answer.kind == "override" and wake.has_override:
        return "item_refused"
    return "timed_out" if answer.kind == "timeout" else "exited"


def cause_of(answer: AgentAnswer) -> str:
    """Its words on one line, without secrets."""
    return redact(answer.text)[:MAX_CAUSE]


def _override(grant: Grant, name: str) -> str | None:
    """The override when it can be one; what cannot is ignored with one warning. Empty is none.

    Raises:
        ItemRefused: it is longer than an argument may be: what it asks for would not be what runs.
    """
    value = getattr(grant, name)
    if isinstance(value, str) and len(value) > MAX_OPTION_CHARACTERS:
        raise ItemRefused(f"{name} has {len(value)} characters, more than {MAX_OPTION_CHARACTERS}: {shortened(value)}")
    if value is None or value == "" or option_value(value) is not None:
        return option_value(value)
    log.warning(
        events.WAKE_OVERRIDE_IGNORED,
        msg=f"Ignored {name}: {'no fit value of an option' if isinstance(value, str) else 'not a string'}",
        agent=grant.agent_slug,
        wake_id=str(grant.wake_id),
        override=name,
        type=type(value).__name__,
    )
    return None


def _shown_overrides(grant: Grant) -> dict[str, object]:
    names = ("model_override", "thinking_override")
    shown = {name: value for name in names if (value := option_value(getattr(grant, name))) is not None}
    return shown | ({"blockers": len(grant.blockers)} if grant.blockers else {})


def _age_s(created_at: str | None) -> float | None:
    """Seconds since the insert, by this host's clock against the database's: for people, not for rules.

    None where nobody can know it.
    """
    if created_at is None:
        return None
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(created_at)).total_seconds()
    except (ValueError, OverflowError, TypeError):  # infinity, another era, a year no date has
        return None
    return age if -LARGEST_SKEW < age < LONGEST_SECONDS else None
