"""NorMuon beside torch's own Muon and the paper's formula, and which parameters it trains."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nolocod.run.manifest import Inner, Manifest
from nolocod.trainer import muon
from nolocod.trainer.inner import autocast
from nolocod.trainer.model import build as build_model
from nolocod.trainer.model import bytes_on_device, fast_kind, layout_of, matrices_of, read_config
from tests.support.trainer_parts import MODEL

SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16), (8, 24)]
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
MIXTRAL = {**MODEL, "model_type": "mixtral", "num_local_experts": 2}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}


def matrices() -> list[torch.nn.Parameter]:
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def gradients(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def test_steps_are_those_of_torch_s_own_where_rows_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three equal shapes two are computed together: no more fit at once."""
    monkeypatch.setattr(muon, "_MEMORY", 1.0)
    monkeypatch.setattr(muon, "_MOST", 2 * 8 * 24)
    monkeypatch.setattr(muon, "fast_kind", lambda _: torch.bfloat16)  # as torch's
    ours, theirs = matrices(), matrices()
    optimizer = muon.Muon(ours, [one.shape for one in ours])
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for number in range(4):
        for one, other, gradient in zip(ours, theirs, gradients(number), strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step(0.1, 0.2, torch.tensor(1.0))
        reference.step()
    for one, other, start, momentum in zip(ours, theirs, matrices(), optimizer.momentum, strict=True):
        assert (one - other).norm() < 0.01 * (one - start).norm()
        assert torch.allclose(momentum, reference.state[other]["momentum_buffer"], atol=1e-6)


def test_rows_or_columns_are_divided_by_their_root_mean_square_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """NorMuon (arXiv 2510.05491, algorithm 1), but that a line begins with the mean square of all elements."""
    monkeypatch.setattr(muon, "fast_kind", lambda _: torch.float32)
    ours, expected = matrices(), matrices()
    optimizer = muon.Muon(ours, [one.shape for one in ours])
    axes = [0 if len(one) < one.size(1) else 1 for one in ours]
    squares = [torch.full_like(one.sum(axis, keepdim=True), 1 / max(one.shape)) for one, axis in zip(ours, axes, strict=True)]
    momentum = [torch.zeros_like(one) for one in ours]
    for number in range(4):
        for index, even in enumerate(gradients(number)):
            sizes = torch.linspace(0.2, 2, max(even.shape))
            gradient = even * (sizes if axes[index] == 0 else sizes[:, None])
            ours[index].grad = gradient.clone()
            momentum[index] = 0.95 * momentum[index] + 0.05 * gradient
            update = muon.orthogonal((0.05 * gradient + 0.95 * momentum[index])[None])[0]
            squares[index] = 0.95 * squares[index] + 0.05 * update.square().mean(axes[index], keepdim=True)
            moved = expected[index].detach() * (1 - 0.1 * 0.2) - 0.1 * 0.2 * update / squares[index].sqrt()
            expected[index] = torch.nn.Parameter(moved)
        optimizer.step(0.1, 0.2, torch.tensor(1.0))
    for one, other, kept, found in zip(ours, expected, optimizer.squares, squares, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert torch.allclose(kept, found, atol=1e-7)
    for shape in ((24, 8), (8, 24)):
        lines = optimizer.squares[SHAPES.index(shape)]
        assert lines.max() > 1.3 * lines.min(), "of which some are larger"


def test_a_row_without_a_gradient_stays_and_one_with_next_to_none_is_not_blown_up() -> None:
    (matrix,) = ours = [torch.nn.Parameter(torch.zeros(24, 8))]
    optimizer = muon.Muon(ours, [matrix.shape])
    factors = torch.ones(24, 1)
    factors[0], factors[1] = 0, 1e-4
    for number in range(400):
        matrix.grad = torch.randn(24, 8, generator=torch.Generator().manual_seed(number)) * factors
        optimizer.step(1.0, 0.0, torch.tensor(1.0))
    before = matrix.detach().clone()
    matrix.grad = torch.randn(24, 8, generator=torch.Generator().manual_seed(400)) * factors
    optimizer.step(1.0, 0.0, torch.tensor(1.0))
    moved = (matrix - before).square().mean(1).sqrt()
    assert moved[0] == 0
    assert 0 < moved[1] < 0.01
    assert 0.05 < moved[2:].min() < moved[2:].max() < 0.4


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_singular_values_become_about_one(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "fast_kind", lambda _: kind)
    stack = torch.stack([gradients(number)[0] for number in range(3)])
    for matrix in muon.orthogonal(stack).float():
        values = torch.linalg.svdvals(matrix)
        assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.allclose(muon.orthogonal(stack.mT), muon.orthogonal(stack).mT, atol=1e-6)


def test_a_step_left_out_changes_no_bit_of_weights_or_state() -> None:
    ours = matrices()
    optimizer = muon.Muon(ours, [one.shape for one in ours])
    for number, factor in enumerate((1.0, math.nan, math.inf)):
        for one, gradient in zip(ours, gradients(number), strict=True):
            one.grad = gradient * factor
        before = [one.clone() for one in (*ours, *optimizer.momentum, *optimizer.squares)]
        optimizer.step(0.1, 0.2, torch.tensor(float(math.isfinite(factor))))
        now = (*ours, *optimizer.momentum, *optimizer.squares)
        same = [torch.equal(one, other) for one, other in zip(before, now, strict=True)]
        assert same == [not math.isfinite(factor)] * len(same)


def test_a_step_asks_for_as_many_operations_however_many_matrices_are_alike() -> None:
    """Each costs a GPU's host some microseconds, of which small models have few."""

    class Counted(TorchDispatchMode):
        asked = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            self.asked += 1
            return operation(*args, **(kwargs or {}))

    found = []
    for count in (2, 12):
        ours = [torch.nn.Parameter(torch.ones(8, 24)) for _ in range(count)]
        for one in ours:
            one.grad = torch.ones(8, 24)
        optimizer = muon.Muon(ours, [one.shape for one in ours])
        with Counted() as counted:
            optimizer.step(0.1, 0.2, torch.tensor(1.0))
        found.append(counted.asked)
    assert found[0] == found[1] < 100


def test_a_matrix_without_a_gradient_moves_by_its_momentum_alone() -> None:
    ours = matrices()
    optimizer = muon.Muon(ours, [one.shape for one in ours])
    ours[0].grad = gradients(0)[0]
    optimizer.step(0.1, 0.0, torch.tensor(1.0))
    assert [torch.equal(one, other) for one, other in zip(ours, matrices(), strict=True)] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("model", "by_muon"),
    [
        (MODEL, 7 * 2),
        ({**MODEL, "tie_word_embeddings": True}, 7 * 2),
        (GPT2, 4),
        (MIXTRAL, 4 * 2),
        (MAMBA, 4),
    ],
)
def test_layers_matrices_are_muon_s_and_nothing_else_is(model: dict[str, object], by_muon: int) -> None:
    manifest = Manifest(name="x", model=model)
    config = read_config(manifest, 256)
    one = build_model(config, 0)
    chosen = matrices_of(one)
    assert {parameter.dim() for parameter in chosen.values()} == {2}
    assert len(chosen) == by_muon, list(chosen)
    shared = {one.get_input_embeddings().weight.data_ptr(), one.get_output_embeddings().weight.data_ptr()}
    assert not shared & {parameter.data_ptr() for parameter in chosen.values()}
    layout = layout_of(config)
    assert layout.matrices == tuple(tuple(parameter.shape) for parameter in chosen.values())
    adamw = Manifest(name="x", model=model, inner=Inner(optimizer="adamw"))
    saved = bytes_on_device(layout, adamw, torch.float32) - bytes_on_device(layout, manifest, torch.float32)
    assert bytes_on_device(layout, adamw, torch.float32) == 16 * layout.size
    assert saved == 4 * sum(parameter.numel() for parameter in chosen.values())


def test_the_scratch_of_a_step_is_four_stacks_of_the_matrices_that_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(8, 8)] * 3 + [(8, 16)] * 2
    assert muon.scratch(shapes) == 4 * 4 * 2 * 8 * 16
    monkeypatch.setattr(muon, "_MOST", 150)
    assert muon.scratch(shapes) == 4 * 4 * 2 * 8 * 8, "as many as are computed at once, one at least"
    assert muon.scratch([]) == 0


def test_a_card_that_only_emulates_bfloat16_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert fast_kind(torch.device("cuda")) == torch.float32
    assert isinstance(autocast(torch.device("cuda")), contextlib.nullcontext)
