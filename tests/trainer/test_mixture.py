"""Several data sets of the hub as one: local files stand for them, read through the same code."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import datasets
import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from nolocod.errors import DataError, RunFileError
from nolocod.identity import Identity
from nolocod.run import amendments, presets
from nolocod.run.data import Data, Part
from nolocod.run.manifest import Inner, Manifest, seal, unseal
from nolocod.run.owners import Change
from nolocod.run.run_file import read_run_file
from nolocod.trainer import mixture, source
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.hub import from_builder
from nolocod.trainer.mixture import Mixture
from nolocod.trainer.source import kept_held_out, open_stream
from nolocod.trainer.windows import Position
from tests.support.trainer_parts import OWNER

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.trainer.hub import DataSet

PARTS = (Part(dataset="a/red", weight=3.0), Part(dataset="a/blue", field="body", weight=1.0))
LETTERS = {"a/red": "r", "a/blue": "b"}


def run_of(*parts: Part) -> Manifest:
    data = Data(source="hub", mixture=parts or PARTS, held_out=0.2)
    return Manifest(name="x", model={"model_type": "llama"}, data=data, inner=Inner(sequence=16, batch=2))


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each data set has documents of one letter."""

    def opened(settings: Data) -> DataSet:
        assert settings.dataset is not None
        path = tmp_path / f"{LETTERS[settings.dataset]}.parquet"
        if not path.exists():
            texts = [f"{number:03d} " + LETTERS[settings.dataset] * (20 + number % 7) for number in range(300)]
            parquet.write_table(pyarrow.table({settings.field: texts}), path, row_group_size=30)
        return from_builder(datasets.load_dataset_builder("parquet", data_files={"train": [str(path)]}), settings)

    monkeypatch.setattr(source, "open_hub", opened)


def opened(manifest: Manifest, peer: str = "alice") -> Mixture:
    found = open_stream(manifest, make_tokenizer(manifest.data), peer)
    assert isinstance(found, Mixture)
    return found


def letters(windows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    """Of which data set each window is; one that had both would fail."""
    sets = [set(bytes(row.tolist()).decode()) & {"r", "b"} for row in windows]
    return "".join(letter for (letter,) in sets)


def test_windows_are_of_one_data_set_each_by_their_weights() -> None:
    seen = Counter(letters(opened(run_of()).take(1000)))
    assert seen["r"] + seen["b"] == 1000
    assert abs(seen["r"] / 1000 - 0.75) < 0.05


def test_every_node_draws_in_an_order_of_its_own_and_goes_on_in_it() -> None:
    alice, bob = opened(run_of()), opened(run_of(), "bob")
    drawn = letters(alice.take(40))
    assert drawn != letters(bob.take(40))
    position = msgspec.json.decode(msgspec.json.encode(alice.position), type=Position)
    wanted = alice.take(30)
    again = opened(run_of())
    again.seek(position)
    assert np.array_equal(again.take(30), wanted)
    assert letters(opened(run_of()).take(40)) == drawn


def test_what_came_before_an_outage_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = opened(run_of()), opened(run_of())
    blue = cut._parts[1]
    took, down = blue.take, iter([True, False, True])
    monkeypatch.setattr(blue, "take", lambda count: took(count) if not next(down, False) else _raise())
    found = []
    while len(found) < 5:
        try:
            found.append(cut.take(4))
        except OSError:
            continue
    assert np.array_equal(np.concatenate(found), whole.take(20))


def _raise() -> None:
    raise OSError


def test_held_out_windows_are_of_all_by_their_weights_and_the_same_for_all(tmp_path: Path) -> None:
    held = opened(run_of()).held_out(12)
    assert Counter(letters(held)) == {"r": 9, "b": 3}
    assert np.array_equal(opened(run_of(), "bob").held_out(12), held)
    little = run_of(Part(dataset="a/red", weight=1000.0), Part(dataset="a/blue", field="body"))
    assert Counter(letters(opened(little).held_out(8))) == {"r": 7, "b": 1}, "one of each at least"
    kept = kept_held_out(opened(run_of()), run_of(), 12, tmp_path)
    assert np.array_equal(kept, held)


def test_the_position_of_a_data_set_that_was_not_drawn_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, asked = opened(run_of()), Counter[str]()
    real = source.Stream.position
    monkeypatch.setattr(
        source.Stream, "position", property(lambda self: (asked.update([self._dataset.name]), real.__get__(self))[1])
    )
    before = stream.position
    asked.clear()
    drawn = letters(stream.take(1))
    after = stream.position
    assert sum(asked.values()) == 1
    assert [one == other for one, other in zip(before.parts, after.parts, strict=True)] == [drawn == "b", drawn == "r"]


def test_a_position_of_another_mixture_is_an_error() -> None:
    with pytest.raises(DataError, match="another mixture"):
        opened(run_of()).seek(Position())


def test_a_run_file_names_data_sets_in_tables_and_is_written_with_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "x"\n[model]\nmodel_type = "llama"\n[data]\nsource = "hub"\n'
        '[[data.mixture]]\ndataset = "a/red"\nweight = 3\n[[data.mixture]]\ndataset = "a/blue"\nfield = "body"\n'
    )
    manifest = read_run_file(path)
    assert manifest.data.mixture == PARTS
    assert manifest.data.text == "3 a/red/None/train/text + 1 a/blue/None/train/body"
    path.write_text(presets.to_toml(manifest))
    assert read_run_file(path).data == manifest.data
    sealed = seal(manifest, OWNER)
    assert unseal(sealed.to_bytes()).manifest.data == manifest.data


def test_a_run_without_a_mixture_says_nothing_of_one() -> None:
    data = Data(source="hub", dataset="a/red")
    sealed = seal(Manifest(name="x", model={"model_type": "llama"}, data=data), OWNER)
    assert b"mixture" not in sealed.body
    assert unseal(sealed.to_bytes()).manifest.data == data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('source = "hub"\ndataset = "a"\nmixture = [{dataset = "b"}]', "stands in place of"),
        ('source = "hub"\nsplit = "test"\nmixture = [{dataset = "b"}]', "stands in place of"),
        ('source = "text"\nmixture = [{dataset = "b"}]', "belongs to"),
        ('source = "hub"\nmixture = [{dataset = "b", weight = 0}]', "> 0"),
        ('source = "hub"\nmixture = [{weight = 1}]', "dataset"),
        ('source = "hub"\nmixture = []', "belongs to"),
    ],
)
def test_what_makes_no_mixture_is_told(tmp_path: Path, data: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n[model]\nmodel_type = "llama"\n[data]\n{data}\n')
    with pytest.raises(RunFileError, match=says):
        read_run_file(path)


def test_owners_cannot_change_a_mixture() -> None:
    owner = Identity.generate()
    sealed = seal(run_of(), owner)
    with pytest.raises(amendments.AmendmentError, match="mixture"):
        amendments.propose(sealed, 1, [Change(at=5, dataset="a/green")], owner)


def test_draws_follow_the_weights_alone() -> None:
    one = mixture.Mixture([], [1.0, 0.0001, 2.0], "key")
    drawn = Counter(one._draw(index) for index in range(3000))
    assert set(drawn) <= {0, 1, 2}
    assert abs(drawn[2] / 3000 - 2 / 3) < 0.03
