"""One method per SQL function of the instance slice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol
from uuid import UUID

from dispatcher.errors import UnknownGateway
from dispatcher.instance.model import Adoption, Heartbeat, OpenWake, Registration


class Rpc(Protocol):
    """The part of `RestClient` that a store needs."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class InstanceStore:
    """The instance functions. Errors are those of `RestClient.rpc`."""

    def __init__(self, rest: Rpc) -> None:
        self._rest = rest

    def register(
        self, tenant_id: UUID, gateway: str, identity: Mapping[str, object], settings: Mapping[str, object]
    ) -> Registration:
        """Registers this daemon; a repeat with the same identity is the same row. Raises UnknownGateway."""
        answer = self._rest.rpc(
            "register_dispatcher_instance",
            {
                "p_tenant_id": str(tenant_id),
                "p_gateway": gateway,
                "p_identity": identity,
                "p_settings": settings,
            },
            retry=True,
        )
        if answer["code"] == "unknown_gateway":
            raise UnknownGateway(unknown_gateway_text(gateway, tenant_id, answer["known"]))
        return Registration(
            instance_id=UUID(answer["instance_id"]),
            gateway_id=UUID(answer["gateway_id"]),
            gateway_slug=answer["gateway_slug"],
            topic=answer["topic"],
            broadcast_available=answer["broadcast_available"],
            open_wakes=tuple(OpenWake.from_json(row) for row in answer["open_wakes"]),
        )

    def heartbeat(
        self, instance_id: UUID, live_wake_ids: Iterable[UUID], nonce: UUID, facts: Mapping[str, object]
    ) -> Heartbeat:
        """One heartbeat. Raises RestError with code OD001 when the row is gone: register again."""
        answer = self._rest.rpc(
            "heartbeat_dispatcher_instance",
            {
                "p_instance_id": str(instance_id),
                "p_live_wake_ids": [str(wake) for wake in live_wake_ids],
                "p_nonce": str(nonce),
                "p_facts": facts,
            },
            retry=True,
        )
        return Heartbeat.from_json(answer)

    def adopt(
        self, instance_id: UUID, wake: OpenWake, host_id: str, pid: int, pid_started_at: float | None
    ) -> Adoption | None:
        """Takes a wake over; None when somebody else did, or it has ended."""
        answer = self._rest.rpc(
            "adopt_wake",
            {
                "p_instance_id": str(instance_id),
                "p_wake_id": str(wake.wake_id),
                "p_claim_token": str(wake.claim_token),
                "p_host_id": host_id,
                "p_pid": pid,
                "p_pid_started_at": pid_started_at,
            },
            retry=True,
        )
        if not answer["applied"]:
            return None
        return Adoption(UUID(answer["claim_token"]), UUID(answer["agent_id"]), float(answer["deadline_in"]))

    def gauges(self, instance_id: UUID) -> Mapping[str, Any]:
        """What `/metrics` shows of the tables, as `public.dispatcher_gauges` answers."""
        answer: Mapping[str, Any] = self._rest.rpc("dispatcher_gauges", {"p_instance_id": str(instance_id)}, retry=True)
        return answer

    def stop(self, instance_id: UUID, timeout: float) -> None:
        """This daemon ended in good order. Takes `timeout` seconds at most."""
        self._rest.rpc("stop_dispatcher_instance", {"p_instance_id": str(instance_id)}, retry=True, timeout=timeout)


def unknown_gateway_text(gateway: str, tenant_id: UUID, known: Iterable[str]) -> str:
    """What to do about a GATEWAY_ID that no row has."""
    names = ", ".join(known)
    if not names:
        advice = "Insert one into `gateways`, or check TENANT_ID."
        return f"GATEWAY_ID={gateway!r} is no gateway: tenant {tenant_id} has none yet. {advice}"
    return f"GATEWAY_ID={gateway!r} is no gateway of tenant {tenant_id}. Known ones: {names}."
