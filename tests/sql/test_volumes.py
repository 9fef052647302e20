"""Many rows under PostgREST's own statement timeout, and many sessions: short passes, and nobody else is slower."""

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dispatcher.local.postgres import PostgresServer
from tests.sql.conftest import Dispatcher
from tests.support.database import Database, cloned
from tests.support.seed import DEFAULT_TENANT, Seed

LONGEST_PASS = 2.0  # seconds
Register = Callable[..., Dispatcher]


@pytest.fixture
def database(cluster: PostgresServer, migrated_template: str) -> Iterator[Database]:
    with cloned(cluster, migrated_template) as own:
        own.execute(f"alter database {own.name} set statement_timeout = '8s'")
        yield own


def many_items(database: Database, agent: uuid.UUID, number: int, age: str, status: str = "pending") -> None:
    """Items of one agent without a trigger run for them; as old as `age`."""
    with database.connect() as connection, connection.transaction():
        connection.execute("set local session_replication_role = replica")
        connection.execute(
            "insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, status, failed_at, dedup_key,"
            " created_at) select %s, %s, 'x', 'heartbeat', %s::inbox_item_status,"
            " case %s when 'failed' then now() - interval '1 hour' end, gen_random_uuid()::text,"
            " now() - %s::interval - n * interval '1 millisecond' from generate_series(1, %s) as n",
            [DEFAULT_TENANT, agent, status, status, age, number],
        )
    database.execute("analyze agent_inbox_items")


def many_agents(database: Database, gateway: uuid.UUID, number: int) -> None:
    """Agents with an item each, all of them on the waitlist."""
    with database.connect() as connection, connection.transaction():
        connection.execute("set local session_replication_role = replica")
        connection.execute(
            "with made as (insert into agents (tenant_id, gateway_id, name, slug)"
            " select %s, %s, 'a', 'many-' || n from generate_series(1, %s) as n returning id, slug),"
            " items as (insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, dedup_key)"
            " select %s, id, slug, 'heartbeat', id::text from made)"
            " insert into agent_wake_state (agent_id, tenant_id, waitlisted_at, waitlist_path, waiting_since)"
            " select id, %s, now(), 'waitlist', now() from made",
            [DEFAULT_TENANT, gateway, number, DEFAULT_TENANT, DEFAULT_TENANT],
        )
    database.execute("analyze agents, agent_wake_state, agent_inbox_items")


REOPEN = "update agent_inbox_items set status = 'pending', failed_at = null"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.monotonic()
    answer = work()
    return time.monotonic() - started, answer


def passes_of(daemon: Dispatcher, phase: str, most: int = 6) -> list[tuple[float, Any]]:
    """Some passes of a phase, as the daemon makes them: how long each took, and its answer."""
    passes: list[tuple[float, Any]] = []
    while len(passes) < most and (not passes or passes[-1][1]["again"]):
        passes.append(timed(lambda: daemon.phase(phase, passes[-1][1].get("cursor") if passes else None, 5)))
    return passes


def claims_meanwhile(daemon: Dispatcher, agent: uuid.UUID, done: threading.Event, took: list[float]) -> None:
    """Claims for one agent, one after the other and each ended, until the work beside them is done."""
    while not done.is_set():
        seconds, grant = timed(lambda: daemon.claim(agent))
        took.append(seconds)
        assert grant["granted"], grant
        daemon.started(grant)
        daemon.ended(grant, "interrupted", None)


@pytest.mark.parametrize("phase", ["expired", "stalled", "listed", "claims"])
def test_c03_a_phase_over_many_rows_goes_in_short_passes_beside_claims(
    database: Database, seed: Seed, dispatcher: Register, phase: str
) -> None:
    daemon, beside = dispatcher(max_concurrent_wakes=9), dispatcher(max_concurrent_wakes=9)
    other = seed.agent("other")
    seed.item("other")
    if phase in ("expired", "stalled"):
        many_items(database, seed.agent("full"), 100_000, "30 hours" if phase == "expired" else "1 minute")
        failures = 9 if phase == "stalled" else 0
        database.execute(
            "insert into agent_wake_state (agent_id, tenant_id, consecutive_failures, last_ended_at)"
            " values (%s, %s, %s, now())",
            [seed.agent("full"), DEFAULT_TENANT, failures],
        )
    else:
        many_agents(database, seed.gateway(), 20_000)
        if phase == "listed":
            database.execute("update agent_wake_state set waitlisted_at = null, waitlist_path = null")
    took: list[float] = []
    done = threading.Event()
    claiming = threading.Thread(target=claims_meanwhile, args=(beside, other, done, took))
    claiming.start()
    try:
        passes = passes_of(daemon, phase)
    finally:
        done.set()
        claiming.join(10)
    assert max(seconds for seconds, _ in passes) < LONGEST_PASS, passes
    assert passes[0][1]["count"] > 0
    if phase != "claims":
        assert all(answer["again"] and answer["count"] <= 500 for _, answer in passes)
    assert statistics.median(took) < 0.2
    assert max(took) < 1


def test_c33_many_items_reopened_in_one_statement_are_one_hint_per_agent(database: Database, seed: Seed) -> None:
    for name in ("ada", "bob"):
        many_items(database, seed.agent(name), 10_000, "1 hour", "failed")
    database.execute("delete from realtime.messages")
    # Of three pairs the best: other work on the machine may fall upon one of them.
    pairs = ((reopening(database, hints=True), reopening(database, hints=False)) for _ in range(3))
    assert any(with_hints < 2 * without + 0.3 for with_hints, without in pairs)
    database.execute(REOPEN)
    assert database.value("select count(*) from realtime.messages") == 2


def reopening(database: Database, *, hints: bool) -> float:
    """How long it takes to reopen every item, with our triggers or without; nothing of it is kept."""
    with database.connect() as connection, connection.transaction(force_rollback=True):
        if not hints:
            connection.execute("alter table agent_inbox_items disable trigger user")
        return timed(lambda: connection.execute(REOPEN))[0]


def test_c01_an_open_insert_for_some_agents_slows_nobody_else(
    database: Database, seed: Seed, dispatcher: Register
) -> None:
    daemon = dispatcher(max_concurrent_wakes=99)
    held = [seed.agent(f"held{number}") for number in range(3)]
    for number in range(3):
        seed.item(f"held{number}")
    agents = [seed.agent(f"a{number}") for number in range(50)]
    for number, agent in enumerate(agents):
        seed.item(f"a{number}")
        seed.insert("agent_wake_state", agent_id=agent, tenant_id=DEFAULT_TENANT, consecutive_failures=number % 2)

    def lives() -> list[float]:
        """A whole wake of each agent, claimed in one call with an agent that is inserted for: how long each took."""
        pairs = [(held[number % 3], agent) for number, agent in enumerate(agents)]
        return [timed(lambda pair=pair: life(daemon, *pair))[0] for pair in pairs]

    lives()  # connections and plans are warm
    undisturbed = statistics.median(lives() + lives())
    with database.connect(autocommit=False) as inserting:
        for agent in held:
            inserting.execute(
                "insert into agent_inbox_items (tenant_id, agent_id, agent_slug, event_type, dedup_key)"
                " values (%s, %s, 'held', 'heartbeat', %s)",
                [DEFAULT_TENANT, agent, str(agent)],
            )
        disturbed = statistics.median(lives() + lives())
        sweep, answer = timed(lambda: daemon.sweep(limit=5))
        inserting.rollback()
    assert answer["errors"] == []
    assert sweep < 2
    assert disturbed < 1.5 * undisturbed + 0.002, (disturbed, undisturbed)


def life(daemon: Dispatcher, held: uuid.UUID, agent: uuid.UUID) -> None:
    claims = daemon.claims([held, agent])
    assert claims[1]["granted"], claims
    for grant in (claim for claim in claims if claim["granted"]):
        assert daemon.started(grant)["code"] == "ok"
        assert daemon.ended(grant, "interrupted", None)["code"] == "ok"


def test_c38_an_item_taken_between_the_gates_and_the_choice_leaves_no_empty_wake(
    database: Database, seed: Seed, dispatcher: Register
) -> None:
    """The only due item is leased and freed by a session outside a wake while its agent is claimed again and again."""
    daemon = dispatcher(max_concurrent_wakes=9)
    agent, other, item = seed.agent("ada"), seed.agent("bob"), seed.item("ada")
    seed.item("bob")
    done = threading.Event()

    def take_and_free() -> None:
        with database.connect() as taker:
            while not done.is_set():
                taker.execute(
                    "update agent_inbox_items set status = 'leased', leased_until = now() + interval '1 hour'"
                    " where id = %s",
                    [item],
                )
                taker.execute(
                    "update agent_inbox_items set status = 'pending', leased_until = null where id = %s", [item]
                )

    taking = threading.Thread(target=take_and_free)
    taking.start()
    try:
        reasons = {claimed_beside(daemon, agent, other) for _ in range(400)}
    finally:
        done.set()
        taking.join(10)
    assert {"granted", "active_lease"} <= reasons <= {"granted", "active_lease", "no_actionable_work", "busy"}
    assert database.value("select count(*) from agent_wakes where cardinality(item_ids) = 0") == 0
    assert database.value("select count(*) from agent_wakes where ended_at is null") == 0


def claimed_beside(daemon: Dispatcher, agent: uuid.UUID, other: uuid.UUID) -> str:
    """Why an agent was not woken, or `granted`; the other agent of the same call is granted whatever became of it."""
    answers = daemon.claims([agent, other])
    assert [answer is not None and answer["agent_id"] for answer in answers] == [str(agent), str(other)]
    assert answers[1]["granted"], answers
    for answer in answers:
        if answer["granted"]:
            assert answer["item_ids"]
            assert daemon.ended(answer, "interrupted", None)["code"] == "ok"
    return "granted" if answers[0]["granted"] else answers[0]["skip_reason"]


def test_c34_two_hundred_thousand_dead_letters_come_back_within_the_statement_timeout(
    database: Database, seed: Seed
) -> None:
    """Each call looks at the whole history of failed items; a call that is cancelled brings back none of them."""
    for number in range(4):
        many_items(database, seed.agent(f"full{number}"), 50_000, "1 hour", "dead_letter")

    def requeue(*arguments: object) -> Any:
        query = "select requeue_inbox_items(%s, 'local', null, null, %s, null, %s)"
        return database.value(query, [DEFAULT_TENANT, *arguments])

    for dead, dry_run, requeued in ((False, False, 0), (True, True, 0), (True, False, 500)):
        took, answer = timed(lambda dead=dead, dry_run=dry_run: requeue(dead, dry_run))
        assert answer["requeued"] == requeued
        assert answer["dead_letters_left"] > 0
        assert took < 2 * LONGEST_PASS, (dead, dry_run, took)
