"""Short questions and orders to the `openclaw` command line: bounded in time, ended whole, their answer read.

Facts about its answers and times stand in docs/explanation; here: a call may print its whole answer and never
exit, so a complete JSON document ends the wait, and what is still running then is stopped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.agents import process as processes
from dispatcher.agents.process import ManagedProcess

SYSTEM_EVENT_SECONDS: Final = 30.0
QUESTION_SECONDS: Final = 20.0
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
SHOWN_BYTES: Final = 300
# How often a running call is looked at: for a stop of the daemon, and for an answer that is complete already.
LOOK_SECONDS: Final = 0.25
TERM_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended; `output` is both streams. `exit_code` is None when we stopped it, then `error` says why."""

    exit_code: int | None
    output: bytes
    error: str = ""

    @property
    def failure(self) -> str:
        """Why it did not work, on one line; empty when it did."""
        if self.error:
            return self.error
        if self.exit_code == 0:
            return ""
        said = self.output[-SHOWN_BYTES:].decode("utf-8", "replace")
        return f"exit code {self.exit_code}: {' '.join(said.split()) or 'no output'}"


class OpenclawCommand:
    """Runs `openclaw` commands. Thread-safe; several may run at once.

    `environment` gives the child's environment for a marker that finds its descendants; `is_stopping` ends a
    running call early.
    """

    def __init__(
        self,
        executable: str,
        environment: Callable[[str], Mapping[str, str]],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._executable = executable
        self._environment = environment
        self._is_stopping = is_stopping

    def system_event(self, agent_id: str, text: str, marker: str) -> CallResult:
        """Puts `text` before an agent's main session. It is queued by the Gateway then, not handled.

        Raises:
            SpawnError: the command cannot be started.
        """
        session = ("--session-key", f"agent:{agent_id}:main")
        return self.run(("system", "event", "--mode", "now", *session, "--text", text), SYSTEM_EVENT_SECONDS, marker)

    def ask(self, *arguments: str, marker: str) -> tuple[CallResult, Any]:
        """The result of a question with `--json`, and its document; None when it printed none.

        Raises:
            SpawnError: the command cannot be started.
        """
        result = self.run((*arguments, "--json"), QUESTION_SECONDS, marker, is_complete=_is_document)
        return result, _document(result.output)

    def run(
        self,
        arguments: Sequence[str],
        seconds: float,
        marker: str,
        *,
        is_complete: Callable[[bytes], bool] = lambda _output: False,
    ) -> CallResult:
        """Runs one command for at most `seconds`; it and all it started are gone when this returns.

        Raises:
            SpawnError: the command cannot be started.
        """
        # A file of its own in memory: no pipe that could fill, nothing to clean up.
        output = os.memfd_create("openclaw-answer", os.MFD_CLOEXEC)
        try:
            process = processes.spawn([self._executable, *arguments], self._environment(marker), output)
            return self._see_through(process, output, seconds, marker, is_complete)
        finally:
            os.close(output)

    def _see_through(
        self,
        process: ManagedProcess,
        output: int,
        seconds: float,
        marker: str,
        is_complete: Callable[[bytes], bool],
    ) -> CallResult:
        try:
            error = self._wait(process, output, seconds, is_complete)
            if error is not None:
                processes.stop_family(process, marker, term_grace=TERM_SECONDS)
                # The first thread of a program is gone a moment before the last, and only then it can be reaped.
                process.wait(TERM_SECONDS)
            exit_code = process.reap()
        finally:
            process.close()
        if error is None or error == "":
            return CallResult(exit_code if error is None else 0, _read(output))
        return CallResult(None, _read(output), error)

    def _wait(
        self, process: ManagedProcess, output: int, seconds: float, is_complete: Callable[[bytes], bool]
    ) -> str | None:
        """None when it ended by itself, "" when its answer is complete, else why it is to be stopped."""
        deadline = time.monotonic() + seconds
        while not process.wait(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._is_stopping():
                return "the daemon is stopping"
            if is_complete(_read(output)):
                return ""
            if time.monotonic() >= deadline:
                return f"no end within {seconds:g} s"
        return None


def _read(descriptor: int) -> bytes:
    size = min(os.fstat(descriptor).st_size, MAX_ANSWER_BYTES)
    return os.pread(descriptor, size, 0)


def _is_document(output: bytes) -> bool:
    return _document(output) is not None


def _document(output: bytes) -> Any:
    """The JSON document in what was printed; warnings may stand before it."""
    text = output.decode("utf-8", "replace")
    for opening in ("{", "["):
        start = 0 if text.startswith(opening) else text.find(f"\n{opening}") + 1
        if text[start : start + 1] != opening:
            continue
        try:
            return json.loads(text[start:])
        except ValueError:
            continue
    return None
