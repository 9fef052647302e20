"""`dispatcher health`: what the daemon beside us last said of itself, and whether it is alive to say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dispatcher.cli.output import print_json, print_line
from dispatcher.instance.heartbeat_file import (
    HeartbeatFileError,
    files_of,
    is_running,
    private_folder,
    read_heartbeat,
)

STALE_BEATS: Final = 3
SLACK_SECONDS: Final = 5.0
# Worst first: with several daemons the worst verdict is the answer.
STATUSES: Final = (
    *("untrusted", "absent", "gone", "foreign", "silent", "stuck"),
    *("failing", "starting", "waiting", "degraded", "ok"),
)
READY: Final = frozenset({"ok", "degraded"})
Verdict = dict[str, Any]


def command(
    file: Annotated[
        Path | None,
        typer.Option("--file", help="The daemon's heartbeat file; default: HEARTBEAT_FILE as the daemon reads it."),
    ] = None,
    ready: Annotated[
        bool, typer.Option("--ready", help="Ask whether work gets done, not only whether the process lives.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """End with 0 while the daemon's process lives and its loops turn, else with 1.

    An outage of Supabase is shown, but is no reason to restart a daemon: it ends with 1 only with --ready, as does a
    start that is not over.
    """
    verdict = worst([judge_file(path, gateway) for path, gateway in _places(file)])
    if as_json:
        print_json(verdict)
    else:
        for line in [verdict["status"], *(f"  {cause}" for cause in verdict["causes"])]:
            print_line(line)
    if not (verdict["status"] in READY if ready else verdict["live"]):
        raise typer.Exit(1)


def _places(file: Path | None) -> list[tuple[Path, str | None]]:
    """Where to look, and whose file it should be. Must answer also where the settings are incomplete."""
    from dispatcher.config import load_settings
    from dispatcher.errors import SettingsError

    gateway: str | None = None
    try:
        settings = load_settings()
        named, gateway = file or settings.heartbeat_file, settings.gateway_id
    except SettingsError:
        given = os.environ.get("HEARTBEAT_FILE")
        named = file or (Path(given) if given else None)
    return [(path, gateway) for path in ([named] if named else _private_files(gateway))]


def _private_files(gateway: str | None) -> list[Path]:
    """The files in the private folder; the folder itself where there are none, or it cannot be trusted."""
    try:
        return files_of(gateway) or [private_folder()]
    except HeartbeatFileError:
        return [private_folder()]


def judge_file(file: Path, gateway: str | None) -> Verdict:
    """The verdict on one heartbeat file; `gateway`: whose it has to be, None for anybody's."""
    if file == private_folder():
        return _judge_folder()
    try:
        facts = read_heartbeat(file)
    except HeartbeatFileError as error:
        return {**_verdict("untrusted", [str(error)]), "file": str(file)}
    verdict = judge_heartbeat(facts, datetime.now(UTC), None if facts is None else is_running(facts), gateway)
    return {**verdict, "file": str(file)}


def _judge_folder() -> Verdict:
    """Nothing was found in the private folder, or it cannot be trusted."""
    try:
        files_of(None)
    except HeartbeatFileError as error:
        return _verdict("untrusted", [str(error)])
    return _verdict(
        "absent", [f"no heartbeat file in {private_folder()}: no daemon of this user and gateway runs here"]
    )


def judge_heartbeat(
    facts: Mapping[str, Any] | None, now: datetime, running: bool | None = None, gateway: str | None = None
) -> Verdict:
    """{"status": one of STATUSES, "live", "causes": [text], "age_s", "loops", "pid", "gateway", "instance_id"}.

    Args:
        facts: what the file says, checked by `read_heartbeat`; None: there is none.
        now: by the clock the file was written with.
        running: whether its process runs; None where nobody can tell.
        gateway: whose file it has to be; None for anybody's.
    """
    if facts is None:
        return _verdict("absent", ["no heartbeat file: no daemon runs here"])
    health, age = facts["health"], (now - datetime.fromisoformat(facts["ts"])).total_seconds()
    shown = {name: facts[name] for name in ("pid", "gateway", "instance_id")}
    # Of a time that is yet to come nobody knows how old it is.
    shown |= {"age_s": round(age, 1) if age >= -SLACK_SECONDS else None, "loops": health["loops"]}
    if fault := _fault(facts, age, running, gateway):
        return _verdict(fault[0], [fault[1]], **shown)
    if not health["live"]:
        return _verdict("stuck", health["causes"], **shown)
    return _verdict(health["status"], health["causes"], live=True, **shown)


def _fault(facts: Mapping[str, Any], age: float, running: bool | None, gateway: str | None) -> tuple[str, str] | None:
    """Why these facts are not the word of a living daemon of that gateway."""
    if gateway is not None and facts["gateway"] not in {gateway, ""}:
        return "foreign", f"the file is of a daemon of gateway {facts['gateway']}, not of {gateway}"
    if running is False:
        return "gone", f"process {facts['pid']} is gone and could not say goodbye"
    if age > STALE_BEATS * facts["written_every_s"] + SLACK_SECONDS:
        return "silent", f"the last heartbeat is {age:.0f} s old"
    if age < -SLACK_SECONDS:
        # The clock was put back. A living daemon writes anew within one interval; a dead one would seem well for ever.
        return "silent", f"the last heartbeat is {-age:.0f} s ahead of the clock"
    return None


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of them, with all of them under `daemons` where there are several."""
    ranked = sorted(verdicts, key=lambda verdict: STATUSES.index(verdict["status"]))
    return ranked[0] if len(ranked) == 1 else {**ranked[0], "daemons": ranked}


def _verdict(status: str, causes: list[str], *, live: bool = False, **shown: object) -> Verdict:
    known = status if status in STATUSES else "untrusted"
    empty: Verdict = {"age_s": None, "loops": {}, "pid": None, "gateway": None, "instance_id": None}
    return {"status": known, "live": live, "causes": causes, **empty, **shown}
