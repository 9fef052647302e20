"""No answer, frame, row or refusal ends the daemon, or fills its log."""

import contextlib
import itertools
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


def undone(database: Database) -> int:
    return database.value("select count(*) from agent_inbox_items where status <> 'done'")


# ------------------------------------------------------------------------------------------- answers

# What calls each function; the others are answered by nonsense in tests/unit/test_answers.py. `None`: its interval.
CALLS = {
    "claim_wakes": "item",
    "report_wakes": "item",
    "sweep_inbox": None,
    "heartbeat_dispatcher_instance": None,
    "dispatch_workflows": None,
    "claim_workflow_notifications": None,
    "monitor_workflows": None,
}
NONSENSE = ["[]", "{}", "null", "7", '{"results": [', '""']


def test_c11_every_call_may_be_answered_by_nonsense_and_is_named(
    api: Api, database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    intervals = {"RECONCILE_INTERVAL": 1, "HEARTBEAT_INTERVAL": 0.5, "WORKFLOW_POLL_INTERVAL": 0.5}
    daemon = start_daemon(WAKE_COOLDOWN=0, STALE_CLAIM_SECONDS=5, **intervals).ready()
    for function, trigger in CALLS.items():
        # Claims and reports wait longer each time; what they make of each answer is tried in the unit tests.
        for raw in NONSENSE[::2] if trigger == "item" else NONSENSE:
            before = len(daemon.lines)
            api.faults(rest={"match": f"/rpc/{function}", "fail": 1, "status": 200, "raw": raw})

            def is_answered(needs_item: bool = trigger == "item") -> bool:
                if needs_item and undone(database) == 0:  # a sweep may have been faster than the hint
                    seed.item("ada")
                return api.rest_faults.fail == 0

            wait_until(is_answered, 20, what=f"a call of {function}")
            wait_until(
                lambda start=before, name=function: names(daemon.lines[start:], name), 20, what=f"{function} {raw}"
            )
    api.faults(rest={"match": "", "fail": 0})
    wait_until(lambda: undone(database) == 0, 60)
    assert daemon.of("service.ended") == []
    assert daemon.stop() == 0


def names(lines: list[dict[str, Any]], function: str) -> bool:
    """Whether a line tells of a malformed answer of that function."""
    return any(function in str(line) and "malformed answer" in str(line) for line in lines)


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "294276-12-31", "0044-03-15 BC"])
def test_c9_no_time_in_a_row_ends_the_daemon_at_any_start(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon, moment: str
) -> None:
    """Every time of an item, a wake, its agent's memory and its daemon, as far as the tables take it."""
    seed.gateway()
    gone = start_daemon().ready()
    for agent in ("ada", "bob", "cat"):
        seed.item(agent)
    wait_until(lambda: undone(database) == 0 and open_wakes(database) == 0, 30)
    gone.kill()
    database.execute(
        "update agent_wakes set state = 'running', ended_at = null, exit_code = null where pid is not null"
    )
    database.execute("update agent_inbox_items set status = 'pending', attempt_count = 0")
    for table in ("agent_inbox_items", "agent_wakes", "agent_wake_state", "dispatcher_instances"):
        set_every_time(database, table, moment)
    for _ in range(2):
        daemon = start_daemon(WAKE_COOLDOWN=0, RECONCILE_INTERVAL=1).ready()
        started = len(daemon.of("wake.started", agent="eve"))
        seed.item("eve")
        daemon.wait_for("wake.started", agent="eve", times=started + 1)
        swept = len(daemon.of("sweep.finished"))
        daemon.wait_for("sweep.finished", times=swept + 2)
        assert daemon.of("service.ended") == []
        assert daemon.stop() == 0


def set_every_time(database: Database, table: str, moment: str) -> None:
    """Each column that holds a time, where no rule of the table forbids the value."""
    columns = database.rows(
        """select column_name as name from information_schema.columns
            where table_schema = 'public' and table_name = %s and data_type = 'timestamp with time zone'""",
        [table],
    )
    for name, rows in itertools.product([column["name"] for column in columns], ["true", "{name} is not null"]):
        with contextlib.suppress(psycopg.Error):
            database.execute(f"update {table} set {name} = %s where {rows.format(name=name)}", [moment])


def open_wakes(database: Database) -> int:
    return database.value("select count(*) from agent_wakes where ended_at is null")


# ------------------------------------------------------------------------------------------- frames


def test_h4_a_hint_that_names_no_possible_agent_is_one_line_and_a_sweep(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    gateway = seed.gateway()
    seed.agent("ada")
    daemon = start_daemon(RECONCILE_INTERVAL=3600).ready()
    swept = len(daemon.of("sweep.finished"))
    odd = '[null, {"agent_id": "ada"}, {"agent_id": 5}, {"agent_id": "x", "item_ids": [1, null, "y"]}, [], "z", 7]'
    for event in ("inbox", "agent", "canary"):
        database.execute(
            """select realtime.send(odd, %s, 'gateway:' || %s::text, true)
                 from jsonb_array_elements(%s::jsonb) as odd, generate_series(1, 5)
                where jsonb_typeof(odd) = 'object'""",
            [event, gateway, odd],
        )
    daemon.wait_for("sweep.finished", times=swept + 1)
    assert len(daemon.wait_for("realtime.hint_malformed")) == 1
    assert daemon.of("library.log", level="error") == []
    # It hears on.
    seed.item("ada")
    daemon.wait_for("wake.started", agent="ada", path="event")


# ------------------------------------------------------------------------------------------- refusals


def test_c39_a_gateway_that_was_deleted_is_said_once_and_asked_for_rarely(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    names = [f"a{number}" for number in range(8)]
    gateway = seed.gateway()
    for name in names:
        seed.agent(name)
    daemon = start_daemon(HEARTBEAT_INTERVAL=1, WAKE_COOLDOWN=0).ready()
    database.execute("set session_replication_role = replica")
    database.execute("delete from gateways")  # as somebody does who does not look what hangs on it
    database.execute("delete from dispatcher_instances")
    database.execute("set session_replication_role = origin")
    before = len(daemon.lines)
    for name in names:
        agent_id = database.value("select id from agents where slug = %s", [name])
        item_id = seed.item(agent_id)
        # Nobody hints at agents without a gateway; a hint that was under way when it went still comes.
        database.execute(
            "select dispatcher.send_gateway_hint(%s, 'inbox',"
            " jsonb_build_object('agent_id', %s::uuid, 'item_id', %s::uuid))",
            [gateway, agent_id, item_id],
        )
    daemon.wait_for("wake.claim_failed", deadline=30)
    daemon.wait_for("service.beat_failed", service="heartbeat", deadline=30)
    # The third failure of the heartbeat in a row: by then every loop has tried again.
    wait_until(lambda: len(daemon.of("health.changed", status="failing")) >= 1, 40)
    lines = daemon.lines[before:]
    for event in ("wake.claim_failed", "instance.gone", "service.beat_failed", "wake.end_unreported"):
        texts = [line.get("error") or line["msg"] for line in lines if line["event"] == event]
        assert len(texts) == len(set(texts)), texts
    assert len(lines) < 40, [line["msg"] for line in lines]
    assert daemon.process.poll() is None
    seed.gateway(id=gateway)
    wait_until(lambda: undone(database) == 0, 90)


def test_c31_a_daemon_that_is_not_registered_says_why(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("ada")
    database.execute(
        """create or replace function public.register_dispatcher_instance(
             p_tenant_id uuid, p_gateway text, p_identity jsonb, p_settings jsonb) returns jsonb
             language sql as $$ select jsonb_build_object('code', 'ok', 'instance_id', null) $$"""
    )
    daemon = start_daemon()
    assert daemon.wait() == 1
    said = daemon.stderr + "".join(str(line) for line in daemon.lines)
    assert "did not register this daemon" in said
    assert "Traceback" not in said


# ------------------------------------------------------------------------------------------- starts that cannot be made


def test_c29_an_item_that_cannot_be_started_is_refused_once_and_the_others_go_on(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    bad = seed.item("ada", context={"model_override": "m" * 200_000})
    good = [seed.item("ada") for _ in range(3)]
    daemon = start_daemon(WAKE_COOLDOWN=0)
    wait_until(lambda: undone(database) == 1, 30)
    [line] = daemon.wait_for("wake.spawn_failed")
    assert (line["ending"], line["item_id"]) == ("item_refused", str(bad))
    assert line["msg"].startswith("Could not start 'ada': model_override has 10000 characters")  # cut where it is read
    row = database.row(
        "select status::text, context ->> 'last_failure_reason' as why from agent_inbox_items where id = %s", [bad]
    )
    assert row["status"] == "dead_letter"
    assert "model_override has 10000 characters" in row["why"]
    assert database.value("select count(*) from agent_inbox_items where status = 'done'") == len(good)
    assert database.value("select consecutive_failures from agent_wake_state") == 0
    assert database.value("select count(*) from notifications") == 1


def test_c29_an_agent_that_cannot_be_started_is_set_aside_once_with_the_cause(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    seed.agent("!" * 3), seed.agent("y" * 65)
    items = [seed.item(slug) for slug in ("!" * 3, "y" * 65) for _ in range(2)]
    seed.item("bob")
    daemon = start_daemon(WAKE_COOLDOWN=0, RECONCILE_INTERVAL=1)
    daemon.wait_for("agent.stalled", times=2)
    wait_until(lambda: undone(database) == len(items), 20)
    swept = len(daemon.of("sweep.finished"))
    daemon.wait_for("sweep.finished", times=swept + 2)
    assert {line["ending"] for line in daemon.of("wake.spawn_failed")} == {"agent_refused"}
    assert len(daemon.of("wake.spawn_failed")) == 2
    assert database.value("select max(attempt_count) from agent_inbox_items where status <> 'done'") == 0
    told = [row["body"] for row in database.rows("select concat(title, ' ', body) as body from notifications")]
    assert len(told) == 2
    assert any("nothing OpenClaw keeps in an id" in text for text in told)
    assert len(working_agent.calls()) == 1


def test_c30_two_agents_that_are_one_to_openclaw_never_run_beside_each_other(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    stub_agent.order(mode="hang")
    seed.item("dev.ops"), seed.item("dev-ops")
    daemon = start_daemon(WAKE_COOLDOWN=0, RECONCILE_INTERVAL=1)
    [stalled] = daemon.wait_for("agent.stalled")
    assert stalled["agent"] == "dev.ops"
    [line] = daemon.wait_for("wake.spawn_failed")
    assert "OpenClaw takes it for the agent 'dev-ops'" in line["msg"]
    daemon.wait_for("wake.started", agent="dev-ops")
    swept = len(daemon.of("sweep.finished"))
    daemon.wait_for("sweep.finished", times=swept + 2)
    assert len(stub_agent.calls()) == 1


def test_f7_an_agent_refused_at_its_start_is_told_with_the_true_reason_and_a_name_that_steers_nothing(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    slug = "ada\x1b[2J\u202e\n"
    seed.item(slug)
    daemon = start_daemon()
    [line] = daemon.wait_for("agent.stalled")
    assert "is stalled: its start was refused: control characters in the slug" in line["msg"]
    assert "failed wakes in a row" not in line["msg"]
    assert line["msg"].isprintable()
    notification = database.row("select title, body from notifications")
    assert "It cannot be started: control characters in the slug" in notification["body"]
    assert notification["title"].isprintable()
    assert notification["body"].isprintable()


# ------------------------------------------------------------------------------------------- starts


def test_c40_who_may_be_woken_does_not_wait_for_eighty_wakes_that_are_settled(
    database: Database, seed: Seed, working_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    """A crash of the host under load: open wakes whose pid nobody saved, of a daemon that is gone."""
    seed.gateway()
    first = start_daemon(MAX_CONCURRENT_WAKES=100).ready()
    first.kill()
    for number in range(80):
        seed.item(f"left{number:02}")
    database.execute(
        """insert into agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_request, path, item_ids,
                                    deadline_at)
           select agent.tenant_id, agent.id, agent.gateway_id, instance.id, gen_random_uuid(), 'event',
                  array(select item.id from agent_inbox_items as item where item.agent_id = agent.id),
                  now() + interval '1 hour'
             from agents as agent, dispatcher_instances as instance where agent.slug like 'left%'"""
    )
    seed.item("ada")
    daemon = start_daemon(MAX_CONCURRENT_WAKES=100, WAKE_COOLDOWN=0)
    [ready] = daemon.wait_for("daemon.ready")
    [started] = daemon.wait_for("wake.started", agent="ada")
    assert moment(started) - moment(ready) < timedelta(seconds=1)
    daemon.wait_for("wake.lost", times=80)
    wait_until(lambda: undone(database) == 0 and open_wakes(database) == 0, 60)
    wakes = database.rows("select agent_id, state from agent_wakes where state <> 'succeeded'")
    assert [wake["state"] for wake in wakes] == ["lost"] * 80
    assert len(working_agent.calls()) == 81


def moment(line: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(line["ts"])
