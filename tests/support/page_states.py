"""Nodes in all states that the status page has to show, made of the events that lead there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, get_args

from nolocod.identity import Identity, PeerId
from nolocod.observe.events import (
    Allowed,
    Checkpointed,
    Evaluated,
    ExchangeEnded,
    ExchangeStarted,
    InnerSteps,
    NatClass,
    Outcome,
    OuterStep,
    Paused,
    PeerBanned,
    PeerConnected,
    PeerJudged,
    PeerSeen,
    Reach,
    ReachFound,
    RelayHeld,
    Relaying,
    Started,
    StateChanged,
    Traffic,
    Troubled,
)
from nolocod.observe.status.state import StatusState

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.events import Event


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tell(state: StatusState, *events: Event) -> None:
    for event in events:
        state.follow(event)


def peer(number: int) -> PeerId:
    return Identity.from_secret(bytes([number + 1]) * 32).peer_id


def begun() -> tuple[Clock, StatusState]:
    """A node that has only now been started."""
    clock = Clock()
    state = StatusState(clock, lambda: 40)
    address = f"/ip4/192.168.178.23/tcp/40001/p2p/{peer(0)}"
    tell(state, Started(peer(0), "ab" * 32, "shakespeare", (address,), "127.0.0.1:9464"))
    tell(state, StateChanged("discovering", "a first peer"))
    return clock, state


def trained(peers: int) -> tuple[Clock, StatusState]:
    """A node that has trained for a while among so many peers, of all kinds and ends of exchanges."""
    clock, state = begun()
    tell(state, StateChanged("training"))
    for number in range(1, peers + 1):
        reach = cast("Reach", get_args(Reach)[number % 4])
        nat = cast("NatClass", get_args(NatClass)[number % 4])
        tell(state, PeerSeen(peer(number), 40 + number, 310_000 + number, 2.0 + number / 100, "training", nat))
        if number < 9:
            tell(state, PeerConnected(peer(number), reach))
        tell(state, PeerJudged(peer(number), max(0.1, 1 - number / 12), "what it did"))
    for step in range(60):
        clock.now += 4
        tell(state, InnerSteps(20, 20_480, 1.9 + 3 * math.exp(-step / 12) + 0.1 * math.sin(step * 7), 1e-3, 3.6))
        if step % 10 == 0:
            tell(state, Evaluated(step, 1.9 + 3 * math.exp(-step / 12), 0.5))
        if peers:
            exchange(state, step, peer(1 + step % peers))
    tell(state, Checkpointed(58, 5_000_000, 0.2), Traffic(9 << 30, 8 << 30, 1.3e6, 1.2e6, "2026-11", 40 << 30, 39 << 30))
    return clock, state


def exchange(state: StatusState, step: int, partner: PeerId) -> None:
    ends = ("committed", "committed", "busy", "committed", "aborted", "committed", "refused", "unreachable", "in_doubt")
    outcome = cast("Outcome", ends[step % len(ends)])
    done = outcome == "committed"
    told = {"busy": "NLC-208", "aborted": "NLC-202", "refused": "NLC-207"}.get(outcome, "")
    reason = "" if done else "3 inner steps before it can be a partner"
    tell(state, ExchangeStarted(partner, initiator=True))
    size = 3_350_000 if done else 0
    tell(state, ExchangeEnded(partner, "s", True, outcome, size, size, 0.41, told, reason))
    if done:
        tell(state, OuterStep(step, "paired", partner, 20, 1.2e-3, 0.1))


def new() -> StatusState:
    return begun()[1]


def alone() -> StatusState:
    return trained(0)[1]


def one_peer() -> StatusState:
    return trained(1)[1]


def ten_peers() -> StatusState:
    clock, state = trained(10)
    tell(state, ExchangeStarted(peer(3), initiator=True))
    clock.now += 3
    return state


def forty_peers() -> StatusState:
    return trained(40)[1]


def relayed() -> StatusState:
    _, state = trained(3)
    why = "2 peers saw 2 ports (24340, 34875): the NAT cannot be punched; forward port 40001 in the router"
    tell(state, ReachFound("symmetric", why, (f"/ip4/203.0.113.7/tcp/4001/p2p/{peer(2)}/p2p-circuit/p2p/{peer(0)}",)))
    tell(state, RelayHeld(peer(2), 3600.0), RelayHeld(peer(3), 3000.0), Relaying(0, 0, 0, 0))
    for number in (1, 2, 3):
        tell(state, PeerConnected(peer(number), "relayed"))
    return state


def banned() -> StatusState:
    _, state = trained(3)
    tell(state, PeerBanned(peer(2), 3600.0, "its weights were refused four times"))
    return state


def warned() -> StatusState:
    clock, state = trained(3)
    text = "the trainer ended with status -9 in inner step 1200 of round 58"
    tell(state, Troubled("NLC-125", text), Troubled("NLC-202", f"…{peer(3)[-8:]} sent nothing for 30 s"))
    clock.now += 40
    tell(state, Troubled("NLC-125", text), StateChanged("loading", "the trainer"))
    return state


def paused() -> StatusState:
    _, state = trained(3)
    tell(state, Allowed(2_500_000, 12_500_000, 200_000_000_000, ("22:00-07:00", "12:00-13:00"), on_battery=False))
    tell(state, Paused("hours", "outside its hours", 5 * 3600.0), StateChanged("paused", "22:00"))
    return state


STATES: dict[str, Callable[[], StatusState]] = {
    made.__name__: made for made in (new, alone, one_peer, ten_peers, forty_peers, relayed, banned, warned, paused)
}
