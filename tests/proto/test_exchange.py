"""The exchange machine: every state times every message, altered bytes, and random schedules."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nolocod.errors import AlteredBytesError, LocalError, ProtocolError, RemoteError, SignatureError
from nolocod.identity import Identity
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import describe_to_wire
from nolocod.proto.envelope import Dialogue, standing_to_wire
from nolocod.proto.exchange import Exchange, Setting
from nolocod.proto.exchange_states import TABLE, State
from nolocod.proto.framing import ChunkHead
from nolocod.proto.limits import Limits
from nolocod.proto.receipt import Receipt, Skipped, from_line, sign, to_line
from nolocod.proto.types import Standing, describe

ALICE, BOB, EVE = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2, 3))
SIZE, CHUNK = 250, 100
LIMITS = Limits(chunk_bytes=CHUNK)
SESSION = b"s" * 16
TENSORS = {identity.peer_id: random.Random(identity.secret[0]).randbytes(SIZE) for identity in (ALICE, BOB)}
OWN = {peer: describe(memoryview(tensor), CHUNK) for peer, tensor in TENSORS.items()}


def setting(identity: Identity, limits: Limits = LIMITS) -> Setting:
    return Setting(identity, "run", "float32", SIZE, limits)


class Pair:
    """Both machines of one exchange, and how far they are taken."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.alice = Exchange(setting(ALICE, limits), BOB.peer_id, SESSION, offerer=True)
        self.bob = Exchange(setting(BOB, limits), ALICE.peer_id, SESSION, offerer=False)

    def accept(self) -> Pair:
        self.bob.receive(self.alice.offer(Standing(3, 30, 2.5), 0))
        self.alice.receive(self.bob.accept(Standing(4, 40, 2.0)))
        return self

    def describe(self) -> Pair:
        for one, other, peer in ((self.alice, self.bob, ALICE.peer_id), (self.bob, self.alice, BOB.peer_id)):
            other.receive(one.describe(OWN[peer]) or b"")
        return self

    def transfer(self) -> Pair:
        for one, other, peer in ((self.alice, self.bob, ALICE.peer_id), (self.bob, self.alice, BOB.peer_id)):
            while one.next_chunk is not None:
                pass_chunk(one, other, TENSORS[peer])
        return self

    def confirm(self) -> Pair:
        self.bob.vote(b"")
        self.alice.receive(self.bob.confirm())
        return self

    def store(self) -> Pair:
        self.alice.store(b"")
        return self

    def decide(self) -> Pair:
        self.alice.decide()
        return self

    def commit(self) -> Pair:
        self.bob.receive(self.alice.commit())
        return self

    def acknowledge(self) -> Pair:
        self.alice.receive(self.bob.acknowledge())
        return self


def pass_chunk(one: Exchange, other: Exchange, tensor: bytes) -> None:
    index = one.next_chunk
    assert index is not None
    content = memoryview(tensor)[index * CHUNK : (index + 1) * CHUNK]
    one.sending(len(content))
    assert other.expect(ChunkHead(index, len(content))) == (index * CHUNK, len(content))
    other.chunk(content)


def test_a_whole_exchange_ends_committed_with_one_receipt() -> None:
    pair = Pair().accept().describe().transfer().confirm().store().decide().commit().acknowledge()
    assert pair.alice.state is pair.bob.state is State.COMMITTED
    assert pair.alice.receipt == pair.bob.receipt
    receipt = pair.alice.signed()
    receipt.check()
    assert [side.root for side in receipt.parsed.sides] == [OWN[ALICE.peer_id].root, OWN[BOB.peer_id].root]
    assert [side.standing.round for side in receipt.parsed.sides] == [3, 4]


# --- every state, every message ----------------------------------------------------------------------


def states(offerer: bool) -> dict[State, Pair]:
    """A pair for every state of one side."""
    made: dict[State, Pair] = {}
    steps = ["accept", "describe", "transfer", "confirm", "store", "decide", "commit", "acknowledge"]
    for length in range(len(steps) + 1):
        pair = Pair()
        for step in steps[:length]:
            getattr(pair, step)()
        made.setdefault((pair.alice if offerer else pair.bob).state, pair)
    offered = Pair()
    offer = offered.alice.offer(Standing(0, 0, 0.0), 0)
    offered.bob.receive(offer)
    made[State.OFFERED] = offered
    closed = Pair()
    closed.bob.receive(closed.alice.offer(Standing(0, 0, 0.0), 0))
    closed.alice.receive(closed.bob.busy(1.0, ""))
    made[State.CLOSED] = closed
    aborted = Pair().accept()
    aborted.alice.receive(aborted.bob.abort("NLC-200", ""))
    made[State.ABORTED] = aborted
    described = Pair().accept()
    described.alice.describe(OWN[ALICE.peer_id])
    made[State.ACCEPTED] = described
    return made


def messages(peer: str, state: Exchange) -> dict[str, pb.Body]:
    """One well-formed body of every kind, as `peer` would send it to a machine in `state`."""
    receipt, signature, skipped = b"", b"", b""
    if state.receipt is not None or state.state in (State.RECEIVED, State.IN_DOUBT):
        receipt = state._content()
        one = ALICE if peer == ALICE.peer_id else BOB
        signature, skipped = sign(one, receipt), Skipped.signed(one, receipt, b"").signature
    return {
        "offer": pb.Body(offer=pb.Offer(codec="float32", size=SIZE)),
        "accept": pb.Body(accept=pb.Accept()),
        "busy": pb.Body(busy=pb.Busy(retry_after_ms=1)),
        "refuse": pb.Body(refuse=pb.Refuse(code="NLC-206")),
        "describe": pb.Body(describe=describe_to_wire(OWN[ALICE.peer_id if peer == ALICE.peer_id else BOB.peer_id])),
        "confirm": pb.Body(confirm=pb.Confirm(receipt=receipt, signature=signature, skipped_signature=skipped)),
        "commit": pb.Body(commit=pb.Commit(receipt=receipt, signature=signature, skipped_signature=skipped)),
        "acknowledge": pb.Body(acknowledge=pb.Acknowledge()),
        "abort": pb.Body(abort=pb.Abort(code="NLC-200")),
        "resume": pb.Body(resume=pb.Resume()),
        "working": pb.Body(working=pb.Working()),
        "heartbeat": pb.Body(heartbeat=pb.Heartbeat()),
        "gossip": pb.Body(gossip=pb.Gossip()),
        "snapshot_request": pb.Body(snapshot_request=pb.SnapshotRequest()),
        "unknown message": pb.Body(),
    }


CASES = [
    (side, state, name) for side, table in TABLE.items() for state in table for name in messages(ALICE.peer_id, Pair().alice)
]


@pytest.mark.parametrize(("side", "state", "name"), CASES)
def test_every_message_in_every_state_does_what_the_table_says(side: str, state: State, name: str) -> None:
    pair = states(side == "offerer")[state]
    machine, partner = (pair.alice, BOB) if side == "offerer" else (pair.bob, ALICE)
    assert machine.state is state
    dialogue = Dialogue(partner, "run", (ALICE if side == "offerer" else BOB).peer_id, SESSION, 1000)
    raw = dialogue.seal(messages(partner.peer_id, machine)[name])
    following = TABLE[side][state].get(f"<{name}")
    if following is None:
        with pytest.raises(ProtocolError):
            machine.receive(raw)
        assert machine.state is state
    else:
        assert machine.receive(raw) == name
        assert machine.state is following


@pytest.mark.parametrize("side", ["offerer", "answerer"])
def test_a_chunk_outside_receiving_is_refused(side: str) -> None:
    for state, pair in states(side == "offerer").items():
        machine = pair.alice if side == "offerer" else pair.bob
        if state is not State.RECEIVING:
            with pytest.raises(ProtocolError):
                machine.expect(ChunkHead(0, CHUNK))


def test_every_state_is_reached_and_has_a_row() -> None:
    for side, table in TABLE.items():
        reached = {State.NEW} | {state for row in table.values() for state in row.values()}
        assert reached == set(table), side


def test_what_was_decided_is_never_aborted_and_what_was_aborted_never_decided() -> None:
    for table in TABLE.values():
        for state in (State.STORING, State.DECIDED, State.COMMITTED, State.IN_DOUBT):
            assert ">abort" not in table.get(state, {})
    assert TABLE["offerer"][State.ABORTED] == TABLE["answerer"][State.ABORTED] == {}
    assert [state for state, row in TABLE["offerer"].items() if ">decide" in row] == [State.STORING]
    assert [state for state, row in TABLE["answerer"].items() if "<commit" in row] == [State.IN_DOUBT]


# --- content ----------------------------------------------------------------------------------------


def test_a_tensor_of_another_size_is_refused() -> None:
    pair = Pair().accept()
    other = describe(memoryview(bytes(SIZE + 1)), CHUNK)
    with pytest.raises(LocalError):
        pair.alice.describe(other)
    raw = Dialogue(ALICE, "run", BOB.peer_id, SESSION, 9).seal(pb.Body(describe=describe_to_wire(other)))
    with pytest.raises(ProtocolError, match="is not of this run"):
        pair.bob.receive(raw)


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_no_altered_byte_is_accepted(position: int, flip: int) -> None:
    pair = Pair().accept().describe()
    tensor = bytearray(TENSORS[ALICE.peer_id])
    tensor[position] ^= flip
    for _ in range(position // CHUNK):
        pass_chunk(pair.alice, pair.bob, bytes(tensor))
    with pytest.raises(AlteredBytesError):
        pass_chunk(pair.alice, pair.bob, bytes(tensor))
    assert pair.bob.received == position // CHUNK * CHUNK
    assert pair.bob.state is State.RECEIVING


@pytest.mark.parametrize("head", [ChunkHead(1, CHUNK), ChunkHead(0, CHUNK - 1), ChunkHead(2**32 - 1, CHUNK), ChunkHead(2, 50)])
def test_a_chunk_out_of_order_or_of_another_length_is_refused(head: ChunkHead) -> None:
    pair = Pair().accept().describe()
    with pytest.raises(ProtocolError):
        pair.bob.expect(head)


def test_a_receipt_about_other_bytes_is_not_taken() -> None:
    pair = Pair().accept().describe().transfer()
    content = pair.alice._content()
    dialogue = Dialogue(BOB, "run", ALICE.peer_id, SESSION, 50)
    wrong = content.replace(OWN[BOB.peer_id].root, bytes(32))
    for signed, kind in (
        (pb.Confirm(receipt=wrong, signature=sign(BOB, wrong)), ProtocolError),
        (pb.Confirm(receipt=content, signature=sign(EVE, content)), SignatureError),
        (pb.Confirm(receipt=content, signature=BOB.sign(content)), SignatureError),
        (pb.Confirm(receipt=content), SignatureError),
    ):
        with pytest.raises(kind):
            pair.alice.receive(dialogue.seal(pb.Body(confirm=signed)))
        assert pair.alice.state is State.RECEIVED
    skipped = Skipped.signed(BOB, content, b"").signature
    confirm = pb.Confirm(receipt=content, signature=sign(BOB, content), skipped_signature=skipped)
    pair.alice.receive(dialogue.seal(pb.Body(confirm=confirm)))
    assert pair.alice.state is State.CONFIRMED


# --- what a receipt covers ---------------------------------------------------------------------------


def test_a_receipt_names_fragment_codec_and_the_blocks_that_each_leaves_out() -> None:
    pair = Pair()
    pair.bob.receive(pair.alice.offer(Standing(3, 30, 2.5), 2))
    pair.alice.receive(pair.bob.accept(Standing(4, 40, 2.0)))
    pair.describe().transfer()
    pair.bob.vote(b"\x02")
    pair.alice.receive(pair.bob.confirm())
    pair.alice.store(b"\x05")
    pair.decide().commit()
    assert pair.alice.receipt == pair.bob.receipt
    receipt = pair.bob.signed()
    told = [side.standing.terms for side in receipt.parsed.sides]
    assert told == [pb.Terms(codec="float32", size=SIZE, fragment=2)] * 2
    assert (receipt.skipped.blocks, receipt.answerer_skipped.blocks) == (b"\x05", b"\x02")
    receipt.check()
    for other in (
        replace(receipt, content=receipt.content.replace(b"float32", b"float16")),
        replace(receipt, skipped=replace(receipt.skipped, blocks=b"\x04")),
        replace(receipt, answerer_skipped=replace(receipt.answerer_skipped, blocks=b"")),
    ):
        with pytest.raises(SignatureError):
            other.check()


@pytest.mark.parametrize("side", ["offerer", "answerer"])
def test_a_partner_that_signs_other_terms_than_it_tells_is_refused(side: str) -> None:
    pair = Pair()
    one = pair.alice if side == "offerer" else pair.bob
    one._terms = lambda: pb.Terms(codec="float32", size=SIZE, fragment=1)  # type: ignore[method-assign]  # a liar
    with pytest.raises(ProtocolError, match="other terms"):
        pair.accept()


@pytest.mark.parametrize("side", ["offerer", "answerer"])
def test_blocks_that_are_left_out_are_signed_by_whoever_tells_its_terms(side: str) -> None:
    pair = Pair().accept().describe().transfer()
    if side == "offerer":
        pair.confirm().store().decide()
    else:
        pair.bob.vote(b"")
    one, tell, other = (
        (pair.alice, pair.alice.commit, pair.bob) if side == "offerer" else (pair.bob, pair.bob.confirm, pair.alice)
    )
    name = "skipped" if side == "offerer" else "answerer_skipped"
    one.receipt = replace(one.signed(), **{name: Skipped(b"\x01", getattr(one.signed(), name).signature)})
    state = other.state
    with pytest.raises(SignatureError):
        other.receive(tell())
    assert other.state is state


def of_release_0_1(exchange: Exchange) -> None:
    """It tells no terms, and signs no skipped blocks."""

    def tell(standing: Standing) -> None:
        exchange._own.standing = standing_to_wire(standing)

    exchange._tell_standing = tell  # type: ignore[method-assign]
    vote, store = exchange.vote, exchange.store

    def unsigned_vote(blocks: bytes) -> Receipt:
        exchange.receipt = replace(vote(blocks), answerer_skipped=Skipped(blocks))
        return exchange.receipt

    def unsigned_store(blocks: bytes) -> Receipt:
        exchange.receipt = replace(store(blocks), skipped=Skipped(blocks))
        return exchange.receipt

    exchange.vote, exchange.store = unsigned_vote, unsigned_store  # type: ignore[method-assign]


@pytest.mark.parametrize("old", ["offerer", "answerer"])
def test_a_partner_of_the_release_before_signs_our_terms_and_is_not_asked_for_more(old: str) -> None:
    pair = Pair()
    of_release_0_1(pair.alice if old == "offerer" else pair.bob)
    pair.accept().describe().transfer()
    pair.bob.vote(b"\x02")
    pair.alice.receive(pair.bob.confirm())
    pair.alice.store(b"\x05")
    pair.decide().commit().acknowledge()
    one, other = pair.alice.signed(), pair.bob.signed()
    assert (one.content, one.skipped.blocks, one.answerer_skipped.blocks) == (other.content, b"\x05", b"\x02")
    told = [side.standing.HasField("terms") for side in one.parsed.sides]
    assert told == [old == "answerer", old == "offerer"]
    for receipt in (one, other):
        assert from_line(to_line(receipt)) == receipt


def test_a_confirmation_of_bytes_that_were_not_sent_is_refused() -> None:
    pair = Pair().accept().describe()
    while pair.bob.next_chunk is not None:
        pass_chunk(pair.bob, pair.alice, TENSORS[BOB.peer_id])
    content = pair.alice._content()
    confirm = pb.Confirm(receipt=content, signature=sign(BOB, content))  # its skipped blocks are not looked at
    with pytest.raises(ProtocolError, match="not sent"):
        pair.alice.receive(Dialogue(BOB, "run", ALICE.peer_id, SESSION, 50).seal(pb.Body(confirm=confirm)))


@pytest.mark.parametrize(
    "resume",
    [
        pb.Resume(next_chunk=2, described=True),
        pb.Resume(next_chunk=2**32 - 1, described=True),
        pb.Resume(next_chunk=1, described=False),
    ],
)
def test_a_resume_that_claims_too_much_is_refused(resume: pb.Resume) -> None:
    pair = Pair().accept().describe()
    pass_chunk(pair.alice, pair.bob, TENSORS[ALICE.peer_id])
    with pytest.raises(ProtocolError):
        pair.alice.receive(Dialogue(BOB, "run", ALICE.peer_id, SESSION, 50).seal(pb.Body(resume=resume)))


def test_a_resume_goes_back_to_the_first_missing_chunk_and_the_description() -> None:
    pair = Pair().accept()
    assert pair.alice.describe(OWN[ALICE.peer_id])
    pair.alice.sending(CHUNK)  # both are lost
    pair.alice.receive(pair.bob.resume())
    assert pair.alice.next_chunk == 0
    again = pair.alice.describe(OWN[ALICE.peer_id])
    assert again is not None
    pair.bob.receive(again)
    pass_chunk(pair.alice, pair.bob, TENSORS[ALICE.peer_id])
    pair.alice.receive(pair.bob.resume())
    assert pair.alice.describe(OWN[ALICE.peer_id]) is None
    assert pair.alice.next_chunk == 1


def test_an_offer_about_another_tensor_is_named() -> None:
    bob = Exchange(replace(setting(BOB), codec="bfloat16"), ALICE.peer_id, SESSION, offerer=False)
    with pytest.raises(ProtocolError, match=r"'float32'.*'bfloat16'"):
        bob.check_terms(pb.Offer(codec="float32", size=SIZE))


def test_a_session_has_a_name_of_sixteen_bytes() -> None:
    alice = Exchange(setting(ALICE), BOB.peer_id, b"short", offerer=True)
    bob = Exchange(setting(BOB), ALICE.peer_id, b"short", offerer=False)
    with pytest.raises(ProtocolError, match="16 bytes"):
        bob.receive(alice.offer(Standing(0, 0, 0.0), 0))


# --- fuzz -------------------------------------------------------------------------------------------

MOVES = ["offer", "accept", "describe", "working", "confirm", "commit", "acknowledge", "abort", "resume"]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from([*MOVES, "chunk"]), st.binary(max_size=80), st.integers(0, 2**32 - 1)), max_size=12))
def test_a_hostile_partner_never_gets_more_than_our_errors(steps: list[tuple[str, bytes, int]]) -> None:
    pair = Pair().accept()
    pair.bob.describe(OWN[BOB.peer_id])
    dialogue = Dialogue(ALICE, "run", BOB.peer_id, SESSION, 1000)
    for name, noise, number in steps:
        with suppress(RemoteError):
            if name == "chunk":
                head = ChunkHead(number % 4, number % 128)
                pair.bob.expect(head)
                pair.bob.chunk(memoryview(noise))
            else:
                body = pb.Body()
                with suppress(Exception):  # noise that is no such message leaves it empty
                    getattr(body, name).ParseFromString(noise)
                getattr(body, name).SetInParent()
                pair.bob.receive(dialogue.seal(body))
    assert pair.bob.state not in (State.COMMITTED, State.IN_DOUBT)
    assert pair.bob.received == 0


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_for_an_envelope_change_nothing(raw: bytes) -> None:
    pair = Pair().accept().describe()
    with pytest.raises(RemoteError):
        pair.bob.receive(raw)
    assert pair.bob.state is State.RECEIVING


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_chunks_and_breaks_ends_with_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair().accept().describe()
    inboxes = {peer: bytearray(SIZE) for peer in TENSORS}
    while pair.alice.next_chunk is not None or pair.bob.next_chunk is not None:
        one, other, peer = rng.choice([(pair.alice, pair.bob, ALICE.peer_id), (pair.bob, pair.alice, BOB.peer_id)])
        if rng.random() < 0.3:  # the stream breaks, with a chunk in flight
            if one.next_chunk is not None:
                one.sending(CHUNK)
            pair.bob.receive(pair.alice.resume())
            pair.alice.receive(pair.bob.resume())
        elif one.next_chunk is not None:
            start = one.next_chunk * CHUNK
            pass_chunk(one, other, TENSORS[peer])
            inboxes[peer][start : start + CHUNK] = TENSORS[peer][start : start + CHUNK]
    pair.confirm().store().decide().commit().acknowledge()
    assert inboxes == TENSORS
    assert pair.alice.receipt == pair.bob.receipt


def test_a_chunk_that_the_partners_pace_shows_to_be_held_is_never_asked_for_again() -> None:
    pair = Pair(replace(LIMITS, ahead_chunks=1)).accept().describe()
    for one, other, peer in ((pair.alice, pair.bob, ALICE.peer_id), (pair.bob, pair.alice, BOB.peer_id)):
        assert one.may_send
        pass_chunk(one, other, TENSORS[peer])
    pass_chunk(pair.alice, pair.bob, TENSORS[ALICE.peer_id])
    assert not pair.alice.may_send
    pass_chunk(pair.bob, pair.alice, TENSORS[BOB.peer_id])  # its second: so it holds our first
    forgetful = pair.bob._seal(resume=pb.Resume(next_chunk=0, described=True))
    with pytest.raises(ProtocolError, match="could not have gone on"):
        pair.alice.receive(forgetful)
    assert pair.alice.next_chunk == 2


def test_a_chunk_ahead_of_its_time_is_refused() -> None:
    pair = Pair(replace(LIMITS, ahead_chunks=1)).accept().describe()
    pass_chunk(pair.bob, pair.alice, TENSORS[BOB.peer_id])
    with pytest.raises(ProtocolError, match="could hold 0 of ours"):
        pair.alice.expect(ChunkHead(1, CHUNK))


def test_chunks_of_another_size_are_refused() -> None:
    pair = Pair().accept()
    other = describe(memoryview(TENSORS[ALICE.peer_id]), CHUNK // 2)
    with pytest.raises(ProtocolError, match="has chunks of 50 bytes"):
        pair.bob.receive(pair.alice.describe(other) or b"")


def test_an_overlong_bit_map_is_not_taken() -> None:
    pair = Pair().accept().describe().transfer()
    pair.bob.vote(bytes(LIMITS.skipped_bytes + 1))
    with pytest.raises(ProtocolError, match="bit map"):
        pair.alice.receive(pair.bob.confirm())
    assert pair.alice.state is State.RECEIVED
