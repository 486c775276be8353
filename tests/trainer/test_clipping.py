"""What a partner's message counts for, against the formulas by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from nolocod.errors import MisdirectedTensorError
from nolocod.proto.types import Subject
from nolocod.run.manifest import Outer, Trust
from nolocod.trainer import checkpoint
from nolocod.trainer.clipping import ENOUGH, REMEMBERED, Envelope, Known, Measured
from tests.support.trainer_parts import make_replica, sealed_run

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.manifest import Codec
    from nolocod.trainer.replica import Replica

CLIP = Trust(clip=1.5, direction=0.25)


def seen(distance: float, change: float = 1.0, cosine: float = 0.5) -> Measured:
    return Measured(distance, change, cosine)


def envelope(*accepted: float, settings: Trust = CLIP) -> Envelope:
    """One that accepted these distances at a learning rate of 1."""
    made = Envelope(settings, 1)
    made.restore(Known((accepted,)))
    return made


def test_a_difference_counts_up_to_the_radius() -> None:
    one = envelope(4.0, 1.0, 2.0, 3.0, 3.5)
    assert one.weigh(0, seen(4.5), 1.0, probation=False) == 1.0
    assert one.weigh(0, seen(9.0), 1.0, probation=False) == 1.5 * 3.0 / 9.0
    assert one.weigh(0, seen(9.0), 1.0, probation=True) == 0.5 * 1.5 * 3.0 / 9.0
    assert one.weigh(0, seen(9.0), 0.1, probation=False) == pytest.approx(0.1 * 1.5 * 3.0 / 9.0)


def test_until_there_are_four_our_own_change_stands_in() -> None:
    one = envelope(100.0, 100.0, 100.0)
    assert one.weigh(0, seen(9.0, change=2.0), 1.0, probation=False) == 1.5 * 2 * 2.0 / 9.0
    one.accept(0, seen(9.0, change=2.0), 1.0)
    assert one.state.distances == ((100.0, 100.0, 100.0, 8.0),), "remembered at twice the stand-in"
    assert one.weigh(0, seen(1000.0), 1.0, probation=False) == 1.5 * 100.0 / 1000.0


def test_nobody_widens_the_radius_by_being_far_away() -> None:
    one = envelope(*[1.0] * 12)
    for _ in range(4):
        one.accept(0, seen(1e6), 1.0)
    assert one.state.distances == ((*[1.0] * 12, *[2.0] * 4),)
    assert one.weigh(0, seen(3.0), 1.0, probation=False) == 0.5, "a quarter of the partners moved nothing"
    one.accept(0, seen(1.0), 1.0)
    assert len(one.state.distances[0]) == 16
    assert one.state.distances[0][-5:] == (2.0, 2.0, 2.0, 2.0, 1.0)


def test_parted_halves_of_a_swarm_find_together_again() -> None:
    """The radius doubles within nine exchanges as long as everybody is far away."""
    one, distance, exchanges = envelope(*[1.0] * 16), 1000.0, 0
    while one.weigh(0, seen(distance), 1.0, probation=False) < 1:
        one.accept(0, seen(distance), 1.0)
        exchanges += 1
    assert exchanges <= 9 * 10


def test_nothing_is_learned_from_twins() -> None:
    one = envelope()
    one.accept(0, seen(0.0), 1.0)
    assert one.state.distances == ((),)
    assert one.weigh(0, seen(0.0, change=0.0), 1.0, probation=True) == 1.0


def asked(one: Envelope, *cosines: float) -> list[bool]:
    """Whether steps with these cosines were let through, one after the other."""
    found = []
    for cosine in cosines:
        try:
            one.weigh(0, seen(1.0, cosine=cosine), 1.0, probation=False)
            found.append(True)
        except MisdirectedTensorError:
            found.append(False)
    return found


def test_a_change_against_ours_is_refused() -> None:
    one = envelope()
    assert asked(one, *[0.5] * ENOUGH, -0.25, -0.26) == [True] * ENOUGH + [True, False]
    with pytest.raises(MisdirectedTensorError, match=r"-0\.31"):
        one.weigh(0, seen(1.0, cosine=-0.31), 1.0, probation=False)


def test_directions_are_not_judged_where_partners_point_anywhere() -> None:
    """At a run's beginning nothing is known, and on a plateau honest steps have any cosine; judged is again after it."""
    assert asked(envelope(), *[-0.9] * REMEMBERED) == [True] * REMEMBERED
    one, plateau = envelope(), [-0.8, 0.3, -0.3, 0.8] * (REMEMBERED // 4)
    asked(one, *[0.6] * REMEMBERED, *plateau)
    assert all(asked(one, *plateau))
    asked(one, *[0.6] * REMEMBERED)
    assert asked(one, -0.3) == [False]


def test_a_minority_does_not_switch_the_look_at_directions_off() -> None:
    one = envelope()
    asked(one, *[0.6] * REMEMBERED)
    assert asked(one, *[0.6, -1.0, 0.6] * 20) == [True, False, True] * 20


def test_cosines_are_kept_with_a_checkpoint() -> None:
    one, other = envelope(), envelope()
    asked(one, *[0.6] * ENOUGH)
    other.restore(one.state)
    assert asked(other, -0.3) == [False]


def test_defences_that_are_off_find_nothing() -> None:
    one = envelope(*[1.0] * 4, settings=Trust(clip=0, direction=0))
    assert one.weigh(0, seen(1e9, cosine=-1.0), 1.0, probation=True) == 1.0


def test_a_liar_does_not_run_down_the_clock() -> None:
    """A quarter says three rounds ahead: we go one by one. All of them do: we were behind, and catch up."""
    one, own = envelope(), 10
    for number in range(20):
        own = one.believe(own, own + 3 if number > 3 and number % 4 == 3 else own)
    assert own == 30
    for _ in range(9):
        own = one.believe(own, own + 3)
    assert one.believe(own, own + 3) == own + 3
    assert one.believe(own, own + 9) == own + 3, "no further than they are as a rule"
    assert one.believe(own, own - 3) == own + 1
    assert envelope(settings=Trust(clip=0)).believe(5, 9) == 9


def test_a_history_of_other_fragments_is_left_aside() -> None:
    one = envelope(1.0)
    one.restore(Known())
    assert one.state.distances == ((1.0,),)


# --- on replicas


def message(replica: Replica, outer: Outer) -> torch.Tensor:
    change = (replica.theta - replica.phi).double()
    return outer.beta * change + outer.gamma * replica.phi.double()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8", "delta4"])
def test_the_outer_step_of_a_clipped_partner_is_the_formula(tmp_path: Path, codec: Codec, blocking: bool) -> None:
    """Against float64 by hand: late or not, each partner by its own radius, the radius in its fragment alone."""
    settings = Outer(alpha=0.5, beta=0.7, gamma=0.75, rounds=100, fragments=2, blocking=blocking)
    sealed = sealed_run(codec=codec, outer=settings, trust=Trust(clip=0.2))
    nodes = [make_replica(sealed, tmp_path, name) for name in ("alice", "bob")]
    boxes = [torch.zeros(nodes[0].plan.box_size, dtype=torch.uint8) for _ in nodes]
    for number, node in enumerate(nodes):
        for _ in range(4 + 4 * number):  # so that bob moved further and believes more
            node.step()
        node.snapshot(boxes[number], Subject(1))
    span = nodes[0].plan.fragments[1].span
    sent = [message(node, settings)[span] for node in nodes]
    distance = (sent[0] - sent[1]).norm().item()
    weights, expected = [], []
    for index, node in enumerate(nodes):
        change = settings.beta * (node.theta - node.phi)[span].double().norm().item()
        weights.append(0.2 * 2 * change / distance)
        mean = sent[index] + weights[-1] * (sent[1 - index] - sent[index]) / 2
        expected.append(settings.alpha * node.delta[span].double() + mean - settings.gamma * node.phi[span].double())
    assert weights[0] < weights[1] < 1
    if not blocking:
        nodes[0].step()
    for index, node in enumerate(nodes):
        found = node.inspect(boxes[index], boxes[1 - index])
        assert found.weight == pytest.approx(weights[index], rel=1e-6 if codec == "float32" else 0.02)
    for index, node in enumerate(nodes):
        applied = node.apply(boxes[index], boxes[1 - index], 0)
        assert applied.weight == pytest.approx(weights[index], rel=0.02)
        error = (node.delta[span].double() - expected[index]).norm().item() / distance
        assert error <= {"float32": 1e-5, "bfloat16": 0.05, "modulo8": 0.05, "delta4": 0.1}[codec]
        assert [len(known) for known in node.envelope.state.distances] == [0, 1]


def test_with_defences_off_or_not_met_the_step_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    after = []
    for trust in (Trust(clip=0, direction=0), Trust(clip=100, direction=1)):
        sealed = sealed_run(trust=trust)
        nodes = [make_replica(sealed, tmp_path, name) for name in ("alice", "bob")]
        boxes = [torch.zeros(nodes[0].plan.box_size, dtype=torch.uint8) for _ in nodes]
        for node, box in zip(nodes, boxes, strict=True):
            node.step()
            node.snapshot(box, Subject())
        assert nodes[0].inspect(*boxes).weight == 1.0
        nodes[0].apply(*boxes, 0)
        after.append((nodes[0].phi, nodes[0].delta))
    assert torch.equal(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])


def test_the_direction_is_that_of_the_partner_s_step_beside_our_change(tmp_path: Path) -> None:
    settings = Outer(rounds=100)
    nodes = [make_replica(sealed_run(outer=settings, codec="float32"), tmp_path, name) for name in ("alice", "bob")]
    boxes = [torch.zeros(nodes[0].plan.box_size, dtype=torch.uint8) for _ in nodes]
    for node, box in zip(nodes, boxes, strict=True):
        for _ in range(3):
            node.step()
        node.snapshot(box, Subject())
    alice, bob = nodes
    alice.inspect(*boxes)
    change = (alice.theta - alice.phi).double()
    step = message(bob, settings) - settings.gamma * alice.phi.double()
    expected = torch.dot(step, change) / (step.norm() * change.norm())
    assert alice._out().measured.cosine == pytest.approx(expected.item(), abs=1e-5)
    assert expected > 0.3


def test_a_refused_partner_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """A sign flip: the bytes of a partner that went our way backwards."""
    alice = make_replica(sealed_run(trust=Trust(direction=0.25)), tmp_path, "alice")
    alice.envelope.restore(Known(cosines=(0.5,) * ENOUGH))
    own, bad = (torch.zeros(alice.plan.box_size, dtype=torch.uint8) for _ in range(2))
    for _ in range(3):
        alice.step()
    forward = alice.theta.clone()
    alice.theta.copy_(2 * alice.phi - forward)
    alice.snapshot(bad, Subject())
    alice.theta.copy_(forward)
    alice.snapshot(own, Subject())
    before = alice.phi.clone()
    with pytest.raises(MisdirectedTensorError):
        alice.inspect(own, bad)
    alice.discard()
    assert torch.equal(alice.phi, before)
    assert alice.envelope.state.distances == ((),)


def test_what_is_known_of_distances_is_in_the_checkpoint(tmp_path: Path) -> None:
    sealed = sealed_run()
    alice, bob = make_replica(sealed, tmp_path, "alice"), make_replica(sealed, tmp_path, "bob")
    boxes = [torch.zeros(alice.plan.box_size, dtype=torch.uint8) for _ in range(2)]
    for _ in range(3):
        for replica, box in zip((alice, bob), boxes, strict=True):
            replica.step()
            replica.snapshot(box, Subject())
        for replica, own, other in ((alice, *boxes), (bob, *boxes[::-1])):
            replica.inspect(own, other)
            replica.apply(own, other, 0)
    assert [len(known) for known in alice.envelope.state.distances] == [3]
    assert all(math.isfinite(one) and one > 0 for one in alice.envelope.state.distances[0])
    alice.save(tmp_path / "c", "alice")
    found = checkpoint.find(tmp_path / "c", sealed.run_id)
    assert found.path is not None
    assert found.state is not None
    resumed = make_replica(sealed, tmp_path, "alice")
    resumed.restore(found.path, found.state)
    assert resumed.envelope.state == alice.envelope.state
