"""What a checkpoint, and weights for a newcomer, cost training while they are written: `python -m tests.bench.beside`.

The rule: one trainer's loop in this process. While a file is under way its thread is held for some seconds and let go for some
seconds, in turn, and inner steps of each turn are compared with those of the turns around it, by the clock: a machine that
others use is faster in one half minute than in the next by more than what is to be seen. The copy that training waits for
is told apart.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from nolocod.identity import Identity
from nolocod.observe.events import Checkpointed
from nolocod.run.manifest import Inner, Manifest, seal
from nolocod.trainer import files, pipe
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.replica import Replica
from nolocod.trainer.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

MODELS = {
    "10M": {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 864},
    "40M": {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 1408},
    "125M": {"hidden_size": 896, "num_hidden_layers": 13, "intermediate_size": 2389},
}

KINDS = ("checkpoint", "weights")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


class Turns:
    """Holds the thread that writes, and lets it go, every so many seconds; `taken` is when it did: (since, writes)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._free = threading.Event()
        self._free.set()
        self.taken: list[tuple[float, bool]] = []

    def run(self) -> None:
        """For ever, in a thread."""
        while True:
            self.taken.append((time.perf_counter(), self._free.is_set()))
            time.sleep(self._seconds)
            (self._free.clear if self._free.is_set() else self._free.set)()

    def wait(self) -> None:
        """Until the thread may write."""
        self._free.wait()

    def compare(self, steps: Sequence[tuple[float, float]], files: Sequence[tuple[float, float]]) -> list[float]:
        """For each turn in which a file was written all the time, its mean step over the two turns' around it, less 1."""
        found: list[float] = []
        means: list[float | None] = []
        bounds = [*(since for since, _ in self.taken), time.perf_counter()]
        for since, until in pairwise(bounds):
            whole = any(began <= since and until <= ended for began, ended in files)
            inside = [ended - began for began, ended in steps if since <= began and ended <= until] if whole else []
            means.append(statistics.mean(inside) if inside else None)
        for before, own, after, (_, writes) in zip(means, means[1:], means[2:], self.taken[1:], strict=False):
            if writes and own and before and after:
                found.append(2 * own / (before + after) - 1)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--files", type=int, default=6, help="of each kind (%(default)s)")
    parser.add_argument("--only", choices=KINDS, help="files of this kind (both)")
    parser.add_argument("--turn", type=float, default=4.0, metavar="SECONDS", help="of writing, and of none (%(default)s)")
    parser.add_argument("--sequence", type=int, default=64)
    options = parser.parse_args()
    steps: list[tuple[float, float]] = []
    step, rest, turns = Replica.step, files._Rests.__call__, Turns(options.turn)

    def timed(replica: Replica) -> None:
        began = time.perf_counter()
        step(replica)
        steps.append((began, time.perf_counter()))

    def held(rests: files._Rests) -> None:
        turns.wait()
        rest(rests)

    Replica.step = timed  # type: ignore[method-assign, assignment] # what is measured
    files._Rests.__call__ = held  # type: ignore[method-assign, assignment]
    ours, theirs = socket.socketpair()
    worker = Worker(ChildEnd(theirs.detach()), anonymous_file("boxes"))
    threading.Thread(target=worker.run, daemon=True).start()
    replies, last = pipe.Unframer(), 0

    def send(command: pipe.Command) -> None:
        nonlocal last
        last += 1
        ours.sendall(pipe.frame(pipe.Request(last, command)))

    def wait(kind: type[pipe.Reply]) -> pipe.Reply:
        while True:
            for message in replies.feed(ours.recv(1 << 16)):
                if isinstance(found := pipe.REPLIES.decode(message), kind):
                    return found

    model = {"model_type": "llama", "num_attention_heads": 8, "vocab_size": 512, **MODELS[options.model]}
    manifest = Manifest(name="beside", model=model, inner=Inner(batch=1, sequence=options.sequence, optimizer="adamw"))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        setup = pipe.Setup(
            manifest=seal(manifest, Identity.from_secret(b"b" * 32)).to_bytes(),
            peer_id="bench",
            data=None,
            devices="cpu",
            threads=1,
            checkpoints=Path(folder, "checkpoints"),
            cache=Path(folder, "cache"),
        )
        send(setup)
        loaded = wait(pipe.Answer)
        assert isinstance(loaded, pipe.Answer)
        assert loaded.failure is None, loaded.failure
        parameters = msgspec.msgpack.decode(loaded.result, type=pipe.Loaded).parameters
        send(pipe.Train())
        threading.Thread(target=turns.run, daemon=True).start()
        spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        stopped: list[float] = []
        kinds = [options.only] if options.only else KINDS
        for number in range(options.files):
            for kind in kinds:
                asked = time.perf_counter()
                is_checkpoint = kind == "checkpoint"
                send(pipe.Checkpoint(number) if is_checkpoint else pipe.Dump(number, Path(folder, "weights")))
                told = wait(pipe.Written)
                assert isinstance(told, pipe.Written)
                if is_checkpoint:
                    stopped.append(msgspec.msgpack.decode(told.result, type=Checkpointed).stopped)
                spans[kind].append((asked, time.perf_counter()))
    say(f"{parameters:,} parameters, {torch.get_num_threads()} thread, {len(steps)} steps")
    for kind, of_kind in ((kind, spans[kind]) for kind in kinds):
        found = turns.compare(steps, of_kind)
        took = statistics.median(ended - began for began, ended in of_kind)
        if len(found) < 2:
            say(f"{kind}: {took:.1f} s each, too short to compare turns of {options.turn:g} s")
            continue
        error = statistics.stdev(found) / math.sqrt(len(found))
        say(
            f"{kind}: {took:.1f} s each, half of it held; a step while it is written {statistics.mean(found):+.1%} "
            f"(standard error {error:.1%}, {len(found)} turns of {options.turn:g} s)"
        )
    if stopped:
        say(f"copy of a checkpoint: training stood still for {statistics.median(stopped):.3f} s")
    sys.stdout.flush()
    os._exit(0)  # the trainer's loop trains on


if __name__ == "__main__":
    main()
