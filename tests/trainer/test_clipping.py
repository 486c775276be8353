"""What a partner's message counts for, against the formulas by hand."""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from nolocod.outer.codec.blocks import fragments_of
from nolocod.run.manifest import Inner, Outer, Trust
from nolocod.trainer import checkpoint
from nolocod.trainer.boxes import anonymous_file
from nolocod.trainer.child_end import ChildEnd
from nolocod.trainer.clipping import Clipping, History, Norms, clip
from nolocod.trainer.worker import Worker
from tests.support.trainer_parts import make_replica, save, sealed_run, setup_for

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Codec
    from nolocod.trainer.replica import Replica

CLIP = Trust(clip=1.5)


def seen(distance: float, change: float = 1.0) -> list[Norms]:
    return [Norms(distance, change)]


def clipping(*accepted: float, settings: Trust = CLIP) -> Clipping:
    """One that accepted these distances at a learning rate of 1."""
    made = Clipping(settings, 1)
    made.restore(History((accepted,)))
    return made


def test_a_difference_counts_up_to_the_radius_and_beyond_it_the_less_the_further() -> None:
    one = clipping(4.0, 1.0, 2.0, 3.0, 3.5)
    assert one.weigh(0, seen(4.5), 1.0, probation=False) == 1.0
    assert one.weigh(0, seen(9.0), 1.0, probation=False) == (1.5 * 3.0 / 9.0) ** 2
    assert one.weigh(0, seen(9.0), 1.0, probation=True) == (0.5 * 1.5 * 3.0 / 9.0) ** 2
    assert one.weigh(0, seen(9.0), 0.1, probation=False) == pytest.approx((0.1 * 1.5 * 3.0 / 9.0) ** 2)
    moved = [distance * one.weigh(0, seen(distance), 1.0, probation=False) for distance in (4.5, 9.0, 45.0, 4500.0)]
    assert moved == pytest.approx([4.5, 2.25, 0.45, 0.0045]), "nobody moves us further than from the radius"


def test_until_there_are_four_our_own_change_stands_in() -> None:
    one = clipping(100.0, 100.0, 100.0)
    assert one.weigh(0, seen(9.0, change=2.0), 1.0, probation=False) == (1.5 * 2 * 2.0 / 9.0) ** 2
    one.accept(0, seen(9.0, change=2.0), 1.0)
    assert one.history.distances == ((100.0, 100.0, 100.0, 8.0),), "remembered at twice the stand-in"
    assert one.weigh(0, seen(1000.0), 1.0, probation=False) == (1.5 * 100.0 / 1000.0) ** 2


def test_fragments_together_have_one_weight_and_each_its_history() -> None:
    one = Clipping(CLIP, 3)
    one.restore(History(((1.0,) * 4, (3.0,) * 4, (4.0,) * 4)))
    both = [Norms(30.0, 1.0), Norms(40.0, 1.0)]
    assert one.weigh(1, both, 1.0, probation=False) == pytest.approx((1.5 * 5.0 / 50.0) ** 2)
    one.accept(1, both, 1.0)
    assert [known[4:] for known in one.history.distances] == [(), (6.0,), (8.0,)]


def test_nobody_widens_the_radius_by_being_far_away() -> None:
    one = clipping(*[1.0] * 12)
    for _ in range(4):
        one.accept(0, seen(1e6), 1.0)
    assert one.history.distances == ((*[1.0] * 12, *[2.0] * 4),)
    assert one.weigh(0, seen(3.0), 1.0, probation=False) == 0.25, "a quarter of the partners moved nothing"
    one.accept(0, seen(1.0), 1.0)
    assert len(one.history.distances[0]) == 16
    assert one.history.distances[0][-5:] == (2.0, 2.0, 2.0, 2.0, 1.0)


def test_parted_halves_of_a_swarm_find_together_again() -> None:
    """The radius doubles within nine exchanges as long as everybody is far away."""
    one, distance, exchanges = clipping(*[1.0] * 16), 1000.0, 0
    while one.weigh(0, seen(distance), 1.0, probation=False) < 1:
        one.accept(0, seen(distance), 1.0)
        exchanges += 1
    assert exchanges <= 9 * 10


def test_nothing_is_learned_from_twins() -> None:
    one = clipping()
    one.accept(0, seen(0.0), 1.0)
    assert one.history.distances == ((),)
    assert one.weigh(0, seen(0.0, change=0.0), 1.0, probation=True) == 1.0


def test_defences_that_are_off_find_nothing() -> None:
    one = clipping(*[1.0] * 4, settings=Trust(clip=0))
    assert one.weigh(0, seen(1e9), 1.0, probation=True) == 1.0


def test_a_history_of_other_fragments_is_left_aside() -> None:
    one = clipping(1.0)
    one.restore(History())
    assert one.history.distances == ((1.0,),)


def test_a_history_of_release_0_1_is_read() -> None:
    before = b'{"distances":[[1.0,2.0]],"leads":[0,1],"cosines":[0.5]}'
    assert msgspec.json.decode(before, type=History) == History(((1.0, 2.0),))


# --- on replicas


def message(replica: Replica, outer: Outer) -> torch.Tensor:
    change = (replica.theta - replica.phi).double()
    return outer.beta * change + outer.gamma * replica.phi.double()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8"])
def test_the_outer_step_of_a_clipped_partner_is_the_formula(tmp_path: Path, codec: Codec, late: bool) -> None:
    """Against float64 by hand: late or not, each partner by its own radius, the radius in its fragment alone."""
    settings = Outer(alpha=0.5, beta=0.7, gamma=0.75, rounds=100, turns=2)
    inner = Inner(steps=4, batch=2, sequence=32, optimizer="adamw", learning_rate=3e-3)  # far, beside the codec's rounding
    sealed = sealed_run(codec=codec, inner=inner, outer=settings, trust=Trust(clip=0.2))
    nodes = [make_replica(sealed, tmp_path, name) for name in ("alice", "bob")]
    boxes = [torch.zeros(nodes[0].plan.box_size, dtype=torch.uint8) for _ in nodes]
    for number, node in enumerate(nodes):
        for _ in range(4 + 4 * number):  # so that bob moved further and believes more
            node.step()
        node.prepare(boxes[number], 1)
    span = nodes[0].plan.fragments[1].span
    sent = [message(node, settings)[span] for node in nodes]
    distance = (sent[0] - sent[1]).norm().item()
    weights, expected = [], []
    for index, node in enumerate(nodes):
        change = settings.beta * (node.theta - node.phi)[span].double().norm().item()
        weights.append((0.2 * 2 * change / distance) ** 2)
        mean = sent[index] + weights[-1] * (sent[1 - index] - sent[index]) / 2
        expected.append(settings.alpha * node.delta[span].double() + mean - settings.gamma * node.phi[span].double())
    assert weights[0] < weights[1] < 1
    if late:
        nodes[0].step()
    for index, node in enumerate(nodes):
        found = node.inspect(boxes[1 - index])
        assert found.weight == pytest.approx(weights[index], rel=1e-6 if codec == "float32" else 0.02)
    for index, node in enumerate(nodes):
        applied = node.apply(boxes[1 - index], 0)
        assert applied.weight == pytest.approx(weights[index], rel=0.02)
        error = (node.delta[span].double() - expected[index]).norm().item() / distance
        assert error <= (1e-5 if codec == "float32" else 0.05)
        assert [len(known) for known in node.clipping.history.distances] == [0, 1]


def test_with_defences_off_or_not_met_the_step_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    after = []
    for trust in (Trust(clip=0), Trust(clip=100)):
        sealed = sealed_run(trust=trust)
        nodes = [make_replica(sealed, tmp_path, name) for name in ("alice", "bob")]
        boxes = [torch.zeros(nodes[0].plan.box_size, dtype=torch.uint8) for _ in nodes]
        for node, box in zip(nodes, boxes, strict=True):
            node.step()
            node.prepare(box, 0)
        assert nodes[0].inspect(boxes[1]).weight == 1.0
        nodes[0].apply(boxes[1], 0)
        after.append((nodes[0].phi, nodes[0].delta))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])


def test_what_is_known_of_distances_is_in_the_checkpoint(tmp_path: Path) -> None:
    sealed = sealed_run()
    alice, bob = make_replica(sealed, tmp_path, "alice"), make_replica(sealed, tmp_path, "bob")
    boxes = [torch.zeros(alice.plan.box_size, dtype=torch.uint8) for _ in range(2)]
    for _ in range(3):
        for replica, box in zip((alice, bob), boxes, strict=True):
            replica.step()
            replica.prepare(box, 0)
        for replica, other in ((alice, boxes[1]), (bob, boxes[0])):
            replica.inspect(other)
            replica.apply(other, 0)
    assert [len(known) for known in alice.clipping.history.distances] == [3]
    assert all(math.isfinite(one) and one > 0 for one in alice.clipping.history.distances[0])
    save(alice, tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    resumed = make_replica(sealed, tmp_path, "alice")
    resumed.restore(found.path, found.state)
    assert resumed.clipping.history == alice.clipping.history


# --- of our own change


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8"])
def test_an_outer_step_takes_no_more_of_our_own_change_along_than_is_allowed(tmp_path: Path, codec: Codec, alone: bool) -> None:
    """The message's own values say so: another node's view of them, at the same phi. Alone phi is what is told later."""
    settings = Outer(alpha=0.0, beta=0.7, gamma=1.0, rounds=100, turns=2)
    inner = Inner(steps=4, batch=2, sequence=32, optimizer="adamw", learning_rate=3e-3)
    sealed = sealed_run(codec=codec, inner=inner, outer=settings, trust=Trust(clip=0))
    node = make_replica(sealed, tmp_path, "alice")
    span, other = node.plan.fragments[1].span, node.plan.fragments[0].span
    phi = node.phi.clone()
    for _ in range(4):
        node.step()
    before = node.theta.clone()
    length = (before - phi)[span].norm().item()
    node.clip_change = length / 3
    if alone:
        node.solo(0, 1)
        told = (node.phi - phi)[span] / settings.beta
    else:
        partner = make_replica(sealed, tmp_path, "bob")
        boxes = [torch.zeros(node.plan.box_size, dtype=torch.uint8) for _ in range(2)]
        partner.prepare(boxes[0], 1)
        node.prepare(boxes[1], 1)
        partner.inspect(boxes[1])
        partner.apply(boxes[1], 0)
        told = 2 * (partner.phi - phi)[span] / settings.beta
    rounding = 1e-4 if codec == "float32" else 0.1  # of phi too, by bfloat16
    assert told.norm().item() == pytest.approx(length / 3, rel=rounding)
    assert torch.equal(node.theta[other], before[other]), "the fragment whose turn it is, and no other"
    node.discard()
    kept = (node.theta - node.phi)[span].norm().item()
    assert kept <= length / 3 * 1.001, "nothing of the rest is told by a later exchange"
    if not alone:
        way = torch.nn.functional.cosine_similarity((node.theta - phi)[span], (before - phi)[span], dim=0)
        assert way.item() == pytest.approx(1, abs=1e-5)


def test_a_change_within_the_bound_is_left_as_it_is(tmp_path: Path) -> None:
    node = make_replica(sealed_run(), tmp_path)
    node.step()
    before = node.theta.clone()
    node.clip_change = 1.001 * (node.theta - node.phi).norm().item()
    node.capture(0)
    assert torch.equal(node.theta, before)
    node.clip_change = 0.999 * (node.theta - node.phi).norm().item()
    node.capture(0)
    assert not torch.equal(node.theta, before)


def test_a_part_without_a_value_has_no_change() -> None:
    theta, phi = torch.ones(3), torch.zeros(3)
    empty = next(fragment for fragment in fragments_of([3], 5) if not fragment.blocks)
    clip(theta, phi, [empty], 0.1)
    assert torch.equal(theta, torch.ones(3))


def test_the_trainer_is_told_of_the_bound(tmp_path: Path) -> None:
    worker = Worker(ChildEnd(socket.socketpair()[0].detach()), anonymous_file("boxes"))
    worker._load(setup_for(sealed_run(), tmp_path, clip_change=0.25))
    assert worker._replica is not None
    assert worker._replica.clip_change == 0.25
