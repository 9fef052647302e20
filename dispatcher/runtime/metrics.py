"""What the daemon counts and measures, by name. `prometheus.py` keeps and serves it when METRICS_PORT is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric as `/metrics` and the reference page show it. A counter's samples end in `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()


_LATENCY: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_CALLS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_PROCESSES: Final = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)

DECISIONS: Final = Family(
    "dispatcher_wake_decisions",
    "counter",
    ("reason",),
    "Claims by verdict: granted, or the gate that refused, without its numbers.",
)
LATENCY: Final = Family(
    "dispatcher_wake_latency_seconds",
    "histogram",
    ("path",),
    "From the insert of the oldest item of a wake (the database's clock) to the start of its process (this host's "
    "clock). Backlog included: look at path event for the speed of hints.",
    _LATENCY,
)
LIVE: Final = Family("dispatcher_live_wakes", "gauge", (), "Processes of wakes this daemon watches now.")
WAITLIST: Final = Family(
    "dispatcher_waitlist", "gauge", (), "Agents waiting for a slot on the gateway, as of the last sweep."
)
BACKLOG: Final = Family(
    "dispatcher_backlog_items",
    "gauge",
    ("age",),
    "Open inbox items of the gateway's agents by age: under_1m, under_1h, over_1h; read every 30 s. "
    "Without those of paused agents.",
)
PAUSED: Final = Family(
    "dispatcher_backlog_waiting_for_paused",
    "gauge",
    (),
    "Open inbox items of paused or hibernating agents: nobody may take them now.",
)
OLDEST: Final = Family(
    "dispatcher_backlog_oldest_seconds", "gauge", (), "Age of the oldest of them, 0 when there are none."
)
ENDED: Final = Family(
    "dispatcher_wakes_ended",
    "counter",
    ("outcome",),
    "Ended wakes by the state the database gave them: succeeded, failed, timed_out, no_progress, lost, interrupted, "
    "spawn_failed.",
)
PROCESS: Final = Family(
    "dispatcher_wake_process_seconds",
    "histogram",
    ("ending",),
    "How long processes of wakes ran, by how they ended: exited, timed_out, stopped, lost.",
    _PROCESSES,
)
SWEEPS: Final = Family(
    "dispatcher_sweep_seconds", "histogram", (), "Duration of sweeps that succeeded, round trip included.", _CALLS
)
SWEPT: Final = Family(
    "dispatcher_sweep_rows",
    "counter",
    ("step",),
    "Rows the steps of sweeps changed: expired, dead, chained, stalled, released, listed, queued, alerted, pruned.",
)
RUNS: Final = Family(
    "dispatcher_workflow_runs", "gauge", ("status",), "Workflow runs of the tenant by status; read every 30 s."
)
HELD: Final = Family(
    "dispatcher_budget_held_runs", "gauge", (), "Queued runs that budgets held back at the tenant's last tick."
)
REALTIME: Final = Family(
    "dispatcher_realtime_state",
    "gauge",
    ("status",),
    "1 for the status Realtime is in: ready, connecting, deaf or down.",
)
GAPS: Final = Family(
    "dispatcher_realtime_gaps", "counter", (), "How often hints may have been lost; a sweep follows each time."
)
GATEWAY: Final = Family(
    "dispatcher_gateway_state",
    "gauge",
    ("status",),
    "1 for the status OpenClaw's Gateway is in: ready, connecting, starting, draining, hung, down; barred: the link is "
    "refused; unused: there is no Gateway to look at.",
)
OUTAGES: Final = Family(
    "dispatcher_gateway_outages", "counter", (), "How often OpenClaw's Gateway was found not to take work."
)
CALLS: Final = Family(
    "dispatcher_rpc_seconds",
    "histogram",
    ("function",),
    "Duration of calls to the database API, repeats included, by SQL function or table.",
    _CALLS,
)
CALL_ERRORS: Final = Family(
    "dispatcher_rpc_errors",
    "counter",
    ("function", "outcome"),
    "Calls that failed for good: refused, retryable, bad_key or unavailable.",
)
HEALTH: Final = Family(
    "dispatcher_health", "gauge", ("status",), "1 for the health the daemon is in: starting, ok, degraded or failing."
)
LOOPS: Final = Family("dispatcher_loop_ok", "gauge", ("loop",), "Whether a loop achieved something lately: 1 or 0.")
LOG_WAITING: Final = Family(
    "dispatcher_log_lines_waiting",
    "gauge",
    (),
    "Lines of the log that are not written yet; it grows while nobody reads.",
)
LOG_DROPPED: Final = Family(
    "dispatcher_log_lines_dropped", "counter", (), "Lines of the log that found no room while nobody read it."
)
INFO: Final = Family("dispatcher_info", "gauge", ("version", "gateway_id"), "Always 1.")

FAMILIES: Final = (
    *(DECISIONS, LATENCY, LIVE, WAITLIST, BACKLOG, OLDEST, PAUSED, ENDED, PROCESS, SWEEPS, SWEPT, RUNS, HELD),
    *(REALTIME, GAPS, GATEWAY, OUTAGES, CALLS, CALL_ERRORS, HEALTH, LOOPS, LOG_WAITING, LOG_DROPPED, INFO),
)
BACKLOG_AGES: Final = ("under_1m", "under_1h", "over_1h")
RUN_STATUSES: Final = (
    *("queued", "dispatched", "claimed", "running", "waiting_for_approval", "blocked"),
    *("completed", "failed", "timed_out", "cancelled"),
)
SWEEP_STEPS: Final = ("expired", "dead", "chained", "stalled", "released", "listed", "queued", "alerted", "pruned")


class Meter:
    """Where the parts of the daemon report to. This one forgets: nobody asked for metrics. Thread-safe."""

    def decided(self, reason: str) -> None:
        """A claim was `granted`, or refused by the gate of that name."""

    def started(self, path: str, latency_s: float) -> None:
        """The process of a wake runs, `latency_s` after the insert of its oldest item."""

    def process_ended(self, ending: str, seconds: float) -> None:
        """The process of a wake is gone after that time."""

    def ended(self, state: str) -> None:
        """The database has closed a wake with that state."""

    def swept(self, seconds: float, counts: Mapping[str, int]) -> None:
        """A sweep succeeded; `counts` by phase, and `queued` and `waiting`."""

    def gauged(self, gauges: Mapping[str, Any]) -> None:
        """The tables were read; `gauges` as `public.dispatcher_gauges` answers."""

    def called(self, function: str, seconds: float, outcome: str) -> None:
        """A call to the database API is over; see `OnCall`."""
