"""One node put together, with a stand-in trainer and mesh, on trio's virtual clock."""

from __future__ import annotations

import gc
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from nolocod.errors import (
    ClonedIdentityError,
    DataError,
    DeviceError,
    DiskFullError,
    IdentityError,
    LocalError,
    ModelTooLargeError,
    PeerBusyError,
    TrainerError,
)
from nolocod.identity import Identity, PeerId
from nolocod.node import daemon
from nolocod.node.config import NodeConfig
from nolocod.node.daemon import Node
from nolocod.node.peers import CurrentLoop, Peers
from nolocod.node.settings import Settings
from nolocod.observe.events import Checkpointed, Emit, Event, ExchangeEnded, OuterStep, Paused, Resumed, StateChanged, Troubled
from nolocod.outer.loop import LoopSettings, OuterLoop
from nolocod.p2p.membership.amended import AmendedRun
from nolocod.p2p.settings import Allowance, MeshSettings
from nolocod.p2p.transport.stream import EXCHANGE, SNAPSHOT
from nolocod.proto.types import Accept, Built, Busy, Description, Ended, Member, Offer, Standing
from nolocod.run.amendments import propose
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, Sealed, seal
from nolocod.run.owners import Change
from nolocod.trainer.pipe import Dumped, Loaded, Setup
from nolocod.trainer.process import TrainerEndedError
from nolocod.units import Hours
from tests.support.receipts import exchanged
from tests.support.stand_ins import PHASE, StandInTrainer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection
    from pathlib import Path


PEER = PeerId("peer")


class Box:
    size = 4


class StandInMesh:
    """Nobody else is there; keeps the handlers that it is given."""

    addresses = ("/ip4/127.0.0.1/tcp/1/p2p/own",)

    def __init__(self) -> None:
        self.offset = 0.0
        self.left = False
        self.cloned = trio.Event()
        self.expected = 0
        self.handlers: dict[str, Any] = {}
        self.run: AmendedRun | None = None

    async def enter(self, sealed: Sealed, own: Callable[[], tuple[Standing, str]]) -> AmendedRun:
        self.run = AmendedRun(sealed, None, lambda: own()[0].round, lambda _: None)
        return self.run

    async def dial(self, *_: object) -> None: ...

    def judge(self, *_: object) -> None: ...

    def probation(self, _: PeerId) -> bool:
        return False

    built = Built()

    def expect(self, size: int) -> None:
        self.expected = size

    def origin(self, peer: PeerId) -> tuple[str, bool]:
        return peer, False

    def clock_offset(self) -> float:
        return self.offset

    def serve(self, protocol: str, handler: object) -> None:
        self.handlers[protocol] = handler

    def live(self) -> list[Member]:
        return []

    def partner(self, own: Standing, avoid: Collection[PeerId], apart: Collection[PeerId]) -> None:
        return None

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        return True

    def met(self, peer: PeerId, *, offered: bool) -> None: ...

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        return told

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        return phase, 0

    def suspect(self, peer: PeerId) -> None: ...

    async def leave(self) -> None:
        self.left = True


async def at_once(work: Callable[..., object], *arguments: object, **_: object) -> object:
    """In place of a thread: it takes no time."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)


class StandInStream:
    def __init__(self) -> None:
        self.was_reset = False

    async def reset(self) -> None:
        self.was_reset = True


class Scene:
    """A node with its stand-ins; a new trainer for each of its lives."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.mesh = StandInMesh()
        self.trainers: list[StandInTrainer] = []
        self.lives: list[float] = []
        """Seconds after which one trainer after another dies; those beyond live on."""
        self.closing = 0.0
        self.load_seconds = 0.0
        config = NodeConfig(MeshSettings(folder), grace=3.0)
        for path in (config.paths.incoming, config.paths.checkpoints, config.paths.serving):
            path.mkdir()
        manifest = Manifest(name="tiny", model={"model_type": "llama"}, inner=Inner(steps=4))
        config.paths.manifest.write_bytes(seal(manifest, Identity.from_secret(b"o" * 32)).to_bytes())
        monkeypatch.setattr(daemon, "open_trainer", self.open_trainer)
        monkeypatch.setattr(daemon, "open_mesh", self.open_mesh)
        monkeypatch.setattr(trio.to_thread, "run_sync", at_once)  # the virtual clock jumps while a thread works
        self.config = config
        self.node = Node(config, may_seed=True, followers=[self.events.append])

    @asynccontextmanager
    async def open_mesh(self, *_: object, **__: object) -> AsyncIterator[StandInMesh]:
        yield self.mesh

    @asynccontextmanager
    async def open_trainer(self, emit: Emit) -> AsyncIterator[StandInTrainer]:
        trainer = StandInTrainer(emit)
        trainer.outbox = trainer.inbox = Box()  # type: ignore[assignment]  # no bytes move
        trainer.load_seconds = self.load_seconds
        self.trainers.append(trainer)

        async def die(after: float) -> None:
            await trio.sleep(after)
            trainer.die()

        async with trio.open_nursery() as nursery:
            if self.lives:
                nursery.start_soon(die, self.lives.pop(0))
            try:
                yield trainer
            finally:
                with trio.CancelScope(shield=True):
                    await trio.sleep(self.closing)
            nursery.cancel_scope.cancel()

    async def run(self, *signals: float) -> None:
        """Run the node, and send it SIGTERM at these seconds."""

        async def send() -> None:
            began = trio.current_time()
            for at in signals:
                await trio.sleep_until(began + at)
                signal.raise_signal(signal.SIGTERM)
                await trio.sleep(1e-9)

        async with trio.open_nursery() as nursery:
            await nursery.start(self.node.watch_signals, nursery.cancel_scope)
            nursery.start_soon(send)
            await self.node.run("127.0.0.1:1")
            nursery.cancel_scope.cancel()

    def emit_checkpoint(self) -> None:
        self.node.emit(Checkpointed(1, 1, 60.0))

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


# --- trainers that die --------------------------------------------------------------------------------


async def test_three_deaths_without_an_outer_step_end_the_node(scene: Scene, autojump_clock: object) -> None:
    scene.lives = [1.0, 1.0, 1.0, 1.0]
    with pytest.RaisesGroup(TrainerError, flatten_subgroups=True):
        await scene.run()
    assert len(scene.trainers) == 3
    assert [event.message for event in scene.told(Troubled)] == 2 * ["it died. It starts again from its checkpoint."]
    assert scene.mesh.left


async def test_a_loop_of_ones_own_has_one_life_and_its_failure_is_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Nobody could start it again; and it brings its own text."""
    scene = Scene(tmp_path, monkeypatch)
    scene.node = Node(replace(scene.config, loop=(3, 4)), may_seed=True, followers=[scene.events.append])
    monkeypatch.setattr(daemon, "attach_trainer", lambda emit, *_: scene.open_trainer(emit))
    scene.lives = [1.0, 1.0]
    with pytest.RaisesGroup(TrainerError, flatten_subgroups=True):
        await scene.run()
    assert len(scene.trainers) == 1
    assert scene.mesh.left


async def test_deaths_between_outer_steps_do_not_end_the_node(scene: Scene, autojump_clock: object) -> None:
    scene.lives = 6 * [PHASE + 1]
    await scene.run(7 * (PHASE + 1))
    assert len(scene.trainers) == 7
    assert len(scene.told(OuterStep)) == 7
    assert scene.mesh.expected == scene.trainers[-1].outbox.size, "relays that carry less are not tried"


async def test_a_trainer_is_not_started_again_for_a_node_that_stops(scene: Scene, autojump_clock: object) -> None:
    scene.lives, scene.closing = [5.0], 5.0
    await scene.run(7.0)  # the dead one is still being put away
    assert len(scene.trainers) == 1
    assert scene.mesh.left


async def test_a_node_whose_identity_is_gone_does_not_become_another_one(scene: Scene) -> None:
    scene.config.paths.identity.unlink()
    assert Node(scene.config, may_seed=True, followers=[])._identity.peer_id, "of a directory without checkpoints: a new node"
    scene.config.paths.identity.unlink()
    (scene.config.paths.checkpoints / "round-00000003").mkdir()
    with pytest.raises(IdentityError, match="does not exist") as raised:
        Node(scene.config, may_seed=True, followers=[])
    assert "Restore your backup" in raised.value.remedy
    assert not scene.config.paths.identity.exists()


# --- another node with our identity ---------------------------------------------------------------------


@pytest.mark.parametrize(("loading", "kept"), [(0.0, [1]), (1000.0, [])], ids=["in training", "while loading"])
async def test_a_clone_stops_in_order_and_says_why(
    scene: Scene, loading: float, kept: list[int], autojump_clock: object
) -> None:
    scene.load_seconds = loading
    began = trio.current_time()

    async def find_out() -> None:
        await trio.sleep(PHASE + 1)
        scene.mesh.cloned.set()

    with pytest.RaisesGroup(ClonedIdentityError, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(find_out)
            await scene.run()
    assert trio.current_time() - began < PHASE + 10
    assert [event.round for event in scene.told(Checkpointed)] == kept
    assert scene.mesh.left


# --- signals ------------------------------------------------------------------------------------------


async def test_the_first_signal_stops_in_order(scene: Scene, autojump_clock: object) -> None:
    await scene.run(PHASE + 1)
    assert scene.trainers[0].calls[-2:] == ["pause", "checkpoint"]
    assert [event.round for event in scene.told(Checkpointed)] == [1]
    assert scene.mesh.left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_node_that_is_to_stop_ends_before_it_is_killed_and_ctrl_c_leaves_it_its_time(
    number: signal.Signals, scene: Scene, autojump_clock: object
) -> None:
    """SIGTERM took 20 to 38 s at 113 M, and containers are killed after 10: what it then wrote was lost."""

    async def slowly() -> None:
        await trio.sleep(60)
        scene.emit_checkpoint()

    async def change() -> None:
        await trio.sleep(PHASE)
        scene.trainers[0].checkpoint = slowly  # type: ignore[method-assign]
        await trio.sleep(1)
        signal.raise_signal(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        began = trio.current_time()
        await scene.run()
    took = trio.current_time() - began - PHASE - 1
    if number == signal.SIGTERM:
        assert took <= scene.config.stop_within
        assert scene.told(Checkpointed) == []
        assert "no time for a checkpoint" in scene.told(StateChanged)[-1].waiting_for
    else:
        assert took == pytest.approx(60)
        assert len(scene.told(Checkpointed)) == 1
    assert scene.mesh.left


async def test_a_node_that_is_to_stop_does_not_wait_for_an_inner_step_of_minutes(scene: Scene, autojump_clock: object) -> None:
    """What an exchange asks of the trainer at its end is shielded: with steps of 30 s a node was still there after 30 s."""

    async def in_a_step(*_: object) -> None:
        trainer = scene.trainers[0]
        with trio.CancelScope(shield=True), trio.move_on_after(300):
            await trainer.dead.wait()
        raise trainer.death or AssertionError("the step came to its end")

    async def change() -> None:
        await trio.sleep(PHASE / 2)
        scene.trainers[0].solo = in_a_step  # type: ignore[method-assign, assignment]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        began = trio.current_time()
        await scene.run(PHASE + 1)
    assert trio.current_time() - began <= PHASE + 1 + scene.config.stop_within
    assert scene.told(Troubled) == []
    assert "no time for a checkpoint" in scene.told(StateChanged)[-1].waiting_for
    assert len(scene.trainers) == 1
    assert scene.mesh.left


async def test_a_signal_while_loading_stops_at_once(scene: Scene, autojump_clock: object) -> None:
    scene.load_seconds = 1000.0
    began = trio.current_time()
    await scene.run(1.0)
    assert trio.current_time() - began == pytest.approx(1.0)
    assert scene.trainers[0].calls == ["load"]


async def test_the_second_signal_stops_at_once(scene: Scene, autojump_clock: object) -> None:
    began = trio.current_time()

    async def stuck() -> None:
        await trio.sleep_forever()

    async def train_then_stick() -> None:
        await trio.sleep(PHASE)
        scene.trainers[0].pause = stuck  # type: ignore[method-assign]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(train_then_stick)
        await scene.run(PHASE + 1, PHASE + 2)
    assert trio.current_time() - began == pytest.approx(PHASE + 2)
    assert "checkpoint" not in scene.trainers[0].calls


# --- joining ------------------------------------------------------------------------------------------


async def test_a_clock_that_is_far_from_the_peers_ends_nobody(scene: Scene, autojump_clock: object) -> None:
    scene.mesh.offset = -3600.0
    await scene.run(PHASE)
    assert "train" in scene.trainers[0].calls


async def test_text_that_is_missing_is_told_before_the_trainer_is_asked(scene: Scene, autojump_clock: object) -> None:
    sealed = seal(Manifest(name="own", model={"model_type": "llama"}, data=Data(source="text")), Identity.generate())
    scene.config.paths.manifest.write_bytes(sealed.to_bytes())
    with pytest.RaisesGroup(pytest.RaisesExc(DataError, match="none were given"), flatten_subgroups=True):
        await scene.run()
    assert [trainer.calls for trainer in scene.trainers] == [[]]


async def test_a_clock_a_little_off_is_none(scene: Scene, autojump_clock: object) -> None:
    scene.mesh.offset = 599.0
    await scene.run(PHASE + 1)
    assert scene.told(OuterStep)


# --- services to peers --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [EXCHANGE, SNAPSHOT])
async def test_our_own_failure_costs_a_peer_its_stream_and_us_nothing(
    protocol: str, scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    async def fail(*_: object) -> None:
        raise DiskFullError("no space.")

    monkeypatch.setattr("nolocod.node.daemon.ExchangeService.handle", fail)
    monkeypatch.setattr("nolocod.node.daemon.Donor.handle", fail)
    await scene.run(1.0)
    stream = StandInStream()
    await scene.mesh.handlers[protocol](stream)
    assert stream.was_reset
    assert scene.told(Troubled) == [Troubled(DiskFullError.entry.code, "no space.")]


async def test_that_the_trainer_was_ended_is_not_told_by_a_service(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    async def fail(*_: object) -> None:
        raise TrainerEndedError("the trainer process ended by signal SIGKILL.")

    monkeypatch.setattr("nolocod.node.daemon.ExchangeService.handle", fail)
    await scene.run(1.0)
    stream = StandInStream()
    await scene.mesh.handlers[EXCHANGE](stream)
    assert stream.was_reset
    assert scene.told(Troubled) == []


async def test_a_full_disk_costs_an_exchange_of_ours_and_not_the_node() -> None:
    class Full:
        async def offer(self, *_: object) -> Ended:
            raise DiskFullError("no space.")

    events: list[Event] = []
    swarm = Peers(cast("Any", StandInMesh()), cast("Any", Full()), cast("Any", None), events.append)
    ended = await swarm.offer(PEER, Standing(0, 0, 1.0), 0, cast("Any", None))
    assert (ended.outcome, ended.error) == ("aborted", "NLC-121")
    assert events == [Troubled("NLC-121", "no space.")]


async def test_one_snapshot_lies_on_the_disk_however_many_newcomers_went_away(scene: Scene, autojump_clock: object) -> None:
    async def dump(path: Path) -> Dumped:
        path.write_bytes(b"weights")  # noqa: ASYNC240 - a few bytes
        await trio.sleep(1)
        return Dumped(Standing(int(path.stem.removeprefix("round-")), 0, 1.0), Description(7, 7, (b"",)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.run, 10 * PHASE)
        with pytest.raises(PeerBusyError):
            await scene.node._snapshot.get()
        await trio.sleep(0.1)
        scene.trainers[0].dump = dump  # type: ignore[attr-defined]
        for _ in range(3):
            with trio.move_on_after(0.5):
                await scene.node._snapshot.get()
            await trio.sleep(PHASE)
        served = await scene.node._snapshot.get()
        assert served is await scene.node._snapshot.get(), "one for all newcomers of a round"
        assert list(scene.config.paths.serving.iterdir()) == [served.path]
        nursery.cancel_scope.cancel()


async def test_weights_that_take_longer_to_write_than_a_newcomer_waits_are_kept(scene: Scene, autojump_clock: object) -> None:
    """A dump above 120 s was never kept: asked again it began anew, and no newcomer ever got one."""
    begun: list[float] = []

    async def dump(path: Path) -> Dumped:
        begun.append(trio.current_time())
        path.write_bytes(b"weights")  # noqa: ASYNC240 - a few bytes
        await trio.sleep(300)
        return Dumped(Standing(int(path.stem.removeprefix("round-")), 0, 1.0), Description(7, 7, (b"",)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.run)
        await trio.sleep(0.1)
        scene.trainers[0].dump = dump  # type: ignore[attr-defined]
        with trio.move_on_after(120):
            await scene.node._snapshot.get()
        await trio.sleep(100)
        first = await scene.node._snapshot.get()
        assert trio.current_time() - begun[0] == pytest.approx(300)
        await trio.sleep(1000)
        assert await scene.node._snapshot.get() is first, "rounds went by, but another would cost as much again"
        await trio.sleep(300)
        assert await scene.node._snapshot.get() is not first
        assert len(begun) == 2
        scene.trainers[0].dump = failing  # type: ignore[attr-defined]
        await trio.sleep(2000)
        for _ in range(2):
            with pytest.raises(DiskFullError):
                await scene.node._snapshot.get()
        nursery.cancel_scope.cancel()


async def failing(_: Path) -> Dumped:
    await trio.sleep(1)
    raise DiskFullError("no space.")


# --- answering ----------------------------------------------------------------------------------------


def loop_of(trainer: StandInTrainer) -> OuterLoop:
    trainer.began -= PHASE  # due
    mesh = cast("Any", StandInMesh())
    return OuterLoop(PeerId("own"), cast("Any", trainer), mesh, LoopSettings(4, 3, 60.0, 0, 1, 1), [].append, lambda _: False)


async def test_an_accepted_exchange_stays_with_the_trainer_that_died_in_it(autojump_clock: object) -> None:
    answerer, offer = CurrentLoop(), Offer(PEER, b"s", Standing(0, 0, 1.0))
    answer = answerer.decide(offer)
    assert isinstance(answer, Busy)
    assert answer.reason == "not ready"

    dead = StandInTrainer([].append)
    answerer.loop = loop_of(dead)
    assert isinstance(answerer.decide(offer), Accept)
    await answerer.local_side.capture(0)
    dead.die()
    answerer.loop = None
    assert isinstance(answerer.decide(offer), Busy)
    answerer.loop = loop_of(StandInTrainer([].append))
    assert isinstance(answerer.decide(offer), Busy), "until the old exchange has ended"
    with pytest.raises(TrainerError):
        await answerer.ended(Ended("aborted", PEER, b"s"))
    assert isinstance(answerer.decide(offer), Accept)
    await answerer.ended(Ended("aborted", PEER, b"s"))
    with pytest.raises(AssertionError, match="no exchange"):
        _ = answerer.local_side


# --- what the owner allows ----------------------------------------------------------------------------


async def allowance_of(scene: Scene, nursery: trio.Nursery, **changes: object) -> None:
    """Give the node another allowance, and have it kept."""
    config = replace(scene.config, **cast("Any", changes))
    scene.node = Node(config, may_seed=True, followers=[scene.events.append])
    await nursery.start(scene.node.keep_allowance)


async def test_a_node_whose_month_is_spent_stays_in_the_mesh_and_serves_nobody(scene: Scene, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, allowance=Allowance(monthly=1_000_000))
        nursery.start_soon(scene.run, 10 * PHASE)
        await trio.sleep(PHASE + 1)
        assert scene.node._own_state()[1] == "training"

        async def upload(*_: object) -> None:
            await scene.node._budget.up(990_000)
            await trio.sleep_forever()

        stream = StandInStream()
        handle = scene.node._pausing.pausable(upload)
        with trio.fail_after(3):
            await handle(stream)  # type: ignore[arg-type]  # all of it that is used
        assert stream.was_reset, "the upload under way is broken off"
        await trio.sleep(1)
        assert scene.node._own_state()[1] == "paused"
        assert isinstance(scene.node._answerer.decide(Offer(PEER, b"s", Standing(1, 0, 1.0))), Busy)
        second = StandInStream()
        await handle(second)  # type: ignore[arg-type]  # all of it that is used
        assert second.was_reset
        assert not scene.mesh.left
        assert [event.reason for event in scene.told(Paused)] == ["budget"]
        assert scene.trainers[0].calls[-2:] == ["pause", "last checkpoint"]
        assert scene.node._trainer is None, "and has ended"
        steps = len(scene.told(OuterStep))
        await trio.sleep(3 * PHASE)
        assert len(scene.told(OuterStep)) == steps
        await trio.sleep(10 * PHASE)
        assert scene.mesh.left, "SIGTERM stops a node that rests"
        nursery.cancel_scope.cancel()
    assert b'"up":990000' in (scene.config.paths.usage).read_bytes()


async def test_a_node_outside_of_its_hours_loads_nothing_until_they_begin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    is_open = False
    monkeypatch.setattr("nolocod.node.schedule.open_at", lambda *_: is_open)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, settings=Settings(hours=(Hours(0, 60),)))
        nursery.start_soon(scene.run, 1000 + PHASE)
        await trio.sleep(500)
        assert scene.trainers[0].calls == []
        assert scene.node._own_state()[1] == "paused"
        is_open = True
        await trio.sleep(500)
        assert scene.trainers[0].calls[:2] == ["load", "train"]
        assert scene.node._own_state()[1] == "training"
        assert len(scene.told(Resumed)) == 1
        await trio.sleep(100)
        nursery.cancel_scope.cancel()


async def test_a_newcomer_that_rests_can_be_stopped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    monkeypatch.setattr("nolocod.node.schedule.open_at", lambda *_: False)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, settings=Settings(hours=(Hours(0, 60),)))
        began = trio.current_time()
        await scene.run(50.0)
        assert trio.current_time() - began == pytest.approx(50.0)
        nursery.cancel_scope.cancel()
    assert scene.trainers[0].calls == []


async def test_limits_that_no_exchange_fits_in_are_told_once(scene: Scene, autojump_clock: object) -> None:
    scene.lives = [PHASE + 1]
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, allowance=Allowance(monthly=8))
        nursery.start_soon(scene.run, 3 * PHASE)
        await trio.sleep(4 * PHASE)
        nursery.cancel_scope.cancel()
    assert [event.code for event in scene.told(Troubled)].count("NLC-128") == 1


async def test_the_month_is_looked_at_before_another_exchange_begins(scene: Scene, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, allowance=Allowance(monthly=1_000_000))
        await trio.sleep(0.5)  # between two looks
        await scene.node._budget.up(990_000)
        assert scene.told(Paused) == []
        scene.node.emit(ExchangeEnded(PEER, "s", True, "committed", 1, 1, 1.0))
        assert [event.reason for event in scene.told(Paused)] == ["budget"]
        nursery.cancel_scope.cancel()


async def test_what_a_node_begins_with_is_collected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full collections, that a flood brings about, took 70 ms each: three in half a minute of offers."""
    kept: list[int] = []

    async def run(self: Node, _: str) -> None:
        kept.append(gc.get_freeze_count())
        began = time.thread_time()
        gc.collect()
        assert time.thread_time() - began < 0.02

    monkeypatch.setattr(Node, "run", run)
    gc.unfreeze()  # what was frozen as tests were collected
    try:
        await daemon.run_node(NodeConfig(MeshSettings(tmp_path)), may_seed=True)
    finally:
        gc.unfreeze()
    assert kept[0] > 100_000


# --- a good guest ---------------------------------------------------------------------------------------


async def test_a_pause_ends_the_trainer_and_another_one_goes_on_from_its_checkpoint(
    scene: Scene, autojump_clock: object
) -> None:
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run, 1000.0)
        await trio.sleep(2 * PHASE + 1)
        scene.node.guest.change({"pause": "yes"})
        await trio.sleep(100)
        assert (len(scene.trainers), scene.node._trainer) == (1, None)
        assert scene.trainers[0].calls[-2:] == ["pause", "last checkpoint"]
        assert [(event.reason, event.seconds) for event in scene.told(Paused)] == [("owner", None)]
        assert scene.node._own_state() == (scene.trainers[0].standing, "paused"), "it tells its round still"
        assert isinstance(scene.node._answerer.decide(Offer(PEER, b"s", Standing(1, 0, 1.0))), Busy)
        scene.node.guest.change({"pause": "no"})
        await trio.sleep(2)
        assert scene.trainers[1].calls[:2] == ["load", "train"]
        assert scene.node._own_state()[1] == "training"
        assert scene.told(Troubled) == [], "it is no failure"
        nursery.cancel_scope.cancel()


async def test_lost_steps_are_told_once_however_many_trainers_begin_before_them(scene: Scene, autojump_clock: object) -> None:
    """A trainer that was paused before its first outer step told of them anew when it went on."""
    own, other = scene.node._identity, Identity.from_secret(b"p" * 32)

    def codes() -> list[str]:
        return [event.code for event in scene.told(Troubled)]

    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        scene.node._receipts.add(exchanged(own, other, 120.0))  # in round 2; the checkpoint is of round 0
        nursery.start_soon(scene.run, 1000.0)
        await trio.sleep(1)
        assert codes() == ["NLC-143"]
        for pause in ("yes", "no"):
            scene.node.guest.change({"pause": pause})
            await trio.sleep(PHASE / 2)
        assert (len(scene.trainers), scene.node._own_state()[1]) == (2, "training")
        assert codes() == ["NLC-143"]
        scene.node._receipts.add(exchanged(own, other, 180.0))
        for pause in ("yes", "no"):
            scene.node.guest.change({"pause": pause})
            await trio.sleep(PHASE / 2)
        assert codes() == ["NLC-143", "NLC-143"], "another one is news"
        assert scene.told(Troubled)[-1].message.startswith("1 that partners took")
        nursery.cancel_scope.cancel()


async def test_a_pause_while_weights_are_loaded_ends_the_trainer_too(scene: Scene, autojump_clock: object) -> None:
    scene.load_seconds = 600.0
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run)
        await trio.sleep(10)
        scene.node.guest.change({"pause": "yes"})
        await trio.sleep(2)
        assert (len(scene.trainers), scene.node._trainer) == (1, None)
        nursery.cancel_scope.cancel()


async def test_a_node_that_rests_without_a_trainer_can_be_stopped(scene: Scene, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run, 100.0)
        await trio.sleep(PHASE + 1)
        scene.node.guest.change({"pause": "yes"})
        await trio.sleep(100)
        assert scene.mesh.left
        nursery.cancel_scope.cancel()
    assert len(scene.trainers) == 1


async def test_what_a_trainer_is_told_once_is_set_by_starting_it_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    told: list[tuple[str, int, int]] = []

    async def load(self: StandInTrainer, setup: Setup) -> Loaded:
        told.append((setup.devices, setup.threads, setup.nice))
        return await loaded(self, setup)

    loaded = StandInTrainer.load
    monkeypatch.setattr(StandInTrainer, "load", load)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery, settings=Settings(nice=5))
        nursery.start_soon(scene.run)
        await trio.sleep(PHASE + 1)
        scene.node.guest.change({"threads": "3", "duty": "50%"})
        await trio.sleep(5)
        assert told == [("auto", 0, 5), ("auto", 3, 5)]
        assert scene.trainers[0].calls[-2:] == ["pause", "last checkpoint"]
        assert [event.reason for event in scene.told(Paused)] == ["settings"]
        assert len(scene.told(Resumed)) == 1
        assert scene.trainers[1].share == 0.5
        scene.node.guest.change({"duty": ""})
        await trio.sleep(5)
        assert (scene.trainers[1].share, len(scene.trainers)) == (1.0, 2), "a share takes no new trainer"
        nursery.cancel_scope.cancel()


async def test_what_the_runs_owners_change_is_told_to_a_new_trainer_and_they_may_have_all_wait(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    owner = Identity.from_secret(b"o" * 32)
    told: list[bytes] = []

    async def load(self: StandInTrainer, setup: Setup) -> Loaded:
        told.append(setup.amendments)
        return await loaded(self, setup)

    loaded = StandInTrainer.load
    monkeypatch.setattr(StandInTrainer, "load", load)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run)
        await trio.sleep(PHASE + 1)
        run = scene.mesh.run
        assert run is not None
        changes = [Change(at=500, learning_rate=1e-4)]
        run.learn(first := propose(run.sealed, 1, changes, owner))
        await trio.sleep(5)
        assert told == [b"", first], "well before it counts"
        run.learn(second := propose(run.sealed, 2, [Change(at=0, paused=True, note="tea"), *changes], owner))
        await trio.sleep(5)
        assert scene.node._own_state()[1] == "paused"
        assert scene.told(Paused)[-1] == Paused("run", "the run's owner has it wait: tea", None)
        on = [Change(at=0, paused=True, note="tea"), Change(at=0, paused=False), *changes]
        run.learn(third := propose(run.sealed, 3, on, owner))
        await trio.sleep(5)
        assert scene.node._own_state()[1] == "training"
        assert [raw for raw in told if raw != second] == [b"", first, third], "the pause ended the trainer"
        nursery.cancel_scope.cancel()


async def test_without_room_for_a_checkpoint_a_trainer_is_kept(scene: Scene, autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run)
        await trio.sleep(PHASE + 1)
        scene.trainers[0].full_disk = 1
        scene.node.guest.change({"threads": "3"})
        await trio.sleep(3)
        assert len(scene.trainers) == 1
        assert [event.code for event in scene.told(Troubled)] == ["NLC-121"]
        assert scene.node._own_state()[1] == "training", "as it was"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("error", "before", "after"), [
    (ModelTooLargeError("memory ran out."), "cuda:1", "cuda:1"), (DeviceError("there is no cuda:1."), "cuda:1", "auto"),
])  # fmt: skip
async def test_a_device_that_others_took_in_a_pause_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object, error: LocalError, before: str, after: str
) -> None:
    told: list[str] = []

    async def load(self: StandInTrainer, setup: Setup) -> Loaded:
        told.append(setup.devices)
        if len(told) in (2, 3) and setup.devices == before:
            raise error
        return await loaded(self, setup)

    loaded = StandInTrainer.load
    monkeypatch.setattr(StandInTrainer, "load", load)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        nursery.start_soon(scene.run)
        await trio.sleep(PHASE + 1)
        scene.node.guest.change({"devices": before})
        await trio.sleep(150)
        assert told == ["auto", before, *([before, before] if after == before else ["auto"])]
        assert {event.code for event in scene.told(Troubled)} == {error.code}
        assert scene.node._own_state()[1] == "training"
        nursery.cancel_scope.cancel()


async def test_a_device_that_was_set_and_is_not_there_is_set_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """Before an outer step too: the setting is on the disk, and without the node nobody could take it back."""
    told: list[str] = []

    async def load(self: StandInTrainer, setup: Setup) -> Loaded:
        told.append(setup.devices)
        if setup.devices == "cuda:7":
            raise DeviceError("there is no cuda:7.")
        return await loaded(self, setup)

    loaded = StandInTrainer.load
    monkeypatch.setattr(StandInTrainer, "load", load)
    async with trio.open_nursery() as nursery:
        await allowance_of(scene, nursery)
        scene.node.guest.change({"devices": "cuda:7"})
        nursery.start_soon(scene.run)
        await trio.sleep(PHASE + 1)
        assert told == ["cuda:7", "auto"]
        assert scene.node.guest.change({}) == {}
        nursery.cancel_scope.cancel()


async def test_a_device_that_never_was_enough_ends_the_node(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    async def load(self: StandInTrainer, setup: Setup) -> Loaded:
        raise ModelTooLargeError("memory ran out.")

    monkeypatch.setattr(StandInTrainer, "load", load)
    # the deadline inside: the clock jumps to it while the end waits for a thread
    with pytest.RaisesGroup(ModelTooLargeError, flatten_subgroups=True), trio.fail_after(1000):
        await scene.run()
