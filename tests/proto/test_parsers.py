"""Every parser of foreign bytes: seeds and what fuzzing kept of them, and whatever hypothesis makes of those.

The targets are those that `python -m tests.fuzz` fuzzes for longer; a finding of it becomes an input in tests/fuzz/corpus.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz import tensors
from tests.fuzz.targets import TARGETS, TENSORS

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
DEEP = (b"[" * 20_000, b'{"a":' * 10_000, b"\xff" * 64, b"")


@st.composite
def near(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with some of its bytes replaced, left out or added."""
    raw = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 3))):
        at, out = draw(st.integers(0, len(raw))), draw(st.integers(0, 9))
        raw = raw[:at] + draw(st.binary(max_size=9)) + raw[at + out :]
    return raw


@pytest.mark.parametrize("name", TARGETS)
def test_whole_inputs_and_what_fuzzing_found_are_taken(name: str) -> None:
    kept = [path.read_bytes() for path in (CORPUS / name).glob("*")]
    for raw in (*TARGETS[name].seeds, *DEEP, *kept):
        TARGETS[name].run(raw)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_cost_no_more_than_an_error_of_ours(name: str) -> None:
    @settings(max_examples=25, database=None)
    @given(st.binary(max_size=200) | near(TARGETS[name].seeds))
    def check(raw: bytes) -> None:
        TARGETS[name].run(raw)

    check()


def test_the_corpus_belongs_to_the_targets_and_is_small() -> None:
    assert tensors.__name__
    assert set(TENSORS) < set(TARGETS)
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 128 << 10


def test_a_target_lets_a_foreign_exception_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    monkeypatch.setattr("nolocod.proto.receipt.Receipt.check", lambda _self: [][0])
    with pytest.raises(IndexError):
        TARGETS["receipt_line"].run(TARGETS["receipt_line"].seeds[0])
