"""Yamux frames, parsed and packed: `| version 0 | type | flags, 2 bytes | stream, 4 bytes | length, 4 bytes |`.

The rule: no sockets and no waiting here, and nothing is stored but an incomplete header, so that a peer's
lengths cost no memory. Source: the yamux specification of HashiCorp, in the edition of libp2p
(/yamux/1.0.0).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING

from libp2p.io.exceptions import IOException

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("!BBHII")
HEADER_SIZE = _HEADER.size
FIRST_WINDOW = 256 << 10
"""What either side may send on a new stream; the specification leaves no choice."""
MOST_WINDOW = 16 << 20
LAST_STREAM = 2**32 - 1


class FrameError(IOException):  # type: ignore[misc]  # libp2p has no types that mypy follows
    """A frame that the specification, or the window we gave, does not allow: the connection ends."""


class Kind(IntEnum):
    DATA = 0
    WINDOW = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    NONE = 0
    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class Away(IntEnum):
    """Why a connection ends: the length of a GO_AWAY frame."""

    NORMAL = 0
    PROTOCOL = 1


_ALL_FLAGS = int(Flag.SYN | Flag.ACK | Flag.FIN | Flag.RST)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    flags: int
    stream: int
    length: int
    """DATA: bytes that follow. WINDOW: bytes of credit. PING: the value to be sent back. GO_AWAY: the reason."""


def pack(kind: Kind, flags: int, stream: int, length: int) -> bytes:
    """A frame's header."""
    return _HEADER.pack(0, kind, flags, stream, length)


def unpack(raw: bytes) -> Frame:
    """Read a header; FrameError if it makes no sense."""
    version, kind, flags, stream, length = _HEADER.unpack(raw)
    if version:
        raise FrameError(f"yamux version {version} is not known.")
    if kind > Kind.GO_AWAY:
        raise FrameError(f"yamux frame type {kind} is not known.")
    if flags & ~_ALL_FLAGS:
        raise FrameError(f"yamux flags {flags:#x} are not known.")
    if (kind <= Kind.WINDOW) != bool(stream):
        raise FrameError(f"a yamux frame of type {kind} on stream {stream}.")
    if kind == Kind.DATA and length > MOST_WINDOW:
        raise FrameError(f"a yamux frame of {length} bytes.")
    return Frame(Kind(kind), flags, stream, length)


class Deframer:
    """Cuts a connection's plaintext into frames."""

    def __init__(self) -> None:
        self.body = 0
        """Bytes that are still to come of the last DATA frame."""
        self.at = 0
        """Bytes of what was fed last that have been cut."""
        self._head = bytearray()

    @property
    def inside(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self.body or self._head)

    def feed(self, plain: memoryview) -> Iterator[Frame | memoryview]:
        """Headers, each followed by the pieces of its body that are in `plain`. Raises FrameError.

        Each piece must be used before the next one is asked for.
        """
        self.at = 0
        while self.at < len(plain):
            if self.body:
                piece = plain[self.at : self.at + self.body]
                self.body -= len(piece)
                self.at += len(piece)
                yield piece
                continue
            missing = plain[self.at : self.at + HEADER_SIZE - len(self._head)]
            self._head += missing
            self.at += len(missing)
            if len(self._head) == HEADER_SIZE:
                head = bytes(self._head)
                self._head.clear()
                frame = unpack(head)
                self.body = frame.length if frame.kind == Kind.DATA else 0
                yield frame
