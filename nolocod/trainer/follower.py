"""A device that is not the leader's: it computes its part of each inner step, and holds theta as the leader has it.

The rule: it knows no peers, no text and no disk but the checkpoint that it begins from; what it is told comes by the leader's
pipe (group.py). The optimizer sees the same gradient on every device, so that each keeps the state that one alone would have.
"""

from __future__ import annotations

import os
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from nolocod.run.amendments import unseal_amended
from nolocod.trainer import checkpoint
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.group import COMMANDS, Command, Evaluate, Give, Group, Join, Paced, Peer, Resume, Step, Take, watch
from nolocod.trainer.model import Place, pick_device
from nolocod.trainer.on_device import draws
from nolocod.trainer.settled import settle_in
from nolocod.trainer.shards import make_part

if TYPE_CHECKING:
    from torch import Tensor

    from nolocod.trainer.on_device import DevicePart


def build(join: Join, files: tuple[int, int]) -> DevicePart:
    """This device's half of the replica. Raises what is wrong with the run or the device."""
    setup = join.setup
    settle_in(setup)
    manifest, device = unseal_amended(setup.manifest, setup.amendments, setup.number).manifest, pick_device(setup.devices)
    vocabulary = make_tokenizer(manifest.data, setup.base).vocabulary
    group = Group(files, join.rank, join.count, device, lambda command: None)
    shards = join.count if join.sharded else 1
    place = Place(device, setup.base, setup.base_bits, 1, setup.spare_memory, setup.compile, shards, group)
    part = make_part(manifest, vocabulary, place, leads=False)
    torch.manual_seed(draws(manifest, f"{setup.peer_id} {join.rank}"))
    return part


def serve(part: DevicePart, command: Command) -> None:
    """Do what the leader does too."""
    match command:
        case Take(start, stop):
            part.take(slice(start, stop))
        case Give(kind, start, stop):
            part.give(kind, slice(start, stop))
        case Step(windows, length, idle, weight, rate):
            part.step(unpacked(windows, length), rate, weight, idle)
        case Evaluate(windows, length, idle):
            part.evaluate(unpacked(windows, length), idle)
        case Resume(path, steps):
            part.inner.restore(checkpoint.tensors_of(path), steps)


def unpacked(windows: bytes, length: int) -> Tensor:
    return torch.frombuffer(bytearray(windows), dtype=torch.int64).view(-1, length)


def follow(leader: Peer, files: tuple[int, int]) -> None:
    """Do what the leader says, until it is gone: then the process ends. Raises what it fails of."""
    commands: SimpleQueue[Command] = SimpleQueue()
    watch(leader, lambda told: commands.put(COMMANDS.decode(told)), lambda: os._exit(0))
    join = commands.get()
    assert isinstance(join, Join)
    part = build(join, files)
    while True:
        serve(part, commands.get())
        if part.inner.pace is not None and (seconds := part.inner.pace.news()) is not None:
            with suppress(OSError):  # the leader is gone: so is this process soon
                leader.send(Paced(seconds))
