"""One trainer's session against a stand-in trainer and swarm on trio's virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import (
    DiskFullError,
    NoDonorError,
    TrainerError,
)
from nolocod.identity import PeerId
from nolocod.observe.events import (
    Checkpointed,
    ExchangeEnded,
    OuterStep,
    Paused,
    StateChanged,
)
from nolocod.p2p.membership.peer_selection import near
from nolocod.proto.types import Busy, Ended, Offer, Standing
from tests.support.stand_ins import GRACE, PHASE, Scene

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nolocod.proto.types import LocalSide


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
        await local_side.capture(0)
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
        await local_side.capture(0)
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


@pytest.mark.parametrize(
    ("cost", "rounds", "why"),
    [
        ((1, 0.0), [15, 30, 35], "every 60 s"),
        ((1, 2.0), [15, 35], "then not before 50 times as long as it took"),
        ((300_000_000, 0.0), [15, 35], "then not before a day's bytes allow it"),
    ],
)
async def test_checkpoints_leave_the_disk_its_rest(
    tmp_path: Path, autojump_clock: object, cost: tuple[int, float], rounds: list[int], why: str
) -> None:
    scene = Scene(tmp_path, may_seed=True, every=None)
    scene.trainer.checkpoint_cost = cost
    await scene.weights.load()
    await scene.train_until_stopped(35 * PHASE + 1)
    assert [event.round for event in scene.told(Checkpointed)] == rounds, why


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
        await local_side.capture(0)
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
        await local_side.capture(0)
        await trio.sleep(200)  # longer than the grace of a stop
        return Ended("committed", PeerId("partner"), b"s", partner_standing=Standing(0, 0, 1.0))

    scene.swarm.offered = exchange
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE + 1)
        assert await scene.session.train(scene.stop) == "paused"
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 200)
    assert scene.trainer.calls[-2:] == ["pause", "last checkpoint"]
    assert scene.session.trainer_may_end
    assert scene.swarm.stopped_answering == 1
    assert "apply" in scene.trainer.calls
    assert isinstance(scene.session.loop.decide(Offer(PeerId("peer"), b"s", scene.weights.standing)), Busy)


async def test_a_stop_does_not_wait_as_long_as_a_pause(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(0)
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
    assert not scene.session.trainer_may_end, "what it learned is nowhere else"


async def test_a_loop_of_ones_own_is_not_ended_by_a_pause(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.trainer.can_end = False
    await scene.weights.load()
    scene.reason = PAUSE
    scene.pause_policy.look()
    assert await scene.session.train(scene.stop) == "paused"
    assert scene.trainer.calls[-2:] == ["pause", "checkpoint"]
    assert not scene.session.trainer_may_end
    assert await scene.session.unless_paused(scene.trainer.pause), "nor is what it loads broken off"


async def test_who_wants_the_machine_now_does_not_wait_for_an_exchange(tmp_path: Path, autojump_clock: object) -> None:
    """The exchange is given up as at a stop; also if a pause that could wait has begun before."""
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(0)
        await trio.sleep_forever()
        raise AssertionError

    async def come_back() -> None:
        await trio.sleep_until(scene.began + PHASE + 50)
        scene.reason = Paused("used", "somebody plays", 600.0)
        scene.pause_policy.look()

    scene.swarm.offered = exchange
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, PHASE + 1)
        nursery.start_soon(come_back)
        assert await scene.session.train(scene.stop) == "paused"
    assert trio.current_time() - scene.began == pytest.approx(PHASE + 50 + GRACE)
    assert scene.trainer.calls[-4:] == ["snapshot", "discard", "pause", "last checkpoint"]
    assert [event.outcome for event in scene.told(ExchangeEnded)] == ["aborted"]


async def test_a_pause_breaks_off_what_takes_long(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.trainer.load_seconds = 600.0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pause_at, scene, 10)
        assert not await scene.session.unless_paused(scene.weights.load)
    assert trio.current_time() - scene.began == pytest.approx(10)


async def test_who_rests_is_no_partner_no_donor_and_no_measure_of_the_pace(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    scene.swarm.add("resting", 50, "paused")
    scene.swarm.add("of a later release", 60, "dreaming")
    await scene.weights.load()
    assert scene.swarm.asked == []
    assert not scene.weights.is_behind()
    members = scene.swarm.live()
    assert near(members, Standing(50, 0, 1.0), 3) == []
    scene.swarm.add("training", 50)
    assert [member.peer_id for member in near(members, Standing(50, 0, 1.0), 3)] == ["training"]


async def test_a_dead_trainer_ends_the_session_at_once(tmp_path: Path, autojump_clock: object) -> None:
    scene = Scene(tmp_path, may_seed=True)
    await scene.weights.load()

    async def exchange(local_side: LocalSide) -> Ended:
        await local_side.capture(0)
        scene.trainer.die()
        await trio.sleep_forever()
        raise AssertionError

    scene.swarm.offered = exchange
    with pytest.RaisesGroup(TrainerError, TrainerError, flatten_subgroups=True):  # of the watch, and of the discard
        await scene.session.train(scene.stop)
    assert trio.current_time() - scene.began == pytest.approx(PHASE)
    assert [event.outcome for event in scene.told(ExchangeEnded)] == ["aborted"]


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
