"""The trainer as a real child process, driven through its handle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
import trio
import trio.testing
from trainer_parts import sealed_run, setup_for

from nolocod.errors import DataError, NolocodError, RejectedTensorError, TrainerError
from nolocod.events import Checkpointed, Evaluated, Event, InnerSteps
from nolocod.manifest import Data, Evaluation, Inner, Outer
from nolocod.terms import Standing, describe
from nolocod.trainer.process import TrainerProcess, open_trainer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.manifest import Sealed

DEADLINE = 60


@asynccontextmanager
async def loaded(sealed: Sealed, folder: Path, peer: str, events: list[Event] | None = None) -> AsyncIterator[TrainerProcess]:
    emit = events.append if events is not None else (lambda event: None)
    with trio.fail_after(DEADLINE):
        async with open_trainer(emit) as trainer:
            await trainer.load(setup_for(sealed, folder, peer))
            yield trainer


def child_of(trainer: TrainerProcess) -> psutil.Process:
    # The handle does not tell its pid: the child is known by the descriptors that it was given.
    wanted = [str(number) for number in trainer._descriptors]
    return next(child for child in psutil.Process().children() if child.cmdline()[-2:] == wanted)


def copy_outbox(source: TrainerProcess, target: TrainerProcess) -> None:
    size = source.outbox.size
    target.inbox.view(0, size)[:] = source.outbox.view(0, size)
    target.inbox.release(0, size)


async def test_two_trainers_take_an_outer_step_together(tmp_path: Path) -> None:
    sealed = sealed_run(outer=Outer(rounds=100, blocking=True))
    events: list[Event] = []
    async with loaded(sealed, tmp_path, "alice", events) as alice, loaded(sealed, tmp_path, "bob") as bob:
        assert isinstance(events[0], Evaluated)
        for trainer in (alice, bob):
            await trainer.train()
            await trainer.wait_boundary()
        descriptions = [await alice.snapshot(), await bob.snapshot()]
        assert descriptions[0] == describe(alice.outbox.view(0, alice.outbox.size))
        assert descriptions[0].root != descriptions[1].root
        copy_outbox(alice, bob)
        copy_outbox(bob, alice)
        spread = await alice.inspect()
        assert spread == await bob.inspect() > 0
        applied = await alice.apply(7)
        assert (applied.round, applied.inner_steps, applied.spread) == (7, 4, spread)
        await bob.apply(0)
        for trainer in (alice, bob):
            await trainer.pause()
        # Blocking runs stop exactly at the boundary, so both hold the same slow weights and nothing else.
        weights = [(await trainer.dump(tmp_path / "weights")).description.root for trainer in (alice, bob)]
        assert alice.standing.round == 7
        assert bob.standing.round == 1
        assert weights[0] != weights[1]  # the metadata names the round
        steps = [event for event in events if isinstance(event, InnerSteps)]
        assert [event.steps for event in steps][:2] == [2, 2]
        assert steps[0].tokens == 2 * 2 * 32


async def test_a_paused_trainer_keeps_its_checkpoint_and_resumes_from_it(tmp_path: Path) -> None:
    sealed = sealed_run()
    events: list[Event] = []
    async with loaded(sealed, tmp_path, "alice", events) as alice:
        await alice.train()
        await alice.wait_boundary()
        await alice.pause()
        solo = await alice.solo()
        assert (solo.round, solo.spread) == (1, None)
        done = alice.inner_steps
        event = await alice.checkpoint()
        assert isinstance(event, Checkpointed)
        assert event in events
        loss = await alice.evaluate()
        at_end = alice.standing
    async with loaded(sealed, tmp_path, "alice") as again:
        assert again.inner_steps == done >= 4
        assert again.standing == at_end
        assert await again.evaluate() == loss


async def test_evaluations_come_by_themselves(tmp_path: Path) -> None:
    events: list[Event] = []
    async with loaded(sealed_run(evaluation=Evaluation(every=2, batches=1)), tmp_path, "alice", events) as alice:
        for _ in range(4):
            await alice.solo()
        await alice.pause()  # answered after the evaluations
    assert [event.round for event in events if isinstance(event, Evaluated)] == [0, 2, 4]


async def test_a_newcomer_takes_its_donor_s_weights_and_standing(tmp_path: Path) -> None:
    sealed = sealed_run()
    async with loaded(sealed, tmp_path, "alice") as alice:
        await alice.solo()
        dumped = await alice.dump(tmp_path / "weights")
        assert dumped.description == describe(memoryview((tmp_path / "weights").read_bytes()))
    with trio.fail_after(DEADLINE):
        async with open_trainer(lambda event: None) as bob:
            standing = Standing(1, 999, 3.0)
            setup = setup_for(sealed, tmp_path, "bob", weights=tmp_path / "weights", standing=standing)
            result = await bob.load(setup)
            assert (result.source, result.standing, bob.standing) == ("snapshot", standing, standing)
            assert result.box_size == 4 * result.parameters == bob.outbox.size


async def test_blocking_runs_wait_at_the_boundary_and_no_longer_than_patience(tmp_path: Path) -> None:
    sealed = sealed_run(inner=Inner(steps=2, batch=2, sequence=32), outer=Outer(blocking=True, patience=0.3))
    async with loaded(sealed, tmp_path, "alice") as alice:
        await alice.train()
        await alice.wait_boundary()
        assert alice.steps_since_outer == 2
        await alice.snapshot()
        assert alice.steps_since_outer == 2
        while alice.steps_since_outer == 2:  # the patience ends, and training goes on by itself
            await alice._moved.wait()
        assert alice.steps_since_outer > 2


async def test_a_killed_child_is_noticed_by_whoever_waits(tmp_path: Path) -> None:
    async with loaded(sealed_run(), tmp_path, "alice") as alice:
        async with trio.open_nursery() as nursery:

            async def expect_death(wait: object) -> None:
                with pytest.raises(TrainerError, match="SIGKILL"):
                    await wait()  # type: ignore[operator] # a bound coroutine function

            nursery.start_soon(expect_death, alice.wait_dead)
            nursery.start_soon(expect_death, alice.wait_boundary)
            await trio.testing.wait_all_tasks_blocked()
            child_of(alice).kill()
        with pytest.raises(TrainerError, match="SIGKILL"):
            await alice.snapshot()


async def test_what_the_user_did_wrong_comes_back_as_its_own_error(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE):
        async with open_trainer(lambda event: None) as trainer:
            with pytest.raises(DataError, match=r"nowhere does not exist") as caught:
                await trainer.load(setup_for(sealed_run(), tmp_path, data=tmp_path / "nowhere"))
            assert caught.value.code == "NLC-120"
            with pytest.raises(TrainerError, match="no model is loaded"):
                await trainer.solo()
            bad = sealed_run(data=Data(source="text", tokenizer="{"))
            with pytest.raises(NolocodError, match="NLC-101"):
                await trainer.load(setup_for(bad, tmp_path))


async def test_a_bad_tensor_is_rejected_and_the_trainer_goes_on(tmp_path: Path) -> None:
    async with loaded(sealed_run(), tmp_path, "alice") as alice:
        await alice.snapshot()
        alice.inbox.view(0, 4)[:] = b"\xff\xff\xff\x7f"
        with pytest.raises(RejectedTensorError):
            await alice.inspect()
        await alice.discard()
        assert (await alice.solo()).round == 1


async def test_a_cancelled_command_does_not_confuse_the_next_one(tmp_path: Path) -> None:
    async with loaded(sealed_run(), tmp_path, "alice") as alice:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alice.evaluate)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert (await alice.solo()).round == 1


async def test_the_child_leaves_signals_to_its_parent_and_ends_with_it(tmp_path: Path) -> None:
    async with loaded(sealed_run(), tmp_path, "alice") as alice:
        child = child_of(alice)
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)
        assert (await alice.solo()).round == 1
    assert not child.is_running()


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
    before = len(os.listdir("/proc/self/fd"))
    trio.run(once)
    assert len(os.listdir("/proc/self/fd")) == before
