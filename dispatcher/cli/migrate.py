"""`dispatcher migrate`: brings a database up to this version."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dispatcher.supabase.migrate import Applied

PATIENCE_SECONDS = 120


def command(
    db_url: Annotated[
        str | None,
        typer.Option(
            "--db-url",
            envvar=["DATABASE_URL", "SUPABASE_DB_URL"],
            show_envvar=True,
            help="postgresql://… of the role that owns the tables; on Supabase: postgres.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only name what would be applied.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the database is what this version makes; 1 if not.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Apply all files once more, whatever is recorded.")] = False,
    patience: Annotated[
        float,
        typer.Option(
            help="Seconds the whole run may lose to others: tries that end without a lock, and pauses between tries.",
            min=0,
        ),
    ] = PATIENCE_SECONDS,
) -> None:
    """Apply the project's migrations and check the result. Safe to run twice, by two at once, and beside a daemon."""
    from dispatcher.cli.extras import require_extra
    from dispatcher.errors import SettingsError
    from dispatcher.supabase.migrate import apply_migrations, migrations_directory

    require_extra("migrate", "migrate")
    if not db_url:
        raise SettingsError("the database is not named: give --db-url, DATABASE_URL or SUPABASE_DB_URL")
    if check:
        _check(db_url)
        return
    applied = apply_migrations(
        db_url, migrations_directory(), dry_run=dry_run, again=again, patience=patience, tell=_tell
    )
    if dry_run:
        _say_what_would_be_applied(applied)
    if not applied:
        _tell("up to date")


def _tell(line: str) -> None:
    """At once, also into a pipe: a wait is told while it lasts."""
    from dispatcher.cli.output import print_line

    print_line(line)
    sys.stdout.flush()


def _say_what_would_be_applied(applied: "list[Applied]") -> None:
    for migration in applied:
        _tell(f"would apply {migration.version} {migration.name} ({migration.why})")


def _say_what_to_type(remedies: list[str]) -> None:
    if remedies:
        _tell("where `dispatcher migrate` does not mend it, type as the owner:")
    for remedy in remedies:
        _tell(f"  {remedy};")


def _check(db_url: str) -> None:
    from dispatcher.supabase.migrate import check_schema, migrations_directory

    pending, state = check_schema(db_url, migrations_directory())
    _say_what_would_be_applied(pending)
    for title, findings in (("differs", state.drift), ("open", state.exposed), ("not ours", state.open_neighbours)):
        for finding in findings:
            _tell(f"{title}: {finding}")
    _say_what_to_type([each.remedy for each in state.drift + state.exposed if each.remedy])
    if pending or state.drift or state.exposed:
        _tell("run `dispatcher migrate`")
        raise typer.Exit(1)
    _tell("up to date")
