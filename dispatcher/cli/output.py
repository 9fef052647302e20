"""What commands print: one JSON document for programs, a table for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from dispatcher.text import NOT_SHOWN, printable

# More than any table needs: one that does not fill its console is as wide as its content.
UNBOUNDED_WIDTH = 1_000_000_000


def print_json(document: object) -> None:
    """One line of JSON in ASCII, as a terminal may be what reads it; dates, paths and UUIDs become strings."""
    print(json.dumps(document, default=str).replace("\x7f", "\\u007f"))


def shown_json(value: object) -> str:
    r"""JSON for a person: letters as they are written, what steers a terminal as `\uXXXX`."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """One line for a person, whatever the text holds."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table as wide as the terminal, or into a pipe as wide as its content; cells are literal, None is a dash.

    A cell is one line, and no character in it steers the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heading = Text(printable(title), style="table.title") if title else None
    table = Table(title=heading, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else printable(str(cell))) for cell in row))
    if sys.stdout.isatty():
        Console().print(table)
        return
    # Folded over lines an id can be neither copied nor searched for.
    console = Console(width=UNBOUNDED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().split("\n")), end="")
