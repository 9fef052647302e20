"""Is the work getting done, and does the process still turn? Answered from what each loop did lately.

Two questions, because their answers call for different acts. `status` is about the work: an outage of Supabase makes it
`failing`, and a restart would mend nothing. `live` is about the process alone: a loop that stands still makes it False,
and only a restart helps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Literal

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK, Clock
from dispatcher.logs import get_logger, log_trouble, redact

log = get_logger(__name__)

Status = Literal["starting", "ok", "degraded", "failing"]

# A loop may miss this many of its intervals, and be this much late besides, before it counts as failing.
INTERVALS_ALLOWED: Final = 3
SLACK_SECONDS: Final = 2.0
FAILURES_ALLOWED: Final = 3
# Work on demand that takes this long hangs: every call it makes ends sooner.
STUCK_SECONDS: Final = 60.0
# One turn may have many calls that each run into their time-out; what takes this long beyond its interval stands still.
STANDSTILL_SECONDS: Final = 300.0


class LoopHealth:
    """What one loop achieved.

    `interval` None: it works on demand; its failures count, and work `at_work` that does not end.
    `standstill`: seconds after which work that does not end, or a turn that does not come, is a fault of the process.
    """

    def __init__(self, name: str, interval: float | None, clock: Clock, standstill: float = STANDSTILL_SECONDS) -> None:
        self.name = name
        self._clock = clock
        self._standstill = standstill
        self._lock = threading.Lock()
        self._interval = interval
        self._since = clock.monotonic()
        self._last_success: float | None = None
        self._failures = 0
        self._error = ""
        self._at_work: dict[int, float] = {}
        self._turned_at = self._since
        self._turn_began: float | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """While entered, the loop is in one turn, which may take long, but has to end."""
        with self._lock:
            self._turn_began = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._turn_began = None
                self._turned_at = self._clock.monotonic()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """While entered, this thread is at one piece of work."""
        me = threading.get_ident()
        with self._lock:
            self._at_work[me] = self._clock.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._at_work.pop(me, None)

    def succeeded(self) -> None:
        """One turn of the loop did its job."""
        with self._lock:
            self._last_success = self._turned_at = self._clock.monotonic()
            self._failures = 0
            self._error = ""

    def failed(self, error: BaseException | str) -> None:
        """One turn of the loop did not."""
        text = redact(str(error) or type(error).__name__)
        with self._lock:
            self._turned_at = self._clock.monotonic()
            self._failures += 1
            self._error = text[:300]

    def set_interval(self, interval: float) -> None:
        """The loop turns at another pace from now on; it is measured by that from now on."""
        with self._lock:
            if interval != self._interval:
                self._interval = interval
                self._since = self._turned_at = self._clock.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """What it did lately, ready for JSON.

        {"status", "live", "last_success_age_s" (None: never), "failures" (in a row), "error", "busy_s" (0: idle)}.
        """
        with self._lock:
            now = self._clock.monotonic()
            age = None if self._last_success is None else round(now - self._last_success, 1)
            return {
                "status": self._status(now),
                "live": self._is_live(now),
                "last_success_age_s": age,
                "failures": self._failures,
                "error": self._error,
                "busy_s": round(self._busy(now), 1),
            }

    def _status(self, now: float) -> Status:
        if self._is_late(now) or self._busy(now) > STUCK_SECONDS or self._failures >= FAILURES_ALLOWED:
            return "failing"
        if not self._is_live(now):
            return "failing"
        return "degraded" if self._failures else "ok"

    def _busy(self, now: float) -> float:
        return now - min(self._at_work.values(), default=now)

    def _is_live(self, now: float) -> bool:
        if self._busy(now) > self._standstill:
            return False
        if self._turn_began is not None:
            return now - self._turn_began <= self._standstill
        return self._interval is None or now - self._turned_at <= INTERVALS_ALLOWED * self._interval + self._standstill

    def _is_late(self, now: float) -> bool:
        if self._interval is None:
            return False
        last = max(self._since, self._last_success or self._since)
        return now - last >= INTERVALS_ALLOWED * self._interval + SLACK_SECONDS


class Health:
    """The health of the whole daemon. Thread-safe; idle and with nothing to wait for it is ok.

    `standstill`: see `LoopHealth`.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK, *, standstill: float = STANDSTILL_SECONDS) -> None:
        self._clock = clock
        self._standstill = standstill
        self._lock = threading.Lock()
        self._loops: dict[str, LoopHealth] = {}
        self._causes: dict[str, str] = {}
        self._awaited: dict[str, str] = {}
        self._observed: Status = "ok"

    def loop(self, name: str, interval: float | None) -> LoopHealth:
        """The loop of that name, made on first use; `interval` in seconds, None for work on demand."""
        with self._lock:
            if name not in self._loops:
                self._loops[name] = LoopHealth(name, interval, self._clock, self._standstill)
            return self._loops[name]

    def add_cause(self, name: str, text: str) -> bool:
        """Work goes on, but less well, because of `text`. True when this is news."""
        with self._lock:
            is_news = name not in self._causes
            self._causes[name] = redact(text)[:300]
            return is_news

    def clear_cause(self, name: str) -> bool:
        """The cause of that name is gone. True when it was there."""
        with self._lock:
            return self._causes.pop(name, None) is not None

    def await_first(self, name: str, text: str) -> None:
        """The daemon is starting until `has_come(name)`; `text` says what it waits for."""
        with self._lock:
            self._awaited[name] = text
            self._observed = "starting"

    def has_come(self, name: str) -> None:
        """What was awaited has come; for ever."""
        with self._lock:
            self._awaited.pop(name, None)

    def snapshot(self) -> dict[str, Any]:
        """What is well and what is not, ready for JSON.

        {"status": starting | ok | degraded | failing, "live": bool, "loops": {name: loop}, "causes": [text]}.
        `causes` names every loop that is not ok, what is still awaited, and every cause that was added.
        """
        with self._lock:
            loops = dict(self._loops)
            causes = list(self._causes.values())
            awaited = list(self._awaited.values())
        if trouble := log_trouble():
            causes.append(trouble)
        shown = {name: loop.snapshot() for name, loop in loops.items()}
        statuses = [loop["status"] for loop in shown.values()] + ["degraded"] * bool(causes)
        statuses += ["starting"] * bool(awaited)
        named = [f"{name}: {_complaint(loop)}" for name, loop in shown.items() if loop["status"] != "ok"]
        is_live = all(loop["live"] for loop in shown.values())
        return {"status": _worst(statuses), "live": is_live, "loops": shown, "causes": named + awaited + causes}

    def observe(self) -> dict[str, Any]:
        """As `snapshot`, and logs it when the status is another than last time. For one thread."""
        seen = self.snapshot()
        status: Status = seen["status"]
        if status != self._observed:
            tell = log.info if status in {"ok", "starting"} else log.warning
            tell(events.HEALTH_CHANGED, msg=_sentence(status, seen["causes"]), status=status, causes=seen["causes"])
            self._observed = status
        return seen


def _sentence(status: Status, causes: list[str]) -> str:
    return f"Health is {status}" + (f": {'; '.join(causes)}" if causes else "")


def _worst(statuses: list[Status]) -> Status:
    order: tuple[Status, ...] = ("failing", "starting", "degraded")
    return next((status for status in order if status in statuses), "ok")


def _complaint(loop: dict[str, Any]) -> str:
    if loop["busy_s"] > STUCK_SECONDS:
        return f"stuck for {loop['busy_s']:g} s in one piece of work"
    if loop["failures"]:
        return f"{loop['failures']} failures in a row, last: {loop['error']}"
    if not loop["live"]:
        return "stands still"
    age = loop["last_success_age_s"]
    return "has not succeeded yet" if age is None else f"last succeeded {age:g} s ago"
