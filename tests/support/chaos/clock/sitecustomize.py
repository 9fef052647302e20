"""Moves the wall clock of one Python process by the seconds in the file that CHAOS_CLOCK_FILE names.

Covers what Python code asks for: `time.time`, `time.time_ns`, `time.localtime` and `time.gmtime` without an argument,
`time.strftime` and `time.ctime` likewise, `datetime.now`, `datetime.utcnow`, `datetime.today`, `date.today`. Does not
cover C code (TLS, psutil's boot time), other processes, or the monotonic clocks, which a moved host clock leaves alone
too.
"""

import datetime as _datetime  # noqa: ICN001 - everybody after us sees this module; its own names stay hidden
import os
import time as _time

_FILE = os.environ.get("CHAOS_CLOCK_FILE", "")
_real_time = _time.time
_real_time_ns = _time.time_ns


def _offset() -> float:
    try:
        with open(_FILE, encoding="ascii") as file:  # noqa: PTH123 - pathlib would be imported by this alone
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


def _moved_time() -> float:
    return _real_time() + _offset()


def _moved_time_ns() -> int:
    return _real_time_ns() + int(_offset() * 1_000_000_000)


def _at_moved_time(function):  # type: ignore[no-untyped-def]  # localtime, gmtime, ctime have one shape
    return lambda seconds=None: function(_moved_time() if seconds is None else seconds)


def _moved_strftime(form, at=None, _real=_time.strftime):  # type: ignore[no-untyped-def]  # as time.strftime
    return _real(form, _time.localtime() if at is None else at)


class _Date(_datetime.date):
    @classmethod
    def today(cls):  # type: ignore[no-untyped-def]  # as date.today
        return cls.fromtimestamp(_moved_time())


class _DateTime(_datetime.datetime):
    @classmethod
    def now(cls, tz=None):  # type: ignore[no-untyped-def]  # as datetime.now
        return cls.fromtimestamp(_moved_time(), tz)

    @classmethod
    def utcnow(cls):  # type: ignore[no-untyped-def]  # as datetime.utcnow
        return cls.fromtimestamp(_moved_time(), _datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls):  # type: ignore[no-untyped-def]  # as datetime.today
        return cls.fromtimestamp(_moved_time())


if _FILE:
    _time.time = _moved_time
    _time.time_ns = _moved_time_ns
    _time.localtime = _at_moved_time(_time.localtime)
    _time.gmtime = _at_moved_time(_time.gmtime)
    _time.ctime = _at_moved_time(_time.ctime)
    _time.strftime = _moved_strftime
    _datetime.date = _Date  # type: ignore[misc]  # replacing it is the purpose
    _datetime.datetime = _DateTime  # type: ignore[misc]  # the same
