"""Makes a stand-in for `openclaw` in a directory, gives it orders, reads what it logged."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_PROGRAM = Path(__file__).with_name("stub_agent.py")
# Older kernels cut an interpreter line off after this many bytes.
_LONGEST_INTERPRETER_LINE = 120
# Between a process's start as the kernel counts it and the first line it logs.
_START_TOLERANCE = 5.0


class StubAgent:
    """An executable for `OPENCLAW_BIN`. Orders may change between wakes; see `stub_agent.py` for all of them.

    Args:
        directory: made when absent; executable, orders and log lie in it.
        orders: the first orders; without any it only logs and ends well.
    """

    def __init__(self, directory: Path, **orders: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "openclaw"
        self.log = directory / "openclaw.log.jsonl"
        self._orders = directory / "openclaw.orders.json"
        self.order(**orders)
        _write_executable(self.path)

    def order(self, **orders: object) -> None:
        """Replace the orders; wakes that began earlier keep theirs. Kept private: they may hold a key."""
        draft = self._orders.with_suffix(".draft")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(orders))
        draft.replace(self._orders)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines logged so far, of one kind (start, item, grandchild, stdin, end) or all."""
        if not self.log.exists():
            return []
        lines = (json.loads(line) for line in self.log.read_text().splitlines())
        return [line for line in lines if kind in {None, line["event"]}]

    def calls(self) -> list[dict[str, Any]]:
        """The wakes so far: argv, env, pid, pgid, sid, ppid, stdin, at (seconds since 1970)."""
        return self.events("start")

    def living(self) -> list[psutil.Process]:
        """Its processes, and their children, that are still there."""
        return [process for event in self.events() for process in _living(event)]

    def kill_all(self) -> None:
        """End whatever is left of it, also what had no time to log its start."""
        for process in [*self.living(), *self._unlogged()]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def _unlogged(self) -> Iterator[psutil.Process]:
        """The processes that run its executable, by the process table."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.path) in (process.info["cmdline"] or ()):
                yield process


def _living(event: dict[str, Any]) -> Iterator[psutil.Process]:
    """The process that logged this line, unless its id has since gone to another."""
    if event["event"] not in {"start", "grandchild"}:
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(event["pid"])
        ours = abs(process.create_time() - event["at"]) < _START_TOLERANCE
        if ours and process.status() != psutil.STATUS_ZOMBIE:
            yield process


def _write_executable(path: Path) -> None:
    """Written beside and moved: a file that some process still holds open for writing cannot be executed."""
    draft = path.with_suffix(".draft")
    draft.write_text(_executable_text(path))
    draft.chmod(0o755)
    draft.replace(path)


def _executable_text(path: Path) -> str:
    """The program is imported rather than copied, so that its compiled form is used."""
    body = (
        "import sys\n"
        f"sys.path.append({str(_PROGRAM.parent)!r})\n"
        "import stub_agent\n"
        f"sys.exit(stub_agent.main({str(path)!r}))\n"
    )
    interpreter = f"#!{sys.executable} -SI"
    if len(os.fsencode(interpreter)) <= _LONGEST_INTERPRETER_LINE and " " not in sys.executable:
        return f"{interpreter}\n{body}"
    return f"#!/bin/sh\n''''exec '{sys.executable}' -S -I \"$0\" \"$@\" #'''\n{body}"
