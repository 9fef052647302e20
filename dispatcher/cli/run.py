"""`dispatcher run`: the daemon."""

from __future__ import annotations

import gc
import os
import threading

import typer

from dispatcher.config import Settings, load_settings
from dispatcher.errors import ConfigurationPending
from dispatcher.runtime.signals import SignalCollector

ASK_AGAIN_SECONDS = 5.0


def command() -> None:
    """Run the daemon until SIGTERM, SIGINT, SIGHUP or SIGQUIT."""
    raise typer.Exit(_run())


def _run() -> int:
    told_to_stop = threading.Event()
    _configure_logging_without_settings()
    with SignalCollector() as signals:
        signals.listen(lambda _count: told_to_stop.set())
        settings = _await_settings(told_to_stop)
        return 0 if settings is None else _run_daemon(settings, signals)


def _run_daemon(settings: Settings, signals: SignalCollector) -> int:
    _configure_logging(settings)
    # Imported here: what only a running daemon needs costs nothing to a start that fails before.
    from dispatcher.app import Daemon

    daemon = Daemon(settings, os.environ)
    gc.freeze()
    return daemon.run(signals)


def _configure_logging(settings: Settings) -> None:
    from dispatcher.logs import configure_logging

    configure_logging(
        settings.log_level,
        gateway_id=settings.gateway_id,
        tenant_id=str(settings.tenant_id),
        secrets=settings.secret_values(),
    )


def _await_settings(told_to_stop: threading.Event) -> Settings | None:
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
            if told_to_stop.wait(ASK_AGAIN_SECONDS):
                return None


def _configure_logging_without_settings() -> None:
    from dispatcher.logs import configure_logging

    configure_logging("info", gateway_id="", tenant_id="")


def _tell_waiting(pending: ConfigurationPending) -> None:
    from dispatcher import events
    from dispatcher.logs import get_logger

    get_logger(__name__).warning(
        events.CONFIG_WAITING, msg=f"Waiting for configuration: {pending}", missing=pending.faults
    )
