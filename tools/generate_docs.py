"""Writes the reference pages that are derived from the code, so that they cannot say something else.

python tools/generate_docs.py           write them
python tools/generate_docs.py --check   exit 1 and name the pages that differ
"""

from __future__ import annotations

import inspect
import io
import re
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dispatcher import errors, events
from dispatcher.cli.main import app
from dispatcher.config import not_from_folder, settings_table
from dispatcher.runtime import metrics

REPOSITORY: Final = Path(__file__).resolve().parent.parent
REFERENCE: Final = REPOSITORY / "docs" / "reference"
SCHEMA: Final = REPOSITORY / "supabase" / "schema.sql"
HELP_WIDTH: Final = 100

EXIT_CODES: Final = (
    (0, "It worked."),
    (errors.EXIT_FAILED, "It failed, or was refused: a gate said no, a health check is not well."),
    (2, "The command line is wrong; the usage stands on stderr."),
    (
        errors.EXIT_UNAVAILABLE,
        "Supabase cannot be reached or does not answer as it should. Trying again later may help.",
    ),
    (errors.EXIT_BAD_SETTINGS, "A setting is missing or wrong; trying again without a change will not help."),
)


# ------------------------------------------------------------------------------------------------ pages


def settings_page() -> str:
    """Every setting with its default, unit, range and meaning."""
    rows = (
        (f"`{row.name}`", _default(row.default, row.required), row.unit, row.allowed, row.meaning)
        for row in settings_table()
    )
    return _page(
        "Settings",
        "dispatcher/config.py",
        "All settings are environment variables. The first place that has one wins: the "
        "environment, `.env` in the working directory, `$OPENCLAW_HOME/secrets/gateway.env`. An "
        "empty value counts as unset. `dispatcher check` names every fault without starting "
        "anything.",
        "The service key is only sent to the URL that stands beside it, so both come from one place. The `.env` of the "
        "working directory counts when it is yours or root's and nobody else may write it, and never sets "
        f"{_named(not_from_folder())}: those say where secrets go, what is executed or where is written.",
        _table(("Setting", "Default", "Unit", "Allowed", "Meaning"), rows),
    )


def _named(names: Collection[str]) -> str:
    *most, last = [f"`{row.name}`" for row in settings_table() if row.name in names]
    return f"{', '.join(most)} or {last}"


def events_page() -> str:
    """The names of log events with what they mean."""
    rows = ((f"`{event.name}`", event.meaning) for event in log_events(inspect.getsource(events)))
    return _page(
        "Log events",
        "dispatcher/events.py",
        "One JSON object per line on stdout. Every line has `ts` (UTC, RFC 3339, milliseconds), "
        "`level`, `daemon`, `gateway_id`, `tenant_id`, `event` (below) and `msg`; what else it "
        "knows follows as fields. Names and fields are a contract; the wording of `msg` is not, "
        "except for `Skipping wake for <agent-slug> (<reason>)`.",
        _table(("Event", "Meaning"), rows),
    )


def cli_page() -> str:
    """The help of every command, as the terminal shows it."""
    return _page(
        "Command line",
        "dispatcher/cli/",
        "Exit codes: [Errors and exit codes](errors.md). `--json` output is stable; tables are for people.",
        *(f"## {name}\n\n```text\n{text}\n```" for name, text in command_helps()),
    )


def errors_page() -> str:
    """Exit codes, and which error ends with which."""
    kinds = sorted(_error_classes(), key=lambda kind: (kind.exit_code, kind.__name__))
    rows = ((f"`{kind.__name__}`", kind.exit_code, _first_paragraph(kind.__doc__)) for kind in kinds)
    return _page(
        "Errors and exit codes",
        "dispatcher/errors.py",
        "A command that fails on purpose prints one line on stderr that begins with `dispatcher:` "
        "and ends with one of these codes. A traceback is a fault of ours: please report it.",
        _table(("Exit code", "Meaning"), EXIT_CODES),
        "## Errors",
        _table(("Error", "Exit code", "Meaning"), rows),
    )


def metrics_page() -> str:
    """What /metrics shows, and the pages beside it."""
    rows = (
        (f"`{one.name}{'_total' * (one.kind == 'counter')}`", one.kind, ", ".join(one.labels), one.meaning)
        for one in metrics.FAMILIES
    )
    return _page(
        "Metrics",
        "dispatcher/runtime/metrics.py",
        "With `METRICS_PORT` set the daemon serves four pages on `METRICS_HOST` (loopback unless told otherwise; they "
        "ask nobody who is asking). Without it nothing listens and nothing is counted.",
        _table(
            ("Page", "Answers"),
            (
                ("`/metrics`", "Prometheus text, or OpenMetrics where asked for."),
                (
                    "`/livez`",
                    "The process, for a liveness probe: 200 while its loops turn; 503 names those that stand still.",
                ),
                (
                    "`/healthz`",
                    "The work, for alerts: 503 when it is failing, as in an outage, else 200; with the loops as JSON.",
                ),
                (
                    "`/readyz`",
                    "200 once the first sweep is done and while health is not failing, 503 before, and while stopping.",
                ),
            ),
        ),
        "A port that cannot be had is a warning (`metrics.failed`) and degrades health; it is tried again every five "
        "seconds, and wakes go on. No metric is labelled by agent: how many there are is no bound to build on.",
        "## `/metrics`",
        _table(("Metric", "Kind", "Labels", "Meaning"), rows),
        "Besides these, `process_*` of the daemon's own process: CPU seconds, memory, open files.",
    )


def sql_page() -> str:
    """Tables and functions of the schema with their comments."""
    schema = read_schema(SCHEMA.read_text(encoding="utf-8"))
    return _page(
        "Tables and SQL functions",
        "supabase/schema.sql",
        "The functions are the atomic layer: one call, one transaction, the database's clock. All "
        "are executable by `service_role` alone unless their comment says otherwise. A refusal is "
        "data, never an error.",
        "## Tables and views",
        _table(("Name", "Meaning"), ((f"`{name}`", text) for name, text in schema.relations)),
        "## Functions",
        *(
            f"### {function.name}\n\n```sql\n{function.signature}\n```\n\n{function.comment}"
            for function in schema.functions
        ),
    )


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "events.md": events_page,
    "cli.md": cli_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "sql-functions.md": sql_page,
}


# --------------------------------------------------------------------------------------- what they draw on


@dataclass(frozen=True)
class LogEvent:
    """A log event's dotted name, and the comment that stands behind it."""

    name: str
    meaning: str


def log_events(source: str) -> Iterator[LogEvent]:
    """The string constants of a module, each with the comment on its line; '' where there is none."""
    by_line: dict[int, dict[int, str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in {tokenize.STRING, tokenize.COMMENT}:
            by_line.setdefault(token.start[0], {})[token.type] = token.string
    for line in by_line.values():
        name = line.get(tokenize.STRING, "").strip("\"'")
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name):
            yield LogEvent(name, line.get(tokenize.COMMENT, "").lstrip("# "))


def command_helps() -> Iterator[tuple[str, str]]:
    """Full name and help text of every command, groups before their members."""
    yield from _helps(get_command(app), "dispatcher")


def _helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    context = typer.Context(command, info_name=name, terminal_width=HELP_WIDTH, max_content_width=HELP_WIDTH)
    yield name, command.get_help(context).rstrip()
    if isinstance(command, TyperGroup):
        for member in command.list_commands(context):
            yield from _helps(command.get_command(context, member), f"{name} {member}")


def _error_classes() -> list[type[errors.DispatcherError]]:
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DispatcherError)]


@dataclass(frozen=True)
class SqlFunction:
    """A function of the schema: its name, its signature up to the return type, its comment."""

    name: str
    signature: str
    comment: str


@dataclass(frozen=True)
class Schema:
    """What the reference page shows of a dumped schema; relations are (name, comment)."""

    relations: list[tuple[str, str]]
    functions: list[SqlFunction]


_FUNCTION = re.compile(r"^CREATE FUNCTION public\.(\w+)\((.*?)\) RETURNS (.+?)$", re.MULTILINE)
_COMMENT = re.compile(
    r"^COMMENT ON (TABLE|VIEW|FUNCTION) public\.(\w+)(?:\([^;]*?\))? IS '((?:[^']|'')*)';", re.MULTILINE
)


def read_schema(dump: str) -> Schema:
    """Tables, views and functions of a `pg_dump --schema-only`; trigger functions are left out."""
    comments = {(kind, name): " ".join(text.replace("''", "'").split()) for kind, name, text in _COMMENT.findall(dump)}
    relations = sorted((name, text) for (kind, name), text in comments.items() if kind != "FUNCTION")
    functions = [
        SqlFunction(name, _signature(name, arguments, returned), comments.get(("FUNCTION", name), ""))
        for name, arguments, returned in _FUNCTION.findall(dump)
        if returned != "trigger"
    ]
    return Schema(relations, sorted(functions, key=lambda function: function.name))


def _signature(name: str, arguments: str, returned: str) -> str:
    one_line = f"{name}({arguments}) returns {returned}"
    if len(one_line) <= HELP_WIDTH:
        return one_line
    listed = ",\n".join(f"  {argument.strip()}" for argument in _split_arguments(arguments))
    return f"{name}(\n{listed}\n) returns {returned}"


def _split_arguments(arguments: str) -> list[str]:
    """Split at the commas between arguments, not at those inside a default."""
    return re.split(r",\s*(?=p_|VARIADIC |OUT |INOUT )", arguments)


# ------------------------------------------------------------------------------------------------- form


def _page(title: str, source: str, lead: str, *parts: str) -> str:
    note = f"<!-- Generated by tools/generate_docs.py from {source}; edit that, then run it. -->"
    return "\n\n".join((f"# {title}", note, lead, *parts)) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [_row(header), _row(["---"] * len(header)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _default(value: str, required: bool) -> str:
    return "**required**" if required else f"`{value}`" if value else ""


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").strip().split("\n\n", maxsplit=1)[0].split())


def differing_pages() -> dict[Path, str]:
    """The pages whose file is missing or says something else, with the text they should have."""
    wanted = {REFERENCE / name: build() for name, build in PAGES.items()}
    return {path: text for path, text in wanted.items() if _read(path) != text}


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` only name those that differ."""
    differing = differing_pages()
    for path, text in differing.items():
        print(f"{'differs' if '--check' in arguments else 'written'}: {path.relative_to(REPOSITORY)}")
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    return int(bool(differing) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
