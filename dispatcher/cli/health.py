"""`dispatcher health`: what the daemon beside us last said of itself."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dispatcher.cli.output import print_json, print_line

DEFAULT_FILE = Path("/tmp/heartbeat.json")  # noqa: S108 - the published default; holds nothing secret
STALE_BEATS = 3
SLACK_SECONDS = 5.0


def command(
    file: Annotated[
        Path | None,
        typer.Option("--file", help="The daemon's heartbeat file; default: HEARTBEAT_FILE as the daemon reads it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """End with 0 when the daemon is ok or degraded, 1 when it is failing, silent or absent."""
    verdict = judge_heartbeat(read_heartbeat(file or _configured_file()), datetime.now(UTC))
    if as_json:
        print_json(verdict)
    else:
        for line in [verdict["status"], *(f"  {cause}" for cause in verdict["causes"])]:
            print_line(line)
    if verdict["status"] not in ("ok", "degraded"):
        raise typer.Exit(1)


def _configured_file() -> Path:
    """Where the daemon's own settings put it; a health check must answer also where these are incomplete."""
    from dispatcher.config import load_settings
    from dispatcher.errors import SettingsError

    try:
        return load_settings().heartbeat_file
    except SettingsError:
        return Path(os.environ.get("HEARTBEAT_FILE") or DEFAULT_FILE)


def judge_heartbeat(facts: dict[str, Any] | None, now: datetime) -> dict[str, Any]:
    """{"status": ok | degraded | failing | silent | absent, "causes": [text], "age_s", "loops"}."""
    if facts is None:
        return {
            "status": "absent",
            "causes": ["no heartbeat file: no daemon runs here"],
            "age_s": None,
            "loops": {},
        }
    age = (now - datetime.fromisoformat(facts["ts"])).total_seconds()
    health = facts["health"]
    verdict = {
        "status": health["status"],
        "causes": health["causes"],
        "age_s": round(age, 1),
        "loops": health["loops"],
    }
    if age > STALE_BEATS * facts["heartbeat_interval_s"] + SLACK_SECONDS:
        verdict |= {"status": "silent", "causes": [f"the last heartbeat is {age:.0f} s old"]}
    elif age < -SLACK_SECONDS:
        # The clock was put back. A living daemon writes anew within one interval; a dead one would seem well for ever.
        verdict |= {"status": "silent", "causes": [f"the last heartbeat is {-age:.0f} s ahead of the clock"]}
    return verdict


def read_heartbeat(file: Path) -> dict[str, Any] | None:
    """What the file says; None when there is none, or it is no heartbeat."""
    try:
        facts: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(facts, dict) and {"ts", "health", "heartbeat_interval_s"} <= facts.keys()
    return facts if known else None
