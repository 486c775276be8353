"""Frames on one stream, and who is cancelled while one is on its way."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from nolocod.errors import PeerTooSlowError, PeerUnavailableError
from nolocod.identity import PeerId
from nolocod.p2p.transport.channel import Channel, send_working
from nolocod.p2p.transport.deadlines import together
from nolocod.proto.framing import chunk_head, envelope_head
from nolocod.proto.limits import Limits

LIMITS = Limits(abort_seconds=1.0)


class SlowStream:
    """Takes half of each write at once and the rest `seconds` later; never, if there is a `failure` or no end to them."""

    remote = PeerId("somebody")

    def __init__(self, seconds: float, failure: Exception | None = None) -> None:
        self.sent = b""
        self._seconds, self._failure = seconds, failure

    async def write(self, data: bytes | memoryview) -> None:
        half = len(data) // 2
        self.sent += bytes(data[:half])
        await trio.sleep(self._seconds)
        if self._failure is not None:
            raise self._failure
        self.sent += bytes(data[half:])

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


def framed(raw: bytes) -> bytes:
    return envelope_head(len(raw)) + raw


async def test_a_cancelled_keep_alive_does_not_tear_the_stream_of_an_answer(autojump_clock: trio.testing.MockClock) -> None:
    """As a donor says Working until its snapshot is there: that may be in the middle of a Working."""
    stream = SlowStream(0.5)
    channel = Channel(stream, LIMITS)  # type: ignore[arg-type]  # only what is written
    await together(partial(trio.sleep, 5.25), partial(send_working, channel, lambda: b"working", 5.0))
    assert stream.sent == framed(b"working")
    await channel.send_envelope(b"the answer")
    assert stream.sent == framed(b"working") + framed(b"the answer")


async def test_a_cancelled_chunk_is_sent_to_its_end_if_that_is_soon(autojump_clock: trio.testing.MockClock) -> None:
    stream = SlowStream(0.4)  # for each of the two parts
    channel = Channel(stream, LIMITS)  # type: ignore[arg-type]
    with trio.move_on_after(0.1):
        await channel.send_chunk(3, memoryview(b"content"))
    await channel.last_words(b"abort")
    assert stream.sent.startswith(chunk_head(3, 7) + b"content" + envelope_head(5))


async def test_who_cancels_a_write_that_nobody_takes_waits_a_moment_and_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stream = SlowStream(float("inf"))
    channel = Channel(stream, LIMITS)  # type: ignore[arg-type]
    with trio.move_on_after(5.0) as scope:
        await channel.send_envelope(b"working")
    assert scope.cancelled_caught
    assert trio.current_time() == pytest.approx(6.0)
    with pytest.raises(PeerUnavailableError, match="middle of a frame"):
        await channel.send_envelope(b"the answer")


async def test_who_waits_for_another_frame_is_cancelled_at_once(autojump_clock: trio.testing.MockClock) -> None:
    channel = Channel(SlowStream(9.0), LIMITS)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.send_chunk, 0, memoryview(b"content"))
        await trio.sleep(1.0)
        with trio.move_on_after(1.0):
            await channel.send_envelope(b"working")
        assert trio.current_time() == pytest.approx(2.0)


async def test_a_failed_write_is_raised_as_it_is_and_tears_the_stream(autojump_clock: trio.testing.MockClock) -> None:
    channel = Channel(SlowStream(0.1, PeerTooSlowError("slow.")), LIMITS)  # type: ignore[arg-type]
    with pytest.raises(PeerTooSlowError):
        await channel.send_envelope(b"working")
    with pytest.raises(PeerUnavailableError, match="middle of a frame"):
        await channel.send_envelope(b"again")
