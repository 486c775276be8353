"""A plain PyTorch loop on a run's model and data: what the daemon's overhead is measured against.

The rule: nothing of ours in the loop but the batches; `python -m tests.bench.bare_loop RUN_FILE --steps N
--threads T` prints tokens per second. Same model, AdamW, clipping and data order as the trainer's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from nolocod.run.run_file import read_run_file
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.inner import autocast, make_adamw
from nolocod.trainer.model import build, pick_device, read_config
from nolocod.trainer.source import open_source

if TYPE_CHECKING:
    from nolocod.run.manifest import Manifest

WARM_UP = 10
"""Steps before the clock starts."""


def tokens_per_second(manifest: Manifest, data: Path | None, cache: Path, steps: int, device_name: str = "auto") -> float:
    """Run `steps` inner steps after the warm-up and return how many tokens were trained on per second."""
    device = pick_device(device_name)
    tokenizer = make_tokenizer(manifest.data)
    source = open_source(manifest, tokenizer, "bare", data, cache)
    model = build(read_config(manifest, tokenizer.vocabulary), manifest.seed).to(device)
    optimizer = make_adamw([parameter for _, parameter in sorted(model.named_parameters())], manifest, device)
    inner = manifest.inner
    began = 0.0
    for step in range(-WARM_UP, steps):
        if step == 0:
            _finish(device)
            began = time.perf_counter()
        for _ in range(inner.accumulation):
            windows = torch.from_numpy(source.take(inner.batch)).to(device)
            with autocast(device):
                logits = model(input_ids=windows[:, :-1]).logits
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
            (loss / inner.accumulation).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    _finish(device)
    return steps * inner.tokens_per_step / (time.perf_counter() - began)


def _finish(device: torch.device) -> None:
    """Wait for work that the device was given and has not done yet."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(prog="tests.bench.bare_loop", description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as cache:
        manifest = read_run_file(options.run_file)
        rate = tokens_per_second(manifest, options.data, Path(cache), options.steps, options.device)
    sys.stdout.write(f"{rate:.1f}\n")


if __name__ == "__main__":
    main()
