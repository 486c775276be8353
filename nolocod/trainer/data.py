"""From a run's data source to tokens: local text is tokenised once into a cache file.

The rule: what cannot be used is a DataError that names the path, the field and what to do. A stranger's
manifest names no path of ours: local files come from this node's own `--data`.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
from bisect import insort
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import blake3
import msgspec
import numpy as np

from nolocod.disk import written_whole
from nolocod.errors import BaseModelError, DataError, RunFileError
from nolocod.run.base import TOKENIZER
from nolocod.trainer.chat_template import read_template
from nolocod.trainer.records import columns_of, text_of, told_of
from nolocod.trainer.token_cache import cached

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    from numpy.typing import NDArray

    from nolocod.run.data import Data
    from nolocod.trainer.chat_template import ChatTemplate

STDLIB_BYTES = 20 << 20
"""The most of the standard library that is read: enough for a small model, quick to tokenise."""
_STDLIB_SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_SUFFIXES = {"jsonl": {".jsonl", ".ndjson", ".json"}, "parquet": {".parquet"}}
_READ = 1 << 20
"""Characters tokenised at once."""
_PIECE, _LEAST_PIECE = 1 << 14, 256
"""Characters of the pieces of a long text; a short one is cut finer, into ..."""
_LEAST_PIECES = 128
_SURE = 8
"""So many characters are a token at least."""


class Tokenizer(Protocol):
    """Turns text into ids below `vocabulary`."""

    content: str
    """The `tokenizers` file, or "bytes"."""
    vocabulary: int
    end: int | None
    """The id that ends a document, if there is one."""

    def encode(self, text: str) -> NDArray[Any]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """Ids are the bytes of the UTF-8 text, in which 0 ends a document."""

    content = "bytes"
    vocabulary = 256
    end: int | None = 0

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class JsonTokenizer:
    """A `tokenizers` file, given as its text; RunFileError if it is none."""

    def __init__(self, content: str, template: ChatTemplate | None = None) -> None:
        """`template`: how chats are written with it, if that is known."""
        from tokenizers import Tokenizer as Fast  # only runs that use one pay for the import

        try:
            self._fast = Fast.from_str(content)
        except Exception as error:  # tokenizers raises plain Exception; this is the seam
            raise RunFileError(f"`data.tokenizer` is not a tokenizers file ({error}).") from error
        self.content = content
        self.template = template
        if template is not None:  # a published file may cut or fill what it encodes, which `transformers` leaves aside too
            self._fast.no_truncation()
            self._fast.no_padding()
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=0) + 1  # ids may have gaps, so counting them is not enough
        self.end: int | None = next((found for name in _ENDS if (found := self._fast.token_to_id(name)) is not None), None)

    def encode(self, text: str) -> NDArray[Any]:
        # a batch lets other threads go on meanwhile, training among them; one text alone holds Python's lock till its end
        return np.array(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids, dtype=np.uint32)

    def encode_where(self, text: str) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """Also which characters each token is made of: the first, and the one behind the last."""
        found = self._fast.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.int64), found.offsets

    def decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=False))


def make_tokenizer(settings: Data, base: Path | None = None) -> Tokenizer:
    """The run's tokenizer; `base` is the folder of the model that it starts from."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    template = read_template(base or Path()) if settings.tokenizer == "base" and settings.kind != "text" else None
    return JsonTokenizer(tokenizer_text(settings, base), template)


def tokenizer_text(settings: Data, base: Path | None) -> str:
    """The tokenizers file of a run whose tokenizer is not "bytes". BaseModelError."""
    if settings.tokenizer != "base":
        return settings.tokenizer
    try:
        return (base or Path()).joinpath(TOKENIZER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BaseModelError(f"{base}: {TOKENIZER} cannot be read as text.") from error


def end_token(tokenizer: Tokenizer) -> int:
    """By which documents are isolated. RunFileError without one."""
    if tokenizer.end is None:
        cause = '`data.documents = "isolated"` needs a tokenizer with a token that ends a text; none is known of this one.'
        raise RunFileError(cause, remedy='Say "apart".')
    return tokenizer.end


_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Names of the token that ends a text, in the tokenizers that we know."""


def end_of(settings: Data, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """What stands behind each document, as tokens."""
    known = () if tokenizer.end is None or settings.documents == "joined" else (tokenizer.end,)
    return np.array(known or tokenizer.encode("\n"), dtype=np.int64)


def is_held_out(text: str, share: float) -> bool:
    """Whether nobody trains on this document: its own hash decides."""
    return drawn(text) < share


def drawn(text: str) -> float:
    """The hash of a document, from 0 to 1."""
    return int.from_bytes(blake3.blake3(text.encode("utf-8", errors="replace")).digest(8), "big") / 2**64


def local_parts(
    settings: Data, sequence: int, path: Path | None, tokenizer: Tokenizer, cache: Path
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The tokens of a local source to train on, and those held out, mapped from cache files. A document ends with a token of
    its own, and is held out by its own hash, so that nodes that have it agree; so are the pieces of a long text. Where too few
    are, those with the lowest hashes are held out. Raises DataError.
    """
    files = local_files(settings, path)
    target = cached(settings, tokenizer.content, files, cache, sequence, "train")
    held = target.with_suffix(".held")
    dtype = _dtype(tokenizer)
    if not (target.exists() and held.exists()):
        size = sum(file.stat().st_size for file in files)
        pieces = max(_LEAST_PIECE, min(_PIECE, 1 << max(1, size // _LEAST_PIECES).bit_length() - 1))
        edge = _edge((text for file in files for text, _ in _pieces(settings, file, pieces)), settings.held_out, sequence)
        end = end_of(settings, tokenizer).astype(dtype).tobytes()
        with written_whole(held) as apart, written_whole(target) as handle:
            for file in files:
                before: IO[bytes] | None = None
                for text, is_last in _pieces(settings, file, pieces):
                    into = apart if drawn(text) <= edge else handle
                    if before is not None and into is not before:
                        before.write(end)  # what follows there is not its continuation
                    into.write(tokenizer.encode(text).astype(dtype).tobytes() + (end if is_last else b""))
                    before = None if is_last else into
    sizes = [one.stat().st_size for one in (target, held)]
    if not all(sizes):
        where = path if path is not None else "the standard library"
        raise DataError(f"{where} holds {'too little' if any(sizes) else 'no'} text.")
    return np.memmap(target, dtype=dtype, mode="r"), np.memmap(held, dtype=dtype, mode="r")


def _edge(texts: Iterator[str], share: float, sequence: int) -> float:
    """Documents up to this hash are held out: those below `share`, or more where they make no window."""
    lowest: list[tuple[float, int]] = []
    have = total = 0
    for text in texts:
        draw = drawn(text)
        total += len(text)
        have += len(text) if draw < share else 0
        insort(lowest, (draw, len(text)))
        del lowest[_LEAST_PIECES:]
    wanted = min(_SURE * (sequence + 1), total // 2)
    if have >= wanted:
        return math.nextafter(share, 0.0)
    edge, have = -1.0, 0
    for draw, size in lowest:
        if have >= wanted:
            break
        edge, have = draw, have + size
    return edge


def _pieces(settings: Data, file: Path, size: int) -> Iterator[tuple[str, bool]]:
    """Each document, and whether it ends there; plain text in pieces of about `size` characters, cut behind lines."""
    if settings.source in ("jsonl", "parquet"):
        yield from ((text.removesuffix("\n"), True) for text in _texts(settings, file))
        return
    rest = ""
    for text in _texts(settings, file):
        rest += text
        while len(rest) > 2 * size:
            cut = rest.find("\n", size, 2 * size) + 1 or size
            yield rest[:cut], False
            rest = rest[cut:]
    if rest:
        yield rest, True


def _dtype(tokenizer: Tokenizer) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if tokenizer.vocabulary <= 1 << 8 else np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32


def local_tokens(settings: Data, path: Path | None, tokenizer: Tokenizer, cache: Path) -> NDArray[Any]:
    """Return all tokens of a local source, mapped from a cache file (written whole, if it is not there yet).

    Raises DataError.
    """
    files = local_files(settings, path)
    target, dtype = cached(settings, tokenizer.content, files, cache), _dtype(tokenizer)
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
    for file in local_files(settings, path):
        for text in _texts(settings, file):
            if have >= characters:
                return "".join(parts), False
            parts.append(text)
            have += len(text)
    return "".join(parts), True


def _texts(settings: Data, file: Path) -> Iterator[str]:
    if settings.source in ("jsonl", "parquet"):
        yield from (_text_in(record, settings.field, where) for where, record in _rows(settings, file, (settings.field,)))
        return
    with _readable(file), file.open(encoding="utf-8", errors="replace") as handle:
        while text := handle.read(_READ):
            yield text


def local_records(settings: Data, files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Each record as text (records.py), and where it lies. DataError, RecordError."""
    for file in files:
        for where, record in _rows(settings, file, columns_of(settings)):
            with told_of(where):
                text = text_of(record, settings)
            yield where, text


def _rows(settings: Data, file: Path, columns: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each record, and where it lies."""
    with _readable(file):
        yield from _jsonl(file) if settings.source == "jsonl" else _parquet(file, columns)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror or error}).") from error


_OTHER_FIELD = "Set `data.field` in the run file to the one that holds the text, or point --data at other files."


def _text_in(record: object, field: str, where: str) -> str:
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        keys = ", ".join(sorted(record)) if isinstance(record, dict) else "none"
        raise DataError(f"{where} has no text in the field {field!r} (fields: {keys}).", remedy=_OTHER_FIELD)
    return value + "\n"


def _jsonl(file: Path) -> Iterator[tuple[str, object]]:
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"{file}, line {number} is not JSON ({error}).") from error
            yield f"{file}, line {number}", record


def missing_packages(what: str) -> DataError:
    """What is said where nolocod was installed without the packages that read `what`."""
    return DataError(
        f"{what} needs packages that are not installed here.",
        remedy="Install nolocod with its extra [datasets]; an image is built with EXTRAS='[datasets]'.",
    )


def _parquet(file: Path, wanted: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each row: the wanted columns of it, and None for the others."""
    try:
        import pyarrow  # type: ignore[import-untyped] # ships no types
        from pyarrow import parquet
    except ImportError as error:
        raise missing_packages(str(file)) from error
    try:
        table = parquet.ParquetFile(file)
        names = table.schema_arrow.names
        if not (columns := [name for name in wanted if name in names]):
            what = " or ".join(map(repr, wanted))
            raise DataError(f"{file} has no column {what} (columns: {', '.join(names)}).", remedy=_OTHER_FIELD)
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", dict.fromkeys(names) | row
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not a parquet file ({error}).") from error


def _stdlib_files() -> list[Path]:
    """The .py files of the running Python's standard library, in sorted order, up to the cap."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    total = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _STDLIB_SKIP and not name.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(folder, name)
                total += file.stat().st_size
                if total > STDLIB_BYTES:
                    return found
                found.append(file)
    if not found:
        raise DataError(f"the standard library at {root} has no sources here.", remedy="Use a Python that ships them.")
    return found


def local_files(settings: Data, path: Path | None) -> list[Path]:
    """The files of the node's own, or the standard library's, that the run trains on. DataError."""
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
