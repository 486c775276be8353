"""Strangers meet a real node: what they said that once did harm, and what the grammar draws.

`python -m tests.fuzz hosts --times 20000` is the same for longer; what it finds becomes a line of tests/fuzz/corpus/hosts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nolocod.identity import Identity
from tests.fuzz import grammar, hosts

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus" / "hosts"
DRAWN = {"dialler": 150, "listener": 60}
BOB = Identity.from_secret(b"b" * 32)


def kept() -> list[grammar.Case]:
    lines = [line for line in CORPUS.read_text(encoding="ascii").splitlines() if line and not line.startswith("#")]
    return [grammar.Case.from_line(line) for line in lines]


@pytest.mark.parametrize("role", hosts.ROLES)
def test_strangers_neither_end_a_node_nor_keep_it_from_an_honest_peer(role: str) -> None:
    stored = [(1_000_000 + number, case) for number, case in enumerate(kept())]
    report = hosts.run(role, [*stored, *((number, None) for number in range(DRAWN[role]))])
    assert not report.findings, hosts.told(role, report, 0)
    assert report.cases == len(stored) + DRAWN[role]
    assert report.layers["yamux"] > 0.3 * report.cases, "they came through to the upper layers"


def test_the_stored_cases_are_of_all_layers_and_read_back() -> None:
    assert {case.layer for case in kept()} == set(grammar.LAYERS)
    assert [grammar.Case.from_line(case.to_line()) for case in kept()] == kept()


def test_a_number_is_one_case() -> None:
    for number in range(50):
        one, other = (grammar.drawn("dialler", number, BOB, BOB.peer_id, "ab" * 32) for _ in range(2))
        assert one == other


def test_an_exception_that_leaves_its_connection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    monkeypatch.setattr("nolocod.p2p.host._contained", lambda handle: handle)
    monkeypatch.setattr("nolocod.p2p.libp2p_patches._read_line", _believed)
    text = grammar.Case("select", grammar.PING, (b"\x03\xff\xfe\n",))
    assert hosts.run("dialler", [(0, text)]).findings


async def _believed(self: object) -> str:
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "as libp2p's own")
