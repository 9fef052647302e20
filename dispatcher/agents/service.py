"""The supervisor as a service of the daemon: looks after the waiting threads, and ends all wakes at a stop."""

from __future__ import annotations

from typing import Final

from dispatcher.agents.supervisor import STOP_LIMIT, STRAYS_LIMIT, Supervisor
from dispatcher.runtime.service import Service

CHECK_SECONDS: Final = 5.0


class SupervisionService(Service):
    """Calls `Supervisor.check` every few seconds; when stopped, gives live wakes `grace` seconds and then ends them."""

    def __init__(self, supervisor: Supervisor, grace: float) -> None:
        super().__init__("supervisor")
        self._supervisor = supervisor
        self._grace = grace
        # The ends of the wakes have to be reported, and their leases kept alive, until the last one is over.
        self.stop_hold = grace + STOP_LIMIT + STRAYS_LIMIT

    def run_service(self) -> None:
        """Returns when every wake has ended, at the latest about nine seconds after the grace."""
        while not self.stopping.wait(CHECK_SECONDS):
            self._supervisor.check()
        self._supervisor.stop_all(self._grace)
