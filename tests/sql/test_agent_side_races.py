"""The agent's SQL functions when two sessions act at once: open transactions, real locks."""

import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.sql.conftest import Dispatcher
from tests.sql.test_agent_side import Inbox, inbox, own
from tests.support.database import Connection, Database

__all__ = ["inbox", "own"]  # fixtures

pytestmark = pytest.mark.kept_database


def waiting_on_lock(database: Database, connection: Connection) -> bool:
    """Whether a session of the database waits for a lock now."""
    return bool(
        database.value(
            "select count(*) from pg_stat_activity where pid = %s and wait_event_type = 'Lock'",
            (connection.info.backend_pid,),
        )
    )


class Rival:
    """A second session that makes one call on a thread, so that the test can see it wait."""

    def __init__(self, inbox: Inbox, wait_until: Callable[..., object]) -> None:
        self._inbox = inbox
        self._wait_until = wait_until
        self.connection = inbox.database.connect("service_role")
        self._pool = ThreadPoolExecutor(1)

    def start(self, call: Callable[[Connection], Any]) -> Future[Any]:
        """Begin a call; returns once it waits for a lock."""
        future = self._pool.submit(call, self.connection)
        self._wait_until(
            lambda: waiting_on_lock(self._inbox.database, self.connection) or future.done(), what="the lock"
        )
        assert not future.done(), future.result()
        return future


@pytest.fixture
def rival(own: Inbox, wait_until: Callable[..., object]) -> Rival:
    return Rival(own, wait_until)


def close_on(inbox: Inbox, item: Any, outcome: str) -> Callable[[Connection], Any]:
    return lambda connection: inbox.close(item, outcome, on=connection)


def test_two_leases_at_once_take_different_items(own: Inbox) -> None:
    first, second = (str(item_id) for item_id in own.seed.items("ada", 2))
    open_session = own.database.connect("service_role", autocommit=False)
    [mine] = own.lease(on=open_session)["items"]
    [theirs] = own.lease()["items"]
    open_session.commit()
    assert (mine["inbox_item_id"], theirs["inbox_item_id"]) == (first, second)


def test_a_lease_does_not_wait_for_another_and_does_not_take_its_item(own: Inbox) -> None:
    own.seed.item()
    open_session = own.database.connect("service_role", autocommit=False)
    assert len(own.lease(on=open_session)["items"]) == 1
    assert own.lease()["items"] == []
    open_session.rollback()
    assert len(own.lease()["items"]) == 1


def test_an_item_that_is_only_being_stamped_is_waited_for(own: Inbox, rival: Rival) -> None:
    """The daemon's "it has started" holds the item's row while the agent asks: the inbox is not empty for that."""
    item_id = own.seed.item()
    stamping = own.database.connect("service_role", autocommit=False)
    stamping.execute("update public.agent_inbox_items set last_wake_success_at = now() where id = %s", (item_id,))
    leasing = rival.start(lambda connection: own.lease(on=connection)["items"])
    stamping.commit()
    [leased] = leasing.result(5)
    assert leased["inbox_item_id"] == str(item_id)


def test_an_item_picked_before_another_session_leased_it_is_not_leased_twice(own: Inbox) -> None:
    """The pick saw it free, the lock comes after the other's commit: only a look under the lock is safe."""
    item_id = own.seed.item()
    own.lease()
    taken = own.call(
        "dispatcher.lease_one_inbox_item",
        p_item_id=item_id,
        p_lease_seconds=60,
        p_lease_token=uuid.uuid4(),
        p_wake_id=None,
    )
    assert taken is False
    assert own.row(item_id)["attempt_count"] == 1


@pytest.mark.parametrize("sessions", [8])
def test_many_sessions_lease_every_item_exactly_once(inbox: Inbox, sessions: int) -> None:
    ids = sorted(str(item_id) for item_id in inbox.seed.items("ada", 40))
    connections = [inbox.database.connect("service_role") for _ in range(sessions)]

    def drain(connection: Connection) -> list[str]:
        mine: list[str] = []
        while items := inbox.lease(limit=2, on=connection)["items"]:
            mine += [item["inbox_item_id"] for item in items]
        return mine

    with ThreadPoolExecutor(sessions) as pool:
        taken = [item_id for part in pool.map(drain, connections) for item_id in part]
    assert sorted(taken) == ids
    assert inbox.database.value("select max(attempt_count) from public.agent_inbox_items") == 1


def test_ff28_a_repeated_lease_call_gets_the_same_items_and_spends_no_attempt(own: Inbox, rival: Rival) -> None:
    own.seed.items("ada", 4)
    token = uuid.uuid4()
    open_session = own.database.connect("service_role", autocommit=False)
    first = own.lease(limit=2, p_lease_token=token, on=open_session)
    repeat = rival.start(lambda connection: own.lease(limit=2, p_lease_token=token, on=connection))
    open_session.commit()
    assert repeat.result(5) == first
    assert own.lease(limit=2, p_lease_token=token) == first
    assert own.database.value("select sum(attempt_count) from public.agent_inbox_items") == 2


def test_ff28_a_token_leases_for_one_agent_only(own: Inbox) -> None:
    own.seed.item("ada")
    bobs = own.seed.item("bob")
    token = uuid.uuid4()
    own.lease("ada", p_lease_token=token)
    [item] = own.lease("bob", p_lease_token=token)["items"]
    assert item["inbox_item_id"] == str(bobs)


@pytest.mark.parametrize("second", ["done", "failed", "released"])
@pytest.mark.parametrize("first", ["done", "failed", "released"])
def test_ff43_of_two_closes_at_once_one_holds(own: Inbox, rival: Rival, first: str, second: str) -> None:
    item_id = own.seed.item()
    item = own.leased()
    open_session = own.database.connect("service_role", autocommit=False)
    assert own.close(item, first, on=open_session)["code"] == "ok"
    other = rival.start(close_on(own, item, second))
    open_session.commit()
    assert other.result(5)["code"] == ("already" if first == second else "lease_lost")
    assert own.row(item_id)["status"] == {"done": "done", "failed": "failed", "released": "pending"}[first]


def test_a_close_rolled_back_leaves_the_lease_to_the_next(own: Inbox, rival: Rival) -> None:
    item_id = own.seed.item()
    item = own.leased()
    open_session = own.database.connect("service_role", autocommit=False)
    own.close(item, "failed", on=open_session)
    other = rival.start(close_on(own, item, "done"))
    open_session.rollback()
    assert other.result(5)["code"] == "ok"
    assert own.row(item_id)["status"] == "done"


@pytest.mark.parametrize("outcome", ["done", "failed", "released"])
def test_ff43_a_close_that_waited_while_its_lease_was_taken_over_changes_nothing(
    own: Inbox, rival: Rival, outcome: str
) -> None:
    item_id = own.seed.item()
    old = own.leased()
    own.end_lease(item_id)
    open_session = own.database.connect("service_role", autocommit=False)
    [new] = own.lease(on=open_session)["items"]
    late = rival.start(close_on(own, old, outcome))
    open_session.commit()
    assert late.result(5)["code"] == "lease_lost"
    assert own.row(item_id)["status"] == "leased"
    assert own.close(new, "done")["code"] == "ok"


def lease_is_over(connection: Connection, item_id: uuid.UUID) -> bool:
    query = "select leased_until < clock_timestamp() as over from public.agent_inbox_items where id = %s"
    row = connection.execute(query, (item_id,)).fetchone()
    return row is not None and bool(row["over"])


def test_ff43_a_close_whose_lease_ended_while_it_waited_changes_nothing(
    own: Inbox, rival: Rival, wait_until: Callable[..., object]
) -> None:
    """The lease lived when the call began; what counts is the clock once the lock is held."""
    item_id = own.seed.item()
    item = own.leased()
    open_session = own.database.connect(autocommit=False)
    open_session.execute(
        "update public.agent_inbox_items set leased_until = clock_timestamp() + interval '300 ms' where id = %s",
        (item_id,),
    )
    late = rival.start(close_on(own, item, "done"))
    wait_until(lambda: lease_is_over(open_session, item_id), what="the end of the lease")
    open_session.commit()
    assert late.result(5)["code"] == "lease_lost"
    assert own.row(item_id)["status"] == "leased"


def test_of_two_escalations_at_once_one_notification_is_written(own: Inbox, rival: Rival) -> None:
    own.seed.item()
    item = own.leased()
    open_session = own.database.connect("service_role", autocommit=False)
    arguments = {"p_item_id": item["inbox_item_id"], "p_lease_token": item["lease_token"], "p_reason": "help"}
    assert own.call("escalate_inbox_item", on=open_session, **arguments)["code"] == "ok"
    other = rival.start(lambda connection: own.call("escalate_inbox_item", on=connection, **arguments))
    open_session.commit()
    assert other.result(5)["code"] == "already"
    assert own.database.value("select count(*) from public.notifications") == 1


def test_ff68_of_two_posts_at_once_one_row_is_written(own: Inbox, rival: Rival) -> None:
    own.seed.agent("bob")
    open_session = own.database.connect("service_role", autocommit=False)
    first = own.post(on=open_session)
    other = rival.start(lambda connection: own.post(on=connection))
    open_session.commit()
    assert other.result(5) == first | {"code": "already"}
    assert own.database.value("select count(*) from public.agent_inbox_items") == 1


def test_a_lease_during_the_end_of_its_wake_is_not_the_ended_wakes(
    own: Inbox, dispatcher: Callable[..., Dispatcher], wait_until: Callable[..., object]
) -> None:
    item_id = own.seed.item()
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, item_id)
    daemon.started(grant)
    daemon.connection.autocommit = False
    daemon.ended(grant)
    leasing = Rival(own, wait_until).start(lambda connection: own.lease(on=connection))
    daemon.connection.commit()
    [item] = leasing.result(5)["items"]
    assert own.lease_row(item["inbox_item_id"])["wake_id"] is None


@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_close_and_the_end_of_its_wake_do_not_deadlock(
    own: Inbox, dispatcher: Callable[..., Dispatcher], wait_until: Callable[..., object], outcome: str
) -> None:
    """Both need the wake and the item. A third session holds the item until both wait."""
    item_id = own.seed.item()
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, item_id)
    daemon.started(grant)
    item = own.leased()
    holder = own.database.connect(autocommit=False)
    holder.execute("select from public.agent_inbox_items where id = %s for update", (item_id,))
    closing = Rival(own, wait_until).start(close_on(own, item, outcome))
    with ThreadPoolExecutor(1) as pool:
        # The end waits for nobody: it is to be reported again once the closing is through.
        assert pool.submit(daemon.ended, grant).result(5)["code"] == "busy"
        holder.commit()
        assert closing.result(5)["code"] == "ok"
        assert daemon.ended(grant)["state"] == "succeeded"
    assert own.row(item_id)["status"] == outcome


def test_an_item_released_before_its_wake_ends_is_no_progress(
    own: Inbox, dispatcher: Callable[..., Dispatcher]
) -> None:
    item_id = own.seed.item()
    daemon = dispatcher()
    grant = daemon.claim(own.agent_id, item_id)
    daemon.started(grant)
    own.close(own.leased(), "released")
    assert daemon.ended(grant)["state"] == "no_progress"
    assert own.row(item_id)["attempt_count"] == 0
