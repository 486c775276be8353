"""The trainer's loop in this process, so that a test can hold its work beside training."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from nolocod.errors import TrainerError
from nolocod.proto.types import Subject, describe
from nolocod.trainer import pipe
from nolocod.trainer.boxes import SharedBox, anonymous_file
from nolocod.trainer.replica import Replica
from nolocod.trainer.worker import Link, Worker
from tests.support.trainer_parts import sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from nolocod.proto.types import Description

DEADLINE = 60.0


class Parent:
    """The parent's end, blocking."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(DEADLINE)
        self.memory = anonymous_file("boxes")
        self.worker = Worker(Link(theirs), self.memory)
        self.thread = threading.Thread(target=self.worker.run)
        self._unframer: pipe.Unframer[pipe.Reply] = pipe.Unframer(pipe.Reply)
        self._waiting: list[pipe.Reply] = []
        self._last = 0

    def send(self, command: pipe.Command) -> int:
        self._last += 1
        self.ours.sendall(pipe.frame(pipe.Request(self._last, command)))
        return self._last

    def next(self) -> pipe.Reply:
        while not self._waiting:
            self._waiting += self._unframer.feed(self.ours.recv(1 << 16))
        return self._waiting.pop(0)

    def ask(self, command: pipe.Command) -> pipe.Result:
        number = self.send(command)
        while True:
            reply = self.next()
            if isinstance(reply, pipe.Answer):
                assert reply.id == number
                return reply.result

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
    loaded = parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    assert isinstance(loaded, pipe.Loaded)
    outbox, inbox = (SharedBox(parent.memory, loaded.box_size, offset) for offset in (loaded.outbox_offset, 0))
    assert parent.ask(pipe.Train()) == pipe.Done()
    done = 0
    for command in (pipe.Capture(Subject()), pipe.Inspect(probation=False), pipe.Apply(0, b"")):
        gate.clear()
        number = parent.send(command)
        done += 8
        parent.train_until(done)
        gate.set()
        while not isinstance(reply := parent.next(), pipe.Answer):
            pass
        assert reply.id == number
        assert reply.progress is not None
        done = reply.progress.inner_steps
        match reply.result:
            case pipe.Described(description):
                assert description == describe(outbox.view(0, description.size))
                inbox.view(0, inbox.size)[:] = outbox.view(0, outbox.size)  # the trainer is its own partner
            case pipe.Inspected(inspection):
                assert inspection.spread == 0
            case pipe.Stepped(applied):
                assert applied.round == 1
                assert reply.progress.steps_since_outer >= 16, "what was trained since the capture counts for the next"
            case other:
                raise AssertionError(other)


def test_a_command_after_one_that_nobody_waits_for_finds_its_work_done(
    parent: Parent, gate: threading.Event, tmp_path: Path
) -> None:
    parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Train())
    first = parent.send(pipe.Capture(Subject()))
    parent.train_until(4)
    second = parent.send(pipe.Discard())
    gate.set()
    answers = []
    while len(answers) < 2:
        if isinstance(reply := parent.next(), pipe.Answer):
            answers.append((reply.id, type(reply.result)))
    assert answers == [(first, pipe.Described), (second, pipe.Done)]


def test_a_failure_beside_training_is_the_commands_and_training_goes_on(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Replica, __: Tensor) -> Description:
        raise TrainerError("no such luck.")

    monkeypatch.setattr(Replica, "write", broken)
    parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path))
    parent.ask(pipe.Train())
    result = parent.ask(pipe.Capture(Subject()))
    assert isinstance(result, pipe.Failed)
    assert (result.code, result.cause) == (TrainerError.entry.code, "no such luck.")
    parent.train_until(4)


def test_a_run_that_waits_does_it_all_at_once(parent: Parent, gate: threading.Event, tmp_path: Path) -> None:
    gate.set()
    parent.ask(setup_for(sealed_run(codec="bfloat16"), tmp_path))  # not training: nobody to stand beside
    assert isinstance(parent.ask(pipe.Capture(Subject())), pipe.Described)
    assert parent.worker._aside is None
    assert isinstance(parent.ask(pipe.Discard()), pipe.Done)
