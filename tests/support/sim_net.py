"""The simulator's network for driver tests: instant lines, streams that are counted, and cut at any byte.

Needs the fixture `virtual_clock`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import PeerUnavailableError
from nolocod.studies.sim.network import LineModel
from tests.support.faulty_network import Fault, FaultyNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio

    from nolocod.identity import PeerId
    from nolocod.p2p.transport.stream import Dial, Handler, Stream
    from nolocod.studies.sim.network import Port
    from tests.support.faulty_network import FaultyEnd


@dataclass
class Cut:
    """Break the `stream`-th stream (-1: every one) after `at` bytes that the dialer ("out") or the dialled ("in") sent."""

    stream: int
    direction: str
    at: int


class Line:
    """Both ends of one stream."""

    def __init__(self, near: FaultyEnd) -> None:
        self.ends = {"out": near, "in": near.peer_end}

    @property
    def sent(self) -> dict[str, int]:
        return {direction: len(end.record) for direction, end in self.ends.items()}

    @property
    def log(self) -> dict[str, bytearray]:
        return {direction: end.record for direction, end in self.ends.items()}


@dataclass
class Net:
    """Who listens, and what goes wrong. `lines`: all streams in the order of their dials; `caught`: what handlers raised."""

    nursery: trio.Nursery
    cuts: list[Cut] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    handlers: dict[tuple[PeerId, str], Handler] = field(default_factory=dict)
    down: Callable[[PeerId], bool] = lambda _peer: False
    """Whether a peer takes no new streams."""
    caught: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        line = LineModel(latency=0.0, up=math.inf, down=math.inf)
        self._network = FaultyNetwork(line, random.Random(0), self._dialled)

    def dial(self, own: PeerId) -> Dial:
        async def dial(peer: PeerId, protocol: str) -> Stream:
            port, handler = self._port(peer), self.handlers.get((peer, protocol))
            port.handlers.clear()
            if handler is not None and not self.down(peer):
                port.handlers[protocol] = self._catching(handler)
            return await self._network.dial(self._port(own))(peer, protocol)

        return dial

    def _port(self, peer: PeerId) -> Port:
        port = self._network.ports.get(peer) or self._network.add(peer)
        port.spawn = self.nursery.start_soon
        return port

    def _catching(self, handler: Handler) -> Handler:
        async def caught(stream: Stream) -> None:
            try:
                await handler(stream)
            except PeerUnavailableError:
                raise
            except Exception as error:  # noqa: BLE001  # handed to the test
                self.caught.append(error)
                await stream.reset()

        return caught

    def _dialled(self, near: FaultyEnd) -> None:
        line = Line(near)
        for cut in self.cuts:
            if cut.stream in (len(self.lines), -1):
                line.ends[cut.direction].faults.append(Fault("cut", cut.at))
        self.lines.append(line)
