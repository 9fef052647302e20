"""`dispatcher demo`: the whole thing on one machine, from nothing to the first wakes, by the real code path."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.errors import DispatcherError
from dispatcher.text import printable

if TYPE_CHECKING:
    import psycopg

    from dispatcher.local.stack import Stack

COOLDOWN_SECONDS = 3
PATIENCE_SECONDS = 45.0
STOP_SECONDS = 35.0
AGENTS = ("ada", "grace", "linus", "margaret")


def command(
    openclaw: Annotated[
        Path | None, typer.Option("--openclaw", help="A real openclaw instead of the stand-in.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Go on until interrupted, for rows of your own.")] = False,
) -> None:
    """Start an embedded Supabase and the daemon, insert items, and show each wake as it happens."""
    from dispatcher.cli.extras import require_extra
    from dispatcher.cli.local import project_stack

    require_extra("local", "demo")
    directory = Path(tempfile.mkdtemp(prefix="dispatcher-demo-"))
    started = time.monotonic()
    _say("Starting PostgreSQL, PostgREST and Realtime …")
    try:
        with project_stack(directory / "stack") as stack:
            _say(f"Ready after {time.monotonic() - started:.1f} s: {stack.info.api_url}")
            _show(stack, directory, openclaw, keep)
    finally:
        _remove(directory)
    _say("Everything is stopped, nothing is left.")


def _remove(directory: Path) -> None:
    from dispatcher.local.account import remove_data

    remove_data(directory / "stack" / "postgres")  # as root the data lies elsewhere, behind a link
    shutil.rmtree(directory, ignore_errors=True)


def _show(stack: Stack, directory: Path, openclaw: Path | None, keep: bool) -> None:
    executable = openclaw.absolute() if openclaw else _stand_in(stack, directory)
    with _daemon(stack, directory, executable) as daemon, _project(stack) as project:
        daemon.wait_for("daemon.ready")
        daemon.wait_for("realtime.subscribed")
        daemon.wait_for("sweep.finished", times=2)
        _play(daemon, project)
        while keep:
            time.sleep(1)
    _summarise(daemon)


def _stand_in(stack: Stack, directory: Path) -> Path:
    from dispatcher.local.stub import StubAgent

    rest = {"url": stack.info.api_url, "key": stack.info.service_role_key}
    own = {"hq/margaret": {"mode": "exit", "exit_code": 1}}
    return StubAgent(directory / "bin", mode="ok", seconds=0.3, rest=rest, agents=own).path


class Project:
    """The rows a person or an application would write."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        for slug in AGENTS:
            connection.execute(
                "insert into agents (gateway_id, slug, name) select id, %s, %s from gateways where slug = 'local'"
                " on conflict do nothing",
                (slug, slug.title()),
            )

    def item(self, agent: str, summary: str, *, task: uuid.UUID | None = None, **context: str) -> None:
        """One inbox item, in a transaction of its own."""
        self._connection.execute(
            "insert into agent_inbox_items (agent_id, agent_slug, event_type, task_id, summary, context, dedup_key)"
            " select id, slug, %s, %s, %s, %s, %s from agents where slug = %s",
            (
                "task_assignment" if task else "task_comment_mention",
                task,
                summary,
                json.dumps(context),
                f"demo:{uuid.uuid4()}",
                agent,
            ),
        )

    def blocked_task(self, title: str, *blockers: str) -> uuid.UUID:
        """A task with unresolved blockers."""
        task = self._task(title)
        for blocker in blockers:
            self._connection.execute(
                "insert into task_relations (source_task_id, target_task_id, relation_type)"
                " values (%s, %s, 'blocked_by')",
                (task, self._task(blocker)),
            )
        return task

    def _task(self, title: str) -> uuid.UUID:
        row = self._connection.execute("insert into tasks (title) values (%s) returning id", (title,)).fetchone()
        assert row is not None
        task: uuid.UUID = row[0]
        return task


@contextmanager
def _project(stack: Stack) -> Iterator[Project]:
    import psycopg

    with psycopg.connect(stack.info.db_url, autocommit=True) as connection:
        yield Project(connection)


class Watched:
    """The daemon's log, read line by line, told to people, and waited on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="demo-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = _parsed(text)
            if line is None:
                continue
            _tell(line)
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, event: str, times: int = 1, **facts: object) -> list[dict[str, Any]]:
        """The lines of that event with those facts, once there are `times`. Raises when they do not come."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while len(found := self.of(event, **facts)) < times:
                left = deadline - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    raise DispatcherError(f"The daemon did not log {event} {facts or ''} in time.")
                self._changed.wait(min(left, 0.5))
            return found

    def of(self, event: str, **facts: object) -> list[dict[str, Any]]:
        """The lines of that event with those facts, so far."""
        wanted = {"event": event, **facts}
        return [line for line in self.lines if wanted.items() <= line.items()]

    def finish(self) -> int:
        """Stops the daemon as an operator would; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(STOP_SECONDS)
        self._reader.join(5)
        return code


@contextmanager
def _daemon(stack: Stack, directory: Path, executable: Path) -> Iterator[Watched]:
    process = subprocess.Popen(
        [sys.executable, "-m", "dispatcher", "run"],
        env=_environment(stack, directory, executable),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
    )
    watched = Watched(process)
    try:
        yield watched
    finally:
        code = watched.finish()
    if code != 0:
        raise DispatcherError(f"The daemon ended with exit code {code}.")


def _environment(stack: Stack, directory: Path, executable: Path) -> dict[str, str]:
    home = directory / "openclaw"
    home.mkdir(exist_ok=True)
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "SUPABASE_URL": stack.info.api_url,
        "SUPABASE_SERVICE_ROLE_KEY": stack.info.service_role_key,
        "GATEWAY_ID": "local",
        "OPENCLAW_BIN": str(executable),
        "OPENCLAW_HOME": str(home),
        "HEARTBEAT_FILE": str(directory / "heartbeat.json"),
        "WAKE_COOLDOWN": str(COOLDOWN_SECONDS),
    }


def _play(daemon: Watched, project: Project) -> None:
    """Six short scenes; each waits for what it shows."""
    _scene("A new item wakes its agent")
    project.item("ada", "Say hello to the first visitor")
    daemon.wait_for("wake.started", agent="ada")
    daemon.wait_for("wake.ended", agent="ada")

    _scene("Too soon after the last wake: skipped, and woken when the cooldown is over")
    project.item("ada", "One more thing")
    daemon.wait_for("wake.skipped", agent="ada")
    daemon.wait_for("wake.started", times=2, agent="ada")

    _scene("A task that waits for others carries a note")
    task = project.blocked_task("Publish the page", "Design mockups", "API schema review")
    project.item("grace", "Publish the page", task=task)
    daemon.wait_for("wake.started", agent="grace", blockers=2)

    _scene("An item may choose its model")
    project.item("linus", "Think hard about this", model_override="anthropic/claude-opus-4", thinking_override="high")
    daemon.wait_for("wake.started", agent="linus")

    _scene("A failing agent is left alone for longer each time")
    project.item("margaret", "This one will not go well")
    daemon.wait_for("wake.started", agent="margaret")
    daemon.wait_for("wake.backoff", agent="margaret")
    daemon.wait_for("wake.started", times=2, agent="margaret")
    daemon.wait_for("wake.backoff", times=2, agent="margaret")


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return line


def _started(line: Mapping[str, Any]) -> str:
    latency = f"{line['item_age_ms']:.0f} ms after the insert" if line.get("item_age_ms") is not None else ""
    extras = [f"{name}={line[name]}" for name in ("model_override", "thinking_override") if line.get(name)]
    if line.get("blockers"):
        extras.append(f"note: {line['blockers']} unresolved blocker(s)")
    return f"WAKE     {line['agent']:<9} {line['reason']}   [{latency}]" + (f"   {', '.join(extras)}" if extras else "")


_TELLERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "wake.started": _started,
    "wake.skipped": lambda line: f"SKIP     {line['msg']}",
    "wake.ended": lambda line: f"END      {line['msg']}",
    "wake.backoff": lambda line: f"BACKOFF  {line['msg']}",
}


def _tell(line: Mapping[str, Any]) -> None:
    teller = _TELLERS.get(line["event"])
    if teller is not None:
        _say(f"  {printable(teller(line))}")
    elif line["level"] in ("warning", "error"):
        _say(f"  {line['level'].upper():<8} {printable(line['msg'])}")


def _scene(title: str) -> None:
    _say(f"\n{title}")


def _say(text: str) -> None:
    print(text, flush=True)


def _summarise(daemon: Watched) -> None:
    wakes = daemon.of("wake.started")
    by_event = sorted(line["item_age_ms"] for line in wakes if line["path"] == "event")
    median = by_event[len(by_event) // 2] if by_event else float("nan")
    _say(
        f"\n{len(wakes)} wakes of {len({line['agent'] for line in wakes})} agents,"
        f" {len(daemon.of('wake.skipped'))} skipped, {len(daemon.of('wake.backoff'))} backed off;"
        f" insert to start by a hint: median {median:.0f} ms."
    )
