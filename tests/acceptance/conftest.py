"""The daemon on a real stack, woken agents played by the stub."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.support.daemon import DaemonProcess

StartDaemon = Callable[..., DaemonProcess]


def settings_for(api: Api, stub: StubAgent) -> dict[str, str]:
    """What a gateway's container would set."""
    return {
        "SUPABASE_URL": api.url,
        "SUPABASE_SERVICE_ROLE_KEY": api.keys.service_role_key,
        "GATEWAY_ID": "local",
        "OPENCLAW_BIN": str(stub.path),
    }


@pytest.fixture
def start_daemon(api: Api, stub_agent: StubAgent, tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts daemons: `start_daemon(WAKE_COOLDOWN=0)`. Each is ended with the test, and so are the stub's processes."""
    started: list[DaemonProcess] = []

    def start(**settings: object) -> DaemonProcess:
        environment = settings_for(api, stub_agent) | {name: str(value) for name, value in settings.items()}
        daemon = DaemonProcess(tmp_path / f"daemon-{len(started)}", environment)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.wait()
        sys.stdout.write(f"--- daemon {daemon.pid}\n{daemon.tail()}\n")  # shown for a test that failed


@pytest.fixture
def working_agent(api: Api, stub_agent: StubAgent) -> StubAgent:
    """The stub, told to lease and close its agent's items."""
    stub_agent.order(**working_orders(api))
    return stub_agent


def working_orders(api: Api, **orders: object) -> dict[str, object]:
    """Orders for a stub that does its work; more may be added."""
    return {"mode": "ok", "rest": {"url": api.url, "key": api.keys.service_role_key}, **orders}
