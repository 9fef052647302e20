"""What other sessions hold and our calls wait for: said once in the log, shown in health for as long as it lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from dispatcher import events
from dispatcher.errors import DispatcherError, RestError, is_held
from dispatcher.logs import get_logger
from dispatcher.runtime.health import Health

log = get_logger(__name__)

CAUSE: Final = "held"
ASK_AGAIN_SECONDS: Final = 5.0
# What met a held row and was not called again since is not known to wait any more.
FORGOTTEN_SECONDS: Final = 5.0
HIDDEN: Final = "which row or table it is does not show"


class Rpc(Protocol):
    """The part of `RestClient` that calls functions."""

    def rpc(
        self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None
    ) -> Any: ...


class HolderWatch:
    """Told of every call that met what somebody holds, and of every one that went through. Thread-safe.

    `ask` says what is held, and by whom, in one text; empty when nothing shows. Its errors count as that.
    """

    def __init__(self, health: Health, ask: Callable[[], str], now: Callable[[], float] = time.monotonic) -> None:
        self._health = health
        self._ask = ask
        self._now = now
        self._lock = threading.Lock()
        # By call: when it last met something.
        self._waiting: dict[str, float] = {}
        self._asked_at = float("-inf")
        self._since = 0.0
        self._has_told = False

    def met(self, call: str, held: str | None) -> None:
        """A call did nothing, because `held` is (None: the answer does not say)."""
        with self._lock:
            is_news = not self._waiting
            self._since = self._now() if is_news else self._since
            self._waiting[call] = self._now()
            asks = held is None and (is_news or self._now() - self._asked_at > ASK_AGAIN_SECONDS)
            self._asked_at = self._now() if asks or held else self._asked_at
        if held or asks:
            self._tell(call, held or self._asked())

    def _asked(self) -> str:
        try:
            return self._ask() or HIDDEN
        except DispatcherError as error:
            return f"{HIDDEN} ({error})"

    def _tell(self, call: str, held: str) -> None:
        """Unless it is over: to ask takes a while, and what is told then would stay for ever."""
        text = f"{call} waits for another session: {held}"
        with self._lock:
            if call not in self._waiting:
                return
            self._health.add_cause(CAUSE, text)
            is_news, self._has_told = not self._has_told, True
        if is_news:
            log.warning(events.LOCK_HELD, msg=text, call=call, held=held)

    def went_through(self, call: str) -> None:
        """A call was answered; the last one that waited ends the outage."""
        if not self._waiting:
            return
        with self._lock:
            oldest = self._now() - FORGOTTEN_SECONDS
            before = self._waiting
            self._waiting = {name: at for name, at in before.items() if name != call and at > oldest}
            is_over = self._has_told and not self._waiting
            self._has_told = self._has_told and not is_over
            seconds = self._now() - self._since
            if is_over:
                self._health.clear_cause(CAUSE)
        if is_over:
            log.info(events.LOCK_RELEASED, msg=f"Nobody waits for another session any more, after {seconds:.1f} s")


class WatchedRest:
    """`RestClient.rpc`, with the watch told what each call met."""

    def __init__(self, rest: Rpc, watch: HolderWatch) -> None:
        self._rest = rest
        self._watch = watch

    def rpc(self, function: str, params: dict[str, Any], *, retry: bool = False, timeout: float | None = None) -> Any:
        """As `RestClient.rpc`."""
        phase = params.get("p_phase")
        call = f"{function} ({phase})" if phase else function
        try:
            answer = self._rest.rpc(function, params, retry=retry, timeout=timeout)
        except RestError as error:
            if is_held(error):
                self._watch.met(call, None)
            raise
        if (held := held_in(answer)) is not None:
            self._watch.met(call, held)
        else:
            self._watch.went_through(call)
        return answer


def held_in(answer: object) -> str | None:
    """What an answer says that another session holds; None when it says nothing of that."""
    rows = answer if isinstance(answer, list) else [answer]
    named = (row.get("held") for row in rows[:1] if isinstance(row, Mapping))
    return next((held for held in named if isinstance(held, str)), None)
