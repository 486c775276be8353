"""Weights to messages and back: what is sent, what both sides make of it, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nolocod.errors import RejectedTensorError, TrainerError
from nolocod.outer.codec import box_size, modulo
from nolocod.outer.codec.base import HEADER, Noise, Records
from nolocod.outer.codec.blocks import BLOCK, PIECE, Block, fragments_of, is_set, pieces, to_bitmap, together
from nolocod.outer.codec.fused import Fused
from nolocod.proto.types import CHUNK_SIZE, Description, describe
from nolocod.run.manifest import CODEC_BYTES, Codec, Outer
from nolocod.trainer.capture import Capture, Plan, Weights
from nolocod.trainer.made_on import COMPILED, PROCESSOR

CODECS: tuple[Codec, ...] = ("float32", "bfloat16", "modulo8", "modulo4")
MODULO: tuple[Codec, ...] = ("modulo8", "modulo4")
SIZES = (1500, 3, BLOCK + 4000, 130)
PHI = 0.02
CHANGE = 1e-3
OUTER = Outer(alpha=0.5, beta=0.7, gamma=0.9)
many = settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operations, or by our own loops where there are some."""
    monkeypatch.setattr(Node, "made_on", COMPILED if request.param == "compiled" else PROCESSOR)


class Node:
    """One replica's tensors, boxes and capture, without a model."""

    made_on = PROCESSOR

    def __init__(self, codec: Codec, seed: int, outer: Outer = OUTER, phi: torch.Tensor | None = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        fragments = fragments_of(SIZES, outer.turns)
        self.plan = Plan(codec, outer, fragments)
        slow = torch.randn(sum(SIZES), generator=self.generator) * PHI if phi is None else phi.clone()
        self.weights = Weights.of(slow.clone(), slow, torch.zeros_like(slow), fragments, made_on=self.made_on)
        size = box_size(codec, fragments)
        self.outbox, self.inbox = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def train(self, scale: float = CHANGE) -> None:
        noise = torch.randn(self.weights.theta.shape, generator=self.generator)
        self.weights.theta.add_(noise, alpha=scale)

    def blocks(self) -> tuple[Block, ...]:
        return self.plan.fragments[0].blocks

    def write(self, seed: int) -> Description:
        self.capture = Capture(self.plan, self.weights, 0, seed)
        self.capture.keep()
        return self.capture.write(self.outbox)

    def apply(self, skipped: bytes, *, trained_on: bool) -> None:
        self.capture.step(self.inbox, skipped)
        self.capture.merge(trained_on=trained_on)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """beta Delta^ of this node and of its partner as this node decodes them, the whole fragment, float64."""
        own, theirs = [], []
        desk = self.capture._near
        for rows in self.capture._rows:
            records = Records(self.inbox, self.capture._records[rows.indices])
            phi, kept = desk.take(rows)
            s = desk.coder.exact(phi, desk.coder.change(kept))
            own.append(desk.coder.own(rows, s).flatten().double())
            decoded, right = desk.coder.other(rows, s, records, check=True)
            assert all(right)
            theirs.append(decoded.flatten().double())
        return torch.cat(own), torch.cat(theirs)

    @property
    def slow(self) -> torch.Tensor:
        """gamma phi, float64."""
        return OUTER.gamma * self.weights.phi.double()


def pair(codec: Codec, seed: int, outer: Outer = OUTER) -> tuple[Node, Node]:
    """Two nodes whose slow weights differ a little, and that know how far they are apart."""
    alice = Node(codec, seed, outer)
    bob = Node(codec, seed + 1, outer, alice.weights.phi)
    for node in (alice, bob):
        node.weights.phi.add_(torch.randn(sum(SIZES), generator=node.generator), alpha=CHANGE)
        node.weights.theta.copy_(node.weights.phi)
        for distances in node.weights.distance:
            distances.fill_(10 * CHANGE)
        node.train()
    return alice, bob


def swap(alice: Node, bob: Node) -> None:
    alice.inbox.copy_(bob.outbox)
    bob.inbox.copy_(alice.outbox)


def exchange(alice: Node, bob: Node, seed: int = 0) -> tuple[bytes, bytes]:
    """A whole exchange; both apply. Returns the blocks that each skipped."""
    for number, node in enumerate((alice, bob)):
        node.write(2 * seed + number)
    swap(alice, bob)
    a, b = (node.capture.inspect(node.inbox) for node in (alice, bob))
    alice.apply(b, trained_on=False)
    bob.apply(a, trained_on=False)
    return a, b


def bound(node: Node, change: torch.Tensor) -> torch.Tensor:
    """The bound that docs/codecs.md states of |Delta^ - Delta|, for each element."""
    beta = OUTER.beta
    s = (beta * change + OUTER.gamma * node.weights.phi).abs()
    float_rounding = 4e-7 * (s / beta + change.abs())
    match node.plan.codec:
        case "float32":
            return float_rounding
        case "bfloat16":
            return float_rounding + 2**-7 * (s / beta + change.abs()) * 1.01
        case "modulo8" | "modulo4" as codec:
            out = float_rounding + 2**-7 * change.abs() * 1.01
            for block in node.capture.fragment.blocks:
                step = node.capture._bounds[block.index] / (128 if codec == "modulo8" else 8)
                out[block.span] += step / 2 / beta if step else 2**-7 * s[block.span] / beta * 1.01
            return out


# --- what is sent, and what is made of it


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 1 << 30))
@many
def test_both_read_the_same_within_the_bound_and_the_mean_of_delta_is_kept(codec: Codec, seed: int) -> None:
    alice, bob = pair(codec, seed)
    nodes = (alice, bob)
    for number, node in enumerate(nodes):
        node.weights.delta.normal_(0, CHANGE, generator=node.generator)
        node.write(seed + number)
    swap(alice, bob)
    assert [node.capture.inspect(node.inbox) for node in nodes] == [b"", b""]
    assert nodes[0].capture.spread == pytest.approx(nodes[1].capture.spread, rel=1e-6)
    sent = []
    for node, other in (nodes, nodes[::-1]):
        own, _ = node.read()
        _, read = other.read()
        assert torch.equal(own, read)
        sent.append((own - node.slow) / OUTER.beta)
        change = node.weights.theta - node.weights.phi
        assert ((sent[-1] - change).abs() <= bound(node, change)).all()
    deltas = [OUTER.alpha * node.weights.delta.double() + OUTER.beta * one for node, one in zip(nodes, sent, strict=True)]
    for node in nodes:
        node.apply(b"", trained_on=False)
    mean = (alice.weights.delta.double() + bob.weights.delta.double()) / 2
    assert (mean - sum(deltas) / 2).abs().max() <= 3e-8


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("codec", CODECS)
def test_what_was_sent_is_made_again_without_the_outbox(codec: Codec) -> None:
    pairs = [pair(codec, 3), pair(codec, 3)]
    for number, nodes in enumerate(pairs):
        for index, node in enumerate(nodes):
            description = node.write(index)
            assert description == describe(memoryview(node.outbox.numpy())[: description.size])
        swap(*nodes)
        if number:
            nodes[0].outbox.fill_(255)
        skipped = nodes[0].capture.inspect(nodes[0].inbox)
        nodes[0].apply(skipped, trained_on=False)
    assert torch.equal(pairs[0][0].weights.phi, pairs[1][0].weights.phi)


@pytest.fixture(params=["near", "far"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theta lies in main memory, or is treated as if it lay on a GPU."""
    monkeypatch.setattr(Weights, "is_far", property(lambda _: request.param == "far"))


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_theta_has_its_own_part_at_once_and_the_partner_s_when_it_comes(codec: Codec, weight: float) -> None:
    """Against float64 by hand, beside a twin that does not train meanwhile. Block 2 is one that the partner skipped."""
    pairs = [pair(codec, 5), pair(codec, 5)]
    (alice, _), (waiting, _) = pairs
    for nodes in pairs:
        for number, node in enumerate(nodes):
            node.weights.delta.normal_(0, CHANGE, generator=node.generator)
            node.write(number)
        swap(*nodes)
    theta, phi, delta = (one.double() for one in (alice.weights.theta, alice.weights.phi, alice.weights.delta))
    change = theta - phi
    rounding = 2e-8 + (0 if codec == "float32" else 2**-7) * change.abs()
    alice.capture.start()
    own = OUTER.alpha * delta - (1 - OUTER.beta) * change
    assert ((alice.weights.theta - theta - own).abs() <= rounding).all()
    assert torch.equal(alice.weights.phi, waiting.weights.phi)
    assert torch.equal(alice.weights.delta, waiting.weights.delta)

    before = alice.weights.theta.double()
    alice.train()
    trained = alice.weights.theta.double() - before
    assert [node.capture.inspect(node.inbox) for node in (alice, waiting)] == [b"", b""]
    sent, other = alice.read()
    skipped = torch.zeros(len(sent), dtype=torch.bool)
    skipped[alice.blocks()[2].span] = True
    late = torch.where(skipped, 0, weight * (other - sent) / 2)
    exact = OUTER.beta * change + OUTER.gamma * phi
    for node, trained_on in ((alice, True), (waiting, False)):
        node.capture.weight = weight
        node.apply(to_bitmap([2]), trained_on=trained_on)
    assert torch.equal(alice.weights.phi, waiting.weights.phi), "training on changes nothing of the outer step"
    assert torch.equal(alice.weights.delta, waiting.weights.delta)
    mean = torch.where(skipped, exact, sent + late)
    assert ((alice.weights.delta - (OUTER.alpha * delta + mean - OUTER.gamma * phi)).abs() <= rounding).all()
    rounding += (0 if codec == "float32" else 2**-7) * (mean - exact).abs()
    assert ((alice.weights.theta - (theta + own + trained + mean - exact)).abs() <= rounding).all()
    assert torch.equal(waiting.weights.theta, waiting.weights.phi)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("codec", CODECS)
def test_an_exchange_that_fails_leaves_what_training_made(codec: Codec) -> None:
    alice, bob = pair(codec, 5)
    for node in (alice, bob):
        node.weights.delta.normal_(0, CHANGE, generator=node.generator)
        node.write(0)
    before = [one.clone() for one in (alice.weights.theta, alice.weights.phi, alice.weights.delta)]
    alice.capture.take_back()
    assert torch.equal(alice.weights.theta, before[0]), "nothing was added yet"
    coder = alice.capture._near.coder
    scratch = (coder._change._flat.fill_(7), coder._total._flat.fill_(7))
    alice.capture.start()
    assert all((one == 7).all() for one in scratch), "a message may be written meanwhile"
    started = alice.weights.theta.clone()
    alice.capture.start()
    assert torch.equal(alice.weights.theta, started), "it is added once"
    alice.train()
    trained = alice.weights.theta - started
    swap(alice, bob)
    alice.capture.inspect(alice.inbox)
    alice.capture.take_back()
    assert (alice.weights.theta - (before[0] + trained)).abs().max() <= 3e-8
    assert torch.equal(alice.weights.phi, before[1])
    assert torch.equal(alice.weights.delta, before[2])


def test_rounding_to_bfloat16_is_to_a_neighbour_and_right_on_average() -> None:
    block = Block(0, 0, BLOCK, 0)
    value = 1.0 + 2**-7 * 0.3
    rounded = Noise(1).round(torch.full((BLOCK,), value), block, 1)
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.double().mean().item() == pytest.approx(value, abs=5 * 2**-7 * 0.46 / math.sqrt(BLOCK))
    exact = torch.randn(100).bfloat16().float()
    assert torch.equal(Noise(1).round(exact.clone(), block, 0), exact)
    # One element over many seeds, too: the noise of a capture is drawn once and only turned.
    one = [Noise(seed).round(torch.tensor([value]), Block(7, 0, 1, 0), 1).item() for seed in range(400)]
    assert sum(one) / 400 == pytest.approx(value, abs=5 * 2**-7 * 0.46 / 20)


def test_the_rounding_of_a_change_on_a_gpu_is_right_on_average_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "is_far", True)
    alice, _ = pair("modulo8", 3)
    change, kept = (alice.weights.theta - alice.weights.phi).double(), []
    for seed in range(100):
        alice.write(seed)
        kept.append(alice.capture.kept.double())
        assert ((kept[-1] - change).abs() <= 2**-7 * change.abs()).all(), "to a neighbour"
    error = torch.stack(kept).mean(0) - change
    assert error.norm() < 1.5 * 0.41 * 2**-8 * change.norm() / math.sqrt(100)
    assert not torch.equal(kept[0], kept[1])


def test_a_message_begins_as_release_0_1_reads_it() -> None:
    alice, _ = pair("modulo8", 1)
    size = alice.write(0).size
    head = b"nolocod\1" + b"modulo8/1".ljust(16, b"\0") + sum(SIZES).to_bytes(8, "little") + size.to_bytes(8, "little")
    assert bytes(alice.outbox[:HEADER].tolist()) == (head + b"\0\0\1").ljust(HEADER, b"\0")


def test_bytes_per_parameter() -> None:
    sizes = {}
    for codec in CODECS:
        alice, _ = pair(codec, 1)
        sizes[codec] = alice.write(0).size / sum(SIZES)
        assert alice.capture.fragment.size * sizes[codec] <= len(alice.outbox)
    assert sizes == pytest.approx({"float32": 4, "bfloat16": 2, "modulo8": 1, "modulo4": 0.5}, abs=0.01)


@pytest.mark.parametrize(("codec", "kept"), [("float32", 4), ("bfloat16", 2), ("modulo8", 2), ("modulo4", 2)])
def test_what_an_exchange_takes_is_both_boxes_and_the_kept_change(codec: Codec, kept: int) -> None:
    alice, _ = pair(codec, 1, Outer(alpha=0.5, beta=0.7, gamma=0.9, turns=2))
    alice.write(0)
    assert alice.plan.exchange_size - alice.plan.boxes_size == kept * sum(SIZES), "at most: all parts together"
    assert alice.capture.kept.nbytes == kept * alice.capture.fragment.size


def test_captures_share_memory_and_do_not_share_what_they_keep() -> None:
    """To map fresh pages for each takes as long as to write them."""
    alice, _ = pair("modulo8", 1, Outer(alpha=0.5, beta=0.7, gamma=0.9, turns=2))
    both = Capture(alice.plan, alice.weights, 2, 0)
    assert len(both.among) == 2
    where = both.kept.data_ptr()
    for turn in (0, 1):
        alice.train()
        own = Capture(alice.plan, alice.weights, turn, turn)
        own.keep()
        span = own.fragment.span
        change = alice.weights.theta[span] - alice.weights.phi[span]
        assert own.kept.data_ptr() == where
        assert ((own.kept - change).abs() <= 2**-7 * change.abs()).all()


# --- modulo8


@pytest.mark.parametrize("codec", MODULO)
@pytest.mark.parametrize("seed", range(4))
def test_where_one_side_sends_a_byte_or_less_and_the_other_two_both_read_the_same(seed: int, codec: Codec) -> None:
    alice, bob = pair(codec, seed)
    bob.weights.distance.fill_(math.nan)
    for number, node in enumerate((alice, bob)):
        node.outbox.fill_(77)
        node.write(number)
    assert any(alice.capture._bounds), "in a byte, or half of one"
    assert not any(bob.capture._bounds)
    swap(alice, bob)
    for node in (alice, bob):
        assert node.capture.inspect(node.inbox) == b""
    for one, other in ((alice, bob), (bob, alice)):
        assert torch.equal(one.read()[0], other.read()[1])


def test_steps_are_never_finer_than_float32_can_count() -> None:
    alice, _ = pair("modulo8", 3)
    alice.weights.theta.copy_(alice.weights.phi)
    alice.weights.distance.fill_(1e-15)
    alice.write(0)
    for block, bound in zip(alice.blocks(), alice.capture._bounds, strict=True):
        largest = OUTER.gamma * alice.weights.phi[block.span].abs().max().item()
        assert not bound or bound == pytest.approx(largest * 128 / modulo.EXACT, rel=1e-5)
    assert any(alice.capture._bounds)


@pytest.mark.parametrize("codec", MODULO)
def test_loops_and_torch_mean_the_same_message_to_the_last_bit(codec: Codec) -> None:
    """Where a block's record is made by one, and read by the other."""
    alice, _ = pair(codec, 3)
    alice.capture = Capture(alice.plan, replace(alice.weights, made_on=COMPILED), 0, 0)
    alice.capture.keep()
    coder = alice.capture._near.coder
    assert isinstance(coder, Fused)
    for rows in alice.capture._rows:
        if rows.shape[1] >= modulo.SMALLEST:
            phi, kept = alice.capture._near.take(rows)
            coder.encode(rows, phi, kept, alice.outbox)
            assert torch.equal(torch.from_numpy(coder._memory[: rows.shape[1]]), coder.exact(phi, coder.change(kept))[-1])


@pytest.mark.parametrize("codec", MODULO)
def test_what_fills_a_record_up_tells_nothing_of_what_was_there_before(codec: Codec) -> None:
    messages = []
    for before in (0, 255):
        alice, _ = pair(codec, 3)
        alice.outbox.fill_(before)
        size = alice.write(0).size
        messages.append(alice.outbox[:size].clone())
    assert torch.equal(*messages)


@pytest.mark.parametrize("codec", MODULO)
def test_a_block_beyond_its_bound_is_stepped_alone_by_both_and_travels_as_bfloat16_next_time(codec: Codec) -> None:
    alice, bob = pair(codec, 9)
    far = alice.blocks()[2]
    alice.weights.theta[far.span] += 0.05 * PHI  # where bob does not expect it: more than known, and it did not move
    alice.weights.phi[far.span] += 0.05 * PHI
    for node in (alice, bob):
        node.weights.distance[far.index] = CHANGE / 100
    expected = []
    for weights in (alice.weights, bob.weights):
        expected.append((OUTER.beta * (weights.theta - weights.phi)[far.span], weights.phi[far.span].clone()))
    a, b = exchange(alice, bob)
    assert a == b == to_bitmap([far.index])
    for node, (delta, phi) in zip((alice, bob), expected, strict=True):
        assert (node.weights.delta[far.span] - delta).abs().max() <= 2**-7 * delta.abs().max() + 1e-8
        assert torch.equal(node.weights.phi[far.span], phi + node.weights.delta[far.span])
        assert node.weights.distance.isnan().tolist() == [index == far.index for index in range(len(node.blocks()))]
        node.train()
    smaller = [node.write(4).size for node in (alice, bob)]
    assert min(smaller) > CODEC_BYTES[codec] * (sum(SIZES) - far.size) + 2 * far.size, "two bytes for each of its values"
    swap(alice, bob)
    assert alice.capture.inspect(alice.inbox) == b""


def test_a_block_that_only_one_side_could_decode_is_stepped_alone_by_both() -> None:
    alice, bob = pair("modulo8", 11)
    for number, node in enumerate((alice, bob)):
        node.write(number)
    swap(alice, bob)
    for node, told in ((alice, to_bitmap([1])), (bob, b"")):
        assert node.capture.inspect(node.inbox) == b""
        node.apply(told, trained_on=False)
    assert [node.weights.distance.isnan().tolist().count(True) for node in (alice, bob)] == [1, 0]
    one = alice.blocks()[1]
    assert not torch.equal(alice.weights.phi[one.span], bob.weights.phi[one.span])


def test_half_bytes_are_of_two_values_that_follow_each_other_the_first_in_the_lower_bits() -> None:
    """Against a sum by hand, as another implementation would read the record."""
    alice, bob = pair("modulo4", 21)
    for number, node in enumerate((alice, bob)):
        node.write(number)
    swap(alice, bob)
    assert alice.capture.inspect(alice.inbox) == b""
    block, (_, theirs) = alice.blocks()[0], alice.read()
    record = alice.inbox[alice.capture._records[0]]
    _, bound, _ = modulo.read_record(record)
    nibbles = [value for one in record[modulo.ALIGN :].tolist() for value in (one & 15, one >> 4)][: block.size]
    wanted = (theirs[block.span] / (bound / 8)).round().long() & 15
    assert nibbles == wanted.tolist()


def test_without_known_distances_the_first_message_is_bfloat16() -> None:
    alice, bob = pair("modulo8", 13)
    for node in (alice, bob):
        node.weights.forget()
    exchange(alice, bob)
    sizes = [node.write(0).size / sum(SIZES) for node in (alice, bob)]
    assert sizes == [pytest.approx(1, abs=0.01)] * 2


@pytest.mark.parametrize(("times", "in_a_byte"), [(10.0, True), (20.0, False)])
def test_partners_travel_in_a_byte_unless_they_are_farther_apart_than_all_that_train(times: float, in_a_byte: bool) -> None:
    """At the high rates of a run's first half the bound is four to ten times the weights: that took two bytes for nothing."""
    alice, _ = pair("modulo8", 14)
    alice.weights.distance.fill_(times * OUTER.gamma * PHI / modulo.Modulo8.MARGIN)
    assert alice.write(0).size / sum(SIZES) == pytest.approx(1 if in_a_byte else 2, abs=0.01)


@pytest.mark.parametrize(("weight", "learnt"), [(1.0, 1.0), (0.16, 1.0), (1e-4, 0.04)])
def test_a_distance_is_learnt_whole_unless_the_partner_is_far_beyond_the_clip_radius(weight: float, learnt: float) -> None:
    alice, bob = pair("modulo8", 15)
    alice.weights.forget()
    alice.write(0)
    bob.write(1)
    swap(alice, bob)
    alice.capture.inspect(alice.inbox)
    own, theirs = alice.read()
    alice.capture.weight = weight
    alice.apply(b"", trained_on=False)
    for block, known in zip(alice.blocks(), alice.weights.distance.tolist(), strict=True):
        assert known == pytest.approx(learnt * (theirs - own)[block.span].abs().max().item(), rel=1e-3)


# --- what is refused


@pytest.mark.parametrize("codec", CODECS)
@given(position=st.integers(0, 1 << 30), value=st.integers(0, 255), length=st.sampled_from([1, 4, 4096]))
@many
def test_hostile_bytes_are_rejected_or_read_never_worse(codec: Codec, position: int, value: int, length: int) -> None:
    alice, bob = pair(codec, 31)
    alice.write(0)
    size = bob.write(1).size
    swap(alice, bob)
    start = position % size if length > 1 else position % 200
    alice.inbox[start : start + length] = value
    try:
        skipped = alice.capture.inspect(alice.inbox)
    except RejectedTensorError:
        return
    assert math.isfinite(alice.capture.spread)
    alice.apply(skipped, trained_on=False)
    assert alice.weights.phi.isfinite().all()


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_of_another_kind_is_rejected(codec: Codec) -> None:
    alice, bob = pair(codec, 33)
    alice.write(0)
    bob.write(1)
    bad = {
        "does not begin": lambda box: box.zero_(),
        "another kind": lambda box: box[8:12].zero_(),  # the codec's name
        "where": lambda box: box[24:32].fill_(1),  # how many elements
    }
    if codec not in MODULO:
        bad["and it says"] = lambda box: box[32:34].fill_(0)  # how many bytes
    for says, damage in bad.items():
        swap(alice, bob)
        damage(alice.inbox)
        with pytest.raises(RejectedTensorError, match=says):
            alice.capture.inspect(alice.inbox)
    with pytest.raises(TrainerError, match="without an inspection"):
        alice.apply(b"", trained_on=False)


@pytest.mark.parametrize(("bound", "mode"), [(math.nan, 2), (math.inf, 2), (-1.0, 2), (0.0, 2), (1.0, 0), (1.0, 3)])
def test_a_modulo_record_with_an_unknown_mode_or_bound_is_rejected(bound: float, mode: int) -> None:
    alice, bob = pair("modulo8", 35)
    alice.write(0)
    bob.write(1)
    swap(alice, bob)
    alice.inbox[HEADER] = mode
    alice.inbox[HEADER + 4 : HEADER + 8].view(torch.float32)[0] = bound
    with pytest.raises(RejectedTensorError, match="block 0 has the mode"):
        alice.capture.inspect(alice.inbox)


@pytest.mark.usefixtures("where")
def test_weights_that_are_not_finite_are_our_own_fault() -> None:
    alice, _ = pair("modulo8", 37)
    alice.weights.theta[-1] = math.inf
    with pytest.raises(TrainerError, match="not finite"):
        alice.write(0)


# --- fragments, blocks, bit maps


@pytest.mark.parametrize("far", [True, False])
def test_a_fragment_is_gone_through_once(far: bool) -> None:
    for fragment in fragments_of((5, 3 * PIECE + 7, BLOCK), 2):
        spans = fragment.spans(far=far)
        assert [spans[0].start, *(one.stop for one in spans)] == [*(one.start for one in spans), fragment.stop]
        assert spans[0].start == fragment.start
        assert all(one.stop - one.start <= (PIECE if far else BLOCK) for one in spans)
        assert len(spans) < 4 if far else len(spans) > 12


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=30), st.data())
def test_fragments_are_of_one_size_and_together_the_model(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(64, sum(sizes))))
    fragments = fragments_of(sizes, count)
    assert [fragment.start for fragment in fragments] == [0, *(fragment.stop for fragment in fragments[:-1])]
    assert (len(fragments), fragments[-1].stop) == (count, sum(sizes))
    assert {fragment.size for fragment in fragments} <= {sum(sizes) // count, -(-sum(sizes) // count)}
    inside = set(accumulate(sizes[:-1]))
    whole = together(fragments)
    assert [block.span for block in whole.blocks] == [block.span for fragment in fragments for block in fragment.blocks]
    for fragment in (*fragments, whole):
        assert not any(block.start < end < block.stop for block in fragment.blocks[:100] for end in inside)
        assert [block.start for block in fragment.blocks] == [fragment.start, *(block.stop for block in fragment.blocks[:-1])]
        assert fragment.blocks[-1].stop == fragment.stop
        assert all(block.size <= BLOCK and block.local == block.start - fragment.start for block in fragment.blocks)
        assert [block.index for block in fragment.blocks] == list(range(len(fragment.blocks)))


@given(st.sets(st.integers(0, 200)))
def test_bit_maps(indices: set[int]) -> None:
    bitmap = to_bitmap(indices)
    assert {index for index in range(300) if is_set(bitmap, index)} == indices
    assert bitmap == b"" or bitmap[-1] != 0


def test_pieces_cover_everything() -> None:
    million = 1 << 20
    assert [(piece.start, piece.stop) for piece in pieces(million + 3)] == [(0, million), (million, million + 3)]


def test_chunks_are_hashed_as_the_network_cuts_them() -> None:
    outer = Outer()
    node = Node("float32", 0, outer)
    node.plan = Plan("float32", outer, fragments_of((1_400_000,), 1))
    flat = torch.randn(1_400_000)
    node.weights = Weights.of(flat, flat.clone(), flat.clone(), node.plan.fragments)
    node.outbox = torch.zeros(box_size("float32", node.plan.fragments), dtype=torch.uint8)
    description = node.write(0)
    assert description.size == len(node.outbox) > 2 * CHUNK_SIZE
    assert description == describe(memoryview(node.outbox.numpy()))
