"""`agent_workflow_client.py` as an agent runs it: settings, fences, exit codes, the HTTP API in PostgREST's place."""

import json
import os
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.postgres import PostgresServer
from tests.support.api import running_api
from tests.support.database import Database, cloned
from tests.support.workflows import Workflows, fresh_workflows

CLIENT = Path(__file__).resolve().parents[2] / "scripts" / "agent_workflow_client.py"
KEY = "sb_secret_0123456789abcdef"


@pytest.fixture(scope="module")
def home(
    cluster: PostgresServer, migrated_template: str, project_keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Database, Api]]:
    folder = tmp_path_factory.mktemp("api")
    with cloned(cluster, migrated_template) as database, running_api(database, project_keys, folder) as api:
        yield database, api


class Agent:
    """Runs the command in a folder of its own."""

    def __init__(self, folder: Path, client: Path = CLIENT, **environment: str) -> None:
        self.folder, self.client = folder, client
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **environment}

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.client), *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def __call__(self, *arguments: str, code: int = 0, **environment: str) -> Any:
        done = self.run(*arguments, "--json", **environment)
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout)


@pytest.fixture
def runs(home: tuple[Database, Api]) -> Iterator[Workflows]:
    with fresh_workflows(home[0]) as workflows:
        workflows.route()
        yield workflows


@pytest.fixture
def agent(home: tuple[Database, Api], tmp_path: Path) -> Agent:
    api = home[1]
    return Agent(tmp_path, SUPABASE_URL=api.url, SUPABASE_SERVICE_ROLE_KEY=api.keys.service_role_key)


def test_an_agent_polls_for_itself_and_claims_only_its_own(runs: Workflows, agent: Agent) -> None:
    runs.route("other", "ada")
    mine, theirs = runs.run(), runs.run("other")
    runs.tick()
    assert {run["id"] for run in agent("poll")["runs"]} == {str(mine), str(theirs)}
    assert [run["id"] for run in agent("poll", AGENT_SLUG="coder")["runs"]] == [str(mine)]
    assert [run["id"] for run in agent("poll", "--agent", "ada")["runs"]] == [str(theirs)]
    assert agent("claim", str(theirs), "--session", "s", code=3, AGENT_SLUG="coder")["code"] == "not_yours"
    assert agent("claim", str(mine), "--session", "s", AGENT_SLUG="coder")["run"]["claimed_by"] == "coder"


def test_in_a_workspace_an_agent_is_who_the_workspace_says(runs: Workflows, agent: Agent, tmp_path: Path) -> None:
    scripts = tmp_path / "coder" / "skills" / "hq" / "scripts"
    shutil.copytree(CLIENT.parent, scripts, ignore=lambda _, names: [n for n in names if not n.endswith(".py")])
    coder = Agent(tmp_path / "coder", scripts / CLIENT.name, **agent.environment)
    runs.route("other", "ada")
    mine, theirs = runs.run(), runs.run("other")
    runs.tick()
    assert [run["id"] for run in coder("poll")["runs"]] == [str(mine)]
    assert {run["id"] for run in coder("poll", "--all")["runs"]} == {str(mine), str(theirs)}
    assert [run["id"] for run in coder("poll", "--agent", "ada")["runs"]] == [str(theirs)]
    assert [run["id"] for run in coder("poll", AGENT_SLUG="ada")["runs"]] == [str(theirs)]
    assert coder("claim", str(theirs), "--session", "s", code=3)["code"] == "not_yours"
    assert coder("claim", str(mine), "--session", "s")["run"]["claimed_by"] == "coder"
    assert "by coder; --all shows" in coder.run("poll").stdout
    assert coder("claim", str(theirs), "--session", "s", "--agent", "ada")["run"]["claimed_by"] == "ada"
    both = coder.run("poll", "--all", "--agent", "ada")
    assert (both.returncode, "--all" in both.stderr) == (2, True)


def test_a_claim_of_another_agents_run_says_whose_it_is(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    refused = agent("claim", str(run), "--session", "s", "--agent", "ada", code=3)
    assert refused["error"] == "this run is for the agent coder, and you are ada. Leave it."
    agent("claim", str(run), "--session", "s", "--agent", "coder")
    assert "another session" in agent("claim", str(run), "--session", "t", "--agent", "ada", code=3)["error"]


def test_the_largest_cost_and_tokens_are_kept(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    agent("claim", str(run), "--session", "s")
    agent("heartbeat", str(run), "--session", "s", "--cost-usd", "999999.999999", "--input-tokens", str(10**15 - 1))
    assert (str(runs.row(run)["cost_estimate"]), runs.row(run)["input_tokens"]) == ("999999.999999", 10**15 - 1)


def test_the_token_of_a_claim_is_kept_and_fences(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    claimed = agent("claim", str(run), "--session", "s")
    assert "claim_token" not in json.dumps(claimed)
    [kept] = agent.folder.rglob("leases-runs-*.json")
    assert str(runs.row(run)["claim_token"]) in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    # The run goes back and the same session name takes it elsewhere: this workspace's claim is an old one.
    runs.shift(run, "last_heartbeat_at", 700), runs.shift(run, "claimed_at", 700)
    runs.tick(), runs.tick()
    runs.claim(run, "s")
    assert agent("heartbeat", str(run), "--session", "s", code=3)["code"] == "not_yours"


@pytest.mark.parametrize("told_by", ["wake", "--claim"])
def test_c25_a_late_command_of_an_earlier_attempt_changes_nothing(runs: Workflows, agent: Agent, told_by: str) -> None:
    """One session name and one lease book through both attempts."""
    run = runs.run()
    here: list[tuple[tuple[str, ...], dict[str, str]]] = []
    for _ in range(2):
        runs.tick()
        wake = {"DISPATCHER_WAKE_ID": str(uuid.uuid4())} if told_by == "wake" else {}
        claimed = agent("claim", str(run), "--session", "main", **wake)
        here.append((() if told_by == "wake" else ("--claim", claimed["claim"]), wake))
        if len(here) == 1:
            runs.shift(run, "last_heartbeat_at", 700), runs.shift(run, "claimed_at", 700)
            runs.tick()
    before = runs.row(run)
    (first, first_wake), (second, second_wake) = here
    for command in (("heartbeat",), ("complete", "--output", "1"), ("fail", "--error", "x"), ("release",)):
        late = agent(command[0], str(run), "--session", "main", *command[1:], *first, code=3, **first_wake)
        assert late["code"] == "not_yours"
    assert runs.row(run) == before
    assert agent("complete", str(run), "--session", "main", *second, **second_wake)["status"] == "completed"


def test_c25_a_claim_nobody_noted_is_refused_here(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    agent("claim", str(run), "--session", "s")
    refused = agent("complete", str(run), "--session", "s", "--claim", "0a1b2c3d", code=3)
    assert refused["code"] == "unknown_claim"
    assert runs.status(run) == "claimed"


def test_c02_a_run_somebody_holds_is_asked_for_again(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    with runs.database.connect() as other:
        other.execute("begin")
        other.execute("select from workflow_runs for update")
        timer = threading.Timer(3.0, other.execute, ["rollback"])
        timer.start()
        assert agent("claim", str(run), "--session", "s")["status"] == "claimed"
        timer.join()


def test_a_wake_of_the_daemon_is_named_with_the_claim(runs: Workflows, agent: Agent) -> None:
    coder = runs.seed.agent("coder")
    run = runs.run()
    runs.tick()
    columns = {"gateway_id": runs.gateway_id, "tenant_id": runs.tenant, "instance_id": runs.id, "path": "event"}
    wake = runs.seed.insert("agent_wakes", agent_id=coder, deadline_at="2099-01-01", **columns)["id"]
    agent("claim", str(run), "--session", "s", DISPATCHER_WAKE_ID=str(wake))
    assert runs.row(run)["wake_id"] == wake


def test_usage_release_and_failure(runs: Workflows, agent: Agent) -> None:
    run = runs.run()
    runs.tick()
    agent("claim", str(run), "--session", "s")
    agent("heartbeat", str(run), "--session", "s", "--cost-usd", "0.05", "--input-tokens", "7", "--model", "m1")
    row = runs.row(run)
    assert (row["status"], float(row["cost_estimate"]), row["input_tokens"], row["model_id"]) == (
        "running",
        0.05,
        7,
        "m1",
    )
    assert agent("release", str(run), "--session", "s")["status"] == "queued"
    runs.tick()
    agent("claim", str(run), "--session", "s")
    failed = agent("fail", str(run), "--session", "s", "--error", "Größe\n長")
    assert (failed["status"], runs.row(run)["last_error"]) == ("failed", "Größe\n長")


def test_text_for_people(runs: Workflows, agent: Agent) -> None:
    run = runs.run(input_payload={"größe": 1})
    runs.tick()
    assert f"{run}  code-change  for coder, attempt 1" in agent.run("poll").stdout
    assert '{"größe": 1}' in agent.run("claim", str(run), "--session", "s").stdout
    refused = agent.run("claim", str(run), "--session", "t")
    assert (refused.returncode, refused.stdout.startswith("another session has claimed this run.")) == (3, True)
    assert "code-change (coder, at most 1): 0 queued, 1 active" in agent.run("stats").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("dance",),
        ("claim",),
        ("claim", "no-uuid", "--session", "s"),
        ("claim", str(uuid.uuid4())),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", "{"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--cost-usd", "-1"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--cost-usd", "nan"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--cost-usd", "1e40"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--cost-usd", "1000000"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--cost-usd", "999999.9999999"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--input-tokens", str(10**15)),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", "NaN"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", '{"a": [-Infinity]}'),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", "1e999"),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", '["\\u0000"]'),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", '{"\\u0000": 1}'),
        ("complete", str(uuid.uuid4()), "--session", "s", "--output", "[" * 100_000),
        ("fail", str(uuid.uuid4()), "--session", "s"),
        ("poll", "--limit", "0"),
    ],
)
def test_wrong_usage_is_2_on_stderr(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    # With settings, so that nothing but the arguments is wrong.
    settings = {"SUPABASE_URL": "http://127.0.0.1:1", "SUPABASE_SERVICE_ROLE_KEY": KEY, "HQ_CALL_TIMEOUT": "0.1"}
    done = Agent(tmp_path, **settings).run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def test_missing_settings_are_2_and_a_dead_service_1(tmp_path: Path) -> None:
    done = Agent(tmp_path).run("poll")
    assert (done.returncode, "SUPABASE_URL" in done.stderr) == (2, True)
    dead = Agent(tmp_path, SUPABASE_URL="http://127.0.0.1:1", SUPABASE_SERVICE_ROLE_KEY=KEY, HQ_CALL_TIMEOUT="0.5")
    assert dead("stats", code=1)["code"] == "unreachable"
    assert KEY not in str(dead.run("stats"))


@pytest.mark.parametrize("key", ["no-key", "a.b.c"])
def test_a_key_that_is_refused_is_a_matter_of_settings(agent: Agent, key: str) -> None:
    done = agent.run("poll", "--json", SUPABASE_SERVICE_ROLE_KEY=key)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("the key was refused: ")
    assert key not in done.stderr


# ------------------------------------------------------------------------------------------- the HTTP API


class FakeApi(ThreadingHTTPServer):
    """Answers with what `say` holds for a path; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.say: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, Any, str]] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/functions/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: Any) -> None:
        path = self.path.removeprefix("/functions/v1")
        self.server.asked.append((self.command, path, body, self.headers.get("Authorization", "")))
        status, document = self.server.say.get(path.partition("?")[0], (404, {}))
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def http_api() -> Iterator[FakeApi]:
    server = FakeApi()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_http_api_takes_the_place_of_postgrest(http_api: FakeApi, tmp_path: Path) -> None:
    run = str(uuid.uuid4())
    agent = Agent(tmp_path, DASHBOARD_API_BASE=http_api.base, DASHBOARD_API_TOKEN="a.jwt.token")
    shown = {"id": run, "workflow_type": "t", "input_payload": {}, "session_id": "s", "status": "claimed"}
    done = {"applied": True, "code": "ok", "status": "claimed", "run": shown, "run_id": run}
    http_api.say = {
        "/workflow-runs/pending": (200, {"count": 0, "runs": []}),
        f"/workflow-runs/{run}/claim": (200, {**done, "claim_token": run}),
        f"/workflow-runs/{run}/complete": (409, {"code": "not_yours", "run": shown}),
        f"/workflow-runs/{run}/release": (401, {"message": "who are you"}),
    }
    assert agent("poll", "--limit", "5", "--agent", "ada")["count"] == 0
    agent("claim", run, "--session", "s")
    agent("complete", run, "--session", "s", "--cost-usd", "0.5", code=3)
    assert agent("heartbeat", run, "--session", "s", code=4)["code"] == "not_found"
    refused = agent.run("release", run, "--session", "s")
    assert (refused.returncode, refused.stderr) == (2, "the API refused the token: who are you\n")
    asked = [(method, path, body) for method, path, body, _ in http_api.asked]
    assert asked[0] == ("GET", "/workflow-runs/pending?limit=5&agent=ada", None)
    assert asked[1] == ("POST", f"/workflow-runs/{run}/claim", {"session": "s"})
    assert asked[2][2] == {"session": "s", "claim_token": run, "usage": {"cost_usd": 0.5}}
    assert {authorization for *_, authorization in http_api.asked} == {"Bearer a.jwt.token"}


@pytest.mark.parametrize("option", ["--error", "--agent", "--model"])
def test_f9_a_blank_text_about_a_run_is_wrong_usage(agent: Agent, option: str) -> None:
    given = {"--session": "s", "--error": "e", option: " "}
    pairs = [text for pair in given.items() for text in pair]
    done = agent.run("fail", str(uuid.uuid4()), *pairs)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"argument {option}: must not be empty or blank" in done.stderr
