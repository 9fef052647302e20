"""What becomes of live wakes nobody attends to: adopted, closed, or left to their owner."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

from dispatcher import events
from dispatcher.agents import proctable
from dispatcher.agents.proctable import ProcessIdentity
from dispatcher.instance.model import Adoption, OpenWake
from dispatcher.logs import get_logger

log = get_logger(__name__)

Judgement = Literal["leave", "look_here", "lost"]

# What Docker and Podman call a container that was given no host name: the head of its id, which no other has.
CONTAINER_ID: Final = re.compile(r"[0-9a-f]{12}")

# A pid that is still gone at the second look: between fork and exec a child does not carry its marker yet.
SECOND_LOOK_SECONDS: Final = 0.3
REMEMBERED: Final = 10_000


@dataclass(frozen=True, slots=True)
class Host:
    """This machine as processes see it: `host_id` is boot and pid namespace, where a pid means something."""

    host_id: str
    hostname: str


def judge(wake: OpenWake, host: Host, instance_timeout: float, is_owner_alive: bool | None) -> Judgement:
    """Whether a wake may be touched, and how its process can be told alive.

    `is_owner_alive` is what this host knows of the owner's process; None when the owner ran elsewhere.
    A living owner keeps its wakes however silent it is, until their time is over: one that hangs ends nobody. An
    owner elsewhere is believed dead when it has been silent too long, but its child may live on there: its wake is
    lost only after its deadline, with two exceptions, both under our own host name:

    - the owner has said that it stopped, and a stop ends every child: nothing is left of its wakes;
    - the name is a container's id. No two containers share one, a container runs in one pid namespace at a time, and
      with a namespace the kernel ends all its processes. We run under that name in another namespace or after
      another boot, so that container was started again and nothing of its earlier life survived.

    Any other name may be borne by two hosts at once (a fixed `hostname:` in two compose projects, a cloned machine),
    a namespace cannot be looked for from within another, and a machine id is often part of an image: nothing of
    these tells a second host from a second life, so there the deadline decides.
    """
    silent = wake.owner_silent_for is None or wake.owner_silent_for > instance_timeout or wake.owner_stopped
    if is_owner_alive and not (silent and wake.is_over):
        return "leave"
    if wake.host_id == host.host_id:
        return "look_here" if is_owner_alive is False or silent else "leave"
    if not silent:
        return "leave"
    return "lost" if wake.is_over or _has_survived_nothing(wake, host) else "leave"


def _has_survived_nothing(wake: OpenWake, host: Host) -> bool:
    if wake.hostname != host.hostname:
        return False
    return wake.owner_stopped or CONTAINER_ID.fullmatch(host.hostname) is not None


class Adopter:
    """Settles open wakes. Made once; thread-safe.

    `adopt` is the store's call, `on_adopted` starts the supervision, `on_lost` reports the end of a wake that another
    daemon left, `on_unstarted` that of one of our own that never had a process. Before either, `stop_strays` ends
    what still carries the wakes' markers here.
    """

    def __init__(
        self,
        host: Host,
        instance_timeout: float,
        *,
        adopt: Callable[[OpenWake, ProcessIdentity], Adoption | None],
        on_adopted: Callable[[OpenWake, ProcessIdentity, Adoption], None],
        on_lost: Callable[[OpenWake], None],
        on_unstarted: Callable[[OpenWake], None],
        stop_strays: Callable[[Collection[str]], object],
        pause: Callable[[float], object],
    ) -> None:
        self._host = host
        self._instance_timeout = instance_timeout
        self._adopt = adopt
        self._on_adopted = on_adopted
        self._on_lost = on_lost
        self._on_unstarted = on_unstarted
        self._stop_strays = stop_strays
        self._pause = pause
        self._lock = threading.Lock()
        self._busy: set[UUID] = set()
        # By wake, the token it had when it was settled: who reads of it in an older answer leaves it alone.
        self._settled: OrderedDict[UUID, UUID] = OrderedDict()

    def settle(self, wakes: Sequence[OpenWake]) -> None:
        """Adopts, closes or leaves each wake of others, with one look at the process table for all.

        One that raises does not stop the others; one that another thread is at is left to it.
        """
        with self._taken(wakes) as mine:
            judged = [(wake, self._judge(wake)) for wake in mine]
            here = [wake for wake, judgement in judged if judgement == "look_here"]
            elsewhere = [wake for wake, judgement in judged if judgement == "lost"]
            gone = self._take_over_what_lives(here)
            self._close(self._lose, [*elsewhere, *gone])

    def settle_own(self, wakes: Sequence[OpenWake]) -> None:
        """Adopts or closes each wake that is ours by an answer we never got, to a claim or to an adoption."""
        with self._taken(wakes) as mine:
            self._close(self._give_back, self._take_over_what_lives(mine))

    @contextlib.contextmanager
    def _taken(self, wakes: Sequence[OpenWake]) -> Iterator[list[OpenWake]]:
        """Those of the wakes that no thread is at or has settled: they are this one's until the end."""
        with self._lock:
            mine = [wake for wake in wakes if wake.wake_id not in self._busy and not self._is_settled(wake)]
            self._busy.update(wake.wake_id for wake in mine)
        try:
            yield mine
        finally:
            with self._lock:
                self._busy.difference_update(wake.wake_id for wake in mine)

    def _is_settled(self, wake: OpenWake) -> bool:
        return self._settled.get(wake.wake_id) == wake.claim_token

    def _note_settled(self, wake: OpenWake) -> None:
        with self._lock:
            self._settled[wake.wake_id] = wake.claim_token
            while len(self._settled) > REMEMBERED:
                self._settled.popitem(last=False)

    def _take_over_what_lives(self, wakes: Sequence[OpenWake]) -> list[OpenWake]:
        """Adopts each wake whose process is found; answers those without one."""
        found = self._find_all(wakes)
        self._each(lambda wake: self._take_over(wake, found[wake.wake_id]), [w for w in wakes if w.wake_id in found])
        return [wake for wake in wakes if wake.wake_id not in found]

    def _close(self, close: Callable[[OpenWake], None], wakes: Sequence[OpenWake]) -> None:
        """Ends what the wakes left running, all at once, then closes each."""
        if wakes:
            self._stop_strays([str(wake.wake_id) for wake in wakes])
        self._each(close, wakes)

    @staticmethod
    def _each(settle: Callable[[OpenWake], None], wakes: Sequence[OpenWake]) -> None:
        for wake in wakes:
            try:
                settle(wake)
            except Exception as error:
                log.error(
                    events.WAKE_ADOPTION_FAILED,
                    msg=f"Could not settle a wake of {wake.agent_slug} left open",
                    agent=wake.agent_slug,
                    wake_id=str(wake.wake_id),
                    exc_info=error,
                )

    def _judge(self, wake: OpenWake) -> Judgement:
        return judge(wake, self._host, self._instance_timeout, self._is_owner_alive(wake))

    def _is_owner_alive(self, wake: OpenWake) -> bool | None:
        if wake.owner_host_id != self._host.host_id or wake.owner_pid is None:
            return None
        return proctable.is_alive(wake.owner_pid, wake.owner_pid_started_at)

    def _find_all(self, wakes: Sequence[OpenWake]) -> dict[UUID, ProcessIdentity]:
        """The living processes by wake: by the saved pid; by the marker only where no pid was saved.

        Others carry the marker as well: what a dead process left running is not the wake.
        """
        saved = {wake.wake_id: process for wake in wakes if (process := self._saved(wake)) is not None}
        unsaved = [wake for wake in wakes if wake.pid is None]
        marked = self._marked(unsaved)
        if len(marked) < len(unsaved):
            self._pause(SECOND_LOOK_SECONDS)
            marked = self._marked(unsaved)
        return saved | marked

    def _saved(self, wake: OpenWake) -> ProcessIdentity | None:
        if wake.pid is None or not proctable.is_alive(wake.pid, wake.pid_started_at):
            return None
        return ProcessIdentity(wake.pid, wake.pid_started_at, self._host.host_id)

    @staticmethod
    def _marked(wakes: Sequence[OpenWake]) -> dict[UUID, ProcessIdentity]:
        by_marker = proctable.marked_processes() if wakes else {}
        return {wake.wake_id: found[0] for wake in wakes if (found := by_marker.get(str(wake.wake_id)))}

    def _take_over(self, wake: OpenWake, process: ProcessIdentity) -> None:
        adoption = self._adopt(wake, process)
        if adoption is None:
            self._note_settled(wake)
            return
        self._on_adopted(wake, process, adoption)
        self._note_settled(wake)
        log.info(
            events.WAKE_ADOPTED,
            msg=f"Adopted the running wake of {wake.agent_slug}",
            agent=wake.agent_slug,
            wake_id=str(wake.wake_id),
            pid=process.pid,
            deadline_in_s=None if adoption.deadline_in is None else round(adoption.deadline_in, 1),
        )

    def _lose(self, wake: OpenWake) -> None:
        log.warning(
            events.WAKE_LOST,
            msg=f"The wake of {wake.agent_slug} has no process any more",
            agent=wake.agent_slug,
            wake_id=str(wake.wake_id),
            pid=wake.pid,
        )
        self._on_lost(wake)
        self._note_settled(wake)

    def _give_back(self, wake: OpenWake) -> None:
        log.info(
            events.WAKE_LOST,
            msg=f"A claim of {wake.agent_slug} never got here; giving it back",
            agent=wake.agent_slug,
            wake_id=str(wake.wake_id),
        )
        self._on_unstarted(wake)
