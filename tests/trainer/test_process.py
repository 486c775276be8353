"""The trainer as a real child process, driven through its handle."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import trio
import trio.testing
from safetensors.torch import load_file, save_file

from nolocod.errors import DataError, RejectedTensorError, RunFileError, TrainerError
from nolocod.observe.events import Checkpointed, DevicesChosen, Evaluated, Event, InnerSteps
from nolocod.proto.types import Applied, Description, SnapshotParts, Standing, describe
from nolocod.run.data import Data
from nolocod.run.manifest import Outer
from nolocod.trainer import pipe
from nolocod.trainer.process import TrainerEndedError, TrainerProcess, open_trainer
from tests.support.trainer_parts import child_of, dump, make_replica, sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nolocod.run.manifest import Sealed

DEADLINE = 300


@asynccontextmanager
async def loaded(sealed: Sealed, folder: Path, peer: str, events: list[Event] | None = None) -> AsyncIterator[TrainerProcess]:
    emit = events.append if events is not None else (lambda event: None)
    with trio.fail_after(DEADLINE):
        async with open_trainer(emit) as trainer:
            await trainer.load(setup_for(sealed, folder, peer))
            yield trainer


def copy_outbox(source: TrainerProcess, target: TrainerProcess) -> None:
    size = source.outbox.size
    target.inbox.view(0, size)[:] = source.outbox.view(0, size)
    target.inbox.release(0, size)


async def test_two_trainers_take_an_outer_step_together(tmp_path: Path) -> None:
    sealed = sealed_run(outer=Outer(rounds=100))
    events: list[Event] = []
    async with loaded(sealed, tmp_path, "alice", events) as alice, loaded(sealed, tmp_path, "bob") as bob:
        await alice.evaluate()
        for trainer in (alice, bob):
            await trainer.train()
            await trainer.wait_steps(sealed.manifest.inner.steps)
            await trainer.pause()
        taken = alice.steps_since_outer
        descriptions = [await alice.capture(0), await bob.capture(0)]
        assert descriptions[0] == describe(alice.outbox.view(0, descriptions[0].size))
        assert descriptions[0].root != descriptions[1].root
        copy_outbox(alice, bob)
        copy_outbox(bob, alice)
        spread = (await alice.inspect(probation=False)).spread
        assert spread == (await bob.inspect(probation=False)).spread > 0
        applied = await alice.apply(7, b"")
        assert (applied.round, applied.inner_steps, applied.spread) == (7, taken, spread)
        await bob.apply(0, b"")
        assert (alice.standing.round, bob.standing.round) == (7, 1)
        weights = []
        for trainer in (alice, bob):
            await trainer.dump(tmp_path / "weights")
            weights.append(load_file(tmp_path / "weights"))
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        steps = [event for event in events if isinstance(event, InnerSteps)]
        assert steps[0].steps == 1, "the first is told at once"
        assert all(event.tokens == 64 * event.steps for event in steps)


async def test_no_outer_step_begins_in_the_first_inner_step(tmp_path: Path) -> None:
    """Not in turns of one inner step either: it may take minutes, and a partner would wait."""
    async with loaded(sealed_run(), tmp_path, "alice") as alice:
        for _ in range(2):
            before = alice.inner_steps
            await alice.train()
            await alice.wait_steps(0)
            assert alice.inner_steps > before
            await alice.pause()


async def test_what_the_next_outer_step_is_about(tmp_path: Path) -> None:
    sealed = sealed_run(codec="modulo8", outer=Outer(rounds=100, turns=2))
    phase = sealed.manifest.inner.steps
    async with loaded(sealed, tmp_path, "alice") as alice:
        assert alice.subject(1) == 0
        await alice.train()
        await alice.wait_steps(phase)
        await alice.pause()
        taken = alice.steps_since_outer
        await alice.capture(0)  # on a slow machine both parts may be due by now
        copy_box(alice)
        await alice.inspect(probation=False)
        assert (await alice.apply(0, b"")).inner_steps == taken
        assert (alice.steps_since_outer, alice.subject(1)) == (0, 1)
        await alice.solo(0, 1)
        assert alice.subject(1) == 0


def copy_box(trainer: TrainerProcess) -> None:
    """The trainer is its own partner."""
    trainer.inbox.view(0, trainer.inbox.size)[:] = trainer.outbox.view(0, trainer.outbox.size)


async def test_what_a_trainer_keeps_and_gives_away(tmp_path: Path) -> None:
    """One child, three loads: a node that checkpoints, itself resumed, a newcomer with its weights."""
    sealed = sealed_run(weights="float32")
    events: list[Event] = []
    async with loaded(sealed, tmp_path, "alice", events) as trainer:
        await trainer.train()
        await trainer.wait_steps(sealed.manifest.inner.steps)
        await trainer.pause()
        solo = await trainer.solo(0, 0)
        assert (solo.round, solo.spread) == (1, None)
        done = trainer.inner_steps
        saved = await trainer.checkpoint()
        assert isinstance(saved, Checkpointed)
        assert saved in events
        loss = await trainer.evaluate()
        standing = trainer.standing
        dumped = await trainer.dump(tmp_path / "weights")
        assert dumped.standing == standing
        assert dumped.description == describe(memoryview((tmp_path / "weights").read_bytes()))

        resumed = await trainer.load(setup_for(sealed, tmp_path, "alice"))
        assert (resumed.source, resumed.standing) == ("checkpoint", standing)
        assert trainer.inner_steps == done >= 4
        assert await trainer.evaluate() == loss

        joined = await trainer.load(setup_for(sealed, tmp_path, "bob"))
        assert (joined.source, joined.standing.round) == ("seed", 0)
        assert await trainer.evaluate() != loss
        await trainer.adopt(tmp_path / "weights", standing)
        assert trainer.standing == standing
        assert 2 * joined.parameters < joined.box_size == trainer.outbox.size < 2.1 * joined.parameters + 1000, (
            "as bfloat16 at worst"
        )
        assert trainer.inner_steps == 0
        assert await trainer.evaluate() == loss  # the solo step left theta = phi
        size = dumped.description.size
        assert await trainer.compare((SnapshotParts(tmp_path / "weights", ((0, size),)),)) == ""
        other = {name: -tensor for name, tensor in load_file(tmp_path / "weights").items()}
        save_file(other, tmp_path / "other")
        spans = ((0, (tmp_path / "other").stat().st_size),)
        assert "is 2.00 of its norm" in await trainer.compare((SnapshotParts(tmp_path / "other", spans),))
        (tmp_path / "weights").write_bytes(b"not weights")
        with pytest.raises(RejectedTensorError):
            await trainer.adopt(tmp_path / "weights", standing)
        assert await trainer.evaluate() == loss


async def test_who_waits_for_a_trainer_that_is_given_up_waits_no_more(tmp_path: Path) -> None:
    """However it is shielded."""
    async with loaded(sealed_run(), tmp_path, "alice") as trainer:
        await trainer.train()
        psutil.Process(child_of(trainer).pid).suspend()  # as in an inner step of minutes

        async def wait() -> None:
            with trio.CancelScope(shield=True), pytest.raises(TrainerEndedError, match="the node stops"):
                await trainer.discard()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.1)
            assert trainer.busy
            trainer.give_up()
        began = trio.current_time()
    assert trio.current_time() - began < 1, "it is killed"


async def test_a_trainer_that_is_given_up_is_killed_though_nobody_asked_it_for_anything(tmp_path: Path) -> None:
    async with loaded(sealed_run(), tmp_path, "alice") as trainer:
        await trainer.train()
        child = child_of(trainer)
        psutil.Process(child.pid).suspend()
        assert not trainer.busy
        trainer.give_up()
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert not child.is_running()


async def test_a_pause_frees_all_memory_and_training_goes_on_exactly_as_if_it_had_not_been(tmp_path: Path) -> None:
    """One process ends with a checkpoint, another one goes on; a replica that nobody stopped ends with the same weights."""
    sealed = sealed_run()
    steps = 0
    for part in range(2):
        async with loaded(sealed, tmp_path, "alice") as trainer:
            assert trainer.inner_steps == steps
            await trainer.train()
            await trainer.wait_steps(4 + trainer.inner_steps)
            began = trio.current_time()
            await trainer.pause()
            steps = trainer.inner_steps
            if part:
                await trainer.solo(0, 0)
                await trainer.dump(tmp_path / "weights")
            else:
                await trainer.checkpoint(last=True)
            child = child_of(trainer)
        assert not child.is_running(), "with its memory, on whatever device"
        assert trio.current_time() - began < 5
    unpaused = make_replica(sealed, tmp_path)
    unpaused.draw_as("alice")
    for _ in range(steps):
        unpaused.step()
    unpaused.solo()
    dump(unpaused, tmp_path / "unpaused")
    assert (tmp_path / "unpaused").read_bytes() == (tmp_path / "weights").read_bytes()


async def test_one_trainer_through_faults(tmp_path: Path) -> None:
    """One child that is given everything that may go wrong, and goes on until it is killed."""
    events: list[Event] = []
    with trio.fail_after(DEADLINE):
        async with open_trainer(events.append) as trainer:
            child = child_of(trainer)
            await reports_what_the_user_did_wrong(trainer, tmp_path)
            await trainer.load(setup_for(sealed_run(), tmp_path))
            assert events == [DevicesChosen(("cpu",))]  # whoever loads decides when to evaluate: other weights may come first
            loss = await trainer.evaluate(told=False)
            assert len(events) == 1, "of weights that are only tried"
            assert await trainer.evaluate() == loss
            assert [type(event) for event in events] == [DevicesChosen, Evaluated]
            await rejects_a_bad_tensor(trainer)
            await drops_the_answer_to_a_cancelled_command(trainer, child)
            for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's business
                child.send_signal(number)
            assert (await trainer.solo(0, 0)).round == 3
            await trainer.solo(0, 0)
            await trainer.pause()  # answered after the evaluations, which come every second round by themselves
            assert [event.round for event in events if isinstance(event, Evaluated)] == [0, 2, 4]
            await is_noticed_when_killed(trainer, child)


async def reports_what_the_user_did_wrong(trainer: TrainerProcess, folder: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere does not exist") as caught:
        await trainer.load(setup_for(sealed_run(), folder, data=folder / "nowhere"))
    assert caught.value.code == "NLC-120"
    with pytest.raises(TrainerError, match="no model is loaded"):
        await trainer.solo(0, 0)
    bad = sealed_run(data=Data(source="text", tokenizer="{"))
    with pytest.raises(RunFileError, match=r"data\.tokenizer"):
        await trainer.load(setup_for(bad, folder))


async def rejects_a_bad_tensor(trainer: TrainerProcess) -> None:
    await trainer.capture(0)
    trainer.inbox.view(0, 4)[:] = b"\xff\xff\xff\x7f"
    with pytest.raises(RejectedTensorError):
        await trainer.inspect(probation=False)
    await trainer.discard()
    with pytest.raises(TrainerError, match="without a capture"):
        await trainer.apply(0, b"")
    assert (await trainer.solo(0, 0)).round == 1


async def drops_the_answer_to_a_cancelled_command(trainer: TrainerProcess, child: psutil.Process) -> None:
    child.suspend()  # so that the answer cannot come before the cancellation
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.capture, 0)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    child.resume()
    assert scope.cancelled_caught
    assert (await trainer.solo(0, 0)).round == 2


async def is_noticed_when_killed(trainer: TrainerProcess, child: psutil.Process) -> None:
    async def expect_death(wait: Callable[[], Awaitable[None]]) -> None:
        with pytest.raises(TrainerError, match="SIGKILL"):
            await wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_death, trainer.wait_dead)
        nursery.start_soon(expect_death, partial(trainer.wait_steps, 1 << 30))
        await trio.testing.wait_all_tasks_blocked()
        child.kill()
    with pytest.raises(TrainerError, match="SIGKILL"):
        await trainer.capture(0)


async def test_what_nobody_waits_for_any_more_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A checkpoint of minutes, and a node that has seconds."""
    async with loaded(sealed_run(), tmp_path, "alice") as trainer:
        child_of(trainer).suspend()
        with trio.move_on_after(0.01):
            await trainer.checkpoint()
        began = trio.current_time()
    assert trio.current_time() - began < 2


async def test_the_child_ends_when_its_parent_vanishes(tmp_path: Path) -> None:
    """The parent is a process of its own here, and is killed."""
    script = (
        "import trio, psutil\n"
        "from nolocod.trainer.process import open_trainer\n"
        "async def main():\n"
        "    async with open_trainer(print):\n"
        "        print(psutil.Process().children()[0].pid, flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:  # noqa: ASYNC220 - a line is due at once
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with trio.fail_after(DEADLINE):
        await trio.to_thread.run_sync(child.wait, abandon_on_cancel=True)


async def test_a_fault_in_the_body_arrives_as_itself(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="of the body"):
        async with open_trainer(lambda event: None):
            raise TrainerError("of the body.")


def test_the_handle_imports_no_torch() -> None:
    code = "import sys, nolocod.trainer.process; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    async def once() -> None:
        async with open_trainer(lambda event: None):
            pass

    trio.run(once)
    gc.collect()  # what tests before this one left to it
    before = len(os.listdir("/proc/self/fd"))
    trio.run(once)
    assert len(os.listdir("/proc/self/fd")) == before


Answers = dict[type[pipe.Command], tuple[float, object]]
"""Of a stand-in child: seconds, and the result."""


@asynccontextmanager
async def stand_in(answers: Answers, parameters: int = 0) -> AsyncIterator[tuple[TrainerProcess, Callable[[float], None]]]:
    """The handle on a child that takes its time, on the virtual clock; and what tells how long its inner steps take."""
    ours, theirs = socket.socketpair()
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream, trio.open_nursery() as nursery:
        trainer = TrainerProcess(stream, -1, [].append)
        trainer.parameters = parameters

        async def child() -> None:
            requests = pipe.Unframer()
            async with trio.SocketStream(trio.socket.from_stdlib_socket(theirs)) as end:
                async for data in end:
                    for request in map(pipe.REQUESTS.decode, requests.feed(data)):
                        command = request.command
                        seconds, result = answers[type(command)]
                        if isinstance(command, pipe.Checkpoint | pipe.Dump):
                            await end.send_all(pipe.frame(pipe.answer(request.id, None, None)))
                            await trio.sleep(seconds)
                            await end.send_all(pipe.frame(pipe.written(command.number, result)))
                            continue
                        await trio.sleep(seconds)
                        await end.send_all(pipe.frame(pipe.answer(request.id, result, None)))

        def tell(step_seconds: float) -> None:
            progress = pipe.Progress(Standing(1, 1, 1.0, step_seconds), 1, (1,))
            trainer._take_in(pipe.Trained(InnerSteps(1, 1, 1.0, 1e-3, step_seconds), progress))

        nursery.start_soon(trainer._read)
        nursery.start_soon(child)
        yield trainer, tell
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("gives_up", [False, True])
async def test_waiting_for_another_command_is_not_a_commands_own_time(gives_up: bool, autojump_clock: object) -> None:
    """An evaluation that takes 500 s of the hour that it may, and a pause, which has 120 s, told meanwhile."""
    async with stand_in({pipe.Evaluate: (500, 1.0), pipe.Pause: (1, None), pipe.Discard: (1000, None)}) as (trainer, _):

        async def evaluate() -> None:
            with trio.move_on_after(5 if gives_up else 1000):
                await trainer.evaluate()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(evaluate)
            await trio.sleep(10)
            await trainer.pause()
        assert trio.current_time() == pytest.approx(501)
        with pytest.raises(TrainerError, match="within 120 s"):
            await trainer.discard()
        assert trio.current_time() == pytest.approx(501 + 120), "what was answered leaves it no time of its own"


SOLO = Applied(1, 4, None, 1.0)


@pytest.mark.parametrize("step", [30.0, 200.0, 300.0])
async def test_a_trainer_with_long_inner_steps_is_not_taken_for_one_that_hangs(step: float, autojump_clock: object) -> None:
    """With steps above 120 s a node killed its own trainer, three times, and ended: it did not answer 'solo'."""
    async with stand_in({pipe.Train: (0, None), pipe.Solo: (2.5 * step, SOLO), pipe.Pause: (1e9, None)}) as (trainer, tell):
        await trainer.train()
        assert await trainer.solo(0, 0) == SOLO, "the first step is not measured yet"
        tell(step)
        assert await trainer.solo(0, 0) == SOLO
        began = trio.current_time()
        with pytest.raises(TrainerError, match="did not answer"):
            await trainer.pause()
        assert trio.current_time() - began < 12 * step + 130, "and one that hangs is found"


@pytest.mark.parametrize("parameters", [10_000_000, 1_300_000_000, 7_000_000_000])
async def test_files_have_the_time_that_a_slow_disk_takes(parameters: int, autojump_clock: object) -> None:
    """At 20 MB/s: above 600 s a checkpoint ended the trainer, which began again from the seed."""
    seconds = parameters / 20e6
    done = Checkpointed(1, 20 * parameters, 20 * seconds)
    dumped = pipe.Dumped(Standing(1, 1, 1.0), Description(4, 4, (bytes(32),)))
    hung: Answers = {pipe.Compare: (1e9, "")}
    answers: Answers = {
        pipe.Checkpoint: (20 * seconds, done),
        pipe.Dump: (8 * seconds, dumped),
        pipe.Adopt: (4 * seconds, None),
    }
    async with stand_in(answers | hung, parameters) as (trainer, _):
        assert await trainer.checkpoint() == done
        assert await trainer.dump(Path("weights")) == dumped
        await trainer.adopt(Path("weights"), Standing(1, 1, 1.0))
        began = trio.current_time()
        with pytest.raises(TrainerError, match="did not answer"):
            await trainer.compare(())
        assert trio.current_time() - began < 2 * 3600 + 5 * 4 * seconds
