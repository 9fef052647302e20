#!/usr/bin/env python3
"""Mark a leased inbox item as done.

Exit codes: 0 (done, or done before), 1 (unknown item, service failed), 2 (wrong usage or missing settings,
on stderr), 3 (the lease is lost; nothing was changed).

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import hq_command
from hq_closing import close, closing_arguments


def main() -> None:
    """Close one item as done."""
    arguments = closing_arguments("Mark an inbox item you have leased as done.").parse_args()
    hq_command.run(lambda settings: close(settings, arguments, "close_inbox_item", "done", {"p_outcome": "done"}))


if __name__ == "__main__":
    main()
