"""The reference pages say what the code says, and every page can be found."""

import inspect
import re
from pathlib import Path

import pytest

from dispatcher import events
from dispatcher.config import settings_table
from tools.generate_docs import PAGES, REFERENCE, REPOSITORY, LogEvent, log_events, read_schema

DOCS = REPOSITORY / "docs"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_what_the_generator_writes(name: str) -> None:
    page = REFERENCE / name
    assert page.read_text(encoding="utf-8") == PAGES[name](), "run: python tools/generate_docs.py"


def test_every_setting_has_a_row() -> None:
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    for row in settings_table():
        assert f"| `{row.name}` |" in page


def test_every_event_says_what_it_means() -> None:
    unexplained = [event.name for event in log_events(inspect.getsource(events)) if not event.meaning]
    assert unexplained == [], "say it in a comment behind the constant in dispatcher/events.py"


def test_events_are_read_with_their_comments() -> None:
    source = '"""Doc."""\nA: Final = "wake.started"  # the process runs\nB: Final = "wake.ended"\nC = "no event"\n'
    assert list(log_events(source)) == [
        LogEvent("wake.started", "the process runs"),
        LogEvent("wake.ended", ""),
    ]


def test_functions_and_relations_are_read_from_a_dump() -> None:
    dump = """
CREATE FUNCTION public.claim(p_id uuid, p_names text[] DEFAULT ARRAY['a'::text, 'b'::text]) RETURNS jsonb
    LANGUAGE sql
COMMENT ON FUNCTION public.claim(p_id uuid, p_names text[]) IS 'Claims it; the caller''s
  token fences it.';
CREATE FUNCTION public.fire() RETURNS trigger
COMMENT ON TABLE public.items IS 'Work.';
"""
    schema = read_schema(dump)
    assert schema.relations == [("items", "Work.")]
    [claim] = schema.functions
    assert claim.comment == "Claims it; the caller's token fences it."
    assert claim.signature == "claim(p_id uuid, p_names text[] DEFAULT ARRAY['a'::text, 'b'::text]) returns jsonb"


def test_a_long_signature_is_broken_between_arguments_only() -> None:
    arguments = ", ".join(f"p_argument_number_{n} text[] DEFAULT ARRAY['a'::text, 'b'::text]" for n in range(3))
    [claim] = read_schema(f"CREATE FUNCTION public.claim({arguments}) RETURNS jsonb\n").functions
    assert [line.strip()[:18] for line in claim.signature.splitlines()[1:-1]] == ["p_argument_number_"] * 3


def markdown_pages() -> list[Path]:
    roots = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*roots, *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", markdown_pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    linked = {(DOCS / target).resolve() for target in LINK.findall(index)}
    missing = [str(page) for page in DOCS.rglob("*.md") if page != DOCS / "README.md" and page not in linked]
    assert missing == []
