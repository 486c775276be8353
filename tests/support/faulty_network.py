"""The simulator's network with faults in its streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import trio

from nolocod.studies.sim.network import End, Network

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from nolocod.studies.sim.network import LineModel, Port

Kind = Literal["cut", "silence", "delay", "flip", "repeat"]


@dataclass
class Fault:
    """What befalls the bytes of a stream from the `at`-th on that one side writes. Happens once.

    cut: the connection breaks there, on both sides. silence: nothing more arrives, though writes go through. delay: what
    follows is `seconds` late. flip: one bit of the `at`-th byte is another. repeat: the write that holds it arrives twice.
    """

    kind: Kind
    at: int
    seconds: float = 0.0
    done: bool = False


class FaultyEnd(End):
    """`faults` befall what is written here."""

    peer_end: FaultyEnd

    def __init__(self, network: Network, own: Port, other: Port, protocol: str, *, relayed: bool) -> None:
        super().__init__(network, own, other, protocol, relayed=relayed)
        self.faults: list[Fault] = []
        self.record = bytearray()
        """All that was written here."""

    def _arrive(self, what: bytes | int, sent: float) -> None:
        for piece, late in self._befall(what) if isinstance(what, bytes) else [(what, 0.0)]:
            super()._arrive(piece, sent + late)

    def _befall(self, data: bytes) -> list[tuple[bytes, float]]:
        """What of `data` goes on its way, each piece with its delay."""
        start, late, pieces = len(self.record), 0.0, 1
        self.record += data
        for fault in self.faults:
            if fault.done or len(self.record) <= fault.at:
                continue
            fault.done = True
            offset = max(0, fault.at - start)
            match fault.kind:
                case "cut":
                    super()._arrive(data[:offset], trio.current_time())
                    self.cut()
                    return []
                case "silence":
                    super()._arrive(data[:offset], trio.current_time())
                    self._deaf = True
                case "delay":
                    late += fault.seconds
                case "flip":
                    data = data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]
                case "repeat":
                    pieces = 2
        return [] if self._deaf else [(data, late)] * pieces


class FaultyNetwork(Network):
    """`dialled` is told every new stream before a byte is written: where faults are hung in, on it and on its `peer_end`."""

    end_type = FaultyEnd

    def __init__(self, line: LineModel, rng: random.Random, dialled: Callable[[FaultyEnd], None]) -> None:
        super().__init__(line, rng)
        self._dialled = dialled

    def connect(self, own: Port, other: Port, protocol: str) -> End:
        near = super().connect(own, other, protocol)
        assert isinstance(near, FaultyEnd)
        self._dialled(near)
        return near
