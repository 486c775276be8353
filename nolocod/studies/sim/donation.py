"""One cell of the fault matrix that is about weights for a newcomer: two donors, one newcomer, one fault in one state.

The rule: the newcomer asks the first donor first. However it goes, it must come to have the very bytes that one of the
two wrote, leave nothing half-written, and take an outer step with them; the donors go on with each other meanwhile.
Files are real ones.
"""

from __future__ import annotations

import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from nolocod.errors import DiskFullError, LocalError, NoDonorError, PeerBusyError
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot, fetch_snapshot
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto.types import describe
from nolocod.studies.sim.replica import State
from nolocod.studies.sim.staging import QUIET, Stage, Verdict, staged
from nolocod.studies.sim.subjects import Subject
from nolocod.studies.sim.trial import HORIZON, LIMITS, SETTINGS, SPEEDS, WARM

if TYPE_CHECKING:
    from nolocod.p2p.snapshots.client import Fetched
    from nolocod.studies.sim.faults import Way

_DUMP_SECONDS = 1.0
"""What the trainer takes to write a snapshot."""
_ASK_AGAIN = 5.0
"""As training_session.py has it."""
_RESTART = 15.0


class Donation(Stage):
    """Nodes 0 and 1 train and serve, node 2 comes."""

    folder: Path

    async def run(self) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="nolocod-faults-") as name:
            self.folder = Path(name)
            self.dumped: dict[bytes, tuple[str, int]] = {}  # content of every snapshot: whose, and of which round
            self.donors: list[Donor] = []
            self.fetched: list[Fetched] = []
            self.joined = trio.Event()
            try:
                return await self._run()
            finally:
                for donor in self.donors:
                    donor.close()

    async def _run(self) -> Verdict:
        swarm = self.swarm
        self.nodes = [Subject.first(swarm, speed) for speed in SPEEDS]
        self.lives = list(self.nodes)
        for node in self.nodes:
            self._serve(node)
            swarm.begin(node)
        await self.until("a first exchange", WARM, lambda: all(node.committed() for node in self.nodes))
        await trio.sleep(1.0)
        newcomer = Subject.first(swarm, SPEEDS[0])
        self.nodes.append(newcomer)
        self.lives.append(newcomer)
        self.refuse_once = self.state == "CLOSED"
        self.armed = True
        began = trio.current_time()
        swarm.nursery.start_soon(self._join, newcomer)
        took = 0.0
        if await self.until("the weights", HORIZON, self.joined.is_set):
            took = trio.current_time() - began
            if not self.struck.is_set():
                self.violations.append("the state was never entered")
            await trio.sleep_until(self.over_at)
            await self.restarted_or_never()
            since = trio.current_time()
            await self.until("another exchange of each", HORIZON, lambda: all(node.committed(since) for node in self.nodes))
            await self.until("its end", HORIZON, lambda: all(node.idle for node in self.nodes))
            for node in self.nodes:
                await node.rounds.close(QUIET)
            await trio.sleep(4 * QUIET)  # a newcomer that asks nothing more is given up only then
            self._look_for_leaks()
        swarm.oracle.end()
        first = bool(self.fetched) and self.fetched[-1].donor == self.nodes[0].peer_id
        fate = "from the first" if first else "from the second" if self.fetched else "never"
        return Verdict(fate, took, tuple(self.violations + swarm.oracle.violations))

    # --- the nodes' parts that are not in SimNode -------------------------------------------------------

    def _serve(self, node: Subject) -> None:
        """As the daemon wires its donor: one snapshot per round."""
        served: list[ServedSnapshot] = []

        async def snapshot() -> ServedSnapshot:
            if self.refuse_once and self.armed:
                self.refuse_once = False
                raise PeerBusyError("told to.", retry_after=1.0)
            if not served or served[-1].standing.round < node.replica.round:
                await trio.sleep(_DUMP_SECONDS)
                path = self.folder / f"{node.number}-{node.life}-{node.replica.round}"
                served.append(await node.aside(self._dump, node, path))
            return served[-1]

        donor = Donor(node.exchange_service._context, snapshot, 1, node.emit)
        self.donors.append(donor)
        node.port.handlers[SNAPSHOT] = node.outliving(donor.handle)

    def _dump(self, node: Subject, path: Path) -> ServedSnapshot:
        if node.receipts.full:
            raise DiskFullError("the simulated disk is full.")
        content = struct.pack(f"<{len(node.replica.phi)}d", *node.replica.phi)
        path.write_bytes(content)
        self.dumped[content] = node.peer_id, node.replica.round
        return ServedSnapshot(path, node.replica.standing, describe(memoryview(content), LIMITS.chunk_bytes))

    async def _join(self, node: Subject) -> None:
        """As training_session.py: ask until somebody gives, whoever it is; then take part."""
        await node.do(partial(self._fetch, node))
        if node.port.up:
            self.swarm.begin(node)
            self.joined.set()

    async def _fetch(self, node: Subject) -> None:
        donors = [self.nodes[0].peer_id, self.nodes[1].peer_id]
        while True:
            try:
                self._adopt(
                    node, await fetch_snapshot(node.exchange_service._context, node.dial, donors, self.folder / "weights")
                )
                return
            except NoDonorError:
                await trio.sleep(_ASK_AGAIN)
            except LocalError as error:  # the daemon ends, and is started again
                node.troubles.append(error.code)
                await trio.sleep(_RESTART)

    def _adopt(self, node: Subject, fetched: Fetched) -> None:
        content = fetched.path.read_bytes()
        fetched.path.unlink()
        self.fetched.append(fetched)
        if self.dumped.get(content) != (fetched.donor, fetched.standing.round):
            self.violations.append("the newcomer holds what the donor that it names never wrote")
        phi = struct.unpack(f"<{len(node.replica.phi)}d", content)
        node.replica.restore(State(phi, (0.0,) * len(phi), phi), fetched.standing.round, fetched.standing.tokens)

    def kill(self, restart: float) -> None:
        """A process that is killed removes nothing: what it had written so far lies there when it comes again."""
        half = {path: path.read_bytes() for path in self.folder.glob("*.partial")} if self.side == "newcomer" else {}
        super().kill(restart)
        self.swarm.nursery.start_soon(self._leave, half)

    async def _leave(self, half: dict[Path, bytes]) -> None:
        await trio.sleep(1.0)
        for path, content in half.items():
            path.write_bytes(content)

    def revived(self, node: Subject) -> None:
        if node.number == 2 and not self.joined.is_set():
            self.swarm.nursery.start_soon(self._join, node)
            return
        if node.number < 2:
            self._serve(node)
        super().revived(node)

    # --- what must hold ---------------------------------------------------------------------------------

    def _look_for_leaks(self) -> None:
        for node in self.nodes:
            for what, left in node.left().items():
                if left:
                    self.violations.append(f"{what} left at node {node.number}: {left}")
        for number, donor in enumerate(self.donors):
            if donor._uploads or any(kept.readers for kept in donor._open.values()):
                self.violations.append(f"donor {number} still serves somebody")
        if partial_files := [path.name for path in self.folder.glob("*.partial")]:
            self.violations.append(f"left behind: {partial_files}")


def try_one(side: str, state: str, way: Way, seed: int) -> Verdict:
    """Run one cell in one way; the same arguments give the same verdict."""
    make = partial(Donation, side, state, way, number=0 if side == "donor" else 2, protocol=SNAPSHOT)
    return staged(make, (SETTINGS, LIMITS, seed))
