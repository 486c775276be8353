"""From text to windows: sources, the held-out split, each node's own order."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import datasets
import huggingface_hub.errors
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from nolocod.errors import DataError, RunFileError, TrainerError
from nolocod.run.manifest import Data, Inner, Manifest
from nolocod.trainer.data import JsonTokenizer, local_tokens, make_tokenizer
from nolocod.trainer.source import Stream, open_hub
from nolocod.trainer.windows import Position, Shard, Windows, permuted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEQUENCE = 32


def tokens(settings: Data, path: Path | None, cache: Path) -> bytes:
    return local_tokens(settings, path, make_tokenizer(settings), cache).tobytes()


# --- sources


def test_text_folder_is_read_in_sorted_order_without_stray_files(tmp_path: Path) -> None:
    text = tmp_path / "text"
    (text / "sub").mkdir(parents=True)
    (text / "b.txt").write_text("second ü")
    (text / "a.txt").write_text("first ")
    (text / "sub" / "c.md").write_text(" third")
    (text / "image.png").write_bytes(b"\x89PNG\xff\0")
    (text / ".hidden").write_text("no")
    assert tokens(Data(source="text"), text, tmp_path / "cache").decode() == "first second ü third"


def test_jsonl_and_parquet_give_the_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    parquet.write_table(pyarrow.table({"body": ["one", "two"]}), tmp_path / "a.parquet")
    for source, name in (("jsonl", "a.jsonl"), ("parquet", "a.parquet")):
        settings = Data(source=source, field="body")  # type: ignore[arg-type] # literal strings
        assert tokens(settings, tmp_path / name, tmp_path / "cache") == b"one\ntwo\n"


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("hello")
    tokens(Data(source="text"), file, cache)
    (made,) = cache.iterdir()
    made.write_bytes(b"known")  # tells the cache from a second tokenisation
    assert tokens(Data(source="text"), file, cache) == b"known"
    file.write_text("hello, world")
    assert tokens(Data(source="text"), file, cache) == b"hello, world"


def test_stdlib_needs_nothing(tmp_path: Path) -> None:
    found = tokens(Data(), None, tmp_path)
    assert 1 << 20 < len(found) <= 21 << 20
    assert b"import" in found


def test_tokenizer_file(tmp_path: Path) -> None:
    fast = Fast(models.WordLevel({"a": 0, "b": 700}, unk_token="a"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    settings = Data(source="text", tokenizer=fast.to_str())
    (tmp_path / "a.txt").write_text("a b a")
    found = local_tokens(settings, tmp_path / "a.txt", make_tokenizer(settings), tmp_path / "cache")
    assert found.tolist() == [0, 700, 0]
    assert found.dtype == np.uint16
    with pytest.raises(RunFileError, match=r"data\.tokenizer"):
        JsonTokenizer("{")


@pytest.mark.parametrize(
    ("source", "name", "content", "says"),
    [
        ("text", "missing", None, "does not exist"),
        ("text", "empty.txt", "", "holds no text"),
        ("jsonl", "a.jsonl", '{"title": "x"}', r"line 1 has no text in the field 'text' \(fields: title\)"),
        ("jsonl", "a.jsonl", "{", "line 1 is not JSON"),
        ("parquet", "a.parquet", "no", "not a parquet file"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, source: str, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says) as caught:
        tokens(Data(source=source), tmp_path / name, tmp_path / "cache")  # type: ignore[arg-type] # literal strings
    assert name in str(caught.value)
    assert not list(tmp_path.glob("cache/*.partial"))


def test_no_path_and_no_fitting_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data"):
        tokens(Data(source="text"), None, tmp_path)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"no \.parquet files"):
        tokens(Data(source="parquet"), tmp_path, tmp_path / "cache")


def test_packages_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.parquet").touch()
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)  # as where the extra is left out
    with pytest.raises(DataError, match=r"'a/b' needs packages") as found:
        open_hub(Data(source="hub", dataset="a/b"))
    assert "[datasets]" in found.value.remedy
    with pytest.raises(DataError, match=r"some\.parquet needs packages"):
        tokens(Data(source="parquet"), tmp_path, tmp_path / "cache")


def test_parquet_without_the_column(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'text' \(columns: body\)"):
        tokens(Data(source="parquet"), tmp_path / "a.parquet", tmp_path / "cache")


# --- windows


def numbered(count: int = 20_000, share: float = 0.1) -> Windows:
    return Windows(np.arange(count, dtype=np.uint32), SEQUENCE, share)


def test_held_out_text_is_never_trained_on() -> None:
    windows = numbered()
    trained = set(windows.train(np.arange(windows.training)).ravel().tolist())
    held = set(windows.held_out(10**6).ravel().tolist())
    assert trained.isdisjoint(held)
    assert 0.07 < len(held) / (len(held) + len(trained)) < 0.13
    assert len(held) + len(trained) > 0.98 * 20_000


def test_all_nodes_hold_out_the_same() -> None:
    assert np.array_equal(numbered().held_out(4), numbered().held_out(4))
    assert len(numbered().held_out(4)) == 4


def test_a_text_too_short_is_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        numbered(SEQUENCE + 1)


@pytest.mark.parametrize("size", [1, 2, 3, 17, 256, 1000])
def test_permutation_is_one(size: int) -> None:
    order = permuted(np.arange(size, dtype=np.uint64), size, b"key")
    assert sorted(order.tolist()) == list(range(size))
    if size > 16:
        other = permuted(np.arange(size, dtype=np.uint64), size, b"other")
        assert (order != other).mean() > 0.8
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.6


def test_a_node_sees_every_window_once_per_epoch_in_its_own_order() -> None:
    windows = numbered()
    alice, bob = Shard(windows, 0, "alice"), Shard(windows, 0, "bob")
    first = [tuple(window) for window in alice.take(windows.training).tolist()]
    assert len(set(first)) == windows.training
    second = [tuple(window) for window in alice.take(windows.training).tolist()]
    assert set(second) == set(first)
    assert second != first
    assert [tuple(window) for window in bob.take(windows.training).tolist()] != first


def test_a_shard_resumes_in_mid_epoch_and_over_its_end() -> None:
    windows = numbered(100_000)
    whole = Shard(windows, 0, "alice")
    for _ in range(7):
        whole.take(windows.training // 5)
    resumed = Shard(windows, 0, "alice")
    resumed.seek(whole.position)
    assert whole.position.epoch == 1
    assert np.array_equal(resumed.take(windows.training), whole.take(windows.training))


# --- streams


def stream(folder: Path, peer: str = "alice", held_out: float = 0.2) -> Stream:
    file = folder / "train.jsonl"
    if not file.exists():
        file.write_text("\n".join(json.dumps({"text": f"document {i:03d} " + "x" * (i % 50)}) for i in range(200)))
    dataset = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True, cache_dir=str(folder / "hf"))
    manifest = Manifest(
        name="x",
        model={"model_type": "llama"},
        data=Data(source="hub", dataset="a/b", held_out=held_out),
        inner=Inner(sequence=16),
    )
    return Stream(dataset, manifest, make_tokenizer(manifest.data), peer)


def text_of(windows: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> str:
    return bytes(windows.ravel().tolist()).decode()


def test_a_stream_that_holds_out_less_than_is_asked_for_is_looked_through_once(tmp_path: Path) -> None:
    alice, looks = stream(tmp_path), 0
    dataset = alice._dataset

    class Counted:
        def __iter__(self) -> Iterator[dict[str, str]]:
            nonlocal looks
            looks += 1
            return iter(dataset)

    alice._dataset = Counted()
    all_there_is = alice.held_out(10**4)
    assert 0 < len(all_there_is) < 10**4
    assert np.array_equal(alice.held_out(10**4), all_there_is)
    assert np.array_equal(alice.held_out(2), all_there_is[:2])
    assert looks == 1


class Broken:
    """A data set whose stream breaks `times` times, after five more documents each, and can be shuffled."""

    def __init__(self, dataset: datasets.IterableDataset, error: Exception, times: int) -> None:
        self.dataset, self.error, self.left = dataset, error, [times]

    def shuffle(self, **settings: int) -> Broken:
        shuffled = Broken(self.dataset.shuffle(**settings), self.error, 0)
        shuffled.left = self.left
        return shuffled

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number, record in enumerate(self.dataset):
            if self.left[0] and number % 5 == 4:
                self.left[0] -= 1
                raise self.error
            yield record


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset by peer"), huggingface_hub.errors.HTTPError("timed out"), EOFError()]
)
def test_a_stream_that_breaks_goes_on_where_it_was(tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    whole, broken = stream(tmp_path), stream(tmp_path)
    broken._dataset = Broken(broken._dataset, error, 2)
    assert np.array_equal(broken.held_out(5), whole.held_out(5))
    broken._dataset.left[0] = 3
    assert np.array_equal(broken.take(100), whole.take(100))
    assert broken.position == whole.position
    assert pauses == [1.0, 4.0, 1.0, 4.0, 16.0], "as often as it broke, in either"


def test_a_stream_that_stays_broken_ends_the_trainer_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the node: a trainer starts again from its checkpoint."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    broken = stream(tmp_path)
    broken._dataset = Broken(broken._dataset, ConnectionResetError("reset by peer"), 99)
    with pytest.raises(TrainerError, match="'a/b' cannot be read: reset by peer"):
        broken.held_out(5)
    assert pauses == [1.0, 4.0, 16.0]


def test_a_stream_holds_documents_out_and_goes_through_the_rest(tmp_path: Path) -> None:
    alice = stream(tmp_path)
    held = {line[:12] for line in text_of(alice.held_out(10**4)).splitlines() if line.startswith("document ")}
    trained = {line[:12] for line in text_of(alice.take(500)).splitlines() if line.startswith("document ")}
    assert alice.position.epoch == 1
    assert not {d for d in held if len(d) == 12} & trained
    assert len(trained) > 120
    assert not np.array_equal(stream(tmp_path).take(5), stream(tmp_path, "bob").take(5))


def test_a_stream_resumes(tmp_path: Path) -> None:
    alice = stream(tmp_path)
    alice.take(301)
    again = stream(tmp_path)
    again.seek(alice.position)
    assert np.array_equal(again.take(200), alice.take(200))
    assert isinstance(alice.position, Position)


def test_a_manifest_cannot_name_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "/etc", "../x", "./mine"):
        with pytest.raises(DataError, match="not the name of a data set"):
            open_hub(Data(source="hub", dataset=name))
