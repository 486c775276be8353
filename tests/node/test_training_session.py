"""One trainer's session against a stand-in trainer and swarm on trio's virtual clock."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import pytest
import trio

from nolocod.errors import (
    CheckpointError,
    DiskFullError,
    FarWeightsError,
    HarmfulTensorError,
    NoDonorError,
    RejectedTensorError,
    TrainerError,
)
from nolocod.identity import PeerId
from nolocod.node.schedule import PausePolicy
from nolocod.node.training_session import TrainingSession
from nolocod.node.weights import SessionSettings
from nolocod.observe.events import (
    Checkpointed,
    Emit,
    Event,
    ExchangeEnded,
    InnerSteps,
    OuterStep,
    Paused,
    StateChanged,
    Troubled,
    WeightsLoaded,
)
from nolocod.p2p.membership.peer_selection import choose
from nolocod.proto.types import Applied, Busy, Description, Ended, Inspection, Member, Offer, Sampled, Standing, Subject
from nolocod.run.manifest import Inner, Manifest, Outer
from nolocod.run.paths import DataDir
from nolocod.trainer.pipe import Loaded, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from nolocod.node.peers import Peers
    from nolocod.proto.types import LocalSide
    from nolocod.trainer.process import TrainerProcess

PHASE = 4.0
"""Seconds between boundaries: four inner steps of a second each."""
OWN = PeerId("own")
GRACE = 3.0


class StandInTrainer:
    """A trainer whose inner steps are the passing of (virtual) time."""

    outbox = inbox = None

    def __init__(self, emit: Emit, source: Literal["seed", "checkpoint"] = "seed", round_number: int = 0) -> None:
        self.emit = emit
        self.source = source
        self.round = self.loads_round = round_number
        self.trouble: tuple[str, ...] = ()
        self.calls: list[str] = []
        self.adopted: list[Standing] = []
        self.misfits: set[bytes] = set()
        self.weights = b""
        self.losses: dict[bytes, float] = {}
        """Held-out, by whose weights they are."""
        self.far: set[bytes] = set()
        """Whose weights are far from the other donors'."""
        self.load_seconds = self.exchange_seconds = 0.0
        self.full_disk = 0
        self.death: TrainerError | None = None
        self.dead = trio.Event()
        self.began = trio.current_time()

    @property
    def standing(self) -> Standing:
        return Standing(self.round, 0, 1.0)

    @property
    def steps_since_outer(self) -> int:
        return int(trio.current_time() - self.began + 1e-9)

    def die(self) -> None:
        self.death = TrainerError("it died.")
        self.dead.set()

    def note(self, name: str) -> None:
        if self.death is not None:
            raise self.death
        self.calls.append(name)

    async def wait_dead(self) -> NoReturn:
        await self.dead.wait()
        self.note("")
        raise AssertionError

    async def load(self, setup: Setup) -> Loaded:
        self.note("load")
        self.weights, self.round = b"", self.loads_round
        await trio.sleep(self.load_seconds)
        return Loaded(self.standing, 1, 4, self.source, outbox_offset=4096, phase=4, trouble=self.trouble)

    async def adopt(self, weights: Path, standing: Standing) -> None:
        self.note("adopt")
        self.weights = weights.read_bytes()  # noqa: ASYNC240 - a few bytes
        if self.weights in self.misfits:
            raise RejectedTensorError("they have other names.")
        self.adopted.append(standing)
        self.round = standing.round

    async def compare(self, samples: tuple[Sampled, ...]) -> str:
        self.note(f"compare with {len(samples)}")
        assert all(sample.path.exists() for sample in samples)
        return "a matrix is 2.00 of its norm away" if self.weights in self.far else ""

    async def train(self) -> None:
        self.note("train")
        await trio.sleep(1e-9)  # the pipe
        self.began = trio.current_time()
        self.emit(InnerSteps(1, 1, 1.0, 1e-3, 1.0))

    async def pause(self) -> None:
        self.note("pause")

    async def wait_boundary(self) -> None:
        await trio.sleep_until(self.began + PHASE)

    @property
    def subject(self) -> Subject:
        return Subject()

    def dense_due(self, fragment: int) -> bool:
        return fragment == 0

    async def capture(self, subject: Subject) -> Description:
        self.note("snapshot")
        return Description(0, 1, ())

    async def inspect(self, *, probation: bool) -> Inspection:
        return Inspection(1.0)

    async def discard(self) -> None:
        self.note("discard")

    async def apply(self, partner_round: int, skipped: bytes) -> Applied:
        self.note("apply")
        return self._stepped(max(self.round + 1, partner_round))

    async def solo(self) -> Applied:
        self.note("solo")
        return self._stepped(self.round + 1)

    def _stepped(self, round_number: int) -> Applied:
        self.round, self.began = round_number, trio.current_time()
        return Applied(self.round, 4, None, 0.0)

    async def evaluate(self, *, told: bool = True) -> float:
        self.note("evaluate" if told else "try")
        return self.losses.get(self.weights, 1.0)

    async def checkpoint(self) -> None:
        self.note("checkpoint")
        if self.full_disk:
            self.full_disk -= 1
            raise DiskFullError("no space.")
        self.emit(Checkpointed(self.round, 1, 0.0))


class StandInSwarm:
    """Members as the test says, and donors that give their own name as weights."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.unreachable: set[PeerId] = set()
        self.asked: list[list[PeerId]] = []
        self.doubted: list[PeerId] = []
        self.offered: Callable[[LocalSide], Any] | None = None
        self.standings: dict[PeerId, Standing] = {}

    def add(self, name: str, round_number: int, state: str = "training") -> PeerId:
        peer = PeerId(name)
        standing = Standing(round_number, 0, 1.0)
        self.members.append(Member(peer, standing, state, (), "1", 0.0, None))
        return peer

    def live(self) -> list[Member]:
        return self.members

    def partner(self, own: Standing, avoid: Collection[PeerId]) -> PeerId | None:
        return PeerId("partner") if self.offered else None

    def suspect(self, peer: PeerId) -> None: ...

    def probation(self, peer: PeerId) -> bool:
        return False

    def doubt(self, donor: PeerId) -> None:
        self.doubted.append(donor)

    async def offer(self, partner: PeerId, standing: Standing, subject: Subject, local_side: LocalSide) -> Ended:
        assert self.offered is not None
        return cast("Ended", await self.offered(local_side))

    async def fetch_weights(self, donors: list[PeerId], into: Path) -> tuple[PeerId, Standing]:
        self.asked.append(donors)
        await trio.sleep(1)
        donor = next((donor for donor in donors if donor not in self.unreachable), None)
        if donor is None:
            raise NoDonorError("none gave them.")
        into.write_bytes(donor.encode())  # noqa: ASYNC240 - a few bytes
        known = next(member.standing for member in self.members if member.peer_id == donor)
        return donor, self.standings.get(donor, known)

    async def sample_weights(self, donors: list[PeerId], wanted: tuple[int, int], folder: Path) -> tuple[Sampled, ...]:
        await trio.sleep(1)
        count, size = wanted
        able = [donor for donor in donors if donor not in self.unreachable][:count]
        samples = tuple(Sampled(folder / f"sample-{number}", ((0, size),)) for number in range(len(able)))
        for sample in samples:
            sample.path.write_bytes(bytes(size))
        return samples


class Scene:
    """A training session with its stand-ins, and what it told."""

    def __init__(self, folder: Path, *, may_seed: bool = False, goal: int = 0, source: str = "seed", rounds: int = 0) -> None:
        self.events: list[Event] = []
        self.swarm = StandInSwarm()
        self.trainer = StandInTrainer(self.emit, cast('Literal["seed", "checkpoint"]', source), rounds)
        manifest = Manifest(name="tiny", model={"model_type": "llama"}, inner=Inner(steps=4), outer=Outer(rounds=goal))
        paths = DataDir(folder)
        self.incoming = paths.incoming
        for path in (paths.incoming, paths.checkpoints):
            path.mkdir(exist_ok=True)
        self.pause_policy = PausePolicy([lambda: self.reason], self.emit)
        self.reason: Paused | None = None
        setup = Setup(
            manifest=b"", peer_id=OWN, data=None, device="cpu", threads=1, checkpoints=paths.checkpoints, cache=paths.cache
        )
        settings = SessionSettings(setup, manifest, paths.incoming, may_seed, checkpoint_every=10.0, grace=GRACE)
        trainer, peers = cast("TrainerProcess", self.trainer), cast("Peers", self.swarm)
        self.session = TrainingSession(settings, trainer, peers, self.pause_policy, self.emit)
        self.weights = self.session.weights
        self.stop = trio.Event()
        self.began = trio.current_time()

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.session.follow(event)

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def codes(self) -> list[str]:
        return [event.code for event in self.told(Troubled)]

    async def train_until_stopped(self, after: float) -> str:
        """Train, be told to stop after so many seconds, and return the reason."""
        reason: list[str] = []

        async def train() -> None:
            reason.append(await self.session.train(self.stop))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(train)
            await trio.sleep(after)
            self.stop.set()
        return reason[0]


# --- which weights ------------------------------------------------------------------------------------


async def test_a_checkpoint_is_preferred_to_donors(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint", rounds=5)
    scene.trainer.trouble = ("round-6 does not fit its hash",)
    scene.swarm.add("peer", 8)
    await scene.weights.load()
    assert scene.swarm.asked == []
    assert scene.codes == [CheckpointError.entry.code]
    assert scene.events[-1] == WeightsLoaded(5, "checkpoint")


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


async def test_the_furthest_donor_is_asked_first_and_who_joins_is_none(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.swarm.add("slow", 3)
    scene.swarm.add("fast", 5)
    scene.swarm.add("done", 4, "finished")
    scene.swarm.add("new", 9, "joining")
    await scene.weights.load()
    assert scene.swarm.asked == [["fast", "done", "slow"]]
    assert not any(scene.incoming.iterdir())


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

    async def fetch_and_leave(donors: list[PeerId], into: Path) -> tuple[PeerId, Standing]:
        found = await fetch(donors, into)
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


async def test_who_pauses_or_is_finished_does_not_say_that_it_stops(tmp_path: Path, autojump_clock: object) -> None:
    """systemd ends a process that says so and then does not end."""
    scene = Scene(tmp_path, may_seed=True, goal=1)
    await scene.weights.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE / 2, PHASE)
        assert await scene.session.train(scene.stop) == "paused"
        assert await scene.session.rest(scene.stop)
    assert await scene.session.train(scene.stop) == "finished"
    assert "stopping" not in [event.state for event in scene.told(StateChanged)]


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


async def test_weights_that_aged_in_transfer_enter_at_the_edge_of_the_window(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path)
    for name, round_number in (("a", 20), ("b", 21), ("c", 24), ("d", 21)):
        scene.swarm.add(name, round_number)
    scene.swarm.standings[PeerId("c")] = Standing(10, 77, 2.0)  # what its file says
    await scene.weights.load()
    assert scene.trainer.adopted == [Standing(21 - 3, 77, 2.0)]
    assert not scene.weights.is_behind()


# --- training -----------------------------------------------------------------------------------------


async def test_stop_writes_a_last_checkpoint(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    assert await scene.train_until_stopped(PHASE + 1) == "stopped"
    assert scene.trainer.calls == ["load", "train", "evaluate", "solo", "pause", "checkpoint"]


async def test_the_goal_ends_training_with_a_measurement_and_a_checkpoint(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True, goal=2)
    await scene.weights.load()
    assert await scene.session.train(scene.stop) == "finished"
    assert scene.trainer.calls[-5:] == ["solo", "solo", "pause", "evaluate", "checkpoint"]
    assert scene.session.state == "finished"


async def test_stop_waits_for_the_exchange_under_way(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        await trio.sleep(2)
        return Ended("committed", PeerId("partner"), b"s", partner_standing=Standing(0, 0, 1.0))

    scene.swarm.offered = exchange
    assert await scene.train_until_stopped(PHASE + 1) == "stopped"
    assert scene.trainer.calls[-4:] == ["snapshot", "apply", "pause", "checkpoint"]
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 2)


async def test_stop_gives_an_exchange_up_when_the_grace_is_over(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        await trio.sleep_forever()
        raise AssertionError

    scene.swarm.offered = exchange
    assert await scene.train_until_stopped(PHASE + 1) == "stopped"
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 1 + GRACE)
    assert scene.trainer.calls[-4:] == ["snapshot", "discard", "pause", "checkpoint"]
    assert [event.outcome for event in scene.told(ExchangeEnded)] == ["aborted"]


async def test_checkpoints_follow_outer_steps_once_enough_time_has_passed(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    await scene.train_until_stopped(6 * PHASE + 1)
    assert [event.round for event in scene.told(Checkpointed)] == [3, 6, 6], "every 12 s, and the last one"


async def test_a_full_disk_costs_a_periodic_checkpoint_only(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.trainer.full_disk = 1
    await scene.weights.load()
    await scene.train_until_stopped(4 * PHASE + 1)
    assert scene.codes == [DiskFullError.entry.code]
    assert [event.round for event in scene.told(Checkpointed)] == [4, 4], "the next outer step tried again"


async def test_a_full_disk_at_the_last_checkpoint_is_an_error(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.trainer.full_disk = 1
    await scene.weights.load()
    scene.stop.set()
    with pytest.raises(DiskFullError):
        await scene.session.train(scene.stop)


async def test_a_node_that_falls_behind_fetches_afresh_and_trains_on(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    scene.swarm.add("peer", 9)
    assert await scene.session.train(scene.stop) == "behind"
    assert "stopping" not in [event.state for event in scene.told(StateChanged)]
    assert scene.trainer.calls[-1] == "pause", "old weights are not worth a checkpoint"
    assert isinstance(scene.session.loop.decide(Offer(PeerId("peer"), b"s", scene.weights.standing)), Busy)
    await scene.session.refresh()
    assert (scene.session.state, scene.weights.standing.round) == ("joining", 9)
    assert await scene.train_until_stopped(PHASE + 1) == "stopped"
    assert [event.round for event in scene.told(OuterStep)] == [10]


async def test_a_node_that_stays_behind_fetches_once_a_minute_only(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    scene.swarm.unreachable.add(scene.swarm.add("peer", 1000))
    assert await scene.session.train(scene.stop) == "behind"
    began = trio.current_time()
    await scene.session.refresh()
    assert scene.codes == [NoDonorError.entry.code]
    assert await scene.session.train(scene.stop) == "behind"
    assert 60 <= trio.current_time() - began < 70
    assert scene.trainer.calls.count("solo") >= 10, "training goes on meanwhile"


async def test_with_all_others_gone_a_refresh_waits_for_nobody(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, source="checkpoint")
    await scene.weights.load()
    began = trio.current_time()
    await scene.session.refresh()
    assert trio.current_time() == began


async def test_told_to_stop_while_an_exchange_ends_before_a_refresh_a_node_stops(
    tmp_path: Path, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        scene.swarm.add("peer", 1000)
        await trio.sleep_forever()
        raise AssertionError

    scene.swarm.offered = exchange
    assert await scene.train_until_stopped(6) == "stopped"  # seen to be behind after 5 s, in the grace until 8 s
    states = [event.state for event in scene.told(StateChanged)]
    assert states[-2:] == ["fetching", "stopping"]
    assert scene.trainer.calls[-1] == "checkpoint"


PAUSE = Paused("hours", "outside", 3600.0)


async def pause_at(scene: Scene, seconds: float, until: float | None = None) -> None:
    await trio.sleep_until(scene.began + seconds)
    scene.reason = PAUSE
    scene.pause_policy.look()
    if until is not None:
        await trio.sleep_until(scene.began + until)
        scene.reason = None
        scene.pause_policy.look()


async def test_a_pause_finishes_the_exchange_under_way_and_writes_a_checkpoint(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        await trio.sleep(200)  # longer than the grace of a stop
        return Ended("committed", PeerId("partner"), b"s", partner_standing=Standing(0, 0, 1.0))

    scene.swarm.offered = exchange
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE + 1)
        assert await scene.session.train(scene.stop) == "paused"
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 200)
    assert scene.trainer.calls[-2:] == ["pause", "checkpoint"]
    assert "apply" in scene.trainer.calls
    assert isinstance(scene.session.loop.decide(Offer(PeerId("peer"), b"s", scene.weights.standing)), Busy)


async def test_a_stop_does_not_wait_as_long_as_a_pause(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        await trio.sleep_forever()
        raise AssertionError

    scene.swarm.offered = exchange
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE + 1)
        assert await scene.train_until_stopped(PHASE + 5) == "stopped"
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 5 + GRACE)


async def test_a_node_rests_until_the_pause_ends_and_trains_on(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE + 1, 1000)
        assert await scene.session.train(scene.stop) == "paused"
        assert await scene.session.rest(scene.stop)
        assert trio.current_time() - scene.began == pytest.approx(1000)
    assert [event.state for event in scene.told(StateChanged)][-1] == "paused"
    assert scene.trainer.calls.count("train") == 1
    assert await scene.train_until_stopped(PHASE + 1) == "stopped"
    assert len(scene.told(OuterStep)) == 2


async def test_a_rest_ends_with_a_stop_or_the_trainers_death(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()
    scene.reason = PAUSE
    scene.pause_policy.look()

    async def later(do: Callable[[], None]) -> None:
        await trio.sleep(10)
        do()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(later, scene.trainer.die)
        with pytest.RaisesGroup(TrainerError, flatten_subgroups=True):
            await scene.session.rest(scene.stop)
        nursery.start_soon(later, scene.stop.set)
        scene.trainer.dead = trio.Event()
        assert not await scene.session.rest(scene.stop)
    assert trio.current_time() - scene.began == pytest.approx(20)
    assert not await scene.session.rest(scene.stop), "and at once, if told before"


async def test_a_full_disk_at_a_pause_is_told_and_outlived(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.trainer.full_disk = 1
    await scene.weights.load()
    scene.reason = PAUSE
    scene.pause_policy.look()
    assert await scene.session.train(scene.stop) == "paused"
    assert scene.codes == [DiskFullError.entry.code]


async def test_who_rests_is_no_partner_no_donor_and_no_measure_of_the_pace(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.swarm.add("resting", 50, "paused")
    scene.swarm.add("of a later release", 60, "dreaming")
    await scene.weights.load()
    assert scene.swarm.asked == []
    assert not scene.weights.is_behind()
    members = scene.swarm.live()
    assert choose(random.Random(1), members, Standing(50, 0, 1.0), 3, ()) is None
    scene.swarm.add("training", 50)
    assert choose(random.Random(1), members, Standing(50, 0, 1.0), 3, ()) == "training"


async def test_a_dead_trainer_ends_the_session_at_once(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(Subject())
        scene.trainer.die()
        await trio.sleep_forever()
        raise AssertionError

    scene.swarm.offered = exchange
    with pytest.RaisesGroup(TrainerError, TrainerError, flatten_subgroups=True):  # of the watch, and of the discard
        await scene.session.train(scene.stop)
    assert trio.current_time() - scene.began == pytest.approx(PHASE)
    assert [event.outcome for event in scene.told(ExchangeEnded)] == ["aborted"]
