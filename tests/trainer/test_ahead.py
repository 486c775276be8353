"""What an outer step reads is brought to the card before it is due, and nothing else comes of it than without."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from nolocod.outer.codec.blocks import BLOCK, PIECE, fragments_of
from nolocod.run.manifest import Codec, Inner, Outer
from nolocod.trainer import ahead, checkpoint, queued
from nolocod.trainer.ahead import Ahead
from nolocod.trainer.bus import Staging
from nolocod.trainer.capture import Capture, Plan, Weights
from tests.support.trainer_parts import make_replica, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.trainer.replica import Replica

SIZES = (1500, 3, 3 * BLOCK + 4000, 130, 130)
CPU = torch.device("cpu")
WHOLE = slice(0, 4)


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "is_far", True)


class Crossed:
    """How many values crossed between main memory and the card in training's own queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values = 0
        self._sent = queued.sent
        monkeypatch.setattr(queued, "sent", self.send)

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.values += len(tensor)
        return self._sent(tensor, device).clone()  # as on a GPU


class Node:
    def __init__(self, codec: Codec, beta: float, seed: int, device: torch.device = CPU) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.plan = Plan(codec, Outer(alpha=0.5, beta=beta, gamma=0.9), fragments_of(SIZES, 1))
        phi = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(1)) * 0.02 + self.random()
        self.weights = Weights.of(phi.to(device, copy=True), phi, self.random(), self.plan.fragments)
        self.box, self.inbox = (torch.zeros(self.plan.box_size, dtype=torch.uint8) for _ in range(2))

    def random(self) -> torch.Tensor:
        return torch.randn(sum(SIZES), generator=self._generator) * 1e-3

    def train(self) -> None:
        self.weights.theta.add_(self.random().to(self.weights.theta.device))

    def capture(self, seed: int, *, is_ahead: bool) -> Capture:
        if is_ahead:
            self.weights.look_ahead(self.plan, 0)
        capture = Capture(self.plan, self.weights, 0, seed)
        capture.keep()
        capture.start()
        return capture


def exchanges(codec: Codec, beta: float, *, is_ahead: bool, device: torch.device = CPU) -> list[torch.Tensor]:
    nodes, found = [Node(codec, beta, 2 + number, device) for number in range(2)], []
    for turn in range(3):
        captures = []
        for number, node in enumerate(nodes):
            node.train()
            captures.append(node.capture(2 * turn + number, is_ahead=is_ahead))
            if turn == 1:  # a checkpoint
                captures[-1].take_back()
                captures[-1].start()
            captures[-1].write(node.box)
        for node, other in (nodes, nodes[::-1]):
            node.inbox.copy_(other.box)
        skipped = [capture.inspect(node.inbox) for capture, node in zip(captures, nodes, strict=True)]
        for node, capture, theirs in zip(nodes, captures, skipped[::-1], strict=True):
            node.train()
            capture.step(node.inbox, theirs)
            capture.merge(trained_on=True)
            found += [node.box.clone(), *(one.to(CPU, copy=True) for one in (node.weights.theta, node.weights.phi))]
    return found


@pytest.mark.parametrize("beta", [1.0, 0.7])
@pytest.mark.parametrize("codec", ["float32", "modulo8"])
def test_all_comes_out_as_it_does_without(monkeypatch: pytest.MonkeyPatch, codec: Codec, beta: float) -> None:
    crossed = Crossed(monkeypatch)
    wanted = exchanges(codec, beta, is_ahead=False)
    assert crossed.values > 6 * sum(SIZES)
    crossed.values = 0
    monkeypatch.setattr(Ahead, "_is_free", lambda *_: True)
    found = exchanges(codec, beta, is_ahead=True)
    assert crossed.values == 0, "between two inner steps nothing crosses"
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_where_there_is_no_room_it_crosses_in_training_s_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = Crossed(monkeypatch)
    monkeypatch.setattr(Ahead, "_is_free", lambda *_: False)
    wanted = exchanges("modulo8", 1.0, is_ahead=False)
    once, crossed.values = crossed.values, 0
    found = exchanges("modulo8", 1.0, is_ahead=True)
    assert crossed.values == once
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_so_it_does_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    here, values = Ahead(CPU), torch.ones(4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        here.bring(WHOLE, values, values)
    assert here.take(WHOLE) is None
    here.bring(WHOLE, values, values)
    assert here.take(WHOLE) is not None


def test_without_streams_nothing_is_brought() -> None:
    there = Ahead(torch.device("mps"))
    there.bring(WHOLE, torch.ones(4), torch.ones(4))
    assert there.take(WHOLE) is None


def test_a_card_keeps_what_training_may_still_need(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Ahead(CPU)
    monkeypatch.setattr(there, "_stream", object())
    free = [ahead._SPARE + 99]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 << 30))
    assert not there._is_free(100)
    free[0] += 1
    assert there._is_free(100)


def test_memory_is_taken_once_and_more_for_more_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    here, places, kept = Ahead(CPU), [], []
    for size in (4, 3, 4, 5):
        here.bring(slice(0, size), torch.ones(size), torch.zeros(size))
        brought = here.take(slice(0, size))
        assert brought is not None
        assert brought.phi is not None
        assert (brought.phi.tolist(), brought.delta.tolist()) == ([1.0] * size, [0.0] * size)  # type: ignore[union-attr]
        places.append(brought.phi.data_ptr())
        kept.append(here._room)  # it lives, so that no other has its place
        del brought
    assert places[0] == places[1] == places[2] != places[3]
    monkeypatch.setattr(here, "_is_free", lambda need: False)
    here.bring(slice(0, 6), torch.ones(6), torch.ones(6))
    assert here.take(slice(0, 6)) is None
    here.bring(WHOLE, torch.ones(4), torch.ones(4))
    assert here.take(WHOLE) is not None, "what it has it keeps"


def test_what_a_capture_has_stays_as_it_is_while_that_is_out() -> None:
    here, values = Ahead(CPU), torch.ones(4)
    here.bring(WHOLE, values, values)
    brought = here.take(WHOLE)
    here.bring(WHOLE, values + 1, values + 1)
    assert brought is not None
    assert torch.equal(brought.phi, values)  # type: ignore[arg-type]
    assert here.take(WHOLE) is None, "there is no place for others"
    del brought
    here.bring(WHOLE, values + 1, values + 1)
    assert here.take(WHOLE) is not None


def test_a_capture_that_is_merged_needs_it_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("modulo8", 1.0, 1)
    capture = node.capture(0, is_ahead=True)
    assert node.weights.ahead._lent() is not None
    capture.merge(trained_on=False)
    assert node.weights.ahead._lent() is None


@pytest.mark.parametrize("codec", ["float32", "modulo8"])
@pytest.mark.parametrize("moment", ["before", "out", "stepped"])
def test_what_training_needs_is_given_back_for_good_and_all_comes_out_the_same(codec: Codec, moment: str) -> None:
    found = []
    for is_ahead in (False, True):
        node, other = (Node(codec, 0.7, 2 + number) for number in range(2))
        for one in (node, other):
            one.train()
        node.weights.look_ahead(node.plan, 0) if is_ahead else None
        ahead = node.weights.ahead
        given = [ahead.give_back()] if moment == "before" else []
        captures = [one.capture(number, is_ahead=False) for number, one in enumerate((node, other))]
        lent = ahead._lent()
        assert (lent is not None) == (is_ahead and moment != "before")
        given += [ahead.give_back()] if moment == "out" else []
        assert moment != "out" or lent is None or lent.phi is lent.delta is None, "the capture does without"
        for capture, one in zip(captures, (node, other), strict=True):
            capture.write(one.box)
        node.inbox.copy_(other.box)
        captures[0].inspect(node.inbox)
        captures[0].step(node.inbox, b"")
        given += [ahead.give_back()] if moment == "stepped" else []
        node.train()
        captures[0].merge(trained_on=True)
        found.append([one.clone() for one in (node.box, node.weights.theta, node.weights.phi, node.weights.delta)])
        assert given == [is_ahead]
        assert not ahead.give_back(), "it has nothing more"
        node.weights.look_ahead(node.plan, 0)
        assert ahead.take(node.plan.fragments[0].span) is None, "and takes nothing"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("way", ["there", "back"])
def test_what_is_under_way_is_given_back_too(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    here, values, given = Ahead(CPU), torch.ones(4), []
    if way == "back":
        here.bring(WHOLE, values, values)
    brought = here.take(WHOLE)
    send, training = here._staging.send, threading.Thread(target=lambda: given.append(here.give_back()))

    def interrupted(near: torch.Tensor, far: torch.Tensor) -> None:
        send(near, far)
        if training.ident is None:
            training.start()
            training.join(0.2)

    monkeypatch.setattr(here._staging, "send", interrupted)
    if brought is None:
        here.bring(WHOLE, values, values)
    else:
        here.bring_late(brought, values)
    training.join(60)
    assert given == [True]
    assert here.take(WHOLE) is here._room is None
    assert brought is None or brought.phi is brought.delta is brought.late is None


def test_training_asks_for_it_before_it_computes_less_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica(sealed_run(inner=Inner(steps=4, batch=4, sequence=32)), tmp_path)
    loss, left = replica.objective.loss, [2]

    def full(*given: Any) -> Any:  # noqa: ANN401 - what the objective takes
        if len(given[1]) == 4 and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(*given)

    monkeypatch.setattr(replica.objective, "loss", full)
    replica.weights.look_ahead(replica.plan, 0)
    replica.step()
    assert replica.inner.at_once == 2, "there was something, and then nothing"
    assert left == [0]


def test_a_gpu_s_pinned_memory_is_there_before_it_is_due() -> None:
    node = Node("modulo8", 1.0, 1)
    node.weights.look_ahead(node.plan, 0)
    place = node.weights._memory[0].data_ptr()
    assert node.capture(0, is_ahead=False).kept.data_ptr() == place


def test_pinned_memory_that_there_is_not_is_told_by_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    node, text = Node("modulo8", 1.0, 1), "CUDA error: out of memory"

    def full(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(Weights, "memory", full)
    node.weights.look_ahead(node.plan, 0)  # in the thread that hears the parent, which must not end
    with pytest.raises(RuntimeError, match=text):
        node.capture(0, is_ahead=False)


def test_alone_it_comes_out_the_same_in_larger_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = (make_replica(sealed_run(), tmp_path) for _ in range(2))
    for replica, is_far in ((near, False), (far, True)):
        monkeypatch.setattr(Weights, "is_far", is_far)
        replica.step()
        replica.solo()
    for one in ("theta", "phi", "delta"):
        assert torch.equal(getattr(near, one), getattr(far, one))


def test_what_was_brought_is_void_once_phi_or_delta_changed() -> None:
    here, values = Ahead(CPU), torch.ones(4)
    here.bring(WHOLE, values, values)
    brought = here.take(WHOLE)
    assert brought is not None
    assert brought.phi.data_ptr() != values.data_ptr()
    assert here.take(WHOLE) is None, "it is whoever's took it"
    here.bring(WHOLE, values, values)
    assert here.take(slice(0, 3)) is None, "of another span"
    here.bring(WHOLE, values, values)
    with here.changing():
        pass
    assert here.take(WHOLE) is None
    with here.changing():
        here.bring(WHOLE, values, values)
    assert here.take(WHOLE) is None, "it was brought while they changed"


@pytest.mark.parametrize("change", ["solo", "adopt", "step"])
def test_whatever_changes_phi_or_delta_says_so(tmp_path: Path, change: str) -> None:
    replica = make_replica(sealed_run(), tmp_path)
    replica.step()
    if change == "step":
        boxes = [torch.zeros(replica.plan.box_size, dtype=torch.uint8) for _ in range(2)]
        replica.prepare(boxes[0], 0)
        boxes[1].copy_(boxes[0])
        replica.inspect(boxes[1])
    replica.weights.look_ahead(replica.plan, 0)
    brought, before = replica.weights.ahead._brought, replica.phi.clone()
    assert brought is not None
    match change:
        case "solo":
            replica.solo()
        case "adopt":
            adopt_own(replica, tmp_path)
        case "step":
            replica.take_step(boxes[1], b"")
    assert replica.weights.ahead.take(brought.span) is None
    assert change == "adopt" or not torch.equal(before, replica.phi)


def adopt_own(replica: Replica, folder: Path) -> None:
    checkpoint.write_snapshot(folder / "own", *replica.snapshot())
    replica.adopt(folder / "own", replica.standing)


def test_nothing_is_brought_of_a_subject_that_there_is_not() -> None:
    node = Node("modulo8", 1.0, 1)
    node.weights.look_ahead(node.plan, 7)
    assert node.weights.ahead._brought is None


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["float32", "modulo8"])
def test_so_it_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    device = torch.device("cuda")
    wanted = exchanges(codec, 0.7, is_ahead=False, device=device)
    crossed = Crossed(monkeypatch)
    found = exchanges(codec, 0.7, is_ahead=True, device=device)
    assert crossed.values == 0
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_large_ones_go_through_two_pieces(kind: torch.dtype) -> None:
    near = torch.randn(5 * PIECE + 7).to(kind)
    far = torch.zeros(len(near), dtype=kind, device="cuda")
    Staging(far.device).send(near, far)
    assert torch.equal(far.cpu(), near)


@pytest.mark.gpu
def test_what_is_brought_next_waits_for_what_is_still_read() -> None:
    here, values, theta = Ahead(torch.device("cuda")), torch.ones(PIECE), torch.zeros(PIECE, device="cuda")
    here.bring(slice(0, PIECE), values, values)
    brought = here.take(slice(0, PIECE))
    assert brought is not None
    torch.cuda._sleep(500_000_000)
    theta += brought.phi
    here.mark()
    del brought
    here.bring(slice(0, PIECE), values + 1, values + 1)
    assert torch.equal(theta.cpu(), values)


@pytest.mark.gpu
def test_training_does_not_wait_for_the_bus() -> None:
    """The card is kept busy by hand: what is brought and what goes back is there before that ends."""
    node, device = Node("modulo8", 1.0, 1, torch.device("cuda")), torch.device("cuda")
    node.weights.look_ahead(node.plan, 0)
    other = Ahead(device)
    other.bring(WHOLE, torch.zeros(1 << 20), torch.zeros(1 << 20))  # its memory is there
    torch.cuda._sleep(1)  # loaded
    torch.cuda.synchronize()
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
    capture = node.capture(0, is_ahead=False)
    torch.cuda._sleep(2_000_000_000)  # a second
    busy.record(torch.cuda.current_stream(device))
    waiting = threading.Thread(target=lambda: capture.write(node.box))
    waiting.start()
    waiting.join()
    other.bring(WHOLE, torch.zeros(1 << 20), torch.zeros(1 << 20))
    assert not busy.query()
