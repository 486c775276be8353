"""Tensors to bytes and back."""

from __future__ import annotations

import math

import pytest
import torch

from nolocod.codec import PIECE, Codec, decode, encode, encoded_size, pieces


def roundtrip(flat: torch.Tensor, codec: Codec, seed: int = 0) -> torch.Tensor:
    box = torch.empty(encoded_size(flat.numel(), codec), dtype=torch.uint8)
    encode(flat, box, codec, torch.Generator().manual_seed(seed))
    return decode(box, codec)


def test_float32_is_exact() -> None:
    flat = torch.tensor([0.1, -0.0, math.inf, 1e-45, 3.4e38])
    assert torch.equal(roundtrip(flat, "float32"), flat)


def test_bfloat16_keeps_what_it_can_represent() -> None:
    flat = torch.randn(1000).bfloat16().float()
    assert torch.equal(roundtrip(flat, "bfloat16"), flat)


def test_bfloat16_rounds_to_one_of_the_two_neighbours_and_is_right_on_average() -> None:
    value = 1.0 + 2**-7 * 0.3
    rounded = roundtrip(torch.full((200_000,), value), "bfloat16")
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.double().mean().item() == pytest.approx(value, abs=5 * 2**-7 * 0.46 / math.sqrt(200_000))
    assert torch.equal(roundtrip(-torch.full((9,), value), "bfloat16", 7), -roundtrip(torch.full((9,), value), "bfloat16", 7))


def test_bfloat16_keeps_values_that_are_not_finite_visible() -> None:
    nan_bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert roundtrip(nan_bits, "bfloat16").isnan().all()
    assert torch.equal(roundtrip(torch.tensor([math.inf, -math.inf]), "bfloat16"), torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_sizes_larger_than_a_piece(codec: Codec) -> None:
    flat = torch.arange(PIECE + 3, dtype=torch.float32).remainder_(256)
    assert torch.equal(roundtrip(flat, codec), flat)
    assert [piece.stop for piece in pieces(PIECE + 3)] == [PIECE, PIECE + 3]


def test_decode_into_a_given_tensor() -> None:
    box = torch.empty(8, dtype=torch.uint8)
    encode(torch.tensor([1.0, 2.0]), box, "float32")
    out = torch.empty(2)
    assert decode(box, "float32", out) is out
    assert out.tolist() == [1.0, 2.0]
