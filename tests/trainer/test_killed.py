"""Processes of a node with several devices are killed at random moments: what is left, and where it goes on.

`python -m tests.trainer.test_killed DEVICES --moments 20 --seed 0` does it more often than the suite.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import psutil
import trio

from nolocod.errors import TrainerError
from nolocod.trainer import process
from tests.support.trainer_parts import child_of, sealed_run, setup_for, trade
from tests.trainer.test_ranks import INNER, ranks_below

if TYPE_CHECKING:
    from nolocod.trainer.process import TrainerProcess

DEADLINE = 300
SHARED = Path("/dev/shm")


# --- the network process: two trainers that exchange, of which alice's has several devices


async def live(folder: Path, devices: str) -> None:
    sealed = sealed_run(inner=INNER, codec="modulo8")
    async with process.open_trainer(lambda event: None) as bob:
        await bob.load(setup_for(sealed, folder, "bob"))
        await bob.train()
        while True:
            try:
                async with process.open_trainer(lambda event: None) as alice:
                    say(f"starts {child_of(alice).pid}")
                    await alice.load(setup_for(sealed, folder, "alice", devices=devices))
                    say(f"began {alice.inner_steps}")
                    await alice.train()
                    while True:
                        await take_turn(alice, bob)
            except* TrainerError:
                await bob.discard()
                await bob.evaluate()
                await bob.wait_steps(bob.steps_since_outer + 1)
                say(f"partner {bob.standing.loss}")


async def take_turn(alice: TrainerProcess, bob: TrainerProcess) -> None:
    """All that a trainer is asked for."""
    for trainer in (alice, bob):
        await trainer.wait_steps(2)
    await alice.evaluate()
    await trade(alice, bob)
    for trainer in (alice, bob):
        await trainer.apply(trainer.standing.round + 1, b"")
    steps = alice.inner_steps  # it trains on
    await alice.checkpoint()
    say(f"saved {steps}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# --- who kills


class Node:
    """That process, and what it says."""

    def __init__(self, folder: Path, devices: str) -> None:
        command = [sys.executable, "-m", "tests.trainer.test_killed", devices, "--live", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._said: SimpleQueue[list[str]] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(line.split())

    def until(self, word: str, saved: list[int], deadline: float = DEADLINE) -> str:
        """What it says of `word`; what it saved meanwhile goes to `saved`."""
        ends = time.monotonic() + deadline
        while True:
            first, rest = self._said.get(timeout=max(0.0, ends - time.monotonic()))
            if first == "saved":
                saved.append(int(rest))
            if first == word:
                return rest


def kill_at_random(folder: Path, devices: str, moments: int, seed: int) -> list[str]:
    """Kill one of the node's processes at each of so many moments; returns which."""
    rng, killed, saved = random.Random(seed), list[str](), [0]
    before = set(SHARED.iterdir())
    node = Node(folder, devices)
    try:
        for _ in range(moments):
            leader = psutil.Process(int(node.until("starts", saved)))
            if rng.random() < 0.75:  # else while it loads
                assert int(node.until("began", saved)) >= saved[-1], "it goes on from its last checkpoint"
                node.until("saved", saved)
            listen_for(node, rng.uniform(0, 2), saved)
            family = [leader, *ranks_below(leader)]
            victim = rng.choice(["network", *["leader"] * (len(family) > 0), *["rank"] * (len(family) > 1)])
            killed.append(victim)
            if victim == "network":
                family += psutil.Process(node.process.pid).children()
                node.process.send_signal(signal.SIGKILL)
                node.process.wait()
            else:
                (family[0] if victim == "leader" else rng.choice(family[1:])).send_signal(signal.SIGKILL)
            assert not psutil.wait_procs(family, timeout=60)[1], f"all end with the {victim}"
            if victim == "network":
                node = Node(folder, devices)
            else:
                assert float(node.until("partner", saved)) < 10
        node.until("began", saved)
        node.until("saved", saved)
        family = psutil.Process(node.process.pid).children(recursive=True)
    finally:
        node.process.kill()
        node.process.wait()
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert set(SHARED.iterdir()) <= before, "no shared memory is left"
    return killed


def listen_for(node: Node, seconds: float, saved: list[int]) -> None:
    try:
        node.until("nothing", saved, seconds)
    except Empty:
        return


def test_whoever_is_killed_and_whenever_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    assert len(kill_at_random(tmp_path, "shard:cpu:2", moments=2, seed=0)) == 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices")
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.live is not None:
        trio.run(live, options.live, options.devices)
    with tempfile.TemporaryDirectory() as folder:
        say(f"killed {' '.join(kill_at_random(Path(folder), options.devices, options.moments, options.seed))}")


if __name__ == "__main__":
    main()
