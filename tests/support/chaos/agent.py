"""The `openclaw` of the chaos runs: misbehaves by lot, and lets the kernel say whether it may live at all.

Each process takes, with a POSIX record lock that the kernel drops at the very moment the process ends, however it
ends and without passing to what it forks: its agent's lock, and one of as many slots as the cap allows. One that does
not get its lock is a second live child of its agent, or one over the cap, and says so in the log, with the pid that
holds the lock. A third mark, a file per wake, shows a wake that was started twice.

Runs as `python -S -I`, as the stub does, and uses the stub's own parts (`dispatcher/local/stub_agent.py`).
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time

import stub_agent  # type: ignore[import-not-found]  # beside the stub's program, found through sys.path at run time
from stub_agent import append

Orders = dict[str, object]

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi4x"
# The slots are looked through this often: a slot may become free behind the look while another is taken before it.
_SCANS = 5
_EXIT_OF_INTRUDER = 97


def main(executable: str) -> int:
    """One wake."""
    log = f"{executable}.log.jsonl"
    arguments = sys.argv[1:]
    agent = stub_agent.option(arguments, "--agent").rsplit("/", 1)[-1]
    wake_id = os.environ.get("DISPATCHER_WAKE_ID", "")
    facts: Orders = {"agent": agent, "wake_id": wake_id}
    orders = stub_agent.orders_for(f"{executable}.orders.json", agent)
    append(log, event="start", ppid=os.getppid(), **facts)
    if not take_the_right_to_live(executable, log, agent, wake_id, int(stub_agent.number(orders, "cap", 1))):
        return _EXIT_OF_INTRUDER
    behaviour = drawn(orders)
    append(log, event="behaviour", behaviour=behaviour, **facts)
    code = behave(behaviour, orders, agent, log)
    append(log, event="end", exit_code=code, **facts)
    return code


# ------------------------------------------------------------------------------------------ the right to live


def take_the_right_to_live(executable: str, log: str, agent: str, wake_id: str, cap: int) -> bool:
    """Takes the three marks; False, and a line for each, when one is taken already."""
    facts: Orders = {"agent": agent, "wake_id": wake_id}
    held = [
        _take_lock(f"{executable}.lock.{agent}", 0),
        _take_slot(f"{executable}.slots", cap),
        _mark_wake(f"{executable}.wakes", wake_id),
    ]
    wrong = [what for what in held if what is not True]
    for what in wrong:
        append(log, event="violation", what=what, **facts)
    return not wrong


def _take_lock(path: str, place: int) -> object:
    """True, or the text of who holds it. The descriptor stays open: closing any of a file's drops its locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    if _try_lock(descriptor, place):
        return True
    return f"two live children of one agent: pid {_holder(descriptor, place)} is alive"


def _take_slot(path: str, cap: int) -> object:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(_SCANS):
        if any(_try_lock(descriptor, place) for place in range(cap)):
            return True
    holders = [_holder(descriptor, place) for place in range(cap)]
    return f"more than {cap} live children: pids {holders} are alive"


def _try_lock(descriptor: int, place: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        return False
    return True


def _holder(descriptor: int, place: int) -> int:
    """Whose lock it is; 0 when it has been dropped meanwhile."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    answer = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
    return 0 if answer[0] == fcntl.F_UNLCK else int(answer[4])


def _mark_wake(directory: str, wake_id: str) -> object:
    try:
        os.close(os.open(f"{directory}/{wake_id}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return "one wake was started twice"
    return True


# ------------------------------------------------------------------------------------------ behaviour


def drawn(orders: Orders) -> str:
    """One of the behaviours, by their weights."""
    weights = orders.get("behaviours")
    assert isinstance(weights, dict)
    left = int.from_bytes(os.urandom(6), "big") / 2**48 * sum(weights.values())
    for name, weight in weights.items():
        left -= weight
        if left < 0:
            return str(name)
    return "ok"


def behave(behaviour: str, orders: Orders, agent: str, log: str) -> int:
    """Does as the name says; the exit code, where it comes to that."""
    if behaviour == "crash":
        return 1
    if behaviour == "idle":
        return 0
    if behaviour in {"hang", "deaf_hang"}:
        hang(deaf=behaviour == "deaf_hang")
    if behaviour.startswith("fork_"):
        return fork_and(behaviour.removeprefix("fork_"), log)
    if behaviour == "post":
        post(orders, agent)
    return work(behaviour, orders, agent, log)


def hang(*, deaf: bool) -> None:
    """Never returns."""
    if deaf:
        stub_agent.ignore_sigterm()
    stub_agent.sleep_for_ever()


def fork_and(then: str, log: str) -> int:
    """Leaves a deaf grandchild in a session of its own, then hangs, crashes or ends well."""
    starter = os.getppid()
    if not os.fork():
        stub_agent.ignore_sigterm()
        os.setsid()
        append(log, event="grandchild", starter=starter)
        stub_agent.sleep_for_ever()
    if then == "hang":
        hang(deaf=False)
    return 1 if then == "crash" else 0


def post(orders: Orders, agent: str) -> None:
    """Hands work to the next agent, which may hand it on: the chain limit is what ends it."""
    arguments = {
        "p_tenant_id": "00000000-0000-0000-0000-000000000000",
        "p_from_agent_slug": agent,
        "p_to_agent_slug": str(orders["neighbour"]),
        "p_event_type": "heartbeat",
        "p_summary": "handed on",
    }
    service_of(orders).call("post_inbox_item", arguments)


def work(behaviour: str, orders: Orders, agent: str, log: str) -> int:
    """Leases up to three items and deals with them as `behaviour` says."""
    service = service_of(orders)
    tenant = {"p_tenant_id": "00000000-0000-0000-0000-000000000000", "p_lease_seconds": 30}
    leased = service.call("lease_inbox_items", {**tenant, "p_agent_slug": agent, "p_limit": 3})
    if behaviour == "lease_die":
        os.kill(os.getpid(), 9)
    if behaviour == "lease_hang":
        hang(deaf=False)
    if behaviour == "lease_exit":
        return 0
    for item in leased["items"]:
        time.sleep(1.2 if behaviour == "slow" else 0.1)
        stub_agent.close_item(service, item, "failed" if behaviour == "fail_item" else "done", log)
    return 0


def service_of(orders: Orders):  # type: ignore[no-untyped-def]  # the stub's Rest
    """The project's functions, as this agent reaches them."""
    return stub_agent.Rest(orders["rest"])
