"""Switches that make the way to PostgREST misbehave as networks, proxies and overloaded projects do."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A reply that PostgREST never gave."""

    status: int
    body: object
    raw: str = ""


@dataclass(frozen=True)
class Fault:
    """What is to happen to one request."""

    delay: float = 0.0
    cut: bool = False
    answer: Answer | None = None
    lose_reply: bool = False


@dataclass(slots=True)
class RestFaults:
    """State of the switches; counters count down by themselves, -1 means every request.

    | switch         | value        | what it does                                                           |
    |----------------|--------------|------------------------------------------------------------------------|
    | `match`        | text         | only requests whose path holds this text are touched; "" = all         |
    | `delay`        | seconds      | every request waits this long before it is passed on                   |
    | `cut`          | int          | the next N connections break before the request is passed on           |
    | `lose_replies` | int          | the next N requests are carried out, then the connection breaks        |
    | `fail`         | int          | the next N requests are answered with `status` and `body`              |
    | `status`       | int          | HTTP status for `fail`                                                 |
    | `body`         | any JSON     | body for `fail`; null = a gateway's error page in JSON                 |
    | `raw`          | text         | what `fail` sends as JSON in place of `body`, be it JSON or not        |
    | `down_for`     | seconds      | every connection breaks for so long (ignores `match`)                  |
    """

    match: str = ""
    delay: float = 0.0
    cut: int = 0
    lose_replies: int = 0
    fail: int = 0
    status: int = 503
    body: Any = None
    raw: str = ""
    down_for: float = 0.0
    _down_until: float = 0.0

    def update(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Set switches; returns them all. A wrong name or value is a ValueError and changes nothing."""
        for name, value in changes.items():
            _check(name, value)
        for name, value in changes.items():
            setattr(self, name, value)
        if "down_for" in changes:
            self._down_until = time.monotonic() + self.down_for
        return self.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """All switches as they stand; `down_for` is the time left."""
        state = {name: getattr(self, name) for name in _DEFAULTS}
        return state | {"down_for": max(0.0, round(self._down_until - time.monotonic(), 3))}

    def clear(self) -> None:
        """Every switch back to its default."""
        self.update(_DEFAULTS)

    @property
    def idle(self) -> bool:
        """Whether no request would be touched."""
        switched_on = self.delay or self.cut or self.lose_replies or self.fail
        return not switched_on and time.monotonic() >= self._down_until

    def take(self, path: str) -> Fault:
        """What happens to the request at hand; counts down what it uses up."""
        if time.monotonic() < self._down_until:
            return Fault(cut=True)
        if self.match not in path:
            return Fault()
        if self._count_down("cut"):
            return Fault(delay=self.delay, cut=True)
        if self._count_down("fail"):
            return Fault(delay=self.delay, answer=Answer(self.status, self._body(), self.raw))
        return Fault(delay=self.delay, lose_reply=self._count_down("lose_replies"))

    def _body(self) -> object:
        return {"message": "Service unavailable"} if self.body is None else self.body

    def _count_down(self, name: str) -> bool:
        left: int = getattr(self, name)
        if left > 0:
            setattr(self, name, left - 1)
        return left != 0


_DEFAULTS: Mapping[str, Any] = {
    entry.name: entry.default for entry in fields(RestFaults) if not entry.name.startswith("_")
}


def _check(name: str, value: object) -> None:
    if name not in _DEFAULTS:
        raise ValueError(f"unknown fault {name!r}; known: {', '.join(_DEFAULTS)}")
    default = _DEFAULTS[name]
    kinds = (int, float) if isinstance(default, float) else type(default)
    if default is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
        raise ValueError(f"fault {name!r} does not take {value!r}")
