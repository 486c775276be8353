"""How far one donor's weights are from others': which lies are seen in samples, and what honest donors may be apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from nolocod.proto.types import SnapshotParts
from nolocod.trainer import compare_donors
from nolocod.trainer.checkpoint import write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SHAPES = {"a.weight": (40, 30), "b.weight": (30, 50), "b.bias": (50,), "norm.weight": (30,)}
Weights = dict[str, "Tensor"]


def weights(number: int, apart: float = 0.1) -> Weights:
    """One replica of a swarm: the same base everywhere, and a part of its own; the biases have nothing in common."""
    made = {}
    for name, shape in SHAPES.items():
        base = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (name != "b.bias")
        own = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        made[name] = base + apart * own
    return made


def sample(
    folder: Path, number: int, whole: Weights, *spans: tuple[int, int], round_number: int = 7, kind: torch.dtype = torch.float32
) -> SnapshotParts:
    """What a newcomer has of a donor: zeros but for `spans` and the head; without spans all. `kind`: of matrices."""
    path = folder / f"sample-{number}"
    with path.open("wb") as handle:
        kinds = {name: kind for name, tensor in whole.items() if tensor.dim() > 1}
        write_tensors(handle, whole, {"round": str(round_number)}, kinds=kinds)
    raw = path.read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    if spans:
        holed = bytearray(len(raw))
        for start, length in ((0, head), *spans):
            holed[start : start + length] = raw[start : start + length]
        path.write_bytes(holed)
    return SnapshotParts(path, ((0, head), *spans) if spans else ((0, len(raw)),))


def flipped(whole: Weights) -> Weights:
    return {name: -tensor for name, tensor in whole.items()}


def noisy(whole: Weights) -> Weights:
    return {name: tensor + tensor.std() * torch.randn(tensor.shape) for name, tensor in whole.items()}


def one_zeroed(whole: Weights) -> Weights:
    return whole | {"b.weight": torch.zeros(SHAPES["b.weight"])}


@pytest.mark.parametrize("lie", [flipped, noisy, one_zeroed])
@pytest.mark.parametrize("others", [1, 2])
def test_a_lie_in_any_tensor_is_far_from_one_sample_and_from_two(
    tmp_path: Path, lie: Callable[[Weights], Weights], others: int
) -> None:
    samples = [sample(tmp_path, number, weights(number)) for number in range(2, 2 + others)]
    assert compare_donors.objection(weights(1).items(), samples) == ""
    why = compare_donors.objection(lie(weights(1)).items(), samples)
    assert f"the nearest of {others}," in why
    if lie is one_zeroed:
        assert why.startswith("b.weight is 1.00")


def test_a_lying_sample_does_not_speak_against_who_agrees_with_another(tmp_path: Path) -> None:
    samples = [sample(tmp_path, 2, flipped(weights(2))), sample(tmp_path, 3, weights(3))]
    assert compare_donors.objection(weights(1).items(), samples) == ""
    assert compare_donors.objection(weights(1).items(), samples[:1]) != "", "one alone: word against word"


def test_two_that_have_just_exchanged_do_not_make_a_third_look_far(tmp_path: Path) -> None:
    samples = [sample(tmp_path, number, weights(2)) for number in (2, 3)]
    assert compare_donors.objection(weights(1, apart=0.25).items(), samples) == ""


def test_biases_may_differ_by_more_than_they_are(tmp_path: Path) -> None:
    assert compare_donors.distance(weights(1)["b.bias"], weights(2)["b.bias"]) > compare_donors.FAR
    assert compare_donors.objection(weights(1).items(), [sample(tmp_path, 2, weights(2))]) == ""


def test_where_no_two_agree_none_is_near(tmp_path: Path) -> None:
    """Two liars of two kinds and an honest donor: whoever is looked at is far off, and loss has to tell."""
    three = [weights(1), flipped(weights(2)), noisy(noisy(weights(3)))]
    for number, one in enumerate(three):
        others = [sample(tmp_path, other, three[other]) for other in range(3) if other != number]
        assert compare_donors.objection(one.items(), others) != ""


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_only_what_was_sampled_counts_wherever_it_begins(tmp_path: Path, kind: torch.dtype) -> None:
    """Spans begin within values, and heads are of unequal lengths."""
    lie = one_zeroed(weights(1))
    whole = sample(tmp_path, 1, weights(1), kind=kind).path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    place = head + kind.itemsize * 40 * 30  # where b.bias and b.weight follow a.weight, in the file's order
    elsewhere, there = (head + 333, 1501), (place + 777, 1001)  # in bytes of either kind
    for span, seen in ((elsewhere, False), (there, True)):
        samples = [sample(tmp_path, n, weights(n), span, round_number=10 ** (12 * (n - 2)), kind=kind) for n in (2, 3)]
        sizes = {one.path.stat().st_size for one in samples}
        assert len(sizes) == 2
        assert compare_donors.objection(weights(1).items(), samples) == ""
        assert bool(compare_donors.objection(lie.items(), samples)) == seen


@pytest.mark.parametrize("broken", ["shape", "names", "nan", "kind", "bytes"])
def test_what_is_no_sample_of_this_model_does_not_count(tmp_path: Path, broken: str) -> None:
    bad = weights(2)
    if broken == "shape":
        bad["b.bias"] = torch.zeros(51)
    elif broken == "names":
        bad["c.bias"] = bad.pop("b.bias")
    elif broken == "nan":
        bad["b.bias"][3] = torch.nan
    elif broken == "kind":
        bad["b.bias"] = bad["b.bias"].to(torch.uint8)
    taken = sample(tmp_path, 2, flipped(bad))
    if broken == "bytes":
        taken.path.write_bytes(b"\xff" * taken.path.stat().st_size)
    assert compare_donors.objection(weights(1).items(), [taken]) == ""
    assert compare_donors.objection(flipped(weights(1)).items(), [taken, sample(tmp_path, 3, weights(3))]) != ""
