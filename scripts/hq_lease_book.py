"""The agent's own note of its leases, so that `hq_inbox_done.py <id>` needs no token on its command line.

A lease belongs to the wake it was taken in: a command of an earlier wake never gets the token of a later one.
A command that knows no wake gets a token only where the item has one open lease here.

One small JSON file per agent (mode 0600, replaced whole), in `$OPENCLAW_HOME/state/hq` or, where that cannot
be written, in `.hq` of the workspace. A token is worth nothing without HQ's key and dies with its lease.

Standard library only, Python 3.9+: this file is copied into an agent's `skills/hq/scripts/`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hq_settings import read_regular_file

try:
    import fcntl
except ImportError:  # a system without it has no second writer guarded; the file stays whole all the same
    fcntl = None  # type: ignore[assignment]  # the name stands for "cannot lock here"

KEPT = 200
MAX_BOOK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Lease:
    """One lease as it is noted: `wake` is None outside a wake, `closed` when this agent has closed it."""

    item: str
    token: str
    wake: str | None = None
    closed: bool = False


class LeaseBook:
    """Leases of one agent. Reading never fails; writing raises `OSError` when no folder takes the file."""

    def __init__(self, folders: tuple[Path, ...], agent: str, wake: str | None = None) -> None:
        self._folders = folders
        self._name = f"leases-{file_part(agent)}.json"
        self._wake = wake

    def token(self, item_id: str) -> str | None:
        """The token under which this wake holds, or has closed, an item; None when it cannot be told."""
        return chosen_token(self._leases_of(item_id), self._wake)

    def is_shared(self, item_id: str) -> bool:
        """Whether a command that gives no token could mean another lease of the item than its own."""
        return bool(self._leases_of(item_id)) and self.token(item_id) is None

    def remember(self, tokens: Mapping[str, str]) -> None:
        """Note new leases, token by item id; the oldest notes beyond the newest 200 are dropped."""
        new = [Lease(item, token, self._wake) for item, token in tokens.items()]
        self._change(lambda leases: [*(old for old in leases if old.token not in tokens.values()), *new])

    def close(self, token: str) -> None:
        """Note that this lease was closed by its own agent."""
        self._change(lambda leases: [replace(old, closed=True) if old.token == token else old for old in leases])

    def forget(self, token: str) -> None:
        """Drop a lease that was given back."""
        self._change(lambda leases: [old for old in leases if old.token != token])

    def _leases_of(self, item_id: str) -> list[Lease]:
        found = (read_leases(folder / self._name) for folder in self._folders)
        return [lease for leases in found for lease in leases if lease.item == item_id]

    def _change(self, change: Callable[[list[Lease]], list[Lease]]) -> None:
        failure: OSError = FileNotFoundError("no folder to keep lease tokens in")
        for folder in self._folders:
            try:
                self._write(folder, change)
            except OSError as error:
                failure = error
            else:
                return
        raise failure

    def _write(self, folder: Path, change: Callable[[list[Lease]], list[Lease]]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_out_of_git(folder)
        path = folder / self._name
        with held(path.with_suffix(".lock")):
            leases = change(read_leases(path))[-KEPT:]
            replace_file(path, json.dumps({"version": 2, "leases": [asdict(lease) for lease in leases]}))


def chosen_token(leases: Sequence[Lease], wake: str | None) -> str | None:
    """The token a command of this wake acts under, of one item's leases, oldest first."""
    own = [lease for lease in leases if lease.wake == wake]
    if wake is None:
        # Nobody says which attempt calls: while an earlier lease is not closed it may be that one, which must not act.
        own = list(leases) if all(lease.closed for lease in leases[:-1]) else []
    return own[-1].token if own else None


def file_part(agent: str) -> str:
    """A slug as part of a file's name: unchanged when harmless, else made so and kept apart by a hash."""
    if re.match(r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$", agent):
        return agent
    digest = hashlib.sha256(agent.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_-]", "-", agent)[:40] + "-" + digest


def read_leases(path: Path) -> list[Lease]:
    """The leases of a file; empty when it is absent, unreadable or damaged."""
    try:
        document = json.loads(read_regular_file(path, MAX_BOOK_BYTES)[0])
    except (OSError, ValueError, RecursionError):
        return []
    rows = document.get("leases") if isinstance(document, dict) else None
    return [lease for lease in map(read_lease, rows if isinstance(rows, list) else []) if lease]


def read_lease(row: Any) -> Lease | None:
    """One note; None when it is damaged."""
    if not isinstance(row, dict) or not isinstance(row.get("item"), str) or not isinstance(row.get("token"), str):
        return None
    wake = row.get("wake")
    return Lease(row["item"], row["token"], wake if isinstance(wake, str) else None, row.get("closed") is True)


def keep_out_of_git(folder: Path) -> None:
    """Workspaces are often repositories: what lies in our folder is not for them."""
    if folder.name == ".hq" and not (folder / ".gitignore").exists():
        (folder / ".gitignore").write_text("*\n", encoding="ascii")


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a lock file while two commands of one agent might write; the kernel frees it with the process."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Put a new file in the place of the old one in a single step; readable by its owner only."""
    descriptor, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
