"""The carrier "relayed": our stream through a relay of ours, which the first end starts as a process of its own.

Started as `python -m nolocod.studies.benchmarks.relayed HOST` it is that relay: it prints its address, and ends with its
standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from nolocod.identity import PeerId, load_or_create
from nolocod.p2p.host import open_host
from nolocod.p2p.nat.circuit_relay import Relay, RelayClient
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nolocod.observe.events import Event
    from nolocod.p2p.host import Host
    from nolocod.p2p.transport.stream import Stream

_CIRCUIT = "/p2p-circuit/p2p/"


class RelayedHost:
    """`host`, reached through the relay at `address`."""

    def __init__(self, host: Host, address: str) -> None:
        self._host = host
        self._client = RelayClient(host)
        self.address = f"{address}{_CIRCUIT}{host.own}"

    async def wait(self) -> None:
        """Be there for others."""
        relay = await self._to_relay(self.address)
        self._client.serve()
        await self._client.reserve(relay)

    async def open_stream(self, address: str, protocol: str) -> Stream:
        target = PeerId(address.rpartition("/")[2])
        await self._client.connect(await self._to_relay(address), target)
        return await self._host.open_stream(target, protocol)

    async def _to_relay(self, address: str) -> PeerId:
        there = address.partition(_CIRCUIT)[0]
        relay = PeerId(there.rpartition("/")[2])
        await self._host.connect(relay, [there])
        return relay


@asynccontextmanager
async def relay_process(host: str) -> AsyncIterator[str]:
    """The address of a relay in a process of its own."""
    command = [sys.executable, "-m", "nolocod.studies.benchmarks.relayed", host]
    process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None  # a pipe was asked for
    try:
        yield (await process.stdout.receive_some()).decode().strip()
    finally:
        process.kill()


async def _serve(host: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        identity = load_or_create(Path(folder) / "identity.key")
        async with open_host(identity, (Address(host, 0),), (), _nothing) as opened:
            Relay(opened).serve()
            sys.stdout.write(opened.addresses[0] + "\n")
            sys.stdout.flush()
            async with trio.lowlevel.FdStream(os.dup(0)) as requests:
                await requests.receive_some()


def _nothing(_: Event) -> None:
    """Events are not measured."""


if __name__ == "__main__":
    trio.run(_serve, sys.argv[1])
