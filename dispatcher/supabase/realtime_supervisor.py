"""Keeps the hint paths alive for ever: joins, watches, rejoins, replaces the client.

The library's client is used until the first doubt and then replaced whole; see `realtime_client`. What is
decided when is pure and lives in `realtime_health`; this is the order of steps around it.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from websockets.exceptions import InvalidProxy, InvalidStatus, ProxyError

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK
from dispatcher.logs import get_logger
from dispatcher.supabase.network import Network
from dispatcher.supabase.realtime_client import FrameAlarm, SupervisedClient
from dispatcher.supabase.realtime_health import (
    PATHS,
    Mode,
    Path,
    PathHealth,
    Phase,
    RealtimeState,
    RealtimeTimings,
    Trouble,
    connection_delay,
    paths_wanted,
    summary,
)
from dispatcher.supabase.realtime_paths import (
    CanaryFrame,
    ChannelPlan,
    Hint,
    broadcast_plan,
    changes_plan,
    read_refusal,
)
from dispatcher.supabase.realtime_session import ChannelEvent, Joined, Session

log = get_logger(__name__)

_LOUD = frozenset({Trouble.MISCONFIGURED, Trouble.REFUSED})
_DISCARD_SECONDS = 2.0


@dataclass(frozen=True)
class RealtimeCallbacks:
    """Who is told. All must be cheap (put it in a queue): they run on the loop that reads the socket."""

    on_hint: Callable[[Hint], None]
    on_ready: Callable[[Path], None]
    on_state: Callable[[RealtimeState], None]
    on_alive: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RealtimeTarget:
    """Where and as whom to listen. gateway_topic: the private topic of the gateway, None while unknown."""

    url: str
    tenant_id: str
    instance_id: str
    mode: Mode
    gateway_topic: Callable[[], str | None]
    network: Network = field(default_factory=Network)


@dataclass
class _Partial:
    """A channel a path can do without, which the server refused."""

    plan: ChannelPlan
    cause: str
    retry_at: float


@dataclass
class _Told:
    """What has been logged, so that it is said once."""

    causes: dict[str, str] = field(default_factory=dict)

    def is_news(self, about: str, cause: str) -> bool:
        if self.causes.get(about) == cause:
            return False
        self.causes[about] = cause
        return True

    def forget(self, about: str) -> bool:
        return self.causes.pop(about, None) is not None


class Supervisor:
    """Runs in one asyncio loop; every method belongs to its thread. `run` ends only by cancellation."""

    def __init__(
        self,
        target: RealtimeTarget,
        key: str,
        callbacks: RealtimeCallbacks,
        timings: RealtimeTimings,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.broadcast_available = False
        self.alarms = 0
        self.clients = 0
        self.paths: dict[Path, PathHealth] = {name: PathHealth(name, timings, draw) for name in PATHS}
        self.state = RealtimeState("none", "connecting", SYSTEM_CLOCK.now(), None, 0)
        self._target = target
        self._key = key
        self._callbacks = callbacks
        self._timings = timings
        self._draw = draw
        self._events: asyncio.Queue[ChannelEvent | None] = asyncio.Queue()
        self._session: Session | None = None
        self._failures = 0
        self._connection_cause: str | None = None
        self._split = False
        self._partials: dict[str, _Partial] = {}
        self._unreadable: str | None = None
        self._told = _Told()
        self._fell_back = False
        self._alarm = FrameAlarm(self._on_alarm)
        self._must_sweep = False
        self._in_a_hurry = False

    async def run(self) -> None:
        """Listens for ever."""
        self._alarm.install()
        try:
            while True:
                await self._one_client()
        finally:
            self._alarm.remove()

    def poke(self) -> None:
        """Something the supervisor looks at has changed."""
        self._events.put_nowait(None)

    def expect_canary(self, nonce: str, now: float, asked_at: float) -> None:
        """A heartbeat with this nonce was sent between `asked_at` and `now`."""
        if self._session is None:
            return
        for path in self.paths.values():
            if path.was_ready(asked_at) and self._session.hears_canary(path.name):
                path.canary.expect(nonce, now)

    def forget_canary(self, nonce: str) -> None:
        """That heartbeat was not sent after all."""
        for path in self.paths.values():
            path.canary.forget(nonce)

    def set_key(self, key: str) -> None:
        """From now on this key; what waits because the old one was refused is tried at once."""
        self._key = key
        if self._session is not None:
            self._session.renew_token(key)
        for path in self.paths.values():
            if path.phase is Phase.WAITING:
                path.retry_at = 0.0
        self._in_a_hurry = True
        self.poke()

    # ------------------------------------------------------------------------------ one client's life

    async def _one_client(self) -> None:
        cause, lived = await self._live_and_say_why_not()
        self._connection_cause = cause
        if self._told.is_news("connection", cause):
            log.warning(events.REALTIME_LOST, msg=f"Realtime: {cause}", cause=cause)
        self._failures = 1 if lived > self._timings.settle else self._failures + 1
        self._publish()
        await self._wait(connection_delay(self._failures, self._timings, self._draw))

    async def _live_and_say_why_not(self) -> tuple[str, float]:
        connected_at = time.monotonic()
        self._in_a_hurry = False
        client = SupervisedClient(self._target.url, self._key, timeout=self._timings.join, network=self._target.network)
        self.clients += 1
        try:
            async with asyncio.timeout(self._timings.connect):
                await client.connect()
            connected_at = time.monotonic()
            cause = await self._watch(
                Session(client, self._target.instance_id, self._events.put_nowait, self._on_frame)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is a fresh client
            cause = connection_cause(error, self._target)
        finally:
            await self._discard(client)
        return cause, time.monotonic() - connected_at

    async def _discard(self, client: SupervisedClient) -> None:
        if self._session is not None:
            self._session.abandon()
        self._session, self._unreadable = None, None
        now = time.monotonic()
        for path in self.paths.values():
            path.disconnected(now)
        with suppress(Exception):
            async with asyncio.timeout(_DISCARD_SECONDS):
                await client.discard()
        while not self._events.empty():
            self._events.get_nowait()

    async def _wait(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0 and not self._in_a_hurry:
            self._alive()
            await self._next_event(min(left, self._timings.watch))

    async def _watch(self, session: Session) -> str:
        self._session = session
        self._events.put_nowait(None)
        while True:
            event = await self._next_event(self._timings.watch)
            self._alive()
            if cause := session.client.death() or await self._silence(session.client):
                return cause
            if event is not None:
                await self._handle(session, event)
            self._make_up_for_alarms()
            if cause := await self._steer(session):
                return cause
            self._publish()

    async def _next_event(self, patience: float) -> ChannelEvent | None:
        try:
            async with asyncio.timeout(patience):  # wait_for of Python 3.11 can lose a cancellation
                return await self._events.get()
        except TimeoutError:
            return None

    async def _silence(self, client: SupervisedClient) -> str | None:
        if time.monotonic() - client.beat_at < self._timings.heartbeat:
            return None
        if client.beat_at and not client.beat_is_answered:
            return f"the server did not answer our heartbeat within {self._timings.heartbeat:g} s"
        async with asyncio.timeout(self._timings.join):
            await client.beat()
        return None

    # ------------------------------------------------------------------------------ the paths on it

    async def _steer(self, session: Session) -> str | None:
        wanted = paths_wanted(
            self._target.mode,
            broadcast_available=self.broadcast_available,
            broadcast=self.paths["broadcast"],
            changes=self.paths["postgres_changes"],
        )
        self._say_what_is_wanted(wanted)
        for name, path in self.paths.items():
            if name in wanted:
                path.want(time.monotonic())
                if cause := await self._keep(session, path):
                    return cause
            elif path.phase is not Phase.OFF:
                path.unwant(time.monotonic())
                await session.leave(name, self._timings.leave)
        self._retry_partials(session)
        return None

    async def _keep(self, session: Session, path: PathHealth) -> str | None:
        now = time.monotonic()
        if fault := path.fault(now) or self._moved(session, path):
            await self._lose(session, path, *fault)
        if not path.is_due(now):
            return None
        others_are_well = any(other.is_well for other in self.paths.values() if other is not path)
        if path.needs_fresh_client and not others_are_well:
            return f"{path.name}: {path.cause}; joining again on the same connection did not help"
        if plans := self._plans(path):
            await session.leave(path.name, self._timings.leave)
            session.join(path.name, plans)
            path.joining(time.monotonic())
        return None

    def _moved(self, session: Session, path: PathHealth) -> tuple[Trouble, str] | None:
        if (stray := session.stray()) and stray.path == path.name:
            return Trouble.CHANNEL, f"the channel is {stray.channel.state.value}"
        if path.name != "broadcast" or path.phase not in {Phase.JOINING, Phase.READY}:
            return None
        topic = self._target.gateway_topic()
        return None if topic in session.topics(path.name) else (Trouble.CHANNEL, "the gateway has another topic now")

    def _plans(self, path: PathHealth) -> list[ChannelPlan]:
        if path.name == "postgres_changes":
            self._partials.clear()
            return changes_plan(self._target.tenant_id, self._target.instance_id, split=self._split)
        topic = self._target.gateway_topic()
        if topic is None:
            path.cause = "the gateway is not known yet"
            return []
        return broadcast_plan(topic)

    async def _lose(self, session: Session, path: PathHealth, trouble: Trouble, cause: str) -> None:
        await session.leave(path.name, self._timings.leave)
        path.lost(time.monotonic(), trouble, cause)
        tell = (log.error if trouble in _LOUD else log.warning) if self._told.is_news(path.name, cause) else log.debug
        event = events.REALTIME_DEAF if trouble is Trouble.DEAF else events.REALTIME_LOST
        tell(event, msg=f"Realtime ({path.name}): {cause}", path=path.name, cause=cause, trouble=trouble.value)

    # ------------------------------------------------------------------------------ what channels report

    async def _handle(self, session: Session, event: ChannelEvent) -> None:
        joined = event.joined
        if joined.left:
            return
        if event.what == "joined":
            self._check_token(session, joined)
        elif event.what == "ready":
            self._confirm(session, joined)
        else:
            await self._fail(session, joined, event.text)

    def _check_token(self, session: Session, joined: Joined) -> None:
        # A key set while the join was under way changes only the next join: this one would end with the old.
        if joined.key != self._key:
            joined.key = self._key
            session.renew_token(self._key)

    def _confirm(self, session: Session, joined: Joined) -> None:
        path = self.paths[joined.path]
        joined.ready = True
        self._partials.pop(joined.plan.tables, None)
        if session.is_ready(path.name):
            path.ready(time.monotonic())
        if path.phase is Phase.READY:
            self._connection_cause = None
            self._told.forget("connection")
            self._say_ready(path)
        if path.is_well:
            self._told.forget(path.name)
        self._guarded(self._callbacks.on_ready, path.name)

    def _say_ready(self, path: PathHealth) -> None:
        if self._told.is_news(f"{path.name} ready", str(path.gaps)):
            log.info(
                events.REALTIME_SUBSCRIBED,
                msg=f"Realtime: {path.name} is ready",
                path=path.name,
                gaps=path.gaps,
            )

    async def _fail(self, session: Session, joined: Joined, text: str) -> None:
        trouble, words = read_refusal(text)
        if trouble is Trouble.MISCONFIGURED and joined.path == "postgres_changes" and not self._split:
            await self._split_up(session, words)
        elif joined.plan.essential:
            await self._lose(session, self.paths[joined.path], trouble, words)
        else:
            await session.leave_channel(joined, self._timings.leave)
            self._do_without(joined.plan, words)

    async def _split_up(self, session: Session, words: str) -> None:
        self._split = True
        log.warning(
            events.REALTIME_MISCONFIGURED,
            msg=f"Realtime refuses a subscription; each table is asked for alone now: {words}",
            cause=words,
        )
        await session.leave("postgres_changes", self._timings.leave)
        self.paths["postgres_changes"].retry_now(time.monotonic())

    def _do_without(self, plan: ChannelPlan, words: str) -> None:
        retry_at = time.monotonic() + self._timings.misconfigured * (1 + self._draw() / 5)
        self._partials[plan.tables] = _Partial(plan, words, retry_at)
        if self._told.is_news(plan.tables, words):
            text = f"Realtime refuses changes of {plan.tables}; the sweep makes up for it: {words}"
            log.error(events.REALTIME_MISCONFIGURED, msg=text, tables=plan.tables, cause=words)

    def _retry_partials(self, session: Session) -> None:
        path = self.paths["postgres_changes"]
        due = [one for one in self._partials.values() if one.retry_at <= time.monotonic()]
        if due and path.phase is Phase.READY:
            session.join(path.name, [one.plan for one in due])
            for one in due:
                one.retry_at = math.inf  # until the server has answered this time

    # ------------------------------------------------------------------------------ telling

    def _on_frame(self, path: Path, said: Hint | CanaryFrame) -> None:
        if isinstance(said, Hint):
            log.debug(events.REALTIME_HINT, msg=f"Hint: {said.kind}", path=path, agent_id=said.agent_id)
            self._guarded(self._callbacks.on_hint, said)
            return
        self.paths[path].canary_seen(said.nonce, time.monotonic())
        self._told.forget(path)
        self.poke()

    def _on_alarm(self, unauthorised: bool) -> None:
        self.alarms += 1
        if unauthorised:
            self._unreadable = "events come without rows: the key may not read a table"
            if self._told.is_news("rows", self._unreadable):
                log.error(events.REALTIME_MISCONFIGURED, msg=f"Realtime: {self._unreadable}", cause=self._unreadable)
        elif self._told.is_news("frames", "unreadable"):
            log.warning(events.REALTIME_LOST, msg="Realtime sent a frame the client cannot read; sweeping instead")
        self._must_sweep = True
        self.poke()

    def _make_up_for_alarms(self) -> None:
        if not self._must_sweep:
            return
        self._must_sweep = False
        for path in self.paths.values():
            if path.phase is Phase.READY:
                self._guarded(self._callbacks.on_ready, path.name)

    def _say_what_is_wanted(self, wanted: frozenset[Path]) -> None:
        if self._target.mode != "auto" or not self._told.is_news("wanted", "+".join(sorted(wanted))):
            return
        if "broadcast" in wanted and len(wanted) == 2:
            cause = self.paths["broadcast"].cause
            self._fell_back = True
            text = f"Broadcast is not well ({cause}): listening to postgres_changes beside it"
            log.warning(events.REALTIME_FALLBACK, msg=text, cause=cause)
        elif "broadcast" in wanted:
            if not self._fell_back:
                return
            self._fell_back = False
            log.info(events.REALTIME_FALLBACK_ENDED, msg="Listening by broadcast alone", path="broadcast")
        else:
            self._fell_back = True
            text = "The database offers no broadcast: listening to postgres_changes"
            log.warning(events.REALTIME_FALLBACK, msg=text, cause="the database offers no broadcast")

    def _publish(self) -> None:
        notes = [f"postgres_changes, {one.plan.tables}: {one.cause}" for one in self._partials.values()]
        if self._unreadable:
            notes.append(self._unreadable)
        path, status, cause = summary(self.paths, self._connection_cause, notes)
        gaps = sum(one.gaps for one in self.paths.values())
        old = self.state
        since = old.since if old.status == status else SYSTEM_CLOCK.now()
        self.state = RealtimeState(path, status, since, cause, gaps)
        if self.state != old:
            self._guarded(self._callbacks.on_state, self.state)

    def _alive(self) -> None:
        self._guarded(self._callbacks.on_alive)

    def _guarded(self, callback: Callable[..., None], *args: object) -> None:
        try:
            callback(*args)
        except Exception as error:  # a listener's fault must reach neither the library nor the next frame
            log.error(events.LIBRARY, msg="A listener of Realtime failed", exc_info=error)


def connection_cause(error: BaseException, target: RealtimeTarget) -> str:
    """Why there is no connection, in words that name the setting to look at and never the key."""
    if isinstance(error, InvalidStatus):
        status, said = error.response.status_code, _error_of(error.response.body)
        advice = "; check SUPABASE_SERVICE_ROLE_KEY" if status in {401, 403} else ""
        return f"the server refuses the connection: {said} (HTTP {status}){advice}"
    network = target.network
    if isinstance(error, TimeoutError):
        through = f" through the proxy of {network.proxy_setting}" if network.proxy else ""
        return f"no connection to Realtime{through} in time"
    if isinstance(error, InvalidProxy | ProxyError):
        return f"the proxy of {network.proxy_setting} refuses the connection: {error}"
    return f"cannot connect to Realtime: {network.why_not(error, target.url)}"


def _error_of(body: bytes | None) -> str:
    try:
        return str(json.loads(body or b"")["error"])[:300]
    except (ValueError, KeyError, TypeError):
        return "no reason given"
