"""`dispatcher run`: the daemon."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dispatcher.config import Settings, load_settings
from dispatcher.errors import ConfigurationPending, SettingsError, UnknownGateway
from dispatcher.runtime.signals import SignalCollector

if TYPE_CHECKING:
    from dispatcher.instance.heartbeat_file import HeartbeatFile

ASK_AGAIN_SECONDS = 5.0


def command() -> None:
    """Run the daemon until SIGTERM, SIGINT, SIGHUP or SIGQUIT."""
    raise typer.Exit(_run())


def _run() -> int:
    told_to_stop = threading.Event()
    _configure_logging_without_settings()
    waiting = Waiting()
    with SignalCollector() as signals:
        signals.listen(lambda _count: told_to_stop.set())
        try:
            return _run_when_configured(told_to_stop, signals, waiting)
        finally:
            waiting.end()


def _run_when_configured(told_to_stop: threading.Event, signals: SignalCollector, waiting: Waiting) -> int:
    """Runs the daemon once it has its settings and its gateway has a row; 0 when it was told to stop before."""
    while (settings := _await_settings(told_to_stop, waiting)) is not None:
        try:
            return _run_daemon(settings, signals, waiting)
        except UnknownGateway as missing:
            if not settings.wait_for_config:
                raise
            waiting.tell(missing)
            signals.listen(lambda _count: told_to_stop.set())
            told_to_stop.wait(ASK_AGAIN_SECONDS)
    return 0


def _run_daemon(settings: Settings, signals: SignalCollector, waiting: Waiting) -> int:
    _configure_logging(settings)
    _tell_warnings(settings)
    # Imported here: what only a running daemon needs costs nothing to a start that fails before.
    from dispatcher.app import Daemon

    daemon = Daemon(settings, os.environ)
    gc.freeze()
    return daemon.run(signals, on_registered=waiting.end)


def _configure_logging(settings: Settings) -> None:
    from dispatcher.logs import configure_logging

    configure_logging(
        settings.log_level,
        gateway_id=settings.gateway_id,
        tenant_id=str(settings.tenant_id),
        secrets=settings.secret_values(),
    )


def _tell_warnings(settings: Settings) -> None:
    from dispatcher import events
    from dispatcher.logs import get_logger

    for warning in settings.warnings:
        get_logger(__name__).warning(events.CONFIG_KEY_EXPOSED, msg=warning)


def _await_settings(told_to_stop: threading.Event, waiting: Waiting) -> Settings | None:
    """The settings; while WAIT_FOR_CONFIG is true, waits for those that are missing.

    None when it was told to stop meanwhile.
    """
    while not told_to_stop.is_set():
        try:
            return load_settings()
        except ConfigurationPending as pending:
            waiting.tell(pending)
            told_to_stop.wait(ASK_AGAIN_SECONDS)
    return None


def _configure_logging_without_settings() -> None:
    from dispatcher.logs import configure_logging

    configure_logging("info", gateway_id="", tenant_id="")


class Waiting:
    """Says what the daemon waits for: once in the log, and to `dispatcher health` as long as it does."""

    def __init__(self) -> None:
        self._file: HeartbeatFile | None = None
        self._told = ""

    def tell(self, pending: SettingsError) -> None:
        """It waits for what `pending` names."""
        if self._told != str(pending):
            self._told = str(pending)
            _tell_waiting(pending)
        self._file = self._file or _waiting_file()
        health = {"status": "waiting", "live": True, "loops": {}, "causes": [f"waiting for configuration: {pending}"]}
        self._file.write({"health": health, "written_every_s": ASK_AGAIN_SECONDS})

    def end(self) -> None:
        """It waits no longer."""
        if self._file is not None:
            self._file.remove()
            self._file = None


def _waiting_file() -> HeartbeatFile:
    from dispatcher.instance.heartbeat_file import HeartbeatFile, own_file

    named = os.environ.get("HEARTBEAT_FILE")
    return HeartbeatFile(own_file(Path(named) if named else None, "waiting"), "", "")


def _tell_waiting(pending: SettingsError) -> None:
    from dispatcher import events
    from dispatcher.logs import get_logger

    get_logger(__name__).warning(
        events.CONFIG_WAITING, msg=f"Waiting for configuration: {pending}", missing=pending.faults
    )
