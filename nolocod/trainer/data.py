"""From a run's data source to tokens: local text is tokenised once into a cache file.

The rule: what cannot be used is a DataError that names the path, the field and what to do. A stranger's
manifest names no path of ours: local files come from this node's own `--data`.
"""

from __future__ import annotations

import os
import re
import sysconfig
from typing import TYPE_CHECKING, Any, Protocol

import blake3
import msgspec
import numpy as np

from nolocod.disk import written_whole
from nolocod.errors import DataError, RunFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from nolocod.run.manifest import Data

_STDLIB_BYTES = 20 << 20
"""The most of the standard library that is read: enough for a small model, quick to tokenise."""
_STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_SUFFIXES = {"jsonl": {".jsonl", ".ndjson", ".json"}, "parquet": {".parquet"}}
_READ = 1 << 20
"""Characters tokenised at once."""


class Tokenizer(Protocol):
    """Turns text into ids below `vocabulary`."""

    vocabulary: int

    def encode(self, text: str) -> NDArray[Any]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """Ids are the bytes of the UTF-8 text."""

    vocabulary = 256

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizers` file, given as its text; RunFileError if it is none."""

    def __init__(self, content: str) -> None:
        from tokenizers import Tokenizer as Fast  # only runs that use one pay for the import

        try:
            self._fast = Fast.from_str(content)
        except Exception as error:  # tokenizers raises plain Exception; this is the seam
            raise RunFileError(f"`data.tokenizer` is not a tokenizers file ({error}).") from error
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=0) + 1  # ids may have gaps, so counting them is not enough

    def encode(self, text: str) -> NDArray[Any]:
        return np.array(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=False))


def make_tokenizer(settings: Data) -> Tokenizer:
    """The run's tokenizer."""
    return ByteTokenizer() if settings.tokenizer == "bytes" else JsonTokenizer(settings.tokenizer)


def local_tokens(settings: Data, path: Path | None, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Return all tokens of a local source, mapped from a cache file (written whole, if it is not there yet).

    The cache is named by the files' paths, sizes and times, the field and the tokenizer. Raises DataError.
    """
    files = _files(settings, path)
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    key = blake3.blake3(msgspec.json.encode([settings.source, settings.field, settings.tokenizer, facts])).hexdigest()
    target = cache / f"tokens-{key[:32]}.bin"
    dtype = np.uint8 if tokenizer.vocabulary <= 1 << 8 else np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as handle:
            for file in files:
                for text in _texts(settings, file):
                    handle.write(tokenizer.encode(text).astype(dtype).tobytes())
    if not target.stat().st_size:
        where = path if path is not None else "the standard library"
        raise DataError(f"{where} holds no text.")
    return np.memmap(target, dtype=dtype, mode="r")


def some_text(settings: Data, path: Path | None, characters: int) -> tuple[str, bool]:
    """The first `characters` or so of a local source without a cache, and whether that is all. Raises DataError."""
    parts: list[str] = []
    have = 0
    for file in _files(settings, path):
        for text in _texts(settings, file):
            if have >= characters:
                return "".join(parts), False
            parts.append(text)
            have += len(text)
    return "".join(parts), True


def _texts(settings: Data, file: Path) -> Iterator[str]:
    try:
        if settings.source == "jsonl":
            yield from _jsonl(file, settings.field)
        elif settings.source == "parquet":
            yield from _parquet(file, settings.field)
        else:
            with file.open(encoding="utf-8", errors="replace") as handle:
                while text := handle.read(_READ):
                    yield text
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}).") from error


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is not JSON ({error}).") from error
            value = record.get(field) if isinstance(record, dict) else None
            if not isinstance(value, str):
                keys = ", ".join(sorted(record)) if isinstance(record, dict) else "none"
                raise DataError(
                    f"{file}, line {number} has no text in the field {field!r} (fields: {keys}).",
                    remedy="Set `data.field` in the run file to the field that holds the text, or point --data at other files.",
                )
            yield value + "\n"


def missing_packages(what: str) -> DataError:
    """What is said where nolocod was installed without the packages that read `what`."""
    return DataError(
        f"{what} needs packages that are not installed here.",
        remedy="Install nolocod with its extra [datasets]; an image is built with EXTRAS='[datasets]'.",
    )


def _parquet(file: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow  # type: ignore[import-untyped] # ships no types
        from pyarrow import parquet
    except ImportError as error:
        raise missing_packages(str(file)) from error
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if field not in names:
            raise DataError(
                f"{file} has no column {field!r} (columns: {', '.join(names)}).",
                remedy="Set `data.field` in the run file to the column that holds the text, or point --data at other files.",
            )
        for batch in table.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise DataError(f"{file}: column {field!r} does not hold text.")
                yield value + "\n"
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a parquet file ({error}).") from error


def _stdlib_files() -> list[Path]:
    """The .py files of the running Python's standard library, in sorted order, up to the cap."""
    from pathlib import Path

    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    total = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _STDLIB_SKIP and not name.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(folder, name)
                total += file.stat().st_size
                if total > _STDLIB_BYTES:
                    return found
                found.append(file)
    if not found:
        raise DataError(f"the standard library at {root} has no sources here.", remedy="Use a Python that ships them.")
    return found


def _files(settings: Data, path: Path | None) -> list[Path]:
    settings.check_given(path)
    if path is None or settings.source == "stdlib":
        return _stdlib_files()
    if path.is_file():
        return [path]
    hidden = re.compile(r"(^|/)\.")
    inside = sorted(file for file in path.rglob("*") if file.is_file() and not hidden.search(str(file.relative_to(path))))
    wanted = _SUFFIXES.get(settings.source)
    files = [file for file in inside if (file.suffix.lower() in wanted if wanted else _is_text(file))]
    if not files:
        kind = " or ".join(sorted(wanted)) if wanted else "UTF-8 text"
        raise DataError(f"{path} has no {kind} files in it ({len(inside)} files of other kinds).")
    return files


def _is_text(file: Path) -> bool:
    """Tell text from binary by the file's beginning, so that a stray image spoils nothing."""
    with file.open("rb") as handle:
        head = handle.read(4096)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 4 and len(head) == 4096  # cut within a character
    return b"\0" not in head
