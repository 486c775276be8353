"""Amendments: who may sign them, which of several counts, and what is otherwise from which round on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nolocod.errors import AmendmentError, ProtocolError, SignatureError
from nolocod.identity import Identity
from nolocod.run import amendments
from nolocod.run.amendments import MAX_DOCUMENT, MOST, Amendments, amended, at, goal, obstacle, propose, read
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, Outer, Sealed, seal, unseal
from nolocod.run.owners import Change, Owners
from nolocod.trainer.inner import learning_rate

if TYPE_CHECKING:
    from collections.abc import Sequence

ANN, BOB, CY, EVE = (Identity.from_secret(bytes([number]) * 32) for number in range(1, 5))
MODEL = {"model_type": "llama"}


def a_run(**facts: Any) -> Sealed:  # noqa: ANN401 - of Manifest
    return seal(Manifest(name="verse", model=MODEL, **facts), ANN)


OWNED = a_run(owners=Owners(others=(str(BOB.peer_id),), needed=2, successor=str(CY.peer_id)), outer=Outer(rounds=100))
RUN = a_run(outer=Outer(rounds=100))


def changed(sealed: Sealed, *changes: Change) -> Sealed:
    return amended(sealed, Amendments(1, changes))


def document(sealed: Sealed, changes: Sequence[dict[str, Any]], *signers: Identity) -> bytes:
    """As a later release, or an attacker, might write it."""
    said = {"run_id": sealed.run_id, "version": 1, "changes": changes}
    body = msgspec.json.encode(said)
    signatures = {str(one.peer_id): one.sign(b"nolocod amendments 1\0" + body) for one in signers}
    return msgspec.json.encode({"body": body, "signatures": signatures})


def test_a_change_counts_from_its_round_on_and_until_the_next_one() -> None:
    run = changed(
        RUN, Change(at=40, learning_rate=5e-4), Change(at=60, rounds=200, schedule="cosine"), Change(at=80, learning_rate=1e-4)
    )
    told = [(at(run, n).inner.learning_rate, at(run, n).inner.schedule, at(run, n).outer.rounds) for n in (39, 40, 60, 80, 999)]
    assert told == [
        *[(1e-3, "wsd", 100), (5e-4, "wsd", 100), (5e-4, "cosine", 200)],
        *[(1e-4, "cosine", 200), (1e-4, "cosine", 200)],
    ]
    assert at(RUN, 50) is RUN.manifest


def test_the_learning_rate_is_another_one_from_that_round_on_at_every_node() -> None:
    run = changed(RUN, Change(at=10, learning_rate=5e-4))
    rates = {number: learning_rate(at(run, number), number, 3) for number in (9, 10)}
    assert rates == {9: 1e-3, 10: 5e-4}


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ([], 100),
        ([Change(at=50, rounds=200)], 200),
        ([Change(at=50, rounds=0)], 0),
        ([Change(at=50, rounds=50)], 50),
        ([Change(at=50, rounds=20)], 50),
        ([Change(at=100, rounds=200)], 200),
        ([Change(at=101, rounds=200)], 100),
        ([Change(at=10, rounds=0), Change(at=300, rounds=300)], 300),
    ],
)
def test_the_run_ends_where_its_goal_of_that_time_is_reached(changes: list[Change], ends: int) -> None:
    assert goal(changed(RUN, *changes)) == ends


def test_rounds_are_those_of_the_whole_model_where_parts_take_turns() -> None:
    run = changed(a_run(inner=Inner(steps=25), outer=Outer(rounds=100, turns=5)), Change(at=40, rounds=60))
    assert goal(run) == 300
    assert (at(run, 199).outer.rounds, at(run, 200).outer.rounds) == (500, 300)


def test_as_many_owners_sign_as_the_run_asks_for() -> None:
    raw = propose(OWNED, 1, [Change(at=5, rounds=7)], ANN)
    with pytest.raises(SignatureError, match="1 of 2 owners"):
        read(raw, OWNED)
    assert read(raw, OWNED, complete=False).signers == (ANN.peer_id,)
    for second in (BOB, CY):
        both = read(amendments.sign(raw, OWNED, second), OWNED)
        assert both.signers == (ANN.peer_id, second.peer_id)
        assert both.changes == (Change(at=5, rounds=7),)
    with pytest.raises(SignatureError):
        read(amendments.sign(raw, OWNED, ANN), OWNED)


def test_a_lost_key_is_survived() -> None:
    """Bob and the successor sign: Ann's key is gone."""
    raw = amendments.sign(propose(OWNED, 1, [Change(at=5, rounds=7)], BOB), OWNED, CY)
    assert read(raw, OWNED).signers == (BOB.peer_id, CY.peer_id)


def test_nobody_else_amends_a_run() -> None:
    with pytest.raises(AmendmentError, match="is no owner"):
        propose(RUN, 1, [Change(at=5, rounds=7)], BOB)
    with pytest.raises(ProtocolError, match="no owner"):
        read(document(RUN, [{"at": 5}], ANN, EVE), RUN)
    with pytest.raises(ProtocolError, match="no owner"):
        read(document(RUN, [{"at": 5}], EVE), RUN)
    with pytest.raises(SignatureError):
        read(document(RUN, [{"at": 5}]), RUN)
    forged = msgspec.json.decode(document(RUN, [{"at": 5}], EVE), type=dict[str, Any])
    forged["signatures"] = {str(ANN.peer_id): forged["signatures"][str(EVE.peer_id)]}
    with pytest.raises(SignatureError):
        read(msgspec.json.encode(forged), RUN)


def test_an_amendment_is_of_one_run_alone() -> None:
    raw, other = propose(RUN, 1, [Change(at=5, rounds=7)], ANN), a_run(seed=1)
    with pytest.raises(ProtocolError, match="another run"):
        read(raw, other)
    with pytest.raises(AmendmentError, match="another run"):
        amendments.sign(raw, other, ANN)


def test_the_later_version_counts_whoever_brings_it_and_the_founders_before_the_successors() -> None:
    run = a_run(owners=Owners(successor=str(CY.peer_id)))
    first, second = (read(propose(run, version, [Change(at=5, rounds=7)], ANN), run) for version in (1, 2))
    by_ann, by_cy = ([read(propose(run, 1, [Change(at=5, rounds=n)], who), run) for n in range(8)] for who in (ANN, CY))
    assert first.before(second, str(ANN.peer_id))
    assert not second.before(first, str(ANN.peer_id))
    for one, other in product(by_ann, by_cy):
        assert other.before(one, str(ANN.peer_id))
        assert not one.before(other, str(ANN.peer_id))
    assert by_cy[0].before(by_cy[1], str(ANN.peer_id)) != by_cy[1].before(by_cy[0], str(ANN.peer_id)), "all choose the same"
    assert not first.before(first, str(ANN.peer_id))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([Change(at=5), Change(at=4)], "before that of the change before it"),
        ([Change(at=5)] * (MOST + 1), f"1 to {MOST} changes"),
        ([], f"1 to {MOST} changes"),
        ([Change(at=5, dataset="a/b")], '`data.source` is "stdlib"'),
    ],
)
def test_what_cannot_be_is_refused_by_owners_and_by_all_others(changes: list[Change], why: str) -> None:
    with pytest.raises(AmendmentError, match=why):
        propose(RUN, 1, changes, ANN)
    with pytest.raises(ProtocolError):
        read(document(RUN, [msgspec.to_builtins(one) for one in changes], ANN), RUN)


def test_a_document_is_bounded() -> None:
    with pytest.raises(AmendmentError, match=f"limit of {MAX_DOCUMENT}"):
        propose(RUN, 1, [Change(at=5, bootstrap=("x" * 256,) * 8)] * 4, ANN)
    with pytest.raises(ProtocolError, match="above the limit"):
        read(b" " * (MAX_DOCUMENT + 1), RUN)


@pytest.mark.parametrize(
    ("table", "named"), [({"at": 5, "clock": 1, "rounds": 3}, "clock"), ({"at": 5, "schedule": "linear"}, "schedule")]
)
def test_what_a_later_release_changes_is_told_and_not_guessed(table: dict[str, Any], named: str) -> None:
    run = amended(RUN, read(document(RUN, [table], ANN), RUN))
    assert obstacle(run, 4) == ""
    assert f"changes {named}, which nolocod" in obstacle(run, 5)


def test_an_amendment_without_a_round_is_none() -> None:
    with pytest.raises(ProtocolError, match="from which round"):
        read(document(RUN, [{"rounds": 3}], ANN), RUN)
    with pytest.raises(ProtocolError, match="from which round"):
        read(document(RUN, [{"at": -1}], ANN), RUN)


def test_the_owners_may_have_the_run_wait_and_go_on() -> None:
    run = changed(RUN, Change(at=5, paused=True, note="new data on Monday"))
    assert obstacle(run, 4) == ""
    assert obstacle(run, 5) == "the run's owner has it wait: new data on Monday"
    assert obstacle(changed(RUN, Change(at=5, paused=True), Change(at=5, paused=False)), 5) == ""


@pytest.mark.parametrize(("release", "told"), [("0.0.1", False), ("0", False), ("99", True), ("99.0.1", True)])
def test_a_run_may_need_a_newer_release(release: str, told: bool) -> None:
    run = changed(RUN, Change(at=5, release=release))
    assert obstacle(run, 4) == ""
    assert (f"needs nolocod {release} by now" in obstacle(run, 5)) == told


def test_a_trainer_begins_with_the_text_of_its_round() -> None:
    run = a_run(data=Data(source="hub", dataset="a/b"))
    raw = propose(run, 1, [Change(at=5, dataset="c/d", split="more")], ANN)
    begun = [amendments.unseal_amended(run.to_bytes(), raw, number) for number in (4, 5)]
    assert [one.manifest.data.text for one in begun] == ["a/b/None/train/text", "c/d/None/more/text"]
    assert {one.run_id for one in begun} == {run.run_id}
    assert amendments.unseal_amended(run.to_bytes(), b"", 9) == run


def test_trainers_start_anew_for_what_they_do_otherwise_and_for_nothing_else() -> None:
    run = a_run(data=Data(source="hub", dataset="a/b"))
    plain = Change(at=5, note="tea", paused=False, release="0", bootstrap=("x",))
    assert amendments.for_trainers(changed(run, plain), 9) == amendments.for_trainers(run, 9)
    others = Change(at=5, rounds=0), Change(at=5, learning_rate=1e-4), Change(at=5, schedule="cosine"), Change(at=5, split="x")
    told = [amendments.for_trainers(changed(run, plain, one), 9) for one in others]
    assert len({*told, amendments.for_trainers(run, 9)}) == 5
    assert amendments.for_trainers(changed(run, others[3]), 4) == amendments.for_trainers(run, 4), "its text comes later"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_amendment_or_our_error(raw: bytes) -> None:
    with pytest.raises((ProtocolError, SignatureError)):
        read(raw, RUN)


PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
KEYS = st.sampled_from(["at", "rounds", "unknown", "note", "paused", "x"])


@given(st.recursive(PLAIN, lambda one: st.lists(one) | st.dictionaries(KEYS, one), max_leaves=9))
def test_whatever_an_owner_signs_is_read_or_our_error(changes: Any) -> None:  # noqa: ANN401 - that is the point
    try:
        found = read(document(RUN, changes, ANN), RUN)
    except (ProtocolError, SignatureError):
        return
    run = amended(RUN, found)
    assert goal(run) >= 0
    assert all(one.words is not None and obstacle(run, one.at) is not None for one in found.changes)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"others": ("x",)}, "'x' is no peer id"),
        ({"others": (str(BOB.peer_id),) * 2}, "twice"),
        ({"needed": 2}, "2 signatures are needed, and there are 1 keys"),
    ],
)
def test_owners_that_cannot_be(facts: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Owners(**facts)


def test_a_run_without_owners_is_signed_as_before() -> None:
    assert b"owners" not in RUN.body
    assert unseal(OWNED.to_bytes()).manifest.owners == OWNED.manifest.owners
    assert replace(RUN, changes=(Change(at=1),)).run_id == RUN.run_id
