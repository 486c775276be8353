"""A cell that is about weights for a newcomer: nodes 0 and 1 train and serve, node 2 comes and asks node 0 first.

However it goes, the newcomer must come to have the very bytes that one of the two wrote, leave nothing half-written, and
take an outer step with them; the donors go on with each other meanwhile. Files are real ones.
"""

from __future__ import annotations

import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from nolocod.errors import DiskFullError, LocalError, NoDonorError, PeerBusyError
from nolocod.p2p.snapshots.client import fetch_snapshot
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto.types import describe
from nolocod.studies.sim.replica import State
from tests.fault_matrix.cell import HORIZON, LIMITS, QUIET, SPEEDS, Cell, Verdict

if TYPE_CHECKING:
    from nolocod.p2p.snapshots.client import Fetched
    from tests.fault_matrix.node import NodeUnderTest

_DUMP_SECONDS = 1.0
"""What the trainer takes to write a snapshot."""
_ASK_AGAIN = 5.0
"""As node/weights.py has it."""
_RESTART = 15.0


class SnapshotCell(Cell):
    """Fates: from whom the weights came."""

    folder: Path

    async def run(self) -> Verdict:
        self.dumped: set[tuple[bytes, str, int]] = set()  # content of every snapshot, whose, and of which round
        self.donors: list[Donor] = []
        self.fetched: list[Fetched] = []
        self.joined = trio.Event()
        self.refuse_once = False
        self.took = 0.0
        with tempfile.TemporaryDirectory(prefix="nolocod-faults-") as name:
            self.folder = Path(name)
            try:
                return await super().run()
            finally:
                for donor in self.donors:
                    donor.close()

    async def play(self) -> None:
        newcomer = self.add(SPEEDS[0])
        self.refuse_once = self.state == "CLOSED"
        self.armed = True
        began = trio.current_time()
        self.swarm.nursery.start_soon(self._join, newcomer)
        if await self.until("the weights", HORIZON, self.joined.is_set):
            self.took = trio.current_time() - began
            if not self.struck.is_set():
                self.violations.append("the state was never entered")
            await self.recover(4 * QUIET)  # a newcomer that asks nothing more is given up only then
            for number, donor in enumerate(self.donors):
                if donor._uploads or any(kept.readers for kept in donor._open.values()):
                    self.violations.append(f"donor {number} still serves somebody")
            if partial_files := [path.name for path in self.folder.glob("*.partial")]:
                self.violations.append(f"left behind: {partial_files}")

    def outcome(self) -> tuple[str, float]:
        if not self.fetched:
            return "never", self.took
        return f"from the {'first' if self.fetched[-1].donor == self.nodes[0].peer_id else 'second'}", self.took

    # --- donors -----------------------------------------------------------------------------------------

    def wire(self, node: NodeUnderTest) -> None:
        """As the daemon wires its donor: one snapshot per round."""
        served: list[ServedSnapshot] = []

        async def snapshot() -> ServedSnapshot:
            if self.refuse_once:
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

    def _dump(self, node: NodeUnderTest, path: Path) -> ServedSnapshot:
        if node.receipts.full:
            raise DiskFullError("the simulated disk is full.")
        content = struct.pack(f"<{len(node.replica.state.phi)}d", *node.replica.state.phi)
        path.write_bytes(content)
        self.dumped.add((content, node.peer_id, node.replica.round))
        return ServedSnapshot(path, node.replica.standing, describe(memoryview(content), LIMITS.chunk_bytes))

    # --- the newcomer -----------------------------------------------------------------------------------

    async def _join(self, node: NodeUnderTest) -> None:
        """As node/weights.py: ask until somebody gives, whoever it is; then take part."""
        await node.do(partial(self._fetch, node))
        if node.port.up:
            self.swarm.begin(node)
            self.joined.set()

    async def _fetch(self, node: NodeUnderTest) -> None:
        context, donors = node.exchange_service._context, [self.nodes[0].peer_id, self.nodes[1].peer_id]
        while True:
            try:
                size = struct.calcsize(f"<{len(node.replica.state.phi)}d")
                self._adopt(node, await fetch_snapshot(context, node.dial, donors, self.folder / "weights", size))
                return
            except NoDonorError:
                await trio.sleep(_ASK_AGAIN)
            except LocalError as error:  # the daemon ends, and is started again
                node.troubles.append(error.code)
                await trio.sleep(_RESTART)

    def _adopt(self, node: NodeUnderTest, fetched: Fetched) -> None:
        content = fetched.path.read_bytes()
        fetched.path.unlink()
        self.fetched.append(fetched)
        if (content, fetched.donor, fetched.standing.round) not in self.dumped:
            self.violations.append("the newcomer holds what the donor that it names never wrote")
        phi = struct.unpack(f"<{len(node.replica.state.phi)}d", content)
        node.replica.restore(State(phi, (0.0,) * len(phi), phi), fetched.standing.round, fetched.standing.tokens)

    def kill(self, restart: float) -> None:
        """A process that is killed removes nothing: what it had written so far lies there when it comes again."""
        half = {path: path.read_bytes() for path in self.folder.glob("*.partial")} if self.side == "newcomer" else {}
        super().kill(restart)
        self.swarm.nursery.start_soon(self._leave_behind, half)

    async def _leave_behind(self, half: dict[Path, bytes]) -> None:
        await trio.sleep(1.0)
        for path, content in half.items():
            path.write_bytes(content)

    def rejoin(self, node: NodeUnderTest) -> None:
        if node.number < 2:
            super().rejoin(node)
        elif self.joined.is_set():
            self.swarm.begin(node)
        else:
            self.swarm.nursery.start_soon(self._join, node)
