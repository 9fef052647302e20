#!/usr/bin/env python3
"""Hand a leased inbox item to a human: its task is blocked, the operator notified, the item closed.

Exit codes: 0 (escalated, or escalated before), 1 (unknown item, service failed), 2 (wrong usage or missing
settings, on stderr), 3 (the lease is lost; nothing was changed).

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import hq_command
from hq_closing import close, closing_arguments


def main() -> None:
    """Close one item as escalated."""
    parser = closing_arguments("Hand an inbox item you have leased to a human.")
    parser.add_argument("reason", nargs="+", help="what a human has to decide or mend")
    arguments = parser.parse_args()
    reason = " ".join(arguments.reason).strip()
    if hq_command.is_blank(reason):
        parser.error("the reason must not be empty or blank: a human reads it")
    extra = {"p_reason": reason}
    hq_command.run(lambda settings: close(settings, arguments, "escalate_inbox_item", "escalated", extra))


if __name__ == "__main__":
    main()
