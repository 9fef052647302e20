"""Tells the database what became of wakes, and takes the next agents off the waitlist in the same call.

One thread. Whatever waits goes out in one call: alone at once, together under load. Nothing is dropped while the
database is away; at a stop what is left is tried until the time is up.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from dispatcher import events
from dispatcher.errors import DispatcherError, RestError
from dispatcher.inbox.book import WakeBook
from dispatcher.inbox.model import Ended, Report, ReportAnswer, ReportResult, Verdict
from dispatcher.inbox.store import InboxStore
from dispatcher.logs import get_logger
from dispatcher.runtime.backoff import Backoff, exponential, jittered
from dispatcher.runtime.health import LoopHealth
from dispatcher.runtime.repeats import Repeats
from dispatcher.runtime.service import Service

log = get_logger(__name__)

MAX_REPORTS_PER_CALL: Final = 100
FLUSH_SECONDS: Final = 6.0
# A report the database answers with an error rests this long, doubled each time; at a stop it is tried this often.
REFUSED_SECONDS: Final = 0.5
# Another session holds a row of the agent: mostly for milliseconds.
BUSY_SECONDS: Final = 0.05
# So often is nobody told that it is still held.
QUIET_TRIES: Final = 6
LONGEST_REST: Final = 60.0
LONGEST_OUTAGE_REST: Final = 5.0
TRIED_AGAIN: Final = ("error", "busy")


class Reporter(Service):
    """`put` queues a report; `on_verdicts` gets the claims that came back, `on_result` each report's result."""

    def __init__(
        self,
        store: InboxStore,
        book: WakeBook,
        claim_limit: Callable[[], int],
        *,
        on_verdicts: Callable[[list[Verdict]], None],
        on_result: Callable[[ReportResult], None],
        health: LoopHealth,
    ) -> None:
        super().__init__("reporter")
        self._store = store
        self._book = book
        self._claim_limit = claim_limit
        self._on_verdicts = on_verdicts
        self._on_result = on_result
        self._health = health
        self._backoff = Backoff(base=0.5, cap=LONGEST_REST)
        self._repeats = Repeats()
        self._changed = threading.Condition()
        self._reports: list[Report] = []
        # By due time on the monotonic clock: what was refused while the calls as such work.
        self._resting: list[tuple[float, Report]] = []
        self._refusals: Counter[Report] = Counter()
        self._claiming = True
        self._owes_claims = False

    def put(self, report: Report) -> None:
        """Queues a report; it goes out with whatever else waits, but never before an earlier one of its wake."""
        with self._changed:
            if any(resting.wake_id == report.wake_id for _due, resting in self._resting):
                self._put_aside(report, 0.0)
            else:
                self._reports.append(report)
            self._changed.notify()

    def _put_aside(self, report: Report, due: float) -> None:
        """Not before what rests of the same wake. The caller holds the lock."""
        earlier = [known for known, resting in self._resting if resting.wake_id == report.wake_id]
        self._resting.append((max([due, *earlier]), report))

    def stop_claiming(self) -> None:
        """From now on no call takes agents off the waitlist."""
        self._claiming = False

    def request_stop(self) -> None:
        """As in `Service`; what waits is still sent, for at most `FLUSH_SECONDS`."""
        super().request_stop()
        with self._changed:
            self._changed.notify_all()

    def run_service(self) -> None:
        """Sends until asked to stop and nothing is left, or the time to flush is up."""
        flush_until: float | None = None
        while True:
            if self.stopping.is_set():
                flush_until = flush_until or time.monotonic() + FLUSH_SECONDS
                if not (self._reports or self._resting) or time.monotonic() > flush_until:
                    return
            self._send(self._take())

    def _take(self) -> list[Report]:
        with self._changed:
            is_stopping = self.stopping.is_set()
            self._changed.wait_for(
                lambda: self._reports or self.stopping.is_set() != is_stopping, self._seconds_of_rest(is_stopping)
            )
            self._end_rests(everyone=self.stopping.is_set())
            taken, self._reports = self._reports[:MAX_REPORTS_PER_CALL], self._reports[MAX_REPORTS_PER_CALL:]
            return taken

    def _seconds_of_rest(self, is_stopping: bool) -> float | None:
        """How long to wait for a new report: until the first refused one is due, None when none was refused."""
        if not self._resting:
            return 0.0 if is_stopping else BUSY_SECONDS if self._owes_claims else None
        seconds = max(0.0, min(due for due, _report in self._resting) - time.monotonic())
        return min(seconds, REFUSED_SECONDS) if is_stopping else seconds

    def _end_rests(self, *, everyone: bool) -> None:
        now = time.monotonic()
        self._reports += [report for due, report in self._resting if everyone or due <= now]
        self._resting = [(due, report) for due, report in self._resting if not everyone and due > now]

    def _send(self, reports: list[Report]) -> None:
        if not reports and not (self._owes_claims and self._claiming):
            return
        # Only an end frees a slot; a start alone needs no look at the waitlist.
        frees = self._owes_claims or any(isinstance(report, Ended) for report in reports)
        limit = self._claim_limit() if frees and self._claiming else 0
        asked_at = time.monotonic()
        with self._health.at_work():
            try:
                answer = self._store.report(reports, limit)
            except DispatcherError as error:
                self._keep(reports, error)
                return
            self._backoff.reset()
            self._repeats.over()
            self._health.succeeded()
            self._settle(answer, reports, asked_at)

    def _keep(self, reports: list[Report], error: DispatcherError) -> None:
        """The reports go back to the head of the queue and wait; they are facts, and the database must learn them."""
        with self._changed:
            self._reports[:0] = reports
        self._health.failed(error)
        delay = self._seconds_to_next_try(error)
        repeats = self._repeats.news(str(error))
        if repeats is not None:
            log.warning(
                events.WAKE_END_UNREPORTED,
                msg=f"Could not report {len(reports)} wake(s), trying again in {delay:.1f} s",
                reports=len(reports),
                error=str(error),
                repeats=repeats,
            )
        self._rest(delay)

    def _seconds_to_next_try(self, error: DispatcherError) -> float:
        """What is refused time after time is not sent often; an outage may be over any moment."""
        delay = self._backoff.next_delay()
        is_refused = isinstance(error, RestError) and not error.retryable
        return delay if is_refused else min(delay, LONGEST_OUTAGE_REST)

    def _rest(self, delay: float) -> None:
        """Waits before the next try; a stop ends the wait, and what is left is then tried more often."""
        if self.stopping.is_set():
            time.sleep(min(delay, 0.5))
        else:
            self.stopping.wait(delay)

    def _settle(self, answer: ReportAnswer, reports: list[Report], asked_at: float) -> None:
        """Results and grants first: whoever was granted a wake does not wait for a report that was refused."""
        for result in answer.results:
            if result.report == "ended" and result.code not in TRIED_AGAIN:
                # Only an answer that names the agent says what is next for it.
                self._book.remove(result.wake_id, None if result.agent_id is None else asked_at)
            self._hand_on(result)
        self._on_verdicts(answer.verdicts)
        self._owes_claims = answer.claims_busy
        for report, result in zip(reports, answer.results, strict=True):
            if result.code == "busy":
                self._let_rest(
                    report, "another session holds a row of its agent", BUSY_SECONDS, quiet_tries=QUIET_TRIES
                )
            elif result.code == "error":
                self._let_rest(report, result.error or "the report was refused", REFUSED_SECONDS)
            else:
                self._refusals.pop(report, None)

    def _hand_on(self, result: ReportResult) -> None:
        try:
            self._on_result(result)
        except Exception as error:  # the other results and the grants of this answer must not be lost with it
            log.error(
                events.WAKE_END_UNREPORTED,
                msg="Could not act on the answer to a report",
                wake_id=str(result.wake_id),
                exc_info=error,
            )

    def _let_rest(self, report: Report, error: str, base: float, quiet_tries: int = 0) -> None:
        """The call worked and this report did not: it alone is tried again, later each time."""
        self._refusals[report] += 1
        delay = jittered(exponential(self._refusals[report], base, LONGEST_REST), 0.2)
        with self._changed:
            self._put_aside(report, time.monotonic() + delay)
            followers = [queued for queued in self._reports if queued.wake_id == report.wake_id]
            self._reports = [queued for queued in self._reports if queued.wake_id != report.wake_id]
            for queued in followers:
                self._put_aside(queued, 0.0)
        if self._refusals[report] <= quiet_tries:
            return
        self._health.failed(DispatcherError(error))
        log.warning(
            events.WAKE_END_UNREPORTED,
            msg=f"The database refused a report, trying again in {delay:.1f} s: {error}",
            wake_id=str(report.wake_id),
            error=error,
        )
