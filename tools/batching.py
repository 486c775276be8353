"""Print whether replicas of one process are worth batching: their inner steps in turn, under vmap, and compiled.

    python -m tools.batching [REPLICAS ...]

The rule: each way takes the same forward and backward passes of the lab's model, on one thread or on the GPU where there is
one, and is told over replicas that take them in turn.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

from nolocod.studies.lab.trials import Trial
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.model import build, pick_device, read_config
from nolocod.trainer.objective import cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_PASSES = 20


def seconds(work: Callable[[], object]) -> float:
    """Of one pass; the first ones, which allocate and compile, do not count."""
    work()
    work()
    _finish()
    began = time.perf_counter()
    for _ in range(_PASSES):
        work()
    _finish()
    return (time.perf_counter() - began) / _PASSES


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(count: int) -> dict[str, float]:
    """Seconds of a pass of all replicas, by way."""
    trial = Trial("none", count, 0, 1e-3)
    manifest = trial.manifest()
    config = read_config(manifest, make_tokenizer(manifest.data).vocabulary)
    device = pick_device("auto")
    models = [build(config, seed).to(device) for seed in range(count)]
    windows = torch.randint(0, 256, (count, trial.batch, trial.sequence + 1), device=device)
    parameters, buffers = stack_module_state(models)

    def loss(own: dict[str, Tensor], kept: dict[str, Tensor], batch: Tensor) -> Tensor:
        logits = functional_call(models[0], (own, kept), kwargs={"input_ids": batch[:, :-1]}).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def in_turn(forward: Callable[[torch.nn.Module, Tensor], Tensor]) -> None:
        for model, batch in zip(models, windows, strict=True):
            forward(model, batch).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            model.zero_grad()

    batched = vmap(grad(loss), in_dims=(0, 0, 0))
    compiled = torch.compile(cross_entropy, fullgraph=True, dynamic=False)
    return {
        "in turn": seconds(lambda: in_turn(cross_entropy)),
        "vmap": seconds(lambda: batched(parameters, buffers, windows)),
        "compiled, in turn": seconds(lambda: in_turn(compiled)),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of batching rules that torch does not have
    torch.set_num_threads(1)
    for number in map(int, sys.argv[1:] or ["4", "16"]):
        found = measure(number)
        rest = ", ".join(f"{way} {one / found['in turn']:.2f} times as long" for way, one in found.items() if way != "in turn")
        sys.stdout.write(f"{number} replicas: {1000 * found['in turn'] / number:.1f} ms each in turn; {rest}\n")
