"""Frame heads: what is announced is checked before it is read."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import ProtocolError
from nolocod.proto.framing import HEAD_SIZE, ChunkHead, EnvelopeHead, chunk_head, envelope_head, parse_head

LIMITS = 1000, 5000


@given(st.integers(1, 1000), st.integers(0, 2**32 - 1), st.integers(1, 5000))
def test_heads_survive_the_wire(envelope: int, index: int, chunk: int) -> None:
    assert parse_head(envelope_head(envelope), *LIMITS) == EnvelopeHead(envelope)
    assert parse_head(chunk_head(index, chunk), *LIMITS) == ChunkHead(index, chunk)


@given(st.binary(min_size=HEAD_SIZE, max_size=HEAD_SIZE))
def test_no_head_passes_a_limit_or_raises_anything_else(raw: bytes) -> None:
    with suppress(ProtocolError):
        head = parse_head(raw, *LIMITS)
        assert 0 < head.length <= LIMITS[isinstance(head, ChunkHead)]


@pytest.mark.parametrize(
    "raw",
    [
        envelope_head(0),
        envelope_head(1001),
        chunk_head(3, 0),
        chunk_head(3, 5001),
        b"\x02" + bytes(7) + b"\x01",
        b"\x00" + bytes(3) + b"\x01" + bytes(3) + b"\x01",
        bytes(8),
        b"",
    ],
)
def test_what_is_no_frame_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_head(raw, *LIMITS)
