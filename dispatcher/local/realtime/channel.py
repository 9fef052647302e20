"""One joined topic of one socket: what it may see, and what is sent to it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dispatcher.local.realtime.changes import Subscription
from dispatcher.local.realtime.frames import dumps
from dispatcher.local.realtime.subscriptions import Entry
from dispatcher.local.realtime.tokens import Token

if TYPE_CHECKING:
    from dispatcher.local.realtime.socket import Socket

PREFIX = "realtime:"


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """The `config` of a join, reduced to what the server acts on."""

    private: bool = False
    ack: bool = False
    self_broadcast: bool = False
    replication_ready: bool = False
    presence: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "JoinConfig":
        """From the client's JSON; whatever has another shape counts as absent."""
        broadcast, presence = (_mapping(config.get(name)) for name in ("broadcast", "presence"))
        return cls(
            private=config.get("private") is True,
            ack=broadcast.get("ack") is True,
            self_broadcast=broadcast.get("self") is True,
            replication_ready=broadcast.get("replication_ready") is True,
            presence=presence.get("enabled") is True,
        )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(eq=False, slots=True)
class Channel:
    """State of a joined topic. `legacy` channels get their changes in the form of the first protocol."""

    socket: "Socket"
    topic: str
    join_ref: Any
    token: Token
    entries: Sequence[Entry]
    config: JoinConfig
    legacy: bool = False
    writable: bool = True
    subscription: Subscription | None = None
    expiry: asyncio.TimerHandle | None = None
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    open: bool = True

    @property
    def name(self) -> str:
        """The topic without its prefix."""
        return self.topic.removeprefix(PREFIX)

    def push(self, event: str, payload: str, *, ref: Any = None, is_event: bool = False) -> None:
        """A frame on this topic. Replies and closes carry a ref, system messages do not."""
        if self.open:
            self.socket.send(self.join_ref, ref, self.topic, event, payload, is_event=is_event)

    def system(self, message: str, *, status: str = "ok", extension: str = "postgres_changes") -> None:
        """A system message."""
        body = {"message": message, "status": status, "extension": extension, "channel": self.name}
        self.push("system", dumps(body))

    def deliver_change(self, ids: Sequence[int], action: str, data: str) -> None:
        """A database change. Carries neither ref nor join ref."""
        if not self.open:
            return
        if self.legacy:
            self.socket.send(None, None, self.topic, action, data, is_event=True)
            return
        payload = f'{{"data":{data},"ids":{dumps(list(ids))}}}'
        self.socket.send(None, None, self.topic, "postgres_changes", payload, is_event=True)

    def run(self, name: str, work: Any) -> None:
        """Start a task of the channel; one of the same name is given up."""
        previous = self.tasks.pop(name, None)
        if previous is not None:
            previous.cancel()
        task = asyncio.get_running_loop().create_task(work, name=f"realtime-{name}")
        self.tasks[name] = task

    def end(self) -> None:
        """Nothing is sent any more, no task goes on."""
        self.open = False
        if self.expiry is not None:
            self.expiry.cancel()
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()
