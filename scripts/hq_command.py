"""The life of an agent's command: one JSON document on stdout, a few exit codes, nothing of the key anywhere.

0 done (or done before) · 1 the agent or item is unknown, or the service failed · 2 wrong usage or missing
settings (on stderr) · 3 the lease is lost and nothing was changed.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from hq_client import ServiceError
from hq_settings import Settings, UsageError, is_uuid, load_settings

OK, FAILED, USAGE, LEASE_LOST = 0, 1, 2, 3
Document = dict[str, Any]
# Letters and symbols that are drawn as nothing.
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"
# C0 without the end of a line, DEL, C1, the separators, halves of characters, and the marks that turn text around.
STEERING = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class OutputClosedError(Exception):
    """Nobody can read what this command has to say."""


class Stopped(BaseException):
    """The command was told to stop; like KeyboardInterrupt no ordinary handler takes it."""


def run(body: Callable[[Settings], int]) -> NoReturn:
    """Run a command's body with its settings and exit with the code it returns."""
    sys.exit(outcome_of(body))


def outcome_of(body: Callable[[Settings], int]) -> int:
    """The exit code of a body; every expected fault is said in words instead of a traceback."""
    signal.signal(signal.SIGTERM, stop)
    try:
        return body(load_settings(os.environ))
    except UsageError as fault:
        return complain(str(fault), USAGE)
    except ServiceError as fault:
        return say_failure({"error": str(fault), "code": fault.code})
    except OutputClosedError as closed:
        return complain(str(closed), FAILED)
    except KeyboardInterrupt:
        return complain("interrupted", 128 + signal.SIGINT)
    except Stopped:
        return complain("stopped", 128 + signal.SIGTERM)


def stop(_signal_number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that what was begun is undone on the way out."""
    raise Stopped


def say_failure(document: Document) -> int:
    """Print an error document; when even that cannot be read, say it on stderr."""
    try:
        emit(document)
    except OutputClosedError as closed:
        complain(f"{document['error']}; {closed}", FAILED)
    return FAILED


def complain(message: str, code: int) -> int:
    """One line on stderr, and the exit code that goes with it."""
    if sys.stderr is not None:
        print(" ".join(message.split()).encode("ascii", "backslashreplace").decode("ascii"), file=sys.stderr)
    return code


def require_output() -> None:
    """Refuse to begin what has to be printed when stdout is closed from the start."""
    if sys.stdout is None:
        raise OutputClosedError("stdout is closed")


def emit(document: Document) -> None:
    """Print one JSON document in UTF-8 whatever the locale, or raise `OutputClosedError`."""
    require_output()
    text = json_text(document, indent=2) + "\n"
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    except (OSError, ValueError) as error:
        silence_stdout()
        raise OutputClosedError(f"stdout cannot be written: {error}") from None


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON whose letters stay as people write them, while what steers a terminal or a reader is escaped."""
    return steerless(json.dumps(value, ensure_ascii=False, indent=indent))


def steerless(text: str) -> str:
    r"""Text over several lines with every character that steers a terminal, or turns text around, as `\uXXXX`."""
    return STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def silence_stdout() -> None:
    """Keep the interpreter from failing a second time on the same stream while it exits."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)


def item_id(text: str) -> str:
    """An argparse type: the uuid of an inbox item or of a lease."""
    if not is_uuid(text):
        raise argparse.ArgumentTypeError(f"not a uuid: {text!r}")
    return text.lower()


def some_text(text: str) -> str:
    """An argparse type: a text that says something."""
    if is_blank(text):
        raise argparse.ArgumentTypeError("must not be empty or blank")
    return text


def is_blank(text: str) -> bool:
    """Whether a reader sees nothing of it: separators, control and format characters and fillers alone."""
    return all(unicodedata.category(character)[0] in "ZC" or character in FILLERS for character in text)


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """An argparse type: a whole number within bounds."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from None
        if not lowest <= number <= highest:
            raise argparse.ArgumentTypeError(f"{number} is outside {lowest} to {highest}")
        return number

    return read
