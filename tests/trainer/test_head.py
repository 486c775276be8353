"""The loss without all logits at once: against whole ones, on every architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from nolocod.trainer import head
from nolocod.trainer.head import losing, plain_head
from nolocod.trainer.objective import Answers, NextToken
from nolocod.trainer.samples import BEGIN, ID, LEARNT
from tests.support.architectures import CASES

if TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")
ROWS = 6
"""Of a vocabulary of 256 at once: 2 x 32 rows do not come out even."""


def model_of(kind: str, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    keys = CASES.get(kind, {}) | more
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, vocab_size=256, use_cache=False, **keys)
    )
    return model.eval()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK", ROWS * 4 * 256)


def gradients(objective: NextToken | Answers, model: torch.nn.Module, windows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, balanced = objective.loss(model, windows, CPU)
    (balanced * 0.25).backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", [kind for kind in CASES if kind != "gemma2"])
def test_loss_and_gradients_are_those_of_whole_logits(kind: str) -> None:
    model = model_of(kind)
    layer = plain_head(model)
    assert layer is model.get_output_embeddings()  # type: ignore[operator]
    windows = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    learnt = windows | LEARNT * (torch.arange(33) % 3 == 0) | BEGIN * (torch.arange(33) == 0)
    assert torch.equal(learnt & ID, windows)
    for whole, cut, given in (
        (NextToken(), NextToken(layer), windows),
        (Answers(packed=True), Answers(layer, packed=True), learnt),
    ):
        loss, wanted = gradients(whole, model, given)
        found, got = gradients(cut, model, given)
        assert found.item() == pytest.approx(loss.item(), rel=1e-6)
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6 * max(1.0, gradient.abs().max().item()))
        with torch.no_grad():
            assert cut.loss(model, given, CPU)[0].item() == pytest.approx(loss.item(), rel=1e-6)
    assert model(input_ids=windows[:, :-1]).logits.shape == (2, 32, 256), "the model is as it was"


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gemma2", {}),
        ("cohere", {"pad_token_id": 0, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("granite", {"logits_scaling": 8.0, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
    ],
)
def test_logits_that_are_changed_after_the_head_are_whole(kind: str, more: dict[str, object]) -> None:
    model = model_of(kind, **more)
    assert plain_head(model) is None
    assert "forward" not in vars(model.get_output_embeddings())  # type: ignore[operator]


def test_a_head_that_is_no_common_layer_has_whole_logits() -> None:
    class Other(torch.nn.Linear):
        pass

    model = model_of("llama")
    model.set_output_embeddings(Other(32, 256))  # type: ignore[operator]
    assert plain_head(model) is None


def test_a_model_that_asks_its_body_for_more_has_whole_logits() -> None:
    model = model_of("llama")
    model.forward = lambda **given: model.model(**given).hidden_states.sum()  # type: ignore[method-assign]
    assert plain_head(model) is None


def test_a_model_that_asks_for_values_where_there_are_none_has_whole_logits() -> None:
    """As OPT does of its mask in transformers 5.17, whose layers are asked past the body."""
    model = model_of("llama").to("meta")
    model.forward = lambda input_ids: model.lm_head(input_ids).sum() if input_ids.all().item() else None  # type: ignore[method-assign]
    assert plain_head(model) is None


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("bias", [False, True])
def test_in_bfloat16_the_loss_is_in_float32_and_gradients_add_up_in_it(bias: bool) -> None:
    torch.manual_seed(0)
    layer, hidden, ids = torch.nn.Linear(64, 256, bias=bias), torch.randn(1, 60, 64), torch.randint(256, (60,))

    def taken(whole: bool) -> tuple[Tensor, ...]:
        layer.zero_grad()
        states = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if whole:
                loss = functional.cross_entropy(layer(states).flatten(0, 1).float(), ids)
            else:
                with losing(layer, None, ids):
                    loss = layer(states)
        assert loss.dtype == torch.float32
        loss.backward()
        return loss.detach(), states.grad, *(one.grad for one in layer.parameters())  # type: ignore[return-value]

    for wanted, found in zip(taken(True), taken(False), strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 1e-2 * wanted.norm()
    assert taken(False)[0].item() == pytest.approx(taken(True)[0].item(), rel=1e-5)


def test_a_frozen_head_has_no_gradient() -> None:
    layer, ids = torch.nn.Linear(8, 16).requires_grad_(False), torch.arange(4)
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    with losing(layer, None, ids):
        layer(hidden).backward()
    assert layer.weight.grad is None
    wanted = torch.autograd.grad(functional.cross_entropy(layer(hidden)[0], ids), hidden)[0]
    torch.testing.assert_close(hidden.grad, wanted)


def test_logits_are_never_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden, ids = torch.nn.Linear(8, 1000), torch.randn(1, 500, 8, requires_grad=True), torch.randint(1000, (500,))
    monkeypatch.setattr(head, "CHUNK", 50 * 4 * 1000)
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as seen, losing(layer, None, ids):
        layer(hidden).backward()
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert 50 * 4 * 1000 <= largest < 100 * 4 * 1000
