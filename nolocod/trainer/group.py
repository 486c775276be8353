"""What the processes of one trainer with several devices say to each other: the leader's commands, and their collectives.

The rule: each process has a pipe to the leader, at which it waits for as long as it takes; a collective is begun only by those
who were told to, so that no pause and no exchange makes one wait. Whoever loses its pipe ends at once, in whatever it does:
so one that dies takes all others with it. They meet through memory without a name, and listen on loopback alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path  # noqa: TC003 - msgspec reads annotations at run time
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from nolocod.errors import TrainerError, on_one_line
from nolocod.trainer import pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

LEADER = 0
_LONGEST = timedelta(hours=1)
"""For which a sum is waited for: for the slowest device's part of an inner step. The network process's patience ends before."""
_LOST_SECONDS = 10.0
"""For which a broken sum waits until the pipe tells who died."""


class Join(pipe.Message, frozen=True):
    """Meet the others, and build the run's model: whole, or this device's shards of it. Failed."""

    setup: pipe.Setup
    rank: int
    count: int
    sharded: bool


class Resume(pipe.Message, frozen=True):
    """Take the optimizer's state from the leader's checkpoint, which has taken so many steps."""

    checkpoint: Path
    steps: int


class Take(pipe.Message, frozen=True):
    """Get this part of theta, as the leader has it."""

    start: int
    stop: int


class Give(pipe.Message, frozen=True):
    """Write what this device has of these elements where the leader sees it: of theta, or a `kind` of the optimizer's state."""

    kind: str
    start: int
    stop: int


class Step(pipe.Message, frozen=True):
    """Take a part of an inner step: `windows` (int64) of `length` tokens, of a mean over `weight`; the last `idle` count for
    nothing (inner.pieces)."""

    windows: bytes
    length: int
    idle: int
    weight: int
    rate: float


class Evaluate(pipe.Message, frozen=True):
    """Add the loss of these windows up, as in Step."""

    windows: bytes
    length: int
    idle: int


class Paced(pipe.Message, frozen=True):
    """Another device's seconds for a window (pace.py), told to the leader."""

    seconds: float


Command = Join | Resume | Take | Give | Step | Evaluate
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=lambda path, told: path(told))


class Peer:
    """One end of a pipe between the leader and another. OSError or EOFError once the other end is gone."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: Command | Paced | pipe.Answer) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message, enc_hook=os.fspath))

    def receive(self) -> bytes:
        return self._connection.recv_bytes()

    def close(self) -> None:
        """The other end learns it, though a thread still reads here."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Group:
    """The processes of all devices: made by each of `count`, with the same descriptors of two empty files; waits for all.

    `area` is for what all see; `tell` is how the leader has the others follow it.
    """

    def __init__(
        self, files: tuple[int, int], rank: int, count: int, device: torch.device, tell: Callable[[Command], None]
    ) -> None:
        meeting, self.area = files
        self.rank, self.count, self.tell = rank, count, tell
        self._device = device
        for kind in ("GLOO", "NCCL"):
            os.environ[f"{kind}_SOCKET_IFNAME"] = "lo"  # all are on this machine
        store = dist.FileStore(f"/proc/self/fd/{meeting}", count)  # type: ignore[attr-defined] # it is public
        card = device if device.type == "cuda" else None
        with lost():
            dist.init_process_group(
                "nccl" if card else "gloo", store=store, rank=rank, world_size=count, timeout=_LONGEST, device_id=card
            )

    def add(self, tensor: Tensor) -> None:
        """Put the sum of everybody's in place of `tensor`; all get the same bits."""
        with lost():
            dist.all_reduce(tensor)

    def least(self, number: int) -> int:
        """The least of everybody's."""
        found = torch.tensor(number, device=self._device)
        with lost():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def spread(self, tensor: Tensor) -> None:
        """Put the leader's in place of everybody's."""
        with lost():
            dist.broadcast(tensor, LEADER)

    def meet(self) -> None:
        """Wait until all have come here."""
        with lost():
            dist.barrier()

    def trade(self, given: Tensor, sizes: list[int], got: list[int]) -> Tensor:
        """Give each of the others its part of `given`, of `sizes`; returns what they gave, parts of the sizes `got`."""
        found = given.new_empty(sum(got))
        with lost():
            dist.all_to_all_single(found, given, got, sizes)
        return found

    def close(self) -> None:
        dist.destroy_process_group()


@contextmanager
def lost() -> Iterator[None]:
    """Whoever reads the pipe of one that died ends this process, and can say why: wait for that."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:  # torch's distributed errors are of the first kind
        time.sleep(_LOST_SECONDS)
        raise TrainerError(f"the trainer's processes lost each other ({on_one_line(error, 200)}).") from error


def watch(peer: Peer, told: Callable[[bytes], None], gone: Callable[[], None]) -> None:
    """Read `peer` in a thread until it is gone."""

    def read() -> None:
        try:
            while True:
                told(peer.receive())
        except (EOFError, OSError):
            gone()

    threading.Thread(target=read, daemon=True).start()
