"""The SQL that the tutorial has a newcomer run does what the tutorial says."""

import re
from pathlib import Path

from dispatcher.cli.local import seed_first_rows
from tests.support.database import Database

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "first-wake.md"


def test_the_tutorials_insert_makes_one_item_for_ada(database: Database) -> None:
    [statement] = re.findall(r'database\.execute\("""(.*?)"""\)', TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)
    seed_first_rows(database.url)
    assert database.execute(statement) == 1
    assert database.row("select agent_slug, status::text, summary from public.agent_inbox_items") == {
        "agent_slug": "ada",
        "status": "pending",
        "summary": "Say hello",
    }
