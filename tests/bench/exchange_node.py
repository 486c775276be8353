"""Our node of the contest: the network process and the trainer of a daemon, without its mesh.

The rule: everything between the snapshot and the new weights is the product's own: host, ExchangeService, receipts
on disk, trainer process, shared memory. Only who meets whom, and when, is told from outside, and
inner steps move the weights at random (moved.py).
Started as `python -m tests.bench.exchange_node RANK FOLDER`; rank 0 offers.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from nolocod.identity import PeerId, load_or_create
from nolocod.outer.sides import TrainerSide
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import ExchangeService
from nolocod.p2p.host import open_host
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.paths import DataDir
from nolocod.proto.types import Accept, Description, Ended, Offer
from nolocod.run.manifest import stored_manifest
from nolocod.trainer import process
from nolocod.trainer.process import Setup, TrainerProcess, open_trainer
from nolocod.units import Address
from tests.bench import talk
from tests.bench.base import BenchError

if TYPE_CHECKING:
    from nolocod.observe.events import Event
    from nolocod.p2p.host import Host

_LISTEN = Address("127.0.0.1", 0)
_OFFER_SECONDS = 120.0


class _TimedTrainerSide(TrainerSide):
    """The product's local side, which notes when its node did what."""

    def __init__(self, trainer: TrainerProcess) -> None:
        super().__init__(trainer, lambda: None, lambda: False)
        self.times: dict[str, float] = {}

    async def capture(self, subject: int) -> Description:
        self.times["snapshot_began"] = time.monotonic()
        description = await super().capture(subject)
        self.times["snapshot_ended"] = time.monotonic()
        return description

    async def inspect(self) -> bytes:
        self.times["verified"] = time.monotonic()  # asked for once all chunks are there, each against its hash
        skipped = await super().inspect()
        self.times["inspected"] = time.monotonic()
        return skipped


class _Reception:
    """proto.types.Answerer: says yes to the one partner there is. `trainer` has loaded."""

    def __init__(self, trainer: TrainerProcess) -> None:
        self._trainer = trainer
        self.next()

    def next(self) -> None:
        """Forget the exchange that was."""
        self.local_side = _TimedTrainerSide(self._trainer)
        self.over = trio.Event()
        self.how: Ended | None = None

    def decide(self, offer: Offer) -> Accept:
        return Accept(self._trainer.standing)

    async def ended(self, ended: Ended) -> None:
        self.how = ended
        self.over.set()


class Node:
    """Serves the requests of contest.py."""

    def __init__(self, rank: int, folder: Path, trainer: TrainerProcess, host: Host) -> None:
        self._rank = rank
        self._paths = DataDir(folder)
        self._trainer = trainer
        self._host = host

    async def prepare(self) -> dict[str, Any]:
        """Load the run of the folder, and train one phase."""
        sealed = stored_manifest(self._paths)
        if sealed is None:
            raise BenchError("the folder holds no manifest.")
        self._sealed = sealed
        self._identity = load_or_create(self._paths.identity)
        setup = Setup(
            manifest=sealed.to_bytes(),
            peer_id=self._identity.peer_id,
            data=None,
            devices="cpu",
            threads=1,
            checkpoints=self._paths.checkpoints,
            cache=self._paths.root.parent / "cache",
        )
        await self._trainer.load(setup)
        self._reception = _Reception(self._trainer)
        await self._one_phase()
        return {}

    async def _one_phase(self) -> None:
        await self._trainer.train()
        await self._trainer.wait_steps(self._sealed.manifest.inner.steps)
        await self._trainer.pause()

    async def listen(self) -> dict[str, Any]:
        return {"address": self._host.addresses[0]}

    async def connect(self, addresses: list[str]) -> dict[str, Any]:
        other = addresses[1 - self._rank]
        self._partner = PeerId(other.rpartition("/")[2])
        if self._rank == 0:
            await self._host.connect(self._partner, [other])
        context = Context.of(self._identity, self._sealed, self._trainer.outbox.size)
        receipts = ReceiptStore(self._paths.receipts)
        self._exchange_service = ExchangeService(context, self._host.open_stream, self._reception, receipts)
        self._host.serve(EXCHANGE, self._exchange_service.handle)
        return {}

    async def arm(self) -> dict[str, Any]:
        """Train one phase, so that there is something to exchange."""
        await self._one_phase()
        self._reception.next()
        return {}

    async def go(self) -> dict[str, Any]:
        """Take one paired outer step; the times of its parts on the machine's common clock."""
        trainer, reception = self._trainer, self._reception
        local_side, began = reception.local_side, time.monotonic()
        with trio.move_on_after(_OFFER_SECONDS):
            if self._rank == 0:
                subject = trainer.subject(1)
                reception.how = await self._exchange_service.offer(self._partner, trainer.standing, subject, local_side)
            else:
                await reception.over.wait()
        ended, committed = reception.how, time.monotonic()
        if ended is None or ended.outcome != "committed" or ended.partner_standing is None:
            how = f"{ended.outcome}: {ended.error} {ended.reason}" if ended else f"not over after {_OFFER_SECONDS:.0f} s"
            raise BenchError(f"the exchange was {how}.")
        await trainer.apply(ended.partner_standing.round, ended.skipped)
        times = local_side.times | {"began": began, "committed": committed, "ended": time.monotonic()}
        return times | {"right": True}


async def run(rank: int, folder: Path) -> None:
    identity = load_or_create(DataDir(folder).identity)
    process.CHILD = "tests.bench.moved"

    def emit(_: Event) -> None:
        """Events are not measured."""

    async with open_trainer(emit) as trainer, open_host(identity, (_LISTEN,), (), emit) as host:
        node = Node(rank, folder, trainer, host)
        await talk.serve({name: getattr(node, name) for name in ("prepare", "listen", "connect", "arm", "go")})


if __name__ == "__main__":
    trio.run(run, int(sys.argv[1]), Path(sys.argv[2]))
