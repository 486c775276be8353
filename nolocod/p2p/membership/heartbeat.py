"""Heartbeats: what a member says of itself, made by `OwnHeartbeat` and read by `read`. proto/envelope.py signs them.

The rule: a `Heartbeat` follows from its bytes alone, so that it need be read only once. When it was heard, and what that
means, is the table's matter.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, cast, get_args

from nolocod import __version__
from nolocod.errors import ProtocolError
from nolocod.identity import Identity, PeerId
from nolocod.observe.events import NatClass
from nolocod.p2p.limits.address_groups import address_group
from nolocod.p2p.transport.multiaddrs import MAX_ADDRESS, dialable, host_of
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.built import built_from_wire, built_to_wire
from nolocod.proto.envelope import MAX_NUMBER, open_envelope, peek, readable, seal, standing_from_wire, standing_to_wire
from nolocod.proto.types import Built
from nolocod.units import NAME

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from nolocod.proto.types import Standing

_STATE = re.compile(r"[a-z]{1,16}")
"""A state that we do not know is a later release's: such a member is shown, and not chosen."""
WATCHING = "watching"
"""The state of one that only looks: it makes nobody a member (`Membership.heard`)."""
MAX_HEARTBEAT = 4096
"""Bytes of one sealed heartbeat."""
_MAX_ADDRESSES = 8
MOST_PHASE = 7 * 24 * 3600 * 1000
"""Milliseconds of a phase that are told at most."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`raw` as it came, its signature checked; `time` is its sender's time of day in seconds."""

    raw: bytes
    peer: PeerId
    count: int
    standing: Standing
    state: str
    addresses: tuple[str, ...]
    version: str
    time: float
    nat: NatClass | None
    relays: bool
    admission: bytes
    life: int
    """See OwnHeartbeat."""
    other: int
    phase: float = 0.0
    name: str = ""
    built: Built = field(default_factory=Built)

    @property
    def group(self) -> str:
        """The address group that it tells; its sender's id where it tells none."""
        return next(filter(None, map(_group_of, self.addresses)), self.peer)


@lru_cache(maxsize=4096)
def _group_of(address: str) -> str | None:
    return address_group(host_of(address))


def read(raw: bytes, run_id: str) -> Heartbeat:
    """Check all of a heartbeat of run `run_id`.

    Raises ProtocolError (size, content), SignatureError, OtherRunError or PeerVersionError.
    """
    if len(raw) > MAX_HEARTBEAT:
        raise ProtocolError(f"a heartbeat of {len(raw)} bytes is above the limit of {MAX_HEARTBEAT}.")
    body = open_envelope(raw, run_id=run_id, receiver="")
    if body.WhichOneof("content") != "heartbeat":
        raise ProtocolError("gossip carries something that is not a heartbeat.")
    heartbeat = body.heartbeat
    standing = standing_from_wire(heartbeat.standing)
    if not _STATE.fullmatch(heartbeat.state):
        raise ProtocolError(f"a heartbeat has the unknown state {readable(heartbeat.state, 20)!r}.")
    if max(heartbeat.count, heartbeat.time_ms) >= MAX_NUMBER:
        raise ProtocolError("a heartbeat's numbers are too large.")
    if len(heartbeat.addresses) > _MAX_ADDRESSES or len(heartbeat.version) > 32:
        raise ProtocolError("a heartbeat has too many addresses or too long a version.")
    return Heartbeat(
        raw=raw, peer=PeerId(body.sender), count=heartbeat.count, standing=standing, state=heartbeat.state,
        addresses=_usable(tuple(address[: MAX_ADDRESS + 1] for address in heartbeat.addresses)),
        version=readable(heartbeat.version), time=heartbeat.time_ms / 1000,
        nat=cast("NatClass", heartbeat.reach) if heartbeat.reach in get_args(NatClass) else None, relays=heartbeat.relays,
        admission=heartbeat.admission, life=heartbeat.life, other=heartbeat.other,
        phase=heartbeat.phase_ms / 1000, name=heartbeat.name if NAME.fullmatch(heartbeat.name) else "",
        built=built_from_wire(heartbeat.built),
    )  # fmt: skip


def glance(raw: bytes) -> tuple[PeerId, int] | None:
    """Whose heartbeat it says it is and its count, unchecked: good only for dropping it. None if it cannot be parsed."""
    try:
        body = peek(raw)
    except ProtocolError:
        return None  # `read` says it better
    return (PeerId(body.sender), body.heartbeat.count) if body.HasField("heartbeat") else None


@lru_cache(maxsize=1024)
def _usable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those that can be dialled. Parsing costs more than the signature, and a member mostly tells the same ones again."""
    return tuple(address for address in addresses if dialable(address))


@dataclass
class OwnHeartbeat:
    """Makes our heartbeats: `own` gives standing and state, `addresses` what others may dial, `reach` how others
    reach us, `relays` whether we give reservations, `admission` by what right we are a member."""

    identity: Identity
    run_id: str
    own: Callable[[], tuple[Standing, str]]
    addresses: Callable[[], Sequence[str]]
    clock: Callable[[], float] = time.time
    reach: Callable[[], NatClass | None] = lambda: None
    relays: Callable[[], bool] = lambda: False
    admission: bytes = b""
    life: int = 0
    """When this process began, in seconds, and 32 random bits below (`new_life`); 0 is not told."""
    clone: int = 0
    """The life of another node that speaks with our key now, once that is proved."""
    phase: Callable[[], float] = lambda: 0.0
    """Seconds that a phase's inner steps take us; 0 is not told."""
    name: str = ""
    """What the node's owner calls it."""
    built: Callable[[], Built] = Built
    """What our libraries made of the run's model; empty is not told."""
    leaving: bool = False
    """From now on nothing else is said."""
    _count: int = 0
    _other: tuple[int, int] = (0, 0)
    """The count of what we last heard in our own name that we did not say, and whose life it was."""

    def heartbeat(self) -> bytes:
        """Seal a new heartbeat. Its count grows over restarts, as the time of day does."""
        (standing, state), built = self.own(), self.built()
        now_ms = int(self.clock() * 1000)
        self._count = max(now_ms, self._count + 1)
        heartbeat = pb.Heartbeat(
            count=self._count, standing=standing_to_wire(standing), state="leaving" if self.leaving else state,
            addresses=list(self.addresses())[:_MAX_ADDRESSES], version=__version__, time_ms=now_ms,
            reach=self.reach() or "", relays=self.relays(), admission=self.admission, life=self.life,
            other=self._other[1], phase_ms=min(math.ceil(1000 * self.phase()), MOST_PHASE), name=self.name,
            built=built_to_wire(built) if built.layout else None,
        )  # fmt: skip
        return seal(pb.Body(run_id=self.run_id, heartbeat=heartbeat), self.identity)

    def hear(self, heartbeat: Heartbeat) -> None:
        """Something signed with our own key, by an earlier life of ours or by a clone of this node.

        Anybody can replay an earlier life's heartbeats; but only one that lives can name our life, which is drawn by
        chance. So each side names the other's, and who finds its own knows. We also go on from the highest count, so that
        a clock that ran ahead does not keep us unheard after a restart.
        """
        if self.life == 0 or heartbeat.life == self.life:
            return
        if heartbeat.count < MAX_NUMBER // 2:
            self._count = max(self._count, heartbeat.count)
        if heartbeat.life and heartbeat.count > self._other[0]:
            self._other = heartbeat.count, heartbeat.life
        if heartbeat.other == self.life:
            self.clone = heartbeat.life


def new_life(wall: float, rng: random.Random) -> int:
    """A life that begins at the time of day `wall`: later ones are greater, and nobody can guess one."""
    return int(wall) << 32 | rng.getrandbits(32)
