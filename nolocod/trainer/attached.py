"""The daemon's handle on a training loop that is not its child: that of the program which started it (docs/your-own-loop.md).

The rule: such a loop may stand still for as long as its owner likes, in a debugger or between two cells. So nothing that it is
told has a deadline, and while it stands still nothing is due, so that no partner waits for it. When its process ends, the
daemon does.
"""

from __future__ import annotations

import contextlib
import math
import socket
from typing import TYPE_CHECKING, NoReturn, TypeVar

import trio

from nolocod.errors import LoopEndedError, NolocodError
from nolocod.trainer import pipe
from nolocod.trainer.patience import Patience
from nolocod.trainer.process import TrainerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nolocod.observe.events import Emit

STILL, STEPS = 5.0, 3.0
"""A loop stands still that has said nothing for so many seconds, and so many of its steps."""

R = TypeVar("R")


class AttachedTrainer(TrainerProcess):
    """A trainer that trains, serves and stops in a process of its own will."""

    can_end = can_enlarge = False

    def __init__(self, stream: trio.SocketStream, memory: int, emit: Emit) -> None:
        super().__init__(stream, memory, emit)
        self._heard_at = trio.current_time()

    @property
    def steps_since_outer(self) -> int:
        """-1 where the loop stands still: no outer step begins in its next inner step."""
        still = max(STILL, STEPS * self.standing.step_seconds)
        return -1 if trio.current_time() - self._heard_at > still else super().steps_since_outer

    @property
    def _patience(self) -> Patience:
        return Patience(held=math.inf)

    async def _ask(self, command: pipe.Command, kind: type[R], seconds: float | None = None) -> R:
        return await super()._ask(command, kind, math.inf)

    def _take_in(self, message: pipe.Reply) -> None:
        self._heard_at = trio.current_time()
        super()._take_in(message)

    async def follow(self) -> NoReturn:
        """Take in what the loop says until its process ends; then raise LoopEndedError."""
        await self._read()
        self._death = self._death or LoopEndedError("its process is gone, or has closed the swarm.")
        self._dead.set()
        self._heard.set()
        raise self._death


@contextlib.asynccontextmanager
async def attach_trainer(emit: Emit, control: int, memory: int) -> AsyncIterator[AttachedTrainer]:
    """The loop at the other end of the socket `control`, with the anonymous file `memory` for both boxes. Once per process.

    At the end it is told to stop, which it does when it likes.
    """
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(socket.socket(fileno=control)))
    trainer = AttachedTrainer(stream, memory, emit)
    failure: NolocodError | None = None
    async with stream, trio.open_nursery() as nursery:
        nursery.start_soon(trainer.follow)
        try:
            yield trainer
        except NolocodError as error:
            failure = error  # raised outside the nursery, which would wrap it in a group
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(1), contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(pipe.frame(pipe.Request(0, pipe.Stop())))
            trainer.leave("it was told to stop.")
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
