"""The service key and other secrets are in nothing that the daemon or a command writes, shows or hands on.

The daemon runs at debug level through outages, refusals and wakes; then everything it has left is searched, and what
the kernel shows of it and of the agents. The key is looked for in every form it takes on the wire.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, settings_for
from tests.acceptance.test_metrics import free_port
from tests.support.daemon import PROGRAM, DaemonProcess, base_environment
from tests.support.gateway import ScriptedGateway, scripted_gateway
from tests.support.network import ForwardProxy, running
from tests.support.seed import Seed
from tests.support.waiting import wait_until

PASSWORD = "recognisable-password-of-the-proxy"
GATEWAY_TOKEN = "recognisable-token-of-openclaws-gateway"
COMMANDS = (
    ["status", "--json"], ["status"], ["check", "--json"], ["check"], ["health", "--json"], ["health"],
    ["wakes", "--json"], ["runs", "list", "--json"], ["inbox", "list", "--json"], ["migrate", "--help"],
)  # fmt: skip


def forms_of(secret: str) -> set[str]:
    """The secret as it may stand in a text: itself, cut, in a URL or an Authorization header, the parts of a JWT."""
    encoded = base64.b64encode(f"user:{secret}".encode()).decode()
    parts = [part for part in secret.split(".")[1:] if len(part) > 20]
    return {secret, quote(secret, safe=""), encoded, secret[: len(secret) * 3 // 4], *parts}


@dataclass
class Search:
    """What was looked at, by name, and where a secret stood in it."""

    secrets: set[str]
    seen: set[str] = field(default_factory=set)
    found: list[str] = field(default_factory=list)

    def look(self, where: str, content: str | bytes) -> None:
        text = content if isinstance(content, str) else content.decode("utf-8", "replace")
        self.seen.add(where)
        for secret in self.secrets:
            if secret in text:
                at = text.index(secret)
                self.found.append(f"{where}: {text[max(0, at - 80) : at + 20]!r}…")

    def look_at_process(self, name: str, pid: int) -> None:
        """What the kernel shows of it to its own user, and its arguments to everybody."""
        for part in ("cmdline", "environ"):
            self.look(f"{part} of {name}", Path(f"/proc/{pid}/{part}").read_bytes())

    def look_at_files(self, folder: Path) -> None:
        """Every file below, but those that an operator or test has put a key into."""
        for path in folder.rglob("*"):
            if path.is_file() and path.name not in {"gateway.env", "openclaw.json", "openclaw.orders.json"}:
                self.look(path.name, path.read_bytes())


@pytest.fixture
def proxy(api: Api) -> Iterator[ForwardProxy]:
    proxy = ForwardProxy(api.port, f"user:{PASSWORD}")
    with running(proxy):
        yield proxy


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[ScriptedGateway]:
    """OpenClaw's, whose token stands in openclaw.json."""
    with scripted_gateway() as started:
        started.token = GATEWAY_TOKEN
        (tmp_path / "openclaw").mkdir()
        (tmp_path / "openclaw" / "openclaw.json").write_text(json.dumps(started.config()))
        yield started


@pytest.fixture
def settings(
    api: Api, stub_agent: StubAgent, proxy: ForwardProxy, gateway: ScriptedGateway, tmp_path: Path
) -> dict[str, str]:
    """Secrets stand in gateway.env alone, so that the environment of the daemon has none to begin with."""
    settings = settings_for(api, stub_agent)
    secrets = {name: settings.pop(name) for name in ("SUPABASE_URL", "SUPABASE_SERVICE_ROLE_KEY")}
    secrets["SUPABASE_PROXY"] = f"http://user:{PASSWORD}@127.0.0.1:{proxy.port}"
    path = tmp_path / "openclaw" / "secrets" / "gateway.env"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    path.write_text("".join(f"{name}={value}\n" for name, value in secrets.items()))
    return settings | {
        "OPENCLAW_HOME": str(tmp_path / "openclaw"),
        "AGENT_OUTPUT_DIR": str(tmp_path / "output"),
        "LOG_LEVEL": "debug",
        "HEARTBEAT_INTERVAL": "0.5",
        "REST_TIMEOUT": "2",
        "WAKE_COOLDOWN": "0",
        "METRICS_PORT": str(free_port()),
    }


@pytest.mark.timeout(300)  # two dozen commands
def test_no_secret_is_in_anything_that_is_written_shown_or_handed_on(
    api: Api, seed: Seed, stub_agent: StubAgent, settings: dict[str, str], tmp_path: Path
) -> None:
    search = Search(forms_of(api.keys.service_role_key) | forms_of(PASSWORD) | forms_of(GATEWAY_TOKEN))
    seed.agent("ada")
    stub_agent.order(mode="hang")
    daemon = DaemonProcess(tmp_path / "daemon", settings)
    try:
        daemon.ready()
        daemon.wait_for("gateway.linked")
        seed.item("ada")
        daemon.wait_for("wake.started")
        live_through_trouble(api, daemon)
        look_at_what_runs(search, daemon, stub_agent)
        look_at_commands(search, daemon, api)
    finally:
        assert daemon.stop() == 0
    search.look("the log", json.dumps(daemon.lines) + "".join(daemon.not_json))
    search.look_at_files(tmp_path)

    assert {line["level"] for line in daemon.lines} >= {"debug", "info", "warning"}
    assert {"stderr", "openclaw.log.jsonl", "cmdline of the agent", "environ of the agent", "the log"} <= search.seen
    assert not search.found, "\n".join(search.found)


def look_at_what_runs(search: Search, daemon: DaemonProcess, stub_agent: StubAgent) -> None:
    search.look_at_process("the daemon", daemon.pid)
    [agent] = wait_until(stub_agent.living, 10)
    search.look_at_process("the agent", agent.pid)
    for page in ("metrics", "healthz", "readyz", "livez", "nothing"):
        answer = httpx.get(f"http://127.0.0.1:{daemon.environment['METRICS_PORT']}/{page}", trust_env=False)
        search.look(page, f"{answer.headers}{answer.text}")


def live_through_trouble(api: Api, daemon: DaemonProcess) -> None:
    """Everything that makes a daemon talk: refusals that quote the request, cut connections, a Realtime that goes."""
    seen = len(daemon.lines)
    api.faults(rest={"fail": 3, "status": 401, "body": {"message": f"bad key {api.keys.service_role_key}"}})
    wait_until(lambda: api.rest_faults.fail == 0, 20)
    api.faults(rest={"fail": 3, "status": 500, "raw": f"<html>apikey={api.keys.service_role_key}</html>"})
    wait_until(lambda: api.rest_faults.fail == 0, 20)
    api.faults(rest={"cut": 3}, realtime={"close": 1011})
    wait_until(lambda: api.rest_faults.cut == 0, 20)
    wait_until(lambda: [line for line in daemon.lines[seen:] if line["event"] == "realtime.subscribed"], 30)


def look_at_commands(search: Search, daemon: DaemonProcess, api: Api) -> None:
    """What commands print, well and in trouble."""
    for arguments in COMMANDS:
        search.look(" ".join(arguments), printed(daemon, arguments))
    for name, wrong in {
        "a wrong proxy": {"SUPABASE_PROXY": f"http://user:{PASSWORD}@127.0.0.1:1"},
        "a proxy that is none": {"SUPABASE_PROXY": f"ftp://user:{PASSWORD}@h"},
        "a key with more behind it": {"SUPABASE_SERVICE_ROLE_KEY": f"{api.keys.service_role_key} x", **url(api)},
        "a key for a URL": {"SUPABASE_URL": api.keys.service_role_key},
        "a URL with the key": {"SUPABASE_URL": f"http://user:{api.keys.service_role_key}@h"},
        "a key for a gateway": {"GATEWAY_ID": api.keys.service_role_key},
        "another name for the gateway": {"GATEWAY_ID": "nowhere"},
    }.items():
        for arguments in (["status"], ["check", "--json"]):
            search.look(f"{arguments[0]} with {name}", printed(daemon, arguments, **wrong))


def url(api: Api) -> dict[str, str]:
    return {"SUPABASE_URL": api.url}


def printed(daemon: DaemonProcess, arguments: list[str], **wrong: str) -> str:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        env={**base_environment(), **daemon.environment, **wrong},
        cwd=daemon.directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def test_an_agents_environment_has_no_secret_of_the_daemons_whatever_its_name(
    api: Api, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon, proxy: ForwardProxy
) -> None:
    """Names that are passed on with the key in them; what OpenClaw itself needs is passed on."""
    seed.agent("ada")
    key = api.keys.service_role_key
    handed = {"OPENCLAW_NOTE": f"key={key}", "LC_KEY": key, "http_proxy": f"http://u:{PASSWORD}@h", "XDG_X": f"a{key}"}
    handed |= {"REALTIME_PROXY": f"http://user:{PASSWORD}@127.0.0.1:{proxy.port}", "OPENCLAW_PROXY_NOTE": PASSWORD}
    daemon = start_daemon(**handed, OPENCLAW_GATEWAY_TOKEN=GATEWAY_TOKEN).ready()
    seed.item("ada")
    daemon.wait_for("wake.started")
    [call] = wait_until(stub_agent.calls, 10)
    search = Search(forms_of(key) | forms_of(PASSWORD))
    search.look("the agent's environment and arguments", json.dumps(call))
    assert search.found == []
    assert call["env"]["OPENCLAW_GATEWAY_TOKEN"] == GATEWAY_TOKEN
    assert daemon.stop() == 0
    search.look("the log", json.dumps(daemon.lines) + daemon.stderr)
    assert search.found == []
