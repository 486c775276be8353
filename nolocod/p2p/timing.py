"""The mesh's intervals and deadlines, in seconds: the daemon takes the defaults, tests take shorter ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    heartbeat: float = 3.0
    """Between two heartbeats of a node."""
    live: float = 20.0
    """A member whose heartbeat count did not grow for so long is dropped."""
    eager: float = 10.0
    """How long a newcomer contacts everybody it learns of at once."""
    request: float = 8.0
    """A question and its answer, the dial not included."""
    bootstrap: float = 10.0
    """A bootstrap address that does not answer within this is given up."""
    search: float = 10.0
    """Between two looks for members by a node that has none."""
    widen: float = 90.0
    """Between two looks for members by a node that has some (a mesh that fell apart finds together so)."""
    ping: float = 15.0
    """A connected member not heard on its connection for so long is pinged."""
    pong: float = 5.0
    fanout: int = 3
    """Members that a node talks to per heartbeat."""
    view: int = 64
    """Heartbeats of others told at once."""
