"""`dispatcher check`: are the settings good, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from dispatcher.cli.output import print_json, print_line, print_table
from dispatcher.config import Settings, load_settings, settings_table
from dispatcher.errors import SettingsError

UNSET = "unset"
MASKED = "set (hidden)"


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Validate the settings without starting: names every fault, ends with 78 when there is one."""
    try:
        settings = load_settings()
    except SettingsError as error:
        _report_faults(error, as_json)
        raise typer.Exit(error.exit_code) from error
    _report_values(shown_values(settings), settings.warnings, as_json)


def shown_values(settings: Settings) -> dict[str, str]:
    """Each setting as it is in force, under its environment name; secrets only say whether they are set."""
    return {row.name: _shown(getattr(settings, row.name.lower()), row.secret) for row in settings_table()}


def _shown(value: object, secret: bool) -> str:
    if value is None or value == ():
        return UNSET
    if secret:
        return MASKED
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _report_faults(error: SettingsError, as_json: bool) -> None:
    if as_json:
        print_json({"ok": False, "faults": error.faults})
        return
    count = len(error.faults)
    print_line(f"dispatcher: {count} fault{'s' if count > 1 else ''} in the settings:", to_stderr=True)
    for fault in error.faults:
        print_line(f"  {fault}", to_stderr=True)


def _report_values(values: dict[str, str], warnings: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json({"ok": True, "settings": values, "warnings": warnings})
        return
    print_table(("setting", "value"), values.items())
    for warning in warnings:
        print_line(f"Warning: {warning}")
    print_line("The settings are valid.")
