"""`dispatcher migrate`: brings a database up to this version."""

from typing import Annotated

import typer


def command(
    db_url: Annotated[
        str | None,
        typer.Option(
            "--db-url",
            envvar=["DATABASE_URL", "SUPABASE_DB_URL"],
            show_envvar=True,
            help="postgresql://… of a role that may create schemas.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only name what would be applied.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Apply all of them once more: makes what was dropped, leaves the rest.")
    ] = False,
) -> None:
    """Apply the project's migrations, each once, in order. Safe to run twice and by two at once."""
    from dispatcher.errors import SettingsError
    from dispatcher.supabase.migrate import apply_migrations, migrations_directory

    if not db_url:
        raise SettingsError("the database is not named: give --db-url, DATABASE_URL or SUPABASE_DB_URL")
    applied = apply_migrations(db_url, migrations_directory(), dry_run=dry_run, again=again)
    verb = "would apply" if dry_run else "applied"
    for migration in applied:
        typer.echo(f"{verb} {migration.version} {migration.name}")
    if not applied:
        typer.echo("up to date")
