"""Lengths that a stranger chooses are checked before a library of others works on them: on real hosts, with valid keys."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import base58
import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message as Kademlia
from libp2p.security.noise import messages

from nolocod.identity import Identity, PeerId
from nolocod.p2p.discovery.kademlia import PROTOCOL as KADEMLIA
from nolocod.p2p.discovery.kademlia import look_up, open_dht
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.transport.delimited import send_message
from nolocod.p2p.transport.exceptions import FOREIGN
from nolocod.p2p.transport.identify import readable
from nolocod.run.manifest import RunId
from nolocod.units import Address
from tests.fuzz.hosts import _shake_hands
from tests.support.strangers import answering, calling, varint
from tests.support.wires import ENOUGH, until

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from nolocod.p2p.transport.stream import Stream
    from tests.support.strangers import Stranger

ANN, BOB = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2))
ANN_ID, BOB_ID = PeerId(ANN.peer_id), PeerId(BOB.peer_id)
RUN = RunId("ab" * 32)
LONG_ID = random.Random(1).randbytes(12_000)
"""250 kB of these are 76 seconds in base58."""


def a_host(identity: Identity = ANN) -> AbstractAsyncContextManager[Host]:
    return open_host(identity, (Address("127.0.0.1", 0),), (), lambda _: None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were written in base58, each time."""
    lengths, encode = [], base58.b58encode

    def counted(raw: bytes) -> bytes:
        lengths.append(len(raw))
        return encode(raw)

    monkeypatch.setattr(base58, "b58encode", counted)
    return lengths


@pytest.mark.parametrize("dials", [True, False])
async def test_a_proof_with_a_huge_key_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, dials: bool) -> None:
    """An RSA key of 131072 bits stopped the loop for 1.4 seconds, before anybody had proved anything."""
    looked_at, read = [], messages.deserialize_public_key
    monkeypatch.setattr(messages, "deserialize_public_key", lambda raw: looked_at.append(len(raw)) or read(raw))

    async def shake_hands(stranger: Stranger) -> None:
        key = b"\x08\x00\x12" + varint(32_000) + bytes(32_000)
        with suppress(*FOREIGN):
            await stranger.agree()
            await _shake_hands(stranger, b"\x0a" + varint(len(key)) + key + b"\x12\x01x", ANN_ID)
            await stranger.socket.receive_some(1)

    with trio.fail_after(ENOUGH):
        async with a_host() as ann:
            if dials:
                async with calling(int(ann.announced[0].rpartition("/")[2]), BOB) as stranger:
                    await shake_hands(stranger)
            else:
                async with answering(BOB, shake_hands) as address:
                    with suppress(*FOREIGN):
                        await ann.connect(BOB_ID, [address])
            await until(lambda: not ann.dialer._swarm.get_total_connections())
    assert max(looked_at, default=0) < 2048


async def test_a_provider_with_a_huge_name_costs_nothing(written: list[int]) -> None:
    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob, open_dht(ann, RUN):
            stream = await bob.open_stream(ann.own, KADEMLIA, ann.announced)
            peer = Kademlia.Peer(id=LONG_ID[:3000], addrs=[b"\x04\x7f\0\0\1\x06\0\1"])
            await send_message(stream, Kademlia(type=Kademlia.ADD_PROVIDER, key=b"key", providerPeers=[peer]))
            assert await stream.read_exactly(1)
    assert max(written) <= 64


async def test_a_question_to_the_dht_of_megabytes_ends_its_stream() -> None:
    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob, open_dht(ann, RUN):
            stream = await bob.open_stream(ann.own, KADEMLIA, ann.announced)
            began = trio.current_time()
            await stream.write(varint(1 << 20))
            with pytest.raises(FOREIGN):
                await stream.read_exactly(1)
            assert trio.current_time() - began < HostLimits().served / 2, "it ended for its length, not for its slowness"


async def test_an_answer_of_the_dht_with_huge_names_and_addresses_costs_nothing(written: list[int]) -> None:
    async def tell(stream: Stream) -> None:
        peer = Kademlia.Peer(id=LONG_ID, addrs=[b"\xa5\x03" + varint(9000) + bytes(9000)])
        await send_message(stream, Kademlia(type=Kademlia.GET_PROVIDERS, providerPeers=[peer]))

    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob:
            bob.serve(KADEMLIA, tell)
            await ann.connect(bob.own, bob.announced)
            found = await look_up(ann, bob.own, RUN)
    assert list(found.values()) == [()]
    assert readable(b"\x04\x7f\0\0\1\x06\0\1" * 40) is None
    assert max(written) <= 64
