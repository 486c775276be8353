"""The process of a device that is not the leader's: computes its part of each inner step, and holds theta as the leader has it.

The rule: it knows no peers, no text and no disk but the checkpoint that it begins from; what it is told comes by the leader's
pipe (group.py). The optimizer sees the same gradient on every device, so that each keeps the state that one alone would have.
Started by ranks.py as `python -m nolocod.trainer.rank PIPE MEETING`, two descriptors. It ignores the signals that its leader
ignores, which are inherited.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from queue import SimpleQueue

import torch

from nolocod.errors import NolocodError
from nolocod.run.amendments import unseal_amended
from nolocod.trainer import checkpoint, pipe
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.group import COMMANDS, Command, Group, Join, Peer, Resume, Step, Take, watch
from nolocod.trainer.model import Place, pick_device
from nolocod.trainer.on_device import DevicePart, draws
from nolocod.trainer.settled import memory_errors, quiet, settle_in


def build(join: Join) -> DevicePart:
    """This device's half of the replica. Raises what is wrong with the run or the device."""
    setup = join.setup
    settle_in(setup)
    manifest = unseal_amended(setup.manifest, setup.amendments, setup.number).manifest
    place = Place(pick_device(setup.devices), setup.base, setup.base_bits, spares_memory=setup.spare_memory)
    part = DevicePart(manifest, make_tokenizer(manifest.data, setup.base).vocabulary, place, leads=False)
    torch.manual_seed(draws(manifest, f"{setup.peer_id} {join.rank}"))
    return part


def serve(part: DevicePart, group: Group, command: Command) -> None:
    """Do what the leader does too."""
    match command:
        case Take(start, stop):
            group.spread(part.theta[start:stop])
        case Step(windows, length, weight, rate):
            part.inner.step(torch.frombuffer(bytearray(windows), dtype=torch.int64).view(-1, length), rate, weight)
        case Resume(path, steps):
            part.inner.restore(checkpoint.tensors_of(path), steps)


def run(leader: Peer, meeting: int) -> None:
    """The process's life, which ends when the leader is gone. Raises what it fails of."""
    commands: SimpleQueue[Command] = SimpleQueue()
    watch(leader, lambda told: commands.put(COMMANDS.decode(told)), lambda: os._exit(0))
    join = commands.get()
    assert isinstance(join, Join)
    part = build(join)
    leader.send(pipe.answer(1, None, None))
    group = Group(meeting, join.rank, join.count, part.device)
    part.inner.share(group.add)
    while True:
        serve(part, group, commands.get())


def main() -> None:
    """Tell the leader of failures in the catalogue's codes."""
    quiet()
    pipe_end, meeting = (int(text) for text in sys.argv[1:])
    leader = Peer(pipe_end)
    try:
        with memory_errors():
            run(leader, meeting)
    except NolocodError as error:
        failed = pipe.failed(error)
        with suppress(OSError):
            leader.send(pipe.answer(0, failed, None))
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
