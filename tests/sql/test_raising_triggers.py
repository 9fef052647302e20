"""A neighbour's trigger that raises on a table of ours, for one agent: named, and nobody else's matter."""

import pytest

from tests.sql.conftest import Dispatcher
from tests.support.database import Database
from tests.support.seed import Seed

REFUSE = """
    create function public.refuse() returns trigger language plpgsql
        as $$ begin raise exception 'no more of this'; end $$;
    create trigger refuse before update on public.agent_wake_state for each row
        when (old.agent_id = '{agent}') execute function public.refuse()"""


@pytest.mark.faults_expected
@pytest.mark.own_database
def test_f4_an_agent_whose_wake_state_raises_costs_no_other_its_report_or_its_claim(
    database: Database, seed: Seed
) -> None:
    raising, working, waiting = seed.agent("raising"), seed.agent("working"), seed.agent("waiting")
    daemon = Dispatcher(database, max_concurrent_wakes=1)
    seed.item(working)
    grant = daemon.claim(working)
    for agent in (raising, waiting):
        seed.item(agent)
        assert daemon.claim(agent)["skip_reason"] == "concurrency_limit"
    for statement in REFUSE.format(agent=raising).split(";\n    create trigger"):
        database.execute(statement if "function public.refuse() returns" in statement else f"create trigger{statement}")
    report = {"report": "ended", "wake_id": grant["wake_id"], "claim_token": grant["claim_token"], "ending": "exited"}
    answer = daemon.report({**report, "exit_code": 0}, limit=1)
    assert answer["results"][0]["applied"]
    verdicts = {claim["agent_slug"]: claim.get("skip_reason") for claim in answer["claims"]}
    assert verdicts["waiting"] is None
    assert verdicts["raising"] == "error"
    assert database.value("select error from dispatcher_faults where side_write = 'waitlist'").startswith("no more")
