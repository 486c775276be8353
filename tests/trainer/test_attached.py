"""The daemon's handle on a loop that is not its child: it has all the time that it likes, and nothing is due meanwhile."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nolocod.errors import LoopEndedError, TrainerError
from nolocod.observe.events import InnerSteps
from nolocod.proto.types import Standing
from nolocod.trainer import pipe
from nolocod.trainer.attached import STEPS, STILL, AttachedTrainer, attach_trainer
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.process import TrainerEndedError
from tests.support.trainer_parts import sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class Loop:
    """The loop's end of the pipe."""

    def __init__(self, end: trio.SocketStream) -> None:
        self._end = end
        self._unframer = pipe.Unframer()

    async def step(self, count: int, seconds: float = 1.0) -> None:
        progress = pipe.Progress(Standing(0, 0, 1.0, seconds), count, (count,))
        await self._end.send_all(pipe.frame(pipe.Trained(InnerSteps(1, 0, 1.0, 1e-3, seconds), progress)))

    async def next(self) -> pipe.Request:
        (message,) = self._unframer.feed(await self._end.receive_some())
        return pipe.REQUESTS.decode(message)

    async def answer(self, request: pipe.Request) -> None:
        await self._end.send_all(pipe.frame(pipe.answer(request.id, None, None)))

    async def end(self) -> None:
        await self._end.aclose()


@asynccontextmanager
async def attached() -> AsyncIterator[tuple[AttachedTrainer, Loop]]:
    ours, theirs = socket.socketpair()
    end = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
    async with end, attach_trainer([].append, ours.detach(), anonymous_file("boxes")) as trainer:
        trainer._phase = 4  # as `load` has it from the loop
        yield trainer, Loop(end)


async def test_a_loop_takes_steps_as_large_as_its_owner_likes(autojump_clock: object) -> None:
    async with attached() as (trainer, _):
        assert not trainer.can_enlarge


async def test_a_loop_that_stands_still_owes_nothing_until_it_is_heard_again(autojump_clock: object) -> None:
    async with attached() as (trainer, loop):
        await loop.step(9)
        await trainer.wait_steps(9)
        assert trainer.steps_since_outer == 9
        await trio.sleep(STILL + 1)
        assert trainer.steps_since_outer == -1, "no partner is looked for, nor is an offer accepted"
        with trio.move_on_after(10 * STILL) as patience:
            await trainer.wait_steps(9)
        assert patience.cancelled_caught
        await loop.step(10, seconds=2 * STILL)
        await trainer.wait_steps(10)
        await trio.sleep(STEPS * STILL)
        assert trainer.steps_since_outer == 10, "its steps take so long"


@pytest.mark.parametrize("command", ["pause", "checkpoint", "load"])
async def test_what_a_loop_is_told_has_no_deadline(command: str, tmp_path: Path, autojump_clock: object) -> None:
    setup = [setup_for(sealed_run(), tmp_path)] if command == "load" else []
    async with attached() as (trainer, loop), trio.open_nursery() as nursery:
        nursery.start_soon(getattr(trainer, command), *setup)
        request = await loop.next()
        await trio.sleep(80_000)
        if command != "load":
            await loop.answer(request)
        if command == "checkpoint":
            await trio.sleep(80_000)
        if command != "pause":
            nursery.cancel_scope.cancel()


async def test_the_end_of_the_loop_ends_the_daemon_wherever_it_is(autojump_clock: object) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(LoopEndedError, match="its process is gone"), flatten_subgroups=True):
        async with attached() as (_, loop):
            await loop.end()
            await trio.sleep_forever()  # it looks for a run


async def test_what_goes_wrong_in_the_loop_is_the_cause(autojump_clock: object) -> None:
    error = pipe.failed(TrainerError("the weights are not finite."))
    async with attached() as (trainer, loop), trio.open_nursery() as nursery:

        async def capture() -> None:
            with pytest.raises(TrainerError, match="not finite"):
                await trainer.capture(0)

        nursery.start_soon(capture)
        request = await loop.next()
        await loop._end.send_all(pipe.frame(pipe.answer(request.id, error, None)))


async def test_at_the_end_the_loop_is_told_to_stop() -> None:
    ours, theirs = socket.socketpair()
    async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as end:
        async with attach_trainer([].append, ours.detach(), anonymous_file("boxes")):
            pass
        assert isinstance((await Loop(end).next()).command, pipe.Stop)


async def test_who_still_waits_for_the_loop_when_it_was_left_waits_no_more() -> None:
    """However it is shielded: a second Ctrl-C did not help."""
    ours, theirs = socket.socketpair()
    end, made = trio.SocketStream(trio.socket.from_stdlib_socket(theirs)), (ours.detach(), anonymous_file("boxes"))
    async with end, trio.open_nursery() as nursery, attach_trainer([].append, *made) as trainer:

        async def wait() -> None:
            with trio.CancelScope(shield=True), pytest.raises(TrainerEndedError):
                await trainer.discard()

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
    assert not trainer.given_up, "an error of the loop's is told as such"
