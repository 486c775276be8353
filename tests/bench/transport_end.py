"""One process of transport.py and wan.py, started as `python -m tests.bench.transport_end CARRIER RANK HOST`.

The rule: the clock of a transfer runs from the writer's first write to the reader's last byte. Rank 1 dials, and all goes
over that one stream.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import trio

from tests.bench import talk
from tests.bench.base import BenchError
from tests.bench.carriers import open_end

if TYPE_CHECKING:
    from tests.bench.carriers import End, Pipe

_PIECE = 1 << 20
_MOST_SECONDS = 300.0


class Process:
    """Serves the requests of transport.py."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pipe: Pipe | None = None
        self._there = trio.Event()
        self._data = memoryview(bytearray(range(256)) * (_PIECE // 256))
        self.end: End | None = None

    async def accepted(self, pipe: Pipe) -> None:
        await pipe.take(1)  # who dials speaks first: some carriers are only open then
        self._pipe = pipe
        self._there.set()
        await trio.sleep_forever()

    async def listen(self) -> dict[str, Any]:
        return {"address": self._opened().address}

    async def connect(self, addresses: list[str]) -> dict[str, Any]:
        if self._rank == 1:
            self._pipe = await self._opened().dial(addresses[0])
            await self._pipe.write(self._data[:1])
        else:
            with trio.move_on_after(_MOST_SECONDS):
                await self._there.wait()
        return {}

    async def move(self, sizes: list[int]) -> dict[str, Any]:
        """Send `sizes[rank]` bytes and take what the other sends, both at once."""
        pipe, times = self._pipe, {"began": time.monotonic()}
        if pipe is None:
            raise BenchError("nobody dialled.")

        async def send() -> None:
            for start in range(0, sizes[self._rank], _PIECE):
                await pipe.write(self._data[: min(_PIECE, sizes[self._rank] - start)])

        async def take() -> None:
            await pipe.take(sizes[1 - self._rank])
            times["ended"] = time.monotonic()

        with trio.move_on_after(_MOST_SECONDS) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                nursery.start_soon(take)
        if scope.cancelled_caught:
            raise BenchError(f"a transfer took more than {_MOST_SECONDS:.0f} s.")
        return times

    def _opened(self) -> End:
        if self.end is None:
            raise AssertionError("asked before it was opened")
        return self.end


async def run(carrier: str, rank: int, host: str) -> None:
    process = Process(rank)
    async with open_end(carrier, process.accepted, host) as process.end:
        await talk.serve({name: getattr(process, name) for name in ("listen", "connect", "move")})


if __name__ == "__main__":
    trio.run(run, sys.argv[1], int(sys.argv[2]), sys.argv[3])
