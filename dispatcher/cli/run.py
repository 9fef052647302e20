"""`dispatcher run`: the daemon."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
from collections.abc import Callable

import typer

from dispatcher.config import Settings, load_settings
from dispatcher.errors import ConfigurationPending
from dispatcher.runtime.signals import SignalCollector

ASK_AGAIN_SECONDS = 5.0


def command() -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    raise typer.Exit(_run())


def _run() -> int:
    # SimpleQueue, because its put may be called from a signal handler that interrupted its own get.
    told: queue.SimpleQueue[None] = queue.SimpleQueue()
    with SignalCollector(lambda _count: told.put(None)) as signals:
        settings = _await_settings(told)
        return 0 if settings is None else _run_daemon(settings, lambda: signals.count > 0)


def _run_daemon(settings: Settings, is_stop_asked: Callable[[], bool]) -> int:
    _configure_logging(settings)
    # Imported here: what only a running daemon needs costs nothing to a start that fails before.
    from dispatcher.app import Daemon

    daemon = Daemon(settings, os.environ)
    gc.freeze()
    return daemon.run(is_stop_asked)


def _configure_logging(settings: Settings) -> None:
    from dispatcher.logs import configure_logging

    configure_logging(
        settings.log_level,
        gateway_id=settings.gateway_id,
        tenant_id=str(settings.tenant_id),
        secrets=settings.secret_values(),
    )


def _await_settings(told_to_stop: queue.SimpleQueue[None]) -> Settings | None:
    """The settings; while WAIT_FOR_CONFIG is true, waits for those that are missing and says so once.

    None when it was told to stop meanwhile.
    """
    told = False
    while True:
        try:
            return load_settings()
        except ConfigurationPending as pending:
            if not told:
                _tell_waiting(pending)
            told = True
            with contextlib.suppress(queue.Empty):
                told_to_stop.get(timeout=ASK_AGAIN_SECONDS)
                return None


def _tell_waiting(pending: ConfigurationPending) -> None:
    from dispatcher import events
    from dispatcher.logs import configure_logging, get_logger

    configure_logging("info", gateway_id="", tenant_id="")
    get_logger(__name__).warning(
        events.CONFIG_WAITING, msg=f"Waiting for configuration: {pending}", missing=pending.faults
    )
