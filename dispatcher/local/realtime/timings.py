"""How long things take and how much is allowed. The defaults are what was measured on the real server."""

from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Timings:
    """All values in seconds; a `Span` is a random time between its two ends."""

    reject_delay: float = 2.0
    """Before a refused handshake is answered."""
    error_delay: float = 5.0
    """Before a refused join is answered. The whole socket waits meanwhile."""
    cold_subscribe: Span = (1.0, 3.0)
    """From the join reply to "Subscribed to PostgreSQL" when nobody else was subscribed."""
    warm_subscribe: Span = (0.001, 0.01)
    """The same while the reader of the write-ahead log already runs."""
    resubscribe: Span = (1.0, 3.0)
    """From a new access token to the second "Subscribed to PostgreSQL"."""
    idle_poll: float = 0.5
    """Between looks at the write-ahead log when there was nothing in it."""
    unmatched_poll: Span = (0.15, 0.2)
    """Between looks when there were changes, but none that anybody subscribed to."""
    reader_linger: float = 60.0
    """How long the reader of the write-ahead log outlives its last subscription."""
    publication_check: float = 60.0
    """Between checks for a changed publication."""
    idle_close: float = 60.0
    """A socket whose client sends nothing is closed after this."""
    replication_timeout: float = 60.0
    """Before a join that asked for `replication_ready` is told that the broadcast path is not there."""
    token_check: float = 300.0
    """The longest time between two looks at a channel's token."""
    database_retry: float = 1.0
    """Between attempts to reach a database that is down."""
    prune: float = 1.0
    """Between removals of delivered rows from `realtime.messages`."""

    @classmethod
    def quick(cls) -> "Timings":
        """For tests and demos: the same order of things, hardly any waiting."""
        return cls(
            reject_delay=0.0,
            error_delay=0.05,
            cold_subscribe=(0.0, 0.0),
            warm_subscribe=(0.0, 0.0),
            resubscribe=(0.0, 0.02),
            idle_poll=0.02,
            unmatched_poll=(0.02, 0.02),
            publication_check=0.5,
            replication_timeout=1.0,
            database_retry=0.1,
            prune=0.2,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server allows. `None` switches a limit off.

    Rates are averages over `rate_window` seconds, so short bursts pass, as on the real server.
    """

    max_users: int | None = 200
    max_channels_per_socket: int = 100
    max_joins_per_second: float | None = 100.0
    max_events_per_second: float | None = None
    """Deliveries of database changes. The real default is 100; what is above is dropped without a word."""
    rate_window: float = 60.0
    max_frame_bytes: int = 5_000_000
    max_record_bytes: int = 1_048_576
    max_queued_frames: int = 100_000
    """A client that reads too slowly is cut off here."""
    tenants: frozenset[str] | None = None
    """First labels of the Host header that exist. `None`: every one."""
    suspended: bool = False
