"""The parent's handle on the trainer process.

The rule: this file runs in the network process, so it imports no torch; it sends one command at a time (pipe.py says
what each does), each with a deadline, turns reports into events, and turns the child's failures into our errors. When the
child dies without having been asked to, `wait_dead` and every call raise TrainerError.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import trio

from nolocod import errors
from nolocod.errors import LocalError, NolocodError, NoTorchError, TrainerError
from nolocod.observe import events
from nolocod.proto.limits import SLOWEST_DISK
from nolocod.proto.types import Applied, Box, Built, Description, Inspection, SnapshotParts, Standing, whose_turn
from nolocod.trainer import pipe
from nolocod.trainer.boxes import SharedBox, anonymous_file
from nolocod.trainer.patience import CHECKPOINT_BYTES, LOAD, Patience
from nolocod.trainer.pipe import Dumped, Loaded, Setup
from nolocod.units import SLOWEST_RATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nolocod.observe.events import Emit

__all__ = ["Dumped", "Loaded", "Setup", "TrainerProcess", "open_trainer"]

CHILD = "nolocod.trainer.worker"
"""The module that the process runs."""

_STOP_SECONDS = 5.0
_RESTS = 4
"""Files that are written beside training take so many times as long as the disk does."""

R = TypeVar("R")


class TrainerEndedError(TrainerError):
    """The process was ended by who runs it."""


class TrainerProcess:
    """One trainer, as the network process sees it (outer.sides.Trainer and more)."""

    outbox: Box
    inbox: Box
    """Both from `load` on."""
    can_end = can_enlarge = True
    """Whether it may be ended, and another one go on from its checkpoint; whether it takes larger inner steps when told."""

    def __init__(self, stream: trio.SocketStream, memory: int, emit: Emit) -> None:
        self.parameters, self.built = 0, Built()
        self.share = 1.0
        """Of the time in which it computes."""
        self.given_up = self.ending = False
        """Nobody waits for it any more; it is being ended."""
        self._progress = pipe.Progress(Standing(0, 0, 0.0), 0, (0,))
        self._stream = stream
        self._memory = memory
        self._emit = emit
        self._phase, self._times = 0, 1
        self._training, self._trained_before = False, 0
        self._heard = trio.Event()  # replaced whenever the child says something
        self._lock = trio.Lock()
        self._last_id = 0
        self._due = -math.inf  # when all that the child was told must be done; no longer ahead once it has answered
        self._answer: pipe.Answer | None = None  # to the last request
        self._files = 0  # that were asked for
        self._unwritten: set[int] = set()
        self._written: dict[int, pipe.Written | None] = {}  # those that somebody waits for
        self._dead = trio.Event()
        self._death: LocalError | None = None

    @property
    def standing(self) -> Standing:
        return self._progress.standing

    @property
    def busy(self) -> bool:
        """It was told something that it has not answered, or not written."""
        return self._due > -math.inf or bool(self._unwritten)

    @property
    def inner_steps(self) -> int:
        return self._progress.inner_steps

    @property
    def steps_since_outer(self) -> int:
        """-1 as long as the first inner step since training began is under way: nobody knows how long that takes."""
        first = self._training and self.inner_steps == self._trained_before
        return -1 if first else min(self._progress.ages)

    def subject(self, count: int) -> int:
        """What our next outer step is about, if it is about `count` parts."""
        return whose_turn(self._progress.ages, count)

    async def load(self, setup: Setup) -> Loaded:
        """Build model and data, and load the last checkpoint, or else the seed's weights.

        Raises what is wrong with the run, the data or the device.
        """
        self._training = False
        loaded = await self._ask(setup, Loaded, LOAD + _bytes_below(setup.checkpoints) / SLOWEST_DISK)
        self.outbox = SharedBox(self._memory, loaded.box_size, loaded.outbox_offset)
        self.inbox = SharedBox(self._memory, loaded.box_size)
        self.parameters, self.built = loaded.parameters, loaded.built
        self._emit(events.DevicesChosen(loaded.devices, loaded.made_on))
        self._phase, self._times = loaded.phase, 1
        return loaded

    async def download(self, source: str, commit: str, file: tuple[str, int]) -> Path:
        """Where a file of a commit on the hub, by its name and size, lies in the hub library's cache. Raises BaseModelError."""
        name, size = file
        return Path(await self._ask(pipe.Download(source, commit, name, size), str, LOAD + size / SLOWEST_RATE))

    async def adopt(self, weights: Path, standing: Standing) -> None:
        """Take a donor's slow weights, and its standing; momentum starts anew, the optimizer's state stays.

        Raises RejectedTensorError if they do not fit; nothing is changed then.
        """
        await self._ask(pipe.Adopt(weights, standing), NoneType, self._patience.files(4))

    async def place(self, standing: Standing) -> None:
        """Take this standing, the weights being a donor's."""
        await self._ask(pipe.Place(standing), NoneType)

    async def compare(self, samples: tuple[SnapshotParts, ...]) -> str:
        """Why the slow weights are too far from those of other donors (trainer/compare_donors.py); "" if they are not."""
        return await self._ask(pipe.Compare(samples), str, self._patience.files(4))

    async def train(self) -> None:
        self._trained_before = self.inner_steps
        await self._ask(pipe.Train(), NoneType)
        self._training = True

    async def pause(self) -> None:
        await self._ask(pipe.Pause(), NoneType)
        self._training = False

    async def ease(self, share: float) -> None:
        """Compute in this share of the time."""
        await self._ask(pipe.Ease(share), NoneType)
        self.share = share

    async def enlarge(self, times: int) -> None:
        """Take inner steps of so many times the run's tokens."""
        if times != self._times:
            await self._ask(pipe.Enlarge(times), NoneType)
            self._times = times

    async def capture(self, subject: int, after: int = 0) -> Description:
        """Between two inner steps, `after` so many of them. The message may be smaller than the box."""
        return await self._ask(pipe.Capture(subject, after), Description)

    async def inspect(self, *, probation: bool) -> Inspection:
        return await self._ask(pipe.Inspect(probation), Inspection)

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        return await self._ask(pipe.Apply(run_round, skipped), Applied)

    async def solo(self, run_round: int, subject: int, after: int = 0) -> Applied:
        return await self._ask(pipe.Solo(run_round, subject, after), Applied)

    async def discard(self) -> None:
        await self._ask(pipe.Discard(), NoneType)

    async def checkpoint(self, *, last: bool = False) -> events.Checkpointed:
        """Beside training. The `last` one gives the device's memory back. Raises DiskFullError; older checkpoints are then
        untouched."""
        event = await self._write(lambda number: pipe.Checkpoint(number, last), events.Checkpointed, CHECKPOINT_BYTES)
        self._emit(event)
        return event

    async def dump(self, path: Path) -> Dumped:
        """Beside training."""
        return await self._write(lambda number: pipe.Dump(number, path), Dumped, 2 * 4)  # and read to be hashed

    async def evaluate(self, *, told: bool = True) -> float:
        """Mean held-out loss of the fast weights, nats per token; emitted too if it is to be `told`."""
        return await self._ask(pipe.Evaluate(told), float, self._patience.evaluation)

    async def wait_steps(self, count: int) -> None:
        """Return once `count` inner steps were done since the last outer step."""
        while self.steps_since_outer < count or not self._phase:
            self._check_alive()
            await self._heard.wait()
        await trio.lowlevel.checkpoint()

    async def wait_dead(self) -> NoReturn:
        """Wait until the child is gone without having been asked; then raise why (TrainerError mostly)."""
        await self._dead.wait()
        self._check_alive()
        raise AssertionError("a dead trainer has a cause of death")

    def give_up(self) -> None:
        """Have nobody wait for an answer any more, shielded or not: what is under way ends with the process."""
        self.given_up = True
        self.leave("the node stops, and did not wait for the trainer.")

    def leave(self, cause: str) -> None:
        """Nobody reads its answers from now on: who waits for one is told so."""
        self.ending = True
        self._gone(cause)

    # --- plumbing

    @property
    def _patience(self) -> Patience:
        held = self._progress.standing.step_seconds
        return Patience(self.parameters, held, measured=held > 0 or not self._training)

    async def _ask(self, command: pipe.Command, kind: type[R], seconds: float | None = None) -> R:
        """Send `command` and return its answer; raises what the child reports, or TrainerError."""
        async with self._lock:  # whoever holds it has a deadline too
            self._check_alive()
            self._last_id += 1
            seconds = seconds or self._patience.command
            # A command whose caller was cancelled goes on in the child, and its time is not this one's.
            self._due = max(self._due, trio.current_time()) + seconds
            with trio.CancelScope(deadline=self._due):
                answer = await self._exchange(pipe.Request(self._last_id, command))
                if answer.failure is not None:
                    raise error_of(answer.failure)
                return msgspec.msgpack.decode(answer.result, type=kind)
        raise TrainerError(f"it did not answer {type(command).__name__.lower()!r} within {seconds:.0f} s.")

    async def _write(self, ask: Callable[[int], pipe.Command], kind: type[R], bytes_each: int) -> R:
        """Have a file of so many bytes per parameter written, while other commands go on; returns what it is told with.
        Raises as `_ask`."""
        self._files += 1
        number, began = self._files, trio.current_time()
        self._written[number] = None
        self._unwritten.add(number)
        try:
            await self._ask(ask(number), NoneType)
            with trio.CancelScope(deadline=began + 2 * self._patience.files(_RESTS * bytes_each)):  # one may be under way
                while (told := self._written[number]) is None:
                    self._check_alive()
                    await self._heard.wait()
                if told.failure is not None:
                    raise error_of(told.failure)
                return msgspec.msgpack.decode(told.result, type=kind)
        finally:
            del self._written[number]
        raise TrainerError(f"it did not write a file within {trio.current_time() - began:.0f} s.")

    async def _exchange(self, request: pipe.Request) -> pipe.Answer:
        # Half a frame would make all later ones unreadable. A Setup may be longer than what the socket holds, and
        # a child that still imports does not read: who gives that one up ends the child with it.
        with trio.CancelScope(shield=not isinstance(request.command, Setup)):
            try:
                await self._stream.send_all(pipe.frame(request))
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
                await self._dead.wait()  # or it is told to stop just now
        while self._answer is None or self._answer.id != request.id:
            self._check_alive()
            await self._heard.wait()
        return self._answer

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death

    async def _read(self) -> None:
        """Take in what the child says until it closes its end."""
        unframer = pipe.Unframer()
        try:
            async for data in self._stream:
                for message in unframer.feed(data):
                    self._take_in(pipe.REPLIES.decode(message))
        except trio.BrokenResourceError:
            return

    def _take_in(self, message: pipe.Reply) -> None:
        match message:
            case pipe.Answer(id=0, failure=pipe.Failed() as failure):
                error = error_of(failure)
                self._death = error if isinstance(error, LocalError) else TrainerError(error.cause)
            case pipe.Answer():
                self._progress = message.progress or self._progress
                if message.id == self._last_id:  # else its caller was cancelled
                    self._due = -math.inf
                    self._answer = message
            case pipe.Trained():
                self._progress = message.progress
                if message.event is not None:
                    self._emit(message.event)
            case pipe.EvaluatedReport() | pipe.Supplied() | pipe.Read() | pipe.Fitted() | pipe.Taken():
                self._emit(message.event)
            case pipe.Written():
                self._unwritten.discard(message.number)
                if message.number in self._written:  # else its caller was cancelled
                    self._written[message.number] = message
        self._heard, was = trio.Event(), self._heard
        was.set()

    def _died(self, status: int) -> None:
        """The process ended with `status`: wake whoever waits for it."""
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        self._gone(f"the trainer process ended {how}.")

    def _gone(self, cause: str) -> None:
        self._death = self._death or (TrainerEndedError if self.ending else TrainerError)(cause)
        self._dead.set()
        self._heard.set()


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def error_of(failure: pipe.Failed) -> NolocodError:
    """Make the error again that another process met."""
    kinds = {
        kind.entry.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, NolocodError)
    }
    return kinds.get(failure.code, TrainerError)(failure.cause, remedy=failure.remedy)


@contextlib.asynccontextmanager
async def open_trainer(emit: Emit) -> AsyncIterator[TrainerProcess]:
    """Start a trainer process; it imports torch while the caller still looks for a manifest.

    At the end it is asked to stop, and killed after five seconds; at once if it does something that nobody waits for any more.
    """
    if find_spec("torch") is None:
        raise NoTorchError("a node needs it to train.")
    ours, theirs = socket.socketpair()
    memory = anonymous_file("boxes")
    inherited = (theirs.fileno(), memory)
    command = [sys.executable, "-m", CHILD, *map(str, inherited)]
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    failure: NolocodError | None = None
    try:
        process = await trio.lowlevel.open_process(
            command, pass_fds=inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        theirs.close()
        trainer = TrainerProcess(stream, memory, emit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_follow, trainer, process)
            try:
                yield trainer
            except NolocodError as error:
                failure = error  # raised outside the nursery, which would wrap it in a group
            finally:
                await _end(trainer, process)
                nursery.cancel_scope.cancel()
    finally:
        theirs.close()
        await trio.aclose_forcefully(stream)
        os.close(memory)
    if failure is not None:
        raise failure


async def _follow(trainer: TrainerProcess, process: trio.Process) -> None:
    await trainer._read()
    trainer._died(await process.wait())


async def _end(trainer: TrainerProcess, process: trio.Process) -> None:
    with trio.CancelScope(shield=True):
        trainer.ending = True
        if not trainer.parameters or trainer.busy or trainer.given_up:
            process.kill()  # it has nothing to finish: what was to last is on the disk when it is answered
        with trio.move_on_after(_STOP_SECONDS):
            # It may be gone already, or stuck: the wait below tells.
            with contextlib.suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
                await trainer._stream.send_all(pipe.frame(pipe.Request(0, pipe.Stop())))
            await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
        trainer._died(process.returncode or 0)  # who still waits for an answer is told
