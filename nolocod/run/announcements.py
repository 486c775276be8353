"""Announcements: what a run's owner says of it to whom it may be new, as bytes that anybody can check.

The rule: an announcement is good for the key that signed it; whether that is the run's owner only the manifest says, so nothing
in one is used to join a run but its addresses. It is bounded in size, and ends by itself. No clock, no files in here.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import blake3
from google.protobuf.message import DecodeError

from nolocod.errors import NoSuchRunError, ProtocolError, SignatureError, UsageError
from nolocod.identity import PeerId, public_key, verify
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import MAX_NUMBER, readable

if TYPE_CHECKING:
    from nolocod.identity import Identity

MAX_ANNOUNCEMENT = 2048
"""Bytes of one, sealed."""
MAX_ADDRESSES = 4
LONGEST = 30 * 86400.0
"""Seconds for which an announcement lasts at most."""
DIGEST = 8
_AHEAD = 3600.0
"""Seconds by which an owner's clock may be ahead."""
_DOMAIN = b"nolocod announcement 1\0"
_RUN_ID = re.compile(r"[0-9a-f]{64}")
_TEXTS = {"name": 64, "description": 400, "model": 64, "data": 16, "access": 16, "licence": 64, "contact": 128}
"""Characters at most."""
_LINK = re.compile(r"nolocod:([0-9a-f]{12,64})@(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})/(\w{40,64})")
LINK_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """`version` and `expires` are times of day in seconds; `raw` is what was signed and by whom, empty before that."""

    run_id: str
    owner: PeerId
    version: float
    expires: float
    addresses: tuple[str, ...]
    withdrawn: bool = False
    name: str = ""
    description: str = ""
    model: str = ""
    parameters: int = 0
    memory: int = 0
    message: int = 0
    rounds: int = 0
    data: str = ""
    access: str = ""
    licence: str = ""
    contact: str = ""
    raw: bytes = field(default=b"", repr=False)

    @property
    def key(self) -> tuple[str, PeerId]:
        """Two of one key are versions of one announcement."""
        return self.run_id, self.owner

    def lasts(self, wall: float) -> bool:
        """Whether it counts at the time of day `wall`. Others' clocks differ: who tells one that does not is not at fault."""
        return self.version <= wall + _AHEAD and wall < self.expires

    @property
    def digest(self) -> bytes:
        return digest(self.raw)


_NUMBERS = ("parameters", "memory", "message", "rounds")


def digest(raw: bytes) -> bytes:
    """What stands for a sealed announcement."""
    return blake3.blake3(raw).digest()[:DIGEST]


def sign(said: Announcement, owner: Identity) -> Announcement:
    """The same, signed. UsageError for a text that is too long, or for too many addresses."""
    for name, most in _TEXTS.items():
        if len(getattr(said, name)) > most:
            raise UsageError(f"the {name} has more than {most} characters.", remedy="Make it shorter.")
    if not 1 <= len(said.addresses) <= MAX_ADDRESSES:
        raise UsageError(f"an announcement has 1 to {MAX_ADDRESSES} addresses, and not {len(said.addresses)}.")
    told = {name: getattr(said, name) for name in (*_TEXTS, *_NUMBERS)}
    body = pb.Announcement(
        run_id=said.run_id, owner=owner.peer_id, version=int(said.version * 1000), expires_ms=int(said.expires * 1000),
        addresses=said.addresses, withdrawn=said.withdrawn, **told,
    ).SerializeToString(deterministic=True)  # fmt: skip
    raw = pb.Sealed(body=body, signature=owner.sign(_DOMAIN + body)).SerializeToString()
    if len(raw) > MAX_ANNOUNCEMENT:
        raise UsageError(f"the announcement has more than {MAX_ANNOUNCEMENT} bytes.", remedy="Shorten the description.")
    return replace(said, owner=owner.peer_id, raw=raw)


def read(raw: bytes) -> Announcement:
    """Check a sealed announcement, but for its time. ProtocolError (size, content) or SignatureError."""
    if len(raw) > MAX_ANNOUNCEMENT:
        raise ProtocolError(f"an announcement of {len(raw)} bytes is above the limit of {MAX_ANNOUNCEMENT}.")
    sealed, body = pb.Sealed(), pb.Announcement()
    try:
        sealed.ParseFromString(raw)
        body.ParseFromString(sealed.body)
    except DecodeError as error:
        raise ProtocolError("an announcement cannot be parsed.") from error
    verify(body.owner, _DOMAIN + sealed.body, sealed.signature)
    version, expires = body.version / 1000, body.expires_ms / 1000
    if not 0 < expires - version <= LONGEST:
        raise ProtocolError("an announcement lasts for too long.")
    if not _RUN_ID.fullmatch(body.run_id) or not 1 <= len(body.addresses) <= MAX_ADDRESSES:
        raise ProtocolError("an announcement lacks its run or where to find it.")
    if any(len(getattr(body, name)) > most for name, most in _TEXTS.items()):
        raise ProtocolError("an announcement has a text that is too long.")
    if any(getattr(body, name) >= MAX_NUMBER for name in _NUMBERS):
        raise ProtocolError("an announcement's numbers are too large.")
    told: dict[str, Any] = {name: readable(getattr(body, name), most) for name, most in _TEXTS.items()}
    told |= {name: getattr(body, name) for name in _NUMBERS}
    return Announcement(
        run_id=body.run_id, owner=PeerId(body.owner), version=version, expires=expires, addresses=tuple(body.addresses),
        withdrawn=body.withdrawn, raw=raw, **told,
    )  # fmt: skip


def link(run_id: str, address: str) -> str:
    """A run and one of its nodes as one short word, of "/ip4/…/tcp/…/p2p/PEER"; empty for an address of another kind."""
    parts = address.strip("/").split("/")
    if len(parts) != 6 or parts[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or (parts[2], parts[4]) != ("tcp", "p2p"):
        return ""
    host = f"[{parts[1]}]" if parts[0] == "ip6" else parts[1]
    return f"nolocod:{run_id[:LINK_DIGITS]}@{host}:{parts[3]}/{parts[5]}"


def read_link(text: str) -> tuple[str, str]:
    """The beginning of the run's id, and the node's multiaddr. NoSuchRunError for what is none."""
    found = _LINK.fullmatch(text.strip().rstrip(".,;"))
    if found is None or not 0 < int(found[3]) < 65536:
        raise NoSuchRunError(f"{text[:80]!r} is no link to a run.")
    run_id, host, port, peer = found.groups()
    try:
        public_key(peer)
        kind = f"ip{ipaddress.ip_address(host.strip('[]')).version}"
    except SignatureError as error:
        raise NoSuchRunError(f"{text[:80]!r} names no node.") from error
    except ValueError:
        kind = "dns"
    return run_id, f"/{kind}/{host.strip('[]')}/tcp/{port}/p2p/{peer}"
