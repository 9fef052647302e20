"""The agents `openclaw.json` knows, and which of its ids an agent of ours goes by."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from dispatcher import events
from dispatcher.errors import InvalidAgentId
from dispatcher.logs import get_logger
from dispatcher.openclaw.config_file import Signature, read_config, signature_of
from dispatcher.text import CONTROL, shortened

log = get_logger(__name__)

MAX_ID_LENGTH: Final = 64
# What an id is made of before OpenClaw normalises it: far more than an id can be, far less than an argument may.
MAX_SLUG_LENGTH: Final = 200

_NOT_IN_IDS: Final = re.compile(r"[^a-z0-9_-]+")


def normalise_id(text: str) -> str:
    """The id OpenClaw makes of `text`, before it cuts it to 64; empty means it would run `main`."""
    return _NOT_IN_IDS.sub("-", text.strip().lower()).strip("-")


def parse_agent_ids(config: object) -> list[str]:
    """The agent ids of a parsed `openclaw.json`: keys of `agents.entries`, ids of `agents.list`."""
    agents = config.get("agents") if isinstance(config, dict) else None
    if not isinstance(agents, dict):
        return []
    entries = agents.get("entries")
    listed = agents.get("list")
    ids: list[object] = list(entries) if isinstance(entries, dict) else []
    ids += [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return [agent_id for agent_id in ids if isinstance(agent_id, str) and agent_id]


def resolve_id(known: Iterable[str], workspace_slug: str | None, agent_slug: str) -> str:
    """The id to wake `agent_slug` by, as `known` writes it, else `<workspace>/<agent>`.

    Ids are compared as OpenClaw normalises them. Exact slug first, then slug within its workspace; never an
    id that merely ends in the slug, which may belong to another workspace.

    Raises:
        InvalidAgentId: OpenClaw would take the id for another agent, for `main`, or for an option.
    """
    return _resolve(_by_normal(known), workspace_slug, agent_slug)


def resolve_ids(known: Iterable[str], workspace_slug: str | None, agent_slugs: Iterable[str]) -> dict[str, str]:
    """By slug the id OpenClaw makes of what `resolve_id` answers; a slug it would refuse is left out."""
    by_normal = _by_normal(known)
    found: dict[str, str] = {}
    for slug in agent_slugs:
        with contextlib.suppress(InvalidAgentId):
            found[slug] = normalise_id(_resolve(by_normal, workspace_slug, slug))
    return found


def _by_normal(known: Iterable[str]) -> dict[str, str]:
    return {normalise_id(agent_id): agent_id for agent_id in known if _is_usable(agent_id)}


def _resolve(by_normal: Mapping[str, str], workspace_slug: str | None, agent_slug: str) -> str:
    for slug in (agent_slug, workspace_slug):
        _check_slug(slug)
    fallback = f"{workspace_slug}/{agent_slug}" if workspace_slug else agent_slug
    # <workspace>/<agent> and <workspace>-<agent> are one id after normalising.
    for candidate in (agent_slug, fallback):
        found = by_normal.get(normalise_id(candidate))
        if found is not None:
            return found
    _check_id(fallback)
    return fallback


def possible_ids(known: Iterable[str], workspace_slug: str | None, agent_slug: str) -> list[str]:
    """Every id OpenClaw may list `agent_slug` by: its own, the one within its workspace, the one `known` settles."""
    ids = [agent_slug, *([f"{workspace_slug}/{agent_slug}"] if workspace_slug else [])]
    with contextlib.suppress(InvalidAgentId):
        ids.append(resolve_id(known, workspace_slug, agent_slug))
    return ids


def _check_slug(slug: str | None) -> None:
    if not slug:
        return
    if len(slug) > MAX_SLUG_LENGTH:
        raise InvalidAgentId(f"a slug of {len(slug)} characters, more than {MAX_SLUG_LENGTH}: {shortened(slug)}")
    if CONTROL.search(slug):
        raise InvalidAgentId(f"control characters in the slug {shortened(slug)}")
    if not normalise_id(slug):
        text = f"the slug {shortened(slug)} has nothing OpenClaw keeps in an id: it would run another agent"
        raise InvalidAgentId(text)


def _check_id(agent_id: str) -> None:
    normal = normalise_id(agent_id)
    if not normal:
        raise InvalidAgentId("an empty agent id would run the agent main")
    if agent_id.startswith("-"):
        raise InvalidAgentId(f"the agent id {shortened(agent_id)} could be taken for an option")
    if len(normal) > MAX_ID_LENGTH:
        raise InvalidAgentId(
            f"an agent id of {len(normal)} characters, more than the {MAX_ID_LENGTH} OpenClaw keeps: "
            f"{shortened(agent_id)}"
        )


def _is_usable(agent_id: str) -> bool:
    try:
        _check_slug(agent_id)
        _check_id(agent_id)
    except InvalidAgentId:
        return False
    return True


class AgentRegistry:
    """The agents of `openclaw.json`, read again whenever it has changed. Thread-safe.

    A file that cannot be read or parsed, or that has gone, leaves what was known and is warned of once.
    """

    def __init__(self, candidates: Sequence[Path]) -> None:
        self._candidates = tuple(candidates)
        self._lock = threading.Lock()
        self._seen: tuple[Signature] | None = None
        self._known: tuple[str, ...] = ()

    def resolve(self, workspace_slug: str | None, agent_slug: str) -> str:
        """As `resolve_id`, with what the file says now."""
        return resolve_id(self.known_ids(), workspace_slug, agent_slug)

    def known_ids(self) -> tuple[str, ...]:
        """The ids the file lists now, as it writes them."""
        signature = self._signature()
        with self._lock:
            if self._seen == (signature,):
                return self._known
        # Not under the lock, which nothing slow may hold. A second thread reads for itself and acts on no old list.
        found, trouble = _read(signature)
        with self._lock:
            is_news = self._seen != (signature,)
            self._seen = (signature,)
            lost, self._known = found is None and bool(self._known), self._known if found is None else found
            known = self._known
        if is_news:
            _tell(signature, known, trouble, lost=lost)
        return known

    def config_path(self) -> Path | None:
        """The file in use; None when there is none."""
        signature = self._signature()
        return Path(signature[0]) if signature is not None else None

    def _signature(self) -> Signature:
        return signature_of(self._candidates)


def _read(signature: Signature) -> tuple[tuple[str, ...] | None, Exception | None]:
    """The ids of the file, or None and why there are none."""
    if signature is None:
        return None, None
    try:
        return tuple(parse_agent_ids(read_config(Path(signature[0])))), None
    except (OSError, ValueError, RecursionError) as error:
        return None, error


def _tell(signature: Signature, known: Sequence[str], trouble: Exception | None, *, lost: bool) -> None:
    if signature is None:
        if lost:
            log.warning(events.REGISTRY_BROKEN, msg="openclaw.json has gone; keeping the agents it listed")
    elif trouble is None:
        log.debug(events.REGISTRY_READ, msg="Read openclaw.json", path=signature[0], agents=len(known))
    else:
        reason = trouble.strerror if isinstance(trouble, OSError) and trouble.strerror else "not JSON5 in UTF-8"
        log.warning(
            events.REGISTRY_BROKEN,
            msg=f"openclaw.json cannot be read ({reason}); keeping the agents it listed before",
            path=signature[0],
            error_type=type(trouble).__name__,
        )
