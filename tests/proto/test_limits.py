"""What a message may have of bytes: by its kind, and by what may come in the state that its reader is in."""

from __future__ import annotations

import pytest

from nolocod.errors import ProtocolError
from nolocod.identity import Identity
from nolocod.p2p.timing import Timing
from nolocod.proto.content import HASH_SIZE
from nolocod.proto.exchange import Exchange, Setting
from nolocod.proto.exchange_states import TABLE, State
from nolocod.proto.framing import chunk_head, envelope_head, parse_head
from nolocod.proto.limits import FIRST, Limits, most_bytes
from nolocod.proto.snapshot_states import SERVING, Service, Serving
from nolocod.proto.types import CHUNK_SIZE

ALICE, BOB = (Identity.from_secret(bytes([number]) * 32) for number in (1, 2))


def test_each_message_has_a_limit_of_its_own() -> None:
    kib = {"offer": 4, "resume": 4, "info_request": 4, "snapshot_request": 4, "chunk_request": 4, "accept": 4, "working": 4}
    kib |= {"refuse": 16, "busy": 16, "abort": 16, "confirm": 68, "commit": 68, "gossip": 80, "snapshot_offer": 4096}
    assert {name: most_bytes([name]) for name in kib} == {name: most << 10 for name, most in kib.items()}
    assert most_bytes([]) == most_bytes(["a message of a later release"]) == FIRST
    assert most_bytes(["offer", "refuse", "resume"]) == most_bytes(["refuse"])


def test_what_the_release_before_sends_has_room() -> None:
    own_and_that_of_another_life, revocations, ages_and_envelope = 2 * 4096, 64 << 10, 1024
    legal = own_and_that_of_another_life + Timing().view_bytes + revocations + ages_and_envelope
    assert most_bytes(["gossip"]) >= legal
    assert most_bytes(["info"]) >= (16 << 20) + 1024
    assert most_bytes(["commit"]) >= Limits().skipped_bytes + 1024


@pytest.mark.parametrize("side", ["offerer", "answerer"])
def test_a_partner_may_send_what_its_state_allows_and_a_describe_as_long_as_the_runs_message(side: str) -> None:
    for size in (CHUNK_SIZE, 4 << 30):
        exchange = Exchange(Setting(ALICE, "run", "float32/1", size), BOB.peer_id, bytes(16), offerer=side == "offerer")
        most = {}
        for state in TABLE[side]:
            exchange.state = state
            most[state] = exchange.most()
        hashes = size // CHUNK_SIZE * (HASH_SIZE + 2)
        assert most[State.ACCEPTED] == max(FIRST + hashes, most_bytes(["abort"]))
        assert most[State.RECEIVING] == most_bytes(["abort"]), "no Describe any more"
        verdict = State.RECEIVED if side == "offerer" else State.IN_DOUBT
        assert most[verdict] == most_bytes(["commit"])
        assert most[State.COMMITTED] == FIRST


def test_a_donor_may_send_its_hashes_once_it_was_asked_and_a_newcomer_never() -> None:
    newcomer, donor = Service("newcomer", BOB.peer_id), Service("donor", ALICE.peer_id)
    newcomer.state = Serving.ASKED
    assert newcomer.most() == most_bytes(["snapshot_offer"])
    newcomer.state = Serving.MOVING
    assert newcomer.most() == most_bytes(["refuse"])
    for donor.state in SERVING["donor"]:
        assert donor.most() == FIRST


def test_where_a_message_is_due_no_chunk_is_taken() -> None:
    with pytest.raises(ProtocolError, match="chunk 7 came where a message was due"):
        parse_head(chunk_head(7, 10), FIRST)
    with pytest.raises(ProtocolError, match="outside 1 to 4096"):
        parse_head(envelope_head(FIRST + 1), FIRST, 1 << 20)
