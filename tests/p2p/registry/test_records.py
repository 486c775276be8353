"""What a node makes of announcements: the latest counts, only what was confirmed is held, and all of it is bounded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from nolocod.errors import ProtocolError
from nolocod.identity import Identity, PeerId
from nolocod.p2p.registry.records import CAPACITY, NEWS, PENDING, PER_CARRIER, PER_GROUP, PER_MESSAGE, Registry
from nolocod.run.announcements import Announcement, digest, sign
from tests.run.test_announcements import SAID, WALL

CARRIER = Identity.generate().peer_id


def announced(number: int, version: float = 0.0, **changes: object) -> Announcement:
    """The announcement of run `number`, each of an owner of its own."""
    owner = Identity.from_secret((number + 1).to_bytes(32, "big"))
    said = replace(SAID, run_id=f"{number:064x}", version=WALL + version, **changes)  # type: ignore[arg-type]  # as given
    return sign(said, owner)


def carrier(number: int) -> PeerId:
    return PeerId(f"carrier {number}")


def held(*said: Announcement) -> Registry:
    registry = Registry()
    for number, one in enumerate(said):
        assert registry.hear(one.raw, carrier(number), 0.0, WALL + 10) == one
        registry.confirmed(one, f"group {number}", 0.0)
    return registry


def test_what_is_heard_is_held_and_told_only_once_it_is_confirmed() -> None:
    registry, said = Registry(), announced(1)
    assert registry.hear(said.raw, CARRIER, 0.0, WALL) == said
    assert (registry.runs(), list(registry.question(0.0).records), list(registry.answer(()).records)) == ([], [], [])
    registry.confirmed(said, "group", 0.0)
    assert registry.runs() == [said]
    assert list(registry.question(0.0).records) == list(registry.answer(()).records) == [said.raw]
    assert list(registry.answer({said.digest}).records) == []
    assert registry.hear(said.raw, CARRIER, 1.0, WALL) is None


def test_the_latest_version_counts_in_whatever_order_it_comes() -> None:
    versions = [announced(1, version) for version in (0.0, 1.0, 2.0)]
    for seed in range(6):
        order = random.Random(seed).sample(versions, 3)
        registry = held(order[0])
        for one in order[1:]:
            registry.hear(one.raw, CARRIER, 0.0, WALL + 10)
        assert registry.runs() == [versions[2]]


def test_an_older_version_does_not_replace_what_was_confirmed() -> None:
    registry = held(announced(1, 5.0))
    registry.confirmed(announced(1, 1.0), "group", 0.0)
    assert registry.runs() == [announced(1, 5.0)]


@pytest.mark.parametrize("address", ["", "nowhere", "/ip4/203.0.113.7/tcp/4001", "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWx"])
def test_an_address_that_nobody_can_dial_is_a_fault_of_whoever_tells_it(address: str) -> None:
    with pytest.raises(ProtocolError):
        Registry().hear(announced(1, addresses=(*SAID.addresses, address)).raw, CARRIER, 0.0, WALL)


def test_what_waits_is_not_replaced_by_an_older_version() -> None:
    registry = Registry()
    assert registry.hear(announced(1, 5.0).raw, CARRIER, 0.0, WALL + 10) is not None
    assert registry.hear(announced(1, 1.0).raw, CARRIER, 0.0, WALL + 10) is None
    assert registry.hear(announced(1, 6.0).raw, CARRIER, 0.0, WALL + 10) is not None


def test_of_another_owner_it_is_another_announcement() -> None:
    honest = announced(1)
    other = sign(replace(SAID, run_id=honest.run_id, version=WALL + 9), Identity.generate())
    registry = held(honest)
    assert registry.hear(other.raw, CARRIER, 0.0, WALL + 10) == other
    assert registry.runs() == [honest]


def test_of_our_own_run_the_manifest_says_whose_word_counts() -> None:
    said = announced(1)
    registry = Registry(said.run_id, said.owner)
    assert registry.own == b""
    assert registry.hear(said.raw, CARRIER, 0.0, WALL) is None
    assert (registry.own, registry.answer(()).own) == (said.raw, said.raw)
    other = sign(replace(SAID, run_id=said.run_id, version=WALL + 9), Identity.generate())
    registry.hear(other.raw, CARRIER, 0.0, WALL + 10)
    assert registry.own == said.raw


def test_what_was_withdrawn_is_told_and_not_listed() -> None:
    registry, gone = held(announced(1)), announced(1, 1.0, withdrawn=True)
    registry.hear(gone.raw, CARRIER, 0.0, WALL + 10)
    assert registry.runs() == []
    assert list(registry.answer(()).records) == [gone.raw]
    assert registry.hear(announced(1).raw, CARRIER, 0.0, WALL + 10) is None


def test_what_nobody_confirmed_is_looked_into_again_only_after_a_while() -> None:
    registry, said = Registry(), announced(1)
    registry.hear(said.raw, CARRIER, 0.0, WALL)
    registry.failed(said, 0.0)
    assert registry.hear(said.raw, CARRIER, 299.0, WALL) is None
    assert registry.hear(said.raw, CARRIER, 301.0, WALL) == said


def test_one_peer_cannot_fill_what_waits_and_all_together_not_more_than_so_many() -> None:
    registry = Registry()
    for number in range(20):
        registry.hear(announced(number).raw, CARRIER, 0.0, WALL)
    assert sum(registry.hear(announced(100 + n).raw, carrier(n), 0.0, WALL) is not None for n in range(99)) == (
        PENDING - PER_CARRIER
    )


def test_who_is_held_keeps_its_place_and_a_group_has_so_many() -> None:
    registry = held(announced(0))
    for number in range(1, 10):
        registry.confirmed(announced(number), "203.0.113.0/24", 0.0)
    assert len(registry.runs()) == 1 + PER_GROUP
    for number in range(10, 10 + CAPACITY):
        registry.confirmed(announced(number), f"10.0.{number}.0/24", 0.0)
    assert len(registry.runs()) == CAPACITY
    assert announced(0) in registry.runs()


def test_an_announcement_ends() -> None:
    registry = held(announced(1))
    registry.expire(SAID.expires - 1)
    assert len(registry.runs()) == 1
    registry.expire(SAID.expires)
    assert registry.runs() == []


def test_news_get_old_and_messages_are_bounded() -> None:
    registry = held(*(announced(number) for number in range(20)))
    assert len(registry.question(0.0).records) == len(registry.answer(()).records) == PER_MESSAGE
    assert list(registry.question(NEWS).records) == []
    assert len(registry.question(NEWS).digests) == 20
    known: set[bytes] = set()
    for _ in range(3):
        known |= {digest(raw) for raw in registry.answer(known).records}
    assert known == registry.digests, "whoever asks again gets the rest"


def test_more_than_anybody_tells_is_a_fault() -> None:
    with pytest.raises(ProtocolError):
        Registry().learn([announced(n).raw for n in range(PER_MESSAGE + 1)], CARRIER, 0.0, WALL)


def test_of_a_message_what_is_not_valid_is_dropped_and_counted_and_what_has_ended_is_only_dropped() -> None:
    raw = bytearray(announced(1).raw)
    raw[-1] ^= 1
    good, early = announced(2), announced(3, 7200.0, expires=WALL + 86400)
    found = Registry().learn([bytes(raw), early.raw, good.raw], CARRIER, 0.0, WALL)
    assert found == ([good], 1)
    assert Registry().learn([good.raw], CARRIER, 0.0, SAID.expires) == ([], 0)
