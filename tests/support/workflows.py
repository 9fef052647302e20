"""Workflow runs for tests: rows in few words, and the calls a daemon, an agent and an operator make."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database
from tests.support.seed import DEFAULT_TENANT, Seed

WAKE_SETTINGS = {
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
TICK_SETTINGS = {
    "workflow_batch_size": 10,
    "stale_dispatch_seconds": 300,
    "max_dispatch_retries": 3,
    "stale_claim_seconds": 600,
    "workflow_cost_estimate_usd": 0.10,
    "workflow_token_estimate": 20_000,
}
COUNTS = ("dispatched", "retried", "released", "failed", "timed_out")
JSON_ARGUMENTS = {"p_results", "p_input", "p_usage", "p_output", "p_facts"}


@contextmanager
def fresh_workflows(database: Database) -> Iterator["Workflows"]:
    """A daemon on a database emptied of what an earlier test left: quicker than a database per test."""
    database.execute("delete from public.tenants")  # and with them everything that is theirs
    database.execute("delete from realtime.messages")
    workflows = Workflows(database)
    try:
        yield workflows
    finally:
        workflows.close()


class Workflows:
    """One registered daemon and the workflow functions, called as service_role."""

    def __init__(self, database: Database, gateway: str = "local", tenant: uuid.UUID = DEFAULT_TENANT) -> None:
        self.database, self.tenant = database, tenant
        self.seed = Seed(database)
        self.gateway_id = self.seed.gateway(gateway, tenant)
        self.connection = database.connect("service_role")
        self.settings: dict[str, object] = {}
        self._set = dict(TICK_SETTINGS)
        self._siblings: list[Workflows] = []
        identity = {"hostname": "h", "host_id": "boot:1", "pid": 1, "pid_started_at": 1.0, "version": "0"}
        registered = self.call(
            "register_dispatcher_instance",
            p_tenant_id=tenant,
            p_gateway=gateway,
            p_identity=identity,
            p_settings=WAKE_SETTINGS,
        )
        self.id = uuid.UUID(registered["instance_id"])

    def call(self, function: str, on: Connection | None = None, /, **arguments: object) -> Any:
        shaped = {
            name: Jsonb(value) if isinstance(value, dict) or (name in JSON_ARGUMENTS and value is not None) else value
            for name, value in arguments.items()
        }
        [row] = self.database.call(function, shaped, on=on or self.connection)
        [value] = row.values()
        return value

    def sibling(self) -> "Workflows":
        """Another daemon of the same gateway, over a connection of its own."""
        other = Workflows(self.database, tenant=self.tenant)
        other.settings = self.settings
        other.set()
        self._siblings.append(other)
        return other

    def close(self) -> None:
        """Closes the connections of this daemon and its siblings."""
        for daemon in (self, *self._siblings):
            daemon.connection.close()

    # -- rows

    def route(self, workflow_type: str = "code-change", agent: str = "coder", **columns: object) -> None:
        self.seed.insert(
            "workflow_agent_routing", tenant_id=self.tenant, workflow_type=workflow_type, agent_id=agent, **columns
        )

    def run(self, workflow_type: str = "code-change", **columns: object) -> uuid.UUID:
        return self.seed.insert("workflow_runs", tenant_id=self.tenant, workflow_type=workflow_type, **columns)["id"]

    def done(
        self, workflow_type: str = "code-change", agent: str = "coder", cost: object = 0, **columns: object
    ) -> uuid.UUID:
        """A completed run of today with a reported cost."""
        return self.run(workflow_type, status="completed", owner_agent_id=agent, cost_estimate=cost, **columns)

    def budget(self, cap: object, action: str = "pause_new_runs", scope: str = "fleet", **columns: object) -> uuid.UUID:
        defaults = {
            "name": f"{scope} budget",
            "scope": scope,
            "period": "daily",
            "cap_usd": cap,
            "action_on_exceed": action,
        }
        return self.seed.insert("budgets", tenant_id=self.tenant, **(defaults | columns))["id"]

    # -- the daemon

    def phase(self, phase: str, on: Connection | None = None, **more: object) -> Any:
        return self.call("dispatch_workflows", on, p_instance_id=self.id, p_phase=phase, **more)

    def tick(self, on: Connection | None = None, /, **settings: object) -> Any:
        """One round of a tick as the daemon makes it: one pass of each phase that is due.

        What a phase raises stands under `errors`.
        """
        self.set(**settings)
        look = self.phase("look", on)
        tick: dict[str, Any] = dict.fromkeys((*COUNTS, "held", "stopped", "warned", "unrouted", "pruned"), 0)
        tick |= {
            "busy": False,
            "again": False,
            "errors": [],
            "budget_error": None,
            "budgets_open": False,
            "held_by": {},
            "blockers": {},
        }
        tick["due"] = look["due"]
        for phase in look["due"]:
            self._add_pass(tick, phase, on)
        tick["budget_enforcement"] = {name: tick[name] for name in ("held", "stopped", "warned")}
        facts = {name: tick[name] for name in (*COUNTS, "budget_enforcement", "held_by", "blockers", "budget_error")}
        return tick | {name: value for name, value in self.phase("note", on, p_facts=facts).items() if name not in tick}

    def _add_pass(self, tick: dict[str, Any], phase: str, on: Connection | None) -> None:
        try:
            part = self.phase(phase, on)
        except psycopg.Error as error:
            failure = {"phase": phase, "run_id": None, "error": str(error), "error_code": error.sqlstate}
            tick["errors"].append(failure)
            return
        for name in (*COUNTS, "held", "stopped", "warned", "unrouted", "pruned"):
            tick[name] += part.get(name) or 0
        for name in ("busy", "again", "budgets_open"):
            tick[name] = tick[name] or part.get(name, False)
        tick["errors"] += part["errors"]
        tick["budget_error"] = tick["budget_error"] or part.get("budget_error")
        tick["held_by"] |= part.get("held_by", {})
        tick["blockers"] |= part.get("blockers", {})

    def set(self, **settings: object) -> None:
        """The settings this daemon is registered with, from now on."""
        wanted = {**TICK_SETTINGS, **self.settings, **settings}
        if wanted != self._set:
            columns = ", ".join(f"{name} = %({name})s" for name in wanted)
            self.database.execute(
                f"update public.dispatcher_settings set {columns} where instance_id = %(id)s", {**wanted, "id": self.id}
            )
            self._set = wanted

    # -- the agent

    def claim(self, run: uuid.UUID, session: str = "s1", **more: object) -> Any:
        return self.call("claim_workflow_run", p_tenant_id=self.tenant, p_run_id=run, p_session=session, **more)

    def heartbeat(self, run: uuid.UUID, session: str = "s1", **more: object) -> Any:
        return self.call("heartbeat_workflow_run", p_tenant_id=self.tenant, p_run_id=run, p_session=session, **more)

    def complete(self, run: uuid.UUID, session: str = "s1", **more: object) -> Any:
        return self.call("complete_workflow_run", p_tenant_id=self.tenant, p_run_id=run, p_session=session, **more)

    def fail(self, run: uuid.UUID, session: str = "s1", error: str = "broken", **more: object) -> Any:
        return self.call(
            "fail_workflow_run", p_tenant_id=self.tenant, p_run_id=run, p_session=session, p_error=error, **more
        )

    def release(self, run: uuid.UUID, session: str = "s1", **more: object) -> Any:
        return self.call("release_workflow_run", p_tenant_id=self.tenant, p_run_id=run, p_session=session, **more)

    def usage(self, run: uuid.UUID, session: str = "s1", /, **usage: object) -> Any:
        return self.call(
            "report_workflow_usage", p_tenant_id=self.tenant, p_run_id=run, p_session=session, p_usage=usage
        )

    # -- money

    def spend(self, budget: uuid.UUID) -> tuple[float, float]:
        """Settled and reserved, as an operator sees them, in the unit of the cap."""
        listed = self.call("list_budgets", p_tenant_id=self.tenant)["budgets"]
        [found] = [one for one in listed if one["id"] == str(budget)]
        unit = "usd" if found["cap_usd"] is not None else "tokens"
        return float(found[f"settled_{unit}"]), float(found[f"reserved_{unit}"])

    def bookings(self, run: uuid.UUID) -> list[tuple[float, int, str]]:
        """Cost, tokens and source of each booking of a run, oldest first."""
        rows = self.database.rows("select * from public.workflow_bookings where run_id = %s order by id", [run])
        return [(float(row["cost_usd"]), row["tokens"], row["source"]) for row in rows]

    def book_back(self, run: uuid.UUID | None = None, days: float = 1) -> None:
        """What was booked (for one run) was booked so many days ago."""
        with self.database.connect() as connection:
            connection.execute("set session_replication_role = replica")  # the books are append-only
            connection.execute(
                """update public.workflow_bookings set at = at - make_interval(secs => %(seconds)s)
                    where run_id = %(run)s or %(run)s is null""",
                {"seconds": days * 86_400, "run": run},
            )

    # -- looking

    def row(self, run: uuid.UUID) -> dict[str, Any]:
        return self.database.row("select * from public.workflow_runs where id = %s", [run])

    def status(self, run: uuid.UUID) -> str:
        return str(self.row(run)["status"])

    def statuses(self) -> Mapping[str, int]:
        rows = self.database.rows("select status, count(*) as n from public.workflow_runs group by status")
        return {row["status"]: row["n"] for row in rows}

    def steps(self, run: uuid.UUID) -> list[str]:
        query = "select from_status, to_status from public.workflow_run_events where run_id = %s order by id"
        return [f"{row['from_status']}>{row['to_status']}" for row in self.database.rows(query, [run])]

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        query = "select * from public.budget_events where %(kind)s::text is null or event_kind = %(kind)s order by id"
        return self.database.rows(query, {"kind": kind})

    def frames(self) -> list[dict[str, Any]]:
        query = (
            "select payload, private, topic from realtime.messages where event = 'budget:breach' order by inserted_at"
        )
        return self.database.rows(query)

    def shift(self, run: uuid.UUID, column: str, seconds: float) -> None:
        """Moves one time of a run into the past."""
        self.database.execute(
            f"update public.workflow_runs set {column} = now() - make_interval(secs => %s) where id = %s",
            [seconds, run],
        )
