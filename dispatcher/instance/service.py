"""The heartbeat: this daemon lives, its leases go on, its canary is sent, and whoever asks can read how it does."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK, Clock, rfc3339_ms
from dispatcher.errors import RestError
from dispatcher.instance.model import OpenWake
from dispatcher.instance.store import InstanceStore
from dispatcher.logs import get_logger

log = get_logger(__name__)

INSTANCE_GONE: Final = "OD001"


class HeartbeatFile:
    """A small JSON file that says how the daemon does; replaced as a whole, readable by everybody."""

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._clock = clock
        self._told = False

    def write(self, facts: Mapping[str, Any]) -> None:
        """Writes the facts; a file that cannot be written is one warning, not an end."""
        content = json.dumps({"ts": rfc3339_ms(self._clock.now()), "pid": os.getpid(), **facts})
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            draft.write_text(content, encoding="utf-8")
            draft.replace(self._path)
            self._told = False
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            if not self._told:
                self._warn("write", error)
            self._told = True

    def remove(self) -> None:
        """The daemon ends in good order: nobody should read its last words as news. As `write`, it never raises."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._warn("remove", error)

    def _warn(self, verb: str, error: OSError) -> None:
        log.warning(
            events.HEARTBEAT_FILE_FAILED,
            msg=f"Could not {verb} {self._path}: {error.strerror}",
            path=str(self._path),
        )


class Heart:
    """One `beat` is one heartbeat; a `PeriodicService` calls it."""

    def __init__(
        self,
        store: InstanceStore,
        instance_id: UUID,
        *,
        live_wakes: Callable[[], Iterable[UUID]],
        facts: Callable[[], Mapping[str, Any]],
        expect_canary: Callable[[str, float], None],
        on_broadcast_available: Callable[[bool], None],
        on_fenced: Callable[[UUID], None],
        on_unattended: Callable[[Sequence[OpenWake]], None],
        on_orphaned: Callable[[], None],
        register_again: Callable[[], object],
        file: HeartbeatFile,
    ) -> None:
        self._store = store
        self._instance_id = instance_id
        self._live_wakes = live_wakes
        self._facts = facts
        self._expect_canary = expect_canary
        self._on_broadcast_available = on_broadcast_available
        self._on_fenced = on_fenced
        self._on_unattended = on_unattended
        self._on_orphaned = on_orphaned
        self._orphaned: frozenset[UUID] = frozenset()
        self._register_again = register_again
        self._file = file

    def beat(self) -> None:
        """Writes the file, then the row. Raises when the row could not be written."""
        facts = self._facts()
        self._file.write(facts)
        nonce, asked_at = uuid4(), time.monotonic()
        live = list(self._live_wakes())
        try:
            answer = self._store.heartbeat(self._instance_id, live, nonce, facts)
        except RestError as error:
            if error.code != INSTANCE_GONE:
                raise
            log.warning(events.INSTANCE_GONE, msg="The row of this instance is gone; registering it again")
            self._register_again()
            return
        self._expect_canary(str(nonce), asked_at)
        self._on_broadcast_available(answer.broadcast_available)
        for wake_id in answer.fenced:
            self._on_fenced(wake_id)
        self._on_unattended(answer.unattended)
        # Once for each: what a sweep could not settle (another host's, say) waits for its deadline.
        if answer.orphaned - self._orphaned:
            self._on_orphaned()
        self._orphaned = answer.orphaned
        if answer.renewed:
            log.debug(events.LEASE_RENEWED, msg=f"Renewed {answer.renewed} lease(s)", leases=answer.renewed)
