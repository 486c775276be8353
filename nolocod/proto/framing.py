"""Frames: a fixed head of nine bytes, then the content.

    type u8 | index u32 | length u32 (big-endian)

Type 0 is an envelope (index 0), type 1 a chunk. A head is parsed by itself and checked against what may come now, so that
whoever reads knows where the content may go before a byte of it is read: an envelope into memory that grows with what
arrives, a chunk straight into its place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nolocod.errors import ProtocolError

HEAD_SIZE = 9

_HEAD = struct.Struct(">BII")
_ENVELOPE, _CHUNK = 0, 1


@dataclass(frozen=True)
class EnvelopeHead:
    """An envelope of `length` bytes follows."""

    length: int


@dataclass(frozen=True)
class ChunkHead:
    """Chunk `index` follows: `length` bytes."""

    index: int
    length: int


def envelope_head(length: int) -> bytes:
    return _HEAD.pack(_ENVELOPE, 0, length)


def chunk_head(index: int, length: int) -> bytes:
    return _HEAD.pack(_CHUNK, index, length)


def parse_head(raw: bytes, most: int, most_chunk: int = 0) -> EnvelopeHead | ChunkHead:
    """Read a head (`HEAD_SIZE` bytes) where an envelope of at most `most` bytes may come, or a chunk of `most_chunk`.

    ProtocolError if it is none, or announces nothing or too much.
    """
    if len(raw) != HEAD_SIZE:
        raise ProtocolError(f"a frame's head has {len(raw)} bytes, not {HEAD_SIZE}.")
    kind, index, length = _HEAD.unpack(raw)
    if kind == _CHUNK and not most_chunk:
        raise ProtocolError(f"chunk {index} came where a message was due.")
    limit = most_chunk if kind == _CHUNK else most
    if kind not in (_ENVELOPE, _CHUNK) or (kind == _ENVELOPE and index):
        raise ProtocolError(f"a frame of type {kind}, index {index} is not known.")
    if not 0 < length <= limit:
        raise ProtocolError(f"a frame of {length} bytes is outside 1 to {limit}.")
    return EnvelopeHead(length) if kind == _ENVELOPE else ChunkHead(index, length)
