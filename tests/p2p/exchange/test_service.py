"""Two whole exchangers over a network in memory, broken in every place: both apply, or neither."""

from __future__ import annotations

import math
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import (
    DiskFullError,
    PeerTooSlowError,
    PeerUnavailableError,
    ProtocolError,
    RejectedTensorError,
    TrainerError,
    UnacknowledgedError,
)
from nolocod.identity import Identity
from nolocod.observe.events import DoubtSettled
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.p2p.exchange.service import GLARE, ExchangeService
from nolocod.p2p.membership.peer_scoring import Conduct
from nolocod.p2p.transport.channel import Channel
from nolocod.p2p.transport.stream import EXCHANGE
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import Dialogue
from nolocod.proto.exchange import Exchange
from nolocod.proto.exchange_states import State
from nolocod.proto.limits import Limits
from nolocod.proto.types import Accept, Built, Busy, Description, Ended, Refuse, Standing, describe
from nolocod.run.manifest import Inner, Manifest, Outer, seal
from tests.support.sim_net import Cut, Net

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event
    from nolocod.p2p.exchange.session import Session
    from nolocod.proto.receipt import Receipt
    from nolocod.proto.types import Answer, Offer

SIZE, CHUNK = 2500, 1000
LIMITS = Limits(chunk_bytes=CHUNK)
LOW, HIGH = sorted((Identity.from_secret(bytes([n]) * 32) for n in (1, 2)), key=lambda identity: identity.peer_id)


@pytest.fixture(autouse=True)
def _threads_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual clock does not wait for threads, and would jump over every deadline meanwhile."""

    async def run_sync(function: Callable[..., object], *args: object, limiter: object = None) -> object:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


class FakeBox:
    def __init__(self, content: bytes | memoryview) -> None:
        self.content = content if isinstance(content, memoryview) else memoryview(bytearray(content))
        self.released = 0

    @property
    def size(self) -> int:
        return len(self.content)

    def view(self, start: int, length: int) -> memoryview:
        return self.content[start : start + length]

    place = view

    def release(self, start: int, length: int) -> None:
        self.released += length


class FakeTrainer:
    """Stands for the trainer."""

    phase, wary, credit = math.inf, False, 1.0

    def __init__(self, seed: int, size: int = SIZE) -> None:
        self.outbox = FakeBox(random.Random(seed).randbytes(size))
        self.inbox = FakeBox(bytes(size))
        self.snapshot_seconds = 0.0
        self.inspect_seconds = 0.0
        self.fault: Exception | None = None
        self.inspections = 0
        self.subject: int | None = None
        self.skipped = b""

    def overlap(self, offset: int) -> None:
        """Lay the inbox over the outbox, which begins `offset` bytes after it."""
        size = self.outbox.size
        memory = memoryview(bytearray(offset + size))
        memory[offset:] = self.outbox.content
        self.outbox, self.inbox = FakeBox(memory[offset:]), FakeBox(memory[:size])

    async def capture(self, subject: int) -> Description:
        self.subject = subject
        await trio.sleep(self.snapshot_seconds)
        return describe(self.outbox.content, CHUNK)

    async def inspect(self) -> bytes:
        self.inspections += 1
        await trio.sleep(self.inspect_seconds)
        if self.fault is not None:
            raise self.fault
        return self.skipped


class FakeReception:
    def __init__(self, local_side: FakeTrainer) -> None:
        self.local_side = local_side
        self.answer: Answer = Accept(Standing(4, 40, 2.0))
        self.asked: list[Offer] = []
        self.over: list[Ended] = []
        self.told = trio.Event()

    def decide(self, offer: Offer) -> Answer:
        self.asked.append(offer)
        return self.answer

    async def ended(self, ended: Ended) -> None:
        await trio.lowlevel.checkpoint()
        self.over.append(ended)
        self.told.set()


class Node:
    def __init__(self, net: Net, identity: Identity, folder: Path, limits: Limits = LIMITS, size: int = SIZE) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.local_side = FakeTrainer(identity.secret[0], size)
        self.reception = FakeReception(self.local_side)
        self.receipts = ReceiptStore(folder / identity.peer_id)
        self.events: list[Event] = []
        self.alive = trio.CancelScope()
        rng = random.Random(identity.secret[0])
        context = Context(identity, "run", "float32", size, limits, staleness=3, rng=rng)
        self.judged: list[tuple[PeerId, Conduct]] = []
        self.exchange_service = ExchangeService(
            context, net.dial(self.peer_id), self.reception, self.receipts, self.judge, self.events.append
        )
        net.handlers[self.peer_id, EXCHANGE] = self.exchange_service.handle

    async def settle_doubts(self) -> None:
        with self.alive:
            await self.exchange_service.doubts.run()

    def judge(self, peer: PeerId, conduct: Conduct) -> None:
        self.judged.append((peer, conduct))

    async def offer(self, other: Node) -> Ended:
        return await self.exchange_service.offer(other.peer_id, Standing(3, 30, 2.5), 0, self.local_side)


@asynccontextmanager
async def pair(
    folder: Path, limits: Limits = LIMITS, cuts: tuple[Cut, ...] = (), size: int = SIZE
) -> AsyncIterator[tuple[Node, Node, Net]]:
    async with trio.open_nursery() as nursery:
        net = Net(nursery, list(cuts))
        nodes = [Node(net, identity, folder, limits, size) for identity in (LOW, HIGH)]
        for node in nodes:
            nursery.start_soon(node.settle_doubts)
        yield nodes[0], nodes[1], net
        nursery.cancel_scope.cancel()


def hold_each_others_bytes(alice: Node, bob: Node) -> bool:
    return (
        alice.local_side.inbox.content == bob.local_side.outbox.content
        and bob.local_side.inbox.content == alice.local_side.outbox.content
    )


async def test_both_get_the_others_bytes_and_the_same_receipt(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "committed"
    assert hold_each_others_bytes(alice, bob)
    assert (alice.judged, bob.judged) == ([(bob.peer_id, Conduct.COMMITTED)], [(alice.peer_id, Conduct.COMMITTED)])
    assert ended.sent == ended.received == bob.reception.over[0].sent == SIZE
    assert ended.partner_standing == Standing(4, 40, 2.0)
    assert bob.reception.over[0].partner_standing == Standing(3, 30, 2.5)
    assert list(alice.receipts.all()) == list(bob.receipts.all())
    (receipt,) = alice.receipts.all()
    receipt.check()
    assert (receipt.session, receipt.offerer, receipt.answerer) == (ended.session, alice.peer_id, bob.peer_id)
    assert alice.local_side.outbox.released == alice.local_side.inbox.released == SIZE
    assert not net.caught


@pytest.mark.parametrize("at", [0, 1500, 3300, 7000, 9999])
async def test_the_inbox_may_lie_over_what_the_partner_holds(tmp_path: Path, virtual_clock: object, at: int) -> None:
    """As in the trainer's memory: ten chunks, the outbox two chunks behind the inbox, and a stream that breaks."""
    limits = Limits(chunk_bytes=CHUNK, ahead_chunks=2)
    cuts = (Cut(0, "out", at), Cut(1, "in", at // 2 + 500)) if at else ()
    async with pair(tmp_path, limits, cuts, size=10 * CHUNK) as (alice, bob, _):
        for one in (alice, bob):
            one.local_side.overlap(2 * CHUNK)
        tensors = [bytes(one.local_side.outbox.content) for one in (alice, bob)]
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "committed"
    assert [bytes(bob.local_side.inbox.content), bytes(alice.local_side.inbox.content)] == tensors


async def test_a_partner_that_runs_ahead_is_dropped(tmp_path: Path, virtual_clock: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with pair(tmp_path, Limits(chunk_bytes=CHUNK, ahead_chunks=1)) as (alice, bob, _):
            bob.local_side.snapshot_seconds = 5.0  # nothing of its own can have arrived meanwhile
            patch.setattr(Exchange, "may_send", True)
            ended = await alice.offer(bob)
            await bob.reception.told.wait()
    assert (ended.outcome, ended.error) == ("aborted", "NLC-203")
    assert "came when the partner could hold 0 of ours" in ended.reason


def test_a_node_speaks_of_its_runs_fragments_in_its_codecs_version() -> None:
    model, outer = {"model_type": "llama"}, Outer(turns=3, staleness=7)
    manifest = Manifest(name="run", model=model, codec="modulo8", inner=Inner(steps=3), outer=outer)
    context = Context.of(LOW, seal(manifest, HIGH), SIZE)
    assert (context.codec, context.fragments, context.staleness) == ("modulo8/1", 3, 21)
    assert (context.identity, context.run_id, context.size) == (LOW, seal(manifest, HIGH).run_id, SIZE)


async def test_a_fragment_that_the_run_does_not_have_is_refused(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        ended = await alice.exchange_service.offer(bob.peer_id, Standing(3, 30, 2.5), 1, alice.local_side)
    assert (ended.outcome, ended.error) == ("refused", "NLC-203")
    assert bob.reception.asked == []


async def test_each_learns_what_the_other_could_not_decode(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        alice.local_side.skipped, bob.local_side.skipped = b"\x05", b"\x80\x01"
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        (stored,) = alice.receipts.all()
    assert ended.skipped == b"\x80\x01"
    assert bob.reception.over[0].skipped == stored.skipped.blocks == b"\x05"
    assert stored.answerer_skipped.blocks == b"\x80\x01"


async def test_busy_and_refuse_are_outcomes(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        bob.reception.answer = Busy(2.5, "in another exchange")
        busy = await alice.offer(bob)
        bob.reception.answer = Refuse("NLC-206", "no\nmore")
        refused = await alice.offer(bob)
    assert (busy.outcome, busy.retry_after, busy.reason) == ("busy", 2.5, "in another exchange")
    assert (refused.outcome, refused.error, refused.reason) == ("refused", "NLC-206", "no?more")
    assert bob.reception.over == []


async def test_a_node_whose_tensor_is_not_known_yet_is_busy(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        bob.exchange_service.box_size = 0
        before = await alice.offer(bob)
        bob.exchange_service.box_size = SIZE
        after = await alice.offer(bob)
    assert (before.outcome, after.outcome) == ("busy", "committed")
    assert len(bob.reception.asked) == 1


async def test_another_tensor_is_refused_before_reception_is_asked(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        bob.exchange_service.box_size = SIZE + 1
        ended = await alice.offer(bob)
    assert (ended.outcome, ended.error) == ("refused", "NLC-203")
    assert bob.reception.asked == []


async def test_an_offer_of_other_tensors_of_the_same_size_is_refused_by_name(tmp_path: Path, virtual_clock: object) -> None:
    """mixtral once had 41 tensors with one release of transformers and 21 with the next, of one size in all."""
    async with pair(tmp_path) as (alice, bob, _):
        bob.exchange_service.tell_built(Built(b"l" * 16, b"w" * 16, "torch 2.8, transformers 5.1"))
        silent = await alice.offer(bob)
        alice.exchange_service.tell_built(Built(b"m" * 16, b"w" * 16, "torch 2.8, transformers 4.57"))
        ended = await alice.offer(bob)
        alice.exchange_service.tell_built(Built(b"l" * 16, b"v" * 16, "torch 2.9, transformers 5.1"))
        again = await alice.offer(bob)
    assert silent.outcome == "committed", "the release before tells nothing"
    assert (ended.outcome, ended.error) == ("refused", "NLC-119")
    assert ended.reason == (
        "the run's model has other tensors with torch 2.8, transformers 5.1 than with torch 2.8, transformers 4.57."
    )
    assert again.outcome == "committed", "the values to begin with are long gone"
    assert len(bob.reception.asked) == 2


async def test_a_peer_of_another_run_is_told_so(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        context = Context(bob.identity, "another", "float32", SIZE, LIMITS)
        stranger = ExchangeService(context, net.dial(bob.peer_id), bob.reception, bob.receipts)
        net.handlers[bob.peer_id, EXCHANGE] = stranger.handle
        ended = await alice.offer(bob)
    assert (ended.outcome, ended.error) == ("refused", "NLC-104")
    assert "'another'" in ended.reason
    assert "'run'" in ended.reason


@pytest.mark.parametrize("round", [0, 7, 1 << 60])
async def test_an_accept_from_a_far_round_moves_nobody_there(tmp_path: Path, virtual_clock: object, round: int) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        bob.reception.answer = Accept(Standing(round, 0, 0.0))
        ended = await alice.exchange_service.offer(bob.peer_id, Standing(3 if round else 4, 30, 2.5), 0, alice.local_side)
        await bob.reception.told.wait()
    assert (ended.outcome, ended.error) == ("aborted", "NLC-203")
    assert bob.reception.over[0].outcome == "aborted"


async def test_an_offer_beyond_all_measure_is_not_even_decided(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        await alice.exchange_service.offer(bob.peer_id, Standing(3, 1 << 53, 2.5), 0, alice.local_side)
        await trio.testing.wait_all_tasks_blocked()
    assert bob.reception.asked == []
    assert [type(error) for error in net.caught] == [ProtocolError]


async def test_nobody_there_is_unreachable(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        net.handlers.clear()
        ended = await alice.offer(bob)
    assert (ended.outcome, ended.error) == ("unreachable", "NLC-201")


async def silent(*_: object) -> None:
    await trio.sleep_forever()


async def test_a_silent_answerer_costs_the_accept_deadline_and_no_more(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        net.handlers[bob.peer_id, EXCHANGE] = silent
        started = trio.current_time()
        ended = await alice.offer(bob)
        took = trio.current_time() - started
    assert (ended.outcome, ended.error) == ("unreachable", "NLC-202")
    assert took <= LIMITS.accept_seconds + LIMITS.abort_seconds


# --- one stream broken at every place ----------------------------------------------------------------


@pytest.mark.parametrize("direction", ["out", "in"])
async def test_a_stream_broken_once_anywhere_after_accept_is_resumed(
    tmp_path: Path, virtual_clock: object, direction: str
) -> None:
    async with pair(tmp_path / "whole") as (alice, bob, net):
        await alice.offer(bob)
        await bob.reception.told.wait()
        total = net.lines[0].sent[direction]
        first = next_frame(bytes(net.lines[0].log[direction]))
    assert total > first + SIZE
    for at in range(first + 1, total, 97):
        async with pair(tmp_path / f"{at}", cuts=(Cut(0, direction, at),)) as (alice, bob, net):
            started = trio.current_time()
            ended = await alice.offer(bob)
            await bob.reception.told.wait()
            took = trio.current_time() - started
        assert (ended.outcome, bob.reception.over[0].outcome) == ("committed", "committed"), at
        assert hold_each_others_bytes(alice, bob)
        assert alice.local_side.inspections == bob.local_side.inspections == 1
        assert len(bob.reception.over) == 1
        assert took < 60, at
        assert not net.caught


def next_frame(log: bytes) -> int:
    """Where the second frame begins."""
    return 9 + int.from_bytes(log[5:9], "big")


@pytest.mark.parametrize("direction", ["out", "in"])
async def test_a_partner_gone_for_good_leaves_both_or_neither_or_a_counted_doubt(
    tmp_path: Path, virtual_clock: object, direction: str
) -> None:
    async with pair(tmp_path / "whole") as (alice, bob, net):
        await alice.offer(bob)
        await bob.reception.told.wait()
        total = net.lines[0].sent[direction]
    outcomes = set()
    for at in range(1, total + 1, 97):
        async with pair(tmp_path / f"{at}", cuts=(Cut(0, direction, at),)) as (alice, bob, net):
            net.down = lambda _peer, net=net: bool(net.lines)  # no second stream
            started = trio.current_time()
            ended = await alice.offer(bob)
            if bob.reception.asked:
                await bob.reception.told.wait()
            took = trio.current_time() - started
        theirs = bob.reception.over[0].outcome if bob.reception.over else None
        outcomes.add((ended.outcome, theirs))
        if theirs == "committed":
            assert ended.outcome == "committed", at
        if ended.outcome == "committed":
            assert theirs in ("committed", "in_doubt"), at
            assert ended.error == UnacknowledgedError.entry.code or theirs == "committed", at
        assert took <= LIMITS.resume_seconds + LIMITS.doubt_seconds + LIMITS.redial_seconds + 60, at
    assert outcomes <= {
        ("unreachable", None),
        ("unreachable", "aborted"),
        ("aborted", "aborted"),
        ("aborted", "in_doubt"),
        ("committed", "in_doubt"),
        ("committed", "committed"),
    }
    assert ("aborted", "aborted") in outcomes


@pytest.mark.parametrize("seed", range(60))
async def test_several_broken_streams_in_a_row_never_leave_the_two_sides_apart(
    tmp_path: Path, virtual_clock: object, seed: int
) -> None:
    rng = random.Random(seed)
    cuts = (
        Cut(0, rng.choice(["out", "in"]), rng.randrange(500, 4200)),
        *(Cut(stream, rng.choice(["out", "in"]), rng.randrange(1, 3500)) for stream in range(1, rng.randrange(2, 7))),
    )
    async with pair(tmp_path, cuts=cuts) as (alice, bob, net):
        started = trio.current_time()
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        took = trio.current_time() - started
    theirs = bob.reception.over[0].outcome
    assert (ended.outcome == "committed") == (theirs == "committed"), f"{ended} {theirs} {cuts}"
    if theirs == "committed":
        assert hold_each_others_bytes(alice, bob)
    assert len(bob.reception.over) == 1
    assert took < 120
    assert not net.caught


async def test_streams_that_always_break_end_within_the_bound(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path, cuts=(Cut(-1, "out", 900),)) as (alice, bob, net):
        started = trio.current_time()
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        took = trio.current_time() - started
    assert ended.outcome == bob.reception.over[0].outcome == "aborted"
    assert 1 < len(net.lines) <= 4 * LIMITS.resumes
    assert took < 120


async def test_an_answerer_in_doubt_learns_the_decision_from_disk(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path / "whole") as (alice, bob, net):
        await alice.offer(bob)
        before_commit = commit_starts(bytes(net.lines[0].log["out"]))
    async with pair(tmp_path / "cut", cuts=(Cut(0, "out", before_commit + 1),)) as (alice, bob, net):
        ended = await alice.offer(bob)
        assert ended.outcome == "committed"
        assert bob.reception.over == []
        reborn = Node(net, LOW, tmp_path / "cut")  # alice's daemon started again: only the file remembers
        assert reborn.receipts.find(ended.session) is not None
        await bob.reception.told.wait()
    assert [over.outcome for over in bob.reception.over] == ["committed"]
    assert bob.receipts.find(ended.session) == alice.receipts.find(ended.session)


@pytest.mark.parametrize("asks", ["the one in doubt", "its partner"])
@pytest.mark.parametrize("decided", [True, False])
async def test_a_doubt_is_settled_once_the_partner_is_heard_of_again(
    tmp_path: Path, virtual_clock: object, asks: str, *, decided: bool
) -> None:
    async with in_doubt(tmp_path) as (alice, bob, net, session):
        if not decided:  # alice's daemon started again, and its disk was lost with the decision
            alice = Node(net, LOW, tmp_path / "another disk")
        net.down = lambda _: False
        one, other = (alice, bob) if asks == "its partner" else (bob, alice)
        with trio.CancelScope() as given_up:  # as a round does that has waited long enough: nothing is forgotten
            given_up.cancel()
            await one.offer(other)
        for _ in range(2):  # it is asked once
            await one.offer(other)
        await trio.sleep(1)
    assert bob.events == [DoubtSettled(alice.peer_id, session.hex(), committed=decided)]
    assert bob.receipts.find(session) == alice.receipts.find(session)
    assert (bob.receipts.find(session) is not None) == decided
    told = [over.outcome for over in bob.reception.over if over.session == session]
    assert told == ["in_doubt"], "nothing is applied late"


@asynccontextmanager
async def in_doubt(folder: Path) -> AsyncIterator[tuple[Node, Node, Net, bytes]]:
    """An exchange that alice committed, and bob cannot learn of; its session. Nobody can be dialled until told so."""
    async with pair(folder / "whole") as (alice, bob, net):
        await alice.offer(bob)
        before_commit = commit_starts(bytes(net.lines[0].log["out"]))
    async with pair(folder / "cut", cuts=(Cut(0, "out", before_commit + 1),)) as (alice, bob, net):
        net.down = lambda _: bool(net.lines)
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        assert (ended.outcome, bob.reception.over[0].outcome) == ("committed", "in_doubt")
        await trio.sleep(1)  # bob asks once more
        yield alice, bob, net, ended.session


@pytest.mark.parametrize("decided", [True, False])
async def test_a_doubt_outlives_a_restart_and_is_settled_without_another_exchange(
    tmp_path: Path, virtual_clock: object, *, decided: bool
) -> None:
    async with in_doubt(tmp_path) as (alice, bob, net, session):
        bob.alive.cancel()
        if not decided:
            Node(net, LOW, tmp_path / "another disk")
        reborn = Node(net, HIGH, tmp_path / "cut")  # bob's daemon started again: only the disk remembers
        net.nursery.start_soon(reborn.settle_doubts)
        await trio.sleep(30)
        assert reborn.events == [], "alice cannot be reached yet"
        net.down = lambda _: False
        await trio.sleep(61)
        assert reborn.events == [DoubtSettled(alice.peer_id, session.hex(), committed=decided)]
        assert reborn.receipts.find(session) == (alice.receipts.find(session) if decided else None)
        assert reborn.receipts.doubts() == Node(net, HIGH, tmp_path / "cut").receipts.doubts() == []


async def test_doubts_are_settled_together_and_no_exchange_waits_for_them(tmp_path: Path, virtual_clock: object) -> None:
    """Sixteen doubts about a partner that takes offers, and never answers a question."""
    async with in_doubt(tmp_path) as (alice, bob, net, session):
        (vote,) = bob.receipts.doubts()
        for number in range(1, 16):
            content = vote.content.replace(session, number.to_bytes(16, "big"))
            bob.receipts.vote(replace(vote, content=content))
        assert len(bob.receipts.doubts()) == 16
        asked = 0
        handle = alice.exchange_service._resume

        async def mute(channel: Channel, body: pb.Body) -> None:
            nonlocal asked
            asked += 1
            await trio.sleep_forever()

        alice.exchange_service._resume = mute  # type: ignore[method-assign]  # a partner that wastes our time
        net.down = lambda _: False
        began = trio.current_time()
        ended = await bob.offer(alice)
        assert (ended.outcome, trio.current_time() - began < 1) == ("committed", True)
        await trio.sleep(1)
        assert asked == 16
        alice.exchange_service._resume = handle  # type: ignore[method-assign]
        await trio.sleep(LIMITS.doubt_seconds + 61)
        assert bob.receipts.doubts() == []
        assert sum(isinstance(event, DoubtSettled) and event.committed for event in bob.events) == 1


async def test_a_vote_is_on_the_disk_before_it_is_told(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk(monkeypatch, 7.0, "vote")
    async with pair(tmp_path) as (alice, bob, net):
        net.nursery.start_soon(alice.offer, bob)
        await trio.sleep(6)
        assert session_of(alice).machine.state is State.RECEIVED
        assert session_of(bob).machine.state is State.RECEIVED
        await bob.reception.told.wait()
        assert bob.reception.over[0].outcome == "committed"
        assert bob.receipts.doubts() == [], "the receipt settles it"


async def test_without_room_for_a_vote_there_is_none(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_vote: object) -> None:
        raise DiskFullError("no space.")

    async with pair(tmp_path) as (alice, bob, net):
        monkeypatch.setattr(bob.receipts, "vote", full)
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert ended.outcome == bob.reception.over[0].outcome == "aborted"
    assert [type(error) for error in net.caught] == [DiskFullError]
    assert list(alice.receipts.all()) == []


async def test_an_abort_settles_the_vote(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        alice.local_side.inspect_seconds, alice.local_side.fault = 5.0, RejectedTensorError("not finite.")
        await alice.offer(bob)
        await bob.reception.told.wait()
        assert bob.reception.over[0].outcome == "aborted"
        assert bob.receipts.doubts() == []
        assert bob.events == [], "it was never in doubt for others"


def commit_starts(log: bytes) -> int:
    """Where the last frame of a log begins."""
    position = start = 0
    while position < len(log):
        start = position
        position += 9 + int.from_bytes(log[position + 5 : position + 9], "big")
    return start


# --- glare, replay, unknown sessions -------------------------------------------------------------------


async def test_when_both_offer_at_once_the_lower_ids_offer_stands(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (low, high, _):
        results: dict[str, Ended] = {}

        async def offers(one: Node, other: Node) -> None:
            results[one.peer_id] = await one.offer(other)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(offers, low, high)
            nursery.start_soon(offers, high, low)
        await high.reception.told.wait()
    assert results[low.peer_id].outcome == high.reception.over[0].outcome == "committed"
    assert (results[high.peer_id].outcome, results[high.peer_id].reason) == ("busy", GLARE)
    assert low.reception.asked == []


async def test_a_partner_in_an_exchange_with_us_gets_no_second_one(tmp_path: Path, virtual_clock: object) -> None:
    """It accepted our offer: an offer of its own would have both exchanges write into one inbox."""
    async with pair(tmp_path) as (alice, bob, _):
        alice.local_side.snapshot_seconds = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.offer, bob)
            await trio.sleep(1)
            second = await bob.offer(alice)
        assert (second.outcome, second.reason) == ("busy", "in an exchange with you")
        assert alice.reception.asked == []
        await bob.reception.told.wait()
        assert bob.reception.over[0].outcome == "committed"


async def test_a_replayed_offer_is_refused(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        dialogue = Dialogue(LOW, "run", bob.peer_id, ended.session, 100)
        offer = pb.Offer(codec="float32", size=SIZE)
        channel = Channel(await net.dial(LOW.peer_id)(bob.peer_id, EXCHANGE), LIMITS)
        await channel.send_envelope(dialogue.seal(pb.Body(offer=offer)))
        answer = dialogue.open(await channel.receive_envelope())
    assert answer.refuse.code == "NLC-203"
    assert len(bob.reception.asked) == 1


@pytest.mark.parametrize("confirmed", [True, False])
async def test_who_asks_about_an_unknown_session_is_told_that_it_is_over(
    tmp_path: Path, virtual_clock: object, confirmed: bool
) -> None:
    async with pair(tmp_path) as (_, bob, net):
        dialogue = Dialogue(LOW, "run", bob.peer_id, b"s" * 16, 7)
        channel = Channel(await net.dial(LOW.peer_id)(bob.peer_id, EXCHANGE), LIMITS)
        await channel.send_envelope(dialogue.seal(pb.Body(resume=pb.Resume(confirmed=confirmed))))
        answer = dialogue.open(await channel.receive_envelope())
    assert answer.WhichOneof("content") == "abort"


async def test_an_offerer_that_was_asked_before_it_decided_never_commits(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        alice.local_side.inspect_seconds = 100.0
        results: list[Ended] = []

        async def offers() -> None:
            results.append(await alice.offer(bob))

        net.nursery.start_soon(offers)
        await trio.sleep(50)  # bob has confirmed; alice still inspects
        session = bob.reception.asked[0].session
        dialogue = Dialogue(HIGH, "run", alice.peer_id, session, 50)
        channel = Channel(await net.dial(HIGH.peer_id)(alice.peer_id, EXCHANGE), LIMITS)
        await channel.send_envelope(dialogue.seal(pb.Body(resume=pb.Resume(confirmed=True))))
        answer = dialogue.open(await channel.receive_envelope())
        await bob.reception.told.wait()
        await trio.sleep(100)
    assert answer.WhichOneof("content") == "abort"
    assert results[0].outcome == "aborted"
    assert bob.reception.over[0].outcome != "committed"
    assert list(alice.receipts.all()) == []


# --- own faults, rejections, slowness ----------------------------------------------------------------


@pytest.mark.parametrize("side", ["offerer", "answerer"])
async def test_a_rejected_tensor_aborts_both(tmp_path: Path, virtual_clock: object, side: str) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        local_side = alice.local_side if side == "offerer" else bob.local_side
        local_side.fault = RejectedTensorError("not finite.")
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "aborted"
    assert ended.error == bob.reception.over[0].error == "NLC-207"
    finder, other = (alice, bob) if side == "offerer" else (bob, alice)
    assert finder.judged == [(other.peer_id, Conduct.FALSE_TENSOR)]
    assert other.judged == [], "what a partner says of us is no conduct of its own"
    assert list(alice.receipts.all()) == list(bob.receipts.all()) == []


async def test_an_offerers_own_fault_is_raised_and_told(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        alice.local_side.fault = TrainerError("it died.")
        with pytest.raises(TrainerError):
            await alice.offer(bob)
        await bob.reception.told.wait()
    assert (bob.reception.over[0].outcome, bob.reception.over[0].error) == ("aborted", "NLC-125")


async def test_an_answerers_own_fault_is_raised_after_ended(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        bob.local_side.fault = TrainerError("it died.")
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert (ended.outcome, ended.error) == ("aborted", "NLC-125")
    assert bob.reception.over[0].outcome == "aborted"
    assert [type(error) for error in net.caught] == [TrainerError]


async def test_a_receipt_that_cannot_be_stored_means_no_decision(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_receipt: object) -> None:
        raise DiskFullError("no space.")

    async with pair(tmp_path) as (alice, bob, _):
        monkeypatch.setattr(alice.receipts, "add", full)
        with pytest.raises(DiskFullError):
            await alice.offer(bob)
        await bob.reception.told.wait()
    assert bob.reception.over[0].outcome == "aborted"


async def ask_in_doubt(net: Net, alice: Node, bob: Node) -> str | None:
    """Ask alice, in bob's name, what she decided: the name of her answer, None for none."""
    dialogue = Dialogue(HIGH, "run", alice.peer_id, bob.reception.asked[0].session, 50)
    channel = Channel(await net.dial(HIGH.peer_id)(alice.peer_id, EXCHANGE), LIMITS)
    await channel.send_envelope(dialogue.seal(pb.Body(resume=pb.Resume(confirmed=True))))
    try:
        return dialogue.open(await channel.receive_envelope()).WhichOneof("content")
    except PeerUnavailableError:
        return None


def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float, what: str = "add") -> None:
    async def run_sync(function: Callable[..., object], *args: object, limiter: object = None) -> object:
        await trio.sleep(seconds if function.__name__ == what else 0)
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


def hold_back(session: Session, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have what this side sends from now on wait for so long, as behind a full window."""
    send = session._channel.send_envelope

    async def late(raw: bytes) -> None:
        await trio.sleep(seconds)
        await send(raw)

    monkeypatch.setattr(session._channel, "send_envelope", late)


def session_of(node: Node) -> Session:
    (session,) = node.exchange_service._running.values()
    return session


async def test_who_asks_just_before_the_offerer_aborts_is_told_so(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        alice.local_side.inspect_seconds, alice.local_side.fault = 25.0, RejectedTensorError("not finite.")
        net.nursery.start_soon(alice.offer, bob)
        await trio.sleep(20)  # bob has confirmed; alice still inspects
        answer = await ask_in_doubt(net, alice, bob)
    assert answer == "abort"
    assert not net.caught


async def test_nothing_aborts_while_the_receipt_is_being_written(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk(monkeypatch, 30.0)
    results: list[Ended] = []
    answers: list[str | None] = []
    async with pair(tmp_path) as (alice, bob, net):

        async def offers() -> None:
            results.append(await alice.offer(bob))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(offers)
            await trio.sleep(5)
            answers.append(await ask_in_doubt(net, alice, bob))  # no answer yet: neither would be true
            answers.append(await ask_in_doubt(net, alice, bob))
            await session_of(bob)._channel.send_envelope(b"nonsense")
        answers.append(await ask_in_doubt(net, alice, bob))
    assert answers == [None, None, "commit"]
    assert results[0].outcome == "committed"
    assert len(list(alice.receipts.all())) == 1
    assert {type(error) for error in net.caught} == {PeerTooSlowError}


async def test_a_question_waits_for_the_decision_under_way(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_disk(monkeypatch, 3.0)
    async with pair(tmp_path) as (alice, bob, net):
        net.nursery.start_soon(alice.offer, bob)
        await trio.sleep(1)
        assert session_of(alice).machine.state is State.STORING
        assert await ask_in_doubt(net, alice, bob) == "commit"


async def test_what_was_decided_is_told_and_returned_to_a_caller_that_is_stopped_meanwhile(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        add, ended = alice.receipts.add, None
        with trio.CancelScope() as stop:

            def add_and_stop(receipt: Receipt) -> None:
                add(receipt)
                stop.cancel()

            monkeypatch.setattr(alice.receipts, "add", add_and_stop)
            ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended is not None, "the caller applies"
    assert ended.outcome == bob.reception.over[0].outcome == "committed"


async def test_a_receipt_answers_nobody_but_the_partner(tmp_path: Path, virtual_clock: object) -> None:
    eve = Identity.from_secret(bytes([3]) * 32)
    async with pair(tmp_path) as (alice, bob, net):
        ended = await alice.offer(bob)
        answers = []
        for one in (eve, HIGH):
            dialogue = Dialogue(one, "run", alice.peer_id, ended.session, 50)
            channel = Channel(await net.dial(one.peer_id)(alice.peer_id, EXCHANGE), LIMITS)
            await channel.send_envelope(dialogue.seal(pb.Body(resume=pb.Resume(confirmed=True))))
            answers.append(dialogue.open(await channel.receive_envelope()).WhichOneof("content"))
    assert answers == ["abort", "commit"]


@pytest.mark.parametrize("stalls", ["offerer", "answerer"])
async def test_who_stalls_after_some_chunks_is_found_out_and_blamed(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch, stalls: str
) -> None:
    """It says Working all the time."""
    async with pair(tmp_path, size=10 * CHUNK) as (alice, bob, net):
        one, other = (alice, bob) if stalls == "offerer" else (bob, alice)
        view, count = one.local_side.outbox.view, 0

        def some(start: int, length: int) -> memoryview:
            nonlocal count
            count += 1
            if count == 3:
                session = session_of(one)
                monkeypatch.setattr(session._channel, "send_chunk", silent)
                session._pace._least = -1
            return view(start, length)

        one.local_side.outbox.view = some  # type: ignore[method-assign]
        began = trio.current_time()
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
        took = trio.current_time() - began
    assert ended.outcome == bob.reception.over[0].outcome == "aborted"
    assert took < 80
    assert (one.peer_id, Conduct.WITHHELD) in other.judged, net.caught


async def test_steps_of_half_a_minute_and_more_are_no_fault(tmp_path: Path, virtual_clock: object) -> None:
    """An inspection waits for the inner step under way."""
    async with pair(tmp_path) as (alice, bob, _):
        alice.local_side.inspect_seconds, bob.local_side.inspect_seconds = 5.0, 100.0
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "committed"
    assert alice.judged == [(bob.peer_id, Conduct.COMMITTED)]


async def test_an_inspection_that_ends_while_an_abort_is_told_confirms_nothing(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        bob.local_side.inspect_seconds = 5.0
        net.nursery.start_soon(alice.offer, bob)
        await trio.sleep(4)
        hold_back(session_of(bob), monkeypatch, 3.0)
        await session_of(alice)._channel.send_envelope(b"nonsense")
        await bob.reception.told.wait()
    assert (bob.reception.over[0].outcome, bob.reception.over[0].error) == ("aborted", "NLC-203")
    assert not net.caught


async def test_an_own_fault_is_not_lost_behind_the_peers_next_message(
    tmp_path: Path, virtual_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        bob.local_side.inspect_seconds, bob.local_side.fault = 3.0, TrainerError("it died.")
        net.nursery.start_soon(alice.offer, bob)
        await trio.sleep(2)
        hold_back(session_of(bob), monkeypatch, 8.0)  # alice says Working meanwhile
        await bob.reception.told.wait()
        await trio.testing.wait_all_tasks_blocked()
    assert [type(error) for error in net.caught] == [TrainerError]


async def test_long_work_on_either_side_is_not_taken_for_death(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        bob.local_side.snapshot_seconds, bob.local_side.inspect_seconds = 50.0, 20.0
        alice.local_side.inspect_seconds = 25.0
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "committed"
    assert len(net.lines) == 1


async def test_a_partner_that_works_for_ever_ends_at_its_snapshots_bound(tmp_path: Path, virtual_clock: object) -> None:
    limits = Limits(chunk_bytes=CHUNK, snapshot_seconds=30.0)
    async with pair(tmp_path, limits) as (alice, bob, _):
        bob.local_side.snapshot_seconds = 1e6
        started = trio.current_time()
        ended = await alice.offer(bob)
        took = trio.current_time() - started
        await bob.reception.told.wait()
    assert (ended.outcome, bob.reception.over[0].outcome) == ("aborted", "aborted")
    assert took <= 45


@pytest.mark.parametrize(("away", "outcome"), [(55.0, "committed"), (65.0, "aborted")])
async def test_a_line_that_is_cut_before_the_snapshot_is_there_costs_the_snapshot_nothing(
    tmp_path: Path, virtual_clock: object, away: float, outcome: str
) -> None:
    """It is in time where its stream was up; without one it is waited for as in the midst of the chunks, and no longer."""
    limits = Limits(chunk_bytes=CHUNK, snapshot_seconds=30.0, resume_seconds=60.0, dial_seconds=1.0)
    async with pair(tmp_path, limits) as (alice, bob, net):
        bob.local_side.snapshot_seconds = 25.0
        ended: list[Ended] = []

        async def offer() -> None:
            ended.append(await alice.offer(bob))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(offer)
            await trio.sleep(10)
            net.down = lambda _: True
            await net.lines[0].ends["out"].reset()
            await trio.sleep(away)
            net.down = lambda _: False
        await bob.reception.told.wait()
    assert (ended[0].outcome, bob.reception.over[0].outcome) == (outcome, outcome)
    assert all(conduct is Conduct.COMMITTED for node in (alice, bob) for _, conduct in node.judged), "nobody is blamed"


@pytest.mark.parametrize("after", [0.0, 5.0])
async def test_a_cancelled_offer_releases_both_sides_within_a_moment(
    tmp_path: Path, virtual_clock: object, after: float
) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        alice.local_side.inspect_seconds = 50.0
        done = False
        with trio.move_on_after(after + 0.001) as scope:
            await alice.offer(bob)
            done = True
        started = trio.current_time()
        if bob.reception.asked:
            await bob.reception.told.wait()
        took = trio.current_time() - started
        alice.local_side.inspect_seconds = 0.0
        again = await bob.offer(alice)
    assert scope.cancelled_caught
    assert not done
    assert took <= LIMITS.abort_seconds
    assert all(over.outcome == "aborted" for over in bob.reception.over)
    assert again.outcome == "committed"
    assert not net.caught


@pytest.mark.parametrize("voted", [False, True])
async def test_an_answerer_waits_no_more_for_a_partner_that_comes_with_another_offer(
    tmp_path: Path, virtual_clock: object, voted: bool
) -> None:
    """It was killed, or gave the exchange up while its line was down, so that nobody was told."""
    async with pair(tmp_path, Limits(chunk_bytes=CHUNK, resume_seconds=180.0, redial_seconds=180.0)) as (alice, bob, net):
        alice.local_side.inspect_seconds = 5.0 if voted else 0.0
        bob.local_side.inspect_seconds = 0.0 if voted else 5.0
        with trio.CancelScope() as life:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(alice.offer, bob)
                await trio.sleep(2)
                net.down = lambda _: True
                await net.lines[0].ends["out"].reset()
                await trio.sleep(1)
                life.cancel()
        await trio.sleep(30)
        assert not bob.reception.over
        net.down, alice.local_side.inspect_seconds = lambda _: False, 0.0
        started = trio.current_time()
        second = await alice.offer(bob)
        await bob.reception.told.wait()
        third = await alice.offer(bob)
    assert (second.outcome, bob.reception.over[0].outcome, third.outcome) == ("busy", "aborted", "committed")
    assert trio.current_time() - started < 20
    assert not net.caught


async def test_a_cancelled_answerer_still_reports_the_end(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, net):
        bob.local_side.inspect_seconds = 50.0
        handle, scope = bob.exchange_service.handle, trio.CancelScope()

        async def stoppable(stream: object) -> None:
            with scope:
                await handle(stream)  # type: ignore[arg-type]  # the net's own streams

        net.handlers[bob.peer_id, EXCHANGE] = stoppable
        scope.deadline = trio.current_time() + 5
        ended = await alice.offer(bob)
    assert (ended.outcome, ended.reason) == ("aborted", "the node stops")
    assert [over.outcome for over in bob.reception.over] == ["aborted"]


async def test_altered_bytes_are_not_taken(tmp_path: Path, virtual_clock: object) -> None:
    async with pair(tmp_path) as (alice, bob, _):
        told = describe(memoryview(alice.local_side.outbox.content), CHUNK)

        async def lying(_: int) -> Description:
            alice.local_side.outbox.content[-1] ^= 1
            return told

        alice.local_side.capture = lying  # type: ignore[method-assign]  # what a faulty trainer would do
        ended = await alice.offer(bob)
        await bob.reception.told.wait()
    assert ended.outcome == bob.reception.over[0].outcome == "aborted"
    assert ended.error == bob.reception.over[0].error == "NLC-205"
    assert bob.local_side.inspections == 0
