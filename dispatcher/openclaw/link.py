"""Holds one connection to OpenClaw's Gateway open, says how the Gateway is, and takes calls from any thread.

What is known of a Gateway that answers costs a call of a millisecond every few seconds. While it is away a connection
is tried about once a second, so that work goes on within two seconds of its return.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK
from dispatcher.errors import GatewayBarred, GatewayError, GatewayRefused, GatewaySilent, GatewayUnavailable
from dispatcher.logs import get_logger
from dispatcher.openclaw.connection import Connection, opened
from dispatcher.openclaw.endpoint import Endpoint
from dispatcher.openclaw.frames import ACCEPTING, SHUTDOWN, SUSPENSION, Event, read_phase
from dispatcher.openclaw.state import GatewayState, LinkTimings, Status, seconds_to_next_try, status_after
from dispatcher.runtime.service import Service

log = get_logger(__name__)

CALL_SECONDS: Final = 10.0
CANCEL_AGAIN_SECONDS: Final = 0.5
LOOP_AGAIN_SECONDS: Final = 5.0
# The answer to a call is on its way through two threads.
HANDOVER_SECONDS: Final = 1.0
LOOK: Final = ("sessions.list", {"activeOnly": True, "limit": 1})


class GatewayLink(Service):
    """The connection, kept for as long as the daemon lives, in thread `gateway`. It never ends the daemon.

    Args:
        find_endpoint: where the Gateway is now; asked before each connection. None: there is none. May raise
            GatewayBarred.
        changed: a value that is another one when `find_endpoint` may answer something else.
        on_state: called with each new state. on_alive: called when the loop turned. Both run in the link's thread and
            must be cheap; what they raise is logged.
    """

    def __init__(
        self,
        find_endpoint: Callable[[], Endpoint | None],
        *,
        changed: Callable[[], object] = lambda: None,
        on_state: Callable[[GatewayState], None] = lambda _state: None,
        on_alive: Callable[[], None] = lambda: None,
        timings: LinkTimings | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__("gateway")
        self.state = GatewayState("connecting", SYSTEM_CLOCK.now())
        self._find_endpoint = find_endpoint
        self._changed = changed
        self._on_state = on_state
        self._on_alive = on_alive
        self._timings = timings or LinkTimings()
        self._draw = draw
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: Connection | None = None
        self._phase = ACCEPTING
        self._told_barred = ""
        self._away_since = 0.0

    # -- for other threads

    def call(self, method: str, params: Mapping[str, Any] | None = None, timeout: float = CALL_SECONDS) -> Any:
        """The payload of the Gateway's answer, within `timeout` seconds.

        Raises:
            GatewayUnavailable: it is away, or there is no link; nothing was done.
            GatewaySilent: the request was sent and no answer came.
            GatewayRefused: it does not want this request.
        """
        loop, state = self._loop, self.state
        if loop is None or state.status == "hung":
            raise GatewayUnavailable(state.cause or "the link is not open yet", reason=state.status)
        work = self._call(method, params or {}, timeout)
        try:
            answer = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop has ended
            work.close()
            raise GatewayUnavailable("the link is closed") from None
        try:
            return answer.result(timeout + HANDOVER_SECONDS)
        except (TimeoutError, concurrent.futures.CancelledError):  # or the link was closed meanwhile
            answer.cancel()
            words = "the link was closed" if self.stopping.is_set() else f"no answer within {timeout:g} s"
            raise GatewaySilent(f"{method}: {words}") from None

    def look_now(self) -> None:
        """Something went wrong that may be the Gateway's fault: looks at it at once."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._poked.set)

    def request_stop(self) -> None:
        """As in `Service`; the connection is closed at once."""
        super().request_stop()
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._cancel)

    def run_service(self) -> None:
        """Keeps the link until asked to stop."""
        while not self.stopping.is_set():
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._main())
            except Exception as error:  # no descriptor left for a loop, say: the daemon works without the link
                log.error(events.GATEWAY_LOST, msg=f"The link to the Gateway failed: {error}", exc_info=error)
                self.stopping.wait(LOOP_AGAIN_SECONDS)

    # -- in the loop

    async def _main(self) -> None:
        self._poked = asyncio.Event()
        self._work = asyncio.create_task(self._keep())
        self._loop = asyncio.get_running_loop()
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
            self._work.get_loop().call_later(CANCEL_AGAIN_SECONDS, self._cancel)  # a library may swallow one

    async def _keep(self) -> None:
        while True:
            try:
                await self._one_connection()
            except GatewayError as error:
                self._lose(error)
            except Exception as error:  # whatever it is, the answer is another connection
                log.error(events.GATEWAY_LOST, msg=f"The link to the Gateway failed: {error}", exc_info=error)
                self._enter("down", f"{type(error).__name__}: {error}")
            await self._rest()

    async def _one_connection(self) -> None:
        endpoint = self._find_endpoint()
        if endpoint is None:
            self._enter("unused", None)
            return
        connection = await opened(endpoint, self._timings.connect, self._on_event)
        try:
            self._welcome(connection)
            await self._watch(connection)
        finally:
            self._connection = None
            await connection.close()

    def _welcome(self, connection: Connection) -> None:
        hello, before = connection.hello, self.state.boot_id
        if hello.missing_scopes:
            raise GatewayBarred(f"the Gateway withholds the right(s) {', '.join(hello.missing_scopes)}")
        self._phase = hello.phase
        self._connection = connection
        self._told_barred = ""
        is_restarted = before not in {None, hello.boot_id}
        log.info(
            events.GATEWAY_LINKED,
            msg=f"Linked to OpenClaw's Gateway {hello.version}{', which was started anew' if is_restarted else ''}",
            version=hello.version,
            boot_id=hello.boot_id,
            restarted=is_restarted,
        )
        self.state = replace(self.state, boot_id=hello.boot_id, version=hello.version)
        self._enter_by_phase()

    async def _watch(self, connection: Connection) -> None:
        """Looks at the Gateway now and then until the connection is of no use: GatewayUnavailable, GatewaySilent."""
        while True:
            await self._until_next_look(connection)
            if connection.closed.done():
                raise GatewayUnavailable(connection.closed.result())
            await self._look(connection)
            self._alive()

    async def _until_next_look(self, connection: Connection) -> None:
        seconds = self._timings.look if self.state.status == "ready" else self._timings.away
        poked = asyncio.ensure_future(self._poked.wait())
        either: set[asyncio.Future[Any]] = {poked, connection.closed}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poked.cancel()
            self._poked.clear()

    async def _look(self, connection: Connection) -> None:
        """One question. A Gateway that does not answer is hung; its answer, however late, ends that."""
        look: asyncio.Future[Any] = asyncio.ensure_future(connection.call(*LOOK))
        try:
            done, _ = await asyncio.wait({look}, timeout=self._timings.patience)
            if not done:
                self._enter("hung", f"the Gateway has not answered for {self._timings.patience:g} s")
                done = await self._late_answer(look)
            if not done:
                raise GatewaySilent("the Gateway does not answer")
            look.result()
        except (GatewayUnavailable, GatewaySilent) as error:
            if connection.closed.done():
                raise GatewayUnavailable(connection.closed.result()) from None
            if isinstance(error, GatewaySilent):
                raise
            # It refuses work on a connection that lives: it drains, or is suspended.
            self._enter("draining", error.message)
        except GatewayRefused as error:  # of another mind about our question, but it answers
            log.debug(events.GATEWAY_LOST, msg=f"The Gateway refuses our look: {error}", code=error.code)
            self._enter_by_phase()
        else:
            self._enter_by_phase()
        finally:
            look.cancel()

    async def _late_answer(self, look: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
        ends = time.monotonic() + self._timings.give_up
        done: set[asyncio.Future[Any]] = set()
        while not done and (left := ends - time.monotonic()) > 0:
            done, _ = await asyncio.wait({look}, timeout=min(left, self._timings.look))
            self._alive()
        return done

    async def _call(self, method: str, params: Mapping[str, Any], seconds: float) -> Any:
        connection = self._connection
        if connection is None:
            raise GatewayUnavailable(self.state.cause or "the link is not open", reason=self.state.status)
        try:
            async with asyncio.timeout(seconds):
                return await connection.call(method, params)
        except TimeoutError:
            self._poked.set()
            raise GatewaySilent(f"{method}: no answer within {seconds:g} s") from None
        except GatewayUnavailable:
            self._poked.set()
            raise

    async def _rest(self) -> None:
        """Until the next connection; shorter when what we know of the Gateway has changed."""
        seconds = seconds_to_next_try(self.state.status, self._timings, self._draw)
        ends, known = time.monotonic() + seconds, self._known()
        while (left := ends - time.monotonic()) > 0 and not self._poked.is_set() and self._known() == known:
            self._alive()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, self._timings.notice)):
                    await self._poked.wait()
        self._poked.clear()

    def _known(self) -> object:
        return self._changed() if self.state.status in {"barred", "unused"} else None

    def _on_event(self, event: Event) -> None:
        if event.name == SUSPENSION:
            suspension = event.payload.get("suspension", event.payload) if isinstance(event.payload, Mapping) else None
            self._phase = read_phase(suspension)
            self._poked.set()
        elif event.name == SHUTDOWN:
            self._enter("draining", "the Gateway stops")

    # -- telling

    def _lose(self, error: GatewayError) -> None:
        self._enter(status_after(error), error.message)

    def _enter_by_phase(self) -> None:
        if self._phase == ACCEPTING:
            self._enter("ready", None)
        else:
            self._enter("draining", f"the Gateway is {self._phase}")

    def _enter(self, status: Status, cause: str | None) -> None:
        old = self.state
        if (status, cause) == (old.status, old.cause):
            return
        since = old.since if status == old.status else SYSTEM_CLOCK.now()
        self.state = replace(old, status=status, since=since, cause=cause)
        if self.state.is_away and not old.is_away:
            self.state = replace(self.state, outages=old.outages + 1)
            self._away_since = time.monotonic()
        self._tell(old)
        self._guarded(self._on_state, self.state)

    def _tell(self, old: GatewayState) -> None:
        """One line when it goes away, one when it is back, one for each reason that bars us."""
        state = self.state
        facts = {"status": state.status, "cause": state.cause}
        if state.status == "barred":
            if state.cause != self._told_barred:
                self._told_barred = state.cause or ""
                text = f"No link to OpenClaw's Gateway: {state.cause}; its command line is asked instead, which is slow"
                log.warning(events.GATEWAY_BARRED, msg=text, **facts)
        elif state.is_away and not old.is_away:
            log.warning(events.GATEWAY_LOST, msg=f"OpenClaw's Gateway is {state.status}: {state.cause}", **facts)
        elif state.status == "ready" and old.is_away:
            away = round(time.monotonic() - self._away_since, 1)
            log.info(events.GATEWAY_READY, msg=f"OpenClaw's Gateway is ready again, after {away:g} s", seconds=away)
        elif state.status != old.status:
            log.debug(events.GATEWAY_LOST, msg=f"OpenClaw's Gateway is {state.status}", **facts)

    def _alive(self) -> None:
        self._guarded(self._on_alive)

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception as error:  # a listener's fault must not cost the link
            log.error(events.GATEWAY_LOST, msg="A listener of the Gateway's state failed", exc_info=error)
