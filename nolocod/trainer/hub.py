"""A data set of the hub as files, of which any part can be read without those before it.

The rule: a file is read in groups: the row groups of a parquet file, blocks of a JSON-lines file, and runs of records of all
else, which must be read one after another. Nothing but the group at hand is kept. What the libraries let through where the
network fails is one of `failures`, and passes; what the run's owner did wrong is a DataError.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from nolocod.errors import DataError, on_one_line
from nolocod.trainer.data import missing_packages
from nolocod.trainer.records import columns_of, text_of, told_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.run.data import Data

_BLOCK = 4 << 20
"""Bytes of a JSON-lines file."""
_RUN = 10_000
"""Records of a file that can only be read from its beginning."""
_LINES = (".jsonl", ".ndjson")


class Opened(Protocol):
    """A file. `groups` is None where it is not known: then they are read in order until one is empty."""

    groups: int | None

    def read(self, group: int) -> Any:  # noqa: ANN401 - a pyarrow array, which has no types
        """The group's values of the field, as an array."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class DataSet:
    """`kind` is the builder of `datasets` that reads its files."""

    name: str
    kind: str
    files: tuple[str, ...]
    settings: Data

    def open(self, index: int) -> Opened:
        """File `index`. Raises what `failures` tells, or DataError."""
        url = self.files[index]
        if self.kind == "parquet":
            return _Parquet(self, url)
        return _Lines(self, url) if url.endswith(_LINES) else _Records(self, url)

    def texts(self) -> Iterator[str]:
        """All documents in the order in which they lie. Raises as `open`."""
        for index in range(len(self.files)):
            with contextlib.closing(self.open(index)) as file:
                for group in itertools.count() if file.groups is None else range(file.groups):
                    values = file.read(group)
                    yield from (self.text(value.as_py()) for value in values)
                    if file.groups is None and not len(values):
                        break

    def text(self, value: object) -> str:
        """The value of the field in a record, or a sample's record as text; DataError if it is no text."""
        if not isinstance(value, str):
            raise DataError(f"a record of data set {self.name!r} has no text in {self.settings.field!r}.")
        return value

    def text_in(self, record: object) -> str:
        """What counts of a record, as text. DataError, RecordError."""
        if self.settings.kind != "text":
            with told_of(f"a record of data set {self.name!r}"):
                return text_of(record, self.settings)
        if not isinstance(record, dict) or self.settings.field not in record:
            keys = ", ".join(sorted(record)) if isinstance(record, dict) else "none"
            raise DataError(f"a record of {self.name!r} has no text in {self.settings.field!r} (fields: {keys}).")
        return self.text(record[self.settings.field])


class _Parquet:
    def __init__(self, dataset: DataSet, url: str) -> None:
        import fsspec
        from pyarrow import parquet  # type: ignore[import-untyped] # ships no types

        self._handle = fsspec.open(url, "rb").open()
        self._file = parquet.ParquetFile(self._handle)
        self._dataset = dataset
        self.groups = self._file.metadata.num_row_groups
        wanted, names = columns_of(dataset.settings) or (dataset.settings.field,), self._file.schema_arrow.names
        self._columns = [name for name in wanted if name in names]
        if names and not self._columns:
            what = " or ".join(map(repr, wanted))
            raise DataError(f"data set {dataset.name!r} has no column {what} (columns: {', '.join(names)}).")

    def read(self, group: int) -> Any:  # noqa: ANN401 - see Opened
        found = self._file.read_row_group(group, columns=self._columns)
        if self._dataset.settings.kind == "text":
            return found.column(0)
        import pyarrow

        return pyarrow.array([self._dataset.text_in(record) for record in found.to_pylist()], pyarrow.string())

    def close(self) -> None:
        self._handle.close()


class _Lines:
    def __init__(self, dataset: DataSet, url: str) -> None:
        import fsspec

        self._handle = fsspec.open(url, "rb").open()
        self._dataset = dataset
        self._size = self._handle.seek(0, 2)
        self.groups = max(1, -(-self._size // _BLOCK))

    def read(self, group: int) -> Any:  # noqa: ANN401 - see Opened
        """The lines that begin in the block."""
        import pyarrow

        start = group * _BLOCK
        self._handle.seek(max(0, start - 1))
        if start:
            self._handle.readline()
        lines = []
        while self._handle.tell() < min(start + _BLOCK, self._size):
            if (line := self._handle.readline()).strip():
                lines.append(line)
        records = [msgspec.json.decode(line) for line in lines]
        return pyarrow.array([self._dataset.text_in(record) for record in records], pyarrow.string())

    def close(self) -> None:
        self._handle.close()


class _Records:
    def __init__(self, dataset: DataSet, url: str) -> None:
        self.groups: int | None = None
        self._dataset = dataset
        self._url = url
        self._next = 0
        self._records = self._open()

    def _open(self) -> Iterator[dict[str, Any]]:
        import datasets

        whole = datasets.load_dataset(self._dataset.kind, data_files=[self._url], split="train", streaming=True)
        return iter(whole)

    def read(self, group: int) -> Any:  # noqa: ANN401 - see Opened
        import pyarrow

        if group < self._next:
            self._next, self._records = 0, self._open()
        left_out = itertools.islice(self._records, (group - self._next) * _RUN)
        for _ in left_out:
            pass
        self._next = group + 1
        run = itertools.islice(self._records, _RUN)
        return pyarrow.array([self._dataset.text_in(record) for record in run], pyarrow.string())

    def close(self) -> None:
        self._records = iter(())


def open_hub(settings: Data) -> DataSet:
    """Look the manifest's data set up. DataError if there is none; raises what `failures` tells where the hub is not there."""
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
        return from_builder(datasets.load_dataset_builder(name, settings.subset), settings)
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        raise DataError(f"data set {name!r}: {cause_of(error)}.", remedy="Ask the run's owner.") from error


def from_builder(builder: Any, settings: Data) -> DataSet:  # noqa: ANN401 - `datasets` has no types
    """The files of the manifest's split, as `datasets` found them."""
    name, found = settings.dataset or "", builder.config.data_files or {}
    if settings.split not in found:
        raise DataError(f"data set {name!r} has no split {settings.split!r} (splits: {', '.join(map(str, found))}).")
    return DataSet(name, builder.name, tuple(map(str, found[settings.split])), settings)


def failures() -> tuple[type[Exception], ...]:
    """What the libraries let through where the network fails, or a piece of the data set is damaged."""
    import datasets
    import pyarrow
    from huggingface_hub import errors

    # HTTPError: httpx's or requests', as the hub's library has it
    known = OSError, ValueError, EOFError, datasets.exceptions.DatasetsError, pyarrow.ArrowException
    return *known, errors.HTTPError  # type: ignore[attr-defined]


def is_damage(error: Exception) -> bool:
    """Whether what was read makes no sense, so that reading it again may not help."""
    return isinstance(error, ValueError | EOFError) and not isinstance(error, OSError)


def cause_of(error: Exception) -> str:
    return on_one_line(error, 300) or type(error).__name__
