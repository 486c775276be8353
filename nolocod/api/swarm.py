"""The node beside a training loop: its daemon is started, asked, and stopped here.

The rule: the daemon is that of `nolocod start` and `join`, with all of their flags, a log in the data directory, and an error
that ends it raised here as it is. It lives no longer than this process, whatever ends this.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from nolocod.errors import CATALOGUE, DaemonEndedError, RunFileError, UsageError
from nolocod.node import data_directory
from nolocod.observe.status import client
from nolocod.paths import DataDir
from nolocod.run.amendments import goal, unseal_amended
from nolocod.run.own import own_model
from nolocod.run.run_file import from_table
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.own_worker import OwnWorker
from nolocod.trainer.pipe import Failed
from nolocod.trainer.process import error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from nolocod.observe.status.report import StatusReport
    from nolocod.run.manifest import Manifest, Sealed
    from nolocod.trainer.own import OwnReplica

_LARGEST_LOG = 16 << 20
"""A log of more bytes is begun anew at the next start."""
_STOP_SECONDS = "600"
"""After `close` for the last checkpoint; without one nothing is waited for."""
_LAST_SECONDS = 20.0
"""For the process to end once it has nothing more to ask."""
_TOLD = re.compile(r"^error (NLC-\d{3}): .*\n +cause: +(.*)\n +what to do: (.*)", re.MULTILINE)
"""How a command ends that fails (cli.py)."""


def join(*, data_dir: str | Path, bootstrap: str | Sequence[str] = (), flags: Sequence[str] = ()) -> Swarm:
    """Join a run through any of its nodes (`bootstrap`: their addresses), or go on in the run of `data_dir`.

    `flags` are further ones of `nolocod join`. Returns once the run is found. Raises what a start of the daemon does
    (docs/errors.md).
    """
    addresses = [bootstrap] if isinstance(bootstrap, str) else bootstrap
    return Swarm("join", Path(data_dir), [*(part for one in addresses for part in ("--bootstrap", one)), *flags])


def create(
    model: torch.nn.Module, *, data_dir: str | Path, run: Mapping[str, Any] | None = None, flags: Sequence[str] = ()
) -> Swarm:
    """Found a run of `model`, whose weights it starts from, and be its first node; or go on with the run that was founded so.

    `run` has the keys of a run file, tables as mappings, but no `model` (docs/run-file.md). `flags` are those of `nolocod
    start`. Raises RunFileError, WrongRunError, and what a start of the daemon does.
    """
    paths = DataDir(Path(data_dir))
    data_directory.keep(paths, founded(model, run or {}))
    return Swarm("start", paths.root, flags)


def founded(model: torch.nn.Module, run: Mapping[str, Any]) -> Manifest:
    """The run of `model` with the keys `run` of a run file. RunFileError."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    pinned = own_model((name, str(one.dtype).removeprefix("torch."), one.shape) for name, one in named)
    if "model" in run:
        raise RunFileError("`model` is no key here: the model is the one that is given.")
    try:
        return from_table({"name": "own-loop", **run, "model": pinned})
    except msgspec.ValidationError as error:
        raise RunFileError(f"{error}.") from error


class Swarm:
    """A run as this process sees it. A context manager, which closes it at its end."""

    def __init__(self, command: str, root: Path, flags: Sequence[str]) -> None:
        self._paths = DataDir(root)
        self._owner = os.getpid()
        self._closed = False
        data_directory.make(self._paths)
        mode = "wb" if self._paths.log.exists() and self._paths.log.stat().st_size > _LARGEST_LOG else "ab"
        ours, theirs = socket.socketpair()
        self._memory = anonymous_file("boxes")
        with self._paths.log.open(mode) as log:
            self._log_begin = log.tell()
            pipes = f"{theirs.fileno()},{self._memory}"
            options = ["--data-dir", str(root), "--stop-within", _STOP_SECONDS, *flags, "--loop", pipes]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nolocod", command, *options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0,  # Ctrl-C is the loop's
                pass_fds=(theirs.fileno(), self._memory),
            )  # fmt: skip
        theirs.close()
        self._pipe = ChildEnd(ours.detach())
        self._worker = OwnWorker(self._pipe, self._memory)
        os.register_at_fork(after_in_child=self._pipe.close)  # or the daemon would wait for a data loader's end too
        try:
            setup = self._worker.wait_setup()
        except (EOFError, ConnectionError):
            self._raise_why(begun=False)
        except BaseException:
            self.close()
            raise
        self._sealed: Sealed = unseal_amended(setup.manifest, setup.amendments, setup.number)
        self._base = setup.base

    def model(self) -> torch.nn.Module:
        """The model of a run that names one of `transformers`, with the weights that it starts from, on the CPU.

        RunFileError where the run's model comes from its owner's program.
        """
        from nolocod.trainer.own import run_model

        return run_model(self._sealed.manifest, self._base)

    def status(self) -> StatusReport:
        """All that the node tells: round, peers, pairs, losses, errors. NotRunningError."""
        return client.read(data_directory.find_running(self._paths))

    @property
    def run_id(self) -> str:
        return self._sealed.run_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this node: what they give to `join` as bootstrap. NotRunningError."""
        return data_directory.find_running(self._paths).addresses

    @property
    def round(self) -> int:
        """Outer steps that the weights have behind them."""
        return 0 if self._worker.replica is None else self._worker.replica.standing.round

    @property
    def finished(self) -> bool:
        """The run's goal (`outer.rounds`) is reached: steps that follow are this process's alone."""
        return 0 < goal(self._sealed) <= self.round

    def begin(self, make: Callable[[Sealed, Path | None], OwnReplica]) -> OwnReplica:
        """For NoLoCo: have the replica made, and wait until its weights are the run's and training is due."""
        if self._closed or self._worker.replica is not None:
            raise UsageError("a swarm takes one NoLoCo, and none once it is closed.", remedy="Join again for another one.")
        try:
            self._worker.begin(lambda sealed: make(sealed, self._base))
        except (EOFError, ConnectionError):
            self._raise_why(begun=False)
        assert self._worker.replica is not None
        return self._worker.replica

    def stepped(self, replica: OwnReplica, loss: torch.Tensor | float | None) -> None:
        """For NoLoCo: after each inner step. DaemonEndedError once, if it ended; nothing is done then, or after `close`."""
        if not self._closed:
            try:
                self._worker.stepped(replica, loss)
            except (EOFError, ConnectionError):
                self._raise_why(begun=True)

    def close(self) -> None:
        """Stop the node in order, with a checkpoint of the weights as they are now. The model stays as it is."""
        if self._closed or os.getpid() != self._owner:  # what a forked process does is not this one's end
            return
        try:
            self._process.send_signal(signal.SIGTERM)
            self._worker.finish()
            self._end()
        finally:
            self._process.kill()
            self._end()

    def _end(self) -> int:
        """Wait for the process, and let go of what is shared with it; its exit status."""
        try:
            status = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if not self._closed:
            self._closed = True
            self._pipe.close()
            os.close(self._memory)
        return status

    def _raise_why(self, *, begun: bool) -> NoReturn:
        """The daemon ended: raise its own error, or, once training has begun, DaemonEndedError."""
        status = self._end()
        with self._paths.log.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._log_begin)
            text = log.read()
        told = _TOLD.findall(text) if status > 0 else []  # another start in this directory may have written there too
        if told and not begun:
            raise error_of(Failed(*told[-1]))
        code, cause, remedy = told[-1] if told else ("", f"its exit status was {status}, its log is {self._paths.log}.", None)
        title = f"{code} {CATALOGUE[code].title}: " if code in CATALOGUE else ""
        raise DaemonEndedError(f"{title}{cause}", remedy=remedy)

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
