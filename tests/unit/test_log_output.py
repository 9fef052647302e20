"""The queue of log lines against readers that stall and disks that are full: real pipes, files and processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatcher import log_output
from dispatcher.log_output import LineQueue, say_on_stderr
from tests.support.daemon import base_environment
from tests.support.waiting import wait_until

SMALLEST_PIPE = 4096
LINE = "x" * 999


class Pipe:
    """A small pipe that is read only when told to."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        self.said: list[str] = []
        self.queue = LineQueue(self.write_end, lambda count: f"{count} dropped", self.said.append)

    def stall(self) -> None:
        """Puts lines of 1,000 bytes until the thread waits in a write that has no room."""
        for _ in range(40):
            self.queue.put(LINE)
        wait_until(self._is_full)

    def _is_full(self) -> bool:
        with self.queue._changed:
            standstill = time.monotonic() - self.queue._moved_at
            return self.queue._in_writing and len(self.queue._lines) > 0 and standstill > 0.3

    def read_until(self, last: str) -> list[str]:
        """The lines up to the first that is `last`."""
        text = b""
        while not text.endswith(f"{last}\n".encode()):
            text += os.read(self.read_end, 65536)
        return text.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    with contextlib.suppress(OSError):
        os.close(made.read_end)  # a writer that still waits gets EPIPE
    made.queue.close()
    os.close(made.write_end)


def test_lines_arrive_whole_and_in_order(pipe: Pipe) -> None:
    for number in range(200):
        pipe.queue.put(f"line {number}")
    assert pipe.read_until("line 199") == [f"line {number}" for number in range(200)]
    assert pipe.queue.flush(5)
    assert pipe.queue.trouble is None


def test_c13_nobody_waits_for_a_reader_that_stalls_and_the_loss_is_told_in_its_place(pipe: Pipe) -> None:
    pipe.stall()
    more = 3 * log_output.MAX_QUEUED_BYTES // 1000
    started = time.monotonic()
    for _ in range(more):
        pipe.queue.put(LINE)
    assert time.monotonic() - started < 5
    trouble = pipe.queue.trouble
    assert trouble is not None
    assert trouble.startswith("nobody reads the log; ")
    reading: list[str] = []
    reader = threading.Thread(target=lambda: reading.extend(pipe.read_until("the end")))
    reader.start()
    wait_until(lambda: pipe.queue.trouble is None)
    pipe.queue.put("the end")
    reader.join(10)
    told = [number for number, text in enumerate(reading) if text.endswith(" dropped")]
    kept = [text for text in reading if text == LINE]
    assert len(told) == 1
    assert len(kept) + int(reading[told[0]].split()[0]) == 40 + more
    assert reading[told[0] + 1 :] == ["the end"]


def test_c13_short_lines_are_bounded_by_their_number(pipe: Pipe) -> None:
    pipe.stall()
    for number in range(log_output.MAX_QUEUED_LINES + 1):
        pipe.queue.put(f"{number}")
    assert len(pipe.queue._lines) <= log_output.MAX_QUEUED_LINES
    assert pipe.queue.trouble is not None


def test_c13_a_flush_does_not_wait_for_a_reader_that_stalls(pipe: Pipe) -> None:
    pipe.stall()
    started = time.monotonic()
    assert not pipe.queue.flush(seconds=60, standstill=0.2)
    assert time.monotonic() - started < 5


def test_f8_what_nobody_read_at_the_end_is_counted_and_told(pipe: Pipe) -> None:
    pipe.stall()
    for _ in range(2 * log_output.MAX_QUEUED_BYTES // 1000):
        pipe.queue.put(LINE)
    pipe.queue.finish()
    [told] = pipe.said
    lost = int(told.removeprefix("dispatcher: the last ").split()[0])
    assert told.endswith(" lines of the log are lost: nobody reads it")
    assert lost == pipe.queue.waiting + pipe.queue.dropped
    assert 40 + 2 * log_output.MAX_QUEUED_BYTES // 1000 - lost == os.read(pipe.read_end, 65536).count(b"\n")


def test_f8_nothing_is_said_at_the_end_where_the_reader_came_back_and_it_is_told_in_the_log(pipe: Pipe) -> None:
    pipe.stall()
    for _ in range(2 * log_output.MAX_QUEUED_BYTES // 1000):
        pipe.queue.put(LINE)
    dropped = pipe.queue.dropped
    reading: list[str] = []
    reader = threading.Thread(target=lambda: reading.extend(pipe.read_until(f"{dropped} dropped")))
    reader.start()
    pipe.queue.finish()
    reader.join(10)
    assert pipe.said == []
    assert reading[-1] == f"{dropped} dropped"


def test_f8_a_log_that_nobody_reads_is_named_before_a_line_is_lost(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_output, "STALLED_SECONDS", 0.3)
    pipe.stall()
    wait_until(lambda: pipe.queue.trouble == "nobody reads the log")
    assert pipe.queue.dropped == 0
    os.set_blocking(pipe.read_end, False)
    wait_until(lambda: pipe_is_read_empty(pipe))
    assert pipe.queue.trouble is None


def pipe_is_read_empty(pipe: Pipe) -> bool:
    with contextlib.suppress(BlockingIOError):
        while True:
            os.read(pipe.read_end, 65536)
    return pipe.queue.flush(0.05)


UNREAD = """
    from dispatcher.logs import configure_logging, get_logger
    configure_logging("info", gateway_id="g", tenant_id="t")
    for number in range(500):
        get_logger().info("a.b", number=number, text="x" * 900)
"""


def test_f8_a_process_that_ends_with_an_unread_log_says_how_many_lines_went() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(UNREAD)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=base_environment(),
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.wait(30) == 0
        told = process.stderr.read()
        arrived = process.stdout.read().count("\n")
    assert told == f"dispatcher: the last {500 - arrived} lines of the log are lost: nobody reads it\n"


def test_c13_a_flush_goes_on_while_a_slow_reader_reads(pipe: Pipe) -> None:
    for _ in range(40):
        pipe.queue.put("x" * 999)
    pipe.queue.put("the end")
    reader = threading.Thread(target=lambda: pipe.read_until("the end"))
    reader.start()
    assert pipe.queue.flush(seconds=10)
    reader.join(10)


def test_c13_a_descriptor_that_somebody_made_non_blocking_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_end, False)
    for number in range(2_000):
        pipe.queue.put(f"line {number}")
    assert pipe.read_until("line 1999") == [f"line {number}" for number in range(2_000)]
    assert not os.get_blocking(pipe.write_end)


def test_c13_a_line_logged_in_the_middle_of_another_by_the_same_thread_does_not_hang(pipe: Pipe) -> None:
    """As the garbage collector may do it."""
    with pipe.queue._changed:
        pipe.queue.put("inner")
    assert pipe.read_until("inner") == ["inner"]


def test_c14_a_reader_that_is_gone_is_said_once(pipe: Pipe) -> None:
    os.close(pipe.read_end)
    for _ in range(3):
        pipe.queue.put("x")
    wait_until(lambda: pipe.said)
    assert pipe.queue.trouble == "the log cannot be written: Broken pipe"
    assert len(pipe.said) == 1


def test_c14_a_full_device_is_said_once_and_by_health() -> None:
    said: list[str] = []
    fd = os.open("/dev/full", os.O_WRONLY)
    queue = LineQueue(fd, str, said.append)
    queue.put("x")
    wait_until(lambda: queue.trouble)
    assert queue.trouble == "the log cannot be written: No space left on device"
    assert not queue.flush(0.1)
    assert said == ["dispatcher: the log cannot be written: No space left on device; trying again, the work goes on"]
    queue.close()
    os.close(fd)


DISK = """
    import json, os, resource, signal, sys
    from dispatcher.logs import configure_logging, get_logger, log_trouble
    from dispatcher.runtime.health import Health
    from tests.support.waiting import wait_until

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, most))
    configure_logging("info", gateway_id="g", tenant_id="t")
    for number in range(20):
        get_logger().info("a.b", number=number)
    wait_until(log_trouble)
    health = Health().snapshot()
    size = os.path.getsize(sys.argv[1])
    if len(sys.argv) > 2:
        sys.exit(0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    wait_until(lambda: log_trouble() is None)
    print(json.dumps([size, health["status"], health["causes"]]), file=sys.stderr)
"""


def on_a_small_disk(log: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A process whose log may not grow past 1,000 bytes until it says so: the disk is full, then it is not."""
    with log.open("ab") as stdout:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(DISK), str(log), *more],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=base_environment(),
            text=True,
            timeout=60,
            check=True,
        )


def records(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_c14_a_disk_that_was_full_leaves_one_json_object_per_line(tmp_path: Path) -> None:
    done = on_a_small_disk(tmp_path / "log")
    complaint, report = done.stderr.splitlines()
    size, status, causes = json.loads(report)
    assert complaint.startswith("dispatcher: the log cannot be written: File too large")
    assert (status, causes) == ("degraded", ["the log cannot be written: File too large"])
    assert size == 1_000  # in the middle of a line
    assert [record["number"] for record in records(tmp_path / "log")] == list(range(20))


def test_c14_half_a_line_of_an_earlier_process_is_not_glued_to_the_next(tmp_path: Path) -> None:
    on_a_small_disk(tmp_path / "log", "and end there")
    assert not (tmp_path / "log").read_text().endswith("\n")
    half = (tmp_path / "log").read_text().splitlines()[-1]
    text = "from dispatcher import logs; logs.configure_logging('info', gateway_id='', tenant_id='')"
    text += "; logs.get_logger().info('x.y')"
    with (tmp_path / "log").open("ab") as stdout:
        subprocess.run([sys.executable, "-c", text], stdout=stdout, env=base_environment(), check=True, timeout=60)
    *_, broken, last = (tmp_path / "log").read_text().splitlines()
    assert broken == half
    assert json.loads(last)["event"] == "x.y"


def test_c13_stderr_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream, os.fdopen(read_end, "rb"):
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(write_end, b"x" * SMALLEST_PIPE)
        os.set_blocking(write_end, True)
        monkeypatch.setattr(sys, "stderr", stream)
        started = time.monotonic()
        say_on_stderr("hello", seconds=0.2)
        assert time.monotonic() - started < 5
        monkeypatch.undo()


def test_what_is_said_on_stderr_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    say_on_stderr("hel\ud800lo")
    assert capfd.readouterr().err == "hel\\ud800lo\n"
