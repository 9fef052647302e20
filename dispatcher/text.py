"""Text from outside on its way to a person: nothing in it may steer the terminal it is read on."""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = r"\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
# The marks Unicode calls Bidi_Control: they show text in another order than it has.
_TURNING: Final = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"

# C0, DEL and C1 steer a terminal, the two separators end a line, lone surrogates cannot be encoded.
CONTROL: Final = re.compile(f"[{_CONTROL}]")
NOT_SHOWN: Final = re.compile(f"[{_CONTROL}{_TURNING}]")


SHORTENED: Final = 60


def shortened(text: str, limit: int = SHORTENED) -> str:
    """`text` in quotes and ASCII, at most `limit` characters of it: a name from outside inside a message."""
    return ascii(text if len(text) <= limit else f"{text[: limit - 3]}...")


def printable(text: str) -> str:
    r"""`text` on one line, as a person may see it: each control character escaped (`\x1b`, `\n`, `\u202e`).

    Blanks of other widths and joiners of emoji stay: they are part of what people write, and steer nothing.
    """
    return NOT_SHOWN.sub(lambda found: ascii(found[0])[1:-1], text)
