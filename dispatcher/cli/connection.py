"""What the operator's commands share: settings, a client, and the gateway they speak of."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dispatcher.cli.answers import checked, checked_rows
from dispatcher.config import Settings, load_settings
from dispatcher.errors import DispatcherError, MigrationsMissing, RestError, ServiceUnavailable, UnknownGateway, is_held
from dispatcher.instance.store import InstanceStore, unknown_gateway_text
from dispatcher.logs import configure_logging
from dispatcher.supabase.network import network_of
from dispatcher.supabase.rest import RestClient

MISSING_FUNCTION = "PGRST202"
MISSING_TABLE = "42P01"
# Each try waits about a second in the database.
BUSY_TRIES = 3


class Operator:
    """Calls the operator's SQL functions for one gateway."""

    def __init__(self, settings: Settings, rest: RestClient) -> None:
        self.settings = settings
        self._rest = rest

    def call(self, function: str, **arguments: object) -> Mapping[str, Any]:
        """The function's answer for this tenant and gateway.

        Raises UnknownGateway, MigrationsMissing, MalformedAnswer, and what `RestClient.rpc` raises.
        """
        answer = self.call_for_tenant(function, p_gateway=self.settings.gateway_id, **arguments)
        if answer.get("code") == "unknown_gateway":
            raise UnknownGateway(
                unknown_gateway_text(self.settings.gateway_id, self.settings.tenant_id, answer["known"])
            )
        return answer

    def call_for_tenant(self, function: str, **arguments: object) -> Mapping[str, Any]:
        """As `call`, for what belongs to the tenant as a whole."""
        scope = {"p_tenant_id": str(self.settings.tenant_id)}
        try:
            answer = self._ask(function, {**scope, **arguments})
        except RestError as error:
            if error.code == MISSING_FUNCTION:
                raise migrations_missing(function) from error
            if error.code == MISSING_TABLE:
                raise MigrationsMissing(
                    f"{error}: make what is gone with `dispatcher migrate --again --db-url …`, then try again."
                ) from error
            raise
        return checked(function, answer)

    def _ask(self, function: str, arguments: dict[str, object]) -> object:
        """The function's answer; asked again while another session holds a row that it needs."""
        for _ in range(BUSY_TRIES):
            try:
                answer: object = self._rest.rpc(function, arguments, retry=False)
            except RestError as error:
                if is_held(error):
                    continue
                raise
            if not isinstance(answer, dict) or answer.get("code") != "busy":
                return answer
        raise ServiceUnavailable(
            f"{function}: another session holds what this needs{self._named()}. Try again in a moment."
        )

    def _named(self) -> str:
        """What is held and by whom, to follow a sentence; empty where nothing shows."""
        held = self.held()
        return f" ({held})" if held else ""

    def held(self) -> str:
        """What all of the gateway need and another session holds, and who, as one text; empty when nothing is."""
        try:
            return InstanceStore(self._rest).holders(self.settings.tenant_id, self.settings.gateway_id)
        except DispatcherError:  # it says why; what was asked for matters more
            return ""

    def rows(self, table: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Rows of a table, each with the columns of `query["select"]`; see `RestClient.select`."""
        return checked_rows(table, self._rest.select(table, query), query.get("select", "*"))


def migrations_missing(function: str) -> MigrationsMissing:
    """The error for a database without our functions."""
    return MigrationsMissing(
        f"The database has no function {function}: apply the migrations with `dispatcher migrate --db-url …` "
        "(or each file of supabase/migrations with psql, in name order), then try again."
    )


def refuse_unknown_agent(answer: Mapping[str, Any], agent: str | None) -> None:
    """Raises DispatcherError, which names the agents there are, when the answer knows none by this name."""
    if answer["code"] == "unknown_agent":
        known = ", ".join(answer["known"]) or "none"
        raise DispatcherError(f"No agent {agent!r} on this gateway. Known ones: {known}.")


@contextmanager
def operator() -> Iterator[Operator]:
    """An `Operator` for the settings in force, closed afterwards."""
    settings = load_settings()
    key = settings.supabase_service_role_key.get_secret_value()
    # A command says what became of it in its own words: no log line of a repeat or a library stands in front of them.
    configure_logging(
        "error",
        gateway_id=settings.gateway_id,
        tenant_id=str(settings.tenant_id),
        secrets=settings.secret_values(),
        stream=sys.stderr,
    )
    rest = RestClient(settings.supabase_url, key, network=network_of(settings))
    try:
        yield Operator(settings, rest)
    finally:
        rest.close()


def gate_settings(settings: Settings) -> dict[str, object]:
    """The settings the gates need, where no daemon has registered its own yet."""
    from dispatcher.inbox.settings import wake_settings

    return wake_settings(settings)
