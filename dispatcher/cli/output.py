"""What commands print: one JSON document for programs, a table for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

UNWRAPPED_WIDTH = 200


def print_json(document: object) -> None:
    """One JSON document on one line; dates, paths and UUIDs become strings."""
    print(json.dumps(document, ensure_ascii=False, default=str))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """A table as wide as the terminal, unwrapped into a pipe; cells are literal, None is a dash."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else UNWRAPPED_WIDTH).print(table)
