"""Is the work getting done? Answered from what each loop achieved lately, not from threads being there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, Literal

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK, Clock
from dispatcher.logs import get_logger, log_trouble, redact

log = get_logger(__name__)

Status = Literal["ok", "degraded", "failing"]

# A loop may miss this many of its intervals, and be this much late besides, before it counts as failing.
INTERVALS_ALLOWED: Final = 3
SLACK_SECONDS: Final = 2.0
FAILURES_ALLOWED: Final = 3
# Work on demand that takes this long hangs: every call it makes ends sooner.
STUCK_SECONDS: Final = 60.0


class LoopHealth:
    """What one loop achieved.

    `interval` None: it works on demand; its failures count, and work `at_work` that does not end.
    """

    def __init__(self, name: str, interval: float | None, clock: Clock) -> None:
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._interval = interval
        self._since = clock.monotonic()
        self._last_success: float | None = None
        self._failures = 0
        self._error = ""
        self._at_work: dict[int, float] = {}

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
            self._last_success = self._clock.monotonic()
            self._failures = 0
            self._error = ""

    def failed(self, error: BaseException | str) -> None:
        """One turn of the loop did not."""
        text = redact(str(error) or type(error).__name__)
        with self._lock:
            self._failures += 1
            self._error = text[:300]

    def set_interval(self, interval: float) -> None:
        """The loop turns at another pace from now on; it is measured by that from now on."""
        with self._lock:
            if interval != self._interval:
                self._interval = interval
                self._since = self._clock.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """{"status", "last_success_age_s" (None: never), "failures" (in a row), "error", "busy_s" (0: idle)}."""
        with self._lock:
            now = self._clock.monotonic()
            age = None if self._last_success is None else round(now - self._last_success, 1)
            return {
                "status": self._status(now),
                "last_success_age_s": age,
                "failures": self._failures,
                "error": self._error,
                "busy_s": round(self._busy(now), 1),
            }

    def _status(self, now: float) -> Status:
        if self._is_late(now) or self._busy(now) > STUCK_SECONDS or self._failures >= FAILURES_ALLOWED:
            return "failing"
        return "degraded" if self._failures else "ok"

    def _busy(self, now: float) -> float:
        return now - min(self._at_work.values(), default=now)

    def _is_late(self, now: float) -> bool:
        if self._interval is None:
            return False
        last = max(self._since, self._last_success or self._since)
        return now - last >= INTERVALS_ALLOWED * self._interval + SLACK_SECONDS


class Health:
    """The health of the whole daemon. Thread-safe; a fresh, idle daemon is ok."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loops: dict[str, LoopHealth] = {}
        self._causes: dict[str, str] = {}
        self._observed: Status = "ok"

    def loop(self, name: str, interval: float | None) -> LoopHealth:
        """The loop of that name, made on first use; `interval` in seconds, None for work on demand."""
        with self._lock:
            if name not in self._loops:
                self._loops[name] = LoopHealth(name, interval, self._clock)
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

    def snapshot(self) -> dict[str, Any]:
        """{"status": ok | degraded | failing, "loops": {name: loop}, "causes": [text]}, ready for JSON.

        `causes` names every loop that is not ok, and every cause that was added.
        """
        with self._lock:
            loops = dict(self._loops)
            causes = list(self._causes.values())
        if trouble := log_trouble():
            causes.append(trouble)
        shown = {name: loop.snapshot() for name, loop in loops.items()}
        statuses = [loop["status"] for loop in shown.values()] + ["degraded"] * bool(causes)
        named = [f"{name}: {_complaint(loop)}" for name, loop in shown.items() if loop["status"] != "ok"]
        return {"status": _worst(statuses), "loops": shown, "causes": named + causes}

    def observe(self) -> dict[str, Any]:
        """As `snapshot`, and logs it when the status is another than last time. For one thread."""
        seen = self.snapshot()
        status: Status = seen["status"]
        if status != self._observed:
            tell = log.info if status == "ok" else log.warning
            tell(events.HEALTH_CHANGED, msg=_sentence(status, seen["causes"]), status=status, causes=seen["causes"])
            self._observed = status
        return seen


def _sentence(status: Status, causes: list[str]) -> str:
    return f"Health is {status}" + (f": {'; '.join(causes)}" if causes else "")


def _worst(statuses: list[Status]) -> Status:
    if "failing" in statuses:
        return "failing"
    return "degraded" if "degraded" in statuses else "ok"


def _complaint(loop: dict[str, Any]) -> str:
    if loop["busy_s"] > STUCK_SECONDS:
        return f"stuck for {loop['busy_s']:g} s in one piece of work"
    if loop["failures"]:
        return f"{loop['failures']} failures in a row, last: {loop['error']}"
    age = loop["last_success_age_s"]
    return "has not succeeded yet" if age is None else f"last succeeded {age:g} s ago"
