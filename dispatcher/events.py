"""The dotted names of log events: a published contract, so each is spelt once, here."""

from __future__ import annotations

from typing import Final

DAEMON_READY: Final = "daemon.ready"  # registered, and all services are started
DAEMON_SIGNAL: Final = "daemon.signal"  # `signal` came, and what follows from it
DAEMON_STOPPING: Final = "daemon.stopping"  # a signal came or a service ended; no new wakes
DAEMON_STOPPED: Final = "daemon.stopped"  # everything has ended; no child is left
DAEMON_CRASHED: Final = "daemon.crashed"  # an error nobody expected ends the daemon; please report it
SCHEMA_DIFFERS: Final = "schema.differs"  # at the start: the database's schema is newer, or changed by hand, or unknown
CONFIG_WAITING: Final = (
    "config.waiting"  # WAIT_FOR_CONFIG: settings or the gateway's row are missing, and asked for again
)
CONFIG_KEY_EXPOSED: Final = (
    "config.key_exposed"  # at the start: other users of the host may read the service key's file
)

SERVICE_ENDED: Final = "service.ended"  # a part of the daemon ended, with its error if it was not asked to
SERVICE_STUCK: Final = "service.stuck"  # a part of the daemon did not end within its time at a stop
BEAT_FAILED: Final = "service.beat_failed"  # one round of a loop failed; the loop goes on

HEALTH_CHANGED: Final = "health.changed"  # ok, degraded or failing, with the causes
METRICS_SERVED: Final = "metrics.served"  # METRICS_PORT answers
METRICS_FAILED: Final = "metrics.failed"  # METRICS_PORT cannot be had, tried again; or a client of it went away
LOG_DROPPED: Final = "log.dropped"  # so many `lines` are lost here: nobody read the log, or its disk was full
LIBRARY: Final = "library.log"  # a line of a library, redacted

WAKE_SKIPPED: Final = "wake.skipped"  # a gate refused; `reason` says which
WAKE_STARTED: Final = "wake.started"  # the agent's process runs
WAKE_ENDED: Final = "wake.ended"  # the agent's process ended, with its outcome
WAKE_BACKOFF: Final = "wake.backoff"  # the wake counted as a failure; when its agent may be woken again
WAKE_LOST: Final = "wake.lost"  # its process or instance is gone; closed without penalty for the agent
WAKE_ADOPTED: Final = "wake.adopted"  # a process an earlier daemon started is supervised from here on
WAKE_SPAWN_FAILED: Final = "wake.spawn_failed"  # the process could not be started; costs no attempt of the item
WAKE_BLOCKERS_UNKNOWN: Final = (
    "wake.blockers_unknown"  # the look-up of blockers failed; the wake goes ahead without the note
)
WAKE_CLAIM_FAILED: Final = (
    "wake.claim_failed"  # the database could not be asked; the agents are looked at again in a few seconds
)
WAKE_DECISION_FAILED: Final = "wake.decision_failed"  # one agent's decision failed; the others are not held up
WAKE_ADOPTION_FAILED: Final = "wake.adoption_failed"  # one open wake could not be adopted or closed; tried again
WAKE_OVERRIDE_IGNORED: Final = "wake.override_ignored"  # a model or thinking override is no non-empty string
WAKE_OUTPUT_LOST: Final = "wake.output_lost"  # the agent's output could not be kept in AGENT_OUTPUT_DIR
WAKE_START_UNREPORTED: Final = "wake.start_unreported"  # noting the start of a process failed; it runs on
WAKE_END_UNREPORTED: Final = "wake.end_unreported"  # the end could not be told to the database; tried again

SWEEP_FINISHED: Final = "sweep.finished"  # one reconciliation, with its numbers and duration
SWEEP_SET_ASIDE: Final = "sweep.set_aside"  # items that wake nobody any more: too old, spent, or at the end of a chain
SWEEP_OFTEN_WOKEN: Final = "sweep.often_woken"  # agents woken more than ALERT_WAKES_PER_HOUR times; they go on
SWEEP_STEP_FAILED: Final = "sweep.step_failed"  # one step failed; the others went on
SIDE_WRITE_FAILED: Final = "side_write.failed"  # a notification, event or hint failed; what it tells about is done
ITEM_DEAD_LETTER: Final = "item.dead_letter"  # nobody will try this item again; a notification was written
AGENT_STALLED: Final = (
    "agent.stalled"  # too many failures in a row, or its start was refused (cause); a notification was written
)

LEASE_RENEWED: Final = "lease.renewed"  # items leased in live wakes are held longer
LEASE_LOST: Final = "lease.lost"  # a lease was no longer ours to renew

WORKFLOW_TICK: Final = "workflow.tick"  # one dispatch pass, with its numbers and duration
WORKFLOW_STEP_FAILED: Final = "workflow.step_failed"  # one phase or run failed; the others went on
WORKFLOW_NOTIFIED: Final = "workflow.notified"  # an agent was told of a run that waits for it
WORKFLOW_NOTIFY_FAILED: Final = "workflow.notify_failed"  # it could not be told; tried again, the dispatch stands
WORKFLOW_PROCESS_STOPPED: Final = "workflow.process_stopped"  # the run its process worked on was ended from outside
WORKFLOW_MONITOR_BLIND: Final = "workflow.monitor_blind"  # OpenClaw could not be asked which sessions live
WORKFLOW_ORPHAN_WAITS: Final = "workflow.orphan_waits"  # an orphan may not be spawned again now; `reason` says why
WORKFLOW_RESPAWNED: Final = "workflow.respawned"  # an orphaned run gets its one new process of this attempt
BUDGETS_FAILED_OPEN: Final = "budgets.failed_open"  # budgets cannot be evaluated; runs go out without them
BUDGETS_UNENFORCED: Final = "budgets.unenforced"  # budgets hold runs back, but cannot stop them or write it down
BUDGETS_BACK: Final = "budgets.back"  # budgets are evaluated again

INSTANCE_REGISTERED: Final = "instance.registered"  # this daemon has a row in dispatcher_instances
INSTANCE_GONE: Final = "instance.gone"  # this daemon's row is gone, or could not be closed
HEARTBEAT_FILE_FAILED: Final = "instance.heartbeat_file_failed"  # HEARTBEAT_FILE could not be written

REALTIME_SUBSCRIBED: Final = "realtime.subscribed"  # the server says that events flow
REALTIME_HINT: Final = "realtime.hint"  # an event named an agent to look at
REALTIME_HINT_MALFORMED: Final = "realtime.hint_malformed"  # an event named no possible agent; a sweep looks instead
REALTIME_DEAF: Final = "realtime.deaf"  # the canary did not come back; sweeping often until it does
REALTIME_SILENT: Final = "realtime.silent"  # sweeps find items that no hint announced although Realtime looks well
REALTIME_LOST: Final = "realtime.lost"  # the connection or the channel is gone
REALTIME_MISCONFIGURED: Final = "realtime.misconfigured"  # the server says a subscription cannot work; not by itself
REALTIME_FALLBACK: Final = "realtime.fallback"  # postgres_changes stands in for broadcast
REALTIME_FALLBACK_ENDED: Final = "realtime.fallback_ended"  # broadcast is well: it alone is listened to

LOCK_HELD: Final = "lock.held"  # calls wait for what another session holds: which row or table, and who, if visible
LOCK_RELEASED: Final = "lock.released"  # they go through again

REST_RETRIED: Final = "rest.retried"  # a call failed in passing and was repeated
REST_FAILED: Final = "rest.failed"  # the metrics hook of the API client raised; the call itself is well

PROCESS_KILLED: Final = "process.killed"  # SIGKILL to a process group and its descendants
PROCESS_SURVIVED: Final = "process.survived"  # a process outlived SIGKILL
PROCESS_REAPED: Final = "process.reaped"  # a child nobody waited for was collected
PROCESS_NUDGED: Final = "process.nudged"  # the watcher noticed an end that the waiter had not

REGISTRY_BROKEN: Final = "registry.broken"  # openclaw.json cannot be read; the last good reading is used
REGISTRY_READ: Final = "registry.read"  # openclaw.json was read anew
OPENCLAW_AFFECTED: Final = "openclaw.affected_version"  # this openclaw has a known fault that concerns us

GATEWAY_LINKED: Final = "gateway.linked"  # the connection to OpenClaw's Gateway is open
GATEWAY_LOST: Final = "gateway.lost"  # OpenClaw's Gateway is down, hung, starting or draining; `cause` says why
GATEWAY_READY: Final = "gateway.ready"  # it takes work again
GATEWAY_BARRED: Final = "gateway.barred"  # it does not let the link in; its command line is asked instead
