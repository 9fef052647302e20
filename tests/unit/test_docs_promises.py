"""The pages that say what happens when something fails name the tests that hold them to it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPLANATION = ROOT / "docs" / "explanation"
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CARRIED = re.compile(r"(?:ff|field[ _]failure[ _])0*(\d+)", re.IGNORECASE)

# The numbered reports that concern the inbox half, and those of the other half that stand on the page beside them.
INBOX = {
    *(1, 3, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19, 21, 22, 24, 26, 27, 28, 29),
    *(31, 32, 34, 35, 37, 38, 41, 42, 43, 45, 46, 47, 49, 50, 52, 54, 56, 62, 63, 64, 69, 71),
}


@cache
def named_tests(file: str) -> dict[str, str]:
    """The tests of a file by name, methods included, each with its docstring."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


def references(text: str) -> list[tuple[str, str]]:
    return REFERENCE.findall(text)


def sections(text: str) -> dict[int, str]:
    """The text below each `### <number>. <title>`."""
    parts = re.split(r"^### (\d+)\. .+$", text, flags=re.MULTILINE)
    return {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}


def bullets(text: str) -> list[str]:
    """The sentences of a page of lists, each with the lines that belong to it."""
    return re.findall(r"^- .*(?:\n  .*)*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", ["credentials.md", "failure-modes.md", "field-failures.md"])
def test_every_test_a_page_names_exists(page: str) -> None:
    named = references((EXPLANATION / page).read_text(encoding="utf-8"))
    assert named
    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or name not in named_tests(file)]
    assert missing == []


def test_every_sentence_about_a_failure_names_its_test() -> None:
    sentences = bullets((EXPLANATION / "failure-modes.md").read_text(encoding="utf-8"))
    assert len(sentences) > 40
    assert [sentence for sentence in sentences if not references(sentence)] == []


def test_every_field_failure_of_the_inbox_is_answered_by_a_test_that_carries_its_number() -> None:
    answered = sections((EXPLANATION / "field-failures.md").read_text(encoding="utf-8"))
    assert answered.keys() >= INBOX
    for number, body in answered.items():
        carried = {
            int(found)
            for file, name in references(body)
            for found in CARRIED.findall(f"{name} {named_tests(file)[name]}")
        }
        assert number in carried, f"no test on the page carries {number}"


def test_every_number_a_test_carries_is_on_the_page() -> None:
    answered = sections((EXPLANATION / "field-failures.md").read_text(encoding="utf-8"))
    carried = {
        (int(number), f"{path.name}::{name}")
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in named_tests(str(path.relative_to(ROOT)))
        for number in CARRIED.findall(name)
    }
    assert [one for one in sorted(carried) if one[0] not in answered] == []
