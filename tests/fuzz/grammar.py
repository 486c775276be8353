"""What strangers say to a host: bytes drawn from a grammar of all layers, then cut, repeated and altered anywhere.

The rule: a number is a case, the same one for ever on any machine. A case is honest up to its layer, with valid keys where
that is above the handshake, and evil from there on.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from libp2p.host.autonat.pb.autonat_pb2 import Message as AutoNat
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.kad_dht.pb.kademlia_pb2 import Message as Kademlia
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch

from nolocod.p2p.discovery.kademlia import PROTOCOL as KADEMLIA
from nolocod.p2p.nat.autonat import AUTONAT
from nolocod.p2p.nat.circuit_relay import HOP, STOP
from nolocod.p2p.nat.hole_punching import DCUTR
from nolocod.p2p.transport.identify import IDENTIFY
from nolocod.p2p.transport.stream import EXCHANGE, GOSSIP, INFO, PING, SNAPSHOT
from nolocod.p2p.transport.yamux_frames import pack
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import seal
from nolocod.proto.framing import chunk_head, envelope_head
from tests.fuzz.targets import ADDRESS, BEAT, MESSAGES, PEER, SEALED
from tests.support.strangers import HELLO, NOISE, YAMUX, line, varint

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import Identity

LAYERS = ("line", "noise", "payload", "record", "muxer", "yamux", "select", "speak")
"""Where a case stops being honest: the first line; noise's messages; what these carry; sealed records; the line behind them;
yamux's frames; the line of a stream; what is said on it."""
PROTOCOLS = (IDENTIFY, PING, KADEMLIA, HOP, STOP, AUTONAT, DCUTR, INFO, GOSSIP, EXCHANGE, SNAPSHOT)
_OURS = (INFO, GOSSIP, EXCHANGE, SNAPSHOT)
_EXTREMES = (
    0,
    1,
    127,
    128,
    255,
    1023,
    1024,
    65_535,
    65_536,
    1 << 20,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
    1 << 70,
    1 << 90,
)
_KEY_TYPES = {0: 270, 1: 32, 2: 33, 3: 91, 9: 32}
"""libp2p's key types (RSA, Ed25519, secp256k1, ECDSA, none), and about how long such a key is."""


@dataclass(frozen=True)
class Case:
    """`pieces` are written one after the other."""

    layer: str
    protocol: str
    pieces: tuple[bytes, ...]

    def to_line(self) -> str:
        return " ".join((self.layer, self.protocol, *(piece.hex() for piece in self.pieces)))

    @classmethod
    def from_line(cls, text: str) -> Case:
        layer, protocol, *pieces = text.split(" ")
        return cls(layer, protocol, tuple(map(bytes.fromhex, pieces)))


def drawn(role: str, number: int, identity: Identity, host: str, run_id: str) -> Case:
    """Case `number` of `role` ("listener", "dialler"): `identity` speaks to the peer id `host` in its run."""
    rng = random.Random(f"{role} {number}")
    layer = rng.choices(LAYERS, (2, 2, 2, 1, 2, 4, 3, 12))[0]
    protocol = rng.choice(PROTOCOLS)
    whole = _whole(rng, layer, protocol, identity, host, run_id)
    raw = altered(rng, whole) if rng.random() < 0.9 else whole
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return Case(layer, protocol, tuple(raw[start:end] for start, end in zip((0, *cuts), (*cuts, len(raw)), strict=True)))


def altered(rng: random.Random, raw: bytes) -> bytes:
    """`raw` cut, repeated and altered in a few places."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(raw) + 1)
        end = min(len(raw), at + rng.choice((0, 1, 2, 4, 12, 100)))
        change: Callable[[], bytes] = rng.choice(
            (
                lambda: b"",
                lambda: rng.randbytes(end - at),  # noqa: B023  # called here
                lambda: rng.randbytes(rng.choice((1, 3, 16, 200, 70_000 if rng.random() < 0.1 else 9))),
                lambda: raw[at:end] * rng.choice((2, 3, 40)),  # noqa: B023
                lambda: varint(rng.choice(_EXTREMES)),
                lambda: b"\xff" * (end - at),  # noqa: B023
                lambda: bytes(byte ^ 1 << rng.randrange(8) for byte in raw[at:end]),  # noqa: B023
            )
        )
        raw = raw[:at] + change() + (b"" if rng.random() < 0.05 else raw[end:])
    return raw


def protobuf(rng: random.Random, depth: int = 0) -> bytes:
    """Any fields, of which some lie about their length."""
    out = b""
    for _ in range(rng.randrange(5)):
        kind = rng.choice((0, 1, 2, 2, 2, 5, 3, 7))
        out += varint(rng.randrange(1, 12) << 3 | kind)
        if kind == 0:
            out += varint(rng.choice(_EXTREMES))
        elif kind == 2:
            inner = protobuf(rng, depth + 1) if depth < 4 and rng.random() < 0.5 else rng.randbytes(rng.choice((0, 1, 32, 64)))
            out += varint(len(inner) if rng.random() < 0.8 else rng.choice(_EXTREMES)) + inner
        else:
            out += rng.randbytes({1: 8, 5: 4}.get(kind, 0))
    return out


def _whole(rng: random.Random, layer: str, protocol: str, identity: Identity, host: str, run_id: str) -> bytes:
    match layer:
        case "line":
            return HELLO + line(NOISE) + _noise(rng)
        case "noise":
            return _noise(rng)
        case "payload":
            return _payload(rng)
        case "record":
            return b"".join(
                _short(rng.choice((0, 1, 15, 16, 17, 600))) + rng.randbytes(rng.choice((0, 17, 600))) for _ in range(3)
            )
        case "muxer":
            return HELLO + line(YAMUX) + _frames(rng)
        case "yamux":
            return _frames(rng)
        case "select":
            named = [rng.choice((*PROTOCOLS, "ls", "na", "", "/none")).encode() for _ in range(rng.randrange(4))]
            return HELLO * rng.choice((0, 1, 1, 2)) + b"".join(map(line, named)) + rng.randbytes(rng.choice((0, 40)))
    return _said(rng, protocol, identity, host, run_id)


def _short(number: int) -> bytes:
    return struct.pack(">H", number)


def _noise(rng: random.Random) -> bytes:
    bodies = [rng.randbytes(rng.choice((0, 1, 31, 32, 33, 96, 200, 5000))) for _ in range(rng.randrange(1, 4))]
    return b"".join(_short(len(body) if rng.random() < 0.7 else rng.randrange(1 << 16)) + body for body in bodies)


def _payload(rng: random.Random) -> bytes:
    kind = rng.choice([*_KEY_TYPES])
    key = rng.randbytes(max(0, _KEY_TYPES[kind] + rng.choice((0, 0, -1, 1, 4000))))
    public = b"\x08" + varint(kind) + b"\x12" + varint(len(key)) + key
    parts = [b"\x0a" + varint(len(public)) + public, b"\x12\x40" + rng.randbytes(64), b"\x22" + varint(9) + protobuf(rng)]
    return b"".join(part for part in parts if rng.random() < 0.8)


def _frames(rng: random.Random) -> bytes:
    """Yamux frames: mostly of kinds and lengths that there are, on streams of both ends, not always opened."""
    out = b""
    for _ in range(rng.randrange(1, 12)):
        kind, flags = rng.choice((0, 0, 1, 1, 2, 3, 4)), rng.choice((0, 1, 1, 2, 4, 5, 8, 15, 16))
        stream = rng.choice((0, 1, 1, 2, 2, 3, 4, 5, (1 << 32) - 1)) if kind < 2 else rng.choice((0, 0, 1))
        body = rng.choice((b"", HELLO, rng.randbytes(20), line(PING.encode()))) if kind == 0 else b""
        length = rng.choice((len(body),) * 4 + (len(body) + 1, 1 << 18, (1 << 18) + 1, 1 << 24, (1 << 32) - 1))
        out += pack(kind, flags, stream, length) + body  # type: ignore[arg-type]  # kinds that there are not, too
    return out


def _prefixed(raw: bytes) -> bytes:
    return varint(len(raw)) + raw


def _said(rng: random.Random, protocol: str, identity: Identity, host: str, run_id: str) -> bytes:
    """What is said in `protocol` once it is agreed on: one of its messages, or several, or any protobuf."""
    if protocol == PING:
        return rng.randbytes(rng.choice((31, 32, 32, 33, 64)))
    if protocol in _OURS:
        return b"".join(_frame(rng, protocol, identity, host, run_id) for _ in range(rng.choice((1, 1, 2, 4))))
    known = rng.choice(_LIBP2P[protocol]).replace(PEER, ID.from_string(identity.peer_id).to_bytes())
    return b"".join(
        _prefixed(altered(rng, known) if rng.random() < 0.7 else protobuf(rng)) for _ in range(rng.choice((1, 1, 3)))
    )


_LIBP2P = {
    IDENTIFY: [
        Identify(agent_version="x", listen_addrs=[ADDRESS], observed_addr=ADDRESS, protocols=["/a/1"]).SerializeToString()
    ],
    KADEMLIA: [
        Kademlia(
            type=kind, key=PEER, providerPeers=[{"id": PEER, "addrs": [ADDRESS]}], closerPeers=[{"id": PEER}]
        ).SerializeToString()
        for kind in range(6)
    ],
    HOP: [
        HopMessage(type=HopMessage.CONNECT, peer={"id": PEER, "addrs": [ADDRESS]}).SerializeToString(),
        HopMessage(type=HopMessage.RESERVE).SerializeToString(),
        HopMessage(type=HopMessage.STATUS, status=100, reservation={"expire": 1 << 40, "addrs": [ADDRESS]}).SerializeToString(),
    ],
    STOP: [StopMessage(type=StopMessage.CONNECT, peer={"id": PEER}).SerializeToString()],
    AUTONAT: [
        AutoNat(type=AutoNat.DIAL, dial={"peer": {"id": PEER, "addrs": [ADDRESS]}}).SerializeToString(),
        AutoNat(type=AutoNat.DIAL_RESPONSE, dialResponse={"status": 0, "addr": ADDRESS}).SerializeToString(),
    ],
    DCUTR: [HolePunch(type=kind, ObsAddrs=[ADDRESS]).SerializeToString() for kind in (100, 300)],
}


def _frame(rng: random.Random, protocol: str, identity: Identity, host: str, run_id: str) -> bytes:
    """A frame of ours: a chunk, an envelope that `identity` signed, or one whose signed body is altered."""
    if rng.random() < 0.15:
        return chunk_head(rng.choice((0, 1, 1 << 31)), rng.choice((10, 100, 1 << 22, (1 << 32) - 1))) + rng.randbytes(100)
    first = {
        INFO: pb.Body(info_request=pb.InfoRequest()),
        GOSSIP: pb.Body(
            gossip=pb.Gossip(heartbeats=[seal(pb.Body(heartbeat=BEAT, run_id=run_id), identity)], ages=[7], answer=True)
        ),
        EXCHANGE: MESSAGES[0],
        SNAPSHOT: pb.Body(snapshot_request=pb.SnapshotRequest()),
    }[protocol]
    info = pb.Body(info=pb.Info(manifest=SEALED.to_bytes()))
    body = pb.Body()
    body.CopyFrom(first if rng.random() < 0.5 else rng.choice((*MESSAGES, first, info)))
    if rng.random() < 0.7:
        changed = pb.Body()
        try:
            changed.ParseFromString(altered(rng, body.SerializeToString()) if rng.random() < 0.8 else protobuf(rng))
            body = changed
        except DecodeError:
            pass
    body.run_id, body.receiver, body.sequence = run_id, host, rng.choice((0, 1, 1, 1, 2, (1 << 64) - 1))
    body.session = rng.randbytes(rng.choice((16, 16, 16, 0, 1000)))
    raw = seal(body, identity)
    if rng.random() < 0.3:
        raw = altered(rng, raw)
    return envelope_head(len(raw) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 22, (1 << 32) - 1))) + raw
