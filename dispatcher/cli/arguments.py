"""What the commands refuse as wrong usage (exit 2) before the database is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer

from dispatcher.agents.registry import resolve_id
from dispatcher.errors import InvalidAgentId

# What a column of type integer holds.
MAX_INTEGER: Final = 2**31 - 1
# As the agents' command bounds what it reports.
MAX_TOKENS: Final = 10**15
# As `set_budget` bounds it.
MAX_USD: Final = 99_999_999
# Longer is a slip of the keyboard, and there is no date beyond the year 9999 to keep a run back until.
MAX_DELAY_SECONDS: Final = 365 * 86_400


def told_agent(slug: str | None) -> str | None:
    """An option's callback: an agent's slug, without blanks around it, that OpenClaw can be told of.

    Raises:
        typer.BadParameter: no notification would ever reach it.
    """
    if slug is None:
        return None
    try:
        resolve_id((), None, slug.strip())
    except InvalidAgentId as error:
        raise typer.BadParameter(str(error)) from error
    return slug.strip()


def one_of(choices: Sequence[str]) -> Callable[[str | None], str | None]:
    """An option's callback: one of these words, where one is given."""

    def check(word: str | None) -> str | None:
        if word is not None and word not in choices:
            raise typer.BadParameter(f"{word!r} is none of {', '.join(choices)}")
        return word

    return check


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object an option gives, as the database will keep it.

    Raises:
        typer.BadParameter: it is none, or holds what would be changed on the way into the database.
    """
    try:
        value = json.loads(text, parse_constant=_number, parse_float=_number)
        nul = _holds_nul(value)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from error
    except RecursionError as error:
        raise typer.BadParameter("nested too deeply", param_hint=option) from error
    if not isinstance(value, dict):
        raise typer.BadParameter("must be a JSON object", param_hint=option)
    if nul:
        raise typer.BadParameter("holds the character \\u0000, which no database keeps", param_hint=option)
    return value


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number JSON knows, or too large")
    return number


def _holds_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\x00" in value
    if isinstance(value, dict):
        return any(_holds_nul(part) for part in (*value.keys(), *value.values()))
    return isinstance(value, list) and any(map(_holds_nul, value))
