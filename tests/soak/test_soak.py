"""A soak without its processes: what is planned by a seed, and what is concluded from samples and receipts."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import pytest

from nolocod.identity import Identity
from nolocod.observe import logs
from nolocod.observe.events import WeightsLoaded
from nolocod.p2p.exchange.receipts import ReceiptStore
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.receipt import Receipt, content_of, sign
from tests.soak import run
from tests.soak.__main__ import main
from tests.soak.faults import schedule, spared, upload_limits
from tests.soak.verdict import Agreement, Sample, agree, bytes_an_hour, growth, stood_still, unproved

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB, EVE = (Identity.from_secret(bytes([n]) * 32) for n in (1, 2, 3))
RUN = "ab" * 32
ONE = Sample(0.0, 0, 1, 100, 50, 30, 1, 10, 1, 1, 0, 2.0, True)


def receipt(number: int, offerer: Identity = ALICE, answerer: Identity = BOB, root: bytes = bytes(32)) -> Receipt:
    sides = (pb.Side(peer_id=one.peer_id, root=root) for one in (offerer, answerer))
    content = content_of(RUN, number.to_bytes(16, "big"), *sides)
    return Receipt(content, sign(offerer, content), sign(answerer, content))


# --- the plan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_decides_all_faults_and_none_overlap_on_a_node(seed: int) -> None:
    faults = schedule(seed, 8, 100.0, 3600.0, 20.0)
    assert faults == schedule(seed, 8, 100.0, 3600.0, 20.0) != schedule(seed + 1, 8, 100.0, 3600.0, 20.0)
    assert upload_limits(seed, 8) == upload_limits(seed, 8)
    assert 60 < len(faults) < 250
    assert {fault.kind for fault in faults} == {"kill", "freeze"}
    assert all(fault.at >= 100 and fault.at + fault.seconds < 3600 for fault in faults)
    assert not {fault.node for fault in faults if fault.kind == "kill"} & set(spared(8))
    for node in range(8):
        its = [fault for fault in faults if fault.node == node]
        assert all(before.at + before.seconds < after.at for before, after in pairwise(its))


def test_clocks_are_set_wrong_only_where_that_is_asked_for() -> None:
    faults = schedule(1, 8, 0.0, 3600.0, 20.0, clocks=True)
    assert {fault.kind for fault in faults} == {"kill", "freeze", "clock"}
    assert {abs(fault.by) for fault in faults if fault.kind == "clock"} == {5.0, 90.0, 3600.0, 86_400.0}
    assert not any(fault.by for fault in faults if fault.kind != "clock")


def test_what_a_node_writes_is_told_by_the_hour_whatever_its_lives() -> None:
    samples = [replace(ONE, at=at, node=node, life=1 + (at > 50), disk=disk) for at, node, disk in (
        (0.0, 0, 1000), (40.0, 0, 9000), (100.0, 0, 1100), (0.0, 1, 500), (200.0, 1, 1500)
    )]  # fmt: skip
    assert bytes_an_hour(samples, "disk") == 18_000.0
    assert bytes_an_hour(samples, "log") == 0.0


@pytest.mark.parametrize(
    "bad", [["--nodes", "1"], ["--nodes", "33"], ["--hours", "0.001"], ["--hours", "nan"], ["--every", "0"]], ids=" ".join
)
def test_what_cannot_be_soaked_is_refused_before_anything_starts(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(bad)
    assert bad[0] in capsys.readouterr().err


# --- growth -------------------------------------------------------------------------------------------


def life(node: int, begin: int, values: list[int], number: int = 1) -> list[Sample]:
    return [replace(ONE, at=float(begin + i), node=node, life=number, memory=value) for i, value in enumerate(values)]


def test_growth_is_that_of_lives_that_were_there_throughout() -> None:
    steady, leaking = life(0, 0, [50, *[100] * 99]), life(1, 0, [100 + i for i in range(100)])
    young = life(2, 70, list(range(1, 31)), number=2)
    assert growth([*steady, *young], "memory", 20, 100) == 0.0
    assert growth([*leaking, *young], "memory", 20, 100) == pytest.approx(60 / 129.5, rel=0.02)
    assert growth([*steady, *leaking], "tasks", 20, 100) == 0.0
    assert growth(young, "memory", 20, 100) is None


def test_that_exchanges_are_longer_is_no_growth_of_tasks_and_a_leak_is() -> None:
    def tasks(busy: int, leaks: int) -> list[Sample]:
        """In the last quarter the node is in an exchange, with six tasks, in `busy` of ten looks; in the first in three."""
        return [
            replace(ONE, at=float(at), node=0, life=1, tasks=60 + 6 * (at % 10 < (busy if at > 80 else 3)) + leaks * at // 100)
            for at in range(100)
        ]

    assert growth(tasks(8, 0), "tasks", 20, 100) == 0.0
    assert growth(tasks(8, 4), "tasks", 20, 100) == pytest.approx(0.05, abs=0.02)


# --- who stood still ----------------------------------------------------------------------------------


def test_a_node_that_takes_no_step_for_long_stood_still() -> None:
    goes = [replace(ONE, at=float(t), node=0, inner_steps=t) for t in range(0, 60, 2)]
    stops = [replace(ONE, at=float(t), node=1, inner_steps=min(t, 20)) for t in range(0, 60, 2)]
    pauses = [replace(ONE, at=float(t), node=2, inner_steps=5 if t < 40 else t) for t in range(0, 60, 2)]
    assert stood_still([*goes, *stops, *pauses], [0, 1, 2], 0, 60, 30) == [1, 2]
    assert stood_still(goes, [3], 0, 60, 30) == [3], "nothing was heard of it"
    assert stood_still([*goes, *stops], [0, 1], 0, 60, 45) == []


@pytest.mark.parametrize(
    ("source", "found"), [("checkpoint", 7), ("donor", 7), ("seed", None)], ids=["a checkpoint", "a donor", "the seed"]
)
def test_what_a_life_began_from_is_in_its_log(
    source: Literal["checkpoint", "seed", "donor"], found: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nolocod")
    logs.LogFollower().follow(WeightsLoaded(3, "checkpoint"))
    logs.LogFollower().follow(WeightsLoaded(7, source))
    assert run.began_from("\n".join(caplog.messages)) == found
    assert run.began_from("") is None


# --- receipts -----------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> dict[Identity, ReceiptStore]:
    return {one: ReceiptStore(tmp_path / one.peer_id) for one in (ALICE, BOB, EVE)}


def judged(tmp_path: Path, *never_killed: Identity) -> Agreement:
    paths = {one.peer_id: tmp_path / one.peer_id for one in (ALICE, BOB, EVE)}
    return agree(paths, RUN, {one.peer_id for one in never_killed})[0]


def test_what_both_hold_agrees(tmp_path: Path, stores: dict[Identity, ReceiptStore]) -> None:
    for one in (ALICE, BOB):
        stores[one].add(receipt(1))
    assert judged(tmp_path, ALICE, BOB) == Agreement(receipts=2, exchanges=1)


def test_what_one_holds_is_a_fault_where_both_lived_and_a_doubt_where_one_was_killed(
    tmp_path: Path, stores: dict[Identity, ReceiptStore]
) -> None:
    stores[ALICE].add(receipt(1))
    assert judged(tmp_path, ALICE).one_sided == 1
    assert judged(tmp_path, ALICE).faults == []
    (fault,) = judged(tmp_path, ALICE, BOB).faults
    assert "has none" in fault


def test_different_receipts_and_those_of_others_are_faults(tmp_path: Path, stores: dict[Identity, ReceiptStore]) -> None:
    stores[ALICE].add(receipt(1))
    stores[BOB].add(receipt(1, root=b"\1" * 32))
    stores[EVE].add(receipt(2))
    faults = judged(tmp_path).faults
    assert len([fault for fault in faults if "different receipts" in fault]) == 2
    assert len([fault for fault in faults if "of others" in fault]) == 1


def test_a_damaged_receipt_is_a_fault(tmp_path: Path, stores: dict[Identity, ReceiptStore]) -> None:
    stores[ALICE].add(receipt(1))
    with (tmp_path / ALICE.peer_id).open("ab") as file:
        file.write(b"nonsense\n")
    assert len(judged(tmp_path).faults) == 1


def test_an_exchange_that_was_told_needs_its_receipt() -> None:
    samples = [replace(ONE, at=float(t), committed=t) for t in range(5)]
    assert unproved(samples, {0: 4}) == []
    assert unproved(samples, {0: 3}) == ["node 0 told of 4 exchanges and holds 3 receipts"]
    assert unproved(samples, {}) == [], "one that was killed counts anew"


# --- the report ---------------------------------------------------------------------------------------


def test_a_report_is_told() -> None:
    result = run.Result(
        1, 8, 60.0, kills=2, memory_growth=0.0123, rounds=[4, 9], loss=2.6, paired_after=[3.0, 7.0], broken=["it leaks"]
    )
    told = result.to_text()
    for words in ("2 killed", "memory +1.2%", "tasks not known", "loss 2.6000", "paired 7 s after", "BROKEN: it leaks"):
        assert words in told
    assert json.loads(result.to_json())["agreement"] == {"receipts": 0, "exchanges": 0, "faults": [], "one_sided": 0}
