"""The trainer's loop in this process, so that a test can hold its work beside training."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import pytest
import torch

from nolocod.errors import DiskFullError, TrainerError
from nolocod.observe.events import Checkpointed, MicroBatch
from nolocod.proto.types import Applied, Description, Inspection, describe
from nolocod.run.manifest import Inner
from nolocod.trainer import checkpoint, duty, files, memory, on_device, pipe, worker
from nolocod.trainer.ahead import Ahead
from nolocod.trainer.boxes import SharedBox, anonymous_file
from nolocod.trainer.capture import Weights
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.estimate import estimate
from nolocod.trainer.model import Place
from nolocod.trainer.replica import Replica
from nolocod.trainer.taken import Taken
from nolocod.trainer.worker import Worker
from tests.support.trainer_parts import make_replica, sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from nolocod.trainer.group import Group

DEADLINE = 300.0
R = TypeVar("R")


class Parent:
    """The parent's end, blocking."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(DEADLINE)
        self.memory = anonymous_file("boxes")
        self.worker = Worker(ChildEnd(theirs.detach()), self.memory)
        self.thread = threading.Thread(target=self.worker.run)
        self._unframer = pipe.Unframer()
        self._waiting: list[pipe.Reply] = []
        self._last = 0

    def send(self, command: pipe.Command) -> int:
        self._last += 1
        self.ours.sendall(pipe.frame(pipe.Request(self._last, command)))
        return self._last

    def next(self) -> pipe.Reply:
        while not self._waiting:
            self._waiting += map(pipe.REPLIES.decode, self._unframer.feed(self.ours.recv(1 << 16)))
        return self._waiting.pop(0)

    def answer(self, command: pipe.Command) -> pipe.Answer:
        number = self.send(command)
        while not isinstance(reply := self.next(), pipe.Answer):
            pass
        assert reply.id == number
        return reply

    def ask(self, command: pipe.Command, kind: type[R]) -> R:
        answer = self.answer(command)
        assert answer.failure is None
        return msgspec.msgpack.decode(answer.result, type=kind)

    def train_until(self, inner_steps: int) -> None:
        """Nothing but reports may come before so many inner steps are done."""
        while True:
            reply = self.next()
            assert not isinstance(reply, pipe.Answer), "answered before its work was done"
            if isinstance(reply, pipe.Trained) and reply.progress.inner_steps >= inner_steps:
                return


@pytest.fixture
def parent() -> Iterator[Parent]:
    parent = Parent()
    parent.thread.start()
    yield parent
    parent.send(pipe.Stop())
    parent.thread.join(DEADLINE)
    assert not parent.thread.is_alive()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds what is done beside training until it is set."""
    gate = threading.Event()
    write, inspect, take_step = Replica.write, Replica.inspect, Replica.take_step

    def held(*_: object) -> None:
        assert gate.wait(DEADLINE)

    monkeypatch.setattr(Replica, "write", lambda self, *given: (held(), write(self, *given))[1])
    monkeypatch.setattr(Replica, "inspect", lambda self, *given, **named: (held(), inspect(self, *given, **named))[1])
    monkeypatch.setattr(Replica, "take_step", lambda self, *given: (held(), take_step(self, *given))[1])
    yield gate
    gate.set()


def test_training_goes_on_beside_every_part_of_an_exchange(parent: Parent, gate: threading.Event, tmp_path: Path) -> None:
    loaded = parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path), pipe.Loaded)
    outbox, inbox = (SharedBox(parent.memory, loaded.box_size, offset) for offset in (loaded.outbox_offset, 0))
    parent.ask(pipe.Train(), NoneType)
    done = 0

    def beside(command: pipe.Command, kind: type[R]) -> R:
        nonlocal done
        gate.clear()
        number = parent.send(command)
        parent.train_until(done + 8)
        gate.set()
        while not isinstance(reply := parent.next(), pipe.Answer):
            pass
        assert (reply.id, reply.failure) == (number, None)
        assert reply.progress is not None
        done = reply.progress.inner_steps
        ages.append(min(reply.progress.ages))
        return msgspec.msgpack.decode(reply.result, type=kind)

    ages: list[int] = []
    description = beside(pipe.Capture(0), Description)
    assert description == describe(outbox.view(0, description.size))
    inbox.view(0, inbox.size)[:] = outbox.view(0, outbox.size)  # the trainer is its own partner
    assert beside(pipe.Inspect(probation=False), Inspection).spread == 0
    assert beside(pipe.Apply(0, b""), Applied).round == 1
    assert ages[-1] >= 16, "what was trained since the capture counts for the next"


def test_a_trainer_tells_for_how_long_it_may_be_at_something_else(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, seconds = Replica.step, 0.05
    monkeypatch.setattr(Replica, "step", lambda self: (time.sleep(seconds), step(self)))
    loaded = parent.ask(setup_for(sealed_run(), tmp_path), pipe.Loaded)
    assert loaded.standing.step_seconds == 0
    parent.ask(pipe.Train(), NoneType)
    parent.train_until(1)
    pause = parent.answer(pipe.Pause())
    assert pause.progress is not None
    assert seconds <= pause.progress.standing.step_seconds < DEADLINE
    parent.ask(pipe.Train(), NoneType)
    monkeypatch.setattr(Replica, "evaluate", lambda *_: (time.sleep(10 * seconds), 1.0)[1])
    parent.ask(pipe.Evaluate(told=False), float)
    pause = parent.answer(pipe.Pause())
    assert pause.progress is not None
    assert pause.progress.standing.step_seconds >= 10 * seconds, "training stood still for so long"


def test_what_leaves_the_weights_as_they_are_waits_for_no_inner_step(
    parent: Parent, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, merge, go, under_way = Replica.step, Replica.merge, threading.Event(), threading.Event()
    done: list[int] = []

    def held(replica: Replica) -> None:
        if not go.is_set():
            under_way.set()
            assert go.wait(DEADLINE)
        step(replica)

    def noted(replica: Replica, run_round: int, began: float) -> Applied:
        done.append(replica.inner_steps)
        return merge(replica, run_round, began)

    monkeypatch.setattr(Replica, "step", held)
    monkeypatch.setattr(Replica, "merge", noted)
    monkeypatch.setattr(worker, "_SHORT", 1e4)
    loaded = parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path), pipe.Loaded)
    outbox, inbox = (SharedBox(parent.memory, loaded.box_size, offset) for offset in (loaded.outbox_offset, 0))
    go.set()
    parent.ask(pipe.Train(), NoneType)
    number = parent.send(pipe.Capture(0))
    parent.train_until(8)
    go.clear()
    assert under_way.wait(DEADLINE)
    gate.set()
    while not isinstance(reply := parent.next(), pipe.Answer):
        pass
    assert (reply.id, reply.failure) == (number, None), "the message is written"
    inbox.view(0, inbox.size)[:] = outbox.view(0, outbox.size)  # the trainer is its own partner
    assert parent.ask(pipe.Inspect(probation=False), Inspection).spread == 0
    assert reply.progress is not None
    before = reply.progress.inner_steps
    number = parent.send(pipe.Apply(0, b""))
    while parent.worker._requests._queue.empty():
        pass  # it lies before the worker when the step ends
    go.set()
    while not isinstance(reply := parent.next(), pipe.Answer):
        pass
    assert (reply.id, reply.failure) == (number, None)
    assert done == [before + 1], "merged after the inner step that was under way"


def test_who_asks_for_a_file_waits_for_no_inner_step(parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else a capture that is asked for meanwhile would miss the end of this one, and wait for the next."""
    step, go, under_way = Replica.step, threading.Event(), threading.Event()

    def held(replica: Replica) -> None:
        under_way.set()
        assert go.wait(DEADLINE)
        step(replica)

    monkeypatch.setattr(Replica, "step", held)
    parent.ask(setup_for(sealed_run(), tmp_path), pipe.Loaded)
    parent.ask(pipe.Train(), NoneType)
    assert under_way.wait(DEADLINE)
    try:
        parent.ours.settimeout(10.0)
        parent.ask(pipe.Checkpoint(1), NoneType)
        parent.ask(pipe.Dump(2, tmp_path / "weights"), NoneType)
        number = parent.send(pipe.Capture(0))
        while parent.worker._requests._queue.qsize() < 3:
            pass  # all lie before the worker when the step ends
    finally:
        parent.ours.settimeout(DEADLINE)
        go.set()
    while not isinstance(reply := parent.next(), pipe.Answer):
        pass
    assert (reply.id, reply.failure) == (number, None)
    assert {written(parent).number, written(parent).number} == {1, 2}


@pytest.mark.parametrize(("command", "name"), [(pipe.Capture(0, 40), "capture"), (pipe.Solo(1, 0, 40), "solo")])
def test_an_outer_step_that_is_asked_for_early_is_taken_when_it_is_due(
    command: pipe.Command, name: str, parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take, at = getattr(Replica, name), []

    def noted(replica: Replica, *given: int) -> object:
        at.append(replica.inner_steps)
        return take(replica, *given)

    monkeypatch.setattr(Replica, name, noted)
    parent.answer(setup_for(sealed_run(), tmp_path))
    parent.answer(pipe.Train())
    assert parent.answer(command).failure is None
    assert at == [40]


def test_what_a_capture_on_a_gpu_reads_is_brought_beside_training_before_its_turn(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bring, take, by, taken_over = Ahead.bring, Ahead.take, [], []

    def brought(ahead: Ahead, *given: Any) -> None:  # noqa: ANN401 - as `bring`
        by.append(threading.current_thread() is not parent.thread)
        bring(ahead, *given)

    monkeypatch.setattr(Weights, "is_far", True)
    monkeypatch.setattr(Ahead, "bring", brought)
    monkeypatch.setattr(Ahead, "take", lambda ahead, span: taken_over.append(found := take(ahead, span)) or found)
    loaded = parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path), pipe.Loaded)
    parent.ask(pipe.Capture(0), Description)
    assert (by, taken_over) == ([], [None]), "nothing waits while training rests"
    parent.ask(pipe.Train(), NoneType)
    description = parent.ask(pipe.Capture(0, 40), Description)
    assert by == [True]
    assert taken_over[-1] is not None
    outbox, inbox = (SharedBox(parent.memory, loaded.box_size, offset) for offset in (loaded.outbox_offset, 0))
    inbox.view(0, description.size)[:] = outbox.view(0, description.size)
    parent.ask(pipe.Inspect(probation=False), Inspection)
    assert parent.ask(pipe.Apply(0, b""), Applied).round == 1


def test_theta_has_its_own_part_before_anything_is_done_beside_training(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is made of what the outer step changes."""
    write, started = Replica.write, []

    def noted(replica: Replica, outbox: Tensor) -> Description:
        assert replica._capture is not None
        started.append(replica._capture._started)
        return write(replica, outbox)

    monkeypatch.setattr(Replica, "write", noted)
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Capture(0), Description)
    parent.ask(pipe.Train(), NoneType)
    parent.ask(pipe.Capture(0), Description)
    assert started == [False, True], "nothing follows one that is taken while training rests"


def test_a_command_after_one_that_nobody_waits_for_finds_its_work_done(
    parent: Parent, gate: threading.Event, tmp_path: Path
) -> None:
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.answer(pipe.Train())
    first = parent.send(pipe.Capture(0))
    parent.train_until(4)
    second = parent.send(pipe.Discard())
    gate.set()
    answers = []
    while len(answers) < 2:
        if isinstance(reply := parent.next(), pipe.Answer):
            answers.append((reply.id, msgspec.msgpack.decode(reply.result) is not None))
    assert answers == [(first, True), (second, False)]


def test_a_failure_beside_training_is_the_commands_and_training_goes_on(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Replica, __: Tensor) -> Description:
        raise TrainerError("the disk is gone.")

    monkeypatch.setattr(Replica, "write", broken)
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.answer(pipe.Train())
    failure = parent.answer(pipe.Capture(0)).failure
    assert failure is not None
    assert (failure.code, failure.cause) == (TrainerError.entry.code, "the disk is gone.")
    parent.train_until(4)


def test_what_nobody_expected_beside_training_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its parent would wait for an answer otherwise, and never hear what it was."""

    def broken(_: Replica, __: Tensor) -> Description:
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(Replica, "write", broken)
    parent, raised = Parent(), []

    def run() -> None:
        try:
            parent.worker.run()
        except RuntimeError as error:
            raised.append(str(error))

    parent.thread = threading.Thread(target=run, daemon=True)
    parent.thread.start()
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.answer(pipe.Train())
    parent.send(pipe.Capture(0))
    parent.thread.join(DEADLINE)
    assert raised == ["the card is gone"]


def test_a_run_that_waits_does_it_all_at_once(parent: Parent, gate: threading.Event, tmp_path: Path) -> None:
    gate.set()
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))  # not training: nobody to stand beside
    assert parent.ask(pipe.Capture(0), Description).size
    assert parent.worker._work is None
    parent.ask(pipe.Discard(), NoneType)


def test_a_smaller_micro_batch_is_told(parent: Parent, tmp_path: Path) -> None:
    parent.answer(setup_for(sealed_run(), tmp_path))
    parent.ask(pipe.Train(), NoneType)
    parent.train_until(4)
    assert parent.worker._replica is not None
    parent.worker._replica.inner.at_once = 1  # as where memory ran out
    while not isinstance(reply := parent.next(), pipe.Fitted):
        pass
    assert reply.event == MicroBatch(1, 2)


def test_what_training_takes_is_told_with_the_first_report_and_after_each_evaluation(parent: Parent, tmp_path: Path) -> None:
    parent.answer(setup_for(sealed_run(inner=Inner(steps=4, batch=2, sequence=32, optimizer="adamw")), tmp_path))
    replica = parent.worker._replica
    assert replica is not None
    for _ in range(2):
        parent.ask(pipe.Train(), NoneType)
        while not isinstance(reply := parent.next(), pipe.Taken):
            pass
        size = 4 * replica.layout.size
        told = reply.event
        assert (told.weights, told.gradients, told.optimizer, told.outer) == (size, size, 2 * size, 2 * size)
        assert told.exchange == replica.plan.exchange_size
        assert told.peak > 20 * size
        parent.ask(pipe.Pause(), NoneType)
        parent.ask(pipe.Evaluate(told=True), float)


def test_a_card_s_share_is_of_what_it_multiplies(tmp_path: Path) -> None:
    replica = make_replica(sealed_run(), tmp_path)
    assert Taken(replica).mfu(10, 2.0) is None, "a processor's is not known"
    replica.speed = 2e9
    wanted = 10 * estimate(replica.manifest).operations / (2.0 * 2e9)
    assert Taken(replica).mfu(10, 2.0) == pytest.approx(wanted)
    assert Taken(replica).mfu(1, 0.0) is None


def test_unlike_cards_count_by_what_each_of_them_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others:
        """A second card, half as fast."""

        def add(self, numbers: Tensor) -> None:
            numbers += 1e9

        def least(self, number: int) -> int:
            return number

    monkeypatch.setattr(on_device, "_known_speed", lambda _: 2e9)
    place = Place(torch.device("cpu"), group=cast("Group", Others()))
    assert on_device.DevicePart(sealed_run().manifest, 256, place, leads=True).speed == 3e9


# --- files


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds what is written beside training until it is set."""
    gate = threading.Event()

    def held(write: Callable[..., object]) -> Callable[..., object]:
        def hold(*given: Any) -> object:  # noqa: ANN401 - as `write`
            while threading.current_thread().name.startswith("ThreadPool") and not gate.wait(0.001):
                given[3]()
            return write(*given)

        return hold

    for name in ("save", "write_snapshot"):
        monkeypatch.setattr(checkpoint, name, held(getattr(checkpoint, name)))
    yield gate
    gate.set()


def written(parent: Parent) -> pipe.Written:
    while not isinstance(reply := parent.next(), pipe.Written):
        pass
    assert reply.failure is None
    return reply


def at_rest(folder: Path) -> checkpoint.State:
    found = checkpoint.find(folder / "alice" / "checkpoints", sealed_run(codec="bfloat16").run_id)
    assert found.state is not None
    assert found.path is not None
    theta = checkpoint.tensors_of(found.path)["theta"]
    assert theta.isfinite().all()
    return found.state


def test_training_and_an_exchange_go_on_while_files_are_written_one_at_a_time(
    parent: Parent, disk: threading.Event, tmp_path: Path
) -> None:
    loaded = parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path), pipe.Loaded)
    outbox, inbox = (SharedBox(parent.memory, loaded.box_size, offset) for offset in (loaded.outbox_offset, 0))
    parent.ask(pipe.Train(), NoneType)
    parent.train_until(4)
    parent.ask(pipe.Checkpoint(1), NoneType)
    parent.ask(pipe.Dump(2, tmp_path / "weights"), NoneType)
    parent.train_until(8)
    parent.ask(pipe.Capture(0), Description)
    inbox.view(0, inbox.size)[:] = outbox.view(0, outbox.size)  # the trainer is its own partner
    parent.ask(pipe.Inspect(probation=False), Inspection)
    assert parent.ask(pipe.Apply(0, b""), Applied).round == 1
    disk.set()
    first, second = written(parent), written(parent)
    assert (first.number, second.number) == (1, 2)
    saved = msgspec.msgpack.decode(first.result, type=Checkpointed)
    assert saved.round == 0, "it is what was when its turn came"
    assert saved.stopped < saved.seconds
    state = at_rest(tmp_path)
    assert state.inner_steps >= 4
    assert state.standing.tokens == state.inner_steps * 64, "nothing of it is later"
    dumped = msgspec.msgpack.decode(second.result, type=pipe.Dumped)
    assert dumped.standing.round == 1, "copied after the first was written, and so one copy at most"
    assert dumped.description == describe(memoryview((tmp_path / "weights").read_bytes()))


def test_a_file_has_the_weights_of_one_moment(parent: Parent, disk: threading.Event, tmp_path: Path) -> None:
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Checkpoint(1), NoneType)  # nothing is trained: written straight from the weights
    written(parent)
    parent.ask(pipe.Train(), NoneType)
    parent.ask(pipe.Checkpoint(2), NoneType)
    parent.train_until(12)
    disk.set()
    written(parent)
    state = at_rest(tmp_path)
    again = make_replica(sealed_run(codec="bfloat16"), tmp_path)
    again.draw_as("alice")
    for _ in range(state.inner_steps):
        again.step()
    found = checkpoint.find(tmp_path / "alice" / "checkpoints", sealed_run(codec="bfloat16").run_id)
    assert found.path is not None
    assert torch.equal(checkpoint.tensors_of(found.path)["theta"], again.theta)


def test_the_last_checkpoint_waits_for_no_other(parent: Parent, disk: threading.Event, tmp_path: Path) -> None:
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Train(), NoneType)
    parent.ask(pipe.Checkpoint(1), NoneType)
    parent.train_until(8)
    paused = parent.answer(pipe.Pause()).progress
    assert paused is not None
    parent.ask(pipe.Checkpoint(2), NoneType)
    assert {written(parent).number, written(parent).number} == {1, 2}, "whoever waits for the first has the last"
    assert at_rest(tmp_path).inner_steps == paused.inner_steps


def test_without_room_for_a_copy_the_weights_themselves_are_written(
    parent: Parent, disk: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    monkeypatch.setattr(memory, "free", lambda: 0)
    parent.ask(pipe.Train(), NoneType)
    parent.ask(pipe.Checkpoint(1), NoneType)
    saved = msgspec.msgpack.decode(written(parent).result, type=Checkpointed)
    assert saved.stopped == saved.seconds


def test_a_full_disk_is_told_to_whoever_asked(parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise DiskFullError("no space.")

    monkeypatch.setattr(checkpoint, "save", full)
    parent.answer(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Train(), NoneType)
    parent.ask(pipe.Checkpoint(1), NoneType)
    while not isinstance(reply := parent.next(), pipe.Written):
        pass
    assert reply.failure is not None
    assert reply.failure.code == DiskFullError.entry.code
    parent.train_until(4)


# --- a good guest


def test_in_its_rest_a_trainer_does_what_it_is_asked_and_goes_on_at_once_when_it_may(parent: Parent, tmp_path: Path) -> None:
    parent.ask(setup_for(sealed_run(), tmp_path), pipe.Loaded)
    parent.ask(pipe.Ease(1e-6), NoneType)
    parent.ask(pipe.Train(), NoneType)
    parent.train_until(1)
    for _ in range(3):
        parent.ask(pipe.Evaluate(told=False), float)
        answer = parent.answer(pipe.Discard())
        assert answer.progress is not None
        assert answer.progress.inner_steps == 1, "the rest after a step of milliseconds takes an hour"
    parent.ask(pipe.Ease(1.0), NoneType)
    parent.train_until(4)


def test_a_share_is_seen_in_the_time_that_steps_take(parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By that the others know how fast this node is."""
    step = Replica.step
    monkeypatch.setattr(Replica, "step", lambda self: (time.sleep(0.05), step(self)))
    monkeypatch.setattr(duty, "thread_time", time.perf_counter)  # so that it sleeps as if it computed
    parent.ask(setup_for(sealed_run(), tmp_path), pipe.Loaded)
    parent.ask(pipe.Ease(0.5), NoneType)
    parent.ask(pipe.Train(), NoneType)
    while not (isinstance(reply := parent.next(), pipe.Trained) and reply.event is not None):
        pass
    assert reply.event.steps == 1
    assert reply.event.seconds >= 0.1
    held = reply.progress.standing.step_seconds
    assert held == pytest.approx(reply.event.seconds / 2, rel=1e-3), "what a partner waits for has no rest"


def test_a_report_is_of_steps_of_one_size(parent: Parent, tmp_path: Path) -> None:
    sealed = sealed_run()
    parent.ask(setup_for(sealed, tmp_path), pipe.Loaded)
    parent.ask(pipe.Train(), NoneType)
    reports, commands = [], {4: pipe.Enlarge(3), 9: pipe.Pause()}
    while True:
        reply = parent.next()
        if isinstance(reply, pipe.Trained):
            if reply.event is not None:
                reports.append(reply.event)
            if commands and reply.progress.inner_steps >= min(commands):
                last = parent.send(commands.pop(min(commands)))
        elif isinstance(reply, pipe.Answer) and not commands and reply.id == last:
            break
    assert reply.progress is not None
    sizes = [report.tokens / report.steps / sealed.manifest.inner.tokens_per_step for report in reports]
    assert sizes == sorted(sizes)
    assert {*sizes} == {1, 3}
    assert sum(report.tokens for report in reports) == reply.progress.standing.tokens


@pytest.mark.parametrize("room", [True, False])
def test_a_gpu_has_its_memory_back_before_the_disk_has_done_unless_it_is_full(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: bool
) -> None:
    """No GPU is here: the device only says that it is one."""
    parent.ask(setup_for(sealed_run(), tmp_path), pipe.Loaded)
    replica = parent.worker._loaded()
    wanted = {name: tensor.clone() for name, tensor in replica.to_save("alice")[1].items()}
    held = [weakref.ref(one) for one in (replica.theta, replica.model, replica.inner)]
    replica.device = torch.device("mps")
    there: list[bool] = []
    save = checkpoint.save

    def watched(folder: Path, state: checkpoint.State, tensors: dict[str, Tensor], check: Callable[[], None]) -> int:
        there.extend(one() is not None for one in held)
        return save(folder, state, tensors, check)

    def full(*_: object) -> None:
        raise DiskFullError("no space.")

    monkeypatch.setattr(checkpoint, "save", watched)
    if not room:
        monkeypatch.setattr(files, "check_room", full)
        monkeypatch.setattr(checkpoint, "check_room", full)
    parent.ask(pipe.Checkpoint(1, last=True), NoneType)
    while not isinstance(told := parent.next(), pipe.Written):
        pass
    assert there == 3 * [not room]
    if not room:
        assert told.failure is not None
        assert told.failure.code == "NLC-121"
        replica.device = torch.device("cpu")
        parent.ask(pipe.Evaluate(told=False), float)  # it is all there still
        return
    found = checkpoint.find(tmp_path / "alice" / "checkpoints", replica._sealed.run_id)
    assert found.path is not None
    saved = checkpoint.tensors_of(found.path)
    torch.testing.assert_close(saved, wanted, rtol=0, atol=0, equal_nan=True)
