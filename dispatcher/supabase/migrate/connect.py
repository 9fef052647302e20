"""A connection of the runner, and what is wrong with a URL that gives none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from dispatcher.errors import DispatcherError, ExtraMissing, ServiceUnavailable, SettingsError

if TYPE_CHECKING:
    import psycopg

_CONNECT_SECONDS: Final = 10
APPLICATION: Final = "dispatcher migrate"


def connect(db_url: str) -> psycopg.Connection:
    """A connection in autocommit mode, fit for a pooler in transaction mode.

    Raises:
        SettingsError: the URL cannot be read; names the parameter that is to blame. Psycopg is not installed.
        ServiceUnavailable: nobody answers.
    """
    try:
        import psycopg  # noqa: PLC0415 - an extra: the daemon itself runs without it
    except ImportError as error:
        raise ExtraMissing("migrating needs psycopg: pip install 'openclaw-dispatcher[migrate]'") from error
    try:
        # Prepared statements do not survive a pooler in transaction mode.
        return psycopg.connect(
            db_url,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=_CONNECT_SECONDS,
            application_name=APPLICATION,
        )
    except psycopg.ProgrammingError as error:  # its text may hold a part of the password
        raise SettingsError(_unreadable(db_url)) from error
    except psycopg.OperationalError as error:
        raise ServiceUnavailable(f"cannot connect to the database: {error}") from error


def _unreadable(db_url: str) -> str:
    unknown = unknown_parameters(db_url)
    if unknown:
        names = ", ".join(unknown)
        return f"the database URL has parameters that PostgreSQL does not know: {names}. Leave them out of the URL"
    return (
        "the database URL cannot be read: write it as postgresql://user:password@host:port/database, "
        "with %XX for special characters"
    )


def unknown_parameters(db_url: str) -> list[str]:
    """Parameters after `?` that libpq refuses, as other drivers' URLs carry them: `pgbouncer`, `schema`."""
    from psycopg.pq import Conninfo  # noqa: PLC0415 - see connect

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} | {"ssl"}
    try:
        given = parse_qsl(urlsplit(db_url).query, keep_blank_values=True)
    except ValueError:
        return []
    return [name for name, _ in given if name not in known]


def lost(label: str, error: Exception) -> DispatcherError:
    """The connection broke while a file was being applied."""
    return ServiceUnavailable(f"the connection was lost during {label}, which left nothing behind; run again: {error}")
