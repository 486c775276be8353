"""What a step of somebody's own loop costs beside a swarm: `python -m tests.bench.own_loop`.

The rule: one loop in this process, whose steps are taken through NoLoCo and bare, block by block in turn, beside a partner on
the same machine that trains all the time. Each block is compared with the bare one before it, by the clock and in the thread's
computing, which leaves out what other programs take. What is asked for during a bare block is done, and counted, in the next.
What the thread computes in NoLoCo's own part of the steps is counted apart: on a busy machine it is the surest of the three.
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
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import nolocod

if TYPE_CHECKING:
    from nolocod.trainer.own import OwnReplica

FLAGS = ("--listen", "127.0.0.1:0", "--no-upnp")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_model(width: int, layers: int) -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return torch.nn.Sequential(torch.nn.Embedding(256, width), encoder, torch.nn.Linear(width, 256))


class Loop:
    """A plain loop over random text."""

    def __init__(self, model: torch.nn.Module, swarm: nolocod.Swarm, tokens: int) -> None:
        self.model, self._windows = model, tokens // 32
        self.bare = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.opt = nolocod.NoLoCo(model.parameters(), self.bare, swarm=swarm)
        self.served = 0.0
        """Seconds that this thread computed in NoLoCo's own part."""
        stepped = swarm.stepped

        def timed(replica: OwnReplica, loss: torch.Tensor | float | None) -> None:
            began = time.thread_time()
            stepped(replica, loss)
            self.served += time.thread_time() - began

        swarm.stepped = timed  # type: ignore[method-assign] # what is measured

    def steps(self, optimizer: torch.optim.Optimizer, count: int) -> tuple[float, float]:
        """Take so many; seconds by the clock, and of this thread."""
        began, computed = time.perf_counter(), time.thread_time()
        for _ in range(count):
            ids = torch.randint(0, 256, (self._windows, 33))
            functional.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - began, time.thread_time() - computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="in a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="in a block (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="of blocks (%(default)s)")
    parser.add_argument("--inner", type=int, default=25, help="steps between outer steps (%(default)s)")
    parser.add_argument("--beside", nargs=2, metavar=("DIR", "ADDRESS"), help="be the partner")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(options.width, options.layers)
    if options.beside:
        os.nice(10)
        folder, address = options.beside
        with nolocod.join(data_dir=folder, bootstrap=address, flags=FLAGS) as swarm:
            loop = Loop(model, swarm, options.tokens)
            while True:
                loop.steps(loop.opt, 1)
    run = {"inner": {"steps": options.inner}}
    sizes = [part for name in ("width", "layers", "tokens") for part in (f"--{name}", str(getattr(options, name)))]
    with (
        tempfile.TemporaryDirectory() as folder,
        nolocod.create(model, data_dir=Path(folder, "a"), run=run, flags=FLAGS) as swarm,
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.own_loop", *sizes, "--beside", str(Path(folder, "b")), swarm.addresses[0]]
        ) as partner,
    ):
        loop = Loop(model, swarm, options.tokens)
        say(f"{sum(one.numel() for one in model.parameters()):,} parameters, an outer step every {options.inner} steps")
        while swarm.status().outer_paired < 2:
            loop.steps(loop.opt, 1)
        before, ratios, computed, loop.served = swarm.status(), [], 0.0, 0.0
        for _ in range(options.pairs):
            bare, own = loop.steps(loop.bare, options.steps), loop.steps(loop.opt, options.steps)
            ratios.append((own[0] / bare[0], own[1] / bare[1]))
            computed += bare[1]
            say(f"{bare[0] / options.steps:.4f} s a bare step; NoLoCo's {ratios[-1][0]:.3f}, computing {ratios[-1][1]:.3f}")
        after = swarm.status()
        for how, name in ((0, "by the clock"), (1, "of the thread's computing")):
            one = [ratio[how] for ratio in ratios]
            say(f"{name}: median {statistics.median(one):.3f}, {min(one):.3f} to {max(one):.3f}")
        say(f"NoLoCo's own part: {loop.served / computed:.3f} of a bare step's computing")
        paired, solo = after.outer_paired - before.outer_paired, after.outer_solo - before.outer_solo
        say(f"outer steps meanwhile: {paired} paired, {solo} alone")
        partner.kill()


if __name__ == "__main__":
    main()
