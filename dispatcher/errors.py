"""Every error this project raises on purpose, each with the exit code the command line ends with."""

# ruff: noqa: N818 - `raise UnknownGateway` says what happened; a suffix on each would say nothing more.

from __future__ import annotations

from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_UNAVAILABLE = 69
EXIT_BAD_SETTINGS = 78

# The SQLSTATE of a call that waited for a row or a table which another session holds: nothing was done.
LOCK_NOT_AVAILABLE = "55P03"


class DispatcherError(Exception):
    """Base of all deliberate errors.

    `exit_code` is what the process ends with when it is not handled; `has_lines`: its text is of several lines.
    """

    exit_code: int = EXIT_FAILED
    has_lines: bool = False


class SettingsError(DispatcherError):
    """One or more settings are wrong. `faults` names every one of them; secrets are never in the text."""

    exit_code = EXIT_BAD_SETTINGS

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults: list[str] = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("; ".join(self.faults))


class ConfigurationPending(SettingsError):
    """Only required settings are missing and `WAIT_FOR_CONFIG` is true: ask again later."""


class UnknownGateway(SettingsError):
    """`GATEWAY_ID` matches no row of `gateways`; the text names the known slugs. WAIT_FOR_CONFIG waits for it."""


class MigrationsMissing(SettingsError):
    """The database lacks a function or table of ours: `dispatcher migrate` has not been run."""


class ExtraMissing(SettingsError):
    """A command needs packages of an extra that is not installed; the text says what to install."""


class MigrationError(DispatcherError):
    """A statement of a migration was refused, or the result is not what it should be; the text says where and why."""

    has_lines = True


class MigrationBlocked(MigrationError):
    """Others held what a migration needs until patience ran out. Nothing of that file was kept; run it again."""

    exit_code = EXIT_UNAVAILABLE


class UnfitDatabase(MigrationError):
    """The database or the role is not one that can be migrated; told before anything was created."""

    exit_code = EXIT_BAD_SETTINGS


class BadKey(SettingsError):
    """The server refuses the service key."""


class OpenclawMissing(SettingsError):
    """The `openclaw` executable cannot be found or is not executable."""


class RegistrationRefused(DispatcherError):
    """The database gave this daemon no row of its own; the text says why."""


class ServiceUnavailable(DispatcherError):
    """The service did not answer, or answered that it cannot, after all retries."""

    exit_code = EXIT_UNAVAILABLE


class RestError(DispatcherError):
    """PostgREST answered with an error.

    `status` is the HTTP status (None when no answer came), `code` a `PGRST…` code or an SQLSTATE,
    `retryable` says whether the same call may succeed later; then the exit code is that of a service that is away.
    """

    def __init__(
        self, message: str, *, status: int | None = None, code: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retryable = retryable
        if retryable:
            self.exit_code = EXIT_UNAVAILABLE


def is_held(error: BaseException) -> bool:
    """Whether a call did nothing because another session holds what it needs: worth another try in a second."""
    return isinstance(error, RestError) and error.code == LOCK_NOT_AVAILABLE


class MalformedAnswer(RestError):
    """A function's answer is not of the agreed shape; the text names the function and the place, cut short.

    One failed call, as any other: something between us and the database answers in its place, or the database has
    functions of another version.
    """


class InvalidAgentId(DispatcherError):
    """An agent id that OpenClaw would turn into another agent, or into an option."""


class ItemRefused(DispatcherError):
    """An item asks for a start that no command line can make; the text names what of it, cut short."""


class SpawnError(DispatcherError):
    """A process could not be started; the text names the cause."""


class ExecutableMissing(SpawnError):
    """The program of a process is not there, or not executable: an upgrade replaces it at this moment, say."""


class ShuttingDown(DispatcherError):
    """Work was asked of something that has begun to stop."""


class GatewayError(DispatcherError):
    """OpenClaw's Gateway could not be asked, or answered with an error."""

    def __init__(self, message: str, *, code: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason


class GatewayUnavailable(GatewayError):
    """OpenClaw's Gateway is away, starting, draining or hung. Nothing was done; the same call may succeed later."""

    exit_code = EXIT_UNAVAILABLE


class GatewaySilent(GatewayError):
    """A request was sent to OpenClaw's Gateway, and no answer came: what it asked for may have been done."""

    exit_code = EXIT_UNAVAILABLE


class GatewayRefused(GatewayError):
    """OpenClaw's Gateway does not want this request; `code` and `reason` are its own words for why."""


class GatewayBarred(GatewayError):
    """The link to OpenClaw's Gateway cannot be had as things are set up; the text says what to change."""
