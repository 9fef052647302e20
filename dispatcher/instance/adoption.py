"""What becomes of live wakes nobody attends to: adopted, closed, or left to their owner."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
    """Settles open wakes. Made once; `settle` may be called by any thread, one at a time per wake.

    `adopt` is the store's call, `on_adopted` starts the supervision, `on_lost` reports the end of a wake that another
    daemon left, `on_unstarted` that of one of our own that never had a process. Before either, `stop_strays` ends
    what still carries the wake's marker here.
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

    def settle(self, wakes: Sequence[OpenWake]) -> None:
        """Adopts, closes or leaves each wake of others; one that raises does not stop the others."""
        self._each(self._settle, wakes)

    def settle_own(self, wakes: Sequence[OpenWake]) -> None:
        """Adopts or closes each wake that is ours by an answer we never got, to a claim or to an adoption."""
        self._each(self._settle_own, wakes)

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

    def _settle(self, wake: OpenWake) -> None:
        judgement = judge(wake, self._host, self._instance_timeout, self._is_owner_alive(wake))
        if judgement == "leave":
            return
        process = self._find(wake) if judgement == "look_here" else None
        if process is None:
            self._lose(wake)
        else:
            self._take_over(wake, process)

    def _settle_own(self, wake: OpenWake) -> None:
        process = self._find(wake)
        if process is not None:
            self._take_over(wake, process)
            return
        log.info(
            events.WAKE_LOST,
            msg=f"A claim of {wake.agent_slug} never got here; giving it back",
            agent=wake.agent_slug,
            wake_id=str(wake.wake_id),
        )
        self._stop_strays([str(wake.wake_id)])
        self._on_unstarted(wake)

    def _is_owner_alive(self, wake: OpenWake) -> bool | None:
        if wake.owner_host_id != self._host.host_id or wake.owner_pid is None:
            return None
        return proctable.is_alive(wake.owner_pid, wake.owner_pid_started_at)

    def _find(self, wake: OpenWake) -> ProcessIdentity | None:
        """The process of a wake: by its saved pid; by its marker only where no pid was saved.

        Others carry the marker as well: what a dead process left running is not the wake.
        """
        if wake.pid is not None:
            is_alive = proctable.is_alive(wake.pid, wake.pid_started_at)
            return ProcessIdentity(wake.pid, wake.pid_started_at, self._host.host_id) if is_alive else None
        found = proctable.find_marked(str(wake.wake_id))
        if not found:
            self._pause(SECOND_LOOK_SECONDS)
            found = proctable.find_marked(str(wake.wake_id))
        return found[0] if found else None

    def _take_over(self, wake: OpenWake, process: ProcessIdentity) -> None:
        adoption = self._adopt(wake, process)
        if adoption is None:
            return
        self._on_adopted(wake, process, adoption)
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
        self._stop_strays([str(wake.wake_id)])
        self._on_lost(wake)
