"""The supervisor with real processes, real signals and the real process table."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from dispatcher.agents import process as processes
from dispatcher.agents import proctable
from dispatcher.agents import supervisor as supervision
from dispatcher.agents.command import child_environment
from dispatcher.agents.output import MAX_BYTES, MAX_FILES, WakeOutput
from dispatcher.agents.process import ManagedProcess, OrphanReaper, adopt, send_signal, spawn, stop_family
from dispatcher.agents.proctable import ProcessIdentity
from dispatcher.agents.supervisor import Ending, Supervisor, WakeProcess
from dispatcher.errors import ShuttingDown, SpawnError
from tests.support.waiting import wait_until

DEADLINE = 20.0
TERM_GRACE = 0.3


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def python(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", script]


def environment(wake_id: str) -> dict[str, str]:
    return child_environment(os.environ, wake_id)


def new_id() -> str:
    return str(uuid.uuid4())


def find_marked(wake_id: str) -> list[ProcessIdentity]:
    return proctable.marked_processes().get(wake_id, [])


def is_gone(pid: int) -> bool:
    row = proctable.read_row(pid)
    return row is None or row.is_zombie


def pids_in(path: Path, count: int) -> list[int]:
    """The pids a script has written to `path`, once there are `count` of them."""
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= count, what=f"{count} pids in {path}")
    return [int(line) for line in path.read_text().split()]


@pytest.mark.parametrize("breaks", ["eventfd", "everything"])
def test_a_process_that_cannot_be_watched_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    spawned: list[ManagedProcess] = []

    def note(*args: Any) -> ManagedProcess:
        spawned.append(spawn(*args))
        return spawned[-1]

    monkeypatch.setattr(processes, "spawn", note)
    monkeypatch.setattr(os, "eventfd", fail)
    if breaks == "everything":
        monkeypatch.setattr(proctable, "family", fail)
    supervisor = Supervisor(lambda _wake, _ending: None, 60, output_dir=tmp_path, term_grace=TERM_GRACE)
    wake_id = new_id()
    with pytest.raises(SpawnError):
        supervisor.start(wake_id, "ada", sh("exec sleep 60"), environment(wake_id))
    assert proctable.read_row(spawned[0].pid) is None
    assert (len(supervisor), list(tmp_path.iterdir())) == (0, [])


class Watch:
    """A supervisor, and its endings in the order they came."""

    def __init__(self, timeout: float = 60.0, **options: Any) -> None:
        self.endings: queue.SimpleQueue[tuple[WakeProcess, Ending]] = queue.SimpleQueue()
        self.supervisor = Supervisor(
            lambda wake, ending: self.endings.put((wake, ending)), timeout, term_grace=TERM_GRACE, **options
        )

    def start(self, argv: Sequence[str], **options: Any) -> WakeProcess:
        wake_id = new_id()
        return self.supervisor.start(wake_id, "ada", argv, environment(wake_id), **options)

    def ending(self) -> Ending:
        return self.endings.get(timeout=DEADLINE)[1]

    def has_ended(self) -> bool:
        return not self.endings.empty()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.supervisor.stop_all(0)
    assert len(watch.supervisor) == 0


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any wake."""
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as popen:
        yield popen
        popen.kill()


# -- ends by itself


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9)])
def test_an_end_is_reported_with_its_exit_code(watch: Watch, script: str, code: int) -> None:
    wake = watch.start(sh(script))
    ending = watch.ending()
    assert (ending.kind, ending.exit_code, ending.cause) == ("exited", code, "")
    assert 0 < ending.duration_s < DEADLINE
    assert len(watch.supervisor) == 0
    wait_until(lambda: not psutil.pid_exists(wake.pid), what="the child is reaped")


def test_an_end_is_noticed_at_once_and_not_by_polling(watch: Watch, tmp_path: Path) -> None:
    """The best of a few is a matter of milliseconds; a loop that polls would show in every one of them."""
    stamp = tmp_path / "stamp"
    delays = []
    for _ in range(5):
        watch.start(python(f"import time; open({str(stamp)!r}, 'w').write(str(time.monotonic()))"))
        watch.ending()
        delays.append(time.monotonic() - float(stamp.read_text()))
    assert min(delays) < 0.25


def test_the_start_of_the_shortest_process_is_reported_before_its_end() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    supervisor = Supervisor(lambda _wake, _ending: told.put("ended"), 60)

    def on_started(wake: WakeProcess) -> None:
        wait_until(wake.process.has_ended)
        told.put("started")
        raise RuntimeError("the database is away")

    wake_id = new_id()
    with capture_logs() as logs:
        supervisor.start(wake_id, "ada", ["/bin/true"], environment(wake_id), on_started=on_started)
        assert [told.get(timeout=DEADLINE), told.get(timeout=DEADLINE)] == ["started", "ended"]
    assert [entry["event"] for entry in logs] == ["wake.start_unreported"]
    assert supervisor.stop_all(DEADLINE)


def test_the_slot_is_free_when_the_end_is_reported(tmp_path: Path) -> None:
    seen: queue.SimpleQueue[int] = queue.SimpleQueue()
    supervisor = Supervisor(lambda _wake, _ending: seen.put(len(supervisor)), 60)
    wake_id = new_id()
    supervisor.start(wake_id, "ada", ["/bin/true"], environment(wake_id))
    assert seen.get(timeout=DEADLINE) == 0
    assert supervisor.stop_all(DEADLINE)


def test_an_error_in_the_report_is_logged_and_nothing_else(watch: Watch) -> None:
    def fail(_wake: WakeProcess, _ending: Ending) -> None:
        raise RuntimeError("the database is away")

    supervisor = Supervisor(fail, 60)
    wake_id = new_id()
    with capture_logs() as logs:
        supervisor.start(wake_id, "ada", ["/bin/true"], environment(wake_id))
        assert supervisor.stop_all(DEADLINE)
    assert [(entry["event"], entry["wake_id"]) for entry in logs] == [("wake.end_unreported", wake_id)]


def test_field_failure_38_stdin_is_at_its_end_and_a_chatty_child_does_not_hang(watch: Watch) -> None:
    watch.start(
        python("import os,sys; sys.stdin.read(); [os.write(fd, b'x'*65536) for _ in range(80) for fd in (1,2)]")
    )
    assert watch.ending().exit_code == 0


def test_a_child_has_its_own_session_and_none_of_our_files(watch: Watch, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with (tmp_path / "secret").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        watch.start(
            python(
                f"import os; open({str(report)!r}, 'w').write(repr((os.getsid(0), os.getpgrp(), os.getpid(),"
                " [os.path.realpath('/proc/self/fd/' + f) for f in os.listdir('/proc/self/fd')])))"
            )
        )
        watch.ending()
    session, group, pid, files = eval(report.read_text())
    assert session == group == pid
    assert not any("secret" in file for file in files)
    assert files.count("/dev/null") == 1  # stdin; what it prints is kept in memory
    assert sum("memfd:wake-output" in file for file in files) == 2


# -- cannot start


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["/nonexistent/openclaw"], "not found"),
        (["/etc/passwd"], "not executable"),
        (["/bin/true", "x" * 300_000], "too long"),
        (["/bin/true", "a\0b"], "no command line can hold"),
    ],
)
def test_a_spawn_that_fails_names_its_cause_and_leaves_nothing(argv: list[str], says: str, tmp_path: Path) -> None:
    watch = Watch(output_dir=tmp_path)
    with pytest.raises(SpawnError, match=says):
        watch.start(argv)
    assert len(watch.supervisor) == 0
    assert list(tmp_path.iterdir()) == []
    assert watch.supervisor.stop_all(0)
    assert not watch.has_ended()


def test_one_wake_id_lives_once(watch: Watch) -> None:
    wake = watch.start(["/bin/sleep", "600"])
    with pytest.raises(ValueError, match="live already"):
        watch.supervisor.start(wake.wake_id, "ada", ["/bin/true"], {})


# -- stopping


def test_a_polite_child_ends_on_sigterm(watch: Watch) -> None:
    wake = watch.start(["/bin/sleep", "600"])
    assert watch.supervisor.stop(wake.wake_id, "the lease was lost")
    ending = watch.ending()
    assert (ending.kind, ending.exit_code, ending.cause) == ("stopped", -signal.SIGTERM, "the lease was lost")
    assert not watch.supervisor.stop(wake.wake_id, "again")


def test_a_child_over_its_time_is_ended(watch: Watch) -> None:
    watch.start(["/bin/sleep", "600"], timeout_seconds=0.1)
    ending = watch.ending()
    assert (ending.kind, ending.cause) == ("timed_out", "ran longer than 0.1 s")
    assert ending.exit_code == -signal.SIGTERM


def test_a_hung_child_does_not_delay_another(watch: Watch) -> None:
    watch.start(sh("trap '' TERM; sleep 600; sleep 600"), timeout_seconds=0.1)
    watch.start(["/bin/true"])
    assert watch.ending().kind == "exited"
    assert watch.ending().kind == "timed_out"


STUBBORN = (
    "import signal,time,os; signal.signal(15, signal.SIG_IGN); {more};"
    " print(os.getpid(), file=open({path!r}, 'a'), flush=True); time.sleep(600)"
)


def stubborn(path: Path, more: str = "0") -> str:
    """A shell word that runs a Python which ignores SIGTERM and writes its pid to `path`."""
    script = STUBBORN.format(path=str(path), more=more)
    return f'{sys.executable} -S -c "{script}"'


@pytest.mark.parametrize(
    "more",
    ["0", "os.setsid() if os.getpid() != os.getsid(0) else 0"],
    ids=["in the group", "in a session of its own"],
)
def test_field_failure_34_a_grandchild_that_ignores_sigterm_dies(
    watch: Watch, tmp_path: Path, bystander: subprocess.Popen[bytes], more: str
) -> None:
    """The leader dies on SIGTERM at once; its helper does not care."""
    path = tmp_path / "pids"
    wake = watch.start(sh(f"{stubborn(path, more)} & echo $$ >> {path}; wait"))
    pids = pids_in(path, 2)
    watch.supervisor.stop(wake.wake_id, "test")
    assert watch.ending().kind == "stopped"
    assert all(is_gone(pid) for pid in pids)
    assert bystander.poll() is None


def test_a_grandchild_whose_parent_is_gone_is_found_by_its_marker(watch: Watch, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    wake = watch.start(sh(f"(setsid {stubborn(path)} &) ; echo $$ >> {path}; sleep 600"))
    pids = pids_in(path, 2)
    watch.supervisor.stop(wake.wake_id, "test")
    watch.ending()
    assert all(is_gone(pid) for pid in pids)


def test_a_grandchild_without_marker_whose_parent_dies_first_is_remembered(watch: Watch, tmp_path: Path) -> None:
    """Its parent dies on SIGTERM; only the look before that can have seen that it belongs here."""
    path = tmp_path / "pids"
    wake = watch.start(sh(f"env -i setsid {stubborn(path)} & echo $$ >> {path}; wait"))
    pids = pids_in(path, 2)
    watch.supervisor.stop(wake.wake_id, "test")
    watch.ending()
    assert all(is_gone(pid) for pid in pids)


def test_who_ignores_sigterm_is_killed_however_long_the_looking_takes(tmp_path: Path) -> None:
    """On a machine so busy that the process table alone takes longer to read than the wait after a kill."""
    path, wake_id = tmp_path / "pids", new_id()
    child = spawn(sh(f"exec {stubborn(path)}"), environment(wake_id))
    pids_in(path, 1)
    report = stop_family(child, wake_id, term_grace=0.1, kill_wait=0.0)
    assert report.killed == 1
    assert child.wait(DEADLINE)
    assert child.reap() == -signal.SIGKILL
    child.close()


def test_a_process_that_cannot_be_killed_keeps_its_slot_until_it_is_gone(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reported as ended while it lives, its agent would be woken a second time beside it."""
    tries: list[int] = []
    stop = processes.stop_family

    def fail_twice(process: ManagedProcess, *arguments: Any, **options: Any) -> processes.StopReport:
        tries.append(process.pid)
        if len(tries) <= 2:
            return processes.StopReport(1, 1, (process.pid,))
        return stop(process, *arguments, **options)

    monkeypatch.setattr(processes, "stop_family", fail_twice)
    monkeypatch.setattr(supervision, "STOP_AGAIN_SECONDS", 0.2)
    with capture_logs() as logs:
        wake = watch.start(["/bin/sleep", "600"], timeout_seconds=0.1)
        wait_until(lambda: len(tries) == 2)
        assert not watch.has_ended()
        assert watch.supervisor.live() == [wake]
        assert watch.ending().kind == "timed_out"
    assert [line["pids"] for line in logs if line["event"] == "process.survived"] == [(wake.pid,)] * 2
    assert len(tries) == 3
    assert is_gone(wake.pid)


def test_children_born_during_the_stop_die_too(watch: Watch, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    wake = watch.start(
        sh(f"trap '{stubborn(path)} & {stubborn(path)} & wait' TERM; echo $$ >> {path}; sleep 600 & wait")
    )
    pids_in(path, 1)
    watch.supervisor.stop(wake.wake_id, "test")
    watch.ending()
    assert all(is_gone(int(pid)) for pid in path.read_text().split())
    assert find_marked(wake.wake_id) == []


def test_what_a_failed_leader_leaves_running_is_ended(watch: Watch, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    watch.start(sh(f"{stubborn(path)} & while ! test -s {path}; do sleep 0.01; done; exit 1"))
    (pid,) = pids_in(path, 1)
    assert watch.ending().exit_code == 1
    assert is_gone(pid)


def test_what_a_good_leader_leaves_running_is_ended_with_the_daemon(tmp_path: Path) -> None:
    watch = Watch()
    path = tmp_path / "pids"
    watch.start(sh(f"setsid {stubborn(path)} & while ! test -s {path}; do sleep 0.01; done"))
    (pid,) = pids_in(path, 1)
    assert watch.ending().exit_code == 0
    assert not is_gone(pid)
    assert watch.supervisor.stop_all(0)
    assert is_gone(pid)


def test_our_own_group_is_never_signalled() -> None:
    """A marked process in our own group, and ourselves marked: as when an agent started this daemon."""
    script = (
        "import os,subprocess,sys,time,signal\n"
        "signal.signal(15, lambda *_: os._exit(15))\n"
        "from dispatcher.agents import process, proctable\n"
        "wake = os.environ['DISPATCHER_WAKE_ID']\n"
        "mate = subprocess.Popen(['/bin/sleep', '600'])\n"
        "child = process.spawn(['/bin/sleep', '600'], {'DISPATCHER_WAKE_ID': wake})\n"
        "other = process.spawn(['/bin/sleep', '600'], {'DISPATCHER_WAKE_ID': 'other'})\n"
        "report = process.stop_family(child, wake, term_grace=5)\n"
        "print(report.asked, mate.poll(), other.has_ended(), child.reap())\n"
        "mate.kill(); os.kill(other.pid, 9)\n"
    )
    env = {**os.environ, "DISPATCHER_WAKE_ID": new_id(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1", "None", "False", "-15"], "")


def test_fifty_children_end_at_once_and_no_descriptor_or_thread_stays() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    warm = Watch()
    warm.start(["/bin/true"])
    warm.ending()
    warm.supervisor.stop_all(DEADLINE)
    before, threads = descriptors(), threading.active_count()
    watch = Watch()
    wakes = [watch.start(["/bin/sleep", "600"]) for _ in range(50)]
    assert len(watch.supervisor) == 50
    assert [wake.wake_id for wake in watch.supervisor.live()] == [wake.wake_id for wake in wakes]
    assert watch.supervisor.stop_all(0)
    endings = [watch.ending() for _ in wakes]
    assert {(ending.kind, ending.exit_code, ending.cause) for ending in endings} == {
        ("stopped", -signal.SIGTERM, "shutdown")
    }
    assert all(not psutil.pid_exists(wake.pid) for wake in wakes)
    wait_until(lambda: descriptors() <= before, what="descriptors given back")
    wait_until(lambda: threading.active_count() <= threads, what="threads ended")


# -- shutting down


def is_refused(watch: Watch) -> bool:
    try:
        watch.start(["/bin/true"])
    except ShuttingDown:
        return True
    return False


def test_a_stop_gives_grace_and_starts_nothing_more(tmp_path: Path) -> None:
    watch = Watch()
    gate = tmp_path / "gate"
    watch.start(sh(f"while ! test -e {gate}; do sleep 0.01; done"))
    stopper = threading.Thread(target=watch.supervisor.stop_all, args=(DEADLINE,))
    stopper.start()
    wait_until(lambda: is_refused(watch), what="no more starts")
    gate.touch()
    stopper.join(DEADLINE)
    assert not stopper.is_alive()
    while watch.has_ended():
        assert watch.ending().exit_code == 0


@pytest.mark.parametrize("script", ["exec sleep 60", "trap 'exit 143' TERM; sleep 60 & wait"])
@pytest.mark.parametrize("daemon_first", [True, False])
def test_c18_an_end_by_a_signal_while_the_daemon_stops_is_no_failure(
    watch: Watch, script: str, daemon_first: bool
) -> None:
    """Whoever sent it, and whichever of the two heard of it first."""
    wake = watch.start(sh(script))
    process = psutil.Process(wake.pid)
    wait_until(lambda: process.name() == "sleep" or process.children())
    if daemon_first:
        watch.supervisor.note_stopping()
    os.kill(wake.pid, signal.SIGTERM)
    if not daemon_first:
        with pytest.raises(queue.Empty):  # held back for a moment
            watch.endings.get(timeout=0.2)
        watch.supervisor.note_stopping()
    assert watch.ending().kind == "stopped"


def test_c18_an_end_by_a_signal_of_somebody_else_is_the_wakes_own(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "STOP_NEWS_SECONDS", 0.05)
    wake = watch.start(sh("exec sleep 60"))
    os.kill(wake.pid, signal.SIGTERM)
    assert (ending := watch.ending()).kind == "exited"
    assert ending.exit_code == -signal.SIGTERM


def test_c18_an_end_with_another_code_is_the_wakes_own_also_while_the_daemon_stops(watch: Watch) -> None:
    watch.supervisor.note_stopping()
    for code in (0, 1):
        watch.start(sh(f"exit {code}"))
        ending = watch.ending()
        assert (ending.kind, ending.exit_code) == ("exited", code)


def test_a_second_signal_skips_the_grace(tmp_path: Path) -> None:
    watch = Watch()
    watch.start(["/bin/sleep", "600"])
    stopper = threading.Thread(target=watch.supervisor.stop_all, args=(600,))
    stopper.start()
    watch.supervisor.hurry()
    stopper.join(DEADLINE)
    assert not stopper.is_alive()
    assert watch.ending().kind == "stopped"


def test_a_stop_waits_for_the_reports_but_not_for_ever() -> None:
    release = threading.Event()
    supervisor = Supervisor(lambda _wake, _ending: release.wait(DEADLINE), 60, term_grace=TERM_GRACE)
    wake_id = new_id()
    supervisor.start(wake_id, "ada", ["/bin/true"], environment(wake_id))
    assert not supervisor.stop_all(0, limit=0.3)
    release.set()
    assert supervisor.stop_all(0)


# -- who is who


@pytest.mark.parametrize("started", [1.0, None])
def test_field_failure_35_a_pid_that_is_anothers_or_unknown_gets_no_signal(
    watch: Watch, bystander: subprocess.Popen[bytes], started: float | None
) -> None:
    assert watch.supervisor.adopt(new_id(), "ada", bystander.pid, started) is None
    assert not send_signal(bystander.pid, started, signal.SIGKILL)
    stale = ManagedProcess(ProcessIdentity(bystander.pid, started, proctable.host_id()), None)
    assert stop_family(stale, new_id(), term_grace=0.1).asked == 0
    stale.close()
    assert bystander.poll() is None


def test_liveness_is_yes_no_or_unknown(bystander: subprocess.Popen[bytes]) -> None:
    started = proctable.started_at(bystander.pid)
    assert started is not None
    assert proctable.is_alive(bystander.pid, started) is True
    assert proctable.is_alive(bystander.pid, started + 0.01) is False
    assert proctable.is_alive(bystander.pid, None) is None
    bystander.kill()
    wait_until(lambda: proctable.is_alive(bystander.pid, started) is False, what="a zombie is not alive")
    bystander.wait()
    assert proctable.is_alive(bystander.pid, started) is False
    assert proctable.is_alive(bystander.pid, None) is False


def test_a_start_time_survives_text_and_json(bystander: subprocess.Popen[bytes]) -> None:
    started = proctable.started_at(bystander.pid)
    assert started is not None
    assert proctable.is_alive(bystander.pid, float(f"{started:.6f}")) is True
    assert 0 <= proctable.seconds_since_boot() - started < DEADLINE


def test_an_adopted_process_is_watched_and_its_exit_code_is_unknown(
    watch: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    wake = watch.supervisor.adopt(new_id(), "ada", bystander.pid, proctable.started_at(bystander.pid))
    assert wake is not None
    assert wake.is_adopted
    bystander.kill()
    ending = watch.ending()
    assert (ending.kind, ending.exit_code) == ("exited", None)


def test_the_time_of_an_adopted_process_runs_from_its_own_start(
    watch: Watch, bystander: subprocess.Popen[bytes]
) -> None:
    started = proctable.started_at(bystander.pid)
    assert started is not None
    wait_until(lambda: proctable.seconds_since_boot() - started > 0.1)
    watch.supervisor.adopt(new_id(), "ada", bystander.pid, started, seconds_left=0.05)
    assert watch.ending().kind == "timed_out"
    assert bystander.wait(DEADLINE) == -signal.SIGTERM


def test_a_process_adopted_late_is_not_overdue_yet(bystander: subprocess.Popen[bytes]) -> None:
    """Its ladder has only begun; an error that says it hangs would be wrong."""
    process = adopt(bystander.pid, proctable.started_at(bystander.pid))
    assert process is not None
    before = time.monotonic()
    wake = WakeProcess(new_id(), "ada", process, 1.0, age=500.0)
    try:
        assert wake.deadline >= before
    finally:
        wake.close()


def test_field_failure_64_a_child_is_found_by_its_marker() -> None:
    wake_id = new_id()
    child = spawn(sh("sleep 600 & sleep 600"), environment(wake_id))
    wait_until(lambda: len(find_marked(wake_id)) == 3)
    found = find_marked(wake_id)
    assert found[0] == child.identity
    adopted = adopt(found[0].pid, found[0].started_at)
    assert adopted is not None
    assert stop_family(adopted, wake_id, term_grace=DEADLINE).asked == 3
    assert find_marked(wake_id) == []
    assert child.reap() == -signal.SIGTERM
    for process in (child, adopted):
        process.close()


# -- the net


def test_a_wake_whose_thread_died_is_finished_by_the_check(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "_see_through", lambda _self, _wake: None)
    wake = watch.start(["/bin/sleep", "600"])
    assert wake.thread is not None
    wake.thread.join(DEADLINE)
    watch.supervisor.check()
    assert watch.ending().kind == "lost"
    assert not psutil.pid_exists(wake.pid)


def test_c32_a_wake_that_ended_well_meanwhile_keeps_its_background_processes(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wake = watch.start(sh(f"sleep 60 & echo $! > {tmp_path}/pid; exit 0"))
    snapshot = [wake]
    assert watch.ending().exit_code == 0
    assert wake.thread is not None
    wake.thread.join(DEADLINE)
    monkeypatch.setattr(watch.supervisor, "live", lambda: snapshot)
    watch.supervisor.check()
    [background] = pids_in(tmp_path / "pid", 1)
    assert not is_gone(background)
    assert not watch.has_ended()
    os.kill(background, signal.SIGKILL)


@pytest.mark.parametrize("seconds", [30 * 86_400.0, 10 * 365 * 86_400.0])
def test_c32_a_time_of_years_can_be_waited_for(seconds: float) -> None:
    watch = Watch(timeout=seconds)
    watch.start(sh("exit 3"))
    assert watch.ending().exit_code == 3


def test_a_wake_that_cannot_be_waited_for_is_reported_lost(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: WakeProcess) -> bool:
        raise OSError("bad descriptor")

    monkeypatch.setattr(WakeProcess, "wait", fail)
    with capture_logs() as logs:
        wake = watch.start(["/bin/sleep", "600"])
        ending = watch.ending()
    assert (ending.kind, ending.cause) == ("lost", "OSError while waiting")
    assert [entry["event"] for entry in logs] == ["wake.lost"]
    assert not psutil.pid_exists(wake.pid)


@pytest.mark.parametrize("adopted", [False, True])
def test_without_pidfd_everything_still_works(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adopted: bool
) -> None:
    monkeypatch.setattr(processes, "_open_pidfd", lambda _pid: None)
    watch.start(sh("exit 4"))
    assert watch.ending().exit_code == 4
    path = tmp_path / "pids"
    wake = watch.start(sh(f"{stubborn(path)} & echo $$ >> {path}; wait"))
    pids = pids_in(path, 2)
    other = Watch()
    if adopted:
        twin = other.supervisor.adopt(wake.wake_id, "ada", wake.pid, wake.started_at)
        assert twin is not None
        other.supervisor.stop(wake.wake_id, "test")
        assert other.ending().kind == "stopped"
    else:
        watch.supervisor.stop(wake.wake_id, "test")
    watch.ending()
    assert all(is_gone(pid) for pid in pids)


def test_field_failure_37_orphans_are_reaped_but_nobody_elses_children() -> None:
    script = (
        "import subprocess, sys, time, psutil\n"
        "from dispatcher.agents.process import OrphanReaper, prepare_parent\n"
        "assert prepare_parent()\n"
        "mine = subprocess.Popen(['/bin/true'])\n"
        "for _ in range(20): subprocess.run(['/bin/sh', '-c', 'sleep 0.05 & exit 0'], check=True)\n"
        "me = psutil.Process()\n"
        "def zombies(): return [p for p in me.children() if p.status() == 'zombie']\n"
        "end = time.monotonic() + 20\n"
        "while len(zombies()) < 21 and time.monotonic() < end: time.sleep(0.01)\n"
        "reaper = OrphanReaper()\n"
        "first = reaper.reap({mine.pid}); second = reaper.reap({mine.pid}); third = reaper.reap({mine.pid})\n"
        "print(first, second, third, len(zombies()), mine.wait())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.splitlines()[-1].split(), done.stderr) == (["0", "20", "0", "1", "0"], "")


def test_a_reaper_without_children_has_nothing_to_do() -> None:
    assert OrphanReaper().reap(()) == 0


# -- output


def test_output_goes_to_one_file_per_wake(tmp_path: Path) -> None:
    watch = Watch(output_dir=tmp_path / "deep" / "out")
    wake = watch.start(sh("echo to stdout; echo to stderr >&2"))
    watch.ending()
    (path,) = (tmp_path / "deep" / "out").iterdir()
    assert path.read_text() == "to stdout\nto stderr\n"
    assert wake.wake_id in path.name
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    watch.supervisor.stop_all(0)


def test_field_failure_38_output_is_bounded_and_keeps_its_tail(tmp_path: Path) -> None:
    watch = Watch(output_dir=tmp_path)
    watch.start(
        python("import os; [os.write(fd, b'x' * 65535 + b'\\n') for _ in range(80) for fd in (1, 2)]; print('the end')")
    )
    assert watch.ending().exit_code == 0
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size <= MAX_BYTES
    assert path.read_text().startswith("[the beginning was cut]\n")
    assert path.read_text().endswith("the end\n")
    watch.supervisor.stop_all(0)


def test_output_is_cut_while_the_child_still_writes(tmp_path: Path) -> None:
    output = WakeOutput(tmp_path, "ada", "w")
    writer = os.dup(output.fd)
    for _ in range(5):
        os.write(writer, b"y" * MAX_BYTES)
        output.trim()
        assert output.path.stat().st_size <= MAX_BYTES
    os.write(writer, b"last")
    os.close(writer)
    output.close()
    assert output.path.read_bytes().endswith(b"yylast")
    assert b"\0" not in output.path.read_bytes()


def test_the_oldest_output_goes_and_other_files_stay(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 5):
        (tmp_path / f"20260101T0000{number:04d}-a-w.wake.log").touch()
    (tmp_path / "notes.txt").touch()
    output = WakeOutput(tmp_path, "../../ada\n", "w")
    output.close()
    names = sorted(path.name for path in tmp_path.glob("*.wake.log"))
    assert len(names) == MAX_FILES
    assert names[0].startswith("20260101T00000006")
    assert names[-1].endswith("-ada--w.wake.log")
    assert (tmp_path / "notes.txt").exists()


def test_output_that_cannot_be_kept_costs_a_warning_and_not_the_wake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    watch = Watch(output_dir=tmp_path / "file")
    with capture_logs() as logs:
        watch.start(["/bin/true"])
        assert watch.ending().exit_code == 0
    assert [entry["event"] for entry in logs] == ["wake.output_lost"]
    watch.supervisor.stop_all(0)
