"""Checkpoints, and weights for newcomers, written beside training.

The rule: training stands still while what is to be written is copied within main memory, and no longer; a thread writes the
copy. One file is written at a time, and the next one is copied when its turn comes, so that there is one copy at most. Where
memory has no room for it, or while training rests, nothing is copied: the weights themselves are written, and whatever the
thread was writing gives way, so that the last checkpoint waits for no other. Before a pause they are copied from a GPU, which
gets its memory back before the disk has done.
"""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

import torch

from nolocod.disk import check_room
from nolocod.errors import LocalError
from nolocod.observe.events import Checkpointed
from nolocod.trainer import checkpoint, memory, pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from torch import Tensor

    from nolocod.trainer.replica import Replica

_ROOM = 1.25
"""Free memory must be so many times a copy's size."""


_ALIGNED = 64
"""Bytes at which a copied tensor begins."""
REST, _LONGEST_REST = 10.0, 2.0
"""Times as long as it computed with a piece the thread rests, this many seconds at most: the memory's bus and the caches are
training's too. While it waits for the disk, or for a processor, they are."""


class _GivenUpError(Exception):
    """The file gives way to another."""


class _Rests:
    """Rests between the pieces of a file; raises once `give_up` is set. Called by the thread that writes."""

    def __init__(self, give_up: threading.Event) -> None:
        self._give_up = give_up
        self._since: float | None = None
        self.rested = 0.0

    def __call__(self) -> None:
        began, worked = time.perf_counter(), 0.0
        if self._since is not None:
            worked = time.thread_time() - self._since
        if self._give_up.wait(min(REST * worked, _LONGEST_REST)):
            raise _GivenUpError
        self._since = time.thread_time()
        self.rested += time.perf_counter() - began


class Files:
    """Writes what is asked for; `tell` sends a message to the parent, from any thread."""

    def __init__(self, replica: Replica, setup: pipe.Setup, tell: Callable[[pipe.Written], None]) -> None:
        self._replica = replica
        self._setup = setup
        self._tell = tell
        # of training's priority: it would hold the interpreter while it waits for a processor
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[pipe.Checkpoint | pipe.Dump] = []
        self._under_way: Future[None] | None = None
        self._give_up = threading.Event()

    def ask(self, command: pipe.Checkpoint | pipe.Dump) -> None:
        """Have a file written when its turn comes."""
        self._waiting.append(command)

    @property
    def is_asked(self) -> bool:
        """Whether something waits to be written. Raises what the thread failed of."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()
            self._under_way = None
        return bool(self._waiting)

    def begin(self) -> None:
        """Between two inner steps: copy what is to be written next, and have it written beside training, unless it is not yet
        its turn."""
        if self._under_way is None:
            self._begin(self._waiting.pop(0), aside=True)

    def write_all(self) -> None:
        """While training rests: write all that was asked for, checkpoints first. Of several that wait one is enough."""
        self._give_up.set()
        if self._under_way is not None:
            wait((self._under_way,))
        self._give_up.clear()
        self._waiting.sort(key=lambda command: isinstance(command, pipe.Dump))
        while self._waiting:
            self._begin(self._waiting.pop(0), aside=False)

    def close(self) -> None:
        """End the thread, and what it writes."""
        self._waiting.clear()
        self._give_up.set()
        self._thread.shutdown()

    def _begin(self, command: pipe.Checkpoint | pipe.Dump, *, aside: bool) -> None:
        began = time.perf_counter()
        replica = self._replica
        if isinstance(command, pipe.Checkpoint):
            same = [other for other in self._waiting if isinstance(other, pipe.Checkpoint)]
            self._waiting = [other for other in self._waiting if isinstance(other, pipe.Dump)]
            state, tensors = replica.to_save(self._setup.peer_id)
        else:
            same, standing = [], replica.standing
            tensors, metadata, kinds = replica.snapshot()
        size = checkpoint.size_of(tensors)
        room = memory.free() > _ROOM * size
        aside = aside and room
        leaves = isinstance(command, pipe.Checkpoint) and command.last and replica.device.type != "cpu"
        leaves = leaves and room and _fits(self._setup.checkpoints, size)  # a full disk must not cost what is there alone
        if aside or leaves:
            tensors = _copied(tensors)
        if leaves:
            replica.release()
        stopped = time.perf_counter() - began
        rests = _Rests(self._give_up)
        check = rests if aside else checkpoint.go_on

        def write() -> object:
            if isinstance(command, pipe.Dump):
                return pipe.Dumped(standing, checkpoint.write_snapshot(command.path, tensors, metadata, kinds, check))
            written = checkpoint.save(self._setup.checkpoints, state, tensors, check)
            seconds = time.perf_counter() - began - rests.rested
            return Checkpointed(state.standing.round, written, seconds, stopped if aside else seconds)

        finish = partial(self._finish, [command, *same], write)
        if aside:
            self._under_way = self._thread.submit(finish)
        else:
            finish()

    def _finish(self, commands: Sequence[pipe.Checkpoint | pipe.Dump], write: Callable[[], object]) -> None:
        try:
            done = write()
        except _GivenUpError:
            self._waiting += commands  # for whoever waits for them
            return
        except LocalError as error:
            done = pipe.failed(error)
        for command in commands:
            self._tell(pipe.written(command.number, done))


def _fits(folder: Path, size: int) -> bool:
    try:
        check_room(folder, size)
    except LocalError:
        return False
    return True


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In memory of their own. In the heap they took the place of what inner steps make and drop, and each of these was in new
    pages then: up to 100,000 of them a step, a tenth of its time. Pages of 2 MB made the copy take twice as long."""
    rooms = [-(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED for tensor in tensors.values()]
    memory = mmap.mmap(-1, sum(rooms), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    parts = torch.split(torch.frombuffer(memory, dtype=torch.uint8), rooms)
    copies = {}
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        copies[name] = part.view(tensor.dtype)[: tensor.numel()].view(tensor.shape).copy_(tensor.detach())
    return copies
