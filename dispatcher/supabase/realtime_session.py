"""What is joined on one socket: channels are made, listened to and left here; nothing is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from realtime.types import BroadcastPayload, ChannelStates, PostgresChangesPayload, RealtimeSubscribeStates

from dispatcher.supabase.realtime_client import FencedChannel, SupervisedClient
from dispatcher.supabase.realtime_health import PATHS, Path
from dispatcher.supabase.realtime_paths import CanaryFrame, ChannelPlan, Hint, read_broadcast, read_change

READY_WORDS = ("Subscribed to PostgreSQL", "Replication connection established")

OnFrame = Callable[[Path, Hint | CanaryFrame], None]


@dataclass(eq=False)
class Joined:
    """A channel from its join to its leave."""

    path: Path
    plan: ChannelPlan
    channel: FencedChannel
    key: str | None
    ready: bool = False
    left: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ChannelEvent:
    """Something a channel reported. text: the server's words, for `failed`."""

    what: Literal["joined", "ready", "failed"]
    joined: Joined
    text: str = ""


class Session:
    """The channels of one client. All methods belong to the loop's thread.

    Args:
        client: connected.
        instance_id: whose canary is ours.
        report: gets every event of a channel that has not been left; must not raise.
        on_frame: gets what frames say; must not raise.
    """

    def __init__(
        self,
        client: SupervisedClient,
        instance_id: str,
        report: Callable[[ChannelEvent], None],
        on_frame: OnFrame,
    ) -> None:
        self.client = client
        self._instance_id = instance_id
        self._report = report
        self._on_frame = on_frame
        self._joined: dict[Path, list[Joined]] = {path: [] for path in PATHS}
        self._tasks: set[asyncio.Task[Any]] = set()

    def join(self, path: Path, plans: list[ChannelPlan]) -> None:
        """Asks to join; what comes of it is reported."""
        for plan in plans:
            self._join_one(path, plan)

    async def leave(self, path: Path, patience: float) -> None:
        """Leaves every channel of the path; waits for the server's answer for up to `patience` seconds."""
        channels, self._joined[path] = self._joined[path], []
        await asyncio.gather(*(self._leave_one(joined, patience) for joined in channels))

    def abandon(self) -> None:
        """The client is about to be thrown away: whatever its channels still report is nobody's business."""
        for joined in [one for channels in self._joined.values() for one in channels]:
            joined.left = True

    async def leave_channel(self, joined: Joined, patience: float) -> None:
        """Leaves one channel of a path."""
        self._joined[joined.path] = [other for other in self._joined[joined.path] if other is not joined]
        await self._leave_one(joined, patience)

    def is_ready(self, path: Path) -> bool:
        """Whether the server has confirmed the essential channels."""
        essential = [joined for joined in self._joined[path] if joined.plan.essential]
        return bool(essential) and all(joined.ready for joined in essential)

    def hears_canary(self, path: Path) -> bool:
        """Whether a heartbeat sent now should come back on this path."""
        return any(joined.ready and joined.plan.canary for joined in self._joined[path])

    def topics(self, path: Path) -> set[str]:
        """What is joined there, or being joined."""
        return {joined.plan.topic for joined in self._joined[path]}

    def stray(self) -> Joined | None:
        """A channel whose state has left `joined` without a report."""
        confirmed = [joined for channels in self._joined.values() for joined in channels if joined.ready]
        return next((joined for joined in confirmed if joined.channel.state is not ChannelStates.JOINED), None)

    def renew_token(self, key: str) -> None:
        """Sends a new key to every joined channel; later joins carry it by themselves."""
        self._spawn(self.client.set_auth(key))

    def _join_one(self, path: Path, plan: ChannelPlan) -> None:
        channel = self.client.channel(plan.topic, plan.options)
        joined = Joined(path, plan, channel, self.client.access_token)
        self._joined[path].append(joined)
        channel.on_system(lambda payload: self._on_system(joined, payload.message))
        if not plan.entries:
            channel.on_broadcast("*", partial(self._on_broadcast, joined))
        for entry in plan.entries:
            listener = partial(self._on_change, joined)
            channel.on_postgres_changes(entry.event, listener, table=entry.table, filter=entry.filter)
        self._spawn(self._subscribe(joined))

    async def _subscribe(self, joined: Joined) -> None:
        try:
            await joined.channel.subscribe(partial(self._on_status, joined))
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the join failed
            self._tell(ChannelEvent("failed", joined, f"the join could not be sent: {error}"))

    async def _leave_one(self, joined: Joined, patience: float) -> None:
        joined.left = True
        channel = joined.channel
        channel.rejoin_timer.reset()
        channel.join_push.destroy()
        if not channel.is_closed and self.client.is_connected:
            with suppress(Exception):  # the socket may be gone: then there is nothing to leave
                async with asyncio.timeout(patience):
                    await channel.unsubscribe()
                    await joined.gone.wait()
        if self.client.channels.get(channel.topic) is channel:
            del self.client.channels[channel.topic]

    def _on_status(self, joined: Joined, status: RealtimeSubscribeStates, error: Exception | None = None) -> None:
        if status is RealtimeSubscribeStates.CLOSED:
            joined.gone.set()
        if status is RealtimeSubscribeStates.SUBSCRIBED:
            self._tell(ChannelEvent("joined", joined))
        elif status is RealtimeSubscribeStates.TIMED_OUT:
            self._tell(ChannelEvent("failed", joined, "no reply to the join"))
        else:
            self._tell(ChannelEvent("failed", joined, str(error) if error else "closed by the server"))

    def _on_system(self, joined: Joined, message: str) -> None:
        if message in READY_WORDS:
            self._tell(ChannelEvent("ready", joined))

    def _on_broadcast(self, joined: Joined, payload: BroadcastPayload) -> None:
        self._frame(joined, read_broadcast(payload.get("event"), payload.get("payload"), self._instance_id))

    def _on_change(self, joined: Joined, payload: PostgresChangesPayload) -> None:
        self._frame(joined, read_change(payload.get("data"), self._instance_id))

    def _frame(self, joined: Joined, said: Hint | CanaryFrame | None) -> None:
        if said is not None and not joined.left:
            self._on_frame(joined.path, said)

    def _tell(self, event: ChannelEvent) -> None:
        if not event.joined.left:
            self._report(event)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
