"""A replica over somebody's own parameters and optimizer, and its worker, driven from the daemon's end of the pipe."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from types import NoneType
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest
import torch

from nolocod.api.swarm import founded
from nolocod.errors import CheckpointError, ParametersDifferError, RunFileError, TrainerError, UnsupportedModelError
from nolocod.proto.types import Applied, Description, Inspection
from nolocod.run.manifest import Sealed, seal
from nolocod.run.run_file import read_run_file
from nolocod.trainer import checkpoint, own_worker, pipe
from nolocod.trainer.boxes import SharedBox, anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.model import read_config
from nolocod.trainer.own import OwnReplica, named, run_model
from nolocod.trainer.own_worker import OwnWorker
from tests.support.trainer_parts import OWNER, sealed_run, setup_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

R = TypeVar("R")


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def own_run(model: torch.nn.Module, **run: object) -> Sealed:
    return seal(founded(model, {"inner": {"steps": 4}, "codec": "float32", **run}), OWNER)


class Loop:
    """A training loop with its worker, and the daemon's end of the pipe."""

    def __init__(self, model: torch.nn.Module, folder: Path, evaluate: Callable[[], float] | None = None) -> None:
        self.model = model
        self.sealed = own_run(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        self.folder = folder
        self.evaluate = evaluate
        self.daemon, theirs = socket.socketpair()
        self.daemon.settimeout(60)
        self.memory = anonymous_file("boxes")
        self.worker = OwnWorker(ChildEnd(theirs.detach()), self.memory)
        self._unframer, self._waiting, self._last = pipe.Unframer(), list[pipe.Reply](), 0

    def send(self, command: pipe.Command) -> int:
        self._last += 1
        self.daemon.sendall(pipe.frame(pipe.Request(self._last, command)))
        deadline = time.monotonic() + 60
        while self.worker._requests._queue.empty() and not isinstance(command, pipe.Inspect):
            assert time.monotonic() < deadline, "the listener does not take it in"
            time.sleep(0.001)
        return self._last

    def answer(self, kind: type[R], number: int = 0) -> R:
        """To the last command, or to that of this number. AssertionError with the code if it failed."""
        while True:
            while not self._waiting:
                self._waiting += map(pipe.REPLIES.decode, self._unframer.feed(self.daemon.recv(1 << 16)))
            reply = self._waiting.pop(0)
            if isinstance(reply, pipe.Answer) and reply.id == (number or self._last):
                assert reply.failure is None, reply.failure
                return msgspec.msgpack.decode(reply.result, type=kind)

    def make(self, sealed: Sealed) -> OwnReplica:
        return OwnReplica(sealed, None, named(self.model.named_parameters()), self.optimizer, self.evaluate)

    def begin(self) -> pipe.Loaded:
        """As the daemon does, without donors."""
        setup = self.send(setup_for(self.sealed, self.folder))
        self.worker.wait_setup()
        self.send(pipe.Train())
        self.worker.begin(self.make)
        return self.answer(pipe.Loaded, setup)

    def step(self) -> None:
        """What a caller's `opt.step()` does."""
        x = torch.randn(16, 3)
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        assert self.worker.replica is not None
        self.worker.stepped(self.worker.replica, loss)
        self.optimizer.zero_grad()

    def capture(self, loaded: pipe.Loaded) -> None:
        """Ours, which a partner that is as we are sends too."""
        size = loaded.box_size
        outbox, inbox = SharedBox(self.memory, size, loaded.outbox_offset), SharedBox(self.memory, size)
        self.send(pipe.Capture(0))
        self.worker.serve(wait=lambda: False)
        written = self.answer(Description)
        inbox.view(0, written.size)[:] = bytes(outbox.view(0, written.size))

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).clone()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(make_model(), tmp_path)
    yield loop
    loop.daemon.close()
    loop.worker.finish()


# --- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda layers: [torch.nn.Linear(3, 6)], "parameter 0 is 0.weight float32 [6, 3] here, and 0.weight float32 [5, 3]"),
        (lambda layers: [layers[0], layers[3]], "parameter 2 is 1.weight float32 [1, 5] here, and 3.weight float32 [1, 5]"),
        (lambda layers: layers.double(), "parameter 0 is 0.weight float64 [5, 3] here, and 0.weight float32 [5, 3] in"),
        (lambda layers: layers[:1], "the run's 3.weight float32 [1, 5] is missing (2 parameters here, 4 in the run)."),
        (lambda layers: [*layers, torch.ones(1)], "the run has no 4.0 float32 [1] (5 parameters here, 4 in the run)."),
    ],
)
def test_the_first_parameter_that_differs_is_named_and_nothing_is_changed(
    change: Callable[[torch.nn.Module], Iterable[torch.nn.Module]], cause: str
) -> None:
    changed = [one if isinstance(one, torch.nn.Module) else torch.nn.ParameterList([one]) for one in change(make_model())]
    model = torch.nn.Sequential(*changed)
    before = [one.data_ptr() for one in model.parameters()]
    with pytest.raises(ParametersDifferError, match=re.escape(cause)):
        OwnReplica(own_run(make_model()), None, named(model.named_parameters()), torch.optim.SGD(model.parameters()), None)
    assert [one.data_ptr() for one in model.parameters()] == before


def test_parameters_without_names_go_by_their_order_and_those_that_do_not_train_are_no_part_of_it() -> None:
    model = make_model()
    frozen = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    sealed = own_run(torch.nn.ModuleList([model, torch.nn.ParameterList([frozen])]))
    given = named([*model.parameters(), frozen, *model.parameters()])
    replica = OwnReplica(sealed, None, given, torch.optim.SGD(model.parameters()), None)
    assert replica.layout.names == ("0.0.weight", "0.0.bias", "0.3.weight", "0.3.bias")
    assert torch.equal(replica.theta, torch.cat([one.detach().flatten() for one in model.parameters()]))


def test_no_memory_of_a_caller_s_card_is_kept_between_exchanges() -> None:
    model = make_model()
    sealed, given = own_run(model), named(model.named_parameters())
    ahead = OwnReplica(sealed, None, given, torch.optim.SGD(model.parameters()), None).weights.ahead
    ahead.bring(slice(0, 4), torch.ones(4), torch.ones(4))
    assert ahead.take(slice(0, 4)) is None


def test_what_cannot_be_founded_is_refused_by_name() -> None:
    with pytest.raises(RunFileError, match="bfloat16"):
        founded(make_model().bfloat16(), {})
    with pytest.raises(RunFileError, match="`model` is no key here"):
        founded(make_model(), {"model": {}})
    with pytest.raises(RunFileError, match="stepps"):
        founded(make_model(), {"inner": {"stepps": 3}})
    with pytest.raises(RunFileError, match="divide"):
        founded(make_model(), {"inner": {"steps": 3}, "outer": {"turns": 2}})
    with pytest.raises(RunFileError, match=r"lists a model's parameters"):
        founded(torch.nn.Identity(), {})


def test_a_plain_node_says_that_it_cannot_train_an_own_model(tmp_path: Path) -> None:
    sealed = own_run(make_model())
    with pytest.raises(UnsupportedModelError, match="comes from its owner's program"):
        read_config(sealed.manifest, 256)
    run_file = tmp_path / "run.toml"
    run_file.write_text('name = "x"\n[model]\nown = [["a", "float32", [2]]]\nhidden_size = 3')
    with pytest.raises(RunFileError, match="nothing stands beside it"):
        read_run_file(run_file)


def test_of_a_run_with_a_configuration_the_models_own_order_is_the_callers() -> None:
    """The flat order is sorted by name, that of `parameters()` is not."""
    sealed = sealed_run()
    model = run_model(sealed.manifest, None)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    replica = OwnReplica(sealed, None, named(model.parameters()), torch.optim.SGD(model.parameters()), None)
    assert list(replica.layout.names) != list(before)
    assert all(torch.equal(view, before[name]) for name, view in replica.layout.split(replica.theta))


# --- steps -----------------------------------------------------------------------------------------------


def test_a_step_takes_in_what_the_daemon_asks_and_waits_for_nothing(loop: Loop) -> None:
    """An outer step with a partner that is as we are: phi becomes what the equations say of two equal messages."""
    loaded = loop.begin()
    replica = loop.worker.replica
    assert replica is not None
    for _ in range(4):
        loop.step()
    phi, theta = replica.phi.clone(), loop.flat
    loop.capture(loaded)
    loop.step()
    loop.send(pipe.Inspect(probation=False))
    assert loop.answer(Inspection).spread == 0
    loop.send(pipe.Apply(1, b""))
    while replica.standing.round == 0:
        loop.step()  # the arithmetic goes on beside it
    applied = loop.answer(Applied)
    assert (applied.round, replica.standing.round) == (1, 1)
    outer = loop.sealed.manifest.outer
    expected = phi + outer.beta * (theta - phi)
    assert torch.allclose(replica.phi, expected, atol=1e-6)
    assert torch.equal(replica.theta, loop.flat), "the caller's parameters are the replica's"
    loop.send(pipe.Pause())
    loop.step()
    loop.answer(NoneType)
    steps = replica.inner_steps
    loop.step()
    assert replica.inner_steps == steps + 1, "a daemon that pauses stops nobody's loop"


def test_the_weights_that_a_loop_begins_with_are_untouched_by_what_is_due_at_once(loop: Loop) -> None:
    setup = loop.send(setup_for(loop.sealed, loop.folder))
    loop.worker.wait_setup()
    loop.send(pipe.Train())
    loop.send(pipe.Solo(7, 0))
    deadline = time.monotonic() + 60
    while loop.worker._requests._queue.qsize() < 2:
        assert time.monotonic() < deadline, "the listener does not take both in"
        time.sleep(0.001)
    loop.worker.begin(loop.make)
    assert loop.answer(pipe.Loaded, setup).standing.round == 0
    assert loop.worker.replica is not None
    assert loop.worker.replica.standing.round == 0, "an outer step came before the first inner one"
    loop.step()
    assert loop.worker.replica.standing.round == 7


def test_a_resumed_loop_goes_on_exactly(tmp_path: Path) -> None:
    def train(loop: Loop, steps: int) -> None:
        for _ in range(steps):
            loop.step()

    unbroken = Loop(make_model(), tmp_path)
    unbroken.begin()
    torch.manual_seed(7)
    train(unbroken, 3)
    unbroken.send(pipe.Checkpoint(1))
    unbroken.worker.serve(wait=lambda: False)
    unbroken.worker._settle()
    files = unbroken.worker._files
    assert files is not None
    files._thread.submit(int).result()  # the file is written
    train(unbroken, 3)
    resumed = Loop(make_model(1), tmp_path)
    assert resumed.begin().source == "checkpoint"
    train(resumed, 3)
    assert torch.equal(resumed.flat, unbroken.flat)
    other = Loop(make_model(), tmp_path)
    other.optimizer = torch.optim.AdamW([{"params": [one]} for one in other.model.parameters()])
    setup = other.send(setup_for(other.sealed, tmp_path))
    other.worker.wait_setup()
    other.send(pipe.Stop())
    with pytest.raises(EOFError):
        other.worker.begin(other.make)
    with pytest.raises(AssertionError, match=r"NLC-123.*not of this optimizer"):
        other.answer(pipe.Loaded, setup)


def test_a_second_load_goes_back_to_the_checkpoint_and_there_must_be_one(loop: Loop) -> None:
    loop.begin()
    loop.step()
    loop.send(setup_for(loop.sealed, loop.folder))
    loop.worker.serve(wait=lambda: False)
    with pytest.raises(AssertionError, match=f"{CheckpointError.entry.code}.*none to go back to"):
        loop.answer(pipe.Loaded)
    replica = loop.worker.replica
    assert replica is not None
    state, tensors = replica.to_save("alice")
    checkpoint.save(setup_for(loop.sealed, loop.folder).checkpoints, state, tensors)
    replica.theta.zero_()
    loop.send(setup_for(loop.sealed, loop.folder))
    loop.worker.serve(wait=lambda: False)
    assert loop.answer(pipe.Loaded).source == "checkpoint"
    assert loop.flat.count_nonzero() > 0
    assert loop.worker.replica is replica


def test_a_model_that_is_moved_is_told_before_its_old_weights_are_given_on(loop: Loop) -> None:
    loop.begin()
    next(loop.model.parameters()).data = torch.zeros(5, 3)
    loop.send(pipe.Capture(0))
    loop.worker.serve(wait=lambda: False)
    with pytest.raises(AssertionError, match=f"{TrainerError.entry.code}.*0.weight was moved"):
        loop.answer(Description)


def test_ctrl_c_comes_after_what_is_asked_is_done(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.begin()
    replica = loop.worker.replica
    assert replica is not None
    capture = replica.capture

    def interrupted(subject: int) -> None:
        signal.raise_signal(signal.SIGINT)
        capture(subject)

    monkeypatch.setattr(replica, "capture", interrupted)
    loop.send(pipe.Capture(0))
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    assert loop.answer(Description).size > 0


def test_a_stop_in_a_debugger_is_no_long_step_but_a_loop_that_has_become_slow_is_slow(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_worker, "STILL", 0.0)
    loop.begin()
    loop.step()
    usual = loop.worker._step_seconds
    for after, told in ((1000 * usual, usual), (1000 * usual, 1000 * usual)):
        loop.worker._resumed = time.perf_counter() - after
        loop.step()
        assert loop.worker._step_seconds == pytest.approx(told, rel=0.9)


def test_a_loop_without_a_held_out_loss_tells_none_and_one_that_has_it_tells_it(loop: Loop, tmp_path: Path) -> None:
    loop.begin()
    loop.send(pipe.Evaluate(told=False))
    loop.worker.serve(wait=lambda: False)
    assert loop.answer(float) == 0.0, "no donor's weights are worse than that"
    (tmp_path / "other").mkdir()
    other = Loop(make_model(), tmp_path / "other", evaluate=lambda: 2.5)
    other.begin()
    other.send(pipe.Evaluate(told=True))
    other.worker.serve(wait=lambda: False)
    assert other.answer(float) == 2.5


def test_an_outer_step_under_way_when_the_loop_ends_is_merged_and_answered(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic may end after the last request has come: nobody asks then, and the daemon waits for the answer."""
    loaded = loop.begin()
    replica = loop.worker.replica
    assert replica is not None
    loop.step()
    loop.capture(loaded)
    loop.step()
    loop.send(pipe.Inspect(probation=False))
    loop.answer(Inspection)
    waiting, go_on, take_step = threading.Event(), threading.Event(), replica.take_step

    def later(box: torch.Tensor, skipped: bytes) -> None:
        waiting.set()
        assert go_on.wait(60)
        take_step(box, skipped)

    monkeypatch.setattr(replica, "take_step", later)
    loop.send(pipe.Apply(1, b""))
    loop.worker.serve(wait=lambda: False)
    assert waiting.wait(60)
    threading.Timer(0.3, go_on.set).start()
    end = threading.Thread(target=loop.worker.finish)
    end.start()
    assert loop.answer(Applied).round == 1
    loop.daemon.sendall(pipe.frame(pipe.Request(0, pipe.Stop())))
    end.join(60)
    assert not end.is_alive()


def test_when_the_daemon_is_gone_training_keeps_what_training_made(loop: Loop) -> None:
    """A capture is out, and theta already has our own part of an outer step that will never be."""
    loop.begin()
    for _ in range(3):
        loop.step()
    alone = loop.flat
    loop.send(pipe.Capture(0))
    loop.worker.serve(wait=lambda: False)
    loop.answer(Description)
    assert not torch.allclose(loop.flat, alone)
    loop.daemon.close()
    loop.optimizer.param_groups[0]["lr"] = 0.0  # further steps change nothing
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012 - it is found out by the step after
        while True:
            loop.step()
    assert torch.allclose(loop.flat, alone, atol=1e-6)
