"""The peer book survives restarts, damage and a full disk, and never grows without end."""

from __future__ import annotations

import json
import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.identity import Identity, PeerId
from nolocod.observe.events import Event, Troubled
from nolocod.p2p.discovery.address_book import CAPACITY, AddressBook, save_aside

if TYPE_CHECKING:
    from pathlib import Path

HERE = "/ip4/192.0.2.1/tcp/4001"


def silent(event: Event) -> None:
    pytest.fail(f"nothing was to be told: {event}")


def test_what_is_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", silent)
    old, new = Identity.generate().peer_id, Identity.generate().peer_id
    book.remember(old, (HERE,), 1.0)
    book.remember(new, (HERE, "/ip6/2001:db8::1/tcp/1"), 2.0)
    book.save()
    again = AddressBook(tmp_path / "peers.json", silent)
    assert again.recent() == [(new, (HERE, "/ip6/2001:db8::1/tcp/1")), (old, (HERE,))]
    assert again.addresses(old) == (HERE,)
    assert [file.name for file in tmp_path.iterdir()] == ["peers.json"]


def test_an_unchanged_book_is_not_written(tmp_path: Path) -> None:
    AddressBook(tmp_path / "peers.json", silent).save()
    assert not list(tmp_path.iterdir())


def test_it_keeps_those_seen_last_and_some_of_those_before(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", silent, random.Random(0))
    many = 4 * CAPACITY
    for number in range(many):
        book.remember(PeerId(f"peer{number}"), (HERE,), float(number))
    kept = [int(peer.removeprefix("peer")) for peer, _ in book.recent()]
    assert len(kept) == CAPACITY
    assert kept[: CAPACITY // 2] == list(range(many - 1, many - 1 - CAPACITY // 2, -1))
    assert min(kept) < many - 2 * CAPACITY, "a crowd of new ones does not drive out all that were before"


def test_what_circuits_lead_to_is_remembered(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", silent)
    circuit = f"{HERE}/p2p/{Identity.generate().peer_id}/p2p-circuit"
    book.remember(PeerId("p"), (circuit,), 1.0)
    assert book.addresses(PeerId("p")) == (circuit,)


def test_addresses_that_nobody_can_dial_are_left_out(tmp_path: Path) -> None:
    book = AddressBook(tmp_path / "peers.json", silent)
    book.remember(PeerId("p"), ("/ip4/0.0.0.0/tcp/1", "/unix/a", "nonsense", "/ip4/192.0.2.1/udp/5"), 1.0)
    assert book.recent() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'[{"peer_id": "x"}]',
        b'{"a": 1}',
        json.dumps([{"peer_id": "x" * 99, "addresses": [], "seen": 0}]).encode(),
    ],
)
def test_a_damaged_file_is_told_and_forgotten(tmp_path: Path, content: bytes) -> None:
    told: list[Event] = []
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    book = AddressBook(path, told.append)
    assert book.recent() == []
    assert [type(event) for event in told] == [Troubled]
    book.remember(PeerId("p"), (HERE,), 1.0)
    book.save()
    assert AddressBook(path, silent).addresses(PeerId("p")) == (HERE,)


async def test_a_disk_that_does_not_take_it_is_told_by_the_loop(tmp_path: Path) -> None:
    """Not by the thread that writes: who follows events asks trio for the time, and a node that could not save ended."""
    told: list[tuple[float, Event]] = []
    book = AddressBook(tmp_path / "folder" / "peers.json", silent)
    (tmp_path / "folder").write_text("a file where a folder is needed")
    book.remember(PeerId("p"), (HERE,), 1.0)
    await save_aside(book.save, lambda event: told.append((trio.current_time(), event)))
    assert [type(event) for _, event in told] == [Troubled]
    (tmp_path / "folder").unlink()
    await save_aside(book.save, silent)
    assert AddressBook(tmp_path / "folder" / "peers.json", silent).addresses(PeerId("p")) == (HERE,), "it is tried again"


async def test_no_two_write_at_once() -> None:
    """They took the temporary name from each other, and the slower one ended its node."""
    met = threading.Barrier(2)
    together = []

    def save() -> None:
        with suppress(threading.BrokenBarrierError):
            together.append(met.wait(0.1))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(save_aside, save, silent)
    assert together == []
