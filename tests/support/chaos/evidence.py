"""What the run sees: log lines as they are written, violations as they are found. Thread-safe."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LOG_FIELDS: Final = frozenset({"ts", "level", "daemon", "gateway_id", "tenant_id", "event", "msg"})
MOST_SHOWN: Final = 40


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold: which, when (seconds after the start), and what shows it."""

    at: float
    invariant: str
    evidence: str


class Evidence:
    """Collects violations and counts; tells of each violation at once on stderr, with `context` (seed, schedule)."""

    def __init__(self, context: Callable[[], str]) -> None:
        self.violations: list[Violation] = []
        self.counts: Counter[str] = Counter()
        self.facts: dict[str, str] = {}
        self._context = context
        self._lock = threading.Lock()
        self._started = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def violated(self, invariant: str, evidence: str) -> None:
        """Notes a violation; the first ones are told in full."""
        violation = Violation(round(self.now, 2), invariant, evidence)
        with self._lock:
            self.violations.append(violation)
            is_first = len(self.violations) == 1
            if len(self.violations) <= MOST_SHOWN:
                text = f"VIOLATION at {violation.at} s: {invariant}\n  {evidence}\n"
                sys.stderr.write((self._context() if is_first else "") + text)
                sys.stderr.flush()

    def count(self, what: str, times: int = 1) -> None:
        """Counts something for the summary."""
        with self._lock:
            self.counts[what] += times


class LineTail:
    """The whole lines a file has grown by since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Whole lines only; a line without its end waits."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    @property
    def unfinished(self) -> bytes:
        """What stands after the last line's end."""
        return self._rest


def fault_of_log_line(line: bytes) -> str | None:
    """What is wrong with a line of the daemon's log; None when it is an object with the promised fields."""
    try:
        record = json.loads(line)
    except ValueError:
        return "not JSON"
    if not isinstance(record, dict):
        return "not an object"
    missing = LOG_FIELDS - record.keys()
    return f"without {', '.join(sorted(missing))}" if missing else None


def record_of(line: bytes) -> dict[str, Any]:
    """The record of a line that `fault_of_log_line` has passed."""
    record = json.loads(line)
    assert isinstance(record, dict)
    return record
