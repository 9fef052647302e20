"""The dotted names of log events: a published contract, so each is spelt once, here."""

from __future__ import annotations

from typing import Final

DAEMON_STARTING: Final = "daemon.starting"
DAEMON_READY: Final = "daemon.ready"
DAEMON_STOPPING: Final = "daemon.stopping"
DAEMON_STOPPED: Final = "daemon.stopped"
DAEMON_CRASHED: Final = "daemon.crashed"
CONFIG_WAITING: Final = "config.waiting"
CONFIG_INVALID: Final = "config.invalid"

SERVICE_STARTED: Final = "service.started"
SERVICE_ENDED: Final = "service.ended"
SERVICE_STUCK: Final = "service.stuck"
BEAT_FAILED: Final = "service.beat_failed"

HEALTH_CHANGED: Final = "health.changed"
LIBRARY: Final = "library.log"

WAKE_GRANTED: Final = "wake.granted"
WAKE_SKIPPED: Final = "wake.skipped"
WAKE_STARTED: Final = "wake.started"
WAKE_ENDED: Final = "wake.ended"
WAKE_TIMED_OUT: Final = "wake.timed_out"
WAKE_STOPPED: Final = "wake.stopped"
WAKE_LOST: Final = "wake.lost"
WAKE_ADOPTED: Final = "wake.adopted"
WAKE_SPAWN_FAILED: Final = "wake.spawn_failed"
WAKE_BLOCKERS_UNKNOWN: Final = "wake.blockers_unknown"
WAKE_CLAIM_FAILED: Final = "wake.claim_failed"
WAKE_DECISION_FAILED: Final = "wake.decision_failed"
WAKE_ADOPTION_FAILED: Final = "wake.adoption_failed"
WAKE_OVERRIDE_IGNORED: Final = "wake.override_ignored"
WAKE_OUTPUT_LOST: Final = "wake.output_lost"
WAKE_END_UNREPORTED: Final = "wake.end_unreported"

SWEEP_FINISHED: Final = "sweep.finished"
SWEEP_STEP_FAILED: Final = "sweep.step_failed"
ITEM_EXPIRED: Final = "item.expired"
AGENT_STALLED: Final = "agent.stalled"

LEASE_RENEWED: Final = "lease.renewed"
LEASE_LOST: Final = "lease.lost"

INSTANCE_REGISTERED: Final = "instance.registered"
INSTANCE_GONE: Final = "instance.gone"
HEARTBEAT_FILE_FAILED: Final = "instance.heartbeat_file_failed"

REALTIME_CONNECTING: Final = "realtime.connecting"
REALTIME_SUBSCRIBED: Final = "realtime.subscribed"
REALTIME_HINT: Final = "realtime.hint"
REALTIME_DEAF: Final = "realtime.deaf"
REALTIME_SILENT: Final = "realtime.silent"
REALTIME_LOST: Final = "realtime.lost"

REST_RETRIED: Final = "rest.retried"
REST_FAILED: Final = "rest.failed"

PROCESS_TERMINATING: Final = "process.terminating"
PROCESS_KILLED: Final = "process.killed"
PROCESS_SURVIVED: Final = "process.survived"
PROCESS_REAPED: Final = "process.reaped"
PROCESS_NUDGED: Final = "process.nudged"

REGISTRY_BROKEN: Final = "registry.broken"
REGISTRY_READ: Final = "registry.read"
OPENCLAW_AFFECTED: Final = "openclaw.affected_version"
