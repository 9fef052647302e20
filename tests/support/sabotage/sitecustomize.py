"""Breaks single parts of a running daemon from inside: what no fault of the world around it can do.

A daemon started with this folder on PYTHONPATH and SABOTAGE naming a directory looks there for files:

    sweep           the sweep stands still in its next turn, as long as the file is there
    realtime        the event loop of Realtime stands still
    realtime-dies   the task that supervises Realtime ends with an error

See `tests/acceptance/test_health.py`.
"""

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path

_FOLDER = Path(os.environ.get("SABOTAGE", "/nonexistent"))
_TARGET = "dispatcher.app"


def _trip(name: str) -> None:
    while (_FOLDER / name).exists():
        time.sleep(0.02)


def _before(owner: type, method: str, trap) -> None:  # type: ignore[no-untyped-def]  # a callable without arguments
    real = getattr(owner, method)

    def trapped(*arguments, **named):  # type: ignore[no-untyped-def]  # whatever the method takes
        trap()
        return real(*arguments, **named)

    setattr(owner, method, trapped)


def _realtime_trap() -> None:
    _trip("realtime")
    if (_FOLDER / "realtime-dies").exists():
        raise RuntimeError("sabotaged: realtime")


def _arm(app) -> None:  # type: ignore[no-untyped-def]  # the module dispatcher.app
    from dispatcher.supabase.realtime_supervisor import Supervisor  # noqa: PLC0415 - not before the program loads it

    app.REALTIME_TURN_SECONDS = 0.5
    _before(app.Sweeper, "beat", lambda: _trip("sweep"))
    _before(Supervisor, "_alive", _realtime_trap)


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]  # importlib's
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_arm(module):  # type: ignore[no-untyped-def]  # importlib's
            load(module)
            _arm(module)

        spec.loader.exec_module = load_and_arm
        return spec


if "SABOTAGE" in os.environ:
    sys.meta_path.insert(0, _Finder())
