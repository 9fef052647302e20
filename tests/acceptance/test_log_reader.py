"""C13: a log that nobody reads stops nothing, and what was lost is told when it is read again."""

import re
import subprocess
import time

from dispatcher.local.api import Api
from dispatcher.local.stub import StubAgent
from tests.acceptance.conftest import StartDaemon, working_orders
from tests.acceptance.test_health import verdict
from tests.support.daemon import PROGRAM, DaemonProcess, base_environment
from tests.support.database import Database
from tests.support.seed import Seed
from tests.support.waiting import wait_until

FILLS_STDERR = """
import os, sys
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
os.execv(sys.executable, sys.argv[1:])
"""


def test_c13_wakes_leases_and_time_outs_go_on_while_nobody_reads_the_log(
    api: Api, database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    stub_agent.order(**working_orders(api, agents={"hq/slow": {**holding(api), "seconds": 600}}))
    seed.agent("slow"), seed.agent("noisy"), seed.agent("ada")
    daemon = start_daemon(
        LOG_LEVEL="debug", AGENT_PROCESS_TIMEOUT=20, WAKE_COOLDOWN=0, HEARTBEAT_INTERVAL=0.5, LEASE_SECONDS=30
    ).ready()
    daemon.stop_reading()
    held = seed.item("slow")
    wait_until(lambda: leased_for(database, held, 60), 20)
    make_noise(daemon, seed)

    item = seed.item("ada")
    wait_until(lambda: status(database, item) == "done", 10)
    database.execute("update agent_inbox_items set leased_until = now() + interval '5 s' where id = %s", [held])
    wait_until(lambda: leased_for(database, held, 20), 5)
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'timed_out'") == 1, 40)
    assert verdict(daemon)["status"] == "degraded"

    daemon.read_on()
    [line] = daemon.wait_for("log.dropped")
    assert line["lines"] > 0
    assert daemon.not_json == []
    wait_until(lambda: verdict(daemon)["status"] == "ok", 10)
    seed.item("ada")
    wait_until(lambda: daemon.of("wake.started", agent="ada")[-1:], 10)


def holding(api: Api) -> dict[str, object]:
    return working_orders(api, outcome="leased")


def make_noise(daemon: DaemonProcess, seed: Seed) -> None:
    """Until lines are lost, as the daemon itself says."""

    def lost() -> bool:
        for _ in range(50):
            seed.item("noisy")
        return any("dropped so far" in cause for cause in verdict(daemon)["causes"])

    wait_until(lost, 60)


def leased_for(database: Database, item: object, seconds: float) -> bool:
    query = "select leased_until > now() + make_interval(secs => %s) from agent_inbox_items where id = %s"
    return database.value(query, [seconds, item]) is True


def status(database: Database, item: object) -> str:
    return database.value("select status::text from agent_inbox_items where id = %s", [item])


def test_c13_f8_sigterm_ends_it_within_its_grace_while_nobody_reads_the_log(
    database: Database, seed: Seed, stub_agent: StubAgent, start_daemon: StartDaemon
) -> None:
    stub_agent.order(mode="hang")
    seed.agent("ada"), seed.agent("noisy")
    daemon = start_daemon(LOG_LEVEL="debug", SHUTDOWN_GRACE=1, HEARTBEAT_INTERVAL=0.5).ready()
    daemon.stop_reading()
    make_noise(daemon, seed)
    seed.item("ada")
    wait_until(lambda: database.value("select count(*) from agent_wakes where state = 'running'"), 10)
    started = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(30) == 0
    assert time.monotonic() - started < 1 + 10
    assert stub_agent.living() == []
    told = re.search(r"dispatcher: the last (\d+) lines of the log are lost: nobody reads it", daemon.stderr)
    assert told is not None
    assert int(told[1]) > 1_000


def test_c13_its_last_words_on_stderr_wait_for_nobody() -> None:
    """A setting is wrong, and both streams are pipes that nobody reads and that are full."""
    started = time.monotonic()
    done = subprocess.Popen(
        [PROGRAM[0], "-c", FILLS_STDERR, *PROGRAM, "run"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**base_environment(), "SUPABASE_URL": "nonsense"},
    )
    with done:
        assert done.wait(20) == 78
        assert time.monotonic() - started < 15
