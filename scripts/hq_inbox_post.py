#!/usr/bin/env python3
"""Hand work to another agent: put an item into its inbox.

Called again with the same arguments within the same wake it posts nothing new and prints the same id, as long
as that item is open. Once the recipient has closed it, the same call is a new request.

Exit codes: 0 (posted, or posted before), 1 (unknown agent, refused, service failed), 2 (wrong usage, a task that is
not there, or missing settings, on stderr).

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import argparse
import json
import uuid

import hq_command
from hq_client import HqClient
from hq_command import Document
from hq_settings import Settings, UsageError

REFUSALS = {
    "unknown_agent": "this agent is not known to HQ",
    "unknown_recipient": "no agent with this slug to post to",
    "self_handoff_unmarked": "a post to yourself wakes you again: add --self-handoff if that is meant",
}


def main() -> None:
    """Post one item."""
    arguments = read_arguments()
    hq_command.run(lambda settings: post(settings, arguments))


def read_arguments() -> argparse.Namespace:
    """The command line; argparse exits with 2 on what it does not know."""
    parser = argparse.ArgumentParser(description="Hand work to another agent: put an item into its inbox.")
    parser.add_argument(
        "--to", required=True, type=hq_command.some_text, metavar="SLUG", help="the agent that is to do it"
    )
    parser.add_argument("--summary", required=True, type=hq_command.some_text, help="what is to be done, in one line")
    parser.add_argument(
        "--event-type",
        default="task_assignment",
        type=hq_command.some_text,
        help="kind of item (default task_assignment)",
    )
    parser.add_argument("--task-id", type=hq_command.item_id, help="the task it is about")
    parser.add_argument("--context", type=json_object, default={}, metavar="JSON", help="more facts, a JSON object")
    parser.add_argument(
        "--request-key",
        type=hq_command.some_text,
        help="name of this request: the same name is the same item, in any wake and whatever became of it",
    )
    parser.add_argument("--self-handoff", action="store_true", help="allow a post to yourself")
    return parser.parse_args()


def json_object(text: str) -> Document:
    """An argparse type: a JSON object."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return document


def post(settings: Settings, arguments: argparse.Namespace) -> int:
    """Post and print the item's id, or why not. Raises UsageError for a task that is not there."""
    answer: Document = HqClient(settings).call("post_inbox_item", post_params(settings, arguments))
    if answer["applied"]:
        hq_command.emit(posted_document(settings, arguments, answer))
        return hq_command.OK
    if answer["code"] == "unknown_task":
        raise UsageError(f"{answer['detail']} (--task-id, or task_id of --context). Nothing was posted.")
    message = REFUSALS.get(answer["code"], answer.get("detail") or "HQ refused the post")
    hq_command.emit({"error": message, "code": answer["code"], "agent": settings.agent, "to": arguments.to})
    return hq_command.FAILED


def post_params(settings: Settings, arguments: argparse.Namespace) -> Document:
    """The arguments of HQ's function."""
    context = dict(arguments.context)
    if arguments.task_id:
        context["task_id"] = arguments.task_id
    if arguments.self_handoff:
        context["self_handoff"] = True
    return {
        "p_tenant_id": settings.tenant_id,
        "p_from_agent_slug": settings.agent,
        "p_to_agent_slug": arguments.to,
        "p_event_type": arguments.event_type,
        "p_summary": arguments.summary,
        "p_context": context,
        "p_request_key": arguments.request_key,
        # One run of this command is one request: when its answer is lost and it asks again, that is known by this.
        "p_post_id": str(uuid.uuid4()),
        "p_wake_id": settings.wake_id,
    }


def posted_document(settings: Settings, arguments: argparse.Namespace, answer: Document) -> Document:
    """What the agent reads after a post that holds."""
    return {
        "agent": settings.agent,
        "to": arguments.to,
        "inbox_item_id": answer["inbox_item_id"],
        "chain_depth": answer["chain_depth"],
        "repeated": answer["code"] == "already",
    }


if __name__ == "__main__":
    main()
