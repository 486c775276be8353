"""What is done to whom, and when: all of it from a seed.

The rule: no clock and no processes here. Half of the nodes are spared from being killed, so that there are lives long
enough to see what grows; everybody may be frozen, as a laptop is that sleeps. Two faults never overlap on one node.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "freeze", "clock"]

_RATES = ("", "", "", "20Mbit", "5Mbit")
"""What a node may send: most are not limited."""
_KILLED = (5.0, 45.0)
_FROZEN = (3.0, 40.0)
"""Seconds that a node stays away."""
_WRONG_BY = (5.0, 90.0, 3600.0, 86_400.0)
"""Seconds: a clock that drifted, one set by hand, a time zone, a day."""
_AFTERWARDS = 30.0
"""Seconds that it is then left alone, at least."""


@dataclass(frozen=True)
class Fault:
    """`node` is killed, or frozen, or has a wrong time of day, `at` seconds after the start, for `seconds`."""

    at: float
    node: int
    kind: Kind
    seconds: float
    by: float = 0.0
    """Seconds by which its clock is wrong meanwhile."""


def spared(nodes: int) -> range:
    """Those that are never killed: the first half, bootstrap included."""
    return range((nodes + 1) // 2)


def schedule(seed: int, nodes: int, begin: float, end: float, every: float, *, clocks: bool = False) -> list[Fault]:
    """Faults from `begin` to `end`, one in `every` seconds on average (exponential pauses); those of `clocks` too."""
    rng = random.Random(f"nolocod soak {seed}")
    free = [0.0] * nodes
    faults: list[Fault] = []
    at = begin + rng.expovariate(1 / every)
    while at < end:
        kind: Kind = "kill" if rng.random() < 0.5 else "freeze"
        by = 0.0
        if clocks and rng.random() < 1 / 3:
            kind, by = "clock", rng.choice((-1, 1)) * rng.choice(_WRONG_BY)
        candidates = [node for node in range(nodes) if free[node] <= at and (kind != "kill" or node not in spared(nodes))]
        seconds = rng.uniform(*(_KILLED if kind == "kill" else _FROZEN))
        if candidates and at + seconds < end:
            node = rng.choice(candidates)
            free[node] = at + seconds + _AFTERWARDS
            faults.append(Fault(at, node, kind, seconds, by))
        at += rng.expovariate(1 / every)
    return faults


def upload_limits(seed: int, nodes: int) -> list[str]:
    """For each node what --max-upload says; empty for none."""
    rng = random.Random(f"nolocod soak rates {seed}")
    return [rng.choice(_RATES) for _ in range(nodes)]
