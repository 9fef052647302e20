"""The agents of a run as seen from outside: their orders, their log, their processes."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.chaos.evidence import Evidence, LineTail
from tests.support.chaos.schedule import Agent

_START_TOLERANCE: Final = 5.0
_MOST_REMEMBERED: Final = 200_000


@dataclass(frozen=True)
class Child:
    """A process of the log: a woken agent, or what one left behind (`is_stray`). `starter`: the daemon that woke it."""

    pid: int
    at: float
    starter: int
    agent: str
    is_stray: bool


class ChaosAgents:
    """Makes the executable, gives orders, reads what the processes say of themselves."""

    def __init__(self, directory: Path, code: Path, evidence: Evidence) -> None:
        self.path = directory / "openclaw"
        self._evidence = evidence
        self._orders = directory / "openclaw.orders.json"
        self._tail = LineTail(directory / "openclaw.log.jsonl")
        self._children: deque[Child] = deque(maxlen=_MOST_REMEMBERED)
        self._closed: dict[str, int] = {}
        (directory / "openclaw.wakes").mkdir(parents=True)
        _write_executable(self.path, [code / "chaos", code / "dispatcher" / "local"])

    def order(self, agents: Sequence[Agent], rest: Mapping[str, str], cap: int, *, calm: bool) -> None:
        """How wakes go from now on; `calm`: whoever can work does."""
        orders: dict[str, Any] = {"rest": dict(rest), "cap": cap, "agents": {}}
        for agent, neighbour in zip(agents, [*agents[1:], agents[0]], strict=True):
            behaviours = dict(agent.behaviours) if agent.broken or not calm else {"ok": 1.0}
            orders["agents"][agent.slug] = {"behaviours": behaviours, "neighbour": neighbour.slug}
        draft = self._orders.with_suffix(".draft")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(orders))
        draft.replace(self._orders)

    def read_log(self) -> None:
        """Takes in what was logged since the last look, and buries the orphans that came to this process."""
        for line in self._tail.new_lines():
            self._take_in(json.loads(line))
        self._reap_orphans()

    def _take_in(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._children.append(Child(event["pid"], event["at"], event["ppid"], event["agent"], is_stray=False))
            self._evidence.count("children")
        elif kind == "grandchild":
            self._children.append(Child(event["pid"], event["at"], event["starter"], "grandchild", is_stray=True))
        elif kind == "behaviour":
            self._evidence.count(f"behaviour {event['behaviour']}")
        elif kind == "violation":
            self._evidence.violated(event["what"].partition(":")[0], json.dumps(event))
        elif kind == "item":
            self._note_verdict(event)

    def _note_verdict(self, event: dict[str, Any]) -> None:
        verdict = event["verdict"] or {}
        self._evidence.count(f"close {event['outcome']} {verdict.get('code')}")
        if event["outcome"] != "done" or verdict.get("code") != "ok":
            return
        item = event["item_id"]
        self._closed[item] = self._closed.get(item, 0) + 1
        if self._closed[item] > 1:
            self._evidence.violated("an item is finished once", json.dumps(event))

    def living(self) -> list[Child]:
        """Its processes that are still there; forgets those that are not."""
        alive = [child for child in self._children if _is_alive(child)]
        self._children = deque(alive, maxlen=_MOST_REMEMBERED)
        return alive

    def _reap_orphans(self) -> None:
        """A child whose daemon was killed is ours now; nobody else would bury it."""
        me = os.getpid()
        for child in list(self._children):
            with suppress(ChildProcessError, psutil.Error):
                if psutil.Process(child.pid).ppid() == me:
                    os.waitpid(child.pid, os.WNOHANG)

    def kill_all(self) -> int:
        """Ends what is left of them; how many that was."""
        left = self.living()
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child.pid, 9)
        return len(left)


def _is_alive(child: Child) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        is_same = -_START_TOLERANCE < child.at - process.create_time() < _START_TOLERANCE
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False


def age_of(child: Child) -> float:
    """Seconds since it wrote its first line."""
    return time.time() - child.at


def _write_executable(path: Path, places: Sequence[Path]) -> None:
    """`exec` keeps the pid; the program is imported rather than run, so that its compiled form is used."""
    found = [str(place) for place in places]
    program = f"import sys; sys.path += {found!r}; import agent; sys.exit(agent.main({str(path)!r}))"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -I -c {shlex.quote(program)} "$@"\n')
    path.chmod(0o755)
