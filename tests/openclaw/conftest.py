"""A real Gateway with a model that does as it is told. Off unless asked for with `scripts/test -m openclaw`.

OPENCLAW_KIT names the folder of the kit (`openclaw_kit.py`), OPENCLAW_KIT_DIR where it has installed OpenClaw with
`openclaw_kit.py install --dir DIR`. The Gateway's state there is made anew.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def kit() -> Any:
    """The module `openclaw_kit`."""
    folder = os.environ.get("OPENCLAW_KIT")
    if not folder:
        pytest.skip("OPENCLAW_KIT is not set")
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("openclaw_kit")
    finally:
        sys.path.remove(folder)
        sys.dont_write_bytecode = before


@pytest.fixture
def rig(kit: Any) -> Iterator[Any]:
    """A running Gateway with the agents ada and grace."""
    directory = Path(os.environ["OPENCLAW_KIT_DIR"])
    shutil.rmtree(directory / "home", ignore_errors=True)
    for file in ("provider.json", "provider.jsonl"):
        (directory / file).unlink(missing_ok=True)
    with kit.Rig(directory, ["ada", "grace"]) as started:
        yield started
    started.provider._log.close()  # which the kit leaves open
