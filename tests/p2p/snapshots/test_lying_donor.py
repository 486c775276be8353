"""A donor that signs for altered weights, among honest ones: real hosts on loopback and real replicas.

The rule: what the liar serves is whole, finite, of the run's shape and well signed, so that nothing but a look at the values
can tell; it also tells of the furthest round, so that it is asked first.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Literal, cast

import torch
import trio

from nolocod.errors import FarWeightsError, HarmfulTensorError, NoDonorError
from nolocod.identity import Identity, PeerId, short
from nolocod.node.peers import Peers
from nolocod.node.weights import SessionSettings, Weights
from nolocod.observe.events import Event, Troubled, WeightsServed
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.timing import Timing
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto.types import Standing
from nolocod.trainer.checkpoint import read_tensors
from nolocod.trainer.pipe import Loaded, Setup
from nolocod.units import Address
from tests.support.trainer_parts import dump, make_replica, sealed_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from nolocod.p2p.exchange.service import ExchangeService
    from nolocod.proto.types import SnapshotParts
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.process import TrainerProcess
    from nolocod.trainer.replica import Replica

QUICK = Timing(heartbeat=0.3, live=30.0, search=0.5, widen=5.0)


def flip(replica: Replica) -> None:
    replica.phi.neg_()


def blur(replica: Replica) -> None:
    noise = torch.randn(replica.phi.shape, generator=torch.Generator().manual_seed(1))
    for _, tensor in replica.layout.split(replica.phi):
        tensor.add_(noise[: tensor.numel()].view(tensor.shape) * tensor.std())


def zero_one(replica: Replica) -> None:
    dict(replica.layout.split(replica.phi))["model.layers.1.mlp.down_proj.weight"].zero_()


class Node:
    """A member; `serve` makes it a donor of what its replica holds."""

    def __init__(self, run: Sealed, folder: Path, number: int) -> None:
        self.folder = folder / str(number)
        self.folder.mkdir()
        self.run = run
        self.identity = Identity.from_secret(bytes([number]) * 32)
        self.standing, self.state = Standing(5, 100, 5.0), "joining"
        self.events: list[Event] = []
        self.context = Context.of(self.identity, run)
        self.mesh: Mesh | None = None
        self._served: ServedSnapshot | None = None

    @property
    def config(self) -> MeshSettings:
        relaying = Relaying(serve=False, use=False)
        return MeshSettings(self.folder, listen=(Address("127.0.0.1", 0),), relaying=relaying, upnp=False)

    def serve(self, replica: Replica, *, round_number: int, state: str = "training") -> None:
        path = self.folder / f"weights-{len(list(self.folder.iterdir()))}"
        self.standing, self.state = Standing(round_number, 100, 5.0), state
        self._served = ServedSnapshot(path, self.standing, dump(replica, path))

    async def _snapshot(self) -> ServedSnapshot:
        await trio.lowlevel.checkpoint()
        assert self._served is not None
        return self._served

    @asynccontextmanager
    async def meshed(self, rng: random.Random, bootstrap: tuple[str, ...]) -> AsyncIterator[Node]:
        config = MeshSettings(**{**vars(self.config), "bootstrap": bootstrap})
        async with open_mesh(config, self.identity, self.events.append, rng=rng, timing=QUICK) as mesh:
            self.mesh = mesh
            await mesh.enter(self.run, lambda: (self.standing, self.state))
            donor = Donor(self.context, self._snapshot, 2, self.events.append, mesh.origin)
            mesh.serve(SNAPSHOT, donor.handle)
            yield self
        donor.close()


def trained(run: Sealed, folder: Path, name: str) -> Replica:
    """One of a swarm: the run's weights after some steps on windows of its own, and an outer step alone."""
    replica = make_replica(run, folder, name)
    for _ in range(8):
        replica.step()
    replica.solo()
    return replica


class Trainer:
    """The newcomer's, as far as a training session begins with it, without a process of its own; `source`: of its weights."""

    def __init__(self, replica: Replica, source: Literal["seed", "checkpoint"] = "seed") -> None:
        self.replica = replica
        self.standing = replica.standing
        self.source: Literal["seed", "checkpoint"] = source
        self._kept = replica.phi.clone()

    async def load(self, _setup: Setup) -> Loaded:
        await trio.lowlevel.checkpoint()
        self.replica.phi.copy_(self._kept)
        self.replica.theta.copy_(self._kept)
        sizes = self.replica.layout.size, self.replica.snapshot_size, 1
        return Loaded(self.standing, *sizes, self.source, outbox_offset=0, phase=4, trouble=(), devices=("cpu",), made_on="cpu")

    async def adopt(self, weights: Path, standing: Standing) -> None:
        await trio.lowlevel.checkpoint()
        self.replica.adopt(weights, standing)

    async def place(self, standing: Standing) -> None:
        await trio.lowlevel.checkpoint()
        self.replica.standing = standing

    async def evaluate(self, *, told: bool) -> float:
        await trio.lowlevel.checkpoint()
        assert not told
        return self.replica.evaluate()

    async def compare(self, samples: tuple[SnapshotParts, ...]) -> str:
        await trio.lowlevel.checkpoint()
        assert len(samples) >= 1
        return self.replica.compare(samples)


async def load_as_newcomer(
    newcomer: Node, emit: Callable[[Event], None], own: Replica | None = None
) -> dict[str, torch.Tensor]:
    """What a daemon does first, with a checkpoint of its `own` or without one; the weights that it came to hold."""
    assert newcomer.mesh is not None
    peers = Peers(newcomer.mesh, cast("ExchangeService", None), newcomer.context, emit)
    paths, run = newcomer.config.paths, newcomer.run
    paths.incoming.mkdir(exist_ok=True)
    setup = Setup(
        manifest=run.to_bytes(),
        peer_id=newcomer.identity.peer_id,
        data=None,
        devices="cpu",
        threads=1,
        checkpoints=paths.checkpoints,
        cache=paths.cache,
    )
    settings = SessionSettings(setup, run.manifest, paths.incoming, may_seed=False, checkpoint_every=60.0, grace=1.0, goal=0)
    trainer = Trainer(make_replica(newcomer.run, newcomer.folder, "newcomer")) if own is None else Trainer(own, "checkpoint")
    await Weights(settings, cast("TrainerProcess", trainer), peers, emit).load()
    return {name: tensor.clone() for name, tensor in trainer.replica.layout.split(trainer.replica.phi)}


async def test_a_newcomer_does_not_take_altered_weights(tmp_path: Path) -> None:
    run = sealed_run()
    events: list[Event] = []
    alice, bob, liar, newcomer = (Node(run, tmp_path, number) for number in (1, 2, 3, 4))
    for node, name in ((alice, "alice"), (bob, "bob")):
        node.serve(trained(run, tmp_path, name), round_number=5)
    honest = [read_tensors(node._served.path) for node in (alice, bob) if node._served]
    held, told = [], []
    with trio.fail_after(300):
        async with AsyncExitStack() as stack:
            bootstrap: tuple[str, ...] = ()
            for node in (alice, bob, liar, newcomer):
                await stack.enter_async_context(node.meshed(random.Random(node.standing.round), bootstrap))
                assert node.mesh is not None
                bootstrap = bootstrap or node.mesh.addresses[:1]
            for lie in (flip, blur, zero_one):
                altered = trained(run, tmp_path, "liar")
                lie(altered)
                liar.serve(altered, round_number=6)
                await _until_heard(newcomer, liar)
                events.clear()
                held.append(await load_as_newcomer(newcomer, events.append))
                told.append([event for event in events if isinstance(event, Troubled)])
            assert alice.mesh is not None
            own = newcomer.identity.peer_id
            assert alice.mesh.origin(own)[0] == own, "on loopback nobody shares a group"
            assert alice.mesh.origin(PeerId("away")) == ("relayed", False)
    assert all(any(_same(one, other) for other in honest) for one in held)
    assert [[event.code for event in troubles] for troubles in told] == [[FarWeightsError.entry.code]] * 3, told
    assert all(short(liar.identity.peer_id) in troubles[0].message for troubles in told)
    assert [event.whole for event in liar.events if isinstance(event, WeightsServed)] == [True] * 3


async def test_random_weights_of_donors_that_agree_do_not_replace_our_own(tmp_path: Path) -> None:
    """A node that fell behind meets donors that all hold the same random weights: it took them, and held-out loss went up."""
    run = sealed_run()
    events: list[Event] = []
    liars, node = [Node(run, tmp_path, number) for number in (1, 2, 3)], Node(run, tmp_path, 4)
    random_weights = make_replica(run, tmp_path, "liar")
    noise = torch.randn(random_weights.phi.shape, generator=torch.Generator().manual_seed(1))
    random_weights.phi.add_(noise * 0.3)
    for liar in liars:
        liar.serve(random_weights, round_number=40)
    own = trained(run, tmp_path, "node")
    kept = own.phi.clone()
    with trio.fail_after(300):
        async with AsyncExitStack() as stack:
            bootstrap: tuple[str, ...] = ()
            for one in (*liars, node):
                await stack.enter_async_context(one.meshed(random.Random(1), bootstrap))
                assert one.mesh is not None
                bootstrap = bootstrap or one.mesh.addresses[:1]
            await _until_heard(node)
            await load_as_newcomer(node, events.append, own)
    assert torch.equal(own.phi, kept)
    codes = [event.code for event in events if isinstance(event, Troubled)]
    assert codes == [HarmfulTensorError.entry.code] * 2 + [NoDonorError.entry.code], events


async def _until_heard(newcomer: Node, furthest: Node | None = None) -> None:
    """Until the newcomer has verified three donors, `furthest` as the one that is."""
    assert newcomer.mesh is not None

    def heard() -> bool:
        known = newcomer.mesh.live() if newcomer.mesh else ()
        donors = [member for member in known if member.verified and member.state == "training"]
        far = max(donors, key=lambda one: one.standing.round, default=None)
        return len(donors) == 3 and (furthest is None or (far is not None and far.peer_id == furthest.identity.peer_id))

    while not heard():  # noqa: ASYNC110  # what is waited for happens in other nodes
        await trio.sleep(0.05)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)
