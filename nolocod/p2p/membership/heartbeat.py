"""One sealed heartbeat, read: what a member says of itself, the same for whoever hears it.

The rule: what is in it follows from its bytes alone, so that it need be read only once; when it was heard, and what that
means, is the hearer's matter (`membership`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast, get_args

from nolocod.errors import ProtocolError
from nolocod.identity import PeerId
from nolocod.observe.events import NatClass
from nolocod.p2p.transport.multiaddrs import MAX_ADDRESS, dialable
from nolocod.proto.envelope import MAX_NUMBER, open_envelope, peek, readable, standing_from_wire

if TYPE_CHECKING:
    from nolocod.proto.types import Standing

_STATE = re.compile(r"[a-z]{1,16}")
"""What a state looks like. One that we do not know is a later release's: such a member is shown, and not chosen."""
MAX_HEARTBEAT = 4096
"""Bytes of one sealed heartbeat."""
_MAX_ADDRESSES = 8


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`raw` as it came, its signature checked; `time` is its sender's time of day in seconds, `life` and `other` are
    gossip.OwnHeartbeat's."""

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
    other: int


def read(raw: bytes, run_id: str) -> Heartbeat:
    """Check all of a heartbeat of run `run_id`.

    Raises ProtocolError (size, content: what no honest node sends), SignatureError, OtherRunError or PeerVersionError.
    """
    if len(raw) > MAX_HEARTBEAT:
        raise ProtocolError(f"a heartbeat of {len(raw)} bytes is above the limit of {MAX_HEARTBEAT}.")
    body = open_envelope(raw, run_id=run_id, receiver="")
    if body.WhichOneof("content") != "heartbeat":
        raise ProtocolError("gossip carries something that is no heartbeat.")
    heartbeat = body.heartbeat
    standing = standing_from_wire(heartbeat.standing)
    if not _STATE.fullmatch(heartbeat.state):
        raise ProtocolError(f"a heartbeat tells of a state {readable(heartbeat.state, 20)!r}.")
    if max(heartbeat.count, heartbeat.time_ms) >= MAX_NUMBER:
        raise ProtocolError("a heartbeat's numbers are beyond all measure.")
    if len(heartbeat.addresses) > _MAX_ADDRESSES or len(heartbeat.version) > 32:
        raise ProtocolError("a heartbeat has too many addresses or too long a version.")
    return Heartbeat(
        raw=raw,
        peer=PeerId(body.sender),
        count=heartbeat.count,
        standing=standing,
        state=heartbeat.state,
        addresses=_usable(tuple(address[: MAX_ADDRESS + 1] for address in heartbeat.addresses)),
        version=readable(heartbeat.version),
        time=heartbeat.time_ms / 1000,
        nat=cast("NatClass", heartbeat.reach) if heartbeat.reach in get_args(NatClass) else None,
        relays=heartbeat.relays,
        admission=heartbeat.admission,
        life=heartbeat.life,
        other=heartbeat.other,
    )


def glance(raw: bytes) -> tuple[PeerId, int] | None:
    """Whose heartbeat it says it is and its count, with nothing checked: good only for dropping it. None for no heartbeat."""
    try:
        body = peek(raw)
    except ProtocolError:
        return None  # `read` says it better
    return (PeerId(body.sender), body.heartbeat.count) if body.HasField("heartbeat") else None


@lru_cache(maxsize=1024)
def _usable(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Those that can be dialled. Parsing costs more than the signature, and a member mostly tells the same ones again."""
    return tuple(address for address in addresses if dialable(address))
