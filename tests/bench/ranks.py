"""A trainer of two devices beside bare `DistributedDataParallel` on as many: the same model, sequences, optimizer and clipping.

The rule: both are timed in turn, again and again, since the machine is not theirs alone; what counts is the middle of the
ratios. `python -m tests.bench.ranks RUN_FILE --devices 2` prints tokens per second of each and the ratio; CPU and gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from nolocod.identity import Identity
from nolocod.run.manifest import seal
from nolocod.run.run_file import read_run_file
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.inner import make_adamw
from nolocod.trainer.model import build, read_config
from nolocod.trainer.opening import open_shared
from nolocod.trainer.pipe import Setup
from nolocod.trainer.source import open_source

WARM_UP = 5


def ours(options: argparse.Namespace, folder: Path) -> float:
    """Inner steps of the leader's replica; its own process is one of the devices'."""
    sealed = seal(read_run_file(options.run_file), Identity.generate())
    setup = Setup(
        manifest=sealed.to_bytes(), peer_id="bench", data=options.data, devices=f"cpu:{options.devices}",
        threads=options.devices, checkpoints=folder / "checkpoints", cache=folder,
    )  # fmt: skip
    replica, _ = open_shared(setup, sealed, lambda event: None, lambda failed: os._exit(1))
    for _ in range(WARM_UP):
        replica.step()
    began = time.perf_counter()
    for _ in range(options.steps):
        replica.step()
    seconds = time.perf_counter() - began
    replica.close()
    return options.steps * replica.tokens_per_step / seconds


def bare(options: argparse.Namespace, folder: Path) -> float:
    """The same by torch alone, as process `options.rank`."""
    torch.set_num_threads(1)
    manifest = read_run_file(options.run_file)
    tokenizer = make_tokenizer(manifest.data)
    source = open_source(manifest, tokenizer, "bench", options.data, folder / f"{options.rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=options.rank, world_size=options.devices)
    model = build(read_config(manifest, tokenizer.vocabulary), manifest.seed)
    shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_adamw([one for _, one in sorted(model.named_parameters())], manifest, torch.device("cpu"))
    inner, began = manifest.inner, 0.0
    for step in range(-WARM_UP, options.steps):
        if step == 0:
            began = time.perf_counter()
        windows = torch.from_numpy(source.take(inner.batch * inner.accumulation)).tensor_split(options.devices)[options.rank]
        parts = torch.split(windows, inner.batch)
        for number, part in enumerate(parts, 1):
            shared.require_backward_grad_sync = number == len(parts)
            logits = shared(input_ids=part[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
            (loss * len(part) / len(windows)).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return options.steps * inner.tokens_per_step / (time.perf_counter() - began)


def _run(arguments: list[str], count: int, *who: str) -> float:
    """Tokens per second of `count` processes that are started at once: the first's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.ranks", *arguments, "--folder", folder, *who]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(count)
        ]
        told = [one.communicate()[0] for one in started]
    return float(told[0])


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.ranks", description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--who", choices=("ours", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who is not None:
        sys.stdout.write(f"{(ours if options.who == 'ours' else bare)(options, options.folder)}\n")
        return
    ratios = []
    for turn in range(options.times):
        found = {}
        for who in ("ours", "bare") if turn % 2 else ("bare", "ours"):
            found[who] = _run(sys.argv[1:], 1 if who == "ours" else options.devices, "--who", who)
        ratios.append(found["ours"] / found["bare"])
        sys.stdout.write(f"ours {found['ours']:.0f}, bare {found['bare']:.0f} tokens/s, ratio {ratios[-1]:.3f}\n")
        sys.stdout.flush()
    sys.stdout.write(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)}\n")


if __name__ == "__main__":
    main()
