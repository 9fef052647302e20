"""What agents are told of runs. Pure; a run's payload is never in it."""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

CLIENT: Final = "python3 skills/hq/scripts/agent_workflow_client.py"
MAX_TYPE: Final = 200

_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]+")


def shown_type(workflow_type: str) -> str:
    """A workflow type on one line, bounded: it is data from outside."""
    return _UNSAFE.sub(" ", workflow_type).strip()[:MAX_TYPE]


def notification_text(run_id: UUID, workflow_type: str) -> str:
    """The system event for a run that was dispatched to an agent."""
    return (
        f"[workflow] Run {run_id} ({shown_type(workflow_type)}) is waiting for you. "
        f"Claim it: {CLIENT} claim {run_id} --session <your session id> "
        "(it prints the input; send a heartbeat every 5 minutes, then complete or fail it)."
    )


def respawn_message(run_id: UUID, workflow_type: str, session_id: str) -> str:
    """The message of the one new process an orphaned run may have."""
    return (
        f"[workflow] Resume run {run_id} ({shown_type(workflow_type)}): the session that worked on it is gone.\n\n"
        f"It is claimed for you already, in session {session_id}:\n"
        f"1. {CLIENT} heartbeat {run_id} --session {session_id} (it prints the run with its input)\n"
        "2. Find out what is done already, then do the rest; send that heartbeat every 5 minutes\n"
        f"3. {CLIENT} complete {run_id} --session {session_id} --output JSON, or fail it with --error TEXT"
    )
