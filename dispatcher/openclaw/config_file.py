"""Where `openclaw.json` is, and what stands in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from dispatcher.files import read_regular_file

MAX_CONFIG_BYTES: Final = 1024 * 1024
CONFIG_NAME: Final = "openclaw.json"

# What tells one state of a file from another; None: there is no file.
Signature = tuple[str, int, int, int] | None


def config_candidates(home: Path, state_dir: Path | None, config_path: Path | None) -> list[Path]:
    """Where `openclaw.json` may be, in order; `home` may be OpenClaw's home or the state directory itself."""
    if config_path is not None:
        return [config_path]
    if state_dir is not None:
        return [state_dir / CONFIG_NAME]
    return [home / CONFIG_NAME, home / ".openclaw" / CONFIG_NAME]


def signature_of(candidates: Iterable[Path]) -> Signature:
    """Path, time, size and inode of the first candidate that exists; None when none does."""
    for path in candidates:
        try:
            stat = path.stat()
        except OSError:
            continue
        return (str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return None


def read_config(path: Path) -> Any:
    """The parsed file: JSON, or JSON5.

    Raises:
        OSError: it cannot be read.
        ValueError: it cannot be parsed, or is larger than any such file.
        RecursionError: it is nested too deeply.
    """
    content, _ = read_regular_file(path, MAX_CONFIG_BYTES)
    text = content.decode("utf-8-sig")
    try:
        # Most files are plain JSON.
        return json.loads(text)
    except ValueError:
        return _parse_json5(text)


def _parse_json5(text: str) -> Any:
    import pyjson5  # noqa: PLC0415 - costs memory that a gateway with a plain file does not spend

    try:
        return pyjson5.decode(text)
    except pyjson5.Json5DecoderException as error:
        raise ValueError(error.message) from error
