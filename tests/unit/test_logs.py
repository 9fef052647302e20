from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher import logs
from dispatcher.logs import LineRenderer, Redactor, configure_logging, get_logger

SECRET = "KEY-123"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJyb2xlIjoic2VydmljZV9yb2xlIn0.c2lnbmF0dXJlLW9mLXRoZS1rZXk"
RESERVED = ["ts", "level", "daemon", "gateway_id", "tenant_id", "event", "msg"]

json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


class Log:
    def __init__(self, level: str = "info", **more: Any) -> None:
        self.stream = io.StringIO()
        configure_logging(level, gateway_id="gw", tenant_id="t-1", stream=self.stream, **more)

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = self.text.splitlines()
        assert self.text.count("\n") == len(lines)
        return [json.loads(line) for line in lines]


def test_a_line_has_its_fields_in_order() -> None:
    log = Log()
    get_logger("x").info("wake.started", msg="Woke ada", agent="ada", wake_id=UUID(int=1))
    (record,) = log.records
    assert list(record) == [*RESERVED, "agent", "wake_id"]
    assert record["daemon"] == "inbox_dispatcher"
    assert (record["level"], record["gateway_id"], record["tenant_id"]) == ("info", "gw", "t-1")
    assert record["ts"].endswith("Z")
    assert len(record["ts"]) == len("2026-11-30T13:45:00.123Z")


def test_the_time_is_utc_with_milliseconds() -> None:
    moment = datetime(2026, 11, 30, 13, 45, 0, 123_999, tzinfo=UTC)
    line = LineRenderer("g", "t", Redactor(), lambda: moment).line("info", "a.b", "m", {})
    assert json.loads(line)["ts"] == "2026-11-30T13:45:00.123Z"


def test_msg_defaults_to_the_event_and_reserved_facts_are_renamed() -> None:
    log = Log()
    get_logger().warning("a.b", level="forged", ts=1, daemon="other")
    (record,) = log.records
    assert record["msg"] == "a.b"
    assert record["level"] == "warning"
    assert (record["fact_level"], record["fact_ts"], record["fact_daemon"]) == ("forged", 1, "other")


def test_levels_filter_ours_and_libraries_start_at_warning() -> None:
    log = Log("info")
    get_logger().debug("a.debug")
    get_logger().info("a.info")
    logging.getLogger("httpx").info("GET /")
    logging.getLogger("httpx").warning("slow")
    assert [record["event"] for record in log.records] == ["a.info", "library.log"]


def test_libraries_stay_at_warning_even_when_we_log_errors_only() -> None:
    log = Log("error")
    get_logger().warning("a.warning")
    logging.getLogger("httpx").warning("slow")
    logging.getLogger("httpx").error("broken")
    assert [record["msg"] for record in log.records] == ["broken"]


def test_handlers_that_libraries_put_up_are_taken_down() -> None:
    library = logging.getLogger("some.library")
    library.addHandler(logging.StreamHandler(own := io.StringIO()))
    library.propagate = False
    log = Log()
    library.warning("hello")
    assert own.getvalue() == ""
    assert [record["logger"] for record in log.records] == ["some.library"]


@pytest.mark.parametrize("text", ['x\n{"level":"error"}', "a\x00b", "\ud800", "\u2028\x85\r\n", "\x1b[31m"])
def test_field_failure_69_text_from_outside_forges_no_line(text: str) -> None:
    log = Log()
    get_logger().info("wake.started", msg=text, agent=text, nested={"k": [text]})
    logging.getLogger("library").warning("%s", text)
    assert [record["level"] for record in log.records] == ["info", "warning"]
    assert log.text.isascii()


def test_field_failure_69_no_secret_from_any_library_at_debug() -> None:
    log = Log("debug", secrets=[SECRET])
    logging.getLogger("httpcore.http11").debug(
        "send_request_headers.started request=%r",
        [(b"apikey", SECRET.encode()), (b"Authorization", b"Bearer zz")],
    )
    logging.getLogger("hpack.hpack").debug("Encoding %r", {"authorization": f"Bearer {JWT}"})
    logging.getLogger("httpx").debug("HTTP Request: GET https://x.co/rest/v1/t?apikey=plainkey&a=1")
    logging.getLogger("websockets.client").debug("> GET /socket/websocket?apikey=%s HTTP/1.1", JWT)
    try:
        raise ValueError(f"refused {SECRET}")
    except ValueError:
        get_logger().exception("a.b", msg="It failed")
        logging.getLogger("library").exception("It failed")
    assert SECRET not in log.text
    assert "plainkey" not in log.text
    assert "Bearer zz" not in log.text
    assert "eyJ" not in log.text
    assert log.records[-1]["error"] == "refused ***"
    assert "ValueError" in log.records[-1]["traceback"]


@pytest.mark.parametrize(
    ("logger", "text"),
    [
        ("realtime._async.client", 'receive: \'{"payload": {"summary": "private words"}}\''),
        ("realtime._async.client", "Unrecognized message format 'private words'"),
        ("realtime._async.channel", "channel t error: {'private words': 1}"),
        ("websockets.client", '< TEXT \'{"summary": "private words\' [80 bytes]'),
    ],
)
def test_frames_with_rows_never_reach_the_log(logger: str, text: str) -> None:
    log = Log("debug")
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger(logger).exception("%s", text)
    assert "private" not in log.text
    assert "characters left out" in log.records[0]["msg"]


@pytest.mark.parametrize(
    "text",
    [
        JWT,
        JWT[:40],
        "sb_secret_AbCd1234efgh",
        "Authorization: Bearer abc.def",
        "{'Authorization': 'Bearer abc.def'}",
        "[(b'apikey', b'abc.def')]",
        "https://h/rest?select=*&apikey=abc.def",
        '{"apikey": "abc.def"}',
        '"{\\"apikey\\": \\"abc.def\\"}"',
        "access_token=abc.def",
        "postgresql://user:abc.def@host/db",
        "password = abc.def",
    ],
)
def test_recognisable_secrets_are_taken_out(text: str) -> None:
    clean = Redactor().text(f"before {text} after")
    assert not any(part in clean for part in ("abc.def", "eyJ", "AbCd1234"))
    assert clean.startswith("before ")
    assert clean.endswith(" after")


@pytest.mark.parametrize("key", ["apikey", "Authorization", "api-key", "lease_token", "password"])
def test_values_under_secret_names_are_taken_out(key: str) -> None:
    assert Redactor().value({"headers": {key: "abc"}}) == {"headers": {key: "***"}}


@pytest.mark.parametrize("text", ["topic gateway:1234", "basic", "Woke ada/coder", "the key is here", "eyJ"])
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert Redactor([SECRET]).text(text) == text


def test_a_cut_never_uncovers_half_a_secret() -> None:
    text = "x" * (logs.MAX_TEXT - 3) + SECRET
    assert "KEY" not in Redactor([SECRET]).text(text)


def test_values_of_any_kind_become_json() -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError

    value = Redactor().value(
        {
            "path": PurePosixPath("/a"),
            "when": datetime(2026, 1, 1, tzinfo=UTC),
            "nan": float("nan"),
            5: Broken(),
        }
    )
    assert value == {"path": "/a", "when": "2026-01-01T00:00:00.000Z", "nan": "nan", "5": "<Broken>"}
    endless: list[Any] = []
    endless.append(endless)
    assert "…" in json.dumps(Redactor().value(endless), ensure_ascii=False)


def bounded(line: str) -> dict[str, Any]:
    """The record of a line that Docker does not split."""
    assert len(line.encode()) < 16_000
    record: dict[str, Any] = json.loads(line)
    assert list(record)[: len(RESERVED)] == RESERVED
    return record


def test_c15_a_long_summary_of_emoji_is_cut_and_marked_and_the_ids_stay() -> None:
    summary = "\U0001f680" * 2_000
    ids = {"agent": "ada", "wake_id": str(UUID(int=1)), "item_id": str(UUID(int=2)), "duration_s": 1.5}
    record = bounded(LineRenderer("gw", "t", Redactor()).line("info", "wake.started", summary, {"s": summary, **ids}))
    assert ids.items() <= record.items()
    assert record["msg"].startswith("\U0001f680" * 100)
    assert re.search(r"… \(\d+ more characters\)$", record["msg"])
    assert record["event"] == "wake.started"


def test_c15_a_line_of_very_many_facts_says_how_many_are_left_out() -> None:
    facts: dict[str, Any] = {"agent": "ada", **{f"fact {number}": "x" * 90 for number in range(500)}}
    record = bounded(LineRenderer("gw", "t", Redactor()).line("info", "a.b", "m", facts))
    assert record["agent"] == "ada"
    assert len(record) - len(RESERVED) - 1 + record["facts_left_out"] == 501


@pytest.mark.parametrize("number", [10**5_000, -(10**5_000), 2**2_000], ids=["long", "negative", "a little"])
def test_c15_a_number_without_end_is_named(number: int) -> None:
    log = Log()
    get_logger().info("a.b", msg=number, number=number, deep=[number])
    assert "bits" in log.records[0]["number"]


def test_facts_that_cannot_be_read_cost_only_themselves() -> None:
    class Shifting(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    log = Log()
    get_logger().info("a.b", msg="m", odd=Shifting(), good=1)
    assert (log.records[0]["odd"], log.records[0]["good"]) == ("<Shifting>", 1)


wild_text = st.text(st.characters(exclude_categories=())) | st.text('\U0001f680\x00\x1f\ud800\u2028"\\', min_size=200)
wild = st.recursive(
    st.none() | st.integers() | st.floats() | wild_text | st.integers(2**900, 2**3_000) | st.just(float("nan")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(wild_text, inner, max_size=4),
    max_leaves=20,
)


@given(wild_text, wild_text, st.dictionaries(wild_text, wild, max_size=20), st.integers(1, 40))
def test_c15_every_line_is_one_bounded_json_object(event: str, msg: str, facts: dict[str, Any], times: int) -> None:
    line = LineRenderer("g" * 5_000, "t", Redactor()).line(
        "info", event * times, msg * times, {**facts, "m": msg * times}
    )
    assert len(line.splitlines()) == 1
    bounded(line)


def test_lines_are_bounded() -> None:
    log = Log()
    get_logger().info("a.b", msg="m" * 10**6, rows=[{"text": "x" * 10**5}] * 100, more=list(range(10**5)))
    (record,) = log.records
    assert len(log.text) <= logs.MAX_LINE + 1
    assert record["event"] == "a.b"


def test_an_unhandled_error_in_a_thread_is_a_line() -> None:
    log = Log(secrets=[SECRET])

    def fail() -> None:
        raise RuntimeError(SECRET)

    thread = threading.Thread(target=fail, name="sweep")
    thread.start()
    thread.join()
    (record,) = log.records
    assert (record["event"], record["level"], record["thread"]) == ("daemon.crashed", "critical", "sweep")
    assert SECRET not in log.text


def test_an_unhandled_error_in_the_main_thread_is_a_line() -> None:
    log = Log()
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert [record["error_type"] for record in log.records] == ["ValueError"]


def test_a_library_record_with_wrong_arguments_is_still_a_line() -> None:
    log = Log()
    logging.getLogger("library").warning("%d", "x")
    assert [record["msg"] for record in log.records] == ["unreadable log record"]


def test_a_closed_stdout_does_not_stop_the_work() -> None:
    log = Log()
    log.stream.close()
    get_logger().info("a.b")
    logging.getLogger("library").warning("x")


def test_threads_do_not_mix_their_lines() -> None:
    class Shredder(io.StringIO):
        """Loses whatever is written while another write is under way."""

        busy = threading.Lock()

        def write(self, text: str) -> int:
            if not self.busy.acquire(blocking=False):
                return 0
            try:
                return super().write(text)
            finally:
                self.busy.release()

    stream = Shredder()
    configure_logging("info", gateway_id="g", tenant_id="t", stream=stream)
    threads = [
        threading.Thread(target=lambda: [get_logger().info("a.b", number=n) for n in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in stream.getvalue().splitlines()]) == 800


@given(
    secret=st.text(min_size=logs.SHORTEST_SECRET, max_size=40).filter(lambda text: "*" not in text),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
)
def test_a_known_secret_never_appears(secret: str, before: str, after: str) -> None:
    renderer = LineRenderer("gw", "t", Redactor([secret]))
    text = before + secret + after
    facts = {"plain": text, "deep": [{"k": (text, text.encode("utf-8", "replace"))}], "repr": repr(text)}
    line = renderer.line("info", "a.b", text, {**facts, "error": text, "json": json.dumps(text)})
    record = json.loads(line)
    values = [record["msg"], record["plain"], record["error"], record["repr"], record["json"]]
    values += record["deep"][0]["k"][:1]
    # What was put between fixed words may form them again; what holds the secret itself may not be there.
    assert not any(secret in value for value in values)


@given(st.text(), st.text(), st.dictionaries(st.text(), json_like, max_size=5))
def test_every_line_is_one_json_object(event: str, msg: str, facts: dict[str, Any]) -> None:
    line = LineRenderer("gw", "t", Redactor([SECRET])).line("info", event, msg, facts)
    assert line.isascii()
    assert len(line.splitlines()) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(line, parse_constant=refuse)
    assert list(record)[: len(RESERVED)] == RESERVED
