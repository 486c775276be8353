"""Inner steps in float16, as cards take them that have no bfloat16; a processor stands in for one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from nolocod.run.manifest import Inner as Settings
from nolocod.run.manifest import Manifest, Outer
from nolocod.trainer import head, inner, loss_scale, on_device
from nolocod.trainer.head import losing
from nolocod.trainer.inner import LOSS_SCALE, Inner
from nolocod.trainer.loss_scale import LossScale
from nolocod.trainer.model import step_kind
from tests.support.trainer_parts import make_replica, save, sealed_run
from tests.trainer.test_no_synchronisation import watched
from tests.trainer.test_ranks import shared

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nolocod.trainer.replica import Replica

CPU = torch.device("cpu")
SETTINGS = Settings(steps=4, batch=2, sequence=32, learning_rate=1e-3, optimizer="adamw", weight_decay=0.0)


@pytest.fixture
def float16(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inner, on_device):
        monkeypatch.setattr(module, "step_kind", lambda device: torch.float16)


class Times:
    """What a layer says, times `factor`."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def weight(self, windows: Tensor) -> int:
        return len(windows)

    def loss(self, model: torch.nn.Module, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        said = (model(windows.float()) * self.factor).float().mean()
        return said, said


def taking(factor: float, *, scales: bool = True) -> tuple[torch.nn.Linear, Inner]:
    model = torch.nn.Linear(4, 1)
    manifest = Manifest(name="x", model={"model_type": "llama"}, inner=SETTINGS)
    steps = Inner(model, manifest, CPU, 4, Times(factor))
    if scales:
        steps.scale_loss()
    return model, steps


def step(steps: Inner, times: int = 1) -> None:
    for _ in range(times):
        steps.step(torch.ones(4, 4, dtype=torch.int64), 1e-3)


@pytest.mark.usefixtures("float16")
def test_gradients_too_small_for_float16_are_learnt_from() -> None:
    for scales in (True, False):
        model, steps = taking(1e-7, scales=scales)
        before = model.weight.clone()
        step(steps)
        assert torch.equal(model.weight, before) is not scales


@pytest.mark.usefixtures("float16")
def test_the_gradient_is_the_loss_s_own() -> None:
    model, steps = taking(0.5)
    steps._differentiate(torch.ones(4, 4, dtype=torch.int64), 4)
    steps._fill()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((1, 4), 0.5))


@pytest.mark.usefixtures("float16")
def test_a_step_whose_scaled_gradient_is_too_large_is_left_out_and_the_factor_falls() -> None:
    model, steps = taking(10.0)
    before = model.weight.clone()
    step(steps)
    assert torch.equal(model.weight, before)
    assert math.isnan(steps.report())
    step(steps, 4)
    assert not torch.equal(model.weight, before)
    assert math.isfinite(steps.report())


def test_the_factor_rises_after_many_finite_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_RISE_AFTER", 3)
    scale, good, bad = LossScale(CPU), torch.ones(()), torch.zeros(())
    first, seen = scale.factor.item(), []
    for finite in (good, good, bad, good, good, good, good, good, good):
        scale.follow(finite)
        seen.append(scale.factor.item() / first)
    assert seen == [1, 1, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1]


@pytest.mark.usefixtures("float16")
def test_a_model_whose_numbers_float16_does_not_hold_goes_on_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_LOOK_EVERY", 16)
    model, steps = taking(1.0)
    model.weight.data.fill_(1e6)
    step(steps, 16)
    assert math.isnan(steps.report()), "no error yet, though ten steps had no finite gradient"
    step(steps)
    assert steps.report() == pytest.approx(4e6, rel=1e-3)


@pytest.mark.usefixtures("float16")
def test_a_replica_learns_in_float16_as_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = sealed_run(inner=Settings(steps=4, batch=2, sequence=32, learning_rate=3e-3))
    half = make_replica(sealed, tmp_path)
    monkeypatch.undo()
    whole = make_replica(sealed, tmp_path)
    begin = whole.evaluate()
    for one in (half, whole):
        for _ in range(30):
            one.step()
    assert not torch.equal(half.theta, whole.theta), "it was float16"
    assert half.evaluate() == pytest.approx(whole.evaluate(), rel=0.01)
    assert half.evaluate() < 0.8 * begin


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize("spent", [False, True])
def test_a_checkpoint_holds_the_scale(tmp_path: Path, spent: bool) -> None:
    sealed = sealed_run(inner=SETTINGS)
    one = make_replica(sealed, tmp_path)
    inner_of(one)._scale.factor.fill_(8.0)  # type: ignore[union-attr]
    one.step()
    if spent:
        inner_of(one)._leave_float16()
    save(one, tmp_path / "checkpoints", "alice")
    other = make_replica(sealed, tmp_path)
    other.resume(tmp_path / "checkpoints")
    found = inner_of(other)
    if spent:
        assert (found._scale, found._kind) == (None, torch.float32)
    else:
        assert found._scale is not None
        assert torch.equal(found._scale.state, torch.tensor([8.0, 1.0, 1.0]))
    for replica in (one, other):
        replica.step()
    assert torch.equal(one.theta, other.theta)


def inner_of(replica: Replica) -> Inner:
    found = replica._part.inner
    assert isinstance(found, Inner)
    return found


@pytest.mark.usefixtures("float16")
def test_a_step_in_float16_asks_the_device_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica(sealed_run(inner=SETTINGS), tmp_path)
    replica.step()
    with watched(monkeypatch) as found:
        replica.step()
    assert found.asked == []


@pytest.mark.usefixtures("float16")
@pytest.mark.parametrize("devices", ["cpu:2", "shard:cpu:2"])
def test_a_device_in_float16_beside_one_in_float32_makes_one_gradient(tmp_path: Path, devices: str) -> None:
    sealed = sealed_run(
        inner=Settings(steps=4, batch=2, accumulation=2, sequence=32, learning_rate=1e-3),
        outer=Outer(rounds=100, turns=1),
        codec="float32",
    )
    alone = make_replica(sealed, tmp_path)
    alone.draw_as("alice")
    with shared(sealed, tmp_path, devices) as replica:
        before = replica.theta.clone()
        for one in (alone, replica):
            for _ in range(4):
                one.step()
        replica.solo()
        alone.solo()
        moved = (alone.theta - before).norm()
        assert (replica.theta - alone.theta).norm() < 0.05 * moved
        save(replica, tmp_path / "checkpoints", "alice")
        scale = replica.inner.moments()[LOSS_SCALE]
    with shared(sealed, tmp_path, devices) as again:
        again.resume(tmp_path / "checkpoints")
        assert torch.equal(again.inner.moments()[LOSS_SCALE], scale)
        assert scale[2] == 4
        again.step()
        assert math.isfinite(again.report())


def test_each_card_computes_in_what_it_has_units_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards of one node may be unlike."""
    capabilities = [(6, 1), (7, 0), (7, 5), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    found = [step_kind(torch.device("cuda", index)) for index in range(len(capabilities))]
    assert found == [torch.float32, torch.float16, torch.float16, torch.bfloat16, torch.bfloat16]
    assert step_kind(CPU) == torch.float32


def test_what_unlikely_words_learn_is_not_lost_in_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, ids = torch.nn.Linear(16, 20_000), torch.randint(200, (1, 300))[0]
    layer.bias.data = -1.5 * torch.arange(1, 20_001).log()  # as rare as words are
    states: Any = torch.randn(1, len(ids), 16)

    def taken(kind: torch.dtype) -> Tensor:
        layer.zero_grad()
        with torch.autocast("cpu", kind, enabled=kind != torch.float32), losing(layer, None, ids):
            layer(states).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    def off() -> float:
        wanted = taken(torch.float32)
        return ((taken(torch.float16) - wanted).norm(dim=1) / wanted.norm(dim=1)).median().item()

    now = off()
    monkeypatch.setattr(head, "_FLOAT16_TIMES", 1)
    assert now < 0.3 * off()


def test_what_many_rows_give_a_head_s_gradient_is_not_too_large_for_float16() -> None:
    layer, ids = torch.nn.Linear(2, 4, bias=False), torch.zeros(100_000, dtype=torch.int64)
    torch.nn.init.zeros_(layer.weight)
    states: Any = torch.full((1, len(ids), 2), 4.0)
    with torch.autocast("cpu", torch.float16), losing(layer, None, ids):
        layer(states).backward()
    with torch.enable_grad():
        wanted = torch.autograd.grad(functional.cross_entropy(layer(states)[0], ids), layer.weight)[0]
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, wanted, rtol=1e-3, atol=1e-4)
