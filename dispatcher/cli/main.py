"""The command line as a whole: which commands there are, and how a run of one ends.

Each command lives in a module of its own that is imported when the command is asked for, so that
`dispatcher run` does not carry what only `dispatcher demo` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

import dispatcher
from dispatcher.errors import DispatcherError
from dispatcher.log_output import say_on_stderr
from dispatcher.text import printable

COMMANDS: Final[Mapping[str, str]] = {
    "run": "dispatcher.cli.run:command",
    "local": "dispatcher.cli.local:local_app",
    "demo": "dispatcher.cli.demo:command",
    "check": "dispatcher.cli.check:command",
    "status": "dispatcher.cli.status:command",
    "wake": "dispatcher.cli.wake:command",
    "wakes": "dispatcher.cli.wakes:command",
    "inbox": "dispatcher.cli.inbox:app",
    "runs": "dispatcher.cli.runs:app",
    "routing": "dispatcher.cli.routing:app",
    "budgets": "dispatcher.cli.budgets:app",
    "migrate": "dispatcher.cli.migrate:command",
    "health": "dispatcher.cli.health:command",
}


class LazyGroup(TyperGroup):
    """A group whose commands are imported one by one, when they are named."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        unloaded: Any = dict.fromkeys(COMMANDS)  # only the names are read, for "did you mean"
        self.commands = unloaded

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is typer's
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - as above
        """The command, imported now; None for an unknown name."""
        return load_command(cmd_name) if cmd_name in COMMANDS else None


@cache
def load_command(name: str) -> Any:
    """The typer command behind `name`: a function becomes a command, a `Typer` a group of commands."""
    module, _, attribute = COMMANDS[name].partition(":")
    target = getattr(import_module(module), attribute)
    command = get_group(_plain(target)) if isinstance(target, typer.Typer) else get_command(_single(target))
    command.name = name
    return command


def new_app(**options: Any) -> typer.Typer:
    """A `Typer` with plain help: typer's own use of rich would load it for every command."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)


def _plain(app: typer.Typer) -> typer.Typer:
    app.rich_markup_mode = None
    return app


def _single(function: Any) -> typer.Typer:
    app = new_app()
    app.command()(function)
    return app


app = new_app(cls=LazyGroup, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dispatcher {dispatcher.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Wakes OpenClaw agents when there is work for them in Supabase, and only then."""


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command; the exit code: 0 ok, 1 failed or refused, 2 usage, 69 unavailable, 78 bad settings."""
    try:
        get_command(app)(args=list(arguments), prog_name="dispatcher")
    except DispatcherError as error:
        say_on_stderr(f"dispatcher: {_shown(error)}")
        return error.exit_code
    except SystemExit as ending:
        return _exit_code(ending)
    return 0


def _shown(error: DispatcherError) -> str:
    """On one line; the statements to type that a migration's error carries stand on lines of their own."""
    lines = str(error).split("\n") if error.has_lines else [str(error)]
    return "\n".join(printable(line) for line in lines)


def _exit_code(ending: SystemExit) -> int:
    return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
