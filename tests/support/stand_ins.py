"""A trainer and a swarm for one training session, on trio's virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import trio

from nolocod.errors import (
    DiskFullError,
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
    InnerSteps,
    Paused,
    Troubled,
)
from nolocod.paths import DataDir
from nolocod.proto.types import Applied, Built, Description, Ended, Inspection, Member, SnapshotParts, Standing
from nolocod.run.manifest import Inner, Manifest, Outer
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
    can_end = can_enlarge = True
    share = 1.0
    given_up = False

    def __init__(self, emit: Emit, source: Literal["seed", "checkpoint"] = "seed", round_number: int = 0) -> None:
        self.emit = emit
        self.source = source
        self.round = self.loads_round = round_number
        self.trouble: tuple[str, ...] = ()
        self.calls: list[str] = []
        self.adopted: list[Standing] = []
        self.misfits: set[bytes] = set()
        self.weights = b""
        self.built = Built(b"l" * 16, b"w" * 16, "torch 2.8, transformers 5.1")
        self.losses: dict[bytes, float] = {}
        """Held-out, by whose weights they are."""
        self.far: set[bytes] = set()
        """Whose weights are far from the other donors'."""
        self.load_seconds = self.exchange_seconds = 0.0
        self.full_disk = 0
        self.checkpoint_cost = 1, 0.0
        """Bytes and seconds."""
        self.death: TrainerError | None = None
        self.dead = trio.Event()
        self.began = trio.current_time()

    @property
    def standing(self) -> Standing:
        return Standing(self.round, 0, 1.0)

    @property
    def steps_since_outer(self) -> int:
        return int(trio.current_time() - self.began + 1e-9)

    def give_up(self) -> None:
        self.given_up = True
        self.die()

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
        told = {"trouble": self.trouble, "built": self.built, "devices": ("cpu",)}
        return Loaded(self.standing, 1, 4, 4, self.source, outbox_offset=4096, phase=4, made_on="cpu", **told)  # type: ignore[arg-type]

    async def adopt(self, weights: Path, standing: Standing) -> None:
        self.note("adopt")
        self.weights = weights.read_bytes()  # noqa: ASYNC240 - a few bytes
        if self.weights in self.misfits:
            raise RejectedTensorError("they have other names.")
        self.adopted.append(standing)
        self.round = standing.round

    async def place(self, standing: Standing) -> None:
        self.round = standing.round

    async def compare(self, samples: tuple[SnapshotParts, ...]) -> str:
        self.note(f"compare with {len(samples)}")
        assert all(sample.path.exists() for sample in samples)
        return "a matrix is 2.00 of its norm away" if self.weights in self.far else ""

    async def train(self) -> None:
        self.note("train")
        await trio.sleep(1e-9)  # the pipe
        self.began = trio.current_time()
        self.emit(InnerSteps(1, 0, 1.0, 1e-3, 1.0))

    async def pause(self) -> None:
        self.note("pause")

    async def enlarge(self, times: int) -> None:
        await trio.lowlevel.checkpoint()

    async def wait_steps(self, count: int) -> None:
        await trio.sleep_until(self.began + count)

    def subject(self, count: int) -> int:
        return 0

    async def capture(self, subject: int, after: int) -> Description:
        await trio.sleep_until(self.began + after)
        self.note("snapshot")
        return Description(0, 1, ())

    async def inspect(self, *, probation: bool) -> Inspection:
        return Inspection(1.0)

    async def discard(self) -> None:
        self.note("discard")

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        self.note("apply")
        return self._stepped(max(self.round + 1, run_round))

    async def solo(self, run_round: int, subject: int, after: int) -> Applied:
        await trio.sleep_until(self.began + after)
        self.note("solo")
        return self._stepped(max(self.round + 1, run_round))

    def _stepped(self, round_number: int) -> Applied:
        self.round, self.began = round_number, trio.current_time()
        return Applied(self.round, 4, None, 0.0)

    async def evaluate(self, *, told: bool = True) -> float:
        self.note("evaluate" if told else "try")
        return self.losses.get(self.weights, 1.0)

    async def ease(self, share: float) -> None:
        self.note("ease")
        self.share = share

    async def checkpoint(self, *, last: bool = False) -> Checkpointed:
        self.note("last checkpoint" if last else "checkpoint")
        if self.full_disk:
            self.full_disk -= 1
            raise DiskFullError("no space.")
        saved = Checkpointed(self.round, *self.checkpoint_cost)
        self.emit(saved)
        return saved


UNTOLD = Built()


class StandInSwarm:
    """Members as the test says, and donors that give their own name as weights."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.unreachable: set[PeerId] = set()
        self.patience = 600.0
        self.asked: list[list[PeerId]] = []
        self.doubted: list[PeerId] = []
        self.stopped_answering = 0
        self.offered: Callable[[LocalSide], Any] | None = None
        self.standings: dict[PeerId, Standing] = {}
        self.fetch_seconds = self.sample_seconds = 1.0

    def add(
        self, name: str, round_number: int, state: str = "training", *,
        verified: bool = True, group: str = "", built: Built = UNTOLD,
    ) -> PeerId:  # fmt: skip
        peer = PeerId(name)
        standing = Standing(round_number, 0, 1.0)
        member = Member(peer, standing, state, (), "1", 0.0, None, verified=verified, group=group, built=built)
        self.members.append(member)
        return peer

    def live(self) -> list[Member]:
        return self.members

    def partner(self, own: Standing, avoid: Collection[PeerId], apart: Collection[PeerId]) -> PeerId | None:
        return PeerId("partner") if self.offered else None

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        return True

    def met(self, peer: PeerId, *, offered: bool) -> None: ...

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        return told

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        return phase, 0

    def suspect(self, peer: PeerId) -> None: ...

    def stop_answering(self) -> None:
        self.stopped_answering += 1

    def probation(self, peer: PeerId) -> bool:
        return False

    def doubt(self, donor: PeerId) -> None:
        self.doubted.append(donor)

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: LocalSide) -> Ended:
        assert self.offered is not None
        return cast("Ended", await self.offered(local_side))

    async def fetch_weights(self, donors: list[PeerId], into: Path, size: int) -> tuple[PeerId, Standing]:
        self.asked.append(donors)
        await trio.sleep(self.fetch_seconds)
        donor = next((donor for donor in donors if donor not in self.unreachable), None)
        if donor is None:
            raise NoDonorError("none gave them.")
        into.write_bytes(donor.encode())  # noqa: ASYNC240 - a few bytes
        known = next(member.standing for member in self.members if member.peer_id == donor)
        return donor, self.standings.get(donor, known)

    async def sample_weights(
        self, donors: list[PeerId], wanted: tuple[int, int], folder: Path, took: tuple[float, float]
    ) -> tuple[SnapshotParts, ...]:
        await trio.sleep(self.sample_seconds)
        count, size = wanted
        able = [donor for donor in donors if donor not in self.unreachable][:count]
        samples = tuple(SnapshotParts(folder / f"sample-{number}", ((0, size),)) for number in range(len(able)))
        for sample in samples:
            sample.path.write_bytes(bytes(size))
        return samples


class Scene:
    """A training session with its stand-ins, and what it told."""

    def __init__(
        self,
        folder: Path,
        *,
        may_seed: bool = False,
        goal: int = 0,
        source: str = "seed",
        rounds: int = 0,
        every: float | None = 10.0,
        model: dict[str, Any] | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.swarm = StandInSwarm()
        self.trainer = StandInTrainer(self.emit, cast('Literal["seed", "checkpoint"]', source), rounds)
        model = model or {"model_type": "llama"}
        manifest = Manifest(name="tiny", model=model, inner=Inner(steps=4), outer=Outer(rounds=goal))
        paths = DataDir(folder)
        self.incoming = paths.incoming
        for path in (paths.incoming, paths.checkpoints):
            path.mkdir(exist_ok=True)
        self.pause_policy = PausePolicy([lambda: self.reason], self.emit)
        self.reason: Paused | None = None
        setup = Setup(
            manifest=b"", peer_id=OWN, data=None, devices="cpu", threads=1, checkpoints=paths.checkpoints, cache=paths.cache
        )
        settings = SessionSettings(setup, manifest, paths.incoming, may_seed, checkpoint_every=every, grace=GRACE, goal=goal)
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
