"""NoLoCo among what reads and sets an optimizer: schedulers, gradient scalers, trainers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nolocod
from nolocod.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class CountingSwarm:
    """A swarm that counts steps. What it does between them is told in tests/trainer/test_own.py."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def begin(self, make: Callable[..., object]) -> None:
        pass

    def stepped(self, replica: object, loss: object) -> None:
        self.losses.append(loss)


def wrapped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nolocod.NoLoCo, CountingSwarm]:
    swarm = CountingSwarm()
    return nolocod.NoLoCo(model.parameters(), optimizer, swarm=swarm), swarm  # type: ignore[arg-type]


def test_a_scheduler_and_a_state_dict_are_the_optimizers_own() -> None:
    model = torch.nn.Linear(2, 1)
    opt, swarm = wrapped(model, torch.optim.AdamW(model.parameters(), 0.1))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    assert isinstance(opt, torch.optim.Optimizer)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        opt.step()
        opt.zero_grad()
        schedule.step()
    assert opt.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    assert all(one.grad is None for one in model.parameters())
    assert len(swarm.losses) == 2
    again = torch.optim.AdamW(model.parameters(), 0.1)
    other, _ = wrapped(model, again)
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["lr"] == pytest.approx(0.025)
    assert again.state_dict()["state"][0]["step"] == 2
    assert other.state is again.state
    with pytest.raises(UsageError, match="stay the same"):
        opt.add_param_group({"params": []})


def test_a_hook_on_it_is_one_on_the_optimizer() -> None:
    model = torch.nn.Linear(2, 1)
    opt, _ = wrapped(model, torch.optim.SGD(model.parameters(), 0.1))
    called: list[object] = []
    opt.register_step_pre_hook(lambda *given: called.append(given[0]))
    opt.step()
    assert called == [opt.optimizer]


def test_a_closures_loss_is_told_and_returned() -> None:
    model = torch.nn.Linear(2, 1)
    opt, swarm = wrapped(model, torch.optim.SGD(model.parameters(), 0.1))
    assert opt.step(lambda: 3.0) == 3.0
    opt.step(loss=2.0)
    assert swarm.losses == [3.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_unscales_before_the_step_and_leaves_out_one_that_overflows(fused: bool) -> None:
    """Fused optimizers unscale by themselves, where the scaler finds them; here it finds NoLoCo."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt, swarm = wrapped(model, torch.optim.SGD(model.parameters(), 1.0, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, steps in ((0.5, 1), (torch.inf, 1)):
        scaler.scale(model(torch.full((1, 1), x)).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert model.weight.item() == pytest.approx(0.5)
        assert len(swarm.losses) == steps


def test_to_import_it_is_light_and_torch_is_asked_for_by_name() -> None:
    code = (
        "import sys, nolocod\n"
        "assert not {'torch', 'trio', 'msgspec', 'nolocod.api'} & set(sys.modules), 'import'\n"
        "nolocod.join, nolocod.create\n"
        "assert 'torch' not in sys.modules, 'join'\n"
        "sys.modules['torch'] = None\n"
        "try:\n"
        "    nolocod.NoLoCo\n"
        "except nolocod.errors.NolocodError as error:\n"
        "    print(error)\n"
        "try:\n"
        "    nolocod.nothing\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NLC-183 torch not installed: nolocod.NoLoCo needs it. ")
    assert second == "module 'nolocod' has no attribute 'nothing'"


def test_the_trainer_of_transformers_takes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    opt, swarm = wrapped(model, torch.optim.AdamW(model.parameters(), 1e-3))
    settings = {"max_steps": 3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), **settings)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    Trainer(model, arguments, train_dataset=rows, optimizers=(opt, None)).train()
    assert len(swarm.losses) == 3


def test_lightning_takes_it() -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.swarm = CountingSwarm()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            return nolocod.NoLoCo(self.parameters(), optimizer, swarm=self.swarm)  # type: ignore[arg-type]

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
    assert len(module.swarm.losses) == 3


def test_the_pages_example_is_the_one_that_is_run_and_is_short() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "examples" / "own_loop.py").read_text(encoding="utf-8")
    assert f"```python\n{text}```" in (root / "docs" / "your-own-loop.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 20
