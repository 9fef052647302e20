"""Waiting for a condition with a deadline: the only way a test waits."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], deadline: float = 10.0, *, poll: float = 0.005, what: str = "") -> Found:
    """The first truthy answer; after `deadline` seconds an AssertionError names what was missing."""
    end = time.monotonic() + deadline
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline} s: {what or condition}; last answer: {found!r}")
        time.sleep(poll)
