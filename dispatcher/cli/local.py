"""`dispatcher local up`: the embedded Supabase in the foreground."""

import json
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dispatcher.local.stack import Stack, StackInfo

DEFAULT_DIRECTORY = Path(".dispatcher/local")
DEFAULT_TENANT = uuid.UUID(int=0)
WORKSPACE = "hq"
GATEWAY = "local"
AGENTS = ("ada", "grace")

local_app = typer.Typer(no_args_is_help=True, help="The embedded Supabase, for a first look, tests and CI.")


@local_app.callback()
def local() -> None:
    """The embedded Supabase, for a first look, tests and CI."""


@local_app.command()
def up(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where everything is kept.", file_okay=False)
    ] = DEFAULT_DIRECTORY,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")] = False,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 chooses.", min=0, max=65535)] = 0,
    no_seed: Annotated[bool, typer.Option("--no-seed", help="Leave out the first tenant and agents.")] = False,
) -> None:
    """Run PostgreSQL, PostgREST and Realtime behind one URL until SIGINT or SIGTERM."""
    from dispatcher.cli.extras import require_extra

    require_extra("local", "local up")
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs leave it
            signal.signal(number, lambda *_: stopped.set())
    with project_stack(directory, port=port, seed=not no_seed) as stack:
        if not stopped.is_set():
            _announce(stack, as_json)
        ended = stack.wait(stopped)
    if ended:
        typer.echo(ended, err=True)
        raise typer.Exit(1)


def project_stack(directory: Path, *, port: int = 0, seed: bool = True, durable: bool = True) -> "Stack":
    """An embedded Supabase with the project's migrations and, if wanted, its first rows. Not started."""
    from dispatcher.local.stack import Stack

    return Stack(directory, port=port, prepare=_preparation(seed), durable=durable)


def _preparation(seed: bool) -> Callable[[str], None]:
    from dispatcher.supabase.migrate import apply_migrations, migrations_directory

    def prepare(db_url: str) -> None:
        apply_migrations(db_url, migrations_directory())
        if seed:
            seed_first_rows(db_url)

    return prepare


def seed_first_rows(db_url: str) -> None:
    """A tenant, a workspace, a gateway and two agents, so that there is something to wake. Repeatable."""
    import psycopg

    with psycopg.connect(db_url) as connection:
        connection.execute(
            "insert into public.tenants (id, name, slug) values (%s, 'Default', 'default') on conflict do nothing",
            (DEFAULT_TENANT,),
        )
        connection.execute(
            "insert into public.workspace (tenant_id, name, slug) select %s, 'HQ', %s"
            " where not exists (select from public.workspace where tenant_id = %s)",
            (DEFAULT_TENANT, WORKSPACE, DEFAULT_TENANT),
        )
        connection.execute(
            "insert into public.gateways (tenant_id, slug, label) values (%s, %s, 'Local') on conflict do nothing",
            (DEFAULT_TENANT, GATEWAY),
        )
        for slug in AGENTS:
            connection.execute(
                "insert into public.agents (tenant_id, gateway_id, slug, name)"
                " select tenant_id, id, %s, %s from public.gateways where tenant_id = %s and slug = %s"
                " on conflict do nothing",
                (slug, slug.title(), DEFAULT_TENANT, GATEWAY),
            )


def _announce(stack: "Stack", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(stack.info)), flush=True)
    else:
        _show_table(stack.info, stack.directory)


def _show_table(info: "StackInfo", directory: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dispatcher.text import printable

    rows = {**asdict(info), "directory": str(directory)}
    table = Table(title="Embedded Supabase", title_justify="left", show_header=False, box=box.SIMPLE)
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    # Wider than the terminal rather than folded: a key must be copied in one piece.
    Console(width=max(map(len, rows.values())) + 30).print(table)
    typer.echo("Ready. Ctrl-C stops it; the data stays in the directory.")
