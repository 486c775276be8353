"""From text to windows: sources, the held-out split, each node's own order."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers

from nolocod.errors import DataError, RunFileError
from nolocod.run.data import Data
from nolocod.trainer.data import JsonTokenizer, is_held_out, local_parts, local_tokens, make_tokenizer
from nolocod.trainer.hub import open_hub
from nolocod.trainer.token_cache import KEPT
from nolocod.trainer.windows import Parts, Shard, Windows, permuted

if TYPE_CHECKING:
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


def test_tokens_of_texts_that_were_not_used_for_long_go(tmp_path: Path) -> None:
    cache, text = tmp_path / "cache", tmp_path / "a.txt"

    def use(number: int) -> None:
        text.write_text("x" * (5000 + number))
        os.utime(text, ns=(number, number))
        local_parts(Data(source="text"), 8, text, make_tokenizer(Data()), cache)
        for file in cache.iterdir():  # all are a minute older
            stat = file.stat()
            os.utime(file, (stat.st_atime, stat.st_mtime - 60))

    for number in (*range(KEPT), 0, KEPT):
        use(number)
    assert len(list(cache.glob("*.bin"))) == len(list(cache.glob("*.held"))) == len(list(cache.iterdir())) / 2 == KEPT
    there = set(cache.iterdir())
    use(0)
    assert set(cache.iterdir()) == there, "it was used again, and the second was not"
    use(1)
    assert set(cache.iterdir()) != there


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


def test_training_goes_on_while_a_long_text_becomes_tokens() -> None:
    """It is done in a thread beside it, for as long as inner steps take and longer."""
    fast = Fast(models.BPE({byte: number for number, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer, text, began, took = JsonTokenizer(fast.to_str()), "of time and tide; " * 60_000, threading.Event(), []

    def encode() -> None:
        began.set()
        start = time.thread_time()
        assert len(tokenizer.encode(text)) > len(text)
        took.append(time.thread_time() - start)

    beside, turns = threading.Thread(target=encode), 0
    beside.start()
    began.wait()
    while beside.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20


def test_two_base_models_with_one_cache_have_tokens_of_their_own(tmp_path: Path) -> None:
    settings = Data(source="text", tokenizer="base")
    (tmp_path / "a.txt").write_text("a b a")
    found = []
    for number in (7, 9):
        fast = Fast(models.WordLevel({"a": 0, "b": number}, unk_token="a"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        (base := tmp_path / f"{number}").mkdir()
        (base / "tokenizer.json").write_text(fast.to_str())
        found.append(local_tokens(settings, tmp_path / "a.txt", make_tokenizer(settings, base), tmp_path / "cache").tolist())
    assert found == [[0, 7, 0], [0, 9, 0]]


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


def test_a_manifest_cannot_name_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "/etc", "../x", "./mine"):
        with pytest.raises(DataError, match="not the name of a data set"):
            open_hub(Data(source="hub", dataset=name))


# --- documents apart


def parts(path: Path, cache: Path, **settings: object) -> tuple[list[str], list[str]]:
    """What is trained on and what is held out, cut where documents end."""
    data = Data(**({"source": "jsonl", "held_out": 0.2} | settings))
    train, held = local_parts(data, SEQUENCE, path, make_tokenizer(data), cache)
    return tuple(bytes(one).decode().split("\0")[:-1] for one in (train, held))  # type: ignore[return-value] # two


def lines(path: Path, numbers: range) -> Path:
    path.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in numbers))
    return path


def test_nodes_with_other_files_hold_the_same_documents_out(tmp_path: Path) -> None:
    a_train, a_held = parts(lines(tmp_path / "a.jsonl", range(400)), tmp_path / "cache")
    b_train, b_held = parts(lines(tmp_path / "b.jsonl", range(599, 199, -1)), tmp_path / "cache")
    assert sorted(a_train + a_held) == sorted(f"document {number}" for number in range(400))
    assert all(is_held_out(text, 0.2) for text in a_held + b_held)
    assert set(a_held) & set(b_held)
    assert not (set(a_held) | set(b_held)) & (set(a_train) | set(b_train))
    assert 40 < len(a_held) < 120


def test_a_long_text_is_held_out_in_pieces_and_ends_once(tmp_path: Path) -> None:
    text = "".join(f"this is line {number} of the text\n" for number in range(4000))
    (tmp_path / "a.txt").write_text(text)
    train, held = parts(tmp_path / "a.txt", tmp_path / "cache", source="text", held_out=0.05)
    assert sum(map(len, train + held)) == len(text)
    assert all(one.endswith("\n") for one in train + held), "cut behind lines"
    assert len(train) in (len(held), len(held) + 1), "an end stands where the text does not go on, and nowhere else"
    assert 0.01 < sum(map(len, held)) / len(text) < 0.12


def test_a_little_is_held_out_of_few_documents_too(tmp_path: Path) -> None:
    train, held = parts(lines(tmp_path / "a.jsonl", range(60)), tmp_path / "cache", held_out=1e-9)
    assert 8 * SEQUENCE < sum(map(len, held)) < 9 * SEQUENCE + 12
    assert len(train) + len(held) == 60
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(DataError, match="too little text"):
        parts(tmp_path / "b.txt", tmp_path / "cache", source="text")
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        parts(tmp_path / "c.txt", tmp_path / "cache", source="text")


def test_a_tokenizer_s_own_end_is_used_or_else_a_line_break(tmp_path: Path) -> None:
    for name, end in (("<|endoftext|>", 2), ("other", 1)):
        fast = Fast(models.WordLevel({"a": 0, "\n": 1, name: 2}, unk_token="a"))
        data = Data(source="jsonl", tokenizer=fast.to_str(), held_out=0.4)
        lines(tmp_path / f"{end}.jsonl", range(1000))
        train, held = local_parts(data, SEQUENCE, tmp_path / f"{end}.jsonl", make_tokenizer(data), tmp_path / "cache")
        assert set(train[1::2].tolist()) == set(held[1::2].tolist()) == {end}


def test_parts_give_every_window_once_and_refuse_what_is_too_short() -> None:
    windows = Parts(np.arange(1000), np.arange(2000, 2100), SEQUENCE)
    assert windows.training == 31
    assert windows.train(np.arange(31))[:, :-1].ravel().tolist() == list(range(31 * SEQUENCE))
    assert windows.held_out(10)[:, 0].tolist() == [2000, 2032, 2064]
    with pytest.raises(DataError, match="too few"):
        Parts(np.arange(1000), np.arange(SEQUENCE), SEQUENCE)
