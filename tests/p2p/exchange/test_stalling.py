"""Partners that accept, and then give nothing: who stalls loses the exchange, its standing and our time, honest lines none."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import RemoteError
from nolocod.observe.events import ExchangeEnded, OuterStep, PeerJudged
from nolocod.p2p.exchange.progress import Pace, StalledError
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto.exchange import Exchange, Setting
from nolocod.proto.exchange_states import State
from nolocod.proto.limits import Limits
from nolocod.proto.types import describe
from nolocod.studies.sim import clock
from nolocod.studies.sim.journal import Journal
from nolocod.studies.sim.node import SimNode
from nolocod.studies.sim.replica import SimReplica
from nolocod.studies.sim.scenarios import Plan, Scenario, slowed
from nolocod.studies.sim.swarm import Swarm
from nolocod.units import SLOWEST_RATE

if TYPE_CHECKING:
    from nolocod.observe.events import Event
    from nolocod.studies.sim.member import SimMember

HOURS = 0.5
LIMITS = Limits(chunk_bytes=16)
SCENARIO = slowed(Scenario(staleness=1000))
CHUNKS = {"never describes": -1, "one chunk": 1, "all but a verdict": 4}
"""What an attacker gives before it says Working for ever; a message has four chunks."""
WAITS = {"never describes": 32, "one chunk": 75, "all but a verdict": 25}
"""Seconds that such a one is waited for at most, where an inner phase takes 20."""


class Staller(SimNode):
    """Offers to the first node whenever it may be free, and then stalls."""

    tactic = ""
    told = 0.0
    """Seconds that its steps take, by its word."""

    async def take_part(self) -> None:
        while self.tactic:
            again = 1.0
            with suppress(RemoteError):
                again = await self._attack(self.world.nodes[0])  # type: ignore[attr-defined]  # a Swarm
            await clock.sleep(again)

    async def _attack(self, victim: SimNode) -> float:
        """Seconds after which to come again."""
        size, session = victim.replica.outbox.size, self._rng.randbytes(16)
        message = size // SCENARIO.outer.turns
        setting = Setting(self.identity, self.world.run_id, victim.replica.codec, size, LIMITS)
        machine = Exchange(setting, victim.peer_id, session, offerer=True)
        channel = Channel(await self.dial(victim.peer_id, EXCHANGE), LIMITS)
        try:
            await channel.send_envelope(machine.offer(replace(victim.standing, step_seconds=self.told), 0))
            machine.receive(await channel.receive_envelope())
            if machine.state is State.CLOSED:
                return machine.retry_after or 10.0
            content = memoryview(bytes(message))
            chunks = CHUNKS[self.tactic]
            if chunks > 0:
                await channel.send_envelope(machine.describe(describe(content, 16)) or b"")
            for index in range(chunks):
                await channel.send_chunk(index, content[16 * index : 16 * index + 16])
            while True:
                await channel.send_envelope(machine.working())
                await clock.sleep(5.0)
        finally:
            with trio.CancelScope(shield=True):
                await channel.reset()


class Watched(Swarm):
    """Counts what the first node does, and whom it bans."""

    taken = 0
    blamed = 0
    longest = 0.0
    """Seconds of an exchange that came to nothing."""

    def told(self, member: SimMember, event: Event) -> None:
        super().told(member, event)
        if member.number == 0:
            self.taken += isinstance(event, OuterStep)
            if isinstance(event, ExchangeEnded) and event.outcome == "aborted":
                self.longest = max(self.longest, event.seconds)
            self.blamed += isinstance(event, PeerJudged) and event.why == Conduct.WITHHELD.words


def outer_steps(tactic: str, hours: float = HOURS, *, wary: bool = False, told: float = 0.0) -> Watched:
    """A swarm of three nodes, and one that stalls where it has a `tactic`, and never offers itself; `wary`: the first lost much
    time before; `told`: what it says of its steps."""

    async def main() -> Watched:
        async with trio.open_nursery() as nursery:
            plan = Plan("stalling", nodes=3, rounds=0, seed=5, probation=3 * wary, cheap=True)
            swarm = Watched(plan, SCENARIO, nursery, Journal())
            swarm.limits = LIMITS
            with swarm.signing.checked():
                nodes = [swarm.add() for _ in range(3)]
                port = swarm.network.add(swarm.signing.identity(3).peer_id)
                staller = Staller(swarm, 3, port, SimReplica(SCENARIO.outer, 1.0, random.Random(3), chunk=16), 0)
                staller.tactic, staller.told = tactic, told
                nodes[0].loop._wasted.charge(nodes[0].peer_id, wary * 1e5, 0.0)
                for node in (*nodes, staller):
                    swarm.begin(node)
                await trio.sleep(hours * 3600)
                nursery.cancel_scope.cancel()
        return swarm

    return clock.run(main, 5)


@pytest.fixture(scope="module")
def calm() -> int:
    """Outer steps of the first node where nobody stalls."""
    return outer_steps("").taken


@pytest.mark.parametrize("tactic", CHUNKS)
def test_a_node_that_is_stalled_again_and_again_keeps_nine_tenths_of_its_outer_steps(tactic: str, calm: int) -> None:
    attacked = outer_steps(tactic)
    assert attacked.taken >= 0.9 * calm
    assert attacked.blamed > 0, "who stalls is blamed"
    assert 0 < attacked.longest < WAITS[tactic]


def test_where_too_much_time_was_lost_a_staller_has_a_quarter_and_the_slow_no_blame(calm: int) -> None:
    attacked = outer_steps("never describes", wary=True)
    assert attacked.taken >= 0.9 * calm
    assert 0 < attacked.longest < WAITS["never describes"] / 4 + 1
    assert attacked.blamed == 0, "an honest one may need more than it had"


def test_who_says_that_its_steps_take_for_ever_is_waited_for_as_any_other(calm: int) -> None:
    """A phase is of several steps, of the slow too: where one takes longer than that no word helps."""
    attacked = outer_steps("never describes", told=1e9)
    assert attacked.taken >= 0.9 * calm
    assert attacked.blamed > 0
    assert 0 < attacked.longest < WAITS["never describes"]


# --- what is too slow, and what is not -----------------------------------------------------------------

SIZE = 100 << 20
PACED = ((60.0, 0), (1.0, 0), (1.0, 100_000_000), (math.inf, SIZE))
"""Seconds of an inner phase, and bytes of a message."""


async def paced(rates: list[float], size: int = SIZE, piece: int = 512 << 10) -> float | None:
    """Seconds until a partner is found too slow that has described at once, by the rate (bytes/s) of each further minute."""
    pace, began = Pace(Limits(), size, lambda: True), trio.current_time()
    found: float | None = None

    async def move() -> None:
        left = 0.0
        for rate in rates:
            for _ in range(60):
                await trio.sleep(1.0)
                left += rate
                while left >= min(piece, size):
                    pace.move(min(piece, size))
                    left -= min(piece, size)
        nursery.cancel_scope.cancel()

    pace.described.set()
    prepared = trio.Event()
    prepared.set()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            await pace.watch(prepared)
    except* StalledError:
        found = trio.current_time() - began
    return found


@pytest.mark.parametrize("rate", [125_000, SLOWEST_RATE, SLOWEST_RATE / 3])
async def test_a_slow_line_is_no_stall(virtual_clock: object, rate: float) -> None:
    """1 Mbit/s; the least that an owner may set; that shared with two uploads."""
    assert await paced([rate] * 9) is None


async def test_a_partner_that_falls_silent_is_found_out_within_two_windows(virtual_clock: object) -> None:
    assert 59 < (await paced([0.0] * 9) or 0) < 75
    took = await paced([125_000, 125_000] + [0.0] * 9)
    assert took is not None
    assert 175 < took < 195


async def test_a_trickle_is_a_stall_whatever_the_size(virtual_clock: object) -> None:
    assert (await paced([7000.0] * 9, piece=1000) or 0) < 75
    small = Limits().least(10_000)
    assert small == pytest.approx(1000), "a tenth of what the whole deadline allows"
    assert await paced([20.0] * 9, size=10_000, piece=100) is None
    assert await paced([10.0] * 9, size=10_000, piece=100) is not None


async def test_what_is_not_due_is_not_asked_for(virtual_clock: object) -> None:
    """All chunks passed: the partner inspects, which has a bound of its own. A resumed stream may have them due again."""
    due = False
    pace, prepared = Pace(Limits(), SIZE, lambda: due), trio.Event()
    pace.described.set()
    with trio.move_on_after(1000) as scope:
        await pace.watch(prepared)  # our own snapshot is late
    assert scope.cancelled_caught
    prepared.set()
    with trio.move_on_after(1000) as scope:
        await pace.watch(prepared)
    assert scope.cancelled_caught
    due = True
    with pytest.raises(StalledError):
        await pace.watch(prepared)


async def test_a_partner_s_trainer_has_half_of_our_inner_phase(virtual_clock: object) -> None:
    """But time to end a step and to write, however short ours are; and never more than the run's bounds."""
    limits, began = Limits(), trio.current_time()
    waits = [(limits.paced(phase, size).snapshot_seconds, limits.paced(phase, size).settle_seconds) for phase, size in PACED]
    assert waits == [(30.0, 30.0), (20.0, 20.0), (40.0, 40.0), (120.0, 120.0)]
    wary = limits.paced(60.0, 0, wary=True)
    assert (wary.snapshot_seconds, wary.settle_seconds, wary.stall_seconds, wary.accept_seconds) == (5.0, 5.0, 15.0, 2.5)
    newcomer = limits.paced(60.0, 0, credit=0.25)
    assert (newcomer.snapshot_seconds, newcomer.settle_seconds, newcomer.stall_seconds) == (15.0, 15.0, 30.0)
    with pytest.raises(StalledError):
        await Pace(limits.paced(60.0, 0), SIZE, lambda: True).watch(trio.Event())
    assert trio.current_time() - began == pytest.approx(30.0 + limits.accept_seconds)


async def test_a_snapshot_that_never_comes_has_a_bound(virtual_clock: object) -> None:
    limits, began = Limits(), trio.current_time()
    with pytest.raises(StalledError):
        await Pace(limits, SIZE, lambda: True).watch(trio.Event())
    assert trio.current_time() - began == pytest.approx(limits.snapshot_seconds + limits.accept_seconds)


async def test_the_bound_is_kept_by_a_clock_whose_grain_is_coarser_than_the_rest(virtual_clock: object) -> None:
    """A second at a time, what remains of 130 is 1e-14 in the end, which added to the time of day is nothing."""
    looks = 0

    def up() -> bool:
        nonlocal looks
        looks += 1
        assert looks < 10_000
        return True

    for began in (0.2, 0.7, 1.2, 1.7, 2.2, 2.7):
        await trio.sleep(began)
        with pytest.raises(StalledError):
            await Pace(Limits(), SIZE, lambda: True, up).watch(trio.Event())
