"""The events of a node, as frozen structs. Logic emits them; metrics, status and log follow them.

Sizes in bytes, times in seconds, losses in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from nolocod.identity import PeerId  # noqa: TC001  # msgspec reads the annotations

Reach = Literal["direct", "inbound", "punched", "relayed"]
"""How a peer is connected: we dialled it, it dialled us, both did through their NATs, or through a relay."""
NatClass = Literal["public", "cone", "symmetric", "client"]
"""How others reach a node: directly; by hole punching; through relays only; not at all, it only dials out."""
NodeState = Literal["starting", "discovering", "fetching", "loading", "training", "paused", "finished", "stopping"]
PauseReason = Literal["owner", "hours", "battery", "metered", "used", "gpu", "heat", "power", "budget", "settings", "run"]
Outcome = Literal["committed", "aborted", "in_doubt", "busy", "refused", "unreachable"]
"""How an exchange, or the attempt to start one, ended."""


class Event(msgspec.Struct, frozen=True):
    """Something that happened."""


class Started(Event, frozen=True):
    peer_id: PeerId
    run_id: str
    run_name: str
    addresses: tuple[str, ...]
    http: str


class RunFound(Event, frozen=True):
    """This node joins the run that `peer_id` named first: its owner had asked for no other one."""

    run_id: str
    run_name: str
    peer_id: PeerId


class StateChanged(Event, frozen=True):
    """`state` is what the node does now; `waiting_for` says in words what it waits for, or is empty."""

    state: NodeState
    waiting_for: str = ""


class WeightsLoaded(Event, frozen=True):
    """The trainer holds weights: the run's initial ones, a checkpoint's, or a donor's."""

    round: int
    source: Literal["seed", "checkpoint", "donor"]


class InnerSteps(Event, frozen=True):
    """`steps` inner steps were done since the last report, in `seconds` of computing."""

    steps: int
    tokens: int
    loss: float
    learning_rate: float
    seconds: float
    waited: float = 0.0
    """Of these, for text."""
    mfu: float | None = None
    """Floating-point operations of the model over those that the devices could do meanwhile; None where that is not known."""


class Evaluated(Event, frozen=True):
    """Mean held-out loss of the fast weights at `round`."""

    round: int
    loss: float
    seconds: float


class ExchangeStarted(Event, frozen=True):
    """An offer was accepted, by us or by `partner`."""

    partner: PeerId
    initiator: bool


class ExchangeEnded(Event, frozen=True):
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


class DoubtSettled(Event, frozen=True):
    """A partner came back and told what it decided in an exchange that had ended in doubt here."""

    partner: PeerId
    session: str
    committed: bool


class OuterStep(Event, frozen=True):
    """One outer step. `spread` is the L2 norm of the two partners' difference in fast weights (paired only)."""

    round: int
    kind: Literal["paired", "solo"]
    partner: PeerId | None
    inner_steps: int
    spread: float | None
    seconds: float
    weight: float = 1.0
    """What the partner's difference counted for: 1 in full, less where it was clipped (ClippedGossip)."""


class PeerJudged(Event, frozen=True):
    """A peer's conduct changed its `reputation`, from 0 (banned) to 1."""

    peer_id: PeerId
    reputation: float
    why: str


class PeerBanned(Event, frozen=True):
    """For `seconds` we neither choose `peer_id` nor answer it."""

    peer_id: PeerId
    seconds: float
    why: str


class Checkpointed(Event, frozen=True):
    round: int
    size: int
    seconds: float
    stopped: float = 0.0
    """Of these, how long training stood still. Rests between pieces, which are training's, do not count."""


class PeerSeen(Event, frozen=True):
    """A member became live or changed what it says."""

    peer_id: PeerId
    round: int
    tokens: int
    loss: float
    state: str
    nat: NatClass | None = None
    """How others reach it, as it says itself."""


MADE_ROOM = "made room for others"
"""The reason where a member is dropped that may be alive: a node keeps a limited number of members."""


class PeerLost(Event, frozen=True):
    peer_id: PeerId
    reason: str


class PeerConnected(Event, frozen=True):
    peer_id: PeerId
    reach: Reach


class PeerDisconnected(Event, frozen=True):
    peer_id: PeerId


class ReachFound(Event, frozen=True):
    """How others reach this node. `kind` is None while that is not known; `why` says in words what was seen, and what the
    owner can do about it. `addresses` are those that peers are told, best first."""

    kind: NatClass | None
    why: str
    addresses: tuple[str, ...]


class RelayHeld(Event, frozen=True):
    """`relay` gave us a reservation, or renewed it, for `seconds`."""

    relay: PeerId
    seconds: float


class RelayLost(Event, frozen=True):
    relay: PeerId
    reason: str


class Punched(Event, frozen=True):
    """An attempt to replace the relayed connection to `peer_id` by a direct one took `seconds`; `reason` if it failed."""

    peer_id: PeerId
    succeeded: bool
    seconds: float
    reason: str = ""


class Relaying(Event, frozen=True):
    """What this node relays for others: reservations and `open` circuits now, circuits and bytes since it started."""

    reservations: int
    open: int
    circuits: int
    bytes: int


class PartitionHealed(Event, frozen=True):
    """`peer_id` told us of so many new `members`, and knew almost none of ours."""

    peer_id: PeerId
    members: int


class WeightsServed(Event, frozen=True):
    """`peer_id` fetched our snapshot, or a part of it if not `whole`."""

    peer_id: PeerId
    size: int
    seconds: float
    whole: bool


class WeightsComing(Event, frozen=True):
    """So many bytes of a donor's weights are here, of `size`; told every ten seconds while they come."""

    donor: PeerId
    here: int
    size: int


class WeightsFetched(Event, frozen=True):
    donor: PeerId
    round: int
    size: int
    seconds: float


class Allowed(Event, frozen=True):
    """The owner's limits: bytes per second, bytes per month, hours; None and empty for no limit."""

    up: int | None
    down: int | None
    monthly: int | None
    hours: tuple[str, ...]
    on_battery: bool
    """Whether it goes on when the machine runs on battery."""
    limits: dict[str, str] = {}
    """Of the machine, by their keys, as they are shown; those alone that were given."""


class Eased(Event, frozen=True):
    """The trainer computes in this `share` of the time. `why` it is less than the owner gave it, if so; with what was measured,
    in °C and watts, None where nobody wants to know."""

    share: float
    why: str = ""
    temperature: float | None = None
    power: float | None = None


class Traffic(Event, frozen=True):
    """All bytes on the connections to peers: of this process, per second lately, and of `month` ("2025-06", UTC)."""

    sent: int
    received: int
    sending: float
    receiving: float
    month: str
    month_sent: int
    month_received: int


class Paused(Event, frozen=True):
    """This node pauses training and exchanges. `why` says the cause and what to do about it.

    It resumes after `seconds`; None if that does not depend on the clock.
    """

    reason: PauseReason
    why: str
    seconds: float | None


class Resumed(Event, frozen=True):
    """The reason for the pause is over."""


class HostChecked(Event, frozen=True):
    """The state of this machine, checked now and then.

    `clock_offset`: the members' median clock minus ours, in seconds. `disk_free`: bytes left for the data directory; None
    where the system does not tell.
    """

    clock_offset: float
    disk_free: int | None


class MicroBatch(Event, frozen=True):
    """So many of the `windows` of an inner step are computed at once, which is what this machine's memory takes."""

    at_once: int
    windows: int


class MemoryTaken(Event, frozen=True):
    """Bytes that training takes here, by part: what lies there now, and the most that ever did on the leader's device, with
    activations (of a node on the CPU, in its process)."""

    weights: int
    gradients: int
    optimizer: int
    outer: int
    """The slow weights and the outer momentum."""
    exchange: int
    """Messages, and what is kept while they are on the line."""
    peak: int


class DevicesChosen(Event, frozen=True):
    """The trainer computes on these, as torch names them, and makes messages on one."""

    devices: tuple[str, ...]
    made_on: str = "cpu"


class SamplesRead(Event, frozen=True):
    """Of so many fine-tuning samples some were cut to the length of a window, and some were left out: they are too long, or
    have nothing to learn."""

    samples: int
    cut: int
    left_out: int
    dataset: str = ""
    """Of the hub, which they are of; a run may have several."""


class TextSupply(Event, frozen=True):
    """Whether new text to train on comes. While it does not, the last windows are trained on again, and the source is asked
    for ever."""

    trouble: str
    """Why none comes; empty when it comes again ..."""
    seconds: float
    """... after so long."""


class Contribution(msgspec.Struct, frozen=True):
    """What a node gave, as receipts that both partners signed show it. `name` is what its owner calls it."""

    peer_id: PeerId
    name: str
    tokens: int
    """That it trained between exchanges which others accepted."""
    seconds: float
    exchanges: int
    """Those whose receipts were counted; of others' exchanges that is a part."""
    partners: int


class Contributed(Event, frozen=True):
    """What this node gave (None before its first exchange), and those of the run that gave most."""

    own: Contribution | None
    others: tuple[Contribution, ...]


class Amended(Event, frozen=True):
    """The run's owners change it from round `at` of the whole model on; `what` in words."""

    at: int
    what: str


class Troubled(Event, frozen=True):
    """Something failed and the node went on."""

    code: str
    message: str


Emit = Callable[[Event], None]
"""How logic reports an event; never blocks, never raises."""
