"""Rows for tests: short calls, every column can be given, the id of what was made comes back."""

import uuid
from itertools import count
from typing import Any

from psycopg import sql
from psycopg.types.json import Jsonb

from tests.support.database import Database

DEFAULT_TENANT = uuid.UUID(int=0)


class Seed:
    """Inserts rows as the superuser. Whatever a row needs and is not named is made first.

    `seed.item("ada")` makes tenant, workspace, gateway `local` and agent `ada` when they are absent.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._numbers = count(1)
        self.tenant_id = DEFAULT_TENANT

    def insert(self, table: str, **columns: object) -> dict[str, Any]:
        """Insert one row into a table of schema public; the whole row comes back. Dicts become jsonb."""
        values = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in columns.items()}
        query = sql.SQL("insert into public.{} ({}) values ({}) returning *").format(
            sql.Identifier(table),
            sql.SQL(", ").join(map(sql.Identifier, values)),
            sql.SQL(", ").join(map(sql.Placeholder, values)),
        )
        row = self.database.admin.execute(query, values).fetchone()
        assert row is not None
        return row

    def tenant(self, slug: str = "default", **columns: object) -> uuid.UUID:
        """A tenant; `default` is the all-zero one."""
        if slug == "default":
            columns.setdefault("id", DEFAULT_TENANT)
        return self._ensure("tenants", {"slug": slug}, {"name": slug.title(), **columns})

    def workspace(self, slug: str | None = "hq", tenant_id: uuid.UUID = DEFAULT_TENANT, **columns: object) -> uuid.UUID:
        """The tenant's workspace, one per tenant."""
        self._ensure_tenant(tenant_id)
        return self._ensure("workspace", {"tenant_id": tenant_id}, {"slug": slug, **columns})

    def gateway(self, slug: str = "local", tenant_id: uuid.UUID = DEFAULT_TENANT, **columns: object) -> uuid.UUID:
        """A gateway with its tenant and workspace."""
        self.workspace(tenant_id=tenant_id)
        return self._ensure("gateways", {"tenant_id": tenant_id, "slug": slug}, {"label": slug.title(), **columns})

    def agent(
        self,
        slug: str = "ada",
        gateway: str = "local",
        tenant_id: uuid.UUID = DEFAULT_TENANT,
        **columns: object,
    ) -> uuid.UUID:
        """An agent of a gateway named by its slug."""
        columns.setdefault("gateway_id", self.gateway(gateway, tenant_id))
        return self._ensure("agents", {"tenant_id": tenant_id, "slug": slug}, {"name": slug.title(), **columns})

    def task(self, title: str = "A task", tenant_id: uuid.UUID = DEFAULT_TENANT, **columns: object) -> uuid.UUID:
        """A task."""
        self._ensure_tenant(tenant_id)
        return self.insert("tasks", title=title, tenant_id=tenant_id, **columns)["id"]

    def item(
        self,
        agent: str | uuid.UUID = "ada",
        event_type: str = "task_assignment",
        **columns: object,
    ) -> uuid.UUID:
        """An inbox item of an agent named by slug (made when absent) or by id."""
        agent_id = agent if isinstance(agent, uuid.UUID) else self.agent(agent)
        owner = self.database.row("select slug, tenant_id from public.agents where id = %s", (agent_id,))
        number = next(self._numbers)
        defaults: dict[str, object] = {
            "agent_id": agent_id,
            "agent_slug": owner["slug"],
            "tenant_id": owner["tenant_id"],
            "event_type": event_type,
            "summary": f"Item {number}",
            "dedup_key": f"test:{number}:{uuid.uuid4()}",
        }
        return self.insert("agent_inbox_items", **(defaults | columns))["id"]

    def crossed_item(self, agent: str | uuid.UUID, tenant_id: uuid.UUID, **columns: object) -> uuid.UUID:
        """An item of another tenant than its agent's, as YourHQ's own table takes it; ours refuses it."""
        self.database.execute("alter table public.agent_inbox_items disable trigger dispatcher_tenant")
        try:
            return self.item(agent, tenant_id=tenant_id, **columns)
        finally:
            self.database.execute("alter table public.agent_inbox_items enable trigger dispatcher_tenant")

    def items(self, agent: str | uuid.UUID, number: int, **columns: object) -> list[uuid.UUID]:
        """Several items of one agent, oldest first."""
        return [self.item(agent, **columns) for _ in range(number)]

    def _ensure_tenant(self, tenant_id: uuid.UUID) -> None:
        if not self.database.rows("select from public.tenants where id = %s", (tenant_id,)):
            slug = "default" if tenant_id == DEFAULT_TENANT else f"tenant-{tenant_id}"
            self.insert("tenants", id=tenant_id, slug=slug, name=slug.title())

    def _ensure(self, table: str, key: dict[str, object], others: dict[str, object]) -> uuid.UUID:
        condition = sql.SQL(" and ").join(sql.SQL("{} = {}").format(sql.Identifier(k), sql.Placeholder(k)) for k in key)
        query = sql.SQL("select id from public.{} where {}").format(sql.Identifier(table), condition)
        found = self.database.admin.execute(query, key).fetchone()
        return found["id"] if found else self.insert(table, **(key | others))["id"]
