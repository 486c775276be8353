"""Muon beside torch's own, and which parameters it trains."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

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


def test_steps_are_those_of_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three equal shapes two are computed together: no more fit at once."""
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


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_singular_values_become_about_one(kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "fast_kind", lambda _: kind)
    stack = torch.stack([gradients(number)[0] for number in range(3)])
    for matrix in muon.orthogonal(stack).float():
        values = torch.linalg.svdvals(matrix)
        assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.allclose(muon.orthogonal(stack.mT), muon.orthogonal(stack).mT, atol=1e-6)


def test_a_step_left_out_changes_no_bit_of_weights_or_momentum() -> None:
    ours = matrices()
    optimizer = muon.Muon(ours, [one.shape for one in ours])
    for number, factor in enumerate((1.0, math.nan, math.inf)):
        for one, gradient in zip(ours, gradients(number), strict=True):
            one.grad = gradient * factor
        before = [one.clone() for one in (*ours, *optimizer.momentum)]
        optimizer.step(0.1, 0.2, torch.tensor(float(math.isfinite(factor))))
        same = [torch.equal(one, other) for one, other in zip(before, (*ours, *optimizer.momentum), strict=True)]
        assert same == [not math.isfinite(factor)] * len(same)


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
