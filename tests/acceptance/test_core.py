"""No answer, frame, row or refusal ends the daemon, or fills its log."""

from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until


def undone(database: Database) -> int:
    return database.value("select count(*) from agent_inbox_items where status <> 'done'")


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
        seed.item(database.value("select id from agents where slug = %s", [name]))
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
