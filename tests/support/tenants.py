"""Two tenants with rows in every table, and the columns by which a row of one may name a row of the other."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed
from tests.support.world import OTHER_TENANT, Side, populate

A, B = DEFAULT_TENANT, OTHER_TENANT
YOURHQS: Final = (
    "agents",
    "tasks",
    "task_relations",
    "agent_inbox_items",
    "agent_budgets",
    "agent_usage",
    "notifications",
)

REFERENCES: Final = """
    select con.conrelid::regclass::text as relation, attribute.attname as column,
           con.confrelid::regclass::text as target
      from pg_constraint as con
      join pg_attribute as attribute on attribute.attrelid = con.conrelid and attribute.attnum = con.conkey[1]
     where con.contype = 'f' and con.connamespace = 'public'::regnamespace and cardinality(con.conkey) = 1
       and exists (select from pg_attribute where attrelid = con.conrelid and attname = 'tenant_id')
       and exists (select from pg_attribute where attrelid = con.confrelid and attname = 'tenant_id')
     order by 1, 2"""
SLUG_REFERENCES: Final = """
    select attrelid::regclass::text as relation, attname as column
      from pg_attribute join pg_class as class on class.oid = attrelid
     where relkind in ('r', 'p') and relnamespace = 'public'::regnamespace and atttypid = 'text'::regtype
       and attname ~ '(agent_id|agent_slug|scope_id)$' and attnum > 0 and not attisdropped
     order by 1, 2"""


@dataclass(frozen=True)
class Reference:
    """A column of a table with tenants that names a row of another table with tenants, by `key` of that row."""

    relation: str
    column: str
    target: str
    key: str = "id"


def references(database: Database) -> list[Reference]:
    """By foreign key."""
    return [Reference(**row) for row in database.rows(REFERENCES)]


def slug_references(database: Database) -> list[Reference]:
    """By convention: a slug names an agent only beside its tenant."""
    return [Reference(**row, target="agents", key="slug") for row in database.rows(SLUG_REFERENCES)]


# Columns without a foreign key, for whoever writes the row must not wait for what they name.
WITHOUT_KEY: Final = [
    Reference("workflow_runs", "wake_id", "agent_wakes"),
    Reference("workflow_claims", "wake_id", "agent_wakes"),
    Reference("workflow_run_events", "run_id", "workflow_runs"),
]


def fill_for_both(world: Database, sides: Mapping[str, Side]) -> None:
    """Rows in every table of YourHQ's, so that each has something to be copied; A's carry a word to look for."""
    seed = Seed(world)
    for side in sides.values():
        for status in ("blocks", "blocked_by"):
            source, target = (seed.task(f"{status} task", side.tenant) for _ in range(2))
            named = {"source_task_id": source, "target_task_id": target, "relation_type": status}
            seed.insert("task_relations", tenant_id=side.tenant, **named)
        usage = {"run_id": str(uuid.uuid4()), "provider": "p", "model": "m", "cost_total_usd": 7}
        world.execute("update agent_budgets set status = 'exceeded', monthly_limit_usd = 0 where tenant_id = %s", [B])
        seed.insert("agent_usage", tenant_id=side.tenant, agent_id=side.agents["busy"], occurred_at="now", **usage)
        seed.insert("notifications", tenant_id=side.tenant, type="t", title="t", actor_agent_id=side.agents["busy"])
        seed.item(side.agents["idle"], status="done", completed_at="now")
    world.execute("delete from agent_budgets where tenant_id = %s", [A])
    for table, column in (("tasks", "title"), ("agent_inbox_items", "summary"), ("notifications", "title")):
        world.execute(f"update {table} set {column} = 'secret-of-a ' || {column} where tenant_id = %s", [A])
    world.execute("update workflow_runs set last_error = 'secret-of-a' where tenant_id = %s", [A])
    world.execute("update agent_inbox_items set event_type = 'task_assignment' where status = 'pending'")


def fill_the_rest(world: Database, side: Side) -> None:
    """Rows in the tables that populate() leaves empty."""
    seed = Seed(world)
    mine = {"tenant_id": side.tenant}
    seed.insert("dispatcher_faults", **mine, gateway_id=side.gateway_id, side_write="s", error="e")
    seed.insert("agent_resumptions", **mine, agent_id=side.agents["idle"])
    sender = {"from_agent_id": side.agents["busy"], "wake_id": side.wake}
    seed.insert("inbox_item_origins", **mine, item_id=side.items["fresh"], **sender)
    seed.insert("workflow_respawns", **mine, run_id=side.runs["silent"], attempt=1, wake_id=side.wake, session_id="s")
    seed.insert("workflow_approvals", **mine, run_id=side.runs["running"], step_name="s")
    seed.insert("budget_events", **mine, budget_id=side.budget, period_key="k", event_kind="warned")
    state = {"from_status": "queued", "to_status": "dispatched", "attempt": 1}
    seed.insert("workflow_run_events", **mine, run_id=side.runs["dispatched"], **state)
    seed.insert("departments", **mine, name="d")
    seed.insert("agent_profiles", **mine, agent_id=side.slug("idle"))
    seed.insert("workflow_audit_log", **mine, actor="operator", action="a")


def both_filled(world: Database) -> dict[str, Side]:
    """Two tenants with rows in every table; the sides by name: `a` and `b` are tenant A's, `c` is tenant B's."""
    sides = populate(world)
    fill_for_both(world, sides)
    for name in ("a", "c"):
        fill_the_rest(world, sides[name])
    Seed(world).insert("agent_budgets", agent_id=sides["a"].agents["idle"], tenant_id=A, monthly_limit_usd=10)
    return sides
