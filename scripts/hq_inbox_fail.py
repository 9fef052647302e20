#!/usr/bin/env python3
"""Mark a leased inbox item as failed; it comes again after a while, as long as it has attempts left.

Exit codes: 0 (failed, or failed before), 1 (unknown item, service failed), 2 (wrong usage or missing
settings, on stderr), 3 (the lease is lost; nothing was changed).

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import hq_command
from hq_closing import close, closing_arguments


def main() -> None:
    """Close one item as failed."""
    parser = closing_arguments("Mark an inbox item you have leased as failed.")
    parser.add_argument("reason", nargs="*", help="what went wrong")
    arguments = parser.parse_args()
    reason = " ".join(arguments.reason).strip()
    if arguments.reason and hq_command.is_blank(reason):
        parser.error("the reason must not be empty or blank; leave it out where there is none")
    extra = {"p_outcome": "failed", "p_reason": reason}
    hq_command.run(lambda settings: close(settings, arguments, "close_inbox_item", "failed", extra))


if __name__ == "__main__":
    main()
