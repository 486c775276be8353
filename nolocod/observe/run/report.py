"""The run's report: the structs that are the whole of /run.json.

The rule: as in the status report there are ages and no clock times, and no number is NaN or infinite. It names members by peer
id, and says nothing of their addresses: the page may be public.
"""

from __future__ import annotations

import msgspec

from nolocod.observe.events import Contribution, NatClass  # noqa: TC001  # msgspec reads the annotations


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One member by its own word. `age` is seconds since its last heartbeat."""

    peer_id: str
    state: str
    nat: NatClass | None
    round: int
    tokens: int
    tokens_per_second: float
    loss: float | None
    release: str
    age: float
    relays: bool
    """It carries for others."""
    via: tuple[str, ...]
    """The members through which it can be reached, where it cannot be reached directly."""
    answered: bool
    """It answered the observer, and is not only heard of."""
    name: str = ""
    """What its owner calls it."""


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an observer knows of a run. Seconds, nats per token, tokens."""

    release: str
    """The observer's own."""
    run_id: str
    run_name: str
    owner: str
    access: str
    watched: float
    """Seconds since this observer began."""
    states: dict[str, int] = {}
    """How many members are in each state."""
    reachable: dict[str, int] = {}
    """How many members can be reached in each way."""
    releases: dict[str, int] = {}
    round: int = 0
    """The median of the members that train."""
    rounds: int = 0
    """The run's goal; 0 means without end."""
    progress: float | None = None
    """Share of the goal; None without one."""
    eta: float | None = None
    """Seconds until the goal at the pace of the last minutes; None while that is not known."""
    loss: float | None = None
    """The median training loss of the members that train."""
    tokens: int = 0
    """That one replica has behind it: the median."""
    tokens_per_second: float = 0.0
    """Of all members together."""
    watched_tokens: int = 0
    """What all members together trained on while they were watched, over restarts where a history is kept."""
    curve: tuple[tuple[int, float], ...] = ()
    """(round, loss), oldest first."""
    members: tuple[MemberRow, ...] = ()
    """Those that answered first, and at most 512."""
    exchanges: tuple[tuple[str, str, float], ...] = ()
    """The last one of each pair that is known, of the last hour, newest first: who offered, to whom, seconds ago."""
    contributors: tuple[Contribution, ...] = ()
    """Those that gave most, by receipts that both partners signed, while it was watched."""
    contributed_by: int = 0
    """How many gave something."""
    contributed: int = 0
    """Tokens of all of them."""
    counted: int = 0
    """How many members the figures are made of."""
    known: int = 0
    """How many members there are."""
