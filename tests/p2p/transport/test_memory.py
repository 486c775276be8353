"""What peers can make a host hold: memory that grows with what arrives, and one bound on it for all strangers together.

The rule: real hosts on loopback, the product's own limits and handlers; memory is counted where it is taken (tracemalloc).
"""

from __future__ import annotations

import random
import tracemalloc
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p.peer.id import ID

from nolocod.errors import RemoteError
from nolocod.identity import Identity
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.mesh import Mesh, open_mesh
from nolocod.p2p.settings import MeshSettings, Relaying
from nolocod.p2p.transport import yamux_stream
from nolocod.p2p.transport.buffers import HeldMemory
from nolocod.p2p.transport.stream import GOSSIP, INFO
from nolocod.p2p.transport.yamux_frames import FIRST_WINDOW
from nolocod.proto.framing import envelope_head
from nolocod.proto.limits import most_bytes
from nolocod.proto.types import Standing
from nolocod.run.manifest import Manifest, seal
from nolocod.units import Address
from tests.support.wires import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from nolocod.p2p.transport.buffers import Connection
    from nolocod.p2p.transport.stream import Stream

MIB = 1 << 20
HELD = "/test/held"
RUN = seal(Manifest(name="held", model={"model_type": "llama"}), Identity.from_secret(b"o" * 32))


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Mesh]:
    relaying = Relaying(serve=False, use=False)
    settings = MeshSettings(folder, listen=(Address("127.0.0.1", 0),), relaying=relaying, upnp=False)
    identity = Identity.from_secret(bytes([1]) * 32)
    async with open_mesh(settings, identity, lambda _: None, rng=random.Random(1)) as mesh:
        await mesh.enter(RUN, lambda: (Standing(5, 100, 2.5), "training"))
        yield mesh


def stranger(number: int) -> AbstractAsyncContextManager[Host]:
    """A host at an address of its own."""
    place = Address(f"127.0.0.{20 + number}", 0)
    return open_host(Identity.from_secret(bytes([100 + number]) * 32), (place,), (), lambda _: None)


@asynccontextmanager
async def strangers(count: int) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(stranger(number)) for number in range(count)]


@pytest.mark.parametrize(("protocol", "size"), [(INFO, 16 * MIB), (GOSSIP, 4 * MIB), (GOSSIP, most_bytes(["gossip"]))])
async def test_heads_that_promise_much_take_no_memory(tmp_path: Path, protocol: str, size: int) -> None:
    """Nine bytes on each of 32 streams once took 512 MiB, or 128."""
    async with node(tmp_path) as mesh, stranger(0) as evil:
        streams = [await evil.open_stream(mesh._host.own, protocol, mesh._host.announced) for _ in range(32)]
        await until(lambda: mesh._host._inbound[evil.own] == 32)
        tracemalloc.start()
        for stream in streams:
            await stream.write(envelope_head(size))
        with suppress(RemoteError), trio.move_on_after(0.5):
            await streams[-1].read_exactly(1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MIB, f"{peak / MIB:.0f} MiB for 288 bytes"


class Held:
    """A connection from `host` of a peer named by `number`."""

    def __init__(self, number: int, host: str) -> None:
        self.peer_id = ID(bytes([number]))
        self._host = host
        self.ended = ""

    def get_remote_address(self) -> tuple[str, int] | None:
        return (self._host, 1) if self._host else None

    def end(self, why: str) -> None:
        self.ended = why


def test_many_connections_of_one_customer_push_out_none_of_another() -> None:
    memory = HeldMemory(most=100, most_of_strangers=60)
    crowd = [Held(number, "203.0.113.7") for number in range(10)]
    other, carried, partner = Held(10, "203.0.113.8"), Held(11, ""), Held(12, "203.0.113.7")
    memory.is_partner = lambda peer: peer == str(partner.peer_id)
    for holder, count in ((other, 15), (carried, 14), (partner, 39), *((one, 3) for one in crowd)):
        memory.add(holder, count)
    assert memory.total == 98
    memory.add(crowd[3], 2)
    assert [one.ended != "" for one in crowd] == [number == 3 for number in range(10)]
    memory.drop(crowd[3])
    memory.add(partner, 8)
    assert "not taken" in partner.ended, "all together have too much, and he most"
    assert not other.ended
    assert not carried.ended


async def held(_: Stream) -> None:
    await trio.sleep_forever()


async def test_strangers_together_have_their_share_and_push_out_neither_partners_nor_who_holds_little() -> None:
    async with strangers(9) as (victim, partner, honest, *evil), trio.open_nursery() as nursery:
        victim.serve(HELD, held)
        victim.memory.is_partner = partner.own.__eq__
        content, most, add = bytes(FIRST_WINDOW), 0, victim.memory.add

        def watched(holder: Connection, count: int) -> None:
            nonlocal most
            add(holder, count)
            most = max(most, sum(bytes_ for one, bytes_ in victim.memory._held.items() if str(one.peer_id) != partner.own))

        async def hoard(host: Host) -> None:
            with suppress(RemoteError):
                await (await host.open_stream(victim.own, HELD, victim.announced)).write(content)

        victim.memory.add = watched  # type: ignore[method-assign]
        tracemalloc.start()
        for host, streams in ((partner, 20), (honest, 2), *((one, 32) for one in evil)):
            for _ in range(streams):
                nursery.start_soon(hoard, host)
            await trio.testing.wait_all_tasks_blocked(0.02)
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, yamux_stream.__file__)]).traces
        taken = sum(trace.size for trace in traces)
        tracemalloc.stop()
        assert 16 * MIB < most <= 32 * MIB, "48 MiB were sent"
        assert 16 * MIB < taken <= (5 + 32 * 1.125) * MIB, "the partner's 5 MiB, and what an array that grows has to spare"
        assert victim.connected(partner.own)
        assert victim.connected(honest.own)
        assert sum(victim.connected(one.own) for one in evil) < len(evil)
        nursery.cancel_scope.cancel()
