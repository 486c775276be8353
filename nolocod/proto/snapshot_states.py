"""The states of a stream on which a newcomer gets a snapshot, in tables as for exchanges (states.py).

The rule: the newcomer drives; what one stream began, the next one goes on with by naming the snapshot.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Literal

from nolocod.proto.exchange_states import expected, following
from nolocod.proto.limits import most_bytes

if TYPE_CHECKING:
    from nolocod.identity import PeerId


class Serving(enum.Enum):
    NEW = enum.auto()
    """Nothing was asked on this stream."""
    ASKED = enum.auto()
    """The newcomer wants to know what there is; the donor's trainer may have to write it first."""
    DESCRIBED = enum.auto()
    """Both know what is served; the next request is due."""
    MOVING = enum.auto()
    """Chunks are due."""
    WHOLE = enum.auto()
    """All chunks have passed."""
    CLOSED = enum.auto()
    """Busy or refused."""


_S = Serving

_NEWCOMER: dict[Serving, dict[str, Serving]] = {
    _S.NEW: {">snapshot_request": _S.ASKED, ">chunk_request": _S.MOVING},
    _S.ASKED: {"<working": _S.ASKED, "<snapshot_offer": _S.DESCRIBED, "<busy": _S.CLOSED, "<refuse": _S.CLOSED},
    _S.DESCRIBED: {">chunk_request": _S.MOVING},
    _S.MOVING: {
        "<chunk": _S.MOVING,
        "<last chunk of a request": _S.DESCRIBED,
        "<last chunk": _S.WHOLE,
        "<busy": _S.CLOSED,
        "<refuse": _S.CLOSED,
    },
    _S.WHOLE: {">chunk_request": _S.MOVING},  # chunks before the last, which others were asked for first
    _S.CLOSED: {},
}

_DONOR: dict[Serving, dict[str, Serving]] = {
    _S.NEW: {"<snapshot_request": _S.ASKED, "<chunk_request": _S.MOVING, ">busy": _S.CLOSED},
    _S.ASKED: {">snapshot_offer": _S.DESCRIBED, ">busy": _S.CLOSED},
    _S.DESCRIBED: {"<chunk_request": _S.MOVING, "<snapshot_request": _S.ASKED},
    _S.MOVING: {
        ">chunk": _S.MOVING,
        ">last chunk of a request": _S.DESCRIBED,
        ">last chunk": _S.WHOLE,
        ">refuse": _S.NEW,  # no longer kept: the newcomer may ask for what there is now
    },
    _S.WHOLE: {"<chunk_request": _S.MOVING, "<snapshot_request": _S.ASKED},
    _S.CLOSED: {},
}

SERVING = {"newcomer": _NEWCOMER, "donor": _DONOR}


class Service:
    """Where one side of one stream is."""

    def __init__(self, side: Literal["newcomer", "donor"], partner: PeerId) -> None:
        self.side = side
        self.state = Serving.NEW
        self._partner = partner

    def most(self) -> int:
        """Bytes of the largest envelope that may come now."""
        return most_bytes(expected(SERVING[self.side], self.state))

    def step(self, name: str) -> None:
        """`name` came or was done. ProtocolError if it may not come now."""
        self.state = following(SERVING[self.side], self.state, name, self._partner, self.side)
