"""The daemon's start and end around its services: signals that come early, calls that hang late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dispatcher.app import LONGEST_GOODBYE, SHORTEST_GOODBYE, Daemon, seconds_for_goodbye
from dispatcher.cli import run
from dispatcher.config import Settings, load_settings
from dispatcher.errors import ConfigurationPending, ServiceUnavailable
from dispatcher.instance.model import Schema
from dispatcher.instance.store import InstanceStore
from dispatcher.runtime.signals import SignalCollector
from dispatcher.supabase.schema_version import FINGERPRINT, REVISION


@pytest.mark.parametrize(
    ("left", "seconds"), [(30.0, LONGEST_GOODBYE), (1.5, 1.5), (0.0, SHORTEST_GOODBYE), (-4.0, SHORTEST_GOODBYE)]
)
def test_the_goodbye_takes_what_is_left(left: float, seconds: float) -> None:
    assert seconds_for_goodbye(left) == seconds


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "openclaw").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "openclaw").chmod(0o755)
    environ = {
        "SUPABASE_URL": "http://127.0.0.1:9",
        "SUPABASE_SERVICE_ROLE_KEY": "sb_secret_0123456789abcdef0123456789",
        "GATEWAY_ID": "main",
        "OPENCLAW_BIN": str(tmp_path / "openclaw"),
        "OPENCLAW_HOME": str(tmp_path),
        "HEARTBEAT_FILE": str(tmp_path / "heartbeat.json"),
    }
    return load_settings(environ, tmp_path)


class Instances(InstanceStore):
    """A database whose registration hangs until released; the goodbye is noted."""

    def __init__(self, on_register: Callable[[], object]) -> None:
        self.on_register = on_register
        self.goodbyes: list[float] = []

    def schema(self) -> Schema:
        return Schema(REVISION, FINGERPRINT, ())

    def register(self, *_args: object) -> Any:
        self.on_register()

    def stop(self, instance_id: object, timeout: float) -> None:
        self.goodbyes.append(timeout)


def test_a_signal_while_the_registration_hangs_ends_with_0(settings: Settings) -> None:
    hanging = threading.Event()

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        hanging.wait(60)

    daemon = Daemon(settings, {})
    daemon._instances = instances = Instances(hang)
    started = time.monotonic()
    with SignalCollector() as signals:
        assert daemon.run(signals) == 0
    hanging.set()
    assert time.monotonic() - started < 10
    assert len(instances.goodbyes) == 1


def test_a_signal_before_the_registration_ends_with_0_and_asks_nothing(settings: Settings) -> None:
    daemon = Daemon(settings, {})
    asked: list[str] = []
    daemon._instances = Instances(lambda: asked.append("register"))
    came = threading.Event()
    with SignalCollector() as signals:
        signals.listen(lambda _count: came.set())
        os.kill(os.getpid(), signal.SIGTERM)
        assert came.wait(10)
        assert daemon.run(signals) == 0
    assert asked == []


def test_a_registration_that_fails_is_raised(settings: Settings) -> None:
    def fail() -> None:
        raise ServiceUnavailable("away")

    daemon = Daemon(settings, {})
    daemon._instances = Instances(fail)
    with SignalCollector() as signals, pytest.raises(ServiceUnavailable):
        daemon.run(signals)


def test_a_goodbye_that_hangs_is_not_waited_for(settings: Settings) -> None:
    class Hanging(Instances):
        def stop(self, instance_id: object, timeout: float) -> None:
            hanging.wait(60)

    hanging = threading.Event()
    daemon = Daemon(settings, {})
    daemon._instances = Hanging(lambda: None)
    started = time.monotonic()
    daemon._sign_off(SHORTEST_GOODBYE)
    assert time.monotonic() - started < 5
    hanging.set()


def test_a_signal_while_settings_are_awaited_ends_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def pending() -> Settings:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ConfigurationPending("SUPABASE_URL is missing")

    monkeypatch.setattr(run, "load_settings", pending)
    monkeypatch.setattr(run, "_tell_waiting", lambda _pending: None)
    monkeypatch.setattr(run, "ASK_AGAIN_SECONDS", 60.0)
    assert run._run() == 0
