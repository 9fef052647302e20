"""The official Python client against the local Realtime: what the daemon itself will see."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Self

import pytest
from realtime import AsyncRealtimeChannel, AsyncRealtimeClient, RealtimePostgresChangesListenEvent

from tests.contract.local_realtime import LocalRealtime
from tests.support.database import Database

# The client reads ConnectionClosed.code, which websockets calls deprecated: as an error it would kill its listen task.
pytestmark = pytest.mark.filterwarnings(r"ignore:ConnectionClosed\.(code|reason) is deprecated:DeprecationWarning")

DEADLINE = 10.0


class Listener:
    """A client and what it has heard, by kind, as queues."""

    def __init__(self, realtime: LocalRealtime, key: str | None = None) -> None:
        self.client = AsyncRealtimeClient(
            f"{realtime.url}/realtime/v1", key or realtime.keys.service_role_key, initial_backoff=0.05
        )
        self.changes: asyncio.Queue[Any] = asyncio.Queue()
        self.broadcasts: asyncio.Queue[Any] = asyncio.Queue()
        self.systems: asyncio.Queue[Any] = asyncio.Queue()
        self.states: asyncio.Queue[str] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def subscribe(
        self, topic: str = "plain", *filters: str | None, event: Any = "*", private: bool = False
    ) -> AsyncRealtimeChannel:
        """Join, with one postgres_changes entry for each filter (None: without one)."""
        channel = self.client.channel(
            topic, {"config": {"private": private, "broadcast": {"ack": False, "self": False}, "presence": None}}
        )
        for one in filters:
            channel.on_postgres_changes(event, self.changes.put_nowait, table="plain", schema="public", filter=one)
        channel.on_broadcast("wake", self.broadcasts.put_nowait)
        channel.on_system(self.systems.put_nowait)
        await channel.subscribe(lambda state, error: self.states.put_nowait(state.value))
        return channel

    async def ready(self, topic: str = "plain", *filters: str | None, **options: Any) -> AsyncRealtimeChannel:
        """Join and wait for "Subscribed to PostgreSQL"."""
        channel = await self.subscribe(topic, *filters, **options)
        assert await soon(self.states.get()) == "SUBSCRIBED"
        assert _message(await soon(self.systems.get())) == "Subscribed to PostgreSQL"
        return channel

    async def record(self) -> dict[str, Any]:
        return dict((await soon(self.changes.get()))["data"]["record"])


def _message(system: Any) -> str:
    return str(system["message"] if isinstance(system, dict) else system.message)


async def soon(what: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(what, DEADLINE)


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 30))


def test_insert_update_delete_arrive_as_the_client_types_them(
    realtime: LocalRealtime, recorded_database: Database
) -> None:
    async def story() -> None:
        async with Listener(realtime) as listener:
            await listener.ready("plain", None)
            recorded_database.execute("insert into plain values (1, 'x', 'a1')")
            recorded_database.execute("update plain set v = 'y'")
            recorded_database.execute("delete from plain")
            insert, update, delete = [(await soon(listener.changes.get()))["data"] for _ in range(3)]
        assert (insert["type"], insert["record"]) == ("INSERT", {"id": 1, "v": "x", "agent_id": "a1"})
        assert (update["type"], update["record"]["v"], update["old_record"]) == ("UPDATE", "y", {"id": 1})
        assert (delete["type"], delete["old_record"]) == ("DELETE", {"id": 1})

    run(story)


def test_each_filtered_callback_hears_only_what_it_asked_for(
    realtime: LocalRealtime, recorded_database: Database
) -> None:
    async def story() -> None:
        async with Listener(realtime) as listener:
            await listener.ready("plain", "agent_id=eq.a1", "agent_id=in.(a2,a3)", event="INSERT")
            recorded_database.execute("insert into plain values (1, 'x', 'a1'), (2, 'x', 'no'), (3, 'x', 'a3')")
            assert [(await listener.record())["id"] for _ in range(2)] == [1, 3]

    run(story)


def test_private_broadcasts_from_the_database_reach_the_client(
    realtime: LocalRealtime, recorded_database: Database
) -> None:
    async def story() -> None:
        async with Listener(realtime) as listener:
            await listener.subscribe("gateway:g1", private=True)
            assert await soon(listener.states.get()) == "SUBSCRIBED"
            recorded_database.execute(
                "select realtime.send(%s, 'wake', 'gateway:g1', true)", (json.dumps({"agent_id": "a1"}),)
            )
            heard = await soon(listener.broadcasts.get())
        assert heard["payload"]["agent_id"] == "a1"

    run(story)


@pytest.mark.parametrize("code", [1000, 1001, 1006, 1012])
def test_client_is_back_after_a_close(realtime: LocalRealtime, recorded_database: Database, code: int) -> None:
    async def story() -> None:
        async with Listener(realtime) as listener:
            await listener.ready("plain", None)
            realtime.set_faults(close=code)
            while _message(await soon(listener.systems.get())) != "Subscribed to PostgreSQL":
                pass
            recorded_database.execute("insert into plain values (1, 'after')")
            assert (await listener.record())["v"] == "after"

    run(story)


def test_new_token_makes_the_channel_ready_again(realtime: LocalRealtime) -> None:
    async def story() -> None:
        async with Listener(realtime) as listener:
            await listener.ready("plain", None)
            await listener.client.set_auth(realtime.keys.token("service_role", seconds=7200))
            assert _message(await soon(listener.systems.get())) == "Subscribed to PostgreSQL"

    run(story)


def test_expired_token_closes_the_channel_for_good(realtime: LocalRealtime) -> None:
    """protocol.md 4, #3: CLOSED by the server, and this client never rejoins; the daemon has to build a new one."""

    async def story() -> None:
        async with Listener(realtime, realtime.keys.token("service_role", seconds=2)) as listener:
            await listener.subscribe("plain", None)
            seen = [await soon(listener.states.get())]
            while seen[-1] != "CLOSED":
                seen.append(await soon(listener.states.get()))
            assert seen[0] == "SUBSCRIBED"
            assert not listener.client.channels

    run(story)


def test_unpublished_table_leaves_the_client_closed_after_its_blind_rejoin(realtime: LocalRealtime) -> None:
    """protocol.md 4, #4 and #5: a second join on the live channel; the server's phx_close of the old one kills it."""

    async def story() -> None:
        async with Listener(realtime) as listener:
            channel = listener.client.channel("notpub")
            channel.on_postgres_changes(
                RealtimePostgresChangesListenEvent.Insert, listener.changes.put_nowait, table="notpub", schema="public"
            )
            await channel.subscribe(lambda state, error: listener.states.put_nowait(state.value))
            seen: list[str] = []
            while "CLOSED" not in seen:
                seen.append(await soon(listener.states.get()))
            assert seen == ["SUBSCRIBED", "CHANNEL_ERROR", "SUBSCRIBED", "CLOSED"]

    run(story)


def test_leave_and_join_under_another_topic_on_the_same_socket(
    realtime: LocalRealtime, recorded_database: Database
) -> None:
    """Under the same topic the phx_close of the left channel may hit the new one: the client compares no refs."""

    async def story() -> None:
        async with Listener(realtime) as listener:
            channel = await listener.ready("plain", None)
            await channel.unsubscribe()
            assert await soon(listener.states.get()) == "CLOSED"
            await listener.ready("plain-2", None)
            recorded_database.execute("insert into plain values (1, 'again')")
            assert (await listener.record())["v"] == "again"

    run(story)


def test_clients_broadcast_to_each_other(realtime: LocalRealtime) -> None:
    async def story() -> None:
        async with Listener(realtime) as sender, Listener(realtime) as receiver:
            channel = await sender.subscribe("room")
            await receiver.subscribe("room")
            await soon(sender.states.get())
            await soon(receiver.states.get())
            await channel.send_broadcast("wake", {"n": 1})
            assert (await soon(receiver.broadcasts.get()))["payload"] == {"n": 1}

    run(story)
