"""A trainer of two devices beside bare `DistributedDataParallel` on as many, or, with --shard, beside bare `fully_shard`: the
same model, sequences, optimizer and clipping.

The rule: both are timed in turn, again and again, since the machine is not theirs alone; what counts is the middle of the
ratios. `python -m tests.bench.ranks RUN_FILE --devices 2` prints tokens per second of each and the ratio, and the same by the
first process's processor time, which others on the machine disturb less; CPU and gloo.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

if TYPE_CHECKING:
    from nolocod.run.manifest import Manifest

WARM_UP = 5


def ours(options: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """Inner steps of the leader's replica; its own process is one of the devices'."""
    sealed = seal(_manifest(options), Identity.generate())
    setup = Setup(
        manifest=sealed.to_bytes(), peer_id="bench", data=options.data,
        devices=f"{'shard:' if options.shard else ''}cpu:{options.devices}",
        threads=options.devices, checkpoints=folder / "checkpoints", cache=folder,
    )  # fmt: skip
    replica, _ = open_shared(setup, sealed, lambda event: None, lambda failed: os._exit(1))
    for _ in range(WARM_UP):
        replica.step()
    began = _now()
    for _ in range(options.steps):
        replica.step()
    spent = _since(began)
    replica.close()
    return spent


def bare(options: argparse.Namespace, folder: Path) -> tuple[float, float]:
    """The same by torch alone, as process `options.rank`."""
    torch.set_num_threads(1)
    manifest = _manifest(options)
    tokenizer = make_tokenizer(manifest.data)
    source = open_source(manifest, tokenizer, "bench", options.data, folder / f"{options.rank}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=options.rank, world_size=options.devices)
    model = build(read_config(manifest, tokenizer.vocabulary), manifest.seed)
    shared: Any = None
    if options.shard:
        mesh = init_device_mesh("cpu", (options.devices,))
        for layer in (*model.model.layers, model):  # type: ignore[union-attr, misc] # llama's
            shared = fully_shard(layer, mesh=mesh)
    else:
        shared = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_adamw([one for _, one in sorted(model.named_parameters())], manifest, torch.device("cpu"))
    inner, began = manifest.inner, _now()
    for step in range(-WARM_UP, options.steps):
        if step == 0:
            began = _now()
        windows = torch.from_numpy(source.take(inner.batch * inner.accumulation)).tensor_split(options.devices)[options.rank]
        parts = torch.split(windows, inner.batch)
        for number, part in enumerate(parts, 1):
            shared.require_backward_grad_sync = number == len(parts)  # shards have no room for whole gradients
            logits = shared(input_ids=part[:, :-1]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
            (loss * len(part) / len(windows)).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _since(began)


def _manifest(options: argparse.Namespace) -> Manifest:
    """Of the run, by AdamW alone, which the bare loop has."""
    manifest = read_run_file(options.run_file)
    return replace(manifest, inner=replace(manifest.inner, optimizer="adamw"))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    """Seconds, and those of the processor."""
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _run(arguments: list[str], count: int, *who: str) -> tuple[float, float]:
    """What the first of `count` processes tells that are started at once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.ranks", *arguments, "--folder", folder, *who]
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(count)
        ]
        told = [one.communicate()[0] for one in started]
    seconds, processor = map(float, told[0].split())
    return seconds, processor


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.bench.ranks", description=__doc__)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--who", choices=("ours", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who is not None:
        spent = (ours if options.who == "ours" else bare)(options, options.folder)
        sys.stdout.write(f"{spent[0]} {spent[1]}\n")
        return
    tokens = options.steps * _manifest(options).inner.tokens_per_step
    ratios: list[tuple[float, float]] = []
    for turn in range(options.times):
        found = {}
        for who in ("ours", "bare") if turn % 2 else ("bare", "ours"):
            found[who] = _run(sys.argv[1:], 1 if who == "ours" else options.devices, "--who", who)
        ratios.append((found["bare"][0] / found["ours"][0], found["bare"][1] / found["ours"][1]))
        rates = ", ".join(f"{who} {tokens / seconds:.0f}" for who, (seconds, _) in found.items())
        sys.stdout.write(f"{rates} tokens/s, ratio {ratios[-1][0]:.3f}; by processor time {ratios[-1][1]:.3f}\n")
        sys.stdout.flush()
    middle = [statistics.median(kind) for kind in zip(*ratios, strict=True)]
    sys.stdout.write(f"median of {len(ratios)}: ratio {middle[0]:.3f}, by processor time {middle[1]:.3f}\n")


if __name__ == "__main__":
    main()
