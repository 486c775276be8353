"""Which weights a node takes, against a stand-in trainer and swarm."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from nolocod.errors import (
    CheckpointError,
    FarWeightsError,
    HarmfulTensorError,
    NoDonorError,
    OwnTensorsError,
    RejectedTensorError,
)
from nolocod.identity import PeerId
from nolocod.observe.events import InnerSteps, OuterStep, WeightsComing, WeightsLoaded
from nolocod.proto.envelope import MAX_NUMBER
from nolocod.proto.types import Built, Standing
from tests.support.stand_ins import PHASE, Scene

if TYPE_CHECKING:
    from pathlib import Path


async def test_a_checkpoint_is_preferred_to_donors(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=5)
    scene.trainer.trouble = ("round-6 does not fit its hash",)
    scene.swarm.add("peer", 8)
    await scene.weights.load()
    assert scene.swarm.asked == []
    assert scene.codes == [CheckpointError.entry.code]
    assert scene.events[-1] == WeightsLoaded(5, "checkpoint")


async def test_where_no_checkpoint_is_whole_a_node_begins_nothing_over_them(tmp_path: Path, autojump_clock: object) -> None:
    """A founder once began again from the seed without a word, and its new checkpoints pushed out the damaged ones."""
    for name in ("founder", "member"):
        (tmp_path / name).mkdir()
    founder = Scene(tmp_path / "founder", source="seed", may_seed=True)
    founder.trainer.trouble = ("round-6 does not fit its hash", "round-5 neither")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole") as raised:
        await founder.weights.load()
    assert "remove them all to begin anew" in raised.value.remedy
    assert founder.codes == [CheckpointError.entry.code] * 2, "each is named"
    member = Scene(tmp_path / "member", source="seed")
    member.trainer.trouble = ("round-6 does not fit its hash",)
    member.swarm.add("peer", 8)
    await member.weights.load()
    assert member.events[-1] == WeightsLoaded(8, "donor")


async def test_before_the_weights_are_there_a_node_tells_its_checkpoints_round(tmp_path: Path, autojump_clock: object) -> None:
    (tmp_path / "checkpoints" / "round-00000007").mkdir(parents=True)
    scene = Scene(tmp_path, source="checkpoint", rounds=6)
    assert (scene.weights.standing.round, scene.session.state) == (7, "joining")
    await scene.weights.load()
    assert scene.weights.standing.round == 6


async def test_a_checkpoint_that_is_too_old_gives_way_to_a_donors_weights(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=4)
    scene.swarm.add("peer", 8)
    await scene.weights.load()
    assert [standing.round for standing in scene.trainer.adopted] == [8]
    assert scene.events[-1] == WeightsLoaded(8, "donor")


async def test_an_old_checkpoint_is_used_at_once_where_no_donor_gives(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=4)
    scene.swarm.unreachable.add(scene.swarm.add("peer", 8))
    await scene.weights.load()
    assert trio.current_time() - scene.began < 2
    assert scene.codes == [NoDonorError.entry.code]
    assert scene.events[-1] == WeightsLoaded(4, "checkpoint")


@pytest.mark.parametrize("state", ["joining", "training"])
async def test_newcomers_begin_with_the_seed_while_nobody_took_an_outer_step(
    state: str, tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("peer", 0, state)
    await scene.weights.load()
    assert scene.swarm.asked == []
    assert scene.events[-1] == WeightsLoaded(0, "seed")


async def test_the_weights_that_an_own_model_starts_from_are_its_founders(tmp_path: Path, autojump_clock: object) -> None:
    """No seed makes them elsewhere."""
    scene = Scene(tmp_path, model={"own": [["a", "float32", [1]]]})
    scene.swarm.add("founder", 0)
    await scene.weights.load()
    assert scene.swarm.asked == [["founder"]]
    assert scene.events[-1] == WeightsLoaded(0, "donor")


async def test_the_furthest_donor_is_asked_first_and_who_joins_is_none(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.swarm.add("slow", 3)
    scene.swarm.add("fast", 5)
    scene.swarm.add("done", 4, "finished")
    scene.swarm.add("new", 9, "joining")
    await scene.weights.load()
    assert scene.swarm.asked == [["fast", "done", "slow"]]
    assert not any(scene.incoming.iterdir())


async def test_a_donors_tokens_leave_room_for_ours(tmp_path: Path, autojump_clock: object) -> None:
    """With the most that a peer may tell, our next inner step would make a number that all partners refuse."""
    scene = Scene(tmp_path)
    donor = scene.swarm.add("donor", 3)
    scene.swarm.standings[donor] = Standing(3, MAX_NUMBER - 1, 1.0)
    await scene.weights.load()
    assert [one.tokens for one in scene.trainer.adopted] == [MAX_NUMBER // 2]


async def test_a_misfit_donor_is_left_for_the_next(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("misfit", 5)
    scene.swarm.add("good", 3)
    scene.trainer.misfits.add(b"misfit")
    await scene.weights.load()
    assert scene.swarm.asked == [["misfit", "good"], ["good"]]
    assert scene.codes == [RejectedTensorError.entry.code]
    assert scene.trainer.round == 3
    assert not any(scene.incoming.iterdir())


@pytest.mark.parametrize("loss", [9.0, 5.7, math.inf, math.nan])
async def test_a_donor_whose_weights_are_far_worse_than_members_tell_is_left_and_blamed(
    tmp_path: Path, autojump_clock: object, loss: float
) -> None:
    """Sign-flipped, random or huge weights: their loss is that of a guess, or worse."""
    scene = Scene(tmp_path)
    scene.swarm.add("liar", 5)
    scene.swarm.add("good", 4)
    scene.swarm.add("other", 3)
    scene.trainer.losses[b"liar"] = loss
    await scene.weights.load()
    assert scene.swarm.asked == [["liar", "good", "other"], ["good", "other"]]
    assert scene.codes == [HarmfulTensorError.entry.code]
    assert scene.trainer.weights == b"good"
    assert scene.swarm.doubted == ["liar"]


async def test_where_all_weights_are_bad_on_our_text_the_best_are_taken_and_nobody_is_blamed(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path)
    for name, round_number, loss in (("one", 5, 4.0), ("two", 4, 6.0), ("three", 3, 3.0)):
        scene.swarm.add(name, round_number)
        scene.trainer.losses[name.encode()] = loss
    await scene.weights.load()
    assert scene.swarm.asked == [["one", "two", "three"], ["two", "three"], ["one"]], (
        "as many as the run says, and the best again"
    )
    assert scene.trainer.weights == b"one"
    assert scene.swarm.doubted == []


@pytest.mark.parametrize("loss", [1.05, 1.9])
async def test_a_donor_that_is_far_from_the_others_is_left_and_not_blamed_for_that_alone(
    tmp_path: Path, autojump_clock: object, loss: float
) -> None:
    scene = Scene(tmp_path)
    for name, round_number in (("far", 5), ("good", 4), ("other", 3)):
        scene.swarm.add(name, round_number)
    scene.trainer.far.add(b"far")
    scene.trainer.losses[b"far"] = loss
    await scene.weights.load()
    assert scene.swarm.asked == [["far", "good", "other"], ["good", "other"]]
    assert [call for call in scene.trainer.calls if "compare" in call] == ["compare with 2", "compare with 1"]
    assert scene.codes == [FarWeightsError.entry.code]
    assert (scene.trainer.weights, scene.swarm.doubted) == (b"good", [])
    assert not any(scene.incoming.iterdir())


async def test_a_majority_whose_weights_are_worse_on_our_text_is_not_followed(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    for name, round_number in (("honest", 5), ("liar", 4), ("accomplice", 3)):
        scene.swarm.add(name, round_number)
    scene.trainer.far.add(b"honest")
    scene.trainer.losses |= {b"liar": 1.2, b"accomplice": 1.2}
    await scene.weights.load()
    assert scene.swarm.asked == [["honest", "liar", "accomplice"], ["liar", "accomplice"], ["honest"]]
    assert scene.codes == [FarWeightsError.entry.code, HarmfulTensorError.entry.code]
    assert (scene.trainer.weights, scene.swarm.doubted) == (b"honest", [])


async def test_of_two_donors_that_disagree_the_better_on_our_text_is_taken(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    for name, round_number in (("liar", 5), ("honest", 4)):
        scene.swarm.add(name, round_number)
    scene.trainer.far |= {b"liar", b"honest"}
    scene.trainer.losses |= {b"liar": 1.8, b"honest": 1.1}
    await scene.weights.load()
    assert scene.swarm.asked == [["liar", "honest"], ["honest"]]
    assert [call for call in scene.trainer.calls if "compare" in call] == ["compare with 1"], "nobody is left to compare with"
    assert (scene.trainer.weights, scene.swarm.doubted) == (b"honest", [])


async def test_where_no_other_donor_gives_a_sample_loss_alone_decides(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("first", 5)
    scene.swarm.unreachable.add(scene.swarm.add("silent", 4))
    scene.trainer.far.add(b"first")
    await scene.weights.load()
    assert (scene.trainer.weights, scene.codes) == (b"first", [])


async def test_the_only_donors_weights_are_taken_as_they_are_and_not_fetched_twice(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Two nodes of which one has a much harder text."""
    scene = Scene(tmp_path)
    scene.swarm.add("only", 5)
    scene.trainer.losses[b"only"] = 4.0
    await scene.weights.load()
    assert scene.swarm.asked == [["only"]]
    assert (scene.trainer.weights, scene.trainer.round, scene.swarm.doubted) == (b"only", 5, [])
    assert scene.events[-1] == WeightsLoaded(5, "donor")


async def test_weights_that_were_refused_are_not_kept_where_the_next_donor_is_gone(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    scene.swarm.add("liar", 8)
    scene.swarm.unreachable.add(scene.swarm.add("gone", 7))
    scene.trainer.losses[b"liar"] = 9.0
    await scene.weights.load()
    assert scene.swarm.asked == [["liar", "gone"], ["gone"]]
    assert scene.codes == [HarmfulTensorError.entry.code, NoDonorError.entry.code]
    assert (scene.trainer.weights, scene.trainer.round) == (b"", 2)
    assert scene.events[-1] == WeightsLoaded(2, "checkpoint")


async def test_weights_that_were_refused_give_way_to_the_seed_where_nobody_else_took_a_step(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("liar", 8)
    scene.trainer.losses[b"liar"] = 9.0
    fetch = scene.swarm.fetch_weights

    async def fetch_and_leave(donors: list[PeerId], into: Path, size: int) -> tuple[PeerId, Standing]:
        found = await fetch(donors, into, size)
        scene.swarm.members.clear()
        scene.swarm.add("honest", 0)
        return found

    scene.swarm.fetch_weights = fetch_and_leave  # type: ignore[method-assign]
    await scene.weights.load()
    assert (scene.trainer.weights, scene.trainer.round) == (b"", 0)
    assert scene.events[-1] == WeightsLoaded(0, "seed")


async def test_weights_that_are_only_tried_are_not_told_as_this_nodes(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("liar", 5)
    scene.swarm.add("good", 4)
    scene.trainer.losses[b"liar"] = 9.0
    await scene.weights.load()
    assert [call for call in scene.trainer.calls if call in ("try", "evaluate")] == ["try", "try"]


async def test_a_harder_text_is_no_reason_for_doubt(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("good", 5)
    scene.trainer.losses[b"good"] = 1.9  # where members tell of 1.0
    await scene.weights.load()
    assert (len(scene.swarm.asked), scene.codes) == (1, [])


async def test_a_donors_word_is_no_reason_to_run_ahead_of_the_others(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    liar = scene.swarm.add("liar", 10**9)
    for name in ("one", "two", "three"):
        scene.swarm.add(name, 5)
    scene.swarm.unreachable = {PeerId("one"), PeerId("two"), PeerId("three")}
    await scene.weights.load()
    assert scene.swarm.asked == [["one", "two", "three", liar]], "who tells of such a round is asked last"
    assert scene.trainer.round == 5 + 3


async def test_a_newcomer_asks_again_when_its_only_donor_is_down_for_a_while(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    peer = scene.swarm.add("peer", 5)
    scene.swarm.unreachable.add(peer)

    async def comes_back() -> None:
        await trio.sleep(30)
        scene.swarm.unreachable.clear()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(comes_back)
        await scene.weights.load()
    assert scene.trainer.round == 5
    assert set(scene.codes) == {NoDonorError.entry.code}


@pytest.mark.parametrize("unreachable", [True, False])
async def test_a_newcomer_without_weights_gives_up_after_a_while(
    unreachable: bool, tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path)
    if unreachable:
        scene.swarm.unreachable.add(scene.swarm.add("peer", 5))
    with pytest.raises(NoDonorError):
        await scene.weights.load()
    assert 120 <= trio.current_time() - scene.began < 130


async def test_who_may_seed_waits_for_nobody(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    assert trio.current_time() == scene.began
    assert scene.events[-1] == WeightsLoaded(0, "seed")


async def test_weights_that_aged_in_transfer_enter_in_the_middle_of_the_run(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    for name, round_number in (("a", 20), ("b", 21), ("c", 24), ("d", 21)):
        scene.swarm.add(name, round_number)
    scene.swarm.standings[PeerId("c")] = Standing(10, 77, 2.0)  # what its file says
    await scene.weights.load()
    assert scene.trainer.adopted == [Standing(21, 77, 2.0)]
    assert not scene.weights.is_behind()


async def test_a_newcomer_whose_fetch_outlasts_the_staleness_limit_fetches_once(tmp_path: Path, autojump_clock: object) -> None:
    """Others take a round every four seconds, as it will; the fetch takes 202, as of 113 M parameters it did."""
    scene = Scene(tmp_path)
    for name in ("a", "b", "c"):
        scene.swarm.add(name, 20)
    scene.swarm.fetch_seconds, scene.swarm.sample_seconds = 202.0, 30.5

    async def others_go_on() -> None:
        while True:
            await trio.sleep(PHASE)
            scene.swarm.members = [
                msgspec.structs.replace(one, standing=Standing(one.standing.round + 1, 0, 1.0)) for one in scene.swarm.members
            ]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others_go_on)
        await scene.weights.load()
        median = scene.swarm.members[0].standing.round
        assert median == 20 + (202 + 30) // PHASE, "rounds went by while samples came, too"
        assert scene.trainer.round == median, "placed when all is judged, with the whole window before it"
        assert await scene.train_until_stopped(100) == "stopped"
        assert len(scene.swarm.asked) == 1
        scene.trainer.round = 0
        assert scene.weights.is_behind(), "its line is too slow for this run"
        with trio.move_on_after(4 * 202 - 110):
            await scene.session._fall_behind()
            pytest.fail("to fetch again at once is no use: it would come as late again")
        with trio.fail_after(20):
            await scene.session._fall_behind()
        nursery.cancel_scope.cancel()


async def test_what_a_fetch_left_is_kept_for_the_next_and_gone_once_there_are_weights(
    tmp_path: Path, autojump_clock: object
) -> None:
    """The last donor died at 394 MB of 454: the node ended, and threw them away."""
    scene = Scene(tmp_path)
    alice = scene.swarm.add("alice", 8)
    scene.swarm.unreachable.add(alice)
    scene.swarm.fetch_seconds = 600.0
    left = scene.incoming / "weights.safetensors.alice.partial"

    async def comes_back() -> None:
        await trio.sleep(590)
        left.write_bytes(b"394 MB")
        scene.emit(WeightsComing(alice, 394, 454))
        await trio.sleep(20)
        scene.swarm.unreachable.clear()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(comes_back)
        await scene.weights.load()
    assert len(scene.swarm.asked) == 2, "patience is for donors that give nothing"
    assert scene.events[-1] == WeightsLoaded(8, "donor")
    assert not any(scene.incoming.iterdir())

    (tmp_path / "empty").mkdir()
    empty = Scene(tmp_path / "empty")
    empty.swarm.unreachable.add(empty.swarm.add("bob", 8))
    empty.swarm.fetch_seconds = 200.0
    with pytest.raises(NoDonorError):
        await empty.weights.load()


async def test_invented_members_decide_nothing(tmp_path: Path, autojump_clock: object) -> None:
    """100 that are only heard of tell of round 1001, of small losses and of weights."""
    scene = Scene(tmp_path, source="checkpoint", rounds=100)
    for number in range(100):
        scene.swarm.add(f"ghost {number}", 1001, verified=False)
    for name in ("one", "two"):
        scene.swarm.add(name, 101)
    await scene.weights.load()
    assert not scene.weights.is_behind()
    assert (scene.swarm.asked, scene.weights.standing.round) == ([], 100)
    scene.trainer.round = 90
    assert scene.weights.is_behind()
    await scene.weights.refresh()
    assert scene.swarm.asked == [["one", "two"]], "nor are they donors"
    assert scene.trainer.round == 101


async def test_a_newcomer_waits_a_little_for_those_that_tell_of_steps_to_be_verified(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path)
    scene.swarm.add("new", 0)
    scene.swarm.add("ghost", 7, verified=False)
    await scene.weights.load()
    assert (scene.swarm.asked, scene.trainer.round) == ([], 0), "that nobody took a step is not theirs to deny"
    assert 9 <= trio.current_time() - scene.began <= 11

    scene = Scene(tmp_path)
    scene.swarm.add("new", 0, "joining")
    scene.swarm.add("trains", 7, verified=False)

    async def verify() -> None:
        await trio.sleep(5)
        scene.swarm.members.pop()
        scene.swarm.add("trains", 7)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(verify)
        await scene.weights.load()
    assert scene.trainer.round == 7


async def test_a_node_that_pairs_is_taken_no_further_ahead_than_time_allows(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=100)
    await scene.weights.load()
    scene.weights.follow(InnerSteps(4, 4, 1.0, 1e-3, 40.0))
    scene.weights.follow(OuterStep(100, "paired", PeerId("one"), 4, None, 1.0))
    await trio.sleep(20)  # half a phase of this node: 15 of one that is 30 times as fast
    for name in ("one", "two", "three"):
        scene.swarm.add(name, 1001)
    assert scene.weights.is_behind()
    await scene.weights.refresh()
    assert 100 + 3 + 15 <= scene.trainer.round <= 100 + 3 + 20


async def test_time_that_this_machine_slept_allows_a_jump_too(
    tmp_path: Path, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=100)
    await scene.weights.load()
    scene.weights.follow(InnerSteps(4, 4, 1.0, 1e-3, 40.0))
    scene.weights.follow(OuterStep(100, "paired", PeerId("one"), 4, None, 1.0))
    slept = time.time() + 3600.0
    monkeypatch.setattr("nolocod.node.weights.time.time", lambda: slept)
    scene.swarm.add("one", 1001)
    await scene.weights.refresh()
    assert scene.trainer.round == 1001


# --- weights in place of our own


@pytest.mark.parametrize("loss", [9.0, 1.3])
async def test_weights_that_are_worse_than_our_own_do_not_replace_them(
    tmp_path: Path, autojump_clock: object, loss: float
) -> None:
    """All that give them agree, and members tell of such a loss: ours of round 2 have one of 1.0."""
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    for number in range(3):
        liar = scene.swarm.add(f"liar {number}", 9 - number, group=f"203.0.{number}.0/24")
        scene.swarm.members[-1] = msgspec.structs.replace(scene.swarm.members[-1], standing=Standing(9 - number, 0, 8.0))
        scene.trainer.losses[liar.encode()] = loss
    await scene.weights.load()
    assert (scene.trainer.weights, scene.trainer.round) == (b"", 2)
    assert scene.codes == [HarmfulTensorError.entry.code] * 2 + [NoDonorError.entry.code]
    assert scene.events[-1] == WeightsLoaded(2, "checkpoint")
    assert [len(asked) for asked in scene.swarm.asked] == [3, 2], "as many as the run says, and no best of the bad"


async def test_where_others_do_not_agree_our_own_weights_are_kept(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    for number in range(3):
        scene.trainer.far.add(scene.swarm.add(f"far {number}", 9 - number).encode())
    await scene.weights.load()
    assert (scene.trainer.weights, scene.trainer.round) == (b"", 2)
    assert scene.codes == [FarWeightsError.entry.code] * 2 + [NoDonorError.entry.code]


async def test_one_donors_word_is_not_enough_where_there_are_others(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    scene.swarm.add("one", 9)
    scene.swarm.unreachable.add(scene.swarm.add("silent", 8))
    await scene.weights.load()
    assert (scene.trainer.weights, scene.trainer.round) == (b"", 2)
    scene.swarm.unreachable.clear()
    await scene.weights.refresh()
    assert (scene.trainer.weights, scene.trainer.round) == (b"one", 9)


@pytest.mark.parametrize("donors", [1, 2])
async def test_a_swarm_of_two_and_one_behind_one_address_give_weights_as_any(
    tmp_path: Path, autojump_clock: object, donors: int
) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    for number in range(donors):
        scene.swarm.add(f"donor {number}", 9 - number, group="192.0.2.0/24")
    await scene.weights.load()
    assert (scene.trainer.weights, scene.codes) == (b"donor 0", [])


async def test_samples_are_of_other_address_groups_and_donors_one_of_each_first(tmp_path: Path, autojump_clock: object) -> None:
    """Four of one group tell of the furthest rounds, and agree with each other."""
    scene = Scene(tmp_path)
    for number in range(4):
        scene.swarm.add(f"liar {number}", 9, group="203.0.113.0/24")
    scene.swarm.add("one", 8, group="198.51.100.0/24")
    scene.swarm.add("two", 8, group="192.0.2.0/24")
    sampled: list[list[PeerId]] = []
    sample = scene.swarm.sample_weights

    async def seen(donors: list[PeerId], *given: Any) -> object:  # noqa: ANN401 - passed on
        sampled.append(donors)
        return await sample(donors, *given)

    scene.swarm.sample_weights = seen  # type: ignore[method-assign, assignment]  # the same, looked at
    await scene.weights.load()
    assert scene.swarm.asked == [["liar 0", "one", "two", "liar 1", "liar 2", "liar 3"]]
    assert sampled == [["one", "two"]]


OURS = Built(b"l" * 16, b"w" * 16, "torch 2.8, transformers 5.1")  # of the stand-in trainer
OTHERS = Built(b"m" * 16, b"v" * 16, "torch 2.8, transformers 4.57")


@pytest.mark.parametrize("rounds", [0, 8])
async def test_a_joiner_whose_libraries_make_other_tensors_ends_before_it_fetches_or_trains(
    tmp_path: Path, autojump_clock: object, rounds: int
) -> None:
    scene = Scene(tmp_path, source="seed")
    for name in ("one", "two"):
        scene.swarm.add(name, rounds, built=OTHERS)
    with pytest.raises(OwnTensorsError, match=r"with torch 2\.8, transformers 5\.1 than with torch 2\.8, transformers 4\.57"):
        await scene.weights.load()
    assert 10 <= trio.current_time() - scene.began < 11, "others may have been there, that were not verified yet"
    assert scene.swarm.asked == []


async def test_strangers_with_other_tensors_do_not_end_a_founder(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="seed", may_seed=True)
    scene.swarm.add("stranger", 8, built=OTHERS)
    await scene.weights.load()
    assert scene.events[-1] == WeightsLoaded(0, "seed")


async def test_of_peers_with_other_tensors_none_is_a_donor_and_one_that_is_alike_is_enough(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, source="seed")
    scene.swarm.add("stranger", 9, built=OTHERS)
    alike, silent = scene.swarm.add("alike", 8, built=OURS), scene.swarm.add("silent", 7)
    await scene.weights.load()
    assert scene.swarm.asked == [[alike, silent]]
    assert scene.events[-1] == WeightsLoaded(8, "donor")


async def test_a_node_with_a_checkpoint_that_is_behind_goes_on_alone_beside_peers_with_other_tensors(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=2)
    scene.swarm.add("stranger", 9, built=OTHERS)
    await scene.weights.load()
    assert scene.codes == [OwnTensorsError.entry.code]
    assert scene.events[-1] == WeightsLoaded(2, "checkpoint")


async def test_where_the_seed_gives_other_values_elsewhere_a_joiner_of_round_0_takes_a_donors(
    tmp_path: Path, autojump_clock: object
) -> None:
    """Another processor may round them otherwise: no error, but all begin from the same."""
    scene = Scene(tmp_path, source="seed")
    scene.swarm.add("alike", 0, built=OURS)
    scene.swarm.add("other", 0, built=Built(OURS.layout, b"v" * 16, "torch 2.9, transformers 5.1"))
    await scene.weights.load()
    assert len(scene.swarm.asked) == 1
    assert scene.events[-1] == WeightsLoaded(0, "donor")
    (tmp_path / "same").mkdir()
    same = Scene(tmp_path / "same", source="seed")
    same.swarm.add("alike", 0, built=OURS)
    await same.weights.load()
    assert same.swarm.asked == []
    assert same.events[-1] == WeightsLoaded(0, "seed")
