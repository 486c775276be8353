"""What is made small on samples: against each sample alone, and against the equation of direct preference optimisation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nolocod.paths import DataDir
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, seal
from nolocod.trainer import checkpoint, founding, offline
from nolocod.trainer.model import ON_CPU, bytes_on_device, layout_of, read_config
from nolocod.trainer.objective import Answers, Preferences, keeps_apart, objective_of
from nolocod.trainer.replica import open_replica
from nolocod.trainer.samples import BEGIN, ID, LEARNT, pack, unpacked
from tests.support.architectures import CASES
from tests.support.base_model import RUN_FILE, publish
from tests.support.chat_templates import SPECIAL, plain
from tests.support.trainer_parts import OWNER, save, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from nolocod.run.manifest import Manifest, Sealed
    from nolocod.trainer.replica import Replica

CPU = torch.device("cpu")
BY_ITSELF = {"opt", "bloom", "falcon", "gpt_oss", "mamba", "mamba2", "rwkv"}
"""Models that do not keep documents of one window apart."""


def model_of(kind: str, seed: int = 0) -> torch.nn.Module:
    """Far from its initial weights, so that what attention sees counts."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, vocab_size=256, use_cache=False, **CASES[kind])
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4)
    return model


def windows_of(pairs: bool = False, count: int = 24, length: int = 33) -> Tensor:
    """Packed samples of random bytes, of which the last part is learnt."""
    rng = np.random.default_rng(0)
    waiting = []
    for _ in range(count):
        prompt = rng.integers(1, 256, rng.integers(1, 6))
        documents = []
        for _ in range(1 + pairs):
            answer = rng.integers(1, 256, rng.integers(1, 9)) | LEARNT
            documents.append(np.concatenate([prompt, answer]))
            documents[-1][0] |= BEGIN
        waiting.append(np.concatenate(documents))
    windows = []
    while waiting:
        windows.append(pack(waiting, length))
    return torch.from_numpy(np.stack(windows))


def likelihood(model: torch.nn.Module, tokens: np.ndarray) -> tuple[float, int]:
    """Of one sample alone, by hand in float64: the logarithm of its answer's probability, and how long that is."""
    ids, learnt = torch.from_numpy(tokens & ID), tokens & LEARNT != 0
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0].double()
    total = 0.0
    for at in np.flatnonzero(learnt).tolist():
        row = logits[at - 1]
        total += (row[ids[at]] - row.exp().sum().log()).item()
    return total, int(learnt.sum())


def documents(windows: Tensor) -> list[np.ndarray]:
    return [one for one in unpacked(windows.flatten().numpy(), 1) if (one & LEARNT).any()]


@pytest.mark.parametrize("kind", CASES)
def test_samples_in_one_window_have_the_loss_that_each_has_alone(kind: str) -> None:
    model, windows = model_of(kind), windows_of()
    each = [likelihood(model, one) for one in documents(windows)]
    wanted = -sum(total for total, _ in each) / sum(length for _, length in each)
    objective = objective_of(sealed_run(data=Data(source="jsonl", kind="instruction")).manifest, model)
    with torch.no_grad():
        loss, balanced = objective.loss(model, windows, CPU)
        parts = [(objective.loss(model, part, CPU)[0].item(), objective.weight(part)) for part in windows.split(1)]
    assert abs(loss.item() - wanted) < 1e-5 * max(1.0, wanted)
    assert objective.weight(windows) == sum(length for _, length in each)
    assert abs(sum(one * count for one, count in parts) / objective.weight(windows) - wanted) < 1e-5 * max(1.0, wanted)
    assert (balanced > loss) == (kind in ("mixtral", "qwen3_moe", "gpt_oss"))


def test_which_models_keep_documents_apart_is_found_out() -> None:
    """The others of docs/fine-tuning.md are given each document by itself."""
    assert {kind for kind in CASES if not keeps_apart(model_of(kind))} == BY_ITSELF


def test_without_positions_that_begin_anew_documents_would_see_each_other() -> None:
    """What the test before would find."""
    model, windows = model_of("llama"), windows_of()
    one = (windows & ID) | (windows & LEARNT)
    one[:, 0] |= BEGIN
    losses = [Answers(packed=True).loss(model, given, CPU)[0].item() for given in (windows, one)]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba2"])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_preferences_have_the_loss_of_the_equation(kind: str, beta: float) -> None:
    """Rafailov et al., arXiv 2305.18290, Eq. 7, pair by pair in float64."""
    model, reference, windows = model_of(kind), model_of(kind, 1), windows_of(pairs=True)
    found = documents(windows)
    losses = []
    for chosen, rejected in zip(found[::2], found[1::2], strict=True):
        ratios = [likelihood(model, one)[0] - likelihood(reference, one)[0] for one in (chosen, rejected)]
        losses.append(-math.log(1 / (1 + math.exp(-beta * (ratios[0] - ratios[1])))))
    objective = Preferences(reference, beta, packed=keeps_apart(model))
    assert objective.weight(windows) == len(losses)
    loss, _ = objective.loss(model, windows, CPU)
    assert abs(loss.item() - sum(losses) / len(losses)) < 1e-5
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert all(parameter.grad is None for parameter in reference.parameters())
    same = Preferences(model, beta, packed=keeps_apart(model)).loss(model, windows, CPU)[0].item()
    assert abs(same - math.log(2)) < 1e-6, "the reference itself prefers nothing"


# --- a replica


RECORDS = {
    "chat": [
        {"messages": [{"role": "user", "content": f"tide {n % 7}"}, {"role": "assistant", "content": "no node " * (n % 3 + 1)}]}
        for n in range(120)
    ],
    "instruction": [{"instruction": f"wait {n % 9}", "output": "for tide" * (n % 2 + 1)} for n in range(120)],
    "preference": [{"prompt": f"wait {n % 9}", "chosen": "for tide", "rejected": f"node {n}"} for n in range(120)],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model", template=plain("chatml"), special=SPECIAL)


def founded(folder: Path, base: Path, kind: str) -> tuple[Sealed, Path]:
    text = RUN_FILE.format(base=base).replace('"text"', f'"jsonl"\nkind = "{kind}"\nheld_out = 0.2')
    (folder / "run.toml").write_text(text.replace("sequence = 32", "sequence = 64").replace("1e-4", "2e-3"))
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RECORDS[kind]))
    manifest, _ = founding.read(folder / "run.toml")
    return seal(msgspec.structs.replace(manifest, evaluation=Evaluation(batches=4)), OWNER), folder / "a.jsonl"


def opened(sealed: Sealed, data: Path, base: Path) -> Replica:
    return open_replica(sealed, "alice", data, data.parent / "cache", replace(ON_CPU, base=base))


@pytest.mark.parametrize("kind", RECORDS)
def test_a_replica_trains_resumes_and_is_evaluated(tmp_path: Path, base: Path, kind: str) -> None:
    sealed, data = founded(tmp_path, base, kind)
    paths = DataDir(tmp_path / "node")
    alice = opened(sealed, data, base)
    before = alice.evaluate()
    for _ in range(30):
        alice.step()
    alice.report()
    assert alice.evaluate() < 0.8 * before
    if kind == "preference":
        assert abs(before - math.log(2)) < 1e-5
    save(alice, paths.checkpoints, "alice")
    again = opened(sealed, data, base)
    found = checkpoint.find(paths.checkpoints, sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    again.restore(found.path, found.state)
    for one in (alice, again):
        one.step()
    assert torch.equal(alice.theta, again.theta)
    paths.base.symlink_to(base)
    alice.theta.copy_(alice.phi)
    assert offline.evaluate(paths, sealed, data) == pytest.approx(alice.evaluate(), abs=1e-5)


def test_the_reference_is_the_first_weights_whatever_was_learnt_since(tmp_path: Path, base: Path) -> None:
    sealed, data = founded(tmp_path, base, "preference")
    alice = opened(sealed, data, base)
    first = alice.phi.clone()
    for _ in range(3):
        alice.step()
    alice.phi.copy_(alice.theta)
    reference = objective_of(sealed.manifest, alice.model)._reference  # type: ignore[attr-defined]
    kept = alice.objective._reference  # type: ignore[attr-defined]
    for name, one in alice.layout.split(first):
        assert torch.equal(kept.get_parameter(name), one)
        assert not kept.get_parameter(name).requires_grad
    assert not torch.equal(reference.get_parameter(name), one), "this is made of what it has learnt"


def test_windows_computed_in_parts_take_the_same_step(tmp_path: Path, base: Path) -> None:
    sealed, data = founded(tmp_path, base, "chat")
    found = []
    for at_once in (2, 1):
        alice = opened(sealed, data, base)
        alice.inner.at_once = at_once
        alice.step()
        found.append(alice.theta.clone())
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_the_plan_counts_the_reference() -> None:
    def of(kind: str) -> Manifest:
        return sealed_run(data=Data(source="jsonl", kind=kind), inner=Inner(optimizer="adamw")).manifest  # type: ignore[arg-type]

    layout = layout_of(read_config(of("text"), 256))
    assert (
        bytes_on_device(layout, of("preference"), torch.float32) - bytes_on_device(layout, of("instruction"), torch.float32)
        == 4 * layout.size
    )
