"""What can keep a migration from being applied. In every case the file in question left nothing behind."""

# ruff: noqa: N818 - as in dispatcher.errors

from __future__ import annotations

from dispatcher.errors import EXIT_BAD_SETTINGS, EXIT_UNAVAILABLE, DispatcherError


class MigrationError(DispatcherError):
    """A statement was refused: names file, line and the server's reason. Nothing of its file was kept."""


class MigrationBlocked(MigrationError):
    """Others held what a file needs until patience ran out. Earlier files stay applied; run again."""

    exit_code = EXIT_UNAVAILABLE


class UnfitDatabase(MigrationError):
    """The database or the role is not one the files can be applied to. Nothing was created."""

    exit_code = EXIT_BAD_SETTINGS
