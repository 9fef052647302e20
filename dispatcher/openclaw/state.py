"""What is known of the Gateway, and what follows from an error. Pure: no socket, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from dispatcher.errors import GatewayBarred, GatewaySilent, GatewayUnavailable
from dispatcher.runtime.backoff import jittered

Status = Literal["unused", "connecting", "ready", "starting", "draining", "hung", "down", "barred"]
STATUSES: Final[tuple[Status, ...]] = (
    *("ready", "connecting", "starting", "draining", "hung", "down", "barred", "unused"),
)
# In these the Gateway takes no work, and we know it.
AWAY: Final[frozenset[Status]] = frozenset({"starting", "draining", "hung", "down"})


@dataclass(frozen=True, slots=True)
class LinkTimings:
    """Seconds. An answer takes milliseconds; a Gateway on a loaded host was seen to take several seconds.

    look: between two looks at a Gateway that is ready. away: between two looks at, or connections to, one that is not.
    patience: without an answer for so long it counts as hung. give_up: after so much more a new connection is tried.
    barred: until we ask again to be let in; a changed openclaw.json is noticed within `notice`.
    """

    connect: float = 5.0
    look: float = 5.0
    patience: float = 10.0
    give_up: float = 30.0
    away: float = 0.75
    barred: float = 60.0
    notice: float = 2.0
    spread: float = 0.3


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What is known of the Gateway.

    status: `ready`, or what keeps it from taking work (`starting`, `draining`, `hung`, `down`); `connecting` until the
        first answer; `barred` when the link is refused though the Gateway may be well; `unused` when there is no
        Gateway to look at.
    since: when the status began. cause: what is wrong, in words.
    boot_id, version: of the Gateway last connected to; another boot id means that it was started anew.
    outages: how often it was found away so far.
    """

    status: Status
    since: datetime
    cause: str | None = None
    boot_id: str | None = None
    version: str | None = None
    outages: int = 0

    @property
    def is_away(self) -> bool:
        """Whether the Gateway is known not to take work now."""
        return self.status in AWAY


def status_after(error: BaseException) -> Status:
    """What an error of a connection or a look means."""
    if isinstance(error, GatewayBarred):
        return "barred"
    if isinstance(error, GatewaySilent):
        return "hung"
    if isinstance(error, GatewayUnavailable):
        if error.reason.startswith("startup"):
            return "starting"
        return "draining" if error.reason or "drain" in error.message else "down"
    return "down"


def seconds_to_next_try(status: Status, timings: LinkTimings, draw: Callable[[], float] = random.random) -> float:
    """How long to wait before the next connection. On loopback a try costs nothing, and work waits for it."""
    seconds = timings.barred if status in {"barred", "unused"} else timings.away
    return jittered(seconds, timings.spread, draw)
