"""Members of a run as an observer knows them, and states of the run's page made of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, get_args

from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Contribution, NatClass
from nolocod.observe.run.state import RunState
from nolocod.proto.types import Member, Standing
from nolocod.run.manifest import Manifest, Outer, Sealed, seal
from tests.support.page_states import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

OWNER = Identity.from_secret(bytes([9]) * 32)


def peer(number: int) -> PeerId:
    return Identity.from_secret((number + 1).to_bytes(32, "big")).peer_id


def a_run(rounds: int = 1000, name: str = "shakespeare") -> Sealed:
    return seal(Manifest(name=name, model={"model_type": "llama"}, outer=Outer(rounds=rounds)), OWNER)


def member(
    number: int, *, round_number: int = 40, tokens: int = 1000, loss: float = 2.0, state: str = "training",
    nat: NatClass | None = "public", group: str | None = None, addresses: tuple[str, ...] = (), version: str = "1.0",
) -> Member:  # fmt: skip
    """One that answered from an address group of its own, unless `group` says something else ("": only heard of)."""
    group = f"10.{number}.0.0/24" if group is None else group
    standing = Standing(round_number, tokens, loss)
    name = f"node {number}" if number % 2 else ""
    return Member(peer(number), standing, state, addresses, version, 0.0, None, 0, nat, nat == "public", group, name=name)


def given(number: int, tokens: int) -> Contribution:
    return Contribution(peer(number), f"node {number}", tokens, tokens / 100, tokens // 500, 5)


def watched(count: int, seconds: int = 60) -> RunState:
    """A run of `count` members, of which each third can be reached directly, watched for a while."""
    clock = Clock()
    state = RunState(a_run(), clock)
    kinds = (*get_args(NatClass), None)
    relay = f"/ip4/203.0.113.7/tcp/4001/p2p/{peer(0)}/p2p-circuit"
    for second in range(0, seconds, 4):
        clock.now += 4
        members = []
        for number in range(count):
            nat = "public" if number % 3 == 0 else cast("NatClass | None", kinds[number % 5])
            name = "joining" if number % 11 == 10 else "paused" if number % 13 == 12 else "training"
            tokens, loss = 5000 + (100 + number % 7) * second, 1.9 + 3 * math.exp(-second / 30)
            addresses = (relay,) if nat in ("cone", "symmetric") else ()
            members.append(
                member(number, round_number=40 + second, tokens=tokens, loss=loss, state=name, nat=nat, addresses=addresses)
            )
        pairs = [(peer(number), peer(number + 1), 200.0 * number) for number in range(0, count - 1, 2)]
        state.look(members, [given(number, 1000 * second) for number in range(count)], pairs)
    return state


def nobody() -> RunState:
    return watched(0, 8)


def alone() -> RunState:
    return watched(1)


def a_dozen() -> RunState:
    return watched(12, 400)


def six_hundred() -> RunState:
    return watched(600, 12)


STATES: dict[str, Callable[[], RunState]] = {made.__name__: made for made in (nobody, alone, a_dozen, six_hundred)}
