"""No exception that a peer can cause leaves its connection: the seam itself, and real hosts against strangers' bytes."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import DiskFullError, PeerUnavailableError, ProtocolError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.host import Host, HostLimits, open_host
from nolocod.p2p.transport.delimited import receive_message
from nolocod.p2p.transport.exceptions import FOREIGN, map_exceptions
from nolocod.p2p.transport.noise import SecureChannel
from nolocod.p2p.transport.requests import Terms, ask
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.framing import envelope_head
from nolocod.units import Address
from tests.support.strangers import HELLO, Stranger, answering, calling, line, varint
from tests.support.wires import ENOUGH, connections

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from nolocod.p2p.transport.stream import Stream

ANN, BOB = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2))
BOB_ID = PeerId(BOB.peer_id)
ECHO = "/test/echo"
LENGTHS = [1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1, 1 << 90]
"""Of a line of multistream-select: MemoryError, OverflowError, or a reader that waits for so much."""
NOT_TEXT = b"\x03\xff\xfe\n"
BAD_LINES = [*map(varint, LENGTHS), NOT_TEXT, b"\x00", HELLO + b"\x01\n"]
BAD_DEEP = BAD_LINES[2:]


async def echo(stream: Stream) -> None:
    await stream.write(await stream.read_exactly(4))


def a_host(identity: Identity = ANN) -> AbstractAsyncContextManager[Host]:
    return open_host(identity, (Address("127.0.0.1", 0),), (), lambda _: None, HostLimits(connect=ENOUGH, negotiate=ENOUGH))


def port(host: Host) -> int:
    return int(host.announced[0].rpartition("/")[2])


async def answers(host: Host) -> None:
    """An honest peer is served as ever."""
    host.serve(ECHO, echo)
    async with a_host(Identity.generate()) as friend:
        with trio.fail_after(ENOUGH):
            stream = await friend.open_stream(host.own, ECHO, host.announced)
            await stream.write(b"1234")
            assert await stream.read_exactly(4) == b"1234"
            await stream.close()


# --- the seam ------------------------------------------------------------------------------------------

FAILURES = [MemoryError(), OverflowError("x"), RecursionError("x"), KeyError("x"), AssertionError(), struct.error("x")]
FAILURES += [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), StopAsyncIteration(), ExceptionGroup("x", [MemoryError()])]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failure_of_any_type_is_a_remote_error(failure: Exception) -> None:
    with pytest.raises(PeerUnavailableError), map_exceptions(BOB_ID, "reading"):
        raise failure


@pytest.mark.parametrize("ours", [DiskFullError("full."), ProtocolError("nonsense.")])
def test_our_own_errors_pass_the_seam_alone_and_in_groups(ours: Exception) -> None:
    for failure in (ours, ExceptionGroup("tasks", [ExceptionGroup("inner", [ours])])):
        with pytest.raises(type(ours)), map_exceptions(BOB_ID, "reading"):
            raise failure


def test_whoever_interrupts_the_program_passes_the_seam() -> None:
    for failure in (KeyboardInterrupt, SystemExit):
        with pytest.raises(failure), map_exceptions(BOB_ID, "reading"):
            raise failure


async def test_cancellation_passes_the_seam_and_leaves_failures_of_the_same_moment_behind() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise MemoryError

    with trio.fail_after(ENOUGH), trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_in_the_seam, fail_when_cancelled)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


async def _in_the_seam(task: Callable[[], Awaitable[None]]) -> None:
    with map_exceptions(BOB_ID, "reading"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
            nursery.start_soon(trio.sleep_forever)


# --- who is dialled ------------------------------------------------------------------------------------


async def at_first(stranger: Stranger, said: bytes) -> None:
    await stranger.socket.send_all(said)


async def after_noise(stranger: Stranger, said: bytes) -> None:
    await (await stranger.secured(ANN_ID)).write(said)


async def on_a_stream(stranger: Stranger, said: bytes) -> None:
    async with stranger.muxed(ANN_ID) as muxed:
        while True:
            stream = await muxed.accept_stream()
            await stream.write(said)


ANN_ID = PeerId(ANN.peer_id)


@pytest.mark.parametrize("said", BAD_LINES, ids=lambda said: said[:12].hex())
@pytest.mark.parametrize("where", [at_first, after_noise, on_a_stream])
async def test_a_line_that_no_honest_node_sends_costs_a_dial_and_no_more(
    where: Callable[[Stranger, bytes], Awaitable[None]], said: bytes
) -> None:
    """Ten bytes at an address that a heartbeat names ended a node."""

    async def answer(stranger: Stranger) -> None:
        with suppress(*FOREIGN):
            await where(stranger, said)
            await stranger.socket.send_eof()
            await trio.sleep_forever()

    with trio.fail_after(ENOUGH):
        async with a_host() as ann, answering(BOB, answer) as address:
            with pytest.raises(PeerUnavailableError):
                await (await ann.open_stream(BOB_ID, ECHO, [address])).read_exactly(1)
            if where is at_first:
                with pytest.raises(PeerUnavailableError):
                    await ann.probe(BOB_ID, address)
            await answers(ann)


async def test_an_announced_length_is_believed_by_nobody() -> None:
    """2^30 bytes are announced: the dial ends at once, not when they came or the time is over."""
    over = trio.Event()

    async def answer(stranger: Stranger) -> None:
        await stranger.socket.send_all(varint(1 << 30))
        with suppress(trio.BrokenResourceError):
            while await stranger.socket.receive_some(4096):
                pass
        over.set()

    async with a_host() as ann, answering(BOB, answer) as address:
        began = trio.current_time()
        with pytest.raises(PeerUnavailableError):
            await ann.connect(BOB_ID, [address])
        assert trio.current_time() - began < ENOUGH / 2
        await over.wait()


# --- who dials us --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", BAD_DEEP, ids=lambda said: said[:12].hex())
async def test_such_a_line_on_a_stream_costs_that_stream(said: bytes) -> None:
    with trio.fail_after(ENOUGH):
        async with a_host() as ann, calling(port(ann), BOB) as stranger:
            ann.serve(ECHO, echo)
            async with stranger.muxed(ANN_ID) as muxed:
                bad, good = await muxed.open_stream(), await muxed.open_stream()
                await bad.write(said)
                await bad.close()
                await bad.ended.wait()
                await good.write(HELLO + line(ECHO.encode()) + b"1234")
                answer = bytearray(len(HELLO + line(ECHO.encode())) + 4)
                await good.read_into(memoryview(answer))
                assert answer.endswith(b"1234")
            await answers(ann)


@pytest.mark.parametrize("said", BAD_DEEP, ids=lambda said: said[:12].hex())
async def test_such_a_line_before_and_behind_noise_costs_that_connection(said: bytes) -> None:
    with trio.fail_after(ENOUGH):
        async with a_host() as ann:
            for where in (at_first, after_noise):
                async with calling(port(ann), BOB) as stranger:
                    await where(stranger, said)
                    await stranger.socket.send_eof()
                    with suppress(trio.BrokenResourceError):
                        while await stranger.socket.receive_some(4096):
                            pass
            await answers(ann)


@pytest.mark.parametrize("failure", FAILURES[-3:], ids=lambda failure: type(failure).__name__)
async def test_a_handler_that_fails_in_any_way_costs_the_stream(failure: Exception) -> None:
    async def fail(stream: Stream) -> None:
        raise failure

    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob:
            ann.serve(ECHO, fail)
            ann.basic.set_stream_handler("/raw", ann.bounded("/raw", fail))
            for protocol in (ECHO, "/raw"):
                with pytest.raises(PeerUnavailableError):
                    await (await bob.open_stream(ann.own, protocol, ann.announced)).read_exactly(1)
            await answers(ann)


@pytest.mark.parametrize("failure", FAILURES[:1] + FAILURES[-1:], ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("where", ["open_into", "open", "flush"])
async def test_a_connection_that_fails_in_any_way_ends_alone(
    monkeypatch: pytest.MonkeyPatch, where: str, failure: Exception
) -> None:
    """For instance where there is no memory for what came."""

    def fail(*_: object) -> None:
        raise failure

    async with connections() as (ann, bob):
        stream = await ann.open_stream()
        await stream.write(b"1234")
        monkeypatch.setattr(SecureChannel, where, fail)
        with suppress(*FOREIGN):  # whichever end is first
            await stream.write(b"5678")
            await (await bob.accept_stream()).read(8)
            await stream.read(1)
        monkeypatch.undo()
        await bob.event_closed.wait()


async def test_an_answer_that_no_parser_survives_costs_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    async def reply(stream: Stream) -> None:
        await stream.read_exactly(1)
        await stream.write(b"".join((envelope_head(5), b"12345")))

    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob:
            bob.serve(ECHO, reply)
            monkeypatch.setattr("nolocod.p2p.transport.requests.open_envelope", fail)
            stream = await ann.open_stream(bob.own, ECHO, bob.announced)
            with pytest.raises(PeerUnavailableError):
                await ask(stream, pb.Body(), Terms(ANN, None, 5.0), "gossip")
            monkeypatch.undo()
            await answers(ann)


async def test_a_message_of_libp2ps_that_no_parser_survives_costs_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def ParseFromString(self, raw: bytes) -> int:  # protobuf's name
            raise MemoryError

    async def tell(stream: Stream) -> None:
        await stream.write(b"\x01x")

    with trio.fail_after(ENOUGH):
        async with a_host() as ann, a_host(BOB) as bob:
            bob.serve(ECHO, tell)
            with pytest.raises(ProtocolError):
                await receive_message(await ann.open_stream(bob.own, ECHO, bob.announced), Broken, 100)  # type: ignore[type-var]
