"""The real daemon as a subprocess: its log lines, its signals, its end."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "dispatcher"]
QUIET_SECONDS = 0.4


def base_environment() -> dict[str, str]:
    """What the machine gives; nothing of the project's settings."""
    names = ("PATH", "LANG", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


class DaemonProcess:
    """`dispatcher run` with the given environment, in a directory of its own. `lines` are its log records."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.environment = {**base_environment(), "HOME": str(directory), **environment}
        self.environment.setdefault("HEARTBEAT_FILE", str(directory / "heartbeat.json"))
        self.environment.setdefault("OPENCLAW_HOME", str(directory / "openclaw"))
        self.lines: list[dict[str, Any]] = []
        self.not_json: list[str] = []
        self._heard_at = time.monotonic()
        self._may_read = threading.Event()
        self._may_read.set()
        self._stderr = (directory / "stderr").open("ab")
        self.process = subprocess.Popen(
            [*PROGRAM, "run"],
            env=self.environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self._may_read.wait()
            try:
                self.lines.append(json.loads(text))
                self._heard_at = time.monotonic()
            except ValueError:
                self.not_json.append(text)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    def stop_reading(self) -> None:
        """From now on nobody reads its log, and the pipe it is written to is as small as can be."""
        assert self.process.stdout is not None
        self._may_read.clear()
        fcntl.fcntl(self.process.stdout.fileno(), fcntl.F_SETPIPE_SZ, 4096)

    def read_on(self) -> None:
        """The log is read again."""
        self._may_read.set()

    def of(self, event: str, **facts: object) -> list[dict[str, Any]]:
        """The records of one event with those facts, so far."""
        wanted = {"event": event, **facts}
        return [line for line in list(self.lines) if wanted.items() <= line.items()]

    def wait_for(self, event: str, times: int = 1, deadline: float = 20.0, **facts: object) -> list[dict[str, Any]]:
        """The records of one event with those facts, once there are `times`."""

        def found() -> list[dict[str, Any]]:
            records = self.of(event, **facts)
            if len(records) < times and self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}: {self.tail()}")
            return records if len(records) >= times else []

        try:
            return wait_until(found, deadline)
        except AssertionError as error:
            raise AssertionError(f"not within {deadline} s: {times} x {event} {facts}; {self.tail()}") from error

    def ready(self) -> "DaemonProcess":
        """Waits until it dispatches and listens, and the sweeps that follow each subscription are over."""
        self.wait_for("daemon.ready")
        self.wait_for("realtime.subscribed")
        self.wait_for("sweep.finished")
        wait_until(lambda: time.monotonic() - self._heard_at > QUIET_SECONDS, 30)
        return self

    def tail(self) -> str:
        """Its last words, for a failing test."""
        last = "\n".join(json.dumps(line) for line in self.lines[-12:])
        return f"{last}\n{self.stderr[-2000:]}"

    def stop(self, number: int = signal.SIGTERM, deadline: float = 40.0) -> int:
        """Signals it and waits; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(deadline)

    def wait(self, deadline: float = 40.0) -> int:
        """Waits for its end; its exit code."""
        code = self.process.wait(deadline)
        self.read_on()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
        return code

    def kill(self) -> None:
        """kill -9 of the daemon alone; its children live on."""
        self.process.kill()
        self.wait()

    def children(self) -> list[psutil.Process]:
        """Its living descendants."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
