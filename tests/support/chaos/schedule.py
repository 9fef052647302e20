"""What goes wrong when, and what work comes in: decided by the seed alone, before anything runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Facts = dict[str, Any]

MORTAL: Final = ("first", "second")
"""The daemons that are killed and stopped."""
STEADY: Final = "steady"
"""The daemon that only suffers what happens around it: its memory and descriptors must not grow."""
DAEMONS: Final = (*MORTAL, STEADY)

GOOD_AGENTS: Final = 6
QUIET_SECONDS: Final = 3.0
"""At the beginning nothing goes wrong for this long."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: `at` seconds after the start, to `target`, over after `lasts` seconds."""

    at: float
    kind: str
    target: str
    lasts: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        facts = "".join(f" {name}={value}" for name, value in self.facts.items())
        return f"{self.at:7.2f} s  {self.target:16} {self.kind}{facts} ({self.lasts:.1f} s)"


@dataclass(frozen=True)
class Insert:
    """`count` items for one agent, inserted `at` seconds after the start in one statement."""

    at: float
    agent: str
    count: int


@dataclass(frozen=True)
class Agent:
    """An agent and how its wakes go: behaviour → weight. `broken` ones never do their work."""

    slug: str
    behaviours: Mapping[str, float]
    broken: bool = False


@dataclass(frozen=True)
class Plan:
    """Everything the seed decides."""

    seed: int
    seconds: float
    agents: tuple[Agent, ...]
    faults: tuple[Fault, ...]
    inserts: tuple[Insert, ...]
    realtime_modes: Mapping[str, str]
    """`REALTIME_MODE` of each daemon."""


_BEHAVIOURS: Final = (
    "fail_item", "crash", "idle", "hang", "deaf_hang", "fork_hang", "fork_crash", "fork_exit",
    "lease_die", "lease_exit", "lease_hang", "slow", "post",
)  # fmt: skip


def plan(seed: int, seconds: float) -> Plan:
    """The same plan for the same seed and length."""
    draw = random.Random(f"{seed}/{seconds:g}")
    agents = _agents(draw)
    return Plan(seed, seconds, agents, _faults(draw, seconds), _inserts(draw, seconds, agents), _modes(seed))


def _modes(seed: int) -> dict[str, str]:
    draw = random.Random(f"{seed}/modes")
    return {name: draw.choice(["auto", "auto", "broadcast", "postgres_changes"]) for name in DAEMONS}


def _agents(draw: random.Random) -> tuple[Agent, ...]:
    mixed = [Agent(f"mixed-{number}", _mixed_behaviours(draw)) for number in range(1, GOOD_AGENTS + 1)]
    always = [
        Agent("good", {"ok": 1.0}),
        Agent("crasher", {"crash": 1.0}, broken=True),
        Agent("idler", {"idle": 1.0}, broken=True),
        Agent("hanger", {"lease_hang": 1.0}, broken=True),
    ]
    return (*mixed, *always)


def _mixed_behaviours(draw: random.Random) -> dict[str, float]:
    bad = draw.sample(_BEHAVIOURS, k=draw.randint(3, 6))
    return {"ok": 2.0 * len(bad), **{name: draw.uniform(0.5, 1.5) for name in bad}}


# ------------------------------------------------------------------------------------------ faults


def _faults(draw: random.Random, seconds: float) -> tuple[Fault, ...]:
    """One every few seconds; now and then several within a moment."""
    found: list[Fault] = []
    at = QUIET_SECONDS
    while at < seconds:
        found.append(_one_fault(draw, round(at, 2)))
        at += draw.uniform(0.05, 0.6) if draw.random() < 0.2 else draw.uniform(1.0, 4.5)
    return tuple(found)


def _one_fault(draw: random.Random, at: float) -> Fault:
    makers = list(_MAKERS)
    [maker] = draw.choices(makers, weights=[_MAKERS[maker] for maker in makers])
    return maker(draw, at)


def _daemon_killed(draw: random.Random, at: float) -> Fault:
    """Killed outright, started again soon: often at once, as a supervisor does."""
    lasts = 0.0 if draw.random() < 0.4 else draw.uniform(0.2, 5.0)
    return Fault(at, "kill", draw.choice(MORTAL), round(lasts, 2))


def _daemon_stopped(draw: random.Random, at: float) -> Fault:
    return Fault(at, "term", draw.choice(MORTAL), round(draw.uniform(0.0, 3.0), 2), {"signals": draw.choice([1, 1, 2])})


def _daemon_frozen(draw: random.Random, at: float) -> Fault:
    """SIGSTOP: a virtual machine that is moved, a process that is swapped out. Sometimes longer than its leases."""
    lasts = draw.choice([1.0, 3.0, 6.0, 6.0, 25.0])
    return Fault(at, "freeze", draw.choice(MORTAL), lasts)


def _rest_gone(draw: random.Random, at: float) -> Fault:
    return Fault(at, draw.choice(["kill", "stop"]), "postgrest", round(draw.uniform(0.0, 5.0), 2))


def _database_gone(draw: random.Random, at: float) -> Fault:
    lasts = round(draw.uniform(0.0, 6.0), 2)
    return Fault(at, "stop", "postgres", lasts, {"mode": draw.choice(["immediate", "fast"])})


def _backends_terminated(draw: random.Random, at: float) -> Fault:
    return Fault(at, "terminate_backends", "postgres", 0.0)


def _rest_misbehaves(draw: random.Random, at: float) -> Fault:
    switches: list[Facts] = [
        {"lose_replies": draw.randint(1, 12)},
        {"lose_replies": draw.randint(1, 5), "match": draw.choice(["claim_wakes", "report_wakes", "sweep_inbox"])},
        {"cut": draw.randint(1, 12)},
        {"fail": draw.randint(1, 12), "status": draw.choice([500, 502, 503, 504])},
        {"delay": round(draw.uniform(0.2, 7.0), 2)},
        {"down_for": round(draw.uniform(0.5, 6.0), 2)},
    ]
    return Fault(at, "misbehave", "rest", round(draw.uniform(1.0, 6.0), 2), draw.choice(switches))


def _realtime_misbehaves(draw: random.Random, at: float) -> Fault:
    switches: list[Facts] = [
        {"drop_events": draw.choice([-1, 3, 20])},
        {"duplicate_events": draw.choice([-1, 10])},
        {"delay_events": round(draw.uniform(0.5, 4.0), 2)},
        {"silence": True},
        {"rate_limited": True},
        {"refuse_join": "Unauthorized: chaos"},
        {"connect_status": draw.choice([401, 429, 500, 503])},
        {"changes_dead": True},
        {"broadcast_dead": True},
        {"close": draw.choice([1000, 1001, 1006, 1012])},
        {"down_for": round(draw.uniform(0.5, 8.0), 2)},
        {"server_disconnect": True},
        {"channel_close": True},
        {"channel_crash": True},
        {"system_error": "chaos says no"},
        {"unparsable_frame": True},
        {"big_frame": 200_000},
        {"denied_event": True},
    ]
    return Fault(at, "misbehave", "realtime", round(draw.uniform(1.0, 10.0), 2), draw.choice(switches))


def _network_misbehaves(draw: random.Random, at: float) -> Fault:
    """Of one daemon, of all, or of the agents."""
    target = f"{draw.choice([*DAEMONS, 'everyone', 'agents'])} network"
    kind = draw.choice(["delay", "cut", "refuse", "black_hole", "black_hole", "half_open", "half_open"])
    facts: Facts = {"cut_at_end": draw.random() < 0.5} if kind in {"black_hole", "half_open"} else {}
    if kind == "delay":
        facts = {"seconds": round(draw.uniform(0.05, 2.0), 2)}
    longest = 14.0 if kind in {"black_hole", "half_open"} else 6.0
    return Fault(at, f"network_{kind}", target, round(draw.uniform(1.0, longest), 2), facts)


def _clock_moves(draw: random.Random, at: float) -> Fault:
    offset = draw.choice([-86_400, -3_700, -45, 45, 3_700, 86_400, 30 * 86_400])
    return Fault(at, "clock", f"{draw.choice(DAEMONS)} clock", round(draw.uniform(2.0, 12.0), 2), {"offset": offset})


def _agent_paused(draw: random.Random, at: float) -> Fault:
    agent = f"mixed-{draw.randint(1, GOOD_AGENTS)}"
    return Fault(at, "pause", "agent", round(draw.uniform(1.0, 8.0), 2), {"agent": agent})


_MAKERS: Final[Mapping[Callable[[random.Random, float], Fault], float]] = {
    _daemon_killed: 5,
    _daemon_stopped: 2.5,
    _daemon_frozen: 1.2,
    _rest_gone: 1.5,
    _database_gone: 1.8,
    _backends_terminated: 0.7,
    _rest_misbehaves: 3,
    _realtime_misbehaves: 4,
    _network_misbehaves: 4,
    _clock_moves: 1,
    _agent_paused: 0.8,
}


# ------------------------------------------------------------------------------------------ work


def _inserts(draw: random.Random, seconds: float, agents: tuple[Agent, ...]) -> tuple[Insert, ...]:
    """A trickle with bursts, until just before the end."""
    found: list[Insert] = []
    at = 0.2
    while at < seconds - 1:
        if draw.random() < 0.06:
            found += [Insert(round(at, 2), agent.slug, draw.randint(1, 8)) for agent in agents if draw.random() < 0.8]
        else:
            found.append(
                Insert(round(at, 2), draw.choice(agents).slug, 1 if draw.random() < 0.9 else draw.randint(2, 6))
            )
        at += draw.expovariate(1 / 0.8)
    return tuple(found)
