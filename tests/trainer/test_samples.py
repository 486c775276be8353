"""Fine-tuning samples: from records to marked tokens, and from there to windows."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import msgspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from nolocod.errors import ChatTemplateError, DataError, NoChatTemplateError, NolocodError, RecordError, RunFileError
from nolocod.observe.events import SamplesRead
from nolocod.run.base import Base, BaseFile
from nolocod.run.data import Data
from nolocod.run.manifest import Inner, Manifest, seal, unseal
from nolocod.run.run_file import read_run_file
from nolocod.trainer import founding
from nolocod.trainer.chat_template import ChatTemplate
from nolocod.trainer.data import ByteTokenizer, JsonTokenizer, make_tokenizer
from nolocod.trainer.hub import from_builder
from nolocod.trainer.samples import BEGIN, ID, LEARNT, Samples, pack, unpacked
from nolocod.trainer.source import Stream, kept_held_out, open_source
from tests.support.base_model import RUN_FILE, publish
from tests.support.chat_templates import SPECIAL, plain
from tests.support.trainer_parts import OWNER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nolocod.trainer.windows import Source


def run(kind: str, sequence: int = 32, **data: Any) -> Manifest:  # noqa: ANN401 - any key of Data
    settings = Data(**({"source": "jsonl", "kind": kind, "held_out": 0.2} | data))
    pinned = Base((BaseFile("config.json", 1, "0" * 64),)) if settings.tokenizer == "base" else None
    inner = Inner(sequence=sequence, batch=2)
    return Manifest(name="x", model={"model_type": "llama"}, data=settings, inner=inner, base=pinned)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def said(tokens: NDArray[np.int64], *, learnt: bool) -> str:
    """The bytes of a sample that are learnt, or are not."""
    return bytes((tokens[(tokens & LEARNT != 0) == learnt] & ID).tolist()).decode()


def told(samples: list[NDArray[np.int64]]) -> list[tuple[str, str]]:
    return [(said(one, learnt=False), said(one, learnt=True)) for one in samples]


# --- records


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Add.", "input": "1 and 1", "output": "2"},
        {"prompt": "Add.\n\n1 and 1", "completion": "2"},
        {"question": "Add.\n\n1 and 1", "answer": "2", "source": "elsewhere"},
        {"prompt": [{"role": "user", "content": "Add.\n\n1 and 1"}], "response": [{"role": "assistant", "content": "2"}]},
    ],
)
def test_an_instruction_has_the_columns_that_it_usually_has(tmp_path: Path, record: dict[str, Any]) -> None:
    samples = Samples(run("instruction"), ByteTokenizer())
    assert told(all_samples(write(tmp_path / "a.jsonl", [record] * 4), samples)) == [("Add.\n\n1 and 1\n", "2\0")] * 4


def all_samples(path: Path, samples: Samples) -> list[NDArray[np.int64]]:
    from nolocod.trainer.data import local_records

    read = [samples.read(text) for _, text in local_records(samples.settings, [path])]
    return [one for one in read if one is not None]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Best?", "chosen": "A", "rejected": "B"},
        {
            "prompt": "Best?",
            "chosen": [{"role": "user", "content": "Best?"}, {"role": "assistant", "content": "A"}],
            "rejected": [{"from": "human", "value": "Best?"}, {"from": "gpt", "value": "B"}],
        },
    ],
)
def test_a_preference_is_two_documents_one_behind_the_other(tmp_path: Path, record: dict[str, Any]) -> None:
    samples = Samples(run("preference"), ByteTokenizer())
    (pair,) = all_samples(write(tmp_path / "a.jsonl", [record]), samples)
    assert told(unpacked(pair, 1)) == [("Best?\n", "A\0"), ("Best?\n", "B\0")]
    assert len(unpacked(np.concatenate([pair, pair]), samples.documents)) == 2


@pytest.mark.parametrize(
    ("kind", "record", "says"),
    [
        ("chat", {"text": "a"}, "it has no `messages` or `conversations`, which a record of kind 'chat' needs (columns: text)"),
        ("chat", {"messages": "a"}, "`messages` is text, and no list of messages"),
        ("chat", {"messages": [{"role": "user"}]}, "message 1 of `messages` has no role or no text (keys: role)"),
        ("instruction", {"prompt": "a", "b": 1}, "it has no `output` or `completion` or `response` or `answer`"),
        ("instruction", {"prompt": 5, "output": "a"}, "`prompt` is neither text nor a list of messages"),
        ("instruction", [], "it has no `instruction` or `prompt` or `question`"),
        ("preference", {"prompt": "a", "chosen": "b"}, "it has no `rejected`, which a record of kind 'preference' needs"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": ""}, "`rejected` is no answer to a prompt, and two"),
        ("preference", {"chosen": "b", "rejected": "c"}, "`chosen` is no answer to a prompt"),
    ],
)
def test_a_record_without_what_it_needs_is_named_with_what_it_has(
    tmp_path: Path, base: Path, kind: str, record: object, says: str
) -> None:
    manifest = run(kind, tokenizer="base" if kind == "chat" else "bytes")
    good = {"messages": CHAT, "prompt": "a", "output": "b", "chosen": "c", "rejected": "d"}
    path = write(tmp_path / "a.jsonl", [good, good, record])
    with pytest.raises(RecordError) as caught:
        open_source(manifest, make_tokenizer(manifest.data, base), "alice", path, tmp_path / "cache")
    assert f"{path}, line 3: {says}" in caught.value.cause
    assert list((tmp_path / "cache").glob("tokens-*")) == []


def test_parquet_says_the_same(tmp_path: Path) -> None:
    records = [{"prompt": f"{number}?", "completion": f"{number}!", "more": 1} for number in range(20)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", records)
    found = []
    for source in ("jsonl", "parquet"):
        manifest = run("instruction", source=source)
        opened = open_source(manifest, ByteTokenizer(), "alice", tmp_path / f"a.{source}", tmp_path / "cache")
        found.append((opened.take(4).tolist(), opened.held_out(4).tolist()))
    assert found[0] == found[1]
    parquet.write_table(pyarrow.table({"prompt": ["a"], "body": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(RecordError, match=r"b.parquet, row 1: it has no `output` .*\(columns: body, prompt\)"):
        open_source(run("instruction", source="parquet"), ByteTokenizer(), "alice", tmp_path / "b.parquet", tmp_path / "cache")


# --- chats


CHAT = [{"role": "user", "content": "time"}, {"role": "assistant", "content": "and tide"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "model", template=plain("chatml"), special=SPECIAL)


def test_instructions_and_preferences_are_chats_where_the_model_has_a_template(tmp_path: Path, base: Path) -> None:
    records = [{"messages": CHAT, "instruction": "time", "output": "and tide"}]
    path = write(tmp_path / "a.jsonl", records)
    found = []
    for kind in ("chat", "instruction"):
        manifest = run(kind, tokenizer="base")
        tokenizer = make_tokenizer(manifest.data, base)
        (sample,) = all_samples(path, Samples(manifest, tokenizer))
        found.append(sample.tolist())
        assert tokenizer.decode((sample & ID).tolist()) == (
            "<|im_start|>user\ntime<|im_end|>\n<|im_start|>assistant\nand tide<|im_end|>\n"
        )
        assert tokenizer.decode((sample[sample & LEARNT != 0] & ID).tolist()) == "and tide<|im_end|>"
        assert np.flatnonzero(sample & BEGIN).tolist() == [0]
    assert found[0] == found[1]


def test_a_chat_s_first_token_is_not_learnt_whoever_says_it(tmp_path: Path, base: Path) -> None:
    """Nothing before it could tell it: in a window it would be told by another sample."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ';' }}{% endgeneration %}"
        "{% else %}{{ m.content + ';' }}{% endif %}{% endfor %}"
    )
    tokenizer = JsonTokenizer((base / "tokenizer.json").read_text(), ChatTemplate(source, {}))
    path = write(tmp_path / "a.jsonl", [{"messages": [CHAT[1], CHAT[0]]}])
    (sample,) = all_samples(path, Samples(run("chat", tokenizer="base"), tokenizer))
    assert (sample[0] & LEARNT, sample[0] & BEGIN) == (0, BEGIN)
    assert said_ids(sample) == tokenizer.encode("and tide;").tolist()[1:]


def said_ids(sample: NDArray[np.int64]) -> list[int]:
    found: list[int] = (sample[sample & LEARNT != 0] & ID).tolist()
    return found


def test_chats_need_a_template(tmp_path: Path, base: Path) -> None:
    with pytest.raises(NoChatTemplateError, match="trains on chats, and its tokenizer has no chat template"):
        Samples(run("chat"), ByteTokenizer())
    asked = {"prompt": [{"role": "system", "content": "a"}, *CHAT[:1]], "completion": "b"}
    with pytest.raises(NoChatTemplateError, match="a chat of several messages"):
        all_samples(write(tmp_path / "a.jsonl", [asked]), Samples(run("instruction"), ByteTokenizer()))


@pytest.mark.parametrize(
    ("template", "error", "says"),
    [(None, NoChatTemplateError, "has no chat template"), ("{% if %}", ChatTemplateError, "no valid jinja")],
)
def test_a_run_whose_model_has_no_template_that_serves_is_not_founded(
    tmp_path: Path, base: Path, template: str | None, error: type[NolocodError], says: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    about = json.loads((base / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))
    (tmp_path / "run.toml").write_text(RUN_FILE.format(base=folder).replace('"text"', '"jsonl"\nkind = "chat"'))
    with pytest.raises(error, match=says):
        founding.read(tmp_path / "run.toml")
    (folder / "chat_template.jinja").write_text(plain("chatml"))  # the remedy
    manifest, _ = founding.read(tmp_path / "run.toml")
    assert manifest.base is not None
    assert "chat_template.jinja" in {file.name for file in manifest.base.files}


# --- the run file


def test_a_run_says_its_kind_and_runs_on_text_are_what_they_were(tmp_path: Path) -> None:
    for kind, beta in (("text", 0.1), ("preference", 0.1), ("preference", 0.3)):
        manifest = Manifest(name="x", model={"model_type": "llama"}, data=Data(source="jsonl", kind=kind, beta=beta))
        sealed = seal(manifest, OWNER)
        assert unseal(sealed.to_bytes()).manifest.data == manifest.data
        assert (b"kind" in sealed.body, b'"beta":0.3' in sealed.body) == (kind != "text", beta == 0.3)
    for data in ('source = "text"\nkind = "chat"', 'source = "jsonl"\nkind = "chat"\ndocuments = "joined"'):
        (tmp_path / "run.toml").write_text(f'name = "x"\n[model]\nmodel_type = "llama"\n[data]\n{data}\n')
        with pytest.raises(RunFileError, match=r'kind = "chat"` needs records, apart'):
            read_run_file(tmp_path / "run.toml")


@pytest.mark.parametrize("page", ["README.md", "docs/fine-tuning.md"])
def test_the_run_file_that_is_shown_makes_a_run(tmp_path: Path, base: Path, page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text()
    (shown,) = (one for one in re.findall(r"```toml\n(.*?)```", text, re.S) if "chat" in one)
    assert len(shown.splitlines()) <= 8
    (tmp_path / "run.toml").write_text(re.sub(r'"HuggingFaceTB/[^"]*"', f'"{base}"', shown) + "inner.sequence = 64\n")
    manifest, folder = founding.read(tmp_path / "run.toml")
    assert (folder, manifest.data.kind, manifest.data.tokenizer) == (base, "chat", "base")


# --- windows


def asked(number: int) -> dict[str, str]:
    return {"prompt": f"{number}" + "?" * (number % 7), "completion": f"{number}" + "!" * (number % 11)}


def documents_in(windows: NDArray[np.int64]) -> list[tuple[str, str]]:
    return sorted(one for one in told(unpacked(windows.ravel(), 1)) if one[1])


def local(folder: Path, manifest: Manifest, records: list[Any], peer: str = "alice") -> Source:
    return open_source(manifest, ByteTokenizer(), peer, write(folder / "a.jsonl", records), folder / "cache")


def test_every_sample_is_in_one_window_whole_and_trained_on_or_held_out(tmp_path: Path) -> None:
    alice = local(tmp_path, run("instruction"), [asked(number) for number in range(300)])
    held = alice.held_out(1000)
    train = alice.take(alice._windows.training)  # type: ignore[attr-defined]
    whole = [(f"{number}" + "?" * (number % 7) + "\n", f"{number}" + "!" * (number % 11) + "\0") for number in range(300)]
    assert sorted(documents_in(train) + documents_in(held)) == sorted(whole)
    assert 30 < len(documents_in(held)) < 90
    assert train.shape[1] == held.shape[1] == 33
    assert ((train[:, 0] & BEGIN) != 0).all()
    assert not ((train & BEGIN != 0) & (train & LEARNT != 0)).any(), "nothing before it could tell it"
    tokens = sum(len(a) + len(b) for a, b in documents_in(train))
    assert tokens > 0.9 * train.size, "little room is left"


def test_what_is_in_the_cache_is_of_the_same_kind(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [asked(number) | {"chosen": "a", "rejected": "b"} for number in range(30)])
    learnt = []
    for kind in ("instruction", "preference"):
        opened = open_source(run(kind), ByteTokenizer(), "alice", path, tmp_path / "cache")
        learnt.append({said for _, said in documents_in(opened.take(4))})
    assert learnt[1] == {"a\0", "b\0"} != learnt[0]


def test_one_sample_at_least_is_held_out(tmp_path: Path) -> None:
    manifest = msgspec.structs.replace(run("instruction"), data=msgspec.structs.replace(run("instruction").data, held_out=1e-9))
    alice = local(tmp_path, manifest, [asked(number) for number in range(3)])
    assert len(documents_in(alice.held_out(10))) == 1
    with pytest.raises(DataError, match="0 tokens, and 33 that are held out, are too few for windows of 32"):
        local(tmp_path, manifest, [asked(0)])


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    events: list[SamplesRead] = []
    long = [{"prompt": "a", "completion": "b" * 40}, {"prompt": "a" * 40, "completion": "b"}]
    path = write(tmp_path / "a.jsonl", [*long, asked(1), asked(2)])
    for _ in range(2):
        open_source(run("instruction"), ByteTokenizer(), "alice", path, tmp_path / "cache", events.append)  # type: ignore[arg-type]
    assert events == [SamplesRead(4, 2, 1)], "told when they are read, not when they come from the cache"
    samples = Samples(run("instruction"), ByteTokenizer())
    assert told(all_samples(path, samples))[0] == ("a\n", "b" * 31)
    pairs = [
        {"prompt": "a", "chosen": "b" * 15, "rejected": "c" * 15},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    (one,) = all_samples(write(tmp_path / "b.jsonl", pairs), Samples(run("preference"), ByteTokenizer()))
    assert told([one]) == [("a\na\n", "b\0c\0")]


def test_packing_takes_the_first_and_what_fits_behind_it() -> None:
    waiting = [np.full(length, length, dtype=np.int64) for length in (5, 6, 4, 1, 2)]
    assert pack(waiting, 10).tolist() == [5] * 5 + [4] * 4 + [1]
    assert pack(waiting, 10).tolist() == [6] * 6 + [2] * 2 + [BEGIN, 0]
    assert waiting == []


# --- streams


def streamed(folder: Path, kind: str, manifest: Manifest, records: list[Any]) -> Stream:
    folder.mkdir(exist_ok=True)
    paths = []
    for number, part in enumerate(np.array_split(np.array(records, dtype=object), 3)):
        path = folder / f"{number}.{kind}"
        if kind == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(part.tolist()), path, row_group_size=20)
        elif kind == "jsonl":
            write(path, part.tolist())
        else:
            datasets.Dataset.from_list(part.tolist()).to_json(path, compression="gzip")
        paths.append(str(path))
    builder = datasets.load_dataset_builder("parquet" if kind == "parquet" else "json", data_files={"train": paths})
    dataset = from_builder(builder, manifest.data)
    return Stream(dataset, manifest, Samples(manifest, ByteTokenizer()), "alice")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json.gz"])
def test_a_stream_gives_every_sample_once_an_epoch_and_resumes(tmp_path: Path, kind: str) -> None:
    manifest = run("preference", source="hub", dataset="a/b")
    records = [{"prompt": f"{number}?", "chosen": "a" * (number % 5 + 1), "rejected": "bb"} for number in range(200)]
    alice = streamed(tmp_path / "d", kind, manifest, records)
    held = documents_in(kept_held_out(alice, manifest, 1000, tmp_path / "cache"))
    found = np.concatenate([alice.take(2) for _ in range(20)])
    while not (position := alice.position).carry:
        found = np.concatenate([found, alice.take(2)])
    waiting = [one.tolist() for one in alice._carry]
    assert all(len(one) <= 33 for one in unpacked(np.array(position.carry, dtype=np.int64), 2))
    rest = np.concatenate([alice.take(2) for _ in range(20)])
    again = streamed(tmp_path / "d", kind, manifest, records)
    again.seek(msgspec.json.decode(msgspec.json.encode(position), type=type(position)))
    assert [one.tolist() for one in again._carry] == waiting
    assert np.array_equal(np.concatenate([again.take(2) for _ in range(20)]), rest)
    everything = documents_in(np.concatenate([found, rest]))
    whole = sorted((f"{n}?\n", answer + "\0") for n in range(200) for answer in ("a" * (n % 5 + 1), "bb"))
    assert set(everything) | set(held) <= set(whole)
    assert not set(everything) & set(held)
    first = documents_in(found)
    assert len(set(first)) == len(first), "none twice in an epoch"


def test_a_record_of_a_stream_that_lacks_a_column_is_told(tmp_path: Path) -> None:
    manifest = run("preference", source="hub", dataset="a/b")
    records = [{"prompt": "a", "chosen": "b"}] * 30
    for kind, says in (("jsonl", r"a record of data set 'a/b': it has no `rejected`"), ("parquet", "it has no `rejected`")):
        with pytest.raises(RecordError, match=says):
            streamed(tmp_path / kind, kind, manifest, records).take(1)
    unusable = [{"prompt": "a", "chosen": "b", "rejected": 5}] * 30
    with pytest.raises(RecordError, match=r"data set 'a/b', the record that begins with '\{\"chosen\":\"b\""):
        streamed(tmp_path / "c", "jsonl", manifest, unusable).take(1)


def test_samples_of_several_lengths_fill_windows() -> None:
    """Lengths as of chats, from short to as long as a window: the figure of docs/fine-tuning.md."""
    rng = random.Random(0)
    lengths = [min(1025, int(rng.lognormvariate(5.5, 0.8)) + 2) for _ in range(3000)]
    waiting: list[NDArray[np.int64]] = []
    windows = 0
    for length in lengths:
        waiting.append(np.ones(length, dtype=np.int64))
        if len(waiting) == 32:
            pack(waiting, 1025)
            windows += 1
    while waiting:
        pack(waiting, 1025)
        windows += 1
    assert sum(lengths) / (windows * 1025) > 0.97
