"""One method per SQL function of the instance slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol
from uuid import UUID

from dispatcher.answers import Answer
from dispatcher.errors import MigrationsMissing, RegistrationRefused, RestError, UnknownGateway
from dispatcher.instance.model import Adoption, Heartbeat, OpenWake, Registration, Schema, read_gauges, read_holders

# What PostgREST answers for a function that is not there.
MISSING_FUNCTION: Final = "PGRST202"


class Rpc(Protocol):
    """The part of `RestClient` that a store needs."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class InstanceStore:
    """The instance functions. Errors are those of `RestClient.rpc`, and MalformedAnswer."""

    def __init__(self, rest: Rpc) -> None:
        self._rest = rest

    def schema(self) -> Schema:
        """Which schema the database has. Raises MigrationsMissing when it says nothing of it: it is older than that."""
        try:
            return Schema.read(self._ask("dispatcher_schema", {}))
        except RestError as error:
            if error.code == MISSING_FUNCTION:
                raise MigrationsMissing(
                    "The database lacks the dispatcher's functions, or has those of an older version: "
                    "run `dispatcher migrate --db-url …` first."
                ) from error
            raise

    def register(
        self, tenant_id: UUID, gateway: str, identity: Mapping[str, object], settings: Mapping[str, object]
    ) -> Registration:
        """Registers this daemon; a repeat with the same identity is the same row.

        Raises:
            UnknownGateway: no gateway has that slug or id.
            RegistrationRefused: the database answers with a code that gives no row.
        """
        answer = self._ask(
            "register_dispatcher_instance",
            {
                "p_tenant_id": str(tenant_id),
                "p_gateway": gateway,
                "p_identity": identity,
                "p_settings": settings,
            },
        )
        _check_registered(answer, gateway, tenant_id)
        return Registration.read(answer)

    def heartbeat(
        self, instance_id: UUID, live_wake_ids: Iterable[UUID], nonce: UUID, facts: Mapping[str, object]
    ) -> Heartbeat:
        """One heartbeat. Raises RestError with code OD001 when the row is gone: register again."""
        answer = self._ask(
            "heartbeat_dispatcher_instance",
            {
                "p_instance_id": str(instance_id),
                "p_live_wake_ids": [str(wake) for wake in live_wake_ids],
                "p_nonce": str(nonce),
                "p_facts": facts,
            },
        )
        return Heartbeat.read(answer)

    def adopt(
        self, instance_id: UUID, wake: OpenWake, host_id: str, pid: int, pid_started_at: float | None
    ) -> Adoption | None:
        """Takes a wake over; None when somebody else did, or it has ended."""
        answer = self._ask(
            "adopt_wake",
            {
                "p_instance_id": str(instance_id),
                "p_wake_id": str(wake.wake_id),
                "p_claim_token": str(wake.claim_token),
                "p_host_id": host_id,
                "p_pid": pid,
                "p_pid_started_at": pid_started_at,
            },
        )
        return Adoption.read(answer)

    def gauges(self, instance_id: UUID) -> Mapping[str, Any]:
        """What `/metrics` shows of the tables, as `public.dispatcher_gauges` answers."""
        return read_gauges(self._ask("dispatcher_gauges", {"p_instance_id": str(instance_id)}))

    def holders(self, tenant_id: UUID, gateway: str) -> str:
        """What all of a gateway need and other sessions hold, and who, as one text; empty when nothing is held."""
        answer = self._ask("dispatcher_holders", {"p_tenant_id": str(tenant_id), "p_gateway": gateway})
        return "" if answer.value("code") == "unknown_gateway" else "; ".join(read_holders(answer))

    def stop(self, instance_id: UUID, timeout: float) -> None:
        """This daemon ended in good order. Takes `timeout` seconds at most."""
        self._rest.rpc("stop_dispatcher_instance", {"p_instance_id": str(instance_id)}, retry=True, timeout=timeout)

    def _ask(self, function: str, params: dict[str, Any]) -> Answer:
        return Answer.of(function, self._rest.rpc(function, params, retry=True))


def _check_registered(answer: Answer, gateway: str, tenant_id: UUID) -> None:
    code = answer.text("code")
    if code == "unknown_gateway":
        known = (str(slug) for slug in answer.list("known"))
        raise UnknownGateway(unknown_gateway_text(gateway, tenant_id, known))
    if code != "ok" or answer.value("instance_id") is None:
        raise RegistrationRefused(
            f"The database did not register this daemon (code {code[:100]!a}): another one has taken its id, or the "
            "functions are of another version. Run `dispatcher migrate`, then start again."
        )


def unknown_gateway_text(gateway: str, tenant_id: UUID, known: Iterable[str]) -> str:
    """What to do about a GATEWAY_ID that no row has."""
    names = ", ".join(known)
    if not names:
        advice = "Insert one into `gateways`, or check TENANT_ID."
        return f"GATEWAY_ID={gateway!r} is no gateway: tenant {tenant_id} has none yet. {advice}"
    return f"GATEWAY_ID={gateway!r} is no gateway of tenant {tenant_id}. Known ones: {names}."
