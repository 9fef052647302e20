"""What done, fail and escalate share: find the lease's token, call HQ, say how it ended.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping

import hq_command
from hq_client import HqClient
from hq_command import Document
from hq_lease_book import LeaseBook
from hq_settings import Settings

LEASE_LOST = (
    "the lease of this item is lost: it ended, was given back, or somebody else has the item. "
    "Nothing was changed; stop working on it."
)
NO_LEASE = (
    "no lease of this item is known here for this wake: lease it with hq_inbox_process.py, "
    "or give its token with --lease-token. Nothing was changed."
)
SHARED_LEASE = (
    "this item was leased more than once here, and nothing says which of the leases is yours: "
    "give your lease_token with --lease-token. Nothing was changed."
)
NOT_FOUND = "there is no inbox item with this id. Nothing was changed."


def closing_arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what every closing command takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("inbox_item_id", type=hq_command.item_id, help="inbox_item_id of the leased item")
    parser.add_argument("--lease-token", type=hq_command.item_id, help="its lease_token, when it is not known here")
    return parser


def close(
    settings: Settings, arguments: argparse.Namespace, function: str, result: str, extra: Mapping[str, str]
) -> int:
    """Close the item under its token and print how that went."""
    item_id: str = arguments.inbox_item_id
    book = LeaseBook(settings.state_folders, settings.agent, settings.wake_id)
    token: str | None = arguments.lease_token or book.token(item_id)
    if token is None:
        message = SHARED_LEASE if settings.wake_id is None and book.is_shared(item_id) else NO_LEASE
        return refuse(settings, item_id, "no_lease", message)
    # A token on the command line is the proof by itself; one from the book also has to belong to this wake.
    wake_id = None if arguments.lease_token else settings.wake_id
    params = {"p_item_id": item_id, "p_lease_token": token, "p_wake_id": wake_id, **extra}
    answer: Document = HqClient(settings).call(function, params)
    if not answer["applied"]:
        message = NOT_FOUND if answer["code"] == "not_found" else LEASE_LOST
        return refuse(settings, item_id, answer["code"], message, answer.get("status"))
    note_closed(book, token)
    hq_command.emit(closed_document(settings, item_id, result, answer))
    return hq_command.OK


def note_closed(book: LeaseBook, token: str) -> None:
    """Keep that the lease is closed; where that cannot be kept, a later lease needs its token named."""
    with contextlib.suppress(OSError):
        book.close(token)


def refuse(settings: Settings, item_id: str, code: str, message: str, status: str | None = None) -> int:
    """Print why nothing was changed; 1 for an unknown item, else 3."""
    document: Document = {"error": message, "code": code, "agent": settings.agent, "inbox_item_id": item_id}
    hq_command.emit({**document, "status": status} if status else document)
    return hq_command.FAILED if code == "not_found" else hq_command.LEASE_LOST


def closed_document(settings: Settings, item_id: str, result: str, answer: Document) -> Document:
    """What the agent reads after a close that holds."""
    return {
        "agent": settings.agent,
        "inbox_item_id": item_id,
        "result": result,
        "status": answer["status"],
        "attempt": answer["attempt"],
        "max_attempts": answer["max_attempts"],
        "repeated": answer["code"] == "already",
    }
