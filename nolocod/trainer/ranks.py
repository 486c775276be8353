"""The leader's side of a node with several devices: it starts a process for each of the others, and tells them what to do.

The rule: all outer state stays with the leader; the others hold theta and the optimizer, each the whole or all together in
shards. What an outer step changed of theta is spread before the next inner step, from the leader's bits, so that devices that
round otherwise part for one phase at most. A step's windows are cut into one part for each device: of whole models as large as
the device is fast (pace.py), of shards as equal as can be. What is added up is the gradient of the mean over all of them, as of
one device, and each takes the same optimizer step. When one process dies all do, and the trainer goes on from its checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import torch

from nolocod.errors import TrainerError
from nolocod.trainer import pipe
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.devices import check_count
from nolocod.trainer.group import LEADER, Command, Evaluate, Group, Join, Paced, Peer, Step, Take, lost, watch
from nolocod.trainer.pace import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.capture import Weights
    from nolocod.trainer.on_device import DevicePart

_END_SECONDS = 2.0


class _Process:
    """One of the others."""

    def __init__(self, rank: int, device: torch.device, files: tuple[int, int]) -> None:
        self._name = f"the process of {device} (device {rank + 1})"
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), *files)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nolocod.trainer.rank", *map(str, inherited)],
                pass_fds=inherited, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._pipe = Peer(ours.detach())
        self._failed: pipe.Failed | None = None
        self.pace = 0.0
        """As it was told last (pace.py); 0 before."""

    def follow(self, fallen: Callable[[pipe.Failed], None]) -> None:
        watch(self._pipe, self._told, lambda: fallen(self._why()))

    def tell(self, command: Command) -> None:
        with lost():
            self._pipe.send(command)

    def _told(self, message: bytes) -> None:
        match msgspec.msgpack.decode(message, type=Paced | pipe.Answer):
            case Paced(seconds):
                self.pace = seconds
            case pipe.Answer(failure=failure):
                self._failed = failure

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

    def __init__(
        self, setup: pipe.Setup, devices: Sequence[torch.device], fallen: Callable[[pipe.Failed], None], *, sharded: bool
    ) -> None:
        self.devices, self.sharded = devices, sharded
        self._closed = False
        self._shares: list[int] = []
        self._paces: list[float] = []  # of the others, when shares were made
        self._files = anonymous_file("meeting"), anonymous_file("theta")
        self._others = [_Process(rank, device, self._files) for rank, device in enumerate(devices[1:], 1)]
        for rank, (other, device) in enumerate(zip(self._others, devices[1:], strict=True), 1):
            other.follow(lambda failed: None if self._closed else fallen(failed))
            other.tell(Join(msgspec.structs.replace(setup, devices=str(device)), rank, len(devices), sharded))
        self.group = Group(self._files, LEADER, len(devices), devices[0], self.tell)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the devices, as status and log have them."""
        if self.sharded:
            return tuple(f"{device} (shard)" for device in self.devices)
        return self._part.name, *map(str, self.devices[1:])

    def lead(self, part: DevicePart, weights: Weights) -> None:
        """`part` is the leader's, which knows the `weights`. They are not spread yet: devices may have rounded otherwise."""
        self._part, self._weights = part, weights
        weights.changed(slice(0, part.layout.size))

    def spread(self) -> None:
        """Bring all devices where theta was changed, but not by inner steps."""
        if (changed := self._weights.take_changed()) is not None:
            self._weights.bring(changed)  # all between two changes too
            self.tell(Take(changed.start, changed.stop))
            self._part.take(changed)

    def step(self, windows: Tensor, rate: float) -> None:
        """Take an inner step on all devices."""
        self.spread()
        weight = self._part.objective.weight(windows)
        (own, own_idle), *parts = self._cut(windows) if self.sharded else self._share(windows)
        for other, (part, idle) in zip(self._others, parts, strict=True):
            other.tell(Step(part.numpy().tobytes(), part.shape[1], idle, weight, rate))
        self._part.step(own, rate, weight, own_idle)

    def evaluate(self, windows: Tensor) -> float:
        """The mean loss of `windows`, by all devices."""
        self.spread()
        (own, own_idle), *parts = self._cut(windows)
        for other, (part, idle) in zip(self._others, parts, strict=True):
            other.tell(Evaluate(part.numpy().tobytes(), part.shape[1], idle))
        return self._part.evaluate(own, own_idle)

    def _cut(self, windows: Tensor) -> list[tuple[Tensor, int]]:
        """Each device's windows, of which the last so many are idle ones: those with shards compute equally often."""
        parts = windows.tensor_split(len(self.devices))
        if not self.sharded:
            return [(part, 0) for part in parts]
        passes = [-(-len(part) // self._part.inner.at_once) for part in parts]
        idle = [max(passes) - one for one in passes]
        return [(torch.cat([part, windows[:1].expand(more, -1)]), more) for part, more in zip(parts, idle, strict=True)]

    def _share(self, windows: Tensor) -> list[tuple[Tensor, int]]:
        """Each device's windows of a step, the more the faster it is."""
        pace, paces = self._part.inner.pace, [other.pace for other in self._others]
        if sum(self._shares) != len(windows):
            self._shares, self._paces = [len(part) for part in windows.tensor_split(len(self.devices))], []
        if pace is not None and pace.seconds and paces != self._paces and all(paces):
            self._shares, self._paces = shares([pace.seconds, *paces], self._shares), paces
        return [(part, 0) for part in torch.split(windows, self._shares)]

    def close(self) -> None:
        """End them, and wait until they have: their devices are free then."""
        self._closed = True
        for other in self._others:
            other.end()
        self.group.close()
        os.close(self._files[1])  # not the other: whatever holds on to the group writes to its number in the end

    def tell(self, command: Command) -> None:
        """Have the others do what the leader does."""
        for other in self._others:
            other.tell(command)


def open_ranks(
    setup: pipe.Setup,
    manifest: Manifest,
    devices: Sequence[torch.device],
    fallen: Callable[[pipe.Failed], None],
    *,
    sharded: bool,
) -> Ranks:
    """Processes for all `devices` but the first. DeviceError."""
    check_count(len(devices), manifest)
    threads = setup.threads or torch.get_num_threads()
    if devices[0].type == "cpu":  # they share the cores
        setup = msgspec.structs.replace(setup, threads=max(1, threads // len(devices)))
        torch.set_num_threads(setup.threads)
    return Ranks(setup, devices, fallen, sharded=sharded)
