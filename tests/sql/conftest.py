"""What the tests of the wake functions share."""

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from dispatcher.local.postgres import PostgresServer
from tests.support.database import Connection, Database, cloned
from tests.support.seed import DEFAULT_TENANT, Seed

SETTINGS = {
    "wake_cooldown": 0,
    "max_wake_cooldown": 900,
    "max_consecutive_failures": 5,
    "max_concurrent_wakes": 2,
    "agent_process_timeout": 300,
    "stale_item_age_hours": 24,
    "lease_seconds": 120,
    "max_wake_chain": 6,
    "max_wakes_per_day": 0,
}


@pytest.fixture(scope="module")
def kept_name(cluster: PostgresServer, migrated_template: str) -> Iterator[str]:
    """A clone that the tests of a module use one after the other."""
    with cloned(cluster, migrated_template) as kept:
        yield kept.name


@pytest.fixture
def database(request: pytest.FixtureRequest, cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    """A clone; with the mark `kept_database` one that is emptied after each test, which is many times quicker.

    A test that changes the schema carries `own_database`.
    """
    marks = request.node
    if marks.get_closest_marker("own_database") or not marks.get_closest_marker("kept_database"):
        with cloned(cluster, migrated_template) as own:
            yield own
            _no_fault_goes_unseen(own, marks)
        return
    kept = Database(cluster, request.getfixturevalue("kept_name"))
    try:
        yield kept
        _no_fault_goes_unseen(kept, marks)
    finally:
        kept.close()
        with contextlib.closing(Database(cluster, kept.name)) as emptied:
            emptied.execute("delete from public.tenants")  # and with them everything that is theirs
            emptied.execute("delete from realtime.messages")


def _no_fault_goes_unseen(database: Database, test: pytest.Item) -> None:
    """A side write that failed is no failure of its call: a test that does not expect one fails here."""
    if test.get_closest_marker("faults_expected") or database.value("select to_regclass('dispatcher_faults')") is None:
        return
    assert database.rows("select side_write, error from public.dispatcher_faults") == []


class Dispatcher:
    """One registered instance and the calls a daemon makes, over a connection of its own as service_role."""

    def __init__(self, database: Database, gateway: str = "local", **settings: object) -> None:
        self.database = database
        self.connection = database.connect("service_role")
        identity = {"hostname": "h", "host_id": "boot:1", "pid": 1, "pid_started_at": 1.0, "version": "0"}
        answer = self.call(
            "register_dispatcher_instance",
            p_tenant_id=DEFAULT_TENANT,
            p_gateway=gateway,
            p_identity=identity,
            p_settings={**SETTINGS, **settings},
        )
        self.registered = answer
        self.id = answer.get("instance_id")

    def call(self, function: str, **arguments: object) -> Any:
        shaped = {
            name: Jsonb(value) if isinstance(value, dict) or (name in JSON_ARGUMENTS) else value
            for name, value in arguments.items()
        }
        [row] = self.database.call(function, shaped, on=self.connection)
        [value] = row.values()
        return value

    def claims(self, agents: Iterable[uuid.UUID], path: str = "event", request: uuid.UUID | None = None) -> list[Any]:
        claims = [{"agent_id": str(agent), "path": path} for agent in agents]
        return self.call("claim_wakes", p_instance_id=self.id, p_claims=claims, p_request=request or uuid.uuid4())

    def claim(
        self, agent: uuid.UUID, *items: uuid.UUID, path: str = "event", request: uuid.UUID | None = None
    ) -> Mapping[str, Any]:
        claim = {"agent_id": str(agent), "path": path, "item_ids": [str(item) for item in items]}
        [answer] = self.call("claim_wakes", p_instance_id=self.id, p_claims=[claim], p_request=request or uuid.uuid4())
        return answer

    def report(self, *reports: Mapping[str, object], limit: int = 0) -> Any:
        return self.call(
            "report_wakes",
            p_instance_id=self.id,
            p_reports=list(reports),
            p_claim_limit=limit,
            p_request=uuid.uuid4(),
        )

    def started(self, grant: Mapping[str, Any], pid: int = 4242) -> Any:
        report = self._of(grant) | {
            "report": "started",
            "host_id": "boot:1",
            "pid": pid,
            "pid_started_at": 1.0,
        }
        [answer] = self.report(report)["results"]
        return answer

    def ended(self, grant: Mapping[str, Any], ending: str = "exited", exit_code: int | None = 0, limit: int = 0) -> Any:
        report = self._of(grant) | {"report": "ended", "ending": ending, "exit_code": exit_code}
        [answer] = self.report(report, limit=limit)["results"]
        return answer

    def sweep(self, limit: int = 0) -> dict[str, Any]:
        """A whole sweep as the daemon makes it, phase by phase; what a phase raises stands under `errors`."""
        look = self.phase("look")
        answer: dict[str, Any] = {**look, "errors": [], "skipped": [], "claims": []}
        for phase in look["due"]:
            try:
                self._passes(phase, limit, answer)
            except psycopg.Error as error:
                answer["errors"].append({"phase": phase, "error": str(error), "error_code": error.sqlstate})
        return answer

    def _passes(self, phase: str, limit: int, answer: dict[str, Any]) -> None:
        cursor, again = None, True
        while again:
            part = self.phase(phase, cursor, limit)
            answer[phase] = answer.get(phase, 0) + (part["count"] or 0) if phase != "claims" else part["count"]
            answer |= {name: part[name] for name in ("queued", "waiting") if name in part}
            for name in ("skipped", "claims"):
                answer[name] = [*answer[name], *part.get(name, [])] if name != phase else part[name]
            cursor, again = part.get("cursor"), part["again"]

    def phase(self, phase: str, cursor: object = None, limit: int = 0) -> Any:
        return self.call(
            "sweep_inbox",
            p_instance_id=self.id,
            p_phase=phase,
            p_cursor=cursor,
            p_claim_limit=limit,
            p_request=uuid.uuid4(),
        )

    def heartbeat(self, *live: Mapping[str, Any]) -> Any:
        return self.call(
            "heartbeat_dispatcher_instance",
            p_instance_id=self.id,
            p_live_wake_ids=[uuid.UUID(grant["wake_id"]) for grant in live],
            p_nonce=uuid.uuid4(),
            p_facts={},
        )

    @staticmethod
    def _of(grant: Mapping[str, Any]) -> dict[str, object]:
        return {"wake_id": grant["wake_id"], "claim_token": grant["claim_token"]}


JSON_ARGUMENTS = {"p_claims", "p_reports", "p_facts", "p_identity", "p_settings"}


@pytest.fixture
def dispatcher(database: Database, seed: Seed) -> Callable[..., Dispatcher]:
    """Registers daemons: `dispatcher(max_concurrent_wakes=1)`."""
    seed.gateway()

    def register(gateway: str = "local", **settings: object) -> Dispatcher:
        return Dispatcher(database, gateway, **settings)

    return register


__all__ = ["Connection", "Dispatcher"]
