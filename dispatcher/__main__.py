"""`dispatcher` and `python -m dispatcher`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command in `sys.argv` and end the process with its exit code."""
    if sys.argv[1:2] == ["run"]:
        _keep_console_libraries_out()
    # Imported here: the line above must come before structlog and httpx are loaded.
    from dispatcher.cli.main import run_command_line  # noqa: PLC0415 - after the check above, which must come first

    sys.exit(run_command_line(sys.argv[1:]))


def _keep_console_libraries_out() -> None:
    """Tell the libraries that draw on terminals that there is none.

    structlog and httpx load rich, click and pygments whenever they are installed: 5 MiB of memory in a
    daemon that only ever writes JSON lines. Both do without when the import fails, which None makes it do.
    """
    for name in ("rich", "click", "pygments"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None is Python's own mark for "not importable"


if __name__ == "__main__":
    main()
