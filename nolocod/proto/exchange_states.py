"""The states of an exchange, and what leads from one to the next.

The rule: `TABLE` says, for each side and state, what may come ("<") and what we may decide (">"), and what
follows; what is absent is an error: the peer's if it came, ours if we did it.

Two phases make that both apply or neither: the answerer confirms (and from then on is in doubt until
it is told), the offerer decides. The offerer decides once, stores the receipt before it says so, and
never aborts afterwards; what it aborted it never commits.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from nolocod.errors import ProtocolError
from nolocod.identity import short

S = TypeVar("S", bound=enum.Enum)


def following(table: dict[S, dict[str, S]], state: S, step: str, partner: str, side: str = "side") -> S:
    """The state that `table` has after `step`. ProtocolError for what `partner` may not send to a `side` in `state`."""
    after = table[state].get(step)
    if after is None and step.startswith("<"):
        raise ProtocolError(f"{short(partner)} sent {step[1:]} to a {side} that is {state.name}.")
    if after is None:
        raise AssertionError(f"{step[1:]} in state {state.name}")
    return after


def expected(table: dict[S, dict[str, S]], state: S) -> list[str]:
    """The messages that may come in `state`."""
    return [step[1:] for step in table[state] if step.startswith("<")]


class State(enum.Enum):
    NEW = enum.auto()
    OFFERED = enum.auto()
    """Offer sent (offerer) or received (answerer), and not answered."""
    ACCEPTED = enum.auto()
    """The partner's Describe is due."""
    RECEIVING = enum.auto()
    RECEIVED = enum.auto()
    """All of the partner's chunks are here and verified."""
    CONFIRMED = enum.auto()
    """The offerer holds the answerer's Confirm."""
    STORING = enum.auto()
    """The offerer writes the receipt: nothing may abort now, for it may be on the disk already."""
    IN_DOUBT = enum.auto()
    """The answerer confirmed, and does not know what the offerer decided."""
    DECIDED = enum.auto()
    """The offerer decided to commit, and stored the receipt."""
    COMMITTED = enum.auto()
    """Both know."""
    ABORTED = enum.auto()
    CLOSED = enum.auto()
    """Busy or refused."""


_S = State


def _moving(state: State, more: dict[str, State]) -> dict[str, State]:
    """A state in which bytes move: either side may be at work, resume after a broken stream, or abort."""
    stays = dict.fromkeys(("<working", "<resume", ">resume"), state)
    return {**stays, "<abort": State.ABORTED, ">abort": State.ABORTED, **more}


OFFERER: dict[State, dict[str, State]] = {
    _S.NEW: {">offer": _S.OFFERED},
    _S.OFFERED: {"<accept": _S.ACCEPTED, "<busy": _S.CLOSED, "<refuse": _S.CLOSED, ">abort": _S.ABORTED},
    _S.ACCEPTED: _moving(_S.ACCEPTED, {"<describe": _S.RECEIVING}),
    _S.RECEIVING: _moving(_S.RECEIVING, {"<chunk": _S.RECEIVING, "<last chunk": _S.RECEIVED}),
    _S.RECEIVED: _moving(_S.RECEIVED, {"<confirm": _S.CONFIRMED}),
    _S.CONFIRMED: {"<working": _S.CONFIRMED, ">store": _S.STORING, ">abort": _S.ABORTED},
    _S.STORING: {"<working": _S.STORING, ">decide": _S.DECIDED, ">fail": _S.CONFIRMED},
    _S.DECIDED: {"<acknowledge": _S.COMMITTED, "<working": _S.DECIDED, ">commit": _S.DECIDED},
    _S.COMMITTED: {">commit": _S.COMMITTED},  # again, to a partner that lost it
    _S.ABORTED: {},
    _S.CLOSED: {},
}

ANSWERER: dict[State, dict[str, State]] = {
    _S.NEW: {"<offer": _S.OFFERED},
    _S.OFFERED: {">accept": _S.ACCEPTED, ">busy": _S.CLOSED, ">refuse": _S.CLOSED},
    _S.ACCEPTED: _moving(_S.ACCEPTED, {"<describe": _S.RECEIVING}),
    _S.RECEIVING: _moving(_S.RECEIVING, {"<chunk": _S.RECEIVING, "<last chunk": _S.RECEIVED}),
    _S.RECEIVED: _moving(_S.RECEIVED, {">confirm": _S.IN_DOUBT}),
    _S.IN_DOUBT: {
        "<commit": _S.COMMITTED,
        "<abort": _S.ABORTED,
        "<working": _S.IN_DOUBT,
        "<resume": _S.IN_DOUBT,
        ">resume": _S.IN_DOUBT,
        ">confirm": _S.IN_DOUBT,  # again, after a broken stream
    },
    _S.COMMITTED: {">acknowledge": _S.COMMITTED},
    _S.ABORTED: {},
    _S.CLOSED: {},
}

TABLE = {"offerer": OFFERER, "answerer": ANSWERER}
