"""A populated database, and for every public function the arguments of a call that does real work in it.

Three sides stand in it: `a` and `b` are neighbours on one gateway of one tenant, `c` has a tenant and gateway apart.
Each side has an agent in a wake with a leased item, an agent with work that nobody woke yet, one on the waitlist, and
runs in every state with their claims, a route and a budget.
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import sql
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database
from tests.support.seed import DEFAULT_TENANT, Seed

Value = Callable[["Side"], object]

NOBODY: Final = uuid.UUID(int=0)
OTHER_TENANT: Final = uuid.UUID(int=7)
WAKE_SETTINGS: Final = {
    "wake_cooldown": 0,
    "max_concurrent_wakes": 50,
    "stale_item_age_hours": 24,
    "lease_seconds": 120,
}
IDENTITY: Final = {"hostname": "h", "host_id": "boot:1", "pid": 1, "pid_started_at": 1.0, "version": "0"}

FUNCTIONS: Final = """
    select proc.proname as name, proc.provolatile::text as volatility, coalesce(proc.proconfig, '{}') as config,
           proc.proargnames[1:proc.pronargs] as arguments, format_type(proc.prorettype, null) as result,
           obj_description(proc.oid, 'pg_proc') as comment,
           array(select format_type(kind, null) from unnest(proc.proargtypes) with ordinality as argument (kind, place)
                  order by place) as types
      from pg_proc as proc
      join dispatcher.made_objects as made on made.kind = 'function' and to_regprocedure(made.name) = proc.oid
     where proc.pronamespace = 'public'::regnamespace and proc.prorettype <> 'trigger'::regtype
       and has_function_privilege('service_role', proc.oid, 'execute')
       and not exists (select from dispatcher.owned_objects as base
                        where base.kind = 'function' and to_regprocedure(base.name) = proc.oid)
     order by proc.proname"""


@dataclass(frozen=True)
class Function:
    """A function of ours that callers reach through PostgREST."""

    name: str
    changes: bool
    result: str
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    config: tuple[str, ...]
    comment: str

    @property
    def lock_timeout(self) -> float:
        """Seconds it waits for a row at most; infinite when it says nothing."""
        told = [entry.partition("=")[2] for entry in self.config if entry.startswith("lock_timeout=")]
        return _seconds(told[0]) if told else float("inf")


def _seconds(text: str) -> float:
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text.removesuffix("s"))


def public_functions(database: Database) -> list[Function]:
    """Every function of ours in schema public, as the catalog has it."""
    return [
        Function(
            row["name"],
            row["volatility"] == "v",
            row["result"],
            tuple(row["arguments"] or ()),
            tuple(row["types"]),
            tuple(row["config"]),
            row["comment"] or "",
        )
        for row in database.rows(FUNCTIONS)
    ]


@dataclass
class Side:
    """What belongs to one side; ids by what they are."""

    name: str
    tenant: uuid.UUID
    gateway: str
    gateway_id: uuid.UUID
    instance: uuid.UUID
    agents: dict[str, uuid.UUID] = field(default_factory=dict)
    items: dict[str, uuid.UUID] = field(default_factory=dict)
    runs: dict[str, uuid.UUID] = field(default_factory=dict)
    tokens: dict[str, uuid.UUID] = field(default_factory=dict)
    wake: uuid.UUID = NOBODY
    budget: uuid.UUID = NOBODY
    notification: uuid.UUID = NOBODY

    def slug(self, agent: str) -> str:
        return f"{self.name}-{agent}"

    @property
    def workflow_type(self) -> str:
        return f"{self.name}-type"


def populate(database: Database) -> dict[str, Side]:
    """Fills an empty migrated database; the sides by name."""
    seed = Seed(database)
    first = register(database, seed, "shared", DEFAULT_TENANT)
    apart = register(database, seed, "apart", OTHER_TENANT)
    sides = {
        "a": Side("a", DEFAULT_TENANT, "shared", *first),
        "b": Side("b", DEFAULT_TENANT, "shared", *first),
        "c": Side("c", OTHER_TENANT, "apart", *apart),
    }
    for side in sides.values():
        _fill_inbox(database, seed, side)
        _fill_runs(seed, side)
    return sides


def register(database: Database, seed: Seed, gateway: str, tenant: uuid.UUID) -> tuple[uuid.UUID, uuid.UUID]:
    """A gateway with a registered daemon: their ids."""
    gateway_id = seed.gateway(gateway, tenant)
    arguments = {"p_tenant_id": tenant, "p_gateway": gateway}
    shaped = {"p_identity": Jsonb(IDENTITY), "p_settings": Jsonb(WAKE_SETTINGS)}
    [row] = database.call("register_dispatcher_instance", {**arguments, **shaped})
    return gateway_id, uuid.UUID(row["register_dispatcher_instance"]["instance_id"])


def _fill_inbox(database: Database, seed: Seed, side: Side) -> None:
    for agent in ("busy", "idle", "waiting"):
        side.agents[agent] = seed.agent(side.slug(agent), side.gateway, side.tenant)
        seed.insert("agent_wake_state", agent_id=side.agents[agent], tenant_id=side.tenant)
        seed.insert("agent_budgets", agent_id=side.agents[agent], tenant_id=side.tenant, monthly_limit_usd=10)
    database.execute(
        "update agent_wake_state set waitlisted_at = now(), waitlist_path = 'sweep' where agent_id = %s",
        [side.agents["waiting"]],
    )
    states = {"fresh": ("idle", "pending"), "queued": ("waiting", "pending"), "more": ("busy", "pending")}
    states |= {"failed": ("idle", "failed"), "dead": ("idle", "dead_letter"), "leased": ("busy", "leased")}
    for name, (agent, status) in states.items():
        side.items[name] = seed.item(side.agents[agent], status=status, task_id=seed.task(f"{name} task", side.tenant))
        seed.insert("inbox_item_marks", item_id=side.items[name], tenant_id=side.tenant)
    _wake_the_busy_one(database, seed, side)


def _wake_the_busy_one(database: Database, seed: Seed, side: Side) -> None:
    side.tokens = {"wake": uuid.uuid4(), "lease": uuid.uuid4(), "run": uuid.uuid4(), "silent": uuid.uuid4()}
    side.tokens["notification"] = uuid.uuid4()
    [wake] = database.rows(
        "insert into agent_wakes (tenant_id, agent_id, gateway_id, instance_id, claim_token, state, path, item_ids,"
        " pid, host_id, pid_started_at, started_at, deadline_at) values (%s, %s, %s, %s, %s, 'running', 'event', %s, 1,"
        " 'boot:1', 1, now(), now() + interval '5 minutes') returning id",
        [side.tenant, side.agents["busy"], side.gateway_id, side.instance, side.tokens["wake"], [side.items["leased"]]],
    )
    side.wake = wake["id"]
    database.execute(
        "with held as (update agent_inbox_items set leased_at = now(), leased_until = now() + interval '1 hour',"
        " attempt_count = 1, max_attempts = 3 where id = %s returning *)"
        " insert into inbox_item_leases (item_id, tenant_id, agent_id, wake_id, lease_token, attempt, leased_at,"
        " leased_until) select id, tenant_id, agent_id, %s, %s, 1, leased_at, leased_until from held",
        [side.items["leased"], side.wake, side.tokens["lease"]],
    )


def _fill_runs(seed: Seed, side: Side) -> None:
    database = seed.database
    owner = side.slug("idle")
    seed.insert(
        "workflow_agent_routing",
        tenant_id=side.tenant,
        workflow_type=side.workflow_type,
        agent_id=owner,
        max_concurrent=50,
    )
    held = "dispatched_at, claimed_at, started_at, last_heartbeat_at, deadline_at"
    times = "now(), now(), now(), now() - interval '1 hour' * %s, now() + interval '1 hour'"
    for name, status in (("queued", "queued"), ("dispatched", "dispatched"), ("failed", "failed")):
        columns = {"finished_at": datetime.now(UTC)} if status == "failed" else {}
        columns |= {"dispatched_at": datetime.now(UTC), "owner_agent_id": owner} if status == "dispatched" else {}
        side.runs[name] = seed.insert(
            "workflow_runs", tenant_id=side.tenant, workflow_type=side.workflow_type, status=status, **columns
        )["id"]
    for name, hours in (("running", 0), ("silent", 1)):
        token = side.tokens["run" if name == "running" else "silent"]
        row = database.row(
            "insert into workflow_runs (tenant_id, workflow_type, status, owner_agent_id, dispatch_attempts,"
            f" claim_token, session_id, claimed_by, {held}) values (%s, %s, 'running', %s, 1, %s, %s, %s, {times})"
            " returning id",
            [side.tenant, side.workflow_type, owner, token, f"{side.name}-s", owner, hours],
        )
        side.runs[name] = row["id"]
        claim = {"claim_token": token, "tenant_id": side.tenant, "run_id": row["id"], "session_id": f"{side.name}-s"}
        seed.insert("workflow_claims", **claim, workflow_type=side.workflow_type, agent_id=owner, attempt=1)
    side.budget = seed.insert(
        "budgets",
        tenant_id=side.tenant,
        name=f"{side.name} budget",
        scope="project",
        scope_id=side.workflow_type,
        period="daily",
        cap_usd=1000,
    )["id"]
    side.notification = database.row(
        "insert into workflow_notifications (tenant_id, run_id, attempt, agent_id, gateway_id, state, claim_token,"
        " claimed_until) values (%s, %s, 0, %s, %s, 'sending', %s, now() + interval '1 minute') returning id",
        [side.tenant, side.runs["dispatched"], owner, side.gateway_id, side.tokens["notification"]],
    )["id"]


# What an argument is in a call that does real work. A new argument name needs its line here.
ARGUMENTS: Final[dict[str, Value]] = {
    "p_action": lambda side: "warn",
    "p_actor": lambda side: "operator",
    "p_agent": lambda side: side.slug("idle"),
    "p_agent_slug": lambda side: side.slug("idle"),
    "p_budget": lambda side: str(side.budget),
    "p_budget_id": lambda side: None,
    "p_cap_tokens": lambda side: None,
    "p_cap_usd": lambda side: 5,
    "p_claim_limit": lambda side: 5,
    "p_claim_token": lambda side: side.tokens["run"],
    "p_claims": lambda side: Jsonb([{"agent_id": str(side.agents["idle"]), "path": "event"}]),
    "p_context": lambda side: Jsonb({}),
    "p_cursor": lambda side: None,
    "p_dead": lambda side: False,
    "p_delay_seconds": lambda side: None,
    "p_dry_run": lambda side: False,
    "p_error": lambda side: "broken",
    "p_event_type": lambda side: "task_comment_mention",
    "p_facts": lambda side: Jsonb({"realtime": {}, "health": {}}),
    "p_fail_closed": lambda side: False,
    "p_from_agent_slug": lambda side: side.slug("busy"),
    "p_gateway": lambda side: side.gateway,
    "p_host_id": lambda side: "boot:1",
    "p_identity": lambda side: Jsonb(IDENTITY),
    "p_initiator": lambda side: "operator",
    "p_input": lambda side: Jsonb({}),
    "p_instance_id": lambda side: side.instance,
    "p_item_id": lambda side: side.items["leased"],
    "p_item_ids": lambda side: [side.items["fresh"], side.items["failed"], side.items["dead"]],
    "p_known_agents": lambda side: [],
    "p_lease_seconds": lambda side: 60,
    "p_lease_token": lambda side: side.tokens["lease"],
    "p_limit": lambda side: 10,
    "p_live_wake_ids": lambda side: [side.wake],
    "p_max_concurrent": lambda side: 5,
    "p_new_name": lambda side: None,
    "p_only_change": lambda side: False,
    "p_name": lambda side: f"{side.name} second budget",
    "p_nonce": lambda side: uuid.uuid4(),
    "p_not_before": lambda side: None,
    "p_outcome": lambda side: "done",
    "p_output": lambda side: Jsonb({"summary": "done"}),
    "p_post_id": lambda side: None,
    "p_period": lambda side: "monthly",
    "p_phase": lambda side: "look",
    "p_pid": lambda side: 4242,
    "p_pid_started_at": lambda side: 1.0,
    "p_priority": lambda side: 1,
    "p_reason": lambda side: "as asked",
    "p_reports": lambda side: Jsonb([ended(side)]),
    "p_request": lambda side: uuid.uuid4(),
    "p_request_key": lambda side: None,
    "p_results": lambda side: Jsonb([told(side)]),
    "p_run_id": lambda side: side.runs["running"],
    "p_scope": lambda side: "agent",
    "p_scope_id": lambda side: side.slug("idle"),
    "p_since": lambda side: None,
    "p_session": lambda side: f"{side.name}-s",
    "p_settings": lambda side: Jsonb(WAKE_SETTINGS),
    "p_status": lambda side: None,
    "p_summary": lambda side: "Please look",
    "p_sweep": lambda side: Jsonb({"ms": 1}),
    "p_task_id": lambda side: None,
    "p_tenant_id": lambda side: side.tenant,
    "p_tick": lambda side: Jsonb({"ms": 1}),
    "p_timeout_minutes": lambda side: 30,
    "p_timezone": lambda side: "UTC",
    "p_to_agent_slug": lambda side: side.slug("idle"),
    "p_usage": lambda side: Jsonb({"cost_usd": 0.5, "input_tokens": 10, "output_tokens": 5}),
    "p_wake_id": lambda side: side.wake,
    "p_workflow_type": lambda side: side.workflow_type,
    "p_wakes": lambda side: Jsonb([]),
}
# Where one name means something else in one function.
OF_FUNCTION: Final[dict[str, dict[str, Value]]] = {
    "adopt_wake": {"p_claim_token": lambda side: side.tokens["wake"]},
    "claim_workflow_run": {
        "p_run_id": lambda side: side.runs["dispatched"],
        "p_wake_id": lambda side: None,
    },
    "escalate_inbox_item": {"p_reason": lambda side: "needs a person"},
    "expire_inbox_items": {"p_item_ids": lambda side: [side.items["fresh"]]},
    "lease_inbox_items": {"p_lease_token": lambda side: uuid.uuid4()},
    "list_workflow_runs": {"p_agent": lambda side: None},
    "requeue_inbox_items": {"p_item_ids": lambda side: [side.items["failed"], side.items["dead"]]},
    "respawn_workflow_run": {
        "p_run_id": lambda side: side.runs["silent"],
        "p_claim_token": lambda side: side.tokens["silent"],
    },
    "retry_workflow_run": {"p_run_id": lambda side: side.runs["failed"]},
}
# The phases a function is called for, one call each.
PHASES: Final = {
    "sweep_inbox": (
        "look",
        "expired",
        "dead",
        "chained",
        "stalled",
        "released",
        "listed",
        "claims",
        "alerted",
        "pruned",
    ),
    "dispatch_workflows": (
        "look",
        "stopped",
        "dispatched",
        "retried",
        "timed_out",
        "released",
        "unrouted",
        "pruned",
        "note",
    ),
}


def ended(side: Side) -> dict[str, object]:
    """A report of the end of the side's live wake."""
    token = str(side.tokens["wake"])
    return {"report": "ended", "wake_id": str(side.wake), "claim_token": token, "ending": "exited", "exit_code": 0}


def told(side: Side) -> dict[str, object]:
    """The result of the side's notification that is being sent."""
    return {"id": str(side.notification), "claim_token": str(side.tokens["notification"]), "sent": True}


def arguments_of(function: Function, side: Side) -> dict[str, object]:
    """Arguments with which the function does real work for a side."""
    own = OF_FUNCTION.get(function.name, {})
    unknown = [name for name in function.arguments if name not in ARGUMENTS and name not in own]
    assert not unknown, f"{function.name}: tests/support/world.py has no value of {', '.join(unknown)}"
    return {name: (own.get(name) or ARGUMENTS[name])(side) for name in function.arguments}


def calls_of(function: Function, side: Side) -> Iterator[tuple[str, dict[str, object]]]:
    """Each call of a function: what it is called in a report, and its arguments."""
    arguments = arguments_of(function, side)
    if function.name not in PHASES:
        yield function.name, arguments
        return
    for phase in PHASES[function.name]:
        yield f"{function.name} {phase}", {**arguments, "p_phase": phase}


def call(connection: Connection, function: Function, arguments: dict[str, object]) -> Any:
    """Calls with named arguments, each cast to its type as PostgREST does; the answer."""
    named = [
        sql.SQL("{} => {}::{}").format(sql.Identifier(name), sql.Placeholder(name), sql.SQL(kind))
        for name, kind in zip(function.arguments, function.types, strict=True)
        if name in arguments
    ]
    query = sql.SQL("select public.{}({}) as answer").format(sql.Identifier(function.name), sql.SQL(", ").join(named))
    row = connection.execute(query, arguments).fetchone()
    assert row is not None
    return row["answer"]
