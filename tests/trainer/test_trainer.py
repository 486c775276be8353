"""The trainer's parts in one process: replica, schedule, model, pipe and boxes."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import DeviceError, ModelTooLargeError, RejectedTensorError, TrainerError
from nolocod.proto.types import AHEAD_CHUNKS, CHUNK_SIZE, parts_in, whose_turn
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, Outer
from nolocod.studies.lab.methods import Method
from nolocod.studies.lab.multi_replica import MultiReplica
from nolocod.trainer import checkpoint, muon, pipe
from nolocod.trainer.boxes import SharedBox, anonymous_file, outbox_offset
from nolocod.trainer.inner import learning_rate, recent_rate
from nolocod.trainer.model import build, pick_device, read_config
from nolocod.trainer.taken import Taken
from tests.bench.bare_loop import tokens_per_second
from tests.support.trainer_parts import MODEL, as_donated, dump, make_replica, save, sealed_run, write_text

if TYPE_CHECKING:
    from nolocod.trainer.replica import Replica


def boxes(replica: Replica) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(replica.plan.box_size, dtype=torch.uint8), torch.empty(replica.plan.box_size, dtype=torch.uint8)


def train(replica: Replica, steps: int) -> None:
    for _ in range(steps):
        replica.step()


def pair(folder: Path, **changes: object) -> tuple[Replica, Replica]:
    sealed = sealed_run(**changes)
    alice, bob = make_replica(sealed, folder, "alice"), make_replica(sealed, folder, "bob")
    train(alice, 4)
    train(bob, 3)
    return alice, bob


# --- replica


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "modulo8"])
def test_partners_leave_an_exchange_with_equal_weights(tmp_path: Path, codec: str) -> None:
    alice, bob = pair(tmp_path, codec=codec)
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    distance = (alice.theta - bob.theta).norm().item()
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 0)
    spread = alice.inspect(b_out).spread
    assert spread == bob.inspect(a_out).spread == pytest.approx(distance, rel=1e-4 if codec == "float32" else 0.2)
    assert spread > 0
    applied = alice.apply(b_out, run_round=5)
    bob.apply(a_out, run_round=0)
    assert (applied.round, applied.inner_steps, bob.standing.round) == (5, 4, 1)
    assert torch.equal(alice.phi, bob.phi)
    assert torch.equal(alice.delta, bob.delta)
    assert torch.equal(alice.theta, alice.phi)
    assert alice.steps_since_outer == 0


def test_where_beta_is_not_gamma_the_spread_counts_what_was_learned_beta_over_gamma_times(tmp_path: Path) -> None:
    alice, bob = pair(tmp_path, codec="float32", outer=Outer(alpha=0.5, beta=1.0, gamma=0.75))
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    learned = (alice.theta - bob.theta).norm().item()  # both began with the same slow weights
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 0)
    assert alice.inspect(b_out).spread == pytest.approx(learned / 0.75, rel=1e-4)


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
def test_what_is_trained_during_an_exchange_is_kept(tmp_path: Path, codec: str) -> None:
    alice, bob = pair(tmp_path, codec=codec)
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 0)
    change = alice.theta - alice.phi
    alice.train_on()
    started = alice.theta.clone()
    train(alice, 3)
    progress = alice.theta - started
    alice.inspect(b_out)
    applied = alice.apply(b_out, 0)
    assert applied.inner_steps == 4
    assert alice.steps_since_outer == 3
    assert progress.abs().max() > 1e-3
    rounding = 0 if codec == "float32" else 2**-7 * change.abs().max()  # of the change as it is kept
    assert (alice.theta - (alice.phi + progress)).abs().max() <= 1e-6 + rounding


def test_the_first_inner_step_after_a_capture_begins_with_its_own_part(tmp_path: Path) -> None:
    nodes = [make_replica(sealed_run(), tmp_path, "alice") for _ in range(3)]
    for node in nodes:
        train(node, 2)
    for node in nodes[:2]:
        node.prepare(boxes(node)[0], 0)
    nodes[0].train_on()
    for node in nodes:
        node.step()
    assert torch.equal(nodes[0].theta, nodes[1].theta)
    assert not torch.equal(nodes[0].theta, nodes[2].theta)


def test_fragments_are_merged_in_turn_the_one_that_waited_longest_first(tmp_path: Path) -> None:
    inner = Inner(steps=12, batch=2, sequence=32)
    alice, bob = pair(tmp_path, codec="bfloat16", inner=inner, outer=Outer(rounds=100, turns=3))
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    taken = []
    for number in range(4):
        fragment = alice.subject
        taken.append(fragment)
        span = alice.plan.fragments[fragment].span
        others = torch.ones(alice.layout.size, dtype=torch.bool)
        others[span] = False
        before = alice.theta.clone(), alice.phi.clone()
        assert alice.prepare(a_out, fragment).size < 2 * alice.layout.size / 2, "a message is about one fragment"
        bob.prepare(b_out, fragment)
        steps = alice.steps_since_outer
        alice.inspect(b_out)
        bob.inspect(a_out)
        if number == 1:
            train(alice, 2)
            before = alice.theta.clone(), alice.phi.clone()
        applied = alice.apply(b_out, 0)
        bob.apply(a_out, 0)
        assert (applied.round, applied.inner_steps) == (number + 1, steps)
        assert torch.equal(alice.phi[span], bob.phi[span])
        assert torch.equal(alice.theta[others], before[0][others])
        assert torch.equal(alice.phi[others], before[1][others])
        train(alice, 4)
        train(bob, 4)
    assert taken == [0, 1, 2, 0]
    assert alice.ages == [4, 14, 8]
    assert alice.solo().inner_steps == 4
    assert alice.ages == [4, 0, 8], "the solo step is about the one that has waited longest"


def test_whose_turn_it_is() -> None:
    def told(*ages: int, count: int = 1) -> range:
        return parts_in(whose_turn(ages, count), len(ages))

    assert told(20, 15, 10, 5) == range(1)
    assert told(10, 5, 20, 15) == range(2, 3), "the one that has waited longest"
    assert told(14, 16, 18, 20) == range(3, 4), "the end of the model"
    assert told(25, 25, 25, 25, count=2) == range(2), "the first, where all have waited as long"
    assert told(26, 21, 16, 11, count=3) == range(3)
    assert told(12, 3, 9, 11, count=2) == range(2, 4), "which a partner's turn parted from the one that has waited longest"
    assert told(26, 12, 16, 11, count=4) == range(4)


def test_a_fragment_of_another_number_is_refused(tmp_path: Path) -> None:
    alice, _ = pair(tmp_path)
    with pytest.raises(RejectedTensorError, match="fragment 1"):
        alice.prepare(boxes(alice)[0], 1)


def test_turns_that_are_due_at_once_are_one_outer_step(tmp_path: Path) -> None:
    alice, bob = pair(tmp_path, codec="float32", outer=Outer(rounds=100, turns=4))
    assert alice.manifest.inner.steps == 1
    assert parts_in(whose_turn(alice.ages, 4), 4) == range(4), "four turns went by"
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    subject = 1 + 4  # two parts from the second on
    start, stop = alice.plan.fragments[1].start, alice.plan.fragments[2].stop
    expected = (alice.theta + bob.theta)[start:stop].mul(0.35) + (alice.phi * 0.3)[start:stop]
    alice.prepare(a_out, subject)
    bob.prepare(b_out, subject)
    before = alice.phi.clone()
    alice.inspect(b_out)
    applied = alice.apply(b_out, 0)
    assert (applied.round, alice.ages) == (2, [4, 0, 0, 4])
    torch.testing.assert_close(alice.phi[start:stop], expected)
    assert torch.equal(alice.phi[:start], before[:start])
    assert torch.equal(alice.phi[stop:], before[stop:])
    assert [len(known) for known in alice.clipping.history.distances] == [0, 1, 1, 0]
    assert parts_in(alice.subject, 4) == range(1), "the first of two that have waited as long"
    train(alice, 2)
    assert parts_in(alice.subject, 4) == range(1), "as before"
    assert (alice.solo().round, alice.ages) == (3, [0, 2, 2, 6])
    with pytest.raises(RejectedTensorError, match="fragment"):
        alice.prepare(a_out, 3 + 4)  # two parts from the last on


def test_a_partner_that_did_not_mean_the_same_is_rejected(tmp_path: Path) -> None:
    sealed = sealed_run(codec="modulo8", outer=Outer(turns=2))
    alice, bob = make_replica(sealed, tmp_path, "alice"), make_replica(sealed, tmp_path, "bob")
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 1)
    with pytest.raises(RejectedTensorError, match="another kind"):
        alice.inspect(b_out)


def test_replicas_exchange_with_every_codec(tmp_path: Path) -> None:
    manifest = sealed_run(data=Data(), inner=Inner(steps=4, batch=2, sequence=32), outer=Outer(rounds=3)).manifest
    manifest = msgspec.structs.replace(manifest, owner="")
    (tmp_path / "cache").mkdir()
    halves = msgspec.structs.replace(manifest, outer=Outer(rounds=3, turns=2))
    plain, again = (MultiReplica(manifest, Method("plain", "pairs"), 2, tmp_path / "cache").run()[-1] for _ in range(2))
    late = MultiReplica(halves, Method("late", "pairs", codec="modulo8"), 2, tmp_path / "cache").run(late=1)[-1]
    assert plain == again
    assert late.averaged == pytest.approx(plain.averaged, rel=0.05)
    assert late.averaged != plain.averaged


def started(replica: Replica) -> torch.Tensor:
    """Capture and train on; returns theta as it would be without the capture."""
    before = replica.theta.clone()
    replica.delta.normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    replica.prepare(boxes(replica)[0], 0)
    replica.train_on()
    added = replica.theta - before
    assert added.abs().max() > 1e-3
    train(replica, 2)
    return replica.theta - added


@pytest.mark.parametrize("codec", ["float32", "modulo8"])
@pytest.mark.parametrize("then", ["discard", "next capture", "solo", "adopt", "checkpoint"])
def test_what_follows_a_capture_that_came_to_nothing_begins_with_what_training_made(
    tmp_path: Path, codec: str, then: str
) -> None:
    alice, other = pair(tmp_path, codec=codec)
    trained = started(alice)
    phi, delta = alice.phi.clone(), alice.delta.clone()
    match then:
        case "discard":
            alice.discard()
        case "next capture":
            alice.prepare(boxes(alice)[0], 0)
        case "solo":
            alice.solo()
            phi += 0.5 * delta + 0.7 * (trained - phi)
            assert (alice.phi - phi).abs().max() <= 1e-6
            trained = phi
        case "adopt":
            dump(other, tmp_path / "weights")
            alice.adopt(tmp_path / "weights", other.standing)
            assert torch.equal(alice.theta, as_donated(other))
            alice.discard()
            assert torch.equal(alice.theta, as_donated(other)), "the capture is forgotten"
            return
        case "checkpoint":
            again = make_replica(sealed_run(codec=codec), tmp_path, "alice")
            save(alice, tmp_path / "c", "alice")
            found = checkpoint.find(tmp_path / "c", sealed_run(codec=codec).run_id)
            assert found.path is not None
            assert found.state is not None
            again.restore(found.path, found.state)
            alice = again
    assert (alice.theta - trained).abs().max() <= 1e-6
    if then != "solo":
        assert torch.equal(alice.phi, phi)
        assert torch.equal(alice.delta, delta)


def test_a_checkpoint_in_mid_exchange_changes_nothing_of_it(tmp_path: Path) -> None:
    alice, bob = pair(tmp_path, codec="float32")
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 0)
    alice.train_on()
    before = alice.theta.clone()
    train(alice, 2)
    progress = alice.theta - before
    save(alice, tmp_path / "c", "alice")
    alice.inspect(b_out)
    alice.apply(b_out, 0)
    assert (alice.theta - (alice.phi + progress)).abs().max() <= 1e-6


def test_discard_leaves_everything_as_it_was(tmp_path: Path) -> None:
    alice, _ = pair(tmp_path)
    before = (alice.theta.clone(), alice.phi.clone(), alice.delta.clone())
    out, inbox = boxes(alice)
    alice.prepare(out, 0)
    alice.discard()
    assert all(torch.equal(a, b) for a, b in zip(before, (alice.theta, alice.phi, alice.delta), strict=True))
    with pytest.raises(TrainerError, match="without a capture"):
        alice.apply(inbox, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_partner_s_bad_values_are_rejected(tmp_path: Path, bad: float) -> None:
    alice, bob = pair(tmp_path)
    (a_out, _), (b_out, _) = boxes(alice), boxes(bob)
    alice.prepare(a_out, 0)
    bob.prepare(b_out, 0)
    b_out.view(torch.float32)[-1] = bad
    with pytest.raises(RejectedTensorError):
        alice.inspect(b_out)


@pytest.mark.parametrize("codec", ["float32", "modulo8"])
def test_weights_gone_wrong_are_our_own_fault(tmp_path: Path, codec: str) -> None:
    alice, _ = pair(tmp_path, codec=codec)
    alice.theta[3] = math.nan
    with pytest.raises(TrainerError, match="not finite"):
        alice.prepare(boxes(alice)[0], 0)
    alice.step()  # it does not look for a message that was never written


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_many_end_the_training(tmp_path: Path, optimizer: Any) -> None:  # noqa: ANN401 - a literal
    alice, _ = pair(tmp_path, inner=Inner(steps=4, batch=2, sequence=32, optimizer=optimizer))
    alice.report()
    parameter = next(iter(alice.model.parameters()))
    hook = parameter.register_hook(lambda gradient: gradient * math.nan)
    before = alice.theta.clone()
    state = {name: one.clone() for name, one in alice.inner.moments().items()}
    train(alice, 9)
    assert torch.equal(alice.theta, before)
    assert all(torch.equal(one, alice.inner.moments()[name]) for name, one in state.items())
    alice.report()
    alice.step()
    with pytest.raises(TrainerError, match="10 inner steps in a row"):
        alice.report()
    hook.remove()
    alice.step()
    assert not torch.equal(alice.theta, before)
    assert alice.theta.isfinite().all()
    alice.report()


def test_a_step_of_twice_the_tokens_is_that_of_a_run_of_twice_the_accumulation(tmp_path: Path) -> None:
    settings = Inner(steps=4, batch=2, sequence=32)
    enlarged = make_replica(sealed_run(inner=settings), tmp_path)
    enlarged.times = 2
    other = make_replica(sealed_run(inner=msgspec.structs.replace(settings, accumulation=2)), tmp_path)
    for replica in (enlarged, other):
        train(replica, 3)
    assert torch.equal(enlarged.theta, other.theta)
    assert enlarged.standing.tokens == other.standing.tokens == 3 * 2 * 2 * 32


def test_gradients_are_clipped_all_together(tmp_path: Path) -> None:
    """By both optimizers' first states, which are the clipped gradients times 0.1 and 0.05."""
    alice = make_replica(sealed_run(inner=Inner(steps=4, batch=2, sequence=32, optimizer="muon", clip=0.01)), tmp_path)
    alice.step()
    scale = {"exp_avg": 0.1, "momentum": 1 - muon.MOMENTUM}
    parts = [(name.split(".")[0], one) for name, one in alice.inner.moments().items()]
    norms = [one.norm().item() / scale[kind] for kind, one in parts if kind in scale]
    assert math.hypot(*norms) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_inner_steps_are_those_of_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:  # noqa: ANN401 - a literal
    """The same model, data and settings in a loop written by hand, two micro-batches per step; rows as Muon leaves them."""
    monkeypatch.setattr(muon, "_MEMORY", 1.0)
    sealed = sealed_run(
        inner=Inner(steps=4, batch=2, accumulation=2, sequence=32, optimizer=kind, learning_rate=3e-3, clip=0.5)
    )
    ours, other = make_replica(sealed, tmp_path), make_replica(sealed, tmp_path)
    train(ours, 6)
    model, inner = other.model, sealed.manifest.inner
    layers = [p for name, p in model.named_parameters() if kind == "muon" and "layers" in name and p.dim() > 1]
    other_muon = torch.optim.Muon(
        layers or [torch.zeros(1, 1)], weight_decay=inner.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1 and all(p is not one for one in layers)]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(inner.beta1, inner.beta2), foreach=False, fused=False)
    for step in range(6):
        windows = torch.from_numpy(other.source.take(4))
        loss = model(input_ids=windows[:, :-1], labels=windows[:, :-1], shift_labels=windows[:, 1:].contiguous()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in (*optimizer.param_groups, *other_muon.param_groups):
            group["lr"] = learning_rate(sealed.manifest, 0, step)
        optimizer.step()
        other_muon.step()
        model.zero_grad()
    assert (ours.theta - other.theta).abs().max() < (2e-5 if kind == "adamw" else 2e-3), "in bfloat16, or not"
    assert ours.standing.tokens == 6 * 2 * 2 * 32


def test_the_bare_loop_runs_the_same_model_and_data(tmp_path: Path) -> None:
    assert tokens_per_second(sealed_run().manifest, write_text(tmp_path), tmp_path / "cache", 3, "cpu") > 100


# --- schedule


def schedule(name: Any, decay: float = 0.5) -> Manifest:  # noqa: ANN401 - a literal
    inner = Inner(steps=10, schedule=name, learning_rate=1.0, warmup_rounds=2, decay=decay)
    return Manifest(name="x", model=MODEL, inner=inner, outer=Outer(rounds=12))


def test_the_cosine_warms_up_decays_and_stands_still_past_the_boundary() -> None:
    manifest = schedule("cosine")
    assert learning_rate(manifest, 0, 0) == pytest.approx(1 / 20)
    assert learning_rate(manifest, 1, 9) == pytest.approx(1.0)
    assert learning_rate(manifest, 7, 0) == pytest.approx(0.55)
    assert learning_rate(manifest, 3, 10) == learning_rate(manifest, 3, 25) == learning_rate(manifest, 4, 0)
    assert learning_rate(manifest, 12, 0) == learning_rate(manifest, 40, 3) == pytest.approx(0.1)


@pytest.mark.parametrize(("decay", "falls", "half"), [(0.5, 60, (9, 0)), (0.3, 84, (10, 2)), (1.0, 20, (6, 0))])
def test_wsd_is_constant_and_goes_to_zero_in_the_last_part(decay: float, falls: int, half: tuple[int, int]) -> None:
    manifest = schedule("wsd", decay)
    part = manifest.inner.decay * 120
    assert learning_rate(manifest, 0, 0) == pytest.approx(1 / 20)
    assert learning_rate(manifest, 1, 9) == 1.0
    assert learning_rate(manifest, *divmod(falls, 10)) == pytest.approx(min(1.0, (120 - falls) / part))
    assert learning_rate(manifest, *divmod(falls + 3, 10)) < 1.0
    assert learning_rate(manifest, *half) == pytest.approx(0.5)
    last = learning_rate(manifest, 11, 9)
    assert last == pytest.approx(1 / part)
    assert learning_rate(manifest, 11, 25) == learning_rate(manifest, 40, 3) == last, "whoever waits for its last step"


@pytest.mark.parametrize("name", ["wsd", "cosine", "constant"])
def test_every_schedule_is_constant_in_a_run_without_end(name: str) -> None:
    assert learning_rate(msgspec.structs.replace(schedule(name), outer=Outer(rounds=0)), 500, 3) == 1.0
    assert (learning_rate(schedule(name), 11, 9) == 1.0) == (name == "constant")


def test_distances_follow_the_rate_of_a_while_ago() -> None:
    """Near the end of "wsd" replicas are apart by what they learned before: the clip radius must not shrink faster. In turns, a
    part was merged as many turns before as there are."""
    manifest = schedule("wsd")
    turned = msgspec.structs.replace(manifest, outer=msgspec.structs.replace(manifest.outer, turns=3))
    assert recent_rate(turned, 11, 10) == learning_rate(turned, 5, 5)
    assert recent_rate(manifest, 5, 10) == 1.0
    assert recent_rate(manifest, 11, 10) == learning_rate(manifest, 9, 5) > 20 * learning_rate(manifest, 11, 10)
    assert recent_rate(manifest, 0, 10) == learning_rate(manifest, 0, 5)
    assert recent_rate(manifest, 1, 10) == learning_rate(manifest, 1, 5), "while it rises, this phase's own"


@given(st.integers(0, 30), st.integers(0, 100), st.floats(0, 40), st.integers(0, 20), st.sampled_from(["wsd", "cosine"]))
def test_learning_rate_stays_in_bounds(round_number: int, since: int, warmup: float, goal: int, name: Any) -> None:  # noqa: ANN401 - a literal
    inner = Inner(steps=10, schedule=name, learning_rate=0.5, warmup_rounds=warmup)
    manifest = Manifest(name="x", model=MODEL, inner=inner, outer=Outer(rounds=goal))
    assert 0 < learning_rate(manifest, round_number, since) <= 0.5


# --- model


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    first = make_replica(sealed_run(), tmp_path).theta
    torch.manual_seed(99)
    torch.set_num_threads(threads + 1)
    state = torch.get_rng_state()
    try:
        again = make_replica(sealed_run(), tmp_path, "bob").theta
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, make_replica(sealed_run(seed=1), tmp_path).theta)


def test_tied_weights_travel_once(tmp_path: Path) -> None:
    loose = make_replica(sealed_run(), tmp_path)
    tied = make_replica(sealed_run(model={**MODEL, "tie_word_embeddings": True}), tmp_path)
    assert loose.layout.size - tied.layout.size == 256 * 32
    train(tied, 1)
    embedding, head = tied.model.get_input_embeddings().weight, tied.model.get_output_embeddings().weight
    assert embedding.data_ptr() == head.data_ptr()
    assert tied.theta.data_ptr() <= head.data_ptr() < tied.theta.data_ptr() + 4 * tied.layout.size


def test_model_code_is_built_in_float32(tmp_path: Path) -> None:
    config = read_config(Manifest(name="x", model={**MODEL, "dtype": "bfloat16"}), 256)
    assert {p.dtype for p in build(config, 0).parameters()} == {torch.float32}


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(tmp_path: Path) -> None:
    huge = {**MODEL, "hidden_size": 16_384, "intermediate_size": 65_536, "num_hidden_layers": 100}
    before = psutil.Process().memory_info().rss
    with pytest.raises(ModelTooLargeError, match="GB of main memory"):
        make_replica(sealed_run(model=huge), tmp_path)
    assert psutil.Process().memory_info().rss - before < 500e6


@pytest.mark.parametrize("name", ["cuda:99", "nonsense", "meta"])
def test_a_device_that_cannot_compute_is_named(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        pick_device(name)


# --- pipe and boxes


def test_messages_survive_any_cutting_of_the_stream() -> None:
    setup = pipe.Setup(
        manifest=b"m",
        peer_id="p",
        data=None,
        devices="cpu",
        threads=0,
        checkpoints=Path("c"),
        cache=Path("k"),
    )
    sent = [pipe.Request(1, setup), pipe.Request(2, pipe.Apply(7, b"\1")), pipe.Request(3, pipe.Stop())]
    stream = b"".join(pipe.frame(message) for message in sent)
    unframer = pipe.Unframer()
    received = [pipe.REQUESTS.decode(message) for byte in stream for message in unframer.feed(bytes([byte]))]
    assert received == sent
    with pytest.raises(ValueError, match="message of"):
        unframer.feed(b"\xff\xff\xff\xff")


def test_a_box_is_shared_and_gives_its_pages_back() -> None:
    def resident() -> int:
        """Bytes of the file's pages that this process has mapped, by the kernel's count for these two mappings alone."""
        return sum(area.rss for area in psutil.Process().memory_maps(grouped=False) if "nolocod-test-pages" in area.path)

    descriptor = anonymous_file("test-pages")
    size = 64 << 20
    os.ftruncate(descriptor, size)
    ours, theirs = SharedBox(descriptor, size), SharedBox(descriptor, size)
    ours.view(5, 3)[:] = b"abc"
    assert bytes(theirs.view(4, 5)) == b"\0abc\0"
    assert resident() < size // 4
    ours.view(0, size)[:] = bytes(size)
    assert resident() >= size
    ours.view(size - 3, 3)[:] = b"xyz"
    ours.release(1, size - 1)
    assert resident() < size // 4
    assert bytes(ours.view(size - 3, 3)) == b"xyz"
    os.close(descriptor)


def test_a_box_may_lie_over_the_other_by_as_much_as_a_partner_may_be_ahead() -> None:
    gap = AHEAD_CHUNKS * CHUNK_SIZE
    assert outbox_offset(100) == mmap.PAGESIZE, "small ones lie apart"
    assert outbox_offset(3 * gap - 5) == gap
    descriptor = anonymous_file("test")
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    inbox, outbox = SharedBox(descriptor, 100), SharedBox(descriptor, 100, mmap.PAGESIZE)
    outbox.place(0, 100)[:] = b"x" * 100
    inbox.place(10, 90)[:] = b"y" * 90
    assert bytes(outbox.view(0, 100)) == b"x" * 100
    assert bytes(inbox.view(0, 100)) == bytes(10) + b"y" * 90
    os.close(descriptor)


def test_every_node_draws_its_own_randomness(tmp_path: Path) -> None:
    sealed = sealed_run(codec="bfloat16")
    boxes = []
    for peer in ("alice", "bob", "alice"):
        replica = make_replica(sealed, tmp_path, "same data")
        replica.draw_as(peer)
        replica.step()
        box = torch.empty(replica.plan.box_size, dtype=torch.uint8)
        replica.prepare(box, 0)
        boxes.append(box)
    assert torch.equal(boxes[0], boxes[2])
    assert not torch.equal(boxes[0], boxes[1]), "equal rounding errors would add up"


def test_what_the_optimizer_keeps_is_counted_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To bring the shards of a model together for it would lay them over what an outer step made of theta."""
    replica = make_replica(sealed_run(), tmp_path)
    replica.step()
    expected = sum(one.nbytes for one in replica.inner.moments().values())
    monkeypatch.setattr(type(replica.inner), "moments", lambda _: pytest.fail("they were brought together"))
    told = Taken(replica).memory()
    assert told is not None
    assert told.optimizer == expected > 0
