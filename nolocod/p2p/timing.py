"""The mesh's intervals and deadlines, in seconds: the daemon takes the defaults, tests take shorter ones.

The rule: what a node sends does not grow with the swarm. A small swarm beats often; a larger one beats more
slowly and believes its members for longer, up to `calm` and `lasting` (docs/membership.md has the figures).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    heartbeat: float = 3.0
    """Between two heartbeats of a node that knows at most `crowd` members."""
    calm: float = 12.0
    """The longest between two heartbeats, however many members there are."""
    live: float = 20.0
    """A member whose heartbeat count did not grow for so long is dropped, where there are at most `crowd`."""
    lasting: float = 180.0
    """The same where there are many: news of one member come more rarely then."""
    crowd: int = 6
    eager: float = 10.0
    """How long a newcomer contacts the members that it learns of at once."""
    request: float = 8.0
    """A question and its answer, the dial not included."""
    bootstrap: float = 10.0
    """A bootstrap address that does not answer within this is given up."""
    search: float = 10.0
    """Between two looks for members by a node that has none."""
    widen: float = 90.0
    """Between two looks for members by a node that has some (a mesh that fell apart finds together so)."""
    lookup: float = 600.0
    """Between two looks into the DHT by a node that has members."""
    ping: float = 15.0
    """A connected member not heard on its connection for so long is pinged."""
    pong: float = 5.0
    punch: float = 8.0
    """How long bulk waits for a straight connection before a relay carries it."""
    roam: float = 10.0
    """Between two looks whether our network is another one, or none."""
    fanout: int = 1
    """Members that a node swaps views with per heartbeat."""
    capacity: int = 512
    """Members that a node holds."""
    view: int = 15
    """Heartbeats of others told at once."""
    view_bytes: int = 6000
    """Their size in all: what gossip costs does not depend on how much members tell of themselves."""

    def pace(self, members: int) -> float:
        """Seconds between two heartbeats of a node that knows so many members."""
        return max(self.heartbeat, min(self.calm, self.heartbeat * members / self.crowd))

    def lasts(self, members: int) -> float:
        """Seconds for which a silent member is believed, by a node that knows so many."""
        return max(self.live, min(self.lasting, self.live * members / self.crowd))
