"""What an adapter run should train and exchange: `python -m tools.adapters` trains for some minutes and prints a table.

The rule: replicas, messages and outer step are the product's own (studies/lab); all variants of a seed train on the same tokens
in the same order, from the same base. The base is a small llama that has read this repository's documentation; the run teaches
it Python's standard library. Each variant is told at learning rates of its own.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nolocod.run import presets
from nolocod.run.data import Data
from nolocod.run.manifest import Adapter, Evaluation, Inner, Manifest, Outer, Trust
from nolocod.studies.lab.methods import BY_NAME
from nolocod.studies.lab.multi_replica import MultiReplica
from nolocod.studies.lab.results import Results
from nolocod.trainer import base_model
from nolocod.trainer import model as product
from nolocod.trainer.adapter import attach

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1, 2)
REPLICAS, PHASE, ROUNDS = 4, 20, 8
MODEL = presets.llama(64, 2, 2, 176)
PRETRAINED = 800
RATES = (3e-3, 1e-2, 3e-2)
"""The learning rates that are tried."""


@dataclass(frozen=True)
class Case:
    """One training. `trains`: "both" matrices, or "b" alone."""

    trains: Literal["both", "b"]
    rank: int
    method: str
    learning_rate: float
    seed: int
    optimizer: Literal["adamw", "muon"] = "adamw"


@dataclass(frozen=True)
class Outcome:
    """Held-out losses of the mean of the replicas, of the base with the mean of their products BA, and of one replica."""

    parameters: int
    averaged: float
    of_products: float
    mean: float
    spread: float


def publish(folder: Path) -> Path:
    """The base, trained on docs/*.md for some minutes; kept in `folder`."""
    if not (folder / "config.json").exists():
        text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
        ids = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL, vocab_size=256))
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
        for step in range(PRETRAINED):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * step / PRETRAINED))
            starts = torch.randint(0, len(ids) - 65, (16,)).tolist()
            batch = torch.stack([ids[start : start + 65] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        sys.stderr.write(f"base: {loss.item():.2f} on its own text\n")
        model.save_pretrained(folder)
    return folder


def manifest_of(case: Case, base: Path) -> Manifest:
    adapter = Adapter(kind="lora", rank=case.rank, alpha=2 * case.rank)
    return Manifest(
        name="adapters",
        model=MODEL | {"vocab_size": 256},
        seed=case.seed,
        data=Data(),
        inner=Inner(
            steps=PHASE, batch=4, sequence=64, learning_rate=case.learning_rate, optimizer=case.optimizer, weight_decay=0.0
        ),
        outer=Outer(rounds=ROUNDS),
        evaluation=Evaluation(batches=24),
        trust=Trust(clip=0.0),
        base=base_model.open_base(str(base), base).pinned,
        adapter=adapter,
    )


def attach_b(model: torch.nn.Module, adapter: Adapter) -> None:
    """As the product does, but A stays as it is drawn."""
    attach(model, adapter)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad = False


def perform(base: Path, case: Case) -> Outcome:
    """Train."""
    torch.set_num_threads(1)
    if case.trains == "b":
        with mock.patch.object(product, "attach", attach_b), mock.patch.object(base_model, "attach", attach_b):
            return train(base, case)
    return train(base, case)


def train(base: Path, case: Case) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="nolocod-adapters-") as cache:
        replicas = MultiReplica(manifest_of(case, base), BY_NAME[case.method], REPLICAS, Path(cache), base=base)
        end = replicas.run()[-1]
    return Outcome(replicas._replicas[0].layout.size, end.averaged, loss_of_products(replicas), end.mean, end.spread)


@torch.no_grad()
def loss_of_products(swarm: MultiReplica) -> float:
    """Of the base with the mean of the replicas' alpha/rank B A beside its layers: what averages of A and of B stand for."""
    first, *others = swarm._replicas
    for name, layer in first.model.named_modules():
        if hasattr(layer, "lora_A"):
            alike = [layer, *(other.model.get_submodule(name) for other in others)]
            mean = sum(one.get_delta_weight("default") for one in alike) / len(alike)
            layer.base_layer.float().weight.add_(mean.float())
    for name, view in first.layout.split(first.theta):
        if "lora_B" in name:
            view.zero_()
    first.model.float()
    return first.evaluate()


def tried(kept: Path, workers: int) -> Results[Case, Outcome]:
    found: Results[Case, Outcome] = Results(kept, (Case, Outcome))
    base = publish(kept.with_suffix(".base"))

    def tell(number: int, count: int, case: Case, outcome: Outcome) -> None:
        sys.stderr.write(f"{number} of {count}: {case}: {outcome}\n")

    ours = [Case("both", 16, "ours, in one part", rate, seed) for rate in RATES for seed in SEEDS]
    b = [Case("b", 16, "ours, in one part", rate, seed) for rate in RATES for seed in SEEDS]
    b += [Case("b", 32, "ours, in one part", RATES[1], seed) for seed in SEEDS]
    alone = [Case("both", 16, "none", rate, seed) for rate in RATES[:2] for seed in SEEDS]
    muon = [replace(case, optimizer="muon") for case in ours]
    found.perform([*ours, *b, *alone, *muon], partial(perform, base), workers, tell)
    return found


def table(found: Results[Case, Outcome]) -> str:
    """One row for each variant: the mean over the seeds that are compared."""
    rows = [
        "| trained, exchanged | optimizer, learning rate | exchanges | parameters | mean of A, B | mean of BA | one replica |"
    ]
    rows.append("|---" * 7 + "|")
    for case in dict.fromkeys(replace(case, seed=0) for case in found if case.seed in SEEDS):
        outcomes = [found[one] for one in found if replace(one, seed=0) == case and one.seed in SEEDS]
        losses = (sum(getattr(one, key) for one in outcomes) / len(outcomes) for key in ("averaged", "of_products", "mean"))
        told = " | ".join(f"{loss:.4f}" for loss in losses)
        what = {"both": "A and B", "b": "B; A is the seed's"}[case.trains]
        with_whom = "none: each alone" if case.method == "none" else "pairs"
        rate = f"{case.optimizer}, {case.learning_rate:g}"
        rows.append(f"| {what}, rank {case.rank} | {rate} | {with_whom} | {outcomes[0].parameters:,} | {told} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=Path, default=Path("adapters.jsonl"), help="results, each done once (%(default)s)")
    sys.stdout.write(table(tried(parser.parse_args().kept, 1)) + "\n")
