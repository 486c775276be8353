"""What happens in a node, as frozen facts. Logic emits them; metrics, status, log and table follow them.

Sizes in bytes, times in seconds, losses in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nolocod.identity import PeerId

Reach = Literal["direct", "inbound", "punched", "relayed"]
"""How a peer is connected: we dialled it, it dialled us, both did through their NATs, or a third node carries it."""
NatClass = Literal["public", "cone", "symmetric", "client"]
"""How others reach a node: straight; by punching; through relays only; not at all, it only dials out."""
NodeState = Literal["starting", "discovering", "fetching", "loading", "training", "paused", "finished", "stopping"]
PauseReason = Literal["hours", "battery", "budget"]
Outcome = Literal["committed", "aborted", "in_doubt", "busy", "refused", "unreachable"]
"""How an exchange, or the try to have one, ended."""


@dataclass(frozen=True)
class Started:
    peer_id: PeerId
    run_id: str
    run_name: str
    addresses: tuple[str, ...]
    http: str


@dataclass(frozen=True)
class StateChanged:
    """`state` is what the node does now; `waiting_for` says in words what it waits for, or is empty."""

    state: NodeState
    waiting_for: str = ""


@dataclass(frozen=True)
class WeightsLoaded:
    """The trainer holds weights: the run's initial ones, a checkpoint's, or a donor's."""

    round: int
    source: Literal["seed", "checkpoint", "donor"]


@dataclass(frozen=True)
class InnerSteps:
    """`steps` inner steps were done since the last report, in `seconds` of computing."""

    steps: int
    tokens: int
    loss: float
    learning_rate: float
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """Mean held-out loss of the fast weights at `round`."""

    round: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class ExchangeStarted:
    """An offer was accepted, by us or by `partner`."""

    partner: PeerId
    initiator: bool


@dataclass(frozen=True)
class ExchangeEnded:
    """`error` is a code or empty."""

    partner: PeerId
    session: str
    initiator: bool
    outcome: Outcome
    sent: int
    received: int
    seconds: float
    error: str = ""
    reason: str = ""


@dataclass(frozen=True)
class DoubtSettled:
    """A partner that was heard of again told what it decided in an exchange that had ended in doubt here."""

    partner: PeerId
    session: str
    committed: bool


@dataclass(frozen=True)
class OuterStep:
    """One outer step. `spread` is the L2 norm of the two partners' difference in fast weights (paired only)."""

    round: int
    kind: Literal["paired", "solo"]
    partner: PeerId | None
    inner_steps: int
    spread: float | None
    seconds: float
    weight: float = 1.0
    """What the partner's difference counted for: 1 in full, less where it was clipped (ClippedGossip)."""


@dataclass(frozen=True)
class PeerJudged:
    """What a peer did changed what we think of it: `reputation` from 0 (banned) to 1."""

    peer_id: PeerId
    reputation: float
    why: str


@dataclass(frozen=True)
class PeerBanned:
    """`peer_id` is neither chosen nor answered for `seconds`."""

    peer_id: PeerId
    seconds: float
    why: str


@dataclass(frozen=True)
class Checkpointed:
    round: int
    size: int
    seconds: float


@dataclass(frozen=True)
class PeerSeen:
    """A member became live or changed what it says."""

    peer_id: PeerId
    round: int
    tokens: int
    loss: float
    state: str
    nat: NatClass | None = None
    """How others reach it, by its own word."""


MADE_ROOM = "made room for others"
"""Why a member is lost that may well be alive: a node holds only so many."""


@dataclass(frozen=True)
class PeerLost:
    peer_id: PeerId
    reason: str


@dataclass(frozen=True)
class PeerConnected:
    peer_id: PeerId
    reach: Reach


@dataclass(frozen=True)
class PeerDisconnected:
    peer_id: PeerId


@dataclass(frozen=True)
class ReachFound:
    """What this node learned about how others reach it. `kind` is None while it does not know; `why` tells in words
    what was seen, and what the owner could do about it. `addresses` are what peers are told, best first."""

    kind: NatClass | None
    why: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class RelayHeld:
    """`relay` gave us a reservation, or renewed it, for `seconds`."""

    relay: PeerId
    seconds: float


@dataclass(frozen=True)
class RelayLost:
    relay: PeerId
    reason: str


@dataclass(frozen=True)
class Punched:
    """A try to replace the relayed connection to `peer_id` by a straight one ended after `seconds`; `reason` if it failed."""

    peer_id: PeerId
    succeeded: bool
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Relaying:
    """What this node carries for others: reservations and circuits now, circuits and bytes since it started."""

    reservations: int
    open: int
    circuits: int
    bytes: int


@dataclass(frozen=True)
class PartitionHealed:
    """`members` that we had never heard of came in through `peer_id`, whose view had next to nobody of ours."""

    peer_id: PeerId
    members: int


@dataclass(frozen=True)
class WeightsServed:
    """`peer_id` fetched (or broke off fetching) our snapshot."""

    peer_id: PeerId
    size: int
    seconds: float
    whole: bool


@dataclass(frozen=True)
class WeightsFetched:
    donor: PeerId
    round: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Allowed:
    """What the owner lets this node use: bytes per second, bytes per month; None and empty for no limit."""

    up: int | None
    down: int | None
    monthly: int | None
    hours: tuple[str, ...]
    on_battery: bool
    """Whether it goes on when the machine runs on battery."""


@dataclass(frozen=True)
class Traffic:
    """All bytes on the connections to peers: of this process, per second of late, and of `month` ("2025-06", UTC)."""

    sent: int
    received: int
    sending: float
    receiving: float
    month: str
    month_sent: int
    month_received: int


@dataclass(frozen=True)
class Paused:
    """This node trains and exchanges no more for now. `why` tells the cause and what to do about it.

    `seconds` is when it goes on by itself, from now; None if that depends on something else than the clock.
    """

    reason: PauseReason
    why: str
    seconds: float | None


@dataclass(frozen=True)
class Resumed:
    """What paused this node is over."""


@dataclass(frozen=True)
class HostChecked:
    """The state of this machine, looked at now and then.

    `clock_offset` is the members' median clock minus ours, in seconds; `disk_free` what is left for the data directory,
    None where the system does not tell.
    """

    clock_offset: float
    disk_free: int | None


@dataclass(frozen=True)
class Troubled:
    """Something failed and the node went on."""

    code: str
    message: str


Event = (
    Started
    | StateChanged
    | WeightsLoaded
    | InnerSteps
    | Evaluated
    | ExchangeStarted
    | ExchangeEnded
    | DoubtSettled
    | OuterStep
    | PeerJudged
    | PeerBanned
    | Checkpointed
    | PeerSeen
    | PeerLost
    | PeerConnected
    | PeerDisconnected
    | ReachFound
    | RelayHeld
    | RelayLost
    | Punched
    | Relaying
    | PartitionHealed
    | WeightsServed
    | WeightsFetched
    | Allowed
    | Traffic
    | Paused
    | Resumed
    | HostChecked
    | Troubled
)

Emit = Callable[[Event], None]
"""How logic tells what happened; never blocks, never raises."""
