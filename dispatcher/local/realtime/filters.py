"""Filters of a postgres_changes entry: `column=operator.value`, comma for AND, `not.` before any operator."""

from dataclasses import dataclass

from dispatcher.local.realtime import elixir

OPERATORS = frozenset(
    ("eq", "neq", "lt", "lte", "gt", "gte", "in", "like", "ilike", "is", "match", "imatch", "isdistinct")
)
_MOST_IN_VALUES = 100


class FilterRefused(Exception):  # noqa: N818 - named for what happened, as in dispatcher.errors
    """Carries the text that the client gets in its system message."""


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition on one column. `value` is text; for `in` it is `values` that counts."""

    column: str
    operator: str
    value: str
    negated: bool = False
    values: tuple[str, ...] = ()

    def inspected(self) -> tuple[str, str, str, bool]:
        """As it appears in the real server's error messages."""
        return (self.column, self.operator, self.value, self.negated)


def parse(text: str) -> tuple[Filter, ...]:
    """All conditions of a filter. Raises `FilterRefused`."""
    segments = _split(text)
    if any(not segment.strip() for segment in segments):
        raise _refusal("filter must not contain empty segments (check for extra commas)")
    return tuple(_parse_one(segment) for segment in segments)


def _refusal(words: str) -> FilterRefused:
    return FilterRefused(f"Error parsing `filter` params: {words}")


def _split(text: str) -> list[str]:
    """At commas that stand neither in double quotes nor in parentheses."""
    segments, current, depth, quoted, escaped = [], "", 0, False, False
    for character in text:
        if character == "," and not quoted and depth == 0:
            segments.append(current)
            current = ""
            continue
        current += character
        if escaped:
            escaped = False
        elif character == "\\" and quoted:
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth = max(0, depth + {"(": 1, ")": -1}.get(character, 0))
    return [*segments, current]


def _parse_one(segment: str) -> Filter:
    column, separator, rest = segment.partition("=")
    if not separator:
        raise _refusal(elixir.inspect([segment]))
    negated = rest.startswith("not.")
    parts = rest.removeprefix("not.").split(".", 1)
    if len(parts) != 2 or parts[0] not in OPERATORS:
        raise _refusal(elixir.inspect(parts))
    if parts[0] == "in":
        return _membership(column, parts[1], negated)
    return Filter(column, parts[0], _unquoted(parts[1]), negated)


def _membership(column: str, value: str, negated: bool) -> Filter:
    if not (value.startswith("(") and value.endswith(")")):
        raise _refusal("`in` filter value must be wrapped by parentheses")
    values = tuple(_unquoted(item) for item in _split(value[1:-1]))
    if len(values) > _MOST_IN_VALUES:
        raise _refusal(f"`in` filter supports at most {_MOST_IN_VALUES} values")
    return Filter(column, "in", "{" + ",".join(values) + "}", negated, values)


def _unquoted(value: str) -> str:
    if len(value) < 2 or not (value.startswith('"') and value.endswith('"')):
        return value
    return value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
