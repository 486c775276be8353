"""A run's text opened for one node: local text, or a data set of the hub as a stream.

The rule of a stream: nothing but the group of documents at hand is kept. Every node goes through the files, through the
groups of a file and through the documents of a group in orders of its own, drawn from the run's seed and its peer id, and
holds out the documents whose own hash says so, so that all nodes agree without having seen the same part. A position names
file, group and document, so that resuming reads one group.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import blake3
import msgspec
import numpy as np

from nolocod.disk import written_whole
from nolocod.errors import DataError
from nolocod.trainer.bus import lay_for
from nolocod.trainer.data import Tokenizer, end_of, end_token, is_held_out, local_parts, local_tokens
from nolocod.trainer.hub import DataSet, cause_of, failures, is_damage, open_hub
from nolocod.trainer.mixture import Mixture
from nolocod.trainer.prefetch import Prefetched, Supply, persist
from nolocod.trainer.records import told_of
from nolocod.trainer.samples import Isolated, Samples, isolated, local_samples, pack, unpacked
from nolocod.trainer.windows import Parts, Position, Shard, Source, Windows, permuted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from nolocod.observe.events import SamplesRead, TextSupply
    from nolocod.run.manifest import Manifest

T = TypeVar("T")

_NOTHING = np.empty(0, dtype=np.int64)
_TRIES = 4
"""To read a file that makes no sense, before the rest of it is left out."""
_LOOK_FOR_HELD_OUT = 100_000
"""Documents looked through for held-out ones at most."""


def open_source(
    manifest: Manifest,
    tokenizer: Tokenizer,
    peer_id: str,
    data: Path | None,
    cache: Path,
    tell: Callable[[TextSupply | SamplesRead], None] | None = None,
    device: torch.device | None = None,
) -> Source:
    """Open the run's text for the node `peer_id`; DataError if it cannot be used. Waits for the hub as long as it takes if it
    can `tell`; else an outage is a DataError too. Local text is read beside training, too, if `device` is a
    GPU, and all windows lie where it reads them by itself."""
    settings, inner = manifest.data, manifest.inner
    end = end_token(tokenizer) if settings.documents == "isolated" else None
    count, held = inner.batch * inner.accumulation, inner.batch * manifest.evaluation.batches
    supply, lay = Supply(tell or (lambda supply: None)), lay_for(device)
    if settings.source == "hub":
        ask = _asked_once
        if tell is not None:
            ask = partial(persist, trouble=supply.out, closed=threading.Event())
        stream = ask(lambda: open_stream(manifest, tokenizer, peer_id, tell))
        held_out = ask(lambda: kept_held_out(stream, manifest, held, cache))
        supply.back()
        read: Source = stream
        if end is not None:
            read, held_out = Isolated(stream, end), isolated(held_out, end)
        return Prefetched(read, count, held_out, supply, lay)
    windows: Windows | Parts
    if settings.kind != "text":
        windows = local_samples(Samples(manifest, tokenizer, tell), data, cache)
    elif settings.documents != "joined":
        windows = Parts(*local_parts(settings, inner.sequence, data, tokenizer, cache), inner.sequence)
    else:
        windows = Windows(local_tokens(settings, data, tokenizer, cache), inner.sequence, settings.held_out)
    shard = Shard(windows, manifest.seed, peer_id)
    found: Source = shard if end is None else Isolated(shard, end)
    return found if lay is None else Prefetched(found, count, found.held_out(held), supply, lay)


def open_stream(
    manifest: Manifest, tokenizer: Tokenizer, peer_id: str, tell: Callable[[SamplesRead], None] | None = None
) -> Stream | Mixture:
    """The run's data set of the hub, or its mixture of them. Raises hub.failures, or DataError."""
    streams = []
    for settings, _ in manifest.data.parts:
        own = msgspec.structs.replace(manifest, data=settings)
        reader = tokenizer if settings.kind == "text" else Samples(own, tokenizer, tell)
        streams.append(Stream(open_hub(settings), own, reader, peer_id))
    if not manifest.data.mixture:
        return streams[0]
    return Mixture(streams, [weight for _, weight in manifest.data.parts], f"{manifest.seed} {peer_id}")


def _asked_once(work: Callable[[], T]) -> T:
    try:
        return work()
    except failures() as error:
        raise DataError(f"the data set cannot be read: {cause_of(error)}.", remedy="Check the network.") from error


def kept_held_out(stream: Stream | Mixture, manifest: Manifest, count: int, cache: Path) -> NDArray[np.int64]:
    """The stream's held-out windows, read once and kept in a file."""
    told = msgspec.to_builtins(manifest.data)
    if not told["mixture"]:  # as before there were any
        del told["mixture"]
    facts = msgspec.json.encode([told, manifest.inner.sequence, count, *stream.facts])
    target = cache / f"held-out-{blake3.blake3(facts).hexdigest()[:32]}.npy"
    if not target.exists():
        found = stream.held_out(count)
        with written_whole(target) as handle:
            np.save(handle, found)
    kept: NDArray[np.int64] = np.load(target)
    return kept


class Stream:
    """One node's way through a data set of the hub. Raises hub.failures, and goes on where it was when asked again."""

    def __init__(self, dataset: DataSet, manifest: Manifest, reader: Tokenizer | Samples, peer_id: str) -> None:
        """`reader` makes tokens of documents: of texts or, in runs on samples, of records."""
        self._dataset = dataset
        self._settings = manifest.data
        self._samples = reader if isinstance(reader, Samples) else None
        self._tokenizer = reader.tokenizer if isinstance(reader, Samples) else reader
        self._end = end_of(manifest.data, self._tokenizer)
        self._length = manifest.inner.sequence + 1
        self._key = f"{manifest.seed} {peer_id}"
        self._epoch = self._file = self._group = self._index = 0
        self._carry: list[NDArray[np.int64]] = []  # tokens that were read and not taken
        self._documents: Iterator[str] | None = None
        self._failed = 0
        """So often in a row what was read made no sense."""

    @property
    def facts(self) -> list[object]:
        """What its tokens depend on, beside the run."""
        return [] if self._samples is None else self._samples.facts

    @property
    def position(self) -> Position:
        carry = tuple(token for part in self._carry for token in part.tolist())
        return Position(self._epoch, self._index, carry, self._file, self._group)

    def seek(self, position: Position) -> None:
        self._epoch, self._file, self._group, self._index = position.epoch, position.file, position.group, position.index
        carry = np.array(position.carry, dtype=np.int64)
        self._carry = [carry] if self._samples is None else unpacked(carry, self._samples.documents)
        self._documents = None

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` windows to train on."""
        needed = count * self._length
        have = sum(map(len, self._carry))
        while have < needed:
            try:
                if self._documents is None:
                    self._documents = self._through()
                tokens = self._tokens(next(self._documents))
            except failures() as error:
                self._documents = None  # opened again behind the last document that was read
                self._failed = self._failed + 1 if is_damage(error) else 0
                if self._failed == _TRIES:
                    self._file, self._group, self._index, self._failed = self._file + 1, 0, 0, 0
                raise
            if len(tokens):
                self._carry.append(tokens)
            self._failed = 0
            have += len(tokens)
        if self._samples is not None:
            return np.stack([pack(self._carry, self._length) for _ in range(count)])
        joined = np.concatenate(self._carry)
        self._carry = [joined[needed:]]
        return joined[:needed].reshape(count, self._length)

    def held_out(self, count: int) -> NDArray[np.int64]:
        """At most `count` windows that nobody trains on, the same for all nodes. DataError if there are none."""
        parts: list[NDArray[np.int64]] = []
        have = 0
        for text in itertools.islice(self._dataset.texts(), _LOOK_FOR_HELD_OUT):
            if is_held_out(text, self._settings.held_out):
                if len(tokens := self._tokens(text)):
                    parts.append(tokens)
                have += len(tokens)
                if have >= count * self._length:
                    break
        one = self._samples is not None and have > 0  # which need not be full
        windows = min(count, max(have // self._length, int(one)))
        if not windows:
            raise DataError(f"data set {self._settings.dataset!r} is too short to hold text out for evaluation.")
        if self._samples is not None:
            return np.stack([pack(parts, self._length) for _ in range(windows)])
        return np.concatenate(parts)[: windows * self._length].reshape(windows, self._length)

    def _through(self) -> Iterator[str]:
        """The documents to train on from the position on, one epoch after another."""
        files = len(self._dataset.files)
        while True:
            found = bool(self._file or self._group or self._index)  # not known of an epoch's beginning
            while self._file < files:
                for text in self._through_file(self._pick(self._file, files, "")):
                    found = True
                    yield text
                self._file, self._group = self._file + 1, 0
            if not found:
                raise DataError(f"data set {self._settings.dataset!r} has no document to train on.")
            self._epoch, self._file = self._epoch + 1, 0

    def _through_file(self, number: int) -> Iterator[str]:
        with contextlib.closing(self._dataset.open(number)) as file:
            while file.groups is None or self._group < file.groups:
                group = self._group if file.groups is None else self._pick(self._group, file.groups, f" {number}")
                values = file.read(group)
                if file.groups is None and not len(values):
                    return
                left = np.arange(self._index, max(self._index, len(values)), dtype=np.uint64)
                for row in permuted(left, len(values), self._keyed(f" {number} {group}")).tolist():
                    self._index += 1
                    text = self._dataset.text(values[row].as_py())
                    if not is_held_out(text, self._settings.held_out):
                        yield text
                self._group, self._index = self._group + 1, 0

    def _pick(self, rank: int, size: int, of: str) -> int:
        """Which of `size` comes at this rank in this node's order."""
        return int(permuted(np.array([rank], dtype=np.uint64), size, self._keyed(of))[0])

    def _keyed(self, of: str) -> bytes:
        return f"{self._key} {self._epoch}{of}".encode()

    def _tokens(self, text: str) -> NDArray[np.int64]:
        if self._samples is not None:
            with told_of(f"data set {self._settings.dataset!r}, the record that begins with {text[:80]!r}"):
                found = self._samples.read(text)
            return _NOTHING if found is None else found
        return np.concatenate([self._tokenizer.encode(text).astype(np.int64), self._end])
