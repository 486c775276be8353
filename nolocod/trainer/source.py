"""A run's text opened for one node: local text, or a data set of the `datasets` library as a stream.

The rule of a stream: nothing but the windows at hand is kept. Every node shuffles it in an order of its own, and
holds out the documents whose own hash says so, so that all nodes agree without having seen the same part. A position
is the epoch, the documents read in it and the tokens left over, so resuming skips and does not train anything twice.
A stream that breaks is opened again where it was, a few times.
"""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import blake3
import numpy as np

from nolocod.errors import DataError, TrainerError, on_one_line
from nolocod.trainer.data import Tokenizer, local_tokens, missing_packages
from nolocod.trainer.windows import Position, Shard, Source, Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from nolocod.run.manifest import Data, Manifest

T = TypeVar("T")

_PAUSES = (1.0, 4.0, 16.0)
"""Seconds before a broken stream is opened again."""
_SHUFFLE = 1000
"""Documents among which the next one is drawn."""
_LOOK_FOR_HELD_OUT = 100_000
"""Documents looked through for held-out ones at most."""


def open_source(manifest: Manifest, tokenizer: Tokenizer, peer_id: str, data: Path | None, cache: Path) -> Source:
    """Open the run's text for the node `peer_id`; DataError if it cannot be used."""
    settings = manifest.data
    if settings.source == "hub":
        return Stream(open_hub(settings), manifest, tokenizer, peer_id)
    tokens = local_tokens(settings, data, tokenizer, cache)
    return Shard(Windows(tokens, manifest.inner.sequence, settings.held_out), manifest.seed, peer_id)


def open_hub(settings: Data) -> Any:  # noqa: ANN401 - `datasets` has no types; an IterableDataset
    """Open the data set of the manifest for streaming; DataError if it cannot be had."""
    name = settings.dataset or ""
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or Path(name).exists():
        # `datasets` would open a local folder of that name, and a stranger's manifest must not choose one.
        raise DataError(f"{name!r} is not the name of a data set on the hub.", remedy="Ask the run's owner.")
    try:
        import datasets
    except ImportError as error:
        raise missing_packages(f"data set {name!r}") from error
    datasets.utils.logging.set_verbosity_error()
    datasets.utils.logging.disable_progress_bar()
    try:
        found = datasets.load_dataset(name, settings.subset, split=settings.split, streaming=True)
    except _failures() as error:
        raise DataError(f"data set {name!r}: {_cause(error)}.", remedy="Check the network, or ask the run's owner.") from error
    columns = found.column_names
    if columns is not None and settings.field not in columns:
        raise DataError(f"data set {name!r} has no column {settings.field!r} (columns: {', '.join(columns)}).")
    return found


def _failures() -> tuple[type[Exception], ...]:
    """What the libraries let through where the network fails, or a piece of the data set is damaged."""
    import datasets
    from huggingface_hub import errors

    # HTTPError: httpx's or requests', as the hub's library has it
    return OSError, ValueError, EOFError, datasets.exceptions.DatasetsError, errors.HTTPError  # type: ignore[attr-defined]


def _cause(error: Exception) -> str:
    return on_one_line(error, 300) or type(error).__name__


class Stream:
    """One node's way through a streamed data set (a windows.Source)."""

    def __init__(self, dataset: Any, manifest: Manifest, tokenizer: Tokenizer, peer_id: str) -> None:  # noqa: ANN401 - see open_hub
        self._dataset = dataset
        self._settings = manifest.data
        self._tokenizer = tokenizer
        self._length = manifest.inner.sequence + 1
        digest = blake3.blake3(f"{manifest.seed} {peer_id}".encode()).digest(4)
        self._seed = int.from_bytes(digest, "big")
        self._epoch = self._documents = 0
        self._carry = np.empty(0, dtype=np.int64)
        self._texts: Iterator[str] | None = None
        self._held = np.empty((0, self._length), dtype=np.int64)
        self._sought = 0
        """So many windows were looked for: where there are fewer, the data set is not streamed again for each call."""

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._documents, tuple(self._carry.tolist()))

    def seek(self, position: Position) -> None:
        self._epoch, self._documents = position.epoch, position.index
        self._carry = np.array(position.carry, dtype=np.int64)
        self._texts = None

    def take(self, count: int) -> NDArray[np.int64]:
        needed = count * self._length
        parts, have = [self._carry], len(self._carry)
        while have < needed:
            parts.append(self._tokens(self._through(self._next_text)))
            have += len(parts[-1])
        joined = np.concatenate(parts)
        self._carry = joined[needed:]
        return joined[:needed].reshape(count, self._length)

    def held_out(self, count: int) -> NDArray[np.int64]:
        if count > self._sought:
            self._held = self._through(lambda: self._look_for_held_out(count))
            self._sought = count
        return self._held[:count]

    def _look_for_held_out(self, count: int) -> NDArray[np.int64]:
        texts = (self._text(record) for record in itertools.islice(self._dataset, _LOOK_FOR_HELD_OUT))
        parts: list[NDArray[np.int64]] = []
        have = 0
        for text in texts:
            if self._is_held_out(text):
                parts.append(self._tokens(text))
                have += len(parts[-1])
                if have >= count * self._length:
                    break
        windows = min(count, have // self._length)
        if not windows:
            raise DataError(f"data set {self._settings.dataset!r} is too short to hold text out for evaluation.")
        return np.concatenate(parts)[: windows * self._length].reshape(windows, self._length)

    def _through(self, work: Callable[[], T]) -> T:
        """What `work` reads, begun again after each of the pauses where the stream breaks; TrainerError if it stays broken."""
        for pause in (*_PAUSES, None):
            try:
                return work()
            except _failures() as error:
                self._texts = None  # opened again behind the last document that was read
                if pause is None:
                    raise TrainerError(f"data set {self._settings.dataset!r} cannot be read: {_cause(error)}.") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _next_text(self) -> str:
        """The next document to train on, of the next epoch when this one ends."""
        for _ in range(2):
            if self._texts is None:
                self._texts = self._open()
            for text in self._texts:
                return text
            self._epoch, self._documents, self._texts = self._epoch + 1, 0, None
        raise DataError(f"data set {self._settings.dataset!r} has no document to train on.")

    def _open(self) -> Iterator[str]:
        order = self._dataset.shuffle(seed=self._seed, buffer_size=_SHUFFLE)
        order.set_epoch(self._epoch)
        for record in itertools.islice(order, self._documents, None):
            self._documents += 1
            text = self._text(record)
            if not self._is_held_out(text):
                yield text

    def _text(self, record: dict[str, Any]) -> str:
        value = record.get(self._settings.field)
        if not isinstance(value, str):
            raise DataError(
                f"a record of {self._settings.dataset!r} has no text in {self._settings.field!r} (fields: {', '.join(record)})."
            )
        return value

    def _is_held_out(self, text: str) -> bool:
        draw = int.from_bytes(blake3.blake3(text.encode("utf-8", errors="replace")).digest(8), "big")
        return draw < self._settings.held_out * 2**64

    def _tokens(self, text: str) -> NDArray[np.int64]:
        return self._tokenizer.encode(text + "\n").astype(np.int64)
