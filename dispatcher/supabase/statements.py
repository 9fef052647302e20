"""Splits a SQL script where psql would: not in quotes, dollar quotes, comments or `begin atomic` bodies."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# One token at a time; whatever none of these begins with is a single character of no interest.
_TOKEN = re.compile(
    r"""
      (?P<line_comment>--[^\n]*)
    | (?P<block_comment>/\*)
    | (?P<escape_string>\b[eE]'(?:[^'\\]|\\.|'')*')
    | (?P<string>'(?:[^']|'')*')
    | (?P<identifier>"(?:[^"]|"")*")
    | (?P<dollar>\$(?P<tag>[A-Za-z_\x80-\uffff][\w\x80-\uffff]*)?\$)
    | (?P<word>[A-Za-z_\x80-\uffff][\w$\x80-\uffff]*)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<end>;)
    | (?P<space>\s+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_EDGE = re.compile(r"/\*|\*/")
_ROUTINE = re.compile(r"create\s+(or\s+replace\s+)?(function|procedure)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Statement:
    """One statement without its semicolon; `line` and `column` (from 1) say where it begins in the script."""

    text: str
    line: int
    column: int

    def locate(self, offset: int) -> tuple[int, int]:
        """Line and column in the script of the character at `offset` (from 0) of this statement."""
        before = self.text[:offset]
        newlines = before.count("\n")
        if not newlines:
            return self.line, self.column + offset
        return self.line + newlines, offset - before.rfind("\n")


def split_statements(script: str) -> list[Statement]:
    """The statements of a script in order; empty ones and comments outside statements are left out."""
    return list(_statements(script))


def _statements(script: str) -> Iterator[Statement]:
    begin: int | None = None
    depth = blocks = position = 0
    while position < len(script):
        kind, stop = _next_token(script, position)
        if kind == "end" and depth == 0 and blocks == 0:
            if begin is not None:
                yield _statement(script, begin, position)
            begin = None
        elif kind not in {"space", "line_comment", "block_comment", "end"} and begin is None:
            begin = position
        depth += {"open": 1, "close": -1}.get(kind, 0)
        if kind == "word" and begin is not None:
            blocks = _blocks_after(script[position:stop].lower(), script[begin:position], blocks)
        position = stop
    if begin is not None:
        yield _statement(script, begin, len(script))


def _blocks_after(word: str, before: str, blocks: int) -> int:
    """How many `begin atomic … end` bodies, and `case … end` in them, are open after this word."""
    if word == "atomic" and re.search(r"\bbegin\s+$", before, re.IGNORECASE) and _ROUTINE.match(before):
        return blocks + 1
    if blocks and word == "case":
        return blocks + 1
    return blocks - 1 if blocks and word == "end" else blocks


def _next_token(script: str, position: int) -> tuple[str, int]:
    """The kind of the token at `position`, and where it stops."""
    match = _TOKEN.match(script, position)
    assert match is not None, "every character is a token"
    if match["dollar"]:
        return "string", _after(script, match["dollar"], match.end())
    kind = match.lastgroup or "other"
    if kind == "block_comment":
        return kind, _after_comment(script, match.end())
    return kind, match.end()


def _after(script: str, delimiter: str, position: int) -> int:
    found = script.find(delimiter, position)
    return len(script) if found < 0 else found + len(delimiter)


def _after_comment(script: str, position: int) -> int:
    """Block comments nest in PostgreSQL."""
    depth = 1
    for edge in _COMMENT_EDGE.finditer(script, position):
        depth += 1 if edge.group() == "/*" else -1
        if depth == 0:
            return edge.end()
    return len(script)


def _statement(script: str, begin: int, end: int) -> Statement:
    line = script.count("\n", 0, begin) + 1
    column = begin - (script.rfind("\n", 0, begin) + 1) + 1
    return Statement(script[begin:end].rstrip(), line, column)
