"""Listens to Supabase Realtime in a thread of its own, and says when and where to look.

What comes from here is a hint, or the news that hints may have been lost; nothing is decided from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from dispatcher import events
from dispatcher.logs import get_logger
from dispatcher.runtime.service import Service
from dispatcher.supabase.network import Network
from dispatcher.supabase.realtime_health import Mode, Path, RealtimeState, RealtimeTimings
from dispatcher.supabase.realtime_paths import Hint
from dispatcher.supabase.realtime_supervisor import RealtimeCallbacks, RealtimeTarget, Supervisor

__all__ = ["Hint", "RealtimeService", "RealtimeState", "RealtimeTimings"]

_CANCEL_AGAIN_SECONDS = 0.5

log = get_logger(__name__)


class RealtimeService(Service):
    """The official client, supervised for ever, in thread `realtime`.

    Args:
        url: the project's URL.
        key: service key.
        gateway_topic: the private topic of this gateway, `gateway:<uuid>`; None while it is not known.
        tenant_id: what postgres_changes is filtered by.
        instance_id: our row in `dispatcher_instances`, whose heartbeat is the canary.
        mode: `auto`, `broadcast` or `postgres_changes`.
        on_hint: somebody may be wakeable.
        on_ready: the server said that events flow on this path, or a frame could not be read: what came
            before may be lost, so a sweep should follow.
        on_state: the state changed.
        on_alive: the loop turned (about once a second); for the health of the loop.
        network: authorities and proxy; without one a direct connection, whatever the environment says.
        timings: seconds; see `RealtimeTimings`.

    Every callback runs on the loop that reads the socket, so it must only enqueue. Its exceptions are logged.
    """

    def __init__(
        self,
        *,
        url: str,
        key: str,
        gateway_topic: Callable[[], str | None],
        tenant_id: UUID | str,
        instance_id: UUID | str,
        mode: Mode = "auto",
        on_hint: Callable[[Hint], None],
        on_ready: Callable[[Path], None],
        on_state: Callable[[RealtimeState], None],
        on_alive: Callable[[], None] = lambda: None,
        network: Network | None = None,
        timings: RealtimeTimings | None = None,
    ) -> None:
        super().__init__("realtime")
        target = RealtimeTarget(url, str(tenant_id), str(instance_id), mode, gateway_topic, network or Network())
        callbacks = RealtimeCallbacks(on_hint, on_ready, on_state, on_alive)
        self._supervisor = Supervisor(target, key, callbacks, timings or RealtimeTimings())
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def state(self) -> RealtimeState:
        """What carries hints now; safe in any thread."""
        return self._supervisor.state

    @property
    def alarms(self) -> int:
        """Frames the client could not read, so far."""
        return self._supervisor.alarms

    @property
    def clients(self) -> int:
        """Clients built so far; one for a connection that was never in doubt."""
        return self._supervisor.clients

    @property
    def broadcast_available(self) -> bool:
        """Whether the database sends broadcasts; the heartbeat learns it."""
        return self._supervisor.broadcast_available

    @broadcast_available.setter
    def broadcast_available(self, available: bool) -> None:
        if available != self._supervisor.broadcast_available:
            self._supervisor.broadcast_available = available
            self._in_loop(self._supervisor.poke)

    def expect_canary(self, nonce: str, asked_at: float | None = None) -> None:
        """A heartbeat with this nonce has been committed, or is about to be; it must come back soon.

        Best called after the heartbeat succeeded: a frame that was faster is remembered. `asked_at`: when the call of
        the heartbeat began, on the monotonic clock; a path that was not ready by then may have missed it.
        """
        now = time.monotonic()
        self._in_loop(self._supervisor.expect_canary, nonce, now, now if asked_at is None else asked_at)

    def forget_canary(self, nonce: str) -> None:
        """The heartbeat that was announced failed: its absence means nothing."""
        self._in_loop(self._supervisor.forget_canary, nonce)

    def set_key(self, key: str) -> None:
        """A new service key, for the channels that are open and for every later join and connection."""
        self._in_loop(self._supervisor.set_key, key)

    def request_stop(self) -> None:
        """As in `Service`; the socket is closed at once."""
        super().request_stop()
        self._in_loop(self._cancel)

    def run_service(self) -> None:
        """Listens until asked to stop."""
        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(_log_stray_error)
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._supervisor.run())
        if self.stopping.is_set():  # asked before there was a loop to tell
            self._cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if not self.stopping.is_set():
                raise

    def _cancel(self) -> None:
        if not self._work.done():
            self._work.cancel()
            self._work.get_loop().call_later(_CANCEL_AGAIN_SECONDS, self._cancel)  # a library may swallow one

    def _in_loop(self, call: Callable[..., None], *args: object) -> None:
        loop = self._loop
        if loop is None:
            if call is self._supervisor.set_key:
                call(*args)
            return
        try:
            loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has ended: so has everything this could be about
            return


def _log_stray_error(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A background task of the library failed with nobody waiting for it; the supervisor sees its effect.
    log.debug(events.LIBRARY, msg=f"Realtime: {context.get('message')}", exc_info=context.get("exception"))
