"""The two clocks: one to measure with, one to print. What waits takes a `Clock`, so tests can own time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What code that measures or stamps time needs."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        return time.monotonic()

    def now(self) -> datetime:
        """The wall clock, in UTC."""
        return datetime.now(UTC)


SYSTEM_CLOCK: Clock = SystemClock()


def rfc3339_ms(moment: datetime) -> str:
    """`2026-11-30T13:45:00.123Z`: UTC, milliseconds, `Z`. A naive moment is taken as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
