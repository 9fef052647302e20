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
    """The services of a daemon. `start`, `wait_for_end` and `stop` belong to one thread: the main one."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services = tuple(services)
        self._started: list[Service] = []
        # SimpleQueue, because its put may be called from a signal handler that interrupted its own get.
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
        """Ends one `wait_for_end`. Safe in a signal handler."""
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
        kept waiting for each of them no longer than that one's `stop_hold`.
        """
        deadline = time.monotonic() + timeout
        for service in reversed(self._started):
            service.request_stop()
            service.join(min(service.stop_hold, _left(deadline)))
        stuck = [service for service in self._started if not service.join(_left(deadline))]
        for service in stuck:
            log.error(events.SERVICE_STUCK, msg=f"{service.name} did not stop", service=service.name)
        return stuck


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
