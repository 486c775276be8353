"""Print the tables of docs/membership.md: what membership costs and how fast it is, in swarms of several sizes.

    python -m tools.membership

The rule: the nodes are the simulator's, with the product's own membership and gossip, and real signatures.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING

import trio

from nolocod.p2p.timing import Timing
from nolocod.studies.sim import clock
from tests.support.gossip_swarm import CALM, Checks, chi_square, gossip_swarm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

SIZES = (4, 8, 16, 24, 50, 200, 800)


class Setattr:
    """What pytest's monkeypatch does, for a process that ends soon."""

    def setattr(self, target: object, name: str, value: object, /) -> None:
        setattr(target, name, value)


async def cost(checks: Checks, size: int) -> str:
    async with gossip_swarm(CALM) as swarm:
        members = swarm.add(size)
        await trio.sleep(150.0 if size <= 200 else 60.0)
        sent, checked, seconds = [member.port.sent for member in members], checks.count, 48.0
        await trio.sleep(seconds)
        spent = [(member.port.sent - before) / seconds for member, before in zip(members, sent, strict=True)]
        ages = [known.age for member in members for known in member.table.live(trio.current_time())]
        known = statistics.mean(len(member.table) for member in members)
        rate = (checks.count - checked) / seconds / size
    return (
        f"| {size} | {statistics.mean(spent):.0f} | {max(spent):.0f} | {rate:.1f} | {known:.0f} "
        f"| {statistics.mean(ages):.0f} | {CALM.pace(round(known)):.0f} | {CALM.lasts(round(known)):.0f} |"
    )


async def joined_and_vanished(size: int) -> str:
    known, gone = [], []
    for seed in range(5):
        async with gossip_swarm(Timing(), seed) as swarm:
            old = swarm.add(size - 1)
            await trio.sleep(150.0)
            (newcomer,) = swarm.add(1, old[:1])
            began = trio.current_time()
            while any(newcomer.peer_id not in member.table for member in old):  # noqa: ASYNC110 - looked at from outside
                await trio.sleep(0.2)
            known.append(trio.current_time() - began)
            await trio.sleep(60.0)
            newcomer.kill()
            gone.append(await swarm.seconds_until_gone([newcomer], 1.0, 300.0))
    return f"| {size} | {statistics.mean(known):.1f} | {max(known):.1f} | {statistics.mean(gone):.0f} | {max(gone):.0f} |"


async def uniformity(seed: int) -> str:
    async with gossip_swarm(CALM, seed) as swarm:
        members = swarm.add(200)
        await trio.sleep(150.0)
        degrees = swarm.in_degrees().values()
        statistic, deviations = chi_square(await swarm.drawn(rounds=20, every=15.0), members)
    spread = f"{statistics.mean(degrees):.0f} ± {statistics.pstdev(degrees):.0f} ({min(degrees)} to {max(degrees)})"
    return f"| {seed} | {statistic:.0f} | {deviations:+.2f} | {spread} |"


async def churn() -> str:
    async with gossip_swarm(CALM, seed=2) as swarm:
        members = swarm.add(200)
        await trio.sleep(100.0)
        dead = members[0:200:2]
        for start in range(0, 100, 20):
            for member in dead[start : start + 20]:
                member.kill()
            await trio.sleep(12.0)
        gone = {member.peer_id for member in dead}
        live = [member.draw() not in gone for _ in range(10) for member in swarm.live()]
        seconds = await swarm.seconds_until_gone(dead, 5.0, 400.0)
    share = sum(live) / len(live)
    return f"\nLive partners among draws right after: {share:.0%}; the last of the dead forgotten after {seconds:.0f} s more."


async def healing(size: int) -> str:
    """Seconds from the first contact between two halves until every node knows somebody of the other one."""
    times, events = [], []
    for seed in range(5):
        async with gossip_swarm(Timing(), seed) as swarm:
            left, right = swarm.add(size), swarm.add(size, side=1)
            await trio.sleep(200.0)
            for member in right:
                member.port.side = 0
            await swarm.rng.choice(left).swap(swarm.rng.choice(right).peer_id)
            began, sides = trio.current_time(), ({one.peer_id for one in left}, {one.peer_id for one in right})
            while any(not member.table.among(sides[member in left]) for member in swarm.live()):  # noqa: ASYNC110 - as above
                await trio.sleep(0.5)
            times.append(trio.current_time() - began)
            events.append(len(swarm.healed))
    return f"| {size} + {size} | {statistics.mean(times):.1f} | {max(times):.1f} | {statistics.mean(events):.0f} |"


def show(titles: str, rows: Iterable[Callable[[], Awaitable[str]]]) -> None:
    sys.stdout.write(f"\n| {titles} |\n{'|---' * len(titles.split(' | '))}|\n")
    for row in rows:
        sys.stdout.write(clock.run(row, seed=0) + "\n")
        sys.stdout.flush()


def main() -> None:
    checks = Checks(Setattr())
    show(
        "nodes | bytes/s sent | most | signatures/s | members known | their age, s | beat, s | believed for, s",
        [partial(cost, checks, size) for size in SIZES],
    )
    show(
        "nodes | newcomer known to all, s | most | vanished one gone from all, s | most",
        [partial(joined_and_vanished, size) for size in (4, 8, 16, 50)],
    )
    show(
        "seed | chi-square, 199 degrees of freedom | standard deviations | in how many tables a node is",
        [partial(uniformity, seed) for seed in (1, 2, 3)],
    )
    show(
        "nodes | every node knows the other half, s | most | PartitionHealed",
        [partial(healing, size) for size in (3, 12, 50)],
    )
    sys.stdout.write(clock.run(churn, seed=0) + "\n")


if __name__ == "__main__":
    main()
