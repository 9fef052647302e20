"""The supervised client against the local Realtime and a real database: hints, canaries, every silent state."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from dispatcher.local.api import Api
from dispatcher.supabase.realtime import Hint, RealtimeService, RealtimeState, RealtimeTimings
from dispatcher.supabase.realtime_paths import changes_plan
from dispatcher.supabase.rest import RestClient
from tests.support.database import Database
from tests.support.seed import DEFAULT_TENANT, Seed
from tests.support.waiting import wait_until

CHANGES_CHANNELS = len(changes_plan("tenant", "instance", split=False))

# The library itself asks websockets for a property that websockets has deprecated.
pytestmark = pytest.mark.filterwarnings(r"ignore:ConnectionClosed\.\w+ is deprecated")

TIMINGS = RealtimeTimings(
    join=2.0,
    ready=1.5,
    canary=0.5,
    leave=0.5,
    watch=0.05,
    retry=0.1,
    retry_cap=0.5,
    reconnect_cap=0.5,
    misconfigured=1.0,
)


class Daemon:
    """As much of a daemon as listens: a registered instance, its heartbeat, the Realtime service."""

    def __init__(self, api: Api, mode: str) -> None:
        self.hints: list[Hint] = []
        self.ready: list[str] = []
        self.states: list[RealtimeState] = []
        self.rest = RestClient(api.url, api.keys.service_role_key)
        identity = {"hostname": "h", "host_id": "h", "pid": 1, "version": "0"}
        params = {"p_tenant_id": DEFAULT_TENANT, "p_gateway": "local", "p_identity": identity, "p_settings": {}}
        registered = self.rest.rpc("register_dispatcher_instance", params, retry=True)
        self.instance_id = registered["instance_id"]
        options: dict[str, Any] = {"mode": mode}
        self.service = RealtimeService(
            url=api.url,
            key=api.keys.service_role_key,
            gateway_topic=lambda: registered["topic"],
            tenant_id=DEFAULT_TENANT,
            instance_id=self.instance_id,
            on_hint=self.hints.append,
            on_ready=self.ready.append,
            on_state=self.states.append,
            timings=TIMINGS,
            **options,
        )
        self.service.broadcast_available = registered["broadcast_available"]
        self.service.start()

    def beat(self) -> None:
        """One heartbeat, and the wait for its canary."""
        nonce = str(uuid.uuid4())
        params = {"p_instance_id": self.instance_id, "p_live_wake_ids": [], "p_nonce": nonce, "p_facts": {}}
        self.rest.rpc("heartbeat_dispatcher_instance", params, retry=True)
        self.service.expect_canary(nonce)

    def until(self, status: str, path: str) -> None:
        wait_until(
            lambda: (self.service.state.status, self.service.state.path) == (status, path),
            what=f"{status}/{path}; is {self.service.state}",
        )

    def until_both_channels_are_ready(self) -> None:
        """Of postgres_changes. A server that has just seen its publication change may renew both: then it is more."""
        self.until("ready", "postgres_changes")
        wait_until(lambda: len(self.ready) >= 2, what=f"two readies; seen: {self.ready}")

    def hinted(self, item: uuid.UUID) -> set[str]:
        return {hint.path for hint in list(self.hints) if hint.item_id == str(item)}

    def stop(self) -> None:
        self.service.request_stop()
        assert self.service.join(5)
        assert self.service.error is None
        self.rest.close()


@pytest.fixture
def daemon(request: pytest.FixtureRequest, api: Api, seed: Seed) -> Iterator[Daemon]:
    seed.agent("ada")
    started = Daemon(api, getattr(request, "param", "auto"))
    yield started
    started.stop()


def test_an_item_is_hinted_by_broadcast_to_its_own_gateway_alone(daemon: Daemon, seed: Seed) -> None:
    daemon.until("ready", "broadcast")
    seed.agent("elsewhere", gateway="other")
    foreign, ours = seed.item("elsewhere"), seed.item("ada")
    wait_until(lambda: daemon.hinted(ours) == {"broadcast"})
    assert daemon.hinted(foreign) == set()
    assert daemon.ready == ["broadcast"]


@pytest.mark.parametrize("daemon", ["postgres_changes"], indirect=True)
def test_what_makes_an_agent_wakeable_is_hinted_by_changes(daemon: Daemon, seed: Seed, database: Database) -> None:
    daemon.until_both_channels_are_ready()
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item) == {"postgres_changes"})
    agent = str(seed.agent("ada"))
    database.admin.execute("update public.agents set status = 'paused' where slug = 'ada'")
    wait_until(lambda: Hint("agent", agent, None, "postgres_changes") in daemon.hints)
    assert daemon.service.state.cause is None  # every table is published with the columns it is filtered by


@pytest.mark.parametrize("daemon", ["broadcast", "postgres_changes"], indirect=True)
def test_heartbeats_come_back(daemon: Daemon) -> None:
    wait_until(lambda: daemon.service.state.status == "ready")
    for _ in range(4):
        daemon.beat()
    turns = len(daemon.states)
    wait_until(lambda: not pending(daemon), what="the canaries to be answered for")
    assert len(daemon.states) == turns
    assert daemon.service.state.gaps == 0


def pending(daemon: Daemon) -> list[str]:
    return [nonce for path in daemon.service._supervisor.paths.values() for nonce in path.canary._expected]


@pytest.mark.parametrize("daemon", ["postgres_changes"], indirect=True)
def test_ff14_dead_changes_are_noticed_and_revived_on_the_same_socket(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until("ready", "postgres_changes")
    wait_until(lambda: len(daemon.ready) == CHANGES_CHANNELS)
    api.faults(realtime={"changes_dead": True})
    daemon.beat()
    wait_until(lambda: any(state.status == "deaf" for state in daemon.states))
    wait_until(lambda: len(daemon.ready) > CHANGES_CHANNELS)
    daemon.beat()
    daemon.until("ready", "postgres_changes")
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))
    assert daemon.service.clients == 1


def test_a_dead_broadcast_falls_back_to_changes_and_returns(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime={"broadcast_dead": True})
    daemon.beat()
    daemon.until("ready", "postgres_changes")
    lost = seed.item("ada")
    wait_until(lambda: daemon.hinted(lost) == {"postgres_changes"})
    api.faults(realtime={"broadcast_dead": False})

    def well_again() -> bool:
        daemon.beat()
        return daemon.service.state.path == "broadcast"

    wait_until(well_again, 15.0, poll=0.2)
    found = seed.item("ada")
    wait_until(lambda: daemon.hinted(found) == {"broadcast"})


def test_ff04_a_silent_connection_is_replaced(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime={"silence": True})
    daemon.beat()
    wait_until(lambda: daemon.service.clients >= 2, 15.0)
    api.faults(realtime={"silence": False})

    def well_again() -> bool:
        daemon.beat()
        return daemon.service.state.status == "ready"

    wait_until(well_again, 15.0, poll=0.2)
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))


@pytest.mark.parametrize(
    "fault",
    [{"close": 1000}, {"close": 1001}, {"close": 1012}, {"close": 1006}, {"server_disconnect": True}],
)
def test_ff05_every_kind_of_close_is_followed_by_readiness(
    daemon: Daemon, api: Api, seed: Seed, fault: dict[str, object]
) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime=fault)
    wait_until(lambda: daemon.service.clients == 2 and len(daemon.ready) == 2)
    daemon.until("ready", "broadcast")
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))


@pytest.mark.parametrize("fault", [{"channel_close": True}, {"channel_crash": True}])
def test_a_channel_that_ends_is_joined_again_on_the_same_socket(
    daemon: Daemon, api: Api, seed: Seed, fault: dict[str, object]
) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime=fault)
    wait_until(lambda: len(daemon.ready) >= 2)
    daemon.until("ready", "broadcast")
    item = seed.item("ada")
    wait_until(lambda: "broadcast" in daemon.hinted(item))
    assert daemon.service.clients == 1


def test_ff03_an_outage_of_realtime_ends_in_readiness(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime={"down_for": 2.0})
    daemon.until("down", "none")
    daemon.until("ready", "broadcast")
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))


@pytest.mark.parametrize("daemon", ["postgres_changes"], indirect=True)
def test_ff14_an_unpublished_table_costs_only_its_own_hints(
    daemon: Daemon, seed: Seed, database: Database, api: Api
) -> None:
    daemon.until("ready", "postgres_changes")
    database.admin.execute("alter publication supabase_realtime drop table public.agent_budgets")
    api.faults(realtime={"close": 1012})
    wait_until(lambda: "agent_budgets" in (daemon.service.state.cause or ""))
    daemon.until("ready", "postgres_changes")
    # A changed publication makes the server renew every subscription once more: what falls into that gap is swept.
    wait_until(lambda: daemon.hinted(seed.item("ada")) or daemon.hints, poll=0.1)


def test_ff12_a_frame_of_four_megabytes_keeps_the_connection(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime={"big_frame": 4_000_000})
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))
    assert daemon.service.clients == 1


@pytest.mark.parametrize("daemon", ["postgres_changes"], indirect=True)
def test_ff12_trimmed_and_denied_events_still_lead_somewhere(daemon: Daemon, api: Api, seed: Seed) -> None:
    daemon.until_both_channels_are_ready()
    api.faults(realtime={"trim_records": True})
    item = seed.item("ada", summary="x" * 500)
    wait_until(lambda: daemon.hinted(item))
    ready = len(daemon.ready)
    api.faults(realtime={"denied_event": True, "trim_records": False})
    wait_until(lambda: daemon.service.alarms >= 1 and len(daemon.ready) > ready)
    api.faults(realtime={"unparsable_frame": True})
    wait_until(lambda: daemon.service.alarms >= 2)
    item = seed.item("ada")
    wait_until(lambda: daemon.hinted(item))


def test_a_refused_join_is_told_with_the_servers_words(daemon: Daemon, api: Api) -> None:
    daemon.until("ready", "broadcast")
    api.faults(realtime={"refuse_join": "Unauthorized: You do not have permissions to read", "close": 1012})
    wait_until(lambda: "Unauthorized" in (daemon.service.state.cause or ""))
    api.faults(realtime={"refuse_join": None})
    daemon.service.set_key(api.keys.service_role_key)
    wait_until(lambda: daemon.service.state.status == "ready")
