"""Data sets of the hub: local files stand for it, read through the same code."""

from __future__ import annotations

import json
import threading
from itertools import combinations
from typing import TYPE_CHECKING

import blake3
import datasets
import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from nolocod.errors import DataError
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest
from nolocod.trainer import hub, prefetch, source
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.hub import from_builder
from nolocod.trainer.prefetch import Prefetched, Supply
from nolocod.trainer.source import Stream, kept_held_out
from nolocod.trainer.windows import Position

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.observe.events import TextSupply
    from nolocod.trainer.hub import DataSet

KINDS = ("parquet", "jsonl", "json.gz")


def manifest(**changes: object) -> Manifest:
    data = Data(source="hub", dataset="a/b", **({"held_out": 0.2} | changes))
    return Manifest(name="x", model={"model_type": "llama"}, data=data, inner=Inner(sequence=16, batch=2))


def data_set(folder: Path, kind: str = "parquet", files: int = 3, documents: int = 200, group: int = 20) -> DataSet:
    folder.mkdir(exist_ok=True)
    texts = np.array_split([f"document {number:05d} " + "x" * (number % 50) for number in range(documents)], files)
    paths = []
    for number, part in enumerate(texts):
        path = folder / f"{number:03d}.{kind}"
        if kind == "parquet":
            parquet.write_table(pyarrow.table({"text": part.tolist()}), path, row_group_size=group)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part.tolist()))
        else:
            datasets.Dataset.from_dict({"text": part.tolist()}).to_json(path, compression="gzip")
        paths.append(str(path))
    name = "parquet" if kind == "parquet" else "json"
    return from_builder(datasets.load_dataset_builder(name, data_files={"train": paths}), manifest().data)


def stream(dataset: DataSet, peer: str = "alice", run: Manifest | None = None) -> Stream:
    run = run or manifest()
    return Stream(dataset, run, make_tokenizer(run.data), peer)


def documents_in(windows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[str]:
    text = bytes(windows.ravel().tolist()).decode()
    return [one[:14] for one in text.split("\0") if one.startswith("document ") and len(one) >= 14]


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_reads_every_document_once_an_epoch_but_those_held_out(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_BLOCK", 700)
    monkeypatch.setattr(hub, "_RUN", 20)
    alice = stream(data_set(tmp_path / "d", kind))
    held = documents_in(alice.held_out(10**4))
    trained: list[str] = []
    while alice.position.epoch == 0:
        trained += documents_in(alice.take(4))
    assert 15 < len(held) < 70
    assert not set(held) & set(trained)
    assert len(set(trained)) > 0.75 * (200 - len(held)), "those that no window cuts"
    whole = set(held) | {text[:14] for text in alice._dataset.texts()}
    assert len(whole) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_at_any_place_and_over_the_end(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_BLOCK", 700)
    monkeypatch.setattr(hub, "_RUN", 20)
    dataset = data_set(tmp_path / "d", kind)
    alice = stream(dataset)
    for _ in range(6):
        alice.take(50)
        again = stream(dataset)
        again.seek(msgspec.json.decode(msgspec.json.encode(alice.position), type=Position))
        assert np.array_equal(again.take(30), alice.take(30))
    assert alice.position.epoch >= 1


def test_resuming_reads_one_file_and_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data_set(tmp_path / "d", files=8, documents=800)
    alice = stream(dataset)
    alice.take(500)
    read: list[int] = []
    real = hub._Parquet.read
    monkeypatch.setattr(hub._Parquet, "read", lambda self, group: (read.append(group), real(self, group))[1])
    again = stream(dataset)
    again.seek(alice.position)
    again.take(1)
    assert len(read) <= 2
    old = msgspec.json.decode(b'{"epoch": 1, "index": 100000, "carry": [1, 2]}', type=Position)
    again.seek(old)  # of a release that counted documents
    assert again.take(3).shape == (3, 17)


@pytest.mark.parametrize("files", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_four_nodes_begin_with_documents_of_their_own(
    tmp_path: Path, kind: str, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chance two nodes that read so many documents have `chance` of them in common."""
    monkeypatch.setattr(hub, "_BLOCK", 4000)
    dataset = data_set(tmp_path / "d", kind, files, documents=6400, group=50)
    texts = {text: number for number, text in enumerate(dataset.texts())}
    first, common, chance = 400, [], 400 / 6400
    for seed in range(12):
        run = msgspec.structs.replace(manifest(held_out=1e-12), seed=seed)
        nodes = [stream(dataset, peer, run)._through() for peer in ("a", "b", "c", "d")]
        read = [{texts[next(node)] for _ in range(first)} for node in nodes]
        common += [len(one & other) / first for one, other in combinations(read, 2)]
    assert 0.5 * chance < np.mean(common) < 1.3 * chance


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_run_s_owner_did_wrong_is_named(tmp_path: Path, kind: str) -> None:
    dataset = data_set(tmp_path / "d", kind)
    with pytest.raises(DataError, match=r"no split 'test' \(splits: train\)"):
        from_builder(datasets.load_dataset_builder("json", data_files={"train": [dataset.files[0]]}), Data(split="test"))
    wrong = msgspec.structs.replace(manifest().data, field="body")
    with pytest.raises(DataError, match=r"'body'.*text\)"):
        next(from_builder_like(dataset, wrong).texts())


def from_builder_like(dataset: DataSet, settings: Data) -> DataSet:
    return type(dataset)(dataset.name, dataset.kind, dataset.files, settings)


def test_a_data_set_without_a_document_to_train_on_is_an_error(tmp_path: Path) -> None:
    run = manifest(held_out=0.5)
    alice = stream(data_set(tmp_path / "d", documents=3), run=run)
    alice._settings = msgspec.structs.replace(run.data, held_out=1.0)
    with pytest.raises(DataError, match="no document to train on"):
        alice.take(1)


# --- outages


def test_a_file_that_makes_no_sense_is_left_out_after_some_tries(tmp_path: Path) -> None:
    dataset = data_set(tmp_path / "d")
    alice = stream(dataset)
    broken = dataset.files[alice._pick(0, 3, "")]
    with open(broken, "r+b") as file:
        file.truncate(500)
    for _ in range(4):
        with pytest.raises(hub.failures()):
            alice.take(1)
    assert alice.take(1).shape == (1, 17)
    assert alice.position.file == 1


class Outage:
    """A data set whose files are taken away and brought back."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefetch, "_FIRST_PAUSE", 0.01)
        monkeypatch.setattr(prefetch, "_LONGEST_PAUSE", 0.02)
        self.folder = folder
        self.dataset = data_set(folder)
        self.told: list[TextSupply] = []
        self.out, self.back = threading.Event(), threading.Event()

    def tell(self, supply: TextSupply) -> None:
        self.told.append(supply)
        (self.out if supply.trouble else self.back).set()

    def begin(self) -> None:
        self.folder.rename(self.folder.with_name("gone"))

    def end(self) -> None:
        self.folder.with_name("gone").rename(self.folder)

    def prefetched(self, count: int = 2) -> Prefetched:
        alice = stream(self.dataset)
        return Prefetched(alice, count, alice.held_out(4), Supply(self.tell))


@pytest.fixture
def outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outage:
    return Outage(tmp_path / "d", monkeypatch)


def test_what_is_read_ahead_is_what_is_read_and_the_position_is_that_of_what_was_taken(outage: Outage) -> None:
    ahead, plain = outage.prefetched(), stream(outage.dataset)
    for _ in range(60):
        assert np.array_equal(ahead.take(2), plain.take(2))
        assert ahead.position == plain.position
    ahead.close()
    assert outage.told == []
    again = outage.prefetched()
    again.seek(plain.position)
    assert np.array_equal(again.take(2), plain.take(2))
    again.close()


def test_through_outages_training_goes_on_with_the_last_windows_and_loses_none(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MOST", 4)
    ahead, plain = outage.prefetched(), stream(data_set(outage.folder.with_name("as it was")))
    for time in range(3):
        outage.out.clear()
        outage.back.clear()
        for _ in range(12):
            assert np.array_equal(ahead.take(2), plain.take(2))
        outage.begin()
        kept: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
        while not outage.out.is_set():
            kept.append(ahead.take(2))
        for windows in kept[:-1]:
            assert np.array_equal(windows, plain.take(2)), "what was read ahead comes first"
        position, repeated = ahead.position, [ahead.take(2) for _ in range(40)]
        assert ahead.position == position, "nothing counts twice"
        assert len({windows.tobytes() for windows in repeated}) == 4, "the last ones, in turn"
        outage.end()
        while not outage.back.is_set():
            windows = ahead.take(2)
        assert np.array_equal(windows, plain.take(2)), "where it was"
        assert [bool(supply.trouble) for supply in outage.told] == [True, False] * (time + 1)
        assert "No such file" in outage.told[-2].trouble
        assert outage.told[-1].seconds > 0
    ahead.close()


def test_a_node_that_starts_in_an_outage_waits_for_its_end(outage: Outage) -> None:
    ahead = outage.prefetched()
    outage.begin()
    thread = threading.Thread(target=ahead.begin)
    thread.start()
    assert outage.out.wait(60)
    assert thread.is_alive()
    outage.end()
    thread.join(60)
    assert np.array_equal(ahead.take(2), stream(outage.dataset).take(2))
    assert [bool(supply.trouble) for supply in outage.told] == [True, False]
    ahead.close()


def test_who_cannot_be_told_to_wait_hears_of_the_outage(
    outage: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "open_hub", lambda settings: outage.dataset)
    run, cache = manifest(), tmp_path / "cache"
    outage.begin()
    with pytest.raises(DataError, match=r"cannot be read: .*No such file"):
        source.open_source(run, make_tokenizer(run.data), "alice", None, cache)
    thread = threading.Timer(0.1, outage.end)
    thread.start()
    opened = source.open_source(run, make_tokenizer(run.data), "alice", None, cache, outage.tell)
    assert [bool(supply.trouble) for supply in outage.told] == [True, False]
    assert np.array_equal(opened.take(2), stream(outage.dataset).take(2))
    assert isinstance(opened, Prefetched)
    opened.close()
    thread.join()


def test_a_source_that_is_only_silent_is_waited_for_once(outage: Outage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.01)
    monkeypatch.setattr(prefetch, "MOST", 1)
    ahead, go = outage.prefetched(), threading.Event()
    take = ahead._stream.take
    ahead.begin()
    monkeypatch.setattr(ahead._stream, "take", lambda count: (go.wait(60), take(count))[1])
    while not outage.told:
        last = ahead.take(2)
    assert "nothing new came" in outage.told[0].trouble
    assert ahead.waited >= 0.01
    assert np.array_equal(ahead.take(2), last)
    go.set()
    while len(outage.told) < 2:
        ahead.take(2)
    ahead.close()


def test_text_that_is_not_usable_ends_training_with_the_reason(outage: Outage) -> None:
    ahead = outage.prefetched()
    ahead._stream._settings = msgspec.structs.replace(manifest().data, held_out=1.0)
    with pytest.raises(DataError, match="no document to train on"):
        ahead.take(2)
    ahead.close()


def test_held_out_windows_are_looked_for_once_and_kept(outage: Outage, tmp_path: Path) -> None:
    alice, run = stream(outage.dataset), manifest()
    found = kept_held_out(alice, run, 8, tmp_path / "cache")
    assert np.array_equal(found, alice.held_out(8))
    outage.begin()
    assert np.array_equal(kept_held_out(alice, run, 8, tmp_path / "cache"), found)


def test_held_out_windows_of_an_older_release_are_used_again(tmp_path: Path) -> None:
    run = manifest()
    told = (
        b'[{"source":"hub","dataset":"a/b","subset":null,"split":"train","field":"text","tokenizer":"bytes","held_out":0.2,'
        b'"kind":"text","beta":0.1,"documents":"apart"},16,8]'
    )
    kept = np.full((8, 17), 7)
    np.save(tmp_path / f"held-out-{blake3.blake3(told).hexdigest()[:32]}.npy", kept)
    assert np.array_equal(kept_held_out(stream(data_set(tmp_path / "d"), run=run), run, 8, tmp_path), kept)
