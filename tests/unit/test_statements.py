"""A script is split where psql would split it."""

import pytest

from dispatcher.supabase.statements import Statement, split_statements


def texts(script: str) -> list[str]:
    return [statement.text for statement in split_statements(script)]


@pytest.mark.parametrize(
    "statement",
    [
        "select 1",
        "select 'a;b', 'it''s;'",
        r"select e'\';', E'\\'",
        'select ";" from "a;""b"',
        "select $$a;b$$, $tag$ $$;$$ $tag$",
        "select 1 /* a; /* nested; */ b; */ + 2",
        "select 1 -- a; b\n + 2",
        "create rule r as on insert to t do also (delete from a; delete from b)",
        "create function f() returns int begin atomic select 1; select case when true then 2 end; end",
        "create or replace procedure p() language sql begin atomic delete from a; end",
        'select begin, atomic, "end" from t',
        "select $1 + a$b$c",
        "do $x$ begin perform 1; end $x$",
        "select 'ü$$;'",
    ],
)
def test_what_belongs_together_stays_together(statement: str) -> None:
    assert texts(f"select 0;\n{statement};\nselect 3;") == ["select 0", statement, "select 3"]


@pytest.mark.parametrize("script", ["", " \n", ";;\n;", "-- only a comment;\n", "/* a; */ ; -- b"])
def test_nothing_comes_of_nothing(script: str) -> None:
    assert texts(script) == []


def test_the_last_statement_needs_no_semicolon() -> None:
    assert texts("select 1; select 2") == ["select 1", "select 2"]


@pytest.mark.parametrize("script", ["select 'open", "select $$open; x", "select /* open; x"])
def test_an_unclosed_quote_is_left_for_the_server_to_refuse(script: str) -> None:
    assert texts(script)[0].startswith("select")


def test_a_statement_knows_its_place() -> None:
    script = "-- first\nselect 1;  select\n  2,\n  nonsense;\n"
    second = split_statements(script)[1]
    assert second == Statement("select\n  2,\n  nonsense", 2, 12)
    assert second.locate(0) == (2, 12)
    assert second.locate(second.text.index("2")) == (3, 3)
    assert second.locate(second.text.index("nonsense")) == (4, 3)
