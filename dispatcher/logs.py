"""One JSON object per line on stdout, from our code and from every library, with nothing secret in it.

Keys come in this order: ts level daemon gateway_id tenant_id event msg, then the facts. Text from outside is
escaped to ASCII and bounded, so it can neither end a line nor forge one; secrets are taken out of every field
before anything is cut. `msg` is for people: control characters in it are shown as escapes, facts keep what they
are. A line is at most `MAX_LINE` bytes, its end included; no thread waits until it is written.
"""

from __future__ import annotations

import atexit
import bisect
import json
import logging
import math
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from datetime import date, datetime
from typing import Any, Final, TextIO, cast
from urllib.parse import quote

import structlog
from structlog.typing import FilteringBoundLogger

from dispatcher import events
from dispatcher.clock import SYSTEM_CLOCK, rfc3339_ms
from dispatcher.log_output import LineQueue, say_on_stderr
from dispatcher.text import printable

DAEMON: Final = "inbox_dispatcher"
RESERVED: Final = ("ts", "level", "daemon", "gateway_id", "tenant_id", "event", "msg")
REDACTED: Final = "***"

# A secret shorter than this is a word: taking it out everywhere would only make the log unreadable.
SHORTEST_SECRET: Final = 6
MAX_TEXT: Final = 4_000
MAX_TRACEBACK: Final = 12_000
MAX_ENTRIES: Final = 50
MAX_DEPTH: Final = 5
# Docker splits what is longer than 16,384 bytes into several lines.
MAX_LINE: Final = 15_900
# What one fact may take of a line that is too long, in bytes as written: the first that makes it fit.
_SHARES: Final = (4_000, 2_000, 1_000, 500, 250, 120)
# A number with more bits is written as text, which other readers of JSON can hold.
MAX_BITS: Final = 1_024

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
# These print whole frames, and a frame holds whole rows: their text is kept up to the first quote or brace.
_FRAME_LOGGERS: Final = ("realtime", "websockets")
_FRAME_START: Final = re.compile(r"""[{'"]""")

_SECRET_KEYS: Final = frozenset(
    {
        *("apikey", "api_key", "authorization", "proxy_authorization", "cookie", "set_cookie"),
        *("password", "passwd", "secret", "access_token", "refresh_token"),
        *("service_role_key", "supabase_service_role_key", "lease_token", "claim_token"),
    }
)
_VALUE: Final = r"""[^\s'"&,;)\]}\\]+"""
_PATTERNS: Final = (
    # a JWT, whole or cut off in the middle
    (re.compile(r"eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*){0,2}"), REDACTED),
    (re.compile(r"sb_secret_[A-Za-z0-9_-]+"), REDACTED),
    (re.compile(rf"(?i)\b(bearer|basic)\s+{_VALUE}"), rf"\1 {REDACTED}"),
    # key=value, 'key': 'value', (b'key', b'value'): URLs, JSON, dicts, header lists
    (
        re.compile(
            r"(?i)\b(authorization|apikey|api[_-]key|access[_-]token|refresh[_-]token|password|service[_-]role[_-]key)"
            rf"""(\\?['"]?\s*[=:,]\s*b?\\?['"]?)(?!bearer\b|basic\b){_VALUE}"""
        ),
        rf"\1\2{REDACTED}",
    ),
    # user:password@ of a URL
    (re.compile(r"(://[^/\s:@]*:)[^@\s/]+@"), rf"\1{REDACTED}@"),
)
# Lower-case words without one of which none of the patterns can match: looking for them is a hundred times
# cheaper, and nearly every text has none.
_TRIGGERS: Final = (
    *("eyj", "sb_secret_", "bearer", "basic", "authorization", "apikey", "api_key", "api-key", "token"),
    *("password", "service_role", "service-role", "@"),
)
_UNFIT: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class Redactor:
    """Takes known and recognisable secrets out of text, and makes any value fit for a log line."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        forms = {form for secret in secrets for form in _written_forms(secret)}
        self._known = tuple(sorted(forms, key=len, reverse=True))
        self._any_known = re.compile("|".join(map(re.escape, self._known)))

    def text(self, text: str, limit: int = MAX_TEXT) -> str:
        """`text` without secrets, control characters or lone surrogates, at most `limit` characters."""
        # Known secrets go first, so that no pattern leaves half of one behind.
        clean = self._any_known.sub(REDACTED, text) if any(form in text for form in self._known) else text
        lowered = clean.lower()
        if any(trigger in lowered for trigger in _TRIGGERS):
            clean = _without_recognised(clean)
        if not clean.isprintable():
            clean = _UNFIT.sub("\ufffd", clean)
        return clean if len(clean) <= limit else f"{clean[:limit]}… ({len(clean) - limit} more characters)"

    def value(self, value: object, depth: int = 0) -> Any:
        """`value` as what JSON can hold, redacted at every depth."""
        if isinstance(value, str):
            return self.text(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value) if value.bit_length() <= MAX_BITS else f"a number of {value.bit_length()} bits"
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            return self._container_or_name(value, depth)
        return self.text(_as_text(value))

    def _container_or_name(self, value: Any, depth: int) -> Any:
        try:
            return self._container(value, depth)
        except Exception:  # noqa: BLE001 - another thread may change it while it is read
            return f"<{type(value).__name__}>"

    def _container(self, value: Any, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return "…"
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        kept = [self.value(entry, depth + 1) for entry in list(value)[:MAX_ENTRIES]]
        return kept if len(value) <= MAX_ENTRIES else [*kept, f"… ({len(value) - MAX_ENTRIES} more)"]

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        entries = list(value.items())[:MAX_ENTRIES]
        return {
            self.text(_as_text(key)): REDACTED if _is_secret_key(key) else self.value(entry, depth + 1)
            for key, entry in entries
        }


def _without_recognised(text: str) -> str:
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _written_forms(secret: str) -> Iterable[str]:
    """The ways a secret is written inside other text: plain, in a URL, in JSON, in a Python repr."""
    if len(secret) < SHORTEST_SECRET:
        return ()
    return {secret, quote(secret, safe=""), quote(secret), json.dumps(secret)[1:-1], repr(secret)[1:-1]}


def _is_secret_key(key: object) -> bool:
    return _as_text(key).lower().replace("-", "_") in _SECRET_KEYS


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, datetime):
        return rfc3339_ms(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, date):
        return value.isoformat()
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a broken __str__ must not cost the log line
        return f"<{type(value).__name__}>"


class LineRenderer:
    """Turns level, event, text and facts into one line of JSON."""

    def __init__(
        self,
        gateway_id: str,
        tenant_id: str,
        redactor: Redactor,
        stamp: Callable[[], datetime] = SYSTEM_CLOCK.now,
    ) -> None:
        self.redactor = redactor
        self._stamp = stamp
        self._gateway_id = redactor.text(gateway_id, 200)
        self._tenant_id = redactor.text(tenant_id, 200)

    def line(self, level: str, event: str, msg: object, facts: Mapping[str, Any]) -> str:
        """One JSON object in ASCII, without a line end."""
        record = {
            "ts": rfc3339_ms(self._stamp()),
            "level": level,
            "daemon": DAEMON,
            "gateway_id": self._gateway_id,
            "tenant_id": self._tenant_id,
            "event": self.redactor.text(event, 200),
            "msg": printable(self.redactor.text(_as_text(msg))),
        }
        return _bounded_line(record, self._facts(facts))

    def _facts(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        shaped: dict[str, Any] = {}
        for key, value in facts.items():
            name = f"fact_{key}" if key in RESERVED else self.redactor.text(key, 100)
            if name in {"traceback", "error"} and isinstance(value, str):
                shaped[name] = self.redactor.text(value, MAX_TRACEBACK)
            else:
                shaped[name] = REDACTED if _is_secret_key(key) else self.redactor.value(value)
        return shaped


def _bounded_line(record: dict[str, Any], facts: dict[str, Any]) -> str:
    """One line of at most MAX_LINE bytes with its end; what is longer is cut fact by fact, the longest first."""
    line = json.dumps({**record, **facts})
    shares = iter(_SHARES)
    while len(line) >= MAX_LINE and (share := next(shares, 0)):
        record = {**record, "msg": _cut(record["msg"], share)}
        facts = {name: _cut(value, share) for name, value in facts.items()}
        line = json.dumps({**record, **facts})
    return line if len(line) < MAX_LINE else _with_first_facts(record, facts)


def _cut(value: Any, share: int) -> Any:
    """The value if it takes at most `share` bytes of a line; else the beginning of its text, and a mark."""
    written = json.dumps(value)
    if len(written) <= share:
        return value
    text = value if isinstance(value, str) else written
    kept = bisect.bisect_right(range(len(text) + 1), share, key=lambda length: len(json.dumps(text[:length]))) - 1
    return f"{text[:kept]}… ({len(text) - kept} more characters)"


def _with_first_facts(record: dict[str, Any], facts: dict[str, Any]) -> str:
    """For a line of very many facts: as many as there is room for, in their order, and how many are left out."""
    room = MAX_LINE - len(json.dumps({**record, "facts_left_out": len(facts)})) - 1
    kept: dict[str, Any] = {}
    for name, value in facts.items():
        room -= len(json.dumps({name: value}))
        if room < 0:
            break
        kept[name] = value
    return json.dumps({**record, **kept, "facts_left_out": len(facts) - len(kept)})


class LineWriter:
    """Writes whole lines to a stream, one at a time, and waits for each: for commands, whose reader is at the console.

    A log that cannot be written never stops the work.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def msg(self, line: str) -> None:
        stream = self._stream if self._stream is not None else sys.stdout
        with self._lock:
            try:
                stream.write(line + "\n")
                stream.flush()
            except (OSError, ValueError, AttributeError):  # full, or closed from the start: nowhere left to say so
                return

    debug = info = warning = error = critical = exception = log = msg


class QueuedWriter:
    """Hands lines to the queue of a descriptor and returns at once: for the daemon, which nobody may hold up."""

    def __init__(self, queue: LineQueue) -> None:
        self.queue = queue

    def msg(self, line: str) -> None:
        self.queue.put(line)

    debug = info = warning = error = critical = exception = log = msg


class _Sink:
    """What is configured now; replaced as a whole by `configure_logging`."""

    def __init__(self, renderer: LineRenderer, writer: LineWriter | QueuedWriter) -> None:
        self.renderer = renderer
        self.writer = writer


_sink = _Sink(LineRenderer("", "", Redactor()), LineWriter(None))


def configure_logging(
    level: str,
    *,
    gateway_id: str,
    tenant_id: str,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Sends everything this process logs through one renderer.

    `level` is debug, info, warning or error. Libraries log from warning up unless `level` is debug.
    `secrets` are values to take out wherever they turn up. Lines go to `stream`, each caller waiting for its own;
    without one they go to stdout through a bounded queue, and nobody waits.
    May be called again, for example once the gateway's id is known.
    """
    global _sink  # noqa: PLW0603 - the process has one log
    writer = LineWriter(stream) if stream is not None else _stdout_writer(_sink.writer)
    _sink = _Sink(LineRenderer(gateway_id, tenant_id, Redactor(secrets)), writer)
    _configure_structlog(_LEVELS[level])
    _configure_stdlib(_LEVELS[level])
    sys.excepthook = _log_crash
    threading.excepthook = _log_thread_crash
    sys.unraisablehook = _log_unraisable


def _stdout_writer(before: LineWriter | QueuedWriter) -> LineWriter | QueuedWriter:
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # closed from the start, or no file, as in tests
        return LineWriter(None)
    if isinstance(before, QueuedWriter):
        if before.queue.fd == fd:
            return before
        before.queue.close()
    queue = LineQueue(fd, _dropped_line, say_on_stderr)
    atexit.register(queue.finish)
    return QueuedWriter(queue)


def _dropped_line(count: int) -> str:
    text = f"{count} lines before this one are lost: nobody read the log, or it could not be written"
    return _sink.renderer.line("warning", events.LOG_DROPPED, text, {"lines": count})


def log_trouble() -> str | None:
    """Why lines of this process do not arrive where they should, in words; None when they do."""
    return _sink.writer.queue.trouble if isinstance(_sink.writer, QueuedWriter) else None


def log_lines() -> tuple[int, int]:
    """How many lines of this process wait to be written, and how many were dropped since its start."""
    if not isinstance(_sink.writer, QueuedWriter):
        return 0, 0
    return _sink.writer.queue.waiting, _sink.writer.queue.dropped


def get_logger(name: str = "") -> FilteringBoundLogger:
    """A logger: `log.info("wake.started", msg="Woke agent x", agent="x")`.

    The first argument is the dotted event name (`dispatcher.events`), `msg` the sentence for people, every
    other keyword a fact. `exc_info=True` or `log.exception` add error, error_type and traceback.
    """
    return cast("FilteringBoundLogger", structlog.get_logger(name))


def redact(value: str) -> str:
    """`value` without secrets, for what leaves by other ways than the log (health, rows, notifications)."""
    return _sink.renderer.redactor.text(value)


def _configure_structlog(level: int) -> None:
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_names: _sink.writer,
        cache_logger_on_first_use=False,
    )


def _render(_logger: object, method: str, event_dict: MutableMapping[str, Any]) -> str:
    level = {"exception": "error", "warn": "warning", "fatal": "critical"}.get(method, method)
    event = event_dict.get("event", "")
    try:
        return _rendered(level, event_dict)
    except Exception as error:  # noqa: BLE001 - no value may cost the caller more than its own facts
        return _sink.renderer.line(level, _as_text(event), f"unreadable facts: {type(error).__name__}", {})


def _rendered(level: str, event_dict: MutableMapping[str, Any]) -> str:
    event = _as_text(event_dict.pop("event", ""))
    msg = event_dict.pop("msg", event)
    error = _exception_of(event_dict.pop("exc_info", None))
    event_dict.pop("stack_info", None)
    facts = {**event_dict, **_error_facts(error)}
    return _sink.renderer.line(level, event, msg, facts)


def _exception_of(exc_info: object) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple) and len(exc_info) == 3:
        return cast("BaseException | None", exc_info[1])
    return sys.exception() if exc_info else None


def _error_facts(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {}
    return {
        "error_type": type(error).__name__,
        "error": _as_text(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


# ------------------------------------------------------------------------------------------ libraries


class _LibraryHandler(logging.Handler):
    """Renders what libraries log through `logging` like our own records."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _sink.writer.msg(_library_line(record))
        except Exception:  # noqa: BLE001 - a record with wrong arguments is the library's fault, not ours to die of
            _sink.writer.msg(_sink.renderer.line("warning", events.LIBRARY, "unreadable log record", {}))


def _library_line(record: logging.LogRecord) -> str:
    facts = {"logger": record.name, **_error_facts(_exception_of(record.exc_info))}
    text = record.getMessage()
    if record.name.split(".")[0] in _FRAME_LOGGERS:
        text = _without_frames(text)
        facts = {name: _without_frames(value) if name == "error" else value for name, value in facts.items()}
        facts.pop("traceback", None)  # its last line repeats the error's text
    return _sink.renderer.line(record.levelname.lower(), events.LIBRARY, text, facts)


def _without_frames(text: str) -> str:
    start = _FRAME_START.search(text)
    if start is None:
        return text
    return f"{text[: start.start()].rstrip()} ({len(text) - start.start()} characters left out)"


def _configure_stdlib(level: int) -> None:
    logging.raiseExceptions = False
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
    logging.root.handlers = [_LibraryHandler()]
    logging.root.setLevel(logging.DEBUG if level == logging.DEBUG else max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


def _log_crash(kind: type[BaseException], error: BaseException, _trace: object) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    facts = _error_facts(error)
    _sink.writer.msg(_sink.renderer.line("critical", events.DAEMON_CRASHED, "Unhandled error", facts))


def _log_thread_crash(crash: threading.ExceptHookArgs) -> None:
    if crash.exc_value is None or isinstance(crash.exc_value, SystemExit):
        return
    facts = {"thread": crash.thread.name if crash.thread else "", **_error_facts(crash.exc_value)}
    _sink.writer.msg(_sink.renderer.line("critical", events.DAEMON_CRASHED, "Unhandled error in a thread", facts))


def _log_unraisable(found: sys.UnraisableHookArgs) -> None:
    """An error where Python has nobody to give it to, such as a destructor; Python itself would print it."""
    facts = {"where": _as_text(found.err_msg or ""), **_error_facts(found.exc_value)}
    _sink.writer.msg(_sink.renderer.line("error", events.LIBRARY, "Error that nobody could catch", facts))
