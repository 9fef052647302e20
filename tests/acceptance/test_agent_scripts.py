"""The agent's commands as an agent runs them: subprocesses in a workspace, a real PostgREST, both schemas."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from dispatcher.local.api import Api
from dispatcher.local.keys import Keys
from dispatcher.local.postgres import PostgresServer
from tests.support.api import running_api
from tests.support.database import Database, cloned
from tests.support.seed import Seed

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
IN_WORKSPACE = Path("skills/hq/scripts")
ITEM_KEYS = {
    "inbox_item_id", "event_type", "summary", "task_id", "comment_id", "contact_id",
    "attempt", "leased_until", "lease_token", "context",
}  # fmt: skip


Home = tuple[Database, Api]


@pytest.fixture(scope="module")
def home(
    cluster: PostgresServer,
    project_keys: Keys,
    migrated_template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("api")
    with cloned(cluster, migrated_template) as database, running_api(database, project_keys, folder) as api:
        yield database, api


@pytest.fixture(scope="module")
def yourhq_home(
    cluster: PostgresServer,
    project_keys: Keys,
    yourhq_template: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("yourhq-api")
    with cloned(cluster, yourhq_template) as database, running_api(database, project_keys, folder) as api:
        yield database, api


class Agent:
    """One agent with a workspace of its own, and the operator's view of its items."""

    def __init__(self, database: Database, api: Api, folder: Path) -> None:
        self.database, self.api = database, api
        self.seed = Seed(database)
        self.slug = f"agent-{uuid.uuid4().hex[:8]}"
        self.id = self.seed.agent(self.slug)
        self.workspace = folder / self.slug
        self.openclaw_home = folder / "openclaw"
        self.openclaw_home.mkdir()
        shutil.copytree(SCRIPTS, self.workspace / IN_WORKSPACE, ignore=lambda _folder, names: not_ours(names))
        (self.workspace / "agent.json").write_text("{}")

    @property
    def key(self) -> str:
        return self.api.keys.service_role_key

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.workspace.parent),
            "OPENCLAW_HOME": str(self.openclaw_home),
            "SUPABASE_URL": self.api.url,
            "SUPABASE_SERVICE_ROLE_KEY": self.key,
        }

    @property
    def state_file(self) -> Path:
        return self.openclaw_home / "state" / "hq" / f"leases-{self.slug}.json"

    def command(self, script: str, *arguments: str) -> list[str]:
        return [sys.executable, str(IN_WORKSPACE / f"{script}.py"), *arguments]

    def run(
        self, script: str, *arguments: str, cwd: Path | None = None, **environment: Any
    ) -> subprocess.CompletedProcess[str]:
        chosen = {name: value for name, value in (self.environment | environment).items() if value is not None}
        command = self.command(script, *arguments)
        if cwd is not None:
            command[1] = str(self.workspace / command[1])
        return subprocess.run(
            command, cwd=cwd or self.workspace, env=chosen, capture_output=True, encoding="utf-8",
            timeout=60, check=False,
        )  # fmt: skip

    def ok(self, script: str, *arguments: str, **environment: Any) -> dict[str, Any]:
        return self.answer(0, script, *arguments, **environment)

    def answer(self, code: int, script: str, *arguments: str, **environment: Any) -> dict[str, Any]:
        done = self.run(script, *arguments, **environment)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert self.key not in done.stdout + done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def leased(self, *arguments: str, **environment: Any) -> dict[str, Any]:
        [item] = self.ok("hq_inbox_process", *arguments, **environment)["items"]
        return dict(item)

    def item(self, **columns: Any) -> str:
        return str(self.seed.item(self.id, **columns))

    def row(self, item_id: str) -> dict[str, Any]:
        return self.database.row("select * from public.agent_inbox_items where id = %s", (item_id,))

    def end_lease(self, item_id: str) -> None:
        self.database.execute(
            "update public.agent_inbox_items set leased_until = now() - interval '1 s' where id = %s",
            (item_id,),
        )


def not_ours(names: list[str]) -> list[str]:
    """What is not copied into an agent's workspace."""
    return [name for name in names if not name.startswith("hq_") or not name.endswith(".py")]


def agent_in(home: Home, folder: Path) -> Iterator[Agent]:
    database, api = home
    try:
        yield Agent(database, api, folder)
    finally:
        api.rest_faults.clear()


@pytest.fixture
def agent(home: Home, tmp_path: Path) -> Iterator[Agent]:
    yield from agent_in(home, tmp_path)


@pytest.fixture(params=["home", "yourhq_home"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    """An agent on our schema, then one on YourHQ's."""
    yield from agent_in(request.getfixturevalue(request.param), tmp_path)


# ---------------------------------------- take and close


def test_an_agent_takes_an_item_and_finishes_it(either: Agent) -> None:
    task = either.seed.task("Write")
    item_id = either.item(summary="Größe 長 \u2028", task_id=task, context={"a": [1, "b"]})
    printed = either.ok("hq_inbox_process")
    assert set(printed) == {"agent", "leased_count", "items", "instructions"}
    assert (printed["agent"], printed["leased_count"]) == (either.slug, 1)
    [item] = printed["items"]
    assert set(item) == ITEM_KEYS
    assert (item["inbox_item_id"], item["summary"], item["attempt"]) == (item_id, "Größe 長 \u2028", 1)
    assert item["task_id"] == str(task)
    assert item["context"]["a"] == [1, "b"]
    assert "skills/hq/scripts/hq_inbox_done.py" in printed["instructions"]
    assert item["lease_token"] not in printed["instructions"]
    assert either.ok("hq_inbox_done", item_id) == {
        "agent": either.slug, "inbox_item_id": item_id, "result": "done", "status": "done",
        "attempt": 1, "max_attempts": 3, "repeated": False,
    }  # fmt: skip
    assert either.row(item_id)["status"] == "done"
    assert either.ok("hq_inbox_done", item_id)["repeated"] is True
    assert either.ok("hq_inbox_process") == {
        "agent": either.slug, "inbox": "empty", "message": "No actionable items in inbox.",
    }  # fmt: skip


def test_a_batch_is_the_oldest_items(agent: Agent) -> None:
    ids = [agent.item() for _ in range(4)]
    printed = agent.ok("hq_inbox_process", "--batch", "3", "--lease-seconds", "600")
    assert [item["inbox_item_id"] for item in printed["items"]] == ids[:3]
    assert len({item["inbox_item_id"] for item in printed["items"]}) == printed["leased_count"] == 3
    row = agent.row(ids[0])
    assert (row["leased_until"] - row["leased_at"]).total_seconds() == 600
    for item_id in ids[:3]:
        agent.ok("hq_inbox_done", item_id)


def test_status_shows_and_leases_nothing(either: Agent) -> None:
    item_id = either.item()
    either.item(status="failed", attempt_count=3)
    printed = either.ok("hq_inbox_process", "--status")
    assert set(printed) == {"agent", "actionable_count", "by_status", "items"}
    assert (printed["actionable_count"], printed["by_status"]) == (1, {"pending": 1, "failed": 1})
    assert printed["items"][0]["inbox_item_id"] == item_id
    assert either.row(item_id)["attempt_count"] == 0


def test_a_failed_item_comes_again_until_its_attempts_are_spent(either: Agent) -> None:
    item_id = either.item(max_attempts=2)
    either.leased()
    failed = either.ok("hq_inbox_fail", item_id, "the", "site is down")
    assert (failed["result"], failed["status"]) == ("failed", "failed")
    assert either.row(item_id)["context"]["last_failure_reason"] == "the site is down"
    assert either.ok("hq_inbox_process")["inbox"] == "empty"
    either.database.execute(
        "update public.agent_inbox_items set failed_at = failed_at - interval '31 s' where id = %s",
        (item_id,),
    )
    assert either.leased()["attempt"] == 2
    assert either.ok("hq_inbox_fail", item_id)["status"] == "dead_letter"
    assert either.ok("hq_inbox_fail", item_id)["repeated"] is True


def test_an_escalation_reaches_the_operator(either: Agent) -> None:
    task = either.seed.task(status="in_progress")
    item_id = either.item(task_id=task)
    either.leased()
    assert either.ok("hq_escalate", item_id, "who pays for this?")["result"] == "escalated"
    assert either.ok("hq_escalate", item_id, "who pays for this?")["repeated"] is True
    assert either.database.value("select status from public.tasks where id = %s", (task,)) == "blocked"
    notes = either.database.rows("select body from public.notifications where actor_agent_id = %s", (either.id,))
    assert notes == [{"body": "who pays for this?"}]


@pytest.mark.parametrize("script", ["hq_inbox_done", "hq_inbox_fail", "hq_escalate"])
def test_ff43_a_lost_lease_is_exit_3_and_changes_nothing(agent: Agent, script: str) -> None:
    item_id = agent.item()
    agent.leased()
    agent.end_lease(item_id)
    before = agent.row(item_id)
    refused = agent.answer(3, script, item_id, *(["why"] if script == "hq_escalate" else []))
    assert (refused["code"], refused["inbox_item_id"]) == ("lease_lost", item_id)
    assert "Nothing was changed" in refused["error"]
    assert agent.row(item_id) == before


def test_ff43_an_agent_overtaken_by_another_cannot_finish_its_item(either: Agent, tmp_path: Path) -> None:
    item_id = either.item()
    old = either.leased()
    either.end_lease(item_id)
    new = either.leased(HQ_STATE_DIR=str(tmp_path / "elsewhere"))
    assert either.answer(3, "hq_inbox_done", item_id)["code"] == "lease_lost"
    assert either.answer(3, "hq_inbox_fail", item_id, "--lease-token", old["lease_token"])["code"] == "lease_lost"
    assert either.row(item_id)["status"] == "leased"
    assert either.ok("hq_inbox_done", item_id, "--lease-token", new["lease_token"])["status"] == "done"


def test_c25_an_old_attempt_never_acts_with_the_token_of_a_later_one(either: Agent) -> None:
    item_id = either.item()
    first, second = ({"DISPATCHER_WAKE_ID": str(uuid.uuid4())} for _ in range(2))
    either.leased(**first)
    either.end_lease(item_id)
    assert either.leased(**second)["attempt"] == 2
    held = either.row(item_id)
    for script, *reason in (("hq_inbox_done",), ("hq_inbox_fail",), ("hq_escalate", "why")):
        assert either.answer(3, script, item_id, *reason, **first)["code"] == "lease_lost"
    third = {"DISPATCHER_WAKE_ID": str(uuid.uuid4())}
    assert either.answer(3, "hq_inbox_done", item_id, **third)["code"] == "no_lease"
    assert either.row(item_id) == held
    assert either.ok("hq_inbox_done", item_id, **second)["repeated"] is False
    assert either.answer(3, "hq_inbox_done", item_id, **first)["code"] == "lease_lost"


def test_c25_where_no_wake_is_known_a_second_lease_needs_its_token(either: Agent) -> None:
    item_id = either.item()
    either.leased()
    either.end_lease(item_id)
    printed = either.ok("hq_inbox_process")
    assert "--lease-token LEASE_TOKEN" in printed["instructions"]
    held = either.row(item_id)
    refused = either.answer(3, "hq_inbox_done", item_id)
    assert (refused["code"], "--lease-token" in refused["error"]) == ("no_lease", True)
    assert either.row(item_id) == held
    token = printed["items"][0]["lease_token"]
    assert either.ok("hq_inbox_done", item_id, "--lease-token", token)["status"] == "done"
    assert either.answer(3, "hq_inbox_done", item_id)["code"] == "no_lease"


def test_c25_an_attempt_that_another_wake_replaced_takes_nothing(agent: Agent) -> None:
    item_id = agent.item()
    gateway = agent.database.value("select gateway_id from public.agents where id = %s", (agent.id,))
    agent.seed.insert(
        "agent_wakes", tenant_id=agent.seed.tenant_id, agent_id=agent.id, gateway_id=gateway, path="event",
        deadline_at="2099-01-01",
    )  # fmt: skip
    refused = agent.answer(3, "hq_inbox_process", DISPATCHER_WAKE_ID=str(uuid.uuid4()))
    assert (refused["code"], refused["agent"]) == ("wake_over", agent.slug)
    assert agent.row(item_id)["status"] == "pending"
    wrong = agent.run("hq_inbox_process", DISPATCHER_WAKE_ID="7")
    assert (wrong.returncode, "DISPATCHER_WAKE_ID must be a uuid" in wrong.stderr) == (2, True)


def test_c2_an_item_somebody_holds_is_asked_for_again_and_then_named(agent: Agent) -> None:
    item_id = agent.item()
    agent.leased("--lease-seconds", "600")
    holder = agent.database.connect(autocommit=False)
    holder.execute("select from public.agent_inbox_items where id = %s for update", (item_id,))
    refused = agent.answer(1, "hq_inbox_done", item_id)
    assert (refused["code"], "nothing was changed" in refused["error"]) == ("busy", True)
    holder.rollback()
    assert agent.ok("hq_inbox_done", item_id)["repeated"] is False


def test_an_item_that_was_never_leased_here_is_left_alone(agent: Agent) -> None:
    item_id = agent.item()
    assert agent.answer(3, "hq_inbox_done", item_id)["code"] == "no_lease"
    assert agent.row(item_id)["status"] == "pending"
    unknown = str(uuid.uuid4())
    refused = agent.answer(1, "hq_inbox_done", unknown, "--lease-token", str(uuid.uuid4()))
    assert refused["code"] == "not_found"


# ---------------------------------------- settings


def test_settings_come_from_the_gateways_secrets(agent: Agent) -> None:
    secrets = agent.openclaw_home / "secrets"
    secrets.mkdir()
    (secrets / "gateway.env").write_text(
        f"# the gateway's own\nexport SUPABASE_URL='{agent.api.url}'  # local\n\nGATEWAY_ID=local\n"
        f'SUPABASE_SERVICE_ROLE_KEY="{agent.key}"\r\n'
    )
    agent.item()
    assert agent.leased(SUPABASE_URL=None, SUPABASE_SERVICE_ROLE_KEY=None)["attempt"] == 1


def test_settings_come_from_the_agents_secrets_last(agent: Agent) -> None:
    agents = agent.openclaw_home / "secrets" / "agents"
    agents.mkdir(parents=True)
    (agents.parent / "gateway.env").write_text("SUPABASE_URL=\n")
    (agents / f"{agent.slug}.env").write_text(
        f"SUPABASE_URL={agent.api.url}/ # with a slash\nSUPABASE_SERVICE_ROLE_KEY={agent.key}\n"
    )
    agent.item()
    agent.leased(SUPABASE_URL=None, SUPABASE_SERVICE_ROLE_KEY=None)
    (agents.parent / "gateway.env").write_text("SUPABASE_SERVICE_ROLE_KEY=not-the-key\n")
    assert agent.run("hq_inbox_process", SUPABASE_URL=None, SUPABASE_SERVICE_ROLE_KEY=None).returncode == 2
    assert agent.ok("hq_inbox_process")["inbox"] == "empty"  # the environment wins


def test_the_slug_is_named_or_the_folder_of_agent_json_or_the_folder(agent: Agent, tmp_path: Path) -> None:
    named = agent.ok("hq_inbox_process", AGENT_SLUG=agent.slug)
    assert named["agent"] == agent.slug
    below = agent.workspace / "notes" / "deep"
    below.mkdir(parents=True)
    assert json.loads(agent.run("hq_inbox_process", cwd=below).stdout)["agent"] == agent.slug
    assert json.loads(agent.run("hq_inbox_process", cwd=tmp_path).stdout)["agent"] == agent.slug
    (agent.workspace / "agent.json").unlink()
    assert json.loads(agent.run("hq_inbox_process", cwd=below).stdout)["agent"] == agent.slug


def test_a_skill_shared_by_link_belongs_to_the_workspace_it_is_reached_through(agent: Agent, tmp_path: Path) -> None:
    skill = agent.workspace / "skills" / "hq"
    skill.rename(tmp_path / "shared-skill")
    skill.symlink_to(tmp_path / "shared-skill")
    (agent.workspace / "agent.json").unlink()
    assert json.loads(agent.run("hq_inbox_process", cwd=tmp_path).stdout)["agent"] == agent.slug


def test_scripts_run_from_elsewhere_belong_to_the_working_folders_agent(agent: Agent) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "hq_inbox_process.py"), "--status"],
        cwd=agent.workspace, env=agent.environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["agent"] == agent.slug


def test_ff22_a_slug_with_reserved_characters_is_its_own_agent(agent: Agent) -> None:
    hostile = f'ops,lead(1)"x"/../{agent.slug}'
    item_id = str(agent.seed.item(hostile))
    agent.item()
    assert agent.leased(AGENT_SLUG=hostile)["inbox_item_id"] == item_id
    assert agent.ok("hq_inbox_done", item_id, AGENT_SLUG=hostile)["status"] == "done"


def test_another_tenants_agent_of_the_same_slug_is_not_touched(agent: Agent) -> None:
    tenant = uuid.uuid4()
    theirs = str(agent.seed.item(agent.seed.agent(agent.slug, gateway="far", tenant_id=tenant)))
    assert agent.ok("hq_inbox_process")["inbox"] == "empty"
    assert agent.leased(TENANT_ID=str(tenant))["inbox_item_id"] == theirs
    assert agent.answer(1, "hq_inbox_process", TENANT_ID=str(uuid.uuid4()))["code"] == "unknown_agent"


def test_a_new_style_key_works(agent: Agent) -> None:
    agent.item()
    assert agent.leased(SUPABASE_SERVICE_ROLE_KEY=agent.api.keys.secret_key)["attempt"] == 1


def test_missing_settings_are_all_named_on_stderr(agent: Agent) -> None:
    done = agent.run("hq_inbox_process", SUPABASE_URL=None, SUPABASE_SERVICE_ROLE_KEY=None, TENANT_ID="nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SUPABASE_URL and SUPABASE_SERVICE_ROLE_KEY" in done.stderr
    assert "TENANT_ID must be a uuid" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "call",
    [
        ("hq_inbox_process", "--batch", "4"),
        ("hq_inbox_process", "--batch", "0"),
        ("hq_inbox_process", "--batch", "two"),
        ("hq_inbox_process", "--lease-seconds", "0"),
        ("hq_inbox_process", "--leave"),
        ("hq_inbox_done",),
        ("hq_inbox_done", "not-an-id"),
        ("hq_inbox_done", "id=eq.1"),
        ("hq_escalate", str(uuid.UUID(int=7))),
        ("hq_inbox_post", "--to", "x"),
        ("hq_inbox_post", "--to", "x", "--summary", "s", "--context", "[1]"),
        ("hq_inbox_post", "--to", "x", "--summary", "s", "--context", "{"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_on_stderr(agent: Agent, call: tuple[str, ...]) -> None:
    done = agent.run(*call)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage:" in done.stderr


# ---------------------------------------- what goes wrong


def test_an_unknown_agent_is_exit_1_with_its_slug(agent: Agent) -> None:
    for arguments in ([], ["--status"]):
        refused = agent.answer(1, "hq_inbox_process", *arguments, AGENT_SLUG="nobody-here")
        assert refused["code"] == "unknown_agent"
        assert "nobody-here" in refused["error"]


def test_a_refused_key_is_said_without_showing_it(agent: Agent) -> None:
    wrong = agent.api.keys.token("service_role", seconds=-60)
    done = agent.run("hq_inbox_process", SUPABASE_SERVICE_ROLE_KEY=wrong)
    assert done.returncode == 1
    assert "key was refused" in json.loads(done.stdout)["error"]
    assert wrong not in done.stdout + done.stderr


def test_a_key_without_rights_takes_nothing(agent: Agent) -> None:
    item_id = agent.item()
    for key in (agent.api.keys.anon_key, agent.api.keys.publishable_key):
        assert agent.answer(1, "hq_inbox_process", SUPABASE_SERVICE_ROLE_KEY=key)["code"] == "42501"
    assert agent.row(item_id)["status"] == "pending"


@pytest.mark.parametrize(
    "fault",
    [
        {"fail": 2, "status": 503},
        {"fail": 1, "status": 500, "body": {"code": "40P01", "message": "deadlock detected"}},
        {"fail": 1, "status": 400, "body": {"code": "57P01", "message": "terminating connection"}},
        {"fail": 1, "status": 404, "body": {"code": "PGRST202", "message": "not in the schema cache"}},
        {"cut": 1},
    ],
    ids=lambda fault: json.dumps(fault)[:40],
)
def test_trouble_in_passing_is_not_the_agents(agent: Agent, fault: dict[str, object]) -> None:
    item_id = agent.item()
    agent.api.faults(rest=fault)
    assert agent.leased()["inbox_item_id"] == item_id


def test_trouble_that_stays_is_exit_1_and_names_it(agent: Agent) -> None:
    item_id = agent.item()
    agent.api.faults(rest={"fail": -1, "status": 404, "body": {"code": "PGRST202", "message": "no such function"}})
    refused = agent.answer(1, "hq_inbox_process")
    assert refused["code"] == "PGRST202"
    assert "apply the dispatcher's migrations" in refused["error"]
    agent.api.faults(rest={"fail": -1, "status": 502, "body": "<html>bad gateway</html>"})
    assert agent.answer(1, "hq_inbox_process", "--status")["code"] == "http_502"
    assert agent.row(item_id)["attempt_count"] == 0


def test_ff28_a_lost_answer_costs_neither_an_attempt_nor_an_item(agent: Agent) -> None:
    first, second = agent.item(), agent.item()
    agent.api.faults(rest={"lose_replies": 2})
    item = agent.leased()
    assert (item["inbox_item_id"], item["attempt"]) == (first, 1)
    assert agent.row(second)["status"] == "pending"
    agent.api.faults(rest={"lose_replies": 2})
    done = agent.ok("hq_inbox_done", first)
    assert (done["status"], done["repeated"]) == ("done", True)


def test_ff26_hostile_content_passes_whole_and_harmless(agent: Agent) -> None:
    nasty = '\u202e\x1b[2J\x9b\' -- \n{"error": 1}\r' + "長\U0001f600" * 33_000
    item_id = agent.item(summary=nasty, context={"k\n": nasty})
    done = agent.run("hq_inbox_process", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0
    [item] = json.loads(done.stdout)["items"]
    assert item["summary"] == item["context"]["k\n"] == nasty
    assert "\x1b" not in done.stdout
    assert agent.ok("hq_inbox_fail", item_id, "ok\udcff " + "x" * 100_000)["status"] == "failed"
    reason = agent.row(item_id)["context"]["last_failure_reason"]
    assert reason.startswith("ok\ufffd")
    assert len(reason) == 4000


def test_a_context_of_any_json_type_is_printed(agent: Agent) -> None:
    contexts = [[1, 2], "text", None]
    for context in contexts:
        agent.item(context=Jsonb(context))
    items = agent.ok("hq_inbox_process", "--batch", "3")["items"]
    assert [item["context"] for item in items] == contexts


def run_in_shell(agent: Agent, redirection: str) -> int:
    command = " ".join(agent.command("hq_inbox_process")) + redirection
    return subprocess.run(
        ["bash", "-c", command], cwd=agent.workspace, env=agent.environment, capture_output=True,
        timeout=60, check=False,
    ).returncode  # fmt: skip


@pytest.mark.parametrize("redirection", [" >&-", " >/dev/full"])
def test_items_nobody_can_read_are_given_back(agent: Agent, redirection: str) -> None:
    item_id = agent.item()
    assert run_in_shell(agent, redirection) == 1
    row = agent.row(item_id)
    assert (row["status"], row["attempt_count"]) == ("pending", 0)
    assert agent.leased()["attempt"] == 1


def test_items_are_given_back_when_the_reader_goes_away(agent: Agent) -> None:
    item_id = agent.item(summary="x" * 200_000)
    with start(agent) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(30) == 1
    row = agent.row(item_id)
    assert (row["status"], row["attempt_count"]) == ("pending", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_items_are_given_back_when_the_command_is_stopped_while_it_prints(
    agent: Agent, number: signal.Signals, wait_until: Callable[..., object]
) -> None:
    item_id = agent.item(summary="x" * 200_000)
    with start(agent) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"{"  # it prints, and the pipe is full
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    row = agent.row(item_id)
    assert (row["status"], row["attempt_count"]) == ("pending", 0)


def start(agent: Agent) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        agent.command("hq_inbox_process"), cwd=agent.workspace, env=agent.environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip


# ---------------------------------------- the token file


def test_tokens_are_kept_for_the_owner_alone(agent: Agent) -> None:
    item_id = agent.item()
    token = agent.leased()["lease_token"]
    assert stat.S_IMODE(agent.state_file.stat().st_mode) == 0o600
    assert json.loads(agent.state_file.read_text())["leases"] == [
        {"item": item_id, "token": token, "wake": None, "closed": False}
    ]
    assert sorted(path.name for path in agent.state_file.parent.iterdir()) == [
        f"leases-{agent.slug}.json", f"leases-{agent.slug}.lock",
    ]  # fmt: skip


def test_tokens_are_kept_in_the_workspace_where_openclaw_has_no_home(agent: Agent) -> None:
    item_id = agent.item()
    nowhere = str(agent.openclaw_home / "absent")
    agent.leased(OPENCLAW_HOME=nowhere)
    assert (agent.workspace / ".hq" / ".gitignore").read_text() == "*\n"
    assert agent.ok("hq_inbox_done", item_id, OPENCLAW_HOME=nowhere)["status"] == "done"


def test_without_a_place_for_tokens_the_agent_is_told_to_pass_them(agent: Agent) -> None:
    item_id = agent.item()
    (agent.workspace / "file").write_text("")
    printed = agent.ok("hq_inbox_process", HQ_STATE_DIR=str(agent.workspace / "file"))
    assert "--lease-token LEASE_TOKEN" in printed["instructions"]
    token = printed["items"][0]["lease_token"]
    assert agent.ok("hq_inbox_done", item_id, "--lease-token", token)["status"] == "done"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"leases": [1]}', "\x00\xff"])
def test_a_damaged_token_file_is_replaced(agent: Agent, damage: str) -> None:
    item_id = agent.item()
    agent.state_file.parent.mkdir(parents=True)
    agent.state_file.write_text(damage)
    agent.leased()
    assert agent.ok("hq_inbox_done", item_id)["status"] == "done"


def test_commands_at_once_take_different_items_and_lose_no_token(agent: Agent) -> None:
    ids = sorted(agent.item() for _ in range(4))
    with ThreadPoolExecutor(4) as pool:
        taken = [future.result() for future in [pool.submit(agent.leased) for _ in ids]]
    assert sorted(item["inbox_item_id"] for item in taken) == ids
    for item_id in ids:
        assert agent.ok("hq_inbox_done", item_id)["repeated"] is False


# ---------------------------------------- hand work on


def test_an_agent_hands_work_to_another(either: Agent) -> None:
    other = f"other-{either.slug}"
    other_id, task = either.seed.agent(other), either.seed.task()
    posted = either.ok(
        "hq_inbox_post",
        "--to",
        other,
        "--summary",
        "please look",
        "--task-id",
        str(task),
        "--context",
        '{"a": 1}',
    )
    assert set(posted) == {"agent", "to", "inbox_item_id", "chain_depth", "repeated"}
    row = either.row(posted["inbox_item_id"])
    assert (row["agent_id"], row["task_id"], row["summary"]) == (other_id, task, "please look")
    assert either.leased(AGENT_SLUG=other)["context"]["from_agent"] == either.slug


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--to", "nobody-here", "--summary", "s"), "unknown_recipient"),
        (("--to", "SELF", "--summary", "s"), "self_handoff_unmarked"),
        (("--to", "SELF", "--summary", "s", "--self-handoff", "--event-type", "gossip"), "invalid"),
    ],
)
def test_a_refused_post_is_exit_1_and_says_why(agent: Agent, arguments: tuple[str, ...], code: str) -> None:
    named = [agent.slug if argument == "SELF" else argument for argument in arguments]
    refused = agent.answer(1, "hq_inbox_post", *named)
    assert refused["code"] == code
    assert refused["error"]
    assert agent.ok("hq_inbox_process")["inbox"] == "empty"


def usage_fault(agent: Agent, script: str, *arguments: str) -> str:
    """What stderr says of a wrong call; nothing is on stdout."""
    done = agent.run(script, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr


@pytest.mark.parametrize("blank", ["", " \t\n", "\u200b\u2060", "\u3164"])
@pytest.mark.parametrize("option", ["--to", "--summary", "--event-type", "--request-key"])
def test_f9_a_post_with_a_blank_text_is_wrong_usage(agent: Agent, option: str, blank: str) -> None:
    given = {"--to": agent.slug, "--summary": "s", option: blank}
    told = usage_fault(agent, "hq_inbox_post", "--self-handoff", *[text for pair in given.items() for text in pair])
    assert f"argument {option}: must not be empty or blank" in told
    assert agent.ok("hq_inbox_process")["inbox"] == "empty"


@pytest.mark.parametrize("form", ["--task-id", "--context"])
def test_f9_a_post_about_a_task_that_is_not_there_is_wrong_usage(either: Agent, form: str) -> None:
    unknown = str(uuid.uuid4())
    about = unknown if form == "--task-id" else json.dumps({"task_id": unknown})
    told = usage_fault(either, "hq_inbox_post", "--to", either.slug, "--self-handoff", "--summary", "s", form, about)
    assert f"there is no task {unknown}" in told
    assert either.ok("hq_inbox_process")["inbox"] == "empty"


@pytest.mark.parametrize("script", ["hq_escalate", "hq_inbox_fail"])
def test_f9_a_blank_reason_is_wrong_usage_and_changes_nothing(agent: Agent, script: str) -> None:
    item_id = agent.item()
    agent.leased()
    for blank in (" ", "\u200b"):
        assert "the reason must not be empty or blank" in usage_fault(agent, script, item_id, blank, "")
    assert agent.row(uuid.UUID(item_id) if isinstance(item_id, str) else item_id)["status"] == "leased"
    assert agent.ok("hq_inbox_fail", item_id)["result"] == "failed"


def test_ff54_an_intended_note_to_oneself_is_possible(agent: Agent) -> None:
    posted = agent.ok("hq_inbox_post", "--to", agent.slug, "--summary", "go on", "--self-handoff")
    assert agent.leased()["inbox_item_id"] == posted["inbox_item_id"]


def test_ff68_a_post_whose_answer_was_lost_is_one_item_however_often_it_is_tried(agent: Agent) -> None:
    other = f"other-{agent.slug}"
    other_id = agent.seed.agent(other)
    post = ("hq_inbox_post", "--to", other, "--summary", "the report")
    agent.api.faults(rest={"lose_replies": -1})
    assert agent.answer(1, *post)["code"] == "unreachable"
    agent.api.faults(rest={"lose_replies": 0})
    again = agent.ok(*post)
    assert again["repeated"] is True
    assert agent.ok(*post)["inbox_item_id"] == again["inbox_item_id"]
    different = agent.ok("hq_inbox_post", "--to", other, "--summary", "the other report")
    assert different["inbox_item_id"] != again["inbox_item_id"]
    count = "select count(*) from public.agent_inbox_items where agent_id = %s"
    assert agent.database.value(count, (other_id,)) == 2


def test_c26_the_same_post_after_the_recipient_closed_it_is_a_new_item(either: Agent) -> None:
    other = f"other-{either.slug}"
    either.seed.agent(other)
    post = ("hq_inbox_post", "--to", other, "--summary", "the daily report")
    first = either.ok(*post)
    either.leased(AGENT_SLUG=other)
    assert either.ok(*post)["repeated"] is True
    either.ok("hq_inbox_done", first["inbox_item_id"], AGENT_SLUG=other)
    again = either.ok(*post)
    assert (again["repeated"], again["inbox_item_id"] != first["inbox_item_id"]) == (False, True)
    assert either.row(again["inbox_item_id"])["status"] == "pending"


def test_ff68_a_request_key_names_the_post(agent: Agent) -> None:
    other = f"other-{agent.slug}"
    agent.seed.agent(other)
    first = agent.ok("hq_inbox_post", "--to", other, "--summary", "v1", "--request-key", "daily-7")
    second = agent.ok("hq_inbox_post", "--to", other, "--summary", "v2", "--request-key", "daily-7")
    assert (second["inbox_item_id"], second["repeated"]) == (first["inbox_item_id"], True)
