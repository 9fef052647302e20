"""C16, C17: an authority of one's own, a proxy as the only way out, another schema first; daemon, commands, scripts."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from dispatcher.local.api import Api
from dispatcher.local.rest import RestServer
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, settings_for
from tests.support.daemon import PROGRAM, ROOT, base_environment
from tests.support.database import Database
from tests.support.network import Authority, ForwardProxy, TlsFront, running
from tests.support.seed import Seed

SCRIPT = [sys.executable, str(ROOT / "scripts" / "hq_inbox_process.py"), "--status"]
POLL = [sys.executable, str(ROOT / "scripts" / "agent_workflow_client.py"), "poll"]
STATUS = [*PROGRAM, "status"]
RUN = [*PROGRAM, "run"]
Ask = Callable[[list[str], Mapping[str, object]], tuple[int, str]]
HOST = "project.example"  # nobody but the proxy knows where that is
PASSWORD = "open@sesame"


@dataclass
class Company:
    """What its project's URL is, inside and through the proxy; the authority; the proxy."""

    authority: Authority
    url: str
    outside_url: str
    plain_url: str
    proxy: ForwardProxy
    plain_proxy: ForwardProxy

    @property
    def proxy_url(self) -> str:
        return f"http://us%65r:{quote(PASSWORD, safe='')}@127.0.0.1:{self.proxy.port}"


@pytest.fixture
def company(api: Api, seed: Seed, tmp_path: Path) -> Iterator[Company]:
    seed.agent("ada")
    authority = Authority.make(tmp_path / "authority", "127.0.0.1", HOST)
    front = TlsFront(authority, api.port)
    with running(front):
        proxy, plain = ForwardProxy(front.port, f"user:{PASSWORD}"), ForwardProxy(api.port)
        with running(proxy), running(plain):
            urls = (f"https://127.0.0.1:{front.port}", f"https://{HOST}:{front.port}", f"http://{HOST}")
            yield Company(authority, *urls, proxy, plain)


@pytest.fixture
def ask(api: Api, stub_agent: StubAgent, tmp_path: Path) -> Ask:
    """Runs a command to its end with the project's settings and these: exit code and all that it said."""

    def run(command: list[str], settings: Mapping[str, object]) -> tuple[int, str]:
        homes = {"HOME": str(tmp_path), "OPENCLAW_HOME": str(tmp_path / "oc"), "AGENT_SLUG": "ada"}
        chosen = {name: str(value) for name, value in settings.items()}
        done = subprocess.run(
            command,
            env={**base_environment(), **settings_for(api, stub_agent), **homes, **chosen},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


COMMANDS = {"daemon": (RUN, 69), "command": (STATUS, 69), "script": (SCRIPT, 1), "workflow script": (POLL, 1)}


@pytest.mark.parametrize("name", COMMANDS)
def test_c16_an_authority_nobody_knows_is_named_with_its_setting(company: Company, ask: Ask, name: str) -> None:
    command, code = COMMANDS[name]
    ended, said = ask(command, {"SUPABASE_URL": company.url})
    assert ended == code
    assert "SUPABASE_CA_FILE" in said
    assert "127.0.0.1 is from an authority unknown here" in said


@pytest.mark.parametrize("setting", ["SUPABASE_CA_FILE", "SSL_CERT_FILE"])
@pytest.mark.parametrize("name", ["command", "script", "workflow script"])
def test_c16_commands_and_scripts_believe_an_authority_they_are_told_of(
    company: Company,
    ask: Ask,
    setting: str,
    name: str,
) -> None:
    ended, said = ask(COMMANDS[name][0], {"SUPABASE_URL": company.url, setting: company.authority.ca_file})
    assert (ended, "Traceback" in said) == (0, False), said


@pytest.mark.parametrize("setting", ["SUPABASE_CA_FILE", "SSL_CERT_FILE"])
def test_c16_the_daemon_wakes_by_events_over_tls_of_an_authority_of_its_own(
    company: Company, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, setting: str
) -> None:
    daemon = start_daemon(SUPABASE_URL=company.url, **{setting: company.authority.ca_file}).ready()
    seed.item("ada")
    daemon.wait_for("wake.started", path="event")


def test_c16_a_proxy_is_the_only_way_out_and_everything_takes_it(
    company: Company,
    seed: Seed,
    working_agent: StubAgent,
    start_daemon: StartDaemon,
    ask: Ask,
) -> None:
    settings = {
        "SUPABASE_URL": company.outside_url,
        "SUPABASE_CA_FILE": company.authority.ca_file,
        "SUPABASE_PROXY": company.proxy_url,
    }
    daemon = start_daemon(LOG_LEVEL="debug", **settings).ready()
    seed.item("ada")
    daemon.wait_for("wake.started", path="event")
    for command in (STATUS, SCRIPT, POLL):
        before = len(company.proxy.asked)
        assert ask(command, settings)[0] == 0
        assert len(company.proxy.asked) > before
    assert {line.split(":")[0] for line in company.proxy.asked} == {f"CONNECT {HOST}"}
    assert company.proxy.refused == 0
    assert not any(word in str(line) for line in daemon.lines for word in (PASSWORD, quote(PASSWORD, safe="")))


@pytest.mark.parametrize("command", [STATUS, SCRIPT, POLL], ids=["command", "script", "workflow script"])
def test_c16_a_project_without_tls_is_asked_through_the_proxy_too(
    company: Company, ask: Ask, command: list[str]
) -> None:
    settings = {"SUPABASE_URL": company.plain_url, "SUPABASE_PROXY": f"http://127.0.0.1:{company.plain_proxy.port}"}
    assert ask(command, settings)[0] == 0
    assert company.plain_proxy.asked[0].startswith(f"POST http://{HOST}/rest/v1/rpc/")


@pytest.mark.parametrize("name", COMMANDS)
def test_c16_a_proxy_of_the_environment_is_named_and_not_used(company: Company, ask: Ask, name: str) -> None:
    command, code = COMMANDS[name]
    ended, said = ask(command, {"SUPABASE_URL": company.outside_url, "HTTPS_PROXY": company.proxy_url})
    assert ended == code
    assert "cannot be resolved" in said
    assert "HTTPS_PROXY" in said
    assert "SUPABASE_PROXY" in said
    assert PASSWORD not in said
    assert (company.proxy.asked, company.proxy.refused) == ([], 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_c16_a_proxy_that_wants_a_password_says_so(company: Company, ask: Ask, name: str) -> None:
    command, code = COMMANDS[name]
    settings = {"SUPABASE_URL": company.outside_url, "SUPABASE_CA_FILE": company.authority.ca_file}
    ended, said = ask(command, {**settings, "SUPABASE_PROXY": f"http://127.0.0.1:{company.proxy.port}"})
    assert (ended, company.proxy.refused > 0) == (code, True)
    assert "SUPABASE_PROXY" in said
    assert "407" in said


@pytest.mark.parametrize("command", [STATUS, SCRIPT, POLL], ids=["command", "script", "workflow script"])
def test_c16_the_environments_proxy_never_hijacks_loopback(
    company: Company, api: Api, ask: Ask, command: list[str]
) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), company.proxy_url)
    assert ask(command, {"SUPABASE_URL": api.url, **proxies})[0] == 0
    assert (company.proxy.asked, company.proxy.refused) == ([], 0)


@pytest.mark.parametrize("command", [[*PROGRAM, "check"], RUN, STATUS], ids=["check", "run", "command"])
@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("SUPABASE_CA_FILE", "/nowhere/ca.pem", "cannot be read"),
        ("SUPABASE_CA_FILE", "/etc/hostname", "no certificate"),
        ("SUPABASE_PROXY", "socks5://127.0.0.1:1", "not an http URL"),
    ],
    ids=["missing", "no certificate", "socks"],
)
def test_c16_a_bad_setting_is_a_fault_with_its_name(
    ask: Ask, command: list[str], setting: str, value: str, words: str
) -> None:
    ended, said = ask(command, {setting: value})
    assert ended == 78
    assert setting in said
    assert words in said


@pytest.mark.parametrize("value", ["/nowhere/ca.pem", "/etc/hostname"])
def test_c16_a_script_names_a_bad_file_of_authorities(ask: Ask, value: str) -> None:
    ended, said = ask(SCRIPT, {"SUPABASE_CA_FILE": value})
    assert (ended, f"SUPABASE_CA_FILE={value}" in said) == (2, True)


# -- another schema first


@pytest.fixture
def _api_schema_first(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a project's settings may have it: what names no schema is looked for in `api`."""
    database.execute("create schema api")
    database.execute("grant usage on schema api to anon, authenticated, service_role")
    plain = RestServer._settings
    monkeypatch.setattr(RestServer, "_settings", lambda self: {**plain(self), "PGRST_DB_SCHEMAS": "api, public"})


@pytest.mark.usefixtures("_api_schema_first")
def test_c17_the_daemon_finds_its_functions_behind_another_schema(
    api: Api, seed: Seed, start_daemon: StartDaemon, working_agent: StubAgent
) -> None:
    seed.agent("ada")
    daemon = start_daemon().ready()
    seed.item("ada")
    daemon.wait_for("wake.ended", ending="exited")


@pytest.mark.usefixtures("_api_schema_first")
@pytest.mark.parametrize(
    "command",
    [STATUS, [*PROGRAM, "runs", "list"], [*PROGRAM, "routing", "list"], SCRIPT, POLL],
    ids=["status", "runs", "routing", "script", "workflow script"],
)
def test_c17_commands_and_scripts_do_too(api: Api, seed: Seed, ask: Ask, command: list[str]) -> None:
    seed.agent("ada")
    ended, said = ask(command, {})
    assert ended == 0, said
