"""The leader's side of a node with several devices: it starts a process for each of the others, and tells them what to do.

The rule: all outer state stays with the leader; the others hold theta and the optimizer. What an outer step changed of theta is
spread before the next inner step, from the leader's bits, so that devices that round otherwise part for one phase at most. A
step's windows are cut into one part for each device; what is added up is the gradient of the mean over all of them, as of one
device, and each takes the same optimizer step. When one process dies all do, and the trainer goes on from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import torch

from nolocod.errors import TrainerError
from nolocod.trainer import pipe
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.devices import check_count
from nolocod.trainer.group import LEADER, Command, Group, Join, Peer, Resume, Step, Take, lost, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from nolocod.run.manifest import Manifest

_END_SECONDS = 2.0


class _Process:
    """One of the others."""

    def __init__(self, rank: int, device: torch.device, meeting: int) -> None:
        self._name = f"the process of {device} (device {rank + 1})"
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), meeting)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nolocod.trainer.rank", *map(str, inherited)],
                pass_fds=inherited, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._pipe = Peer(ours.detach())
        self.ready = threading.Event()
        self._failed: pipe.Failed | None = None

    def follow(self, fallen: Callable[[pipe.Failed], None]) -> None:
        watch(self._pipe, self._told, lambda: fallen(self._why()))

    def tell(self, command: Command) -> None:
        with lost():
            self._pipe.send(command)

    def _told(self, message: bytes) -> None:
        answer = msgspec.msgpack.decode(message, type=pipe.Answer)
        self._failed = answer.failure
        if answer.failure is None:
            self.ready.set()

    def _why(self) -> pipe.Failed:
        if self._failed is not None:
            return self._failed
        status = self._process.wait()  # its end of the pipe was closed by its end
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return pipe.failed(TrainerError(f"{self._name} ended {how}."))

    def end(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ranks:
    """The processes of `devices` but the first; `fallen` is called in a thread when one ended unasked, with why."""

    def __init__(self, setup: pipe.Setup, devices: Sequence[torch.device], fallen: Callable[[pipe.Failed], None]) -> None:
        self.devices = devices
        self._closed = False
        self._group: Group | None = None
        self._meeting = anonymous_file("meeting")
        self._others = [_Process(rank, device, self._meeting) for rank, device in enumerate(devices[1:], 1)]
        for rank, (other, device) in enumerate(zip(self._others, devices[1:], strict=True), 1):
            other.follow(lambda failed: None if self._closed else fallen(failed))
            other.tell(Join(msgspec.structs.replace(setup, devices=str(device)), rank, len(devices)))

    def meet(self) -> Callable[[Tensor], None]:
        """Wait until the others have built the model; returns what adds gradients up (Inner.share)."""
        for other in self._others:
            other.ready.wait()
        self._group = Group(self._meeting, LEADER, len(self.devices), self.devices[0])
        return self._group.add

    def resume(self, path: Path, steps: int) -> None:
        """Have them take the optimizer's state from a checkpoint."""
        self._tell(Resume(path, steps))

    def spread(self, theta: Tensor, changed: slice) -> None:
        """Bring everybody's theta where the leader's `changed`."""
        self._tell(Take(changed.start, changed.stop))
        assert self._group is not None
        self._group.spread(theta[changed])

    def step(self, windows: Tensor, rate: float, weight: int) -> Tensor:
        """Have the others take their parts of an inner step; returns the leader's."""
        own, *parts = windows.tensor_split(len(self.devices))
        for other, part in zip(self._others, parts, strict=True):
            other.tell(Step(part.numpy().tobytes(), part.shape[1], weight, rate))
        return own

    def close(self) -> None:
        """End them, and wait until they have: their devices are free then."""
        self._closed = True
        for other in self._others:
            other.end()
        if self._group is not None:
            self._group.close()
        os.close(self._meeting)

    def _tell(self, command: Command) -> None:
        for other in self._others:
            other.tell(command)


def open_ranks(
    setup: pipe.Setup, manifest: Manifest, devices: Sequence[torch.device], fallen: Callable[[pipe.Failed], None]
) -> Ranks | None:
    """Processes for all `devices` but the first; None where there is one device alone, which needs no other. DeviceError."""
    if len(devices) == 1:
        return None
    check_count(len(devices), manifest)
    threads = setup.threads or torch.get_num_threads()
    if devices[0].type == "cpu":  # they share the cores
        setup = msgspec.structs.replace(setup, threads=max(1, threads // len(devices)))
        torch.set_num_threads(setup.threads)
    return Ranks(setup, devices, fallen)
