"""Descriptions of chunked content (types.Description), to the wire and from it.

The rule: a description is believed only in so far as it is consistent (as many hashes as chunks, within
the limits); what it promises is checked chunk by chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import blake3

from nolocod.errors import AlteredBytesError, ProtocolError
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.types import Description

if TYPE_CHECKING:
    from nolocod.proto.limits import Limits

HASH_SIZE = 32


def describe_to_wire(description: Description) -> pb.Describe:
    return pb.Describe(size=description.size, chunk_size=description.chunk_size, hashes=description.hashes)


def describe_from_wire(wire: pb.Describe, limits: Limits) -> Description:
    """Check a peer's description; ProtocolError if it contradicts itself or passes a limit."""
    if not 0 < wire.chunk_size <= limits.chunk_bytes:
        raise ProtocolError(f"a chunk size of {wire.chunk_size} bytes is outside 1 to {limits.chunk_bytes}.")
    if not 0 < wire.size <= limits.snapshot_bytes:
        raise ProtocolError(f"a size of {wire.size} bytes is outside 1 to {limits.snapshot_bytes}.")
    if len(wire.hashes) != -(-wire.size // wire.chunk_size):
        raise ProtocolError(f"{len(wire.hashes)} hashes do not fit {wire.size} bytes in chunks of {wire.chunk_size}.")
    if any(len(digest) != HASH_SIZE for digest in wire.hashes):
        raise ProtocolError(f"a chunk's hash does not have {HASH_SIZE} bytes.")
    return Description(wire.size, wire.chunk_size, tuple(wire.hashes))


def check_chunk(description: Description, index: int, content: memoryview) -> None:
    """AlteredBytesError unless `content` has the hash of chunk `index`."""
    if blake3.blake3(content).digest() != description.hashes[index]:
        raise AlteredBytesError(f"chunk {index} does not have the hash that its sender signed.")
