"""What a checkpoint, and weights for a newcomer, cost training while they are written: `python -m tests.bench.beside`.

The rule: one trainer's loop in this process; inner steps are timed one by one, and those during which a file was written are
compared with those between, in the thread's computing and by the clock, which counts what other programs take too. The copy
that training waits for is told apart.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import torch

from nolocod.identity import Identity
from nolocod.observe.events import Checkpointed
from nolocod.run.manifest import Inner, Manifest, seal
from nolocod.trainer import pipe
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.replica import Replica
from nolocod.trainer.worker import Worker

MODELS = {
    "10M": {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 864},
    "40M": {"hidden_size": 512, "num_hidden_layers": 12, "intermediate_size": 1408},
    "125M": {"hidden_size": 896, "num_hidden_layers": 13, "intermediate_size": 2389},
}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _seconds(steps: list[tuple[float, float, float]], how: int) -> float:
    """The median of the steps' time: 0 by the clock, 2 of the thread's computing."""
    return statistics.median(step[2] if how else step[1] - step[0] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--files", type=int, default=6, help="of each kind (%(default)s)")
    parser.add_argument("--rest", type=float, default=5.0, metavar="SECONDS", help="between two of them (%(default)s)")
    parser.add_argument("--sequence", type=int, default=64)
    options = parser.parse_args()
    steps: list[tuple[float, float, float]] = []
    step = Replica.step

    def timed(replica: Replica) -> None:
        began, computed = time.perf_counter(), time.thread_time()
        step(replica)
        steps.append((began, time.perf_counter(), time.thread_time() - computed))

    Replica.step = timed  # type: ignore[method-assign] # what is measured
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
        time.sleep(options.rest)
        spans: dict[str, list[tuple[float, float]]] = {"checkpoint": [], "weights": []}
        stopped: list[float] = []
        for number in range(2 * options.files):
            began = time.perf_counter()
            kind = "weights" if number % 2 else "checkpoint"
            send(pipe.Dump(number, Path(folder, "weights")) if number % 2 else pipe.Checkpoint(number))
            told = wait(pipe.Written)
            assert isinstance(told, pipe.Written)
            if number % 2 == 0:
                stopped.append(msgspec.msgpack.decode(told.result, type=Checkpointed).stopped)
            spans[kind].append((began, time.perf_counter()))
            time.sleep(options.rest)
    say(f"{parameters:,} parameters, {torch.get_num_threads()} thread, {len(steps)} steps")
    files = [span for kind in spans for span in spans[kind]]
    apart = [step for step in steps[3:] if not any(step[0] < y and x < step[1] for x, y in files)]
    say(f"between: {_seconds(apart, 2):.4f} s a step, {_seconds(apart, 0):.4f} s by the clock ({len(apart)})")
    for kind, of_kind in spans.items():
        during = [step for step in steps if any(x <= step[0] and step[1] <= y for x, y in of_kind)]
        took = statistics.median(y - x for x, y in of_kind)
        more = " ".join(f"{_seconds(during, how) / _seconds(apart, how) - 1:+.1%}" for how in (2, 0)) if during else "-"
        say(f"{kind}: {took:.2f} s each; steps meanwhile {more} ({len(during)})")
    say(f"copy of a checkpoint: training stood still for {statistics.median(stopped):.3f} s")
    sys.stdout.flush()
    os._exit(0)  # the trainer's loop trains on


if __name__ == "__main__":
    main()
