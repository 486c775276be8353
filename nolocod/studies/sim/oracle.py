"""What must hold in every simulation, worked out by other means than the product's.

The rule: the oracle sees all nodes, and takes nothing from the messages that went between them. An outer step is
checked against the paper's own form, with two tensors from each side (arXiv 2506.10911, Eq. 2 with the signs of its
Eq. 32); an exchange against what its other side says of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.identity import PeerId
    from nolocod.observe.events import ExchangeEnded
    from nolocod.studies.sim.replica import OuterSettings, State

_ROOM = 1e-9
"""By how much a number may differ, absolutely or relatively."""
_NOTED = 20
"""Violations that are told in words; the rest is counted."""


@dataclass
class Exchange:
    """One session as its sides tell it: how it ended for each, by peer id, and what each applied."""

    outcomes: dict[PeerId, str] = field(default_factory=dict)
    applied: dict[PeerId, State] = field(default_factory=dict)
    snapshots: dict[PeerId, State] = field(default_factory=dict)
    spans: dict[PeerId, slice] = field(default_factory=dict)
    partners: dict[PeerId, PeerId] = field(default_factory=dict)


class Oracle:
    """Told by all nodes; `violations` are sentences about what should not be."""

    def __init__(self, outer: OuterSettings) -> None:
        self.violations: list[str] = []
        self.broken = 0
        self.checked = 0
        """Paired outer steps that were compared with the paper's form on both sides."""
        self.half = 0
        """Exchanges that one side applied, and the other is in doubt about or was killed in."""
        self._outer = outer
        self._open: dict[str, Exchange] = {}
        self._ended: set[PeerId] = set()

    def blame(self, what: str) -> None:
        """Something does not hold."""
        self.broken += 1
        if len(self.violations) < _NOTED:
            self.violations.append(what)

    @property
    def waits(self) -> bool:
        """Whether an exchange ended for one side, and the other has yet to tell."""
        return any(
            exchange.partners.get(peer) not in self._ended for exchange in self._open.values() for peer in exchange.applied
        )

    # --- outer steps ------------------------------------------------------------------------------------

    def solo(self, peer: PeerId, before: State, after: State, span: slice) -> None:
        """`peer` took a step alone, about the weights `span`: a group of one."""
        self._compare(f"the solo step of {peer[-8:]}", before, (before,), after, span)

    def snapshot(self, session: str, peer: PeerId, state: State) -> None:
        """`peer` went into the exchange `session` with `state`."""
        self._open.setdefault(session, Exchange()).snapshots[peer] = state

    def paired(self, session: str, peer: PeerId, before: State, after: State, span: slice) -> None:
        """`peer` applied what it got in `session`, about the weights `span`."""
        exchange = self._open.setdefault(session, Exchange())
        if peer in exchange.applied:
            self.blame(f"{peer[-8:]} applied {session[:8]} twice")
        exchange.applied[peer] = after
        exchange.snapshots[peer], exchange.spans[peer] = before, span

    def _compare(self, what: str, before: State, group: tuple[State, ...], after: State, span: slice) -> None:
        outer, count, among = self._outer, len(group), range(len(before.phi))[span]
        for index, (phi, delta) in enumerate(zip(before.phi, before.delta, strict=True)):
            if index not in among:
                if (after.phi[index], after.delta[index]) != (phi, delta):
                    self.blame(f"{what}: slow weights or momentum {index} changed, and it was about {among}")
                continue
            moved = math.fsum(one.theta[index] - one.phi[index] for one in group) / count
            middle = math.fsum(one.phi[index] for one in group) / count
            momentum = outer.alpha * delta + outer.beta * moved + outer.gamma * (middle - phi)
            for name, found, expected in (
                ("momentum", after.delta[index], momentum),
                ("slow weights", after.phi[index], phi + momentum),
            ):
                if not math.isclose(found, expected, rel_tol=_ROOM, abs_tol=_ROOM):
                    self.blame(f"{what}: {name} {index} are {found!r}, not {expected!r}")
                    return

    # --- exchanges --------------------------------------------------------------------------------------

    def follow(self, peer: PeerId, event: ExchangeEnded) -> None:
        """Take note of how an exchange ended at `peer`."""
        if not event.session:
            return
        exchange = self._open.setdefault(event.session, Exchange())
        if peer in exchange.outcomes:
            self.blame(f"{peer[-8:]} told the end of {event.session[:8]} twice")
        exchange.outcomes[peer] = event.outcome
        exchange.partners[peer] = event.partner
        if {peer, event.partner} <= exchange.outcomes.keys():
            self._close(event.session, exchange, peer, event.partner)

    def killed(self, peer: PeerId) -> None:
        """`peer` tells nothing any more."""
        self._ended.add(peer)

    def _close(self, session: str, exchange: Exchange, *sides: PeerId) -> None:
        """Both sides have told. Who committed applies right before it tells, so that is known too."""
        del self._open[session]
        outcomes = {exchange.outcomes[side] for side in sides}
        for side in sides:
            if (exchange.outcomes[side] == "committed") != (side in exchange.applied):
                self.blame(f"{side[-8:]} calls {session[:8]} {exchange.outcomes[side]}, and applied it or not against that")
        for side, after in exchange.applied.items():
            if len(exchange.snapshots) != 2:
                self.blame(f"{side[-8:]} applied {session[:8]}, of which only one side has a snapshot")
                continue
            group, span = tuple(exchange.snapshots.values()), exchange.spans[side]
            self._compare(f"{side[-8:]} in {session[:8]}", exchange.snapshots[side], group, after, span)
            self.checked += 1
        if len(exchange.applied) == 1:
            if "in_doubt" in outcomes:
                self.half += 1
            else:
                self.blame(f"{session[:8]} was applied by one side, and neither is in doubt: {sorted(outcomes)}")

    def end(self) -> None:
        """The simulation is over: what one side applied, the other must have applied, be in doubt about, or be dead."""
        for session, exchange in self._open.items():
            for side in exchange.applied:
                partner = exchange.partners.get(side)
                if partner in self._ended:
                    self.half += 1
                else:
                    self.blame(f"{session[:8]} was applied by {side[-8:]}, and its partner never told the end of it")
