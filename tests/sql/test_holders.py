"""Who holds what all need: asked without holding it."""

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed

# What a claim, a heartbeat, a deletion and a change of settings take.
SHARED = {
    "dispatcher_gateways": "update",
    "dispatcher_instances": "no key update",
    "dispatcher_settings": "update",
    "gateways": "key share",
    "tenants": "key share",
}


def test_f4_who_asks_who_holds_a_row_holds_none_of_the_others(database: Database, seed: Seed) -> None:
    seed.gateway()
    Dispatcher(database)
    asked = {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "local"}
    with database.connect() as holder, database.connect() as asking, database.connect() as other:
        holder.execute("begin")
        holder.execute("select from public.tenants where id = %s for update", [DEFAULT_TENANT])
        asking.execute("begin")
        [[answer]] = (row.values() for row in database.call("dispatcher_holders", asked, on=asking))
        assert [held["table"] for held in answer["held"]] == ["tenants"]
        holder.execute("rollback")
        for table, strength in SHARED.items():
            other.execute(f"select from public.{table} for {strength} nowait")
        asking.execute("rollback")
