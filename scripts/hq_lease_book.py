"""The agent's own note of its leases, so that `hq_inbox_done.py <id>` needs no token on its command line.

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
from collections.abc import Iterator, Mapping
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without it has no second writer guarded; the file stays whole all the same
    fcntl = None  # type: ignore[assignment]  # the name stands for "cannot lock here"

KEPT = 200


class LeaseBook:
    """Tokens by item id. Reading never fails; writing raises `OSError` when no folder takes the file."""

    def __init__(self, folders: tuple[Path, ...], agent: str) -> None:
        self._folders = folders
        self._name = f"leases-{file_part(agent)}.json"

    def token(self, item_id: str) -> str | None:
        """The token under which this agent leased an item last, or None."""
        tokens = (read_tokens(folder / self._name).get(item_id) for folder in self._folders)
        return next((token for token in tokens if token), None)

    def remember(self, tokens: Mapping[str, str]) -> None:
        """Note new leases; the oldest notes beyond the newest 200 are dropped."""
        failure: OSError = FileNotFoundError("no folder to keep lease tokens in")
        for folder in self._folders:
            try:
                self._write(folder, tokens)
            except OSError as error:
                failure = error
            else:
                return
        raise failure

    def _write(self, folder: Path, tokens: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keep_out_of_git(folder)
        path = folder / self._name
        with held(path.with_suffix(".lock")):
            before = {item: token for item, token in read_tokens(path).items() if item not in tokens}
            newest = list({**before, **tokens}.items())[-KEPT:]
            replace_file(path, json.dumps({"version": 1, "tokens": dict(newest)}))


def file_part(agent: str) -> str:
    """A slug as part of a file's name: unchanged when harmless, else made so and kept apart by a hash."""
    if re.match(r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$", agent):
        return agent
    digest = hashlib.sha256(agent.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return re.sub(r"[^A-Za-z0-9_-]", "-", agent)[:40] + "-" + digest


def read_tokens(path: Path) -> dict[str, str]:
    """The tokens of a file; empty when it is absent, unreadable or damaged."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tokens = document.get("tokens") if isinstance(document, dict) else None
    if not isinstance(tokens, dict):
        return {}
    return {str(item): token for item, token in tokens.items() if isinstance(token, str)}


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
