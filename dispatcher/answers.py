"""Reads what a function of the database answered. Here alone is found out that an answer has another shape than agreed.

A row may hold any value a column can: infinite times, numbers no process id can be. What is unknowable reads as None
and what is absurdly large as the bound, so that no value can end a thread that counts or waits with it. What is not of
the agreed kind at all raises `MalformedAnswer`, which names the function and the place: one failed call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from dispatcher.errors import MalformedAnswer

# Ten years: longer than any wait, and far below what a lock, a poll or a date can take.
LONGEST_SECONDS: Final = 315_360_000.0
LARGEST_COUNT: Final = 2**63 - 1
LARGEST_PID: Final = 2**31 - 1
_SHOWN: Final = 60


def malformed(function: str, fault: str) -> MalformedAnswer:
    """The error for an answer of `function` that cannot be read, because of `fault`."""
    return MalformedAnswer(f"{function}: malformed answer: {fault}", retryable=True)


def list_of(function: str, value: object, place: str = "the answer") -> list[Any]:
    """`value` as a list. Raises MalformedAnswer."""
    if isinstance(value, list):
        return value
    raise malformed(function, f"{place} is {_kind(value)}, not a list")


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON object that `function` answered, or one inside its answer at `place`, read field by field.

    Each method raises MalformedAnswer where the field is missing (those `_or_none`: reads None) or of another kind.
    """

    function: str
    fields: Mapping[str, Any]
    place: str = ""

    @classmethod
    def of(cls, function: str, value: object, place: str = "") -> Answer:
        """`value` as an object. Raises MalformedAnswer."""
        if isinstance(value, Mapping):
            return cls(function, value, place)
        raise malformed(function, f"{place or 'the answer'} is {_kind(value)}, not an object")

    def fault(self, name: str, text: str) -> MalformedAnswer:
        """The error for a field; `text` says what is wrong with it."""
        return malformed(self.function, f"{self._where(name)} {text}")

    def value(self, name: str) -> Any:
        """Whatever the field holds, unread; None when it is missing."""
        return self.fields.get(name)

    def flag(self, name: str) -> bool:
        value = self.require(name)
        if isinstance(value, bool):
            return value
        raise self.fault(name, f"is {_kind(value)}, not true or false")

    def text(self, name: str) -> str:
        value = self.require(name)
        if isinstance(value, str):
            return value
        raise self.fault(name, f"is {_kind(value)}, not a text")

    def text_or_none(self, name: str) -> str | None:
        return None if self.fields.get(name) is None else self.text(name)

    def uuid(self, name: str) -> UUID:
        return self._uuid(name, self.require(name))

    def uuid_or_none(self, name: str) -> UUID | None:
        return None if self.fields.get(name) is None else self.uuid(name)

    def uuids(self, name: str) -> tuple[UUID, ...]:
        return tuple(self._uuid(name, value) for value in self.list(name))

    def list(self, name: str) -> list[Any]:
        return list_of(self.function, self.require(name), self._where(name))

    def part(self, name: str) -> Answer:
        """The object in that field."""
        return Answer.of(self.function, self.require(name), self._where(name))

    def parts(self, name: str) -> tuple[Answer, ...]:
        """The objects of the list in that field."""
        where = self._where(name)
        return tuple(
            Answer.of(self.function, value, f"{where}[{place}]") for place, value in enumerate(self.list(name))
        )

    def seconds_or_none(self, name: str) -> float | None:
        """A time in seconds, within `LONGEST_SECONDS` either way; None when it is infinite: no known time."""
        number = self._number_or_none(name)
        if number is None or not math.isfinite(number):
            return None
        return max(-LONGEST_SECONDS, min(LONGEST_SECONDS, number))

    def count(self, name: str, default: int = 0) -> int:
        """A whole number of 0 to `LARGEST_COUNT`; `default` when the field is missing, NULL or not a number (NaN)."""
        number = self._number_or_none(name)
        if number is None or math.isnan(number):
            return default
        return int(max(0.0, number)) if number < LARGEST_COUNT else LARGEST_COUNT

    def count_or_none(self, name: str) -> int | None:
        return None if self.fields.get(name) is None else self.count(name)

    def pid_or_none(self, name: str) -> int | None:
        """A process id; None for a number that is none."""
        number = self._number_or_none(name)
        return int(number) if number is not None and 1 <= number <= LARGEST_PID else None

    def _number_or_none(self, name: str) -> float | None:
        """The field as a number. PostgreSQL writes what JSON has no number for as text: "Infinity", "NaN"."""
        value = self.fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self.fault(name, f"is {_kind(value)}, not a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf if int(value) > 0 else -math.inf
        except ValueError:
            raise self.fault(name, f"is {_kind(value)}, not a number") from None

    def _uuid(self, name: str, value: object) -> UUID:
        try:
            return UUID(value if isinstance(value, str) else "")
        except ValueError:
            raise self.fault(name, f"is {_kind(value)}, not a UUID") from None

    def require(self, name: str) -> Any:
        """Whatever the field holds, unread."""
        if name not in self.fields:
            raise self.fault(name, "is missing")
        return self.fields[name]

    def _where(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name


def _kind(value: object) -> str:
    """What a value is, for a message: short whatever it holds."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return f"the text {value[:_SHOWN]!a}"
    return "a list" if isinstance(value, list) else "an object"
