"""Rates on real sockets: everything on the connections between two hosts goes by their budgets."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.identity import Identity
from nolocod.p2p.host import Host, open_host
from nolocod.p2p.limits.bandwidth import Budget, Ledger
from nolocod.p2p.settings import Allowance
from nolocod.units import Address
from tests.support.wires import ENOUGH

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from nolocod.p2p.transport.stream import Stream

RATE = 2_000_000
SIZE = 3_000_000
SAVED = RATE // 10
"""What may be saved up: a tenth of a second."""
TAKE, ECHO = "/test/take", "/test/echo"


@dataclass
class Side:
    host: Host
    budget: Budget


@asynccontextmanager
async def a_host(folder: Path, allowance: Allowance) -> AsyncIterator[Side]:
    budget = Budget(allowance, Ledger(folder.with_suffix(".json")), lambda event: None)
    async with open_host(Identity.generate(), (Address("127.0.0.1", 0),), (), lambda event: None, None, budget) as host:
        yield Side(host, budget)


async def transfer(sender: Side, receiver: Side) -> list[tuple[float, int, int]]:
    """Send SIZE bytes; (seconds, sent, received) as the two budgets counted them, from their handshake on."""
    arrived = trio.Event()

    async def take(stream: Stream) -> None:
        buffer = bytearray(64_000)
        left = SIZE
        while left:
            size = min(left, len(buffer))
            await stream.read_into(memoryview(buffer)[:size])
            left -= size
        arrived.set()

    receiver.host.serve(TAKE, take)
    stream = await sender.host.open_stream(receiver.host.own, TAKE, receiver.host.announced)
    began, before = time.perf_counter(), (sender.budget.sent, receiver.budget.received)
    samples: list[tuple[float, int, int]] = []

    async def watch() -> None:
        while True:
            moved = (sender.budget.sent - before[0], receiver.budget.received - before[1])
            samples.append((time.perf_counter() - began, *moved))
            await trio.sleep(0.05)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        with trio.fail_after(ENOUGH):
            await stream.write(bytes(SIZE))
            await arrived.wait()
        nursery.cancel_scope.cancel()
    moved = (sender.budget.sent - before[0], receiver.budget.received - before[1])
    return [*samples, (time.perf_counter() - began, *moved)]


@pytest.mark.parametrize("limited", ["sender", "receiver"])
async def test_a_transfer_keeps_to_the_rate(limited: str, tmp_path: Path) -> None:
    up, down = (RATE, None) if limited == "sender" else (None, RATE)
    async with a_host(tmp_path / "a", Allowance(up=up)) as ann, a_host(tmp_path / "b", Allowance(down=down)) as bob:
        samples = await transfer(ann, bob)
    piece = 0 if limited == "sender" else RATE // 20  # what came can be counted only when it is there
    for seconds, sent, received in samples:
        moved = sent if limited == "sender" else received
        assert moved <= RATE * seconds + SAVED + piece + 20_000, f"{moved} bytes in {seconds:.3f} s"
    took, sent, received = samples[-1]
    assert took >= (SIZE - SAVED - piece) / RATE
    assert SIZE < sent < SIZE * 1.02, "sealing and frames are counted too"
    assert SIZE < received < SIZE * 1.02


async def test_a_question_on_the_same_connection_does_not_wait_for_a_transfer(tmp_path: Path) -> None:
    async with a_host(tmp_path / "a", Allowance(up=RATE)) as ann, a_host(tmp_path / "b", Allowance()) as bob:

        async def echo(stream: Stream) -> None:
            await stream.write(await stream.read_exactly(32))

        async def drop(stream: Stream) -> None:
            while await stream.arrived(None):
                pass

        async def transfer(stream: Stream) -> None:
            for _ in range(int(2 * ENOUGH)):
                await stream.write(bytes(RATE))

        bob.host.serve(ECHO, echo)
        bob.host.serve(TAKE, drop)
        bulk = await ann.host.open_stream(bob.host.own, TAKE, bob.host.announced)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer, bulk)
            with trio.fail_after(ENOUGH):
                for _ in range(3):
                    stream = await ann.host.open_stream(bob.host.own, ECHO)
                    await stream.write(bytes(32))
                    assert await stream.read_exactly(32) == bytes(32)
                    await stream.close()
            nursery.cancel_scope.cancel()
