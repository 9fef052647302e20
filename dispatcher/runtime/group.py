"""Services started in order, stopped in reverse, and watched for one that ends unasked."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence

from dispatcher import events
from dispatcher.logs import get_logger
from dispatcher.runtime.service import Service

log = get_logger(__name__)


class ServiceGroup:
    """The services of a daemon. `start`, `wait_for_end` and `stop` belong to one thread: the main one.

    Those in `stopped_first` need nothing of one another: they are asked to stop all at once, before the rest.
    """

    def __init__(self, services: Sequence[Service], *, stopped_first: Sequence[Service] = ()) -> None:
        self.services = tuple(services)
        self._stopped_first = frozenset(stopped_first)
        self._started: list[Service] = []
        self._news: queue.SimpleQueue[Service | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts each service in order. When one cannot be started, those before it are stopped again."""
        try:
            for service in self.services:
                service.start(self._news.put)
                self._started.append(service)
        except BaseException:
            self.stop(timeout=5.0)
            raise

    def interrupt(self) -> None:
        """Ends one `wait_for_end`."""
        self._news.put(None)

    def wait_for_end(self, timeout: float | None = None) -> Service | None:
        """The first service that ended unasked; None when interrupted, or after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                service = self._news.get(timeout=left)
            except queue.Empty:
                return None
            if service is None:
                return None
            if service.error is not None or not service.stopping.is_set():
                _log_end(service)
                return service

    def stop(self, timeout: float) -> list[Service]:
        """Stops the services in reverse order within `timeout` seconds in all; returns those still running.

        Each is asked when those started after it have ended, because later services use earlier ones, but is
        kept waiting for each of them no longer than that one's `stop_hold`, and for all in `stopped_first` no
        longer than the longest of theirs.
        """
        deadline = time.monotonic() + timeout
        for stage in self._stages():
            for service in stage:
                service.request_stop()
            hold_until = min(deadline, time.monotonic() + max(service.stop_hold for service in stage))
            for service in stage:
                service.join(_left(hold_until))
        stuck = [service for service in self._started if not service.join(_left(deadline))]
        for service in stuck:
            log.error(events.SERVICE_STUCK, msg=f"{service.name} did not stop", service=service.name)
        return stuck

    def _stages(self) -> list[list[Service]]:
        started = list(reversed(self._started))
        first = [service for service in started if service in self._stopped_first]
        rest = [[service] for service in started if service not in self._stopped_first]
        return [first, *rest] if first else rest


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _log_end(service: Service) -> None:
    log.error(
        events.SERVICE_ENDED,
        msg=f"{service.name} ended unasked",
        service=service.name,
        exit_code=service.exit_code,
        exc_info=service.error,
    )
