"""Fine-tuning samples as tokens: what is learnt of each is marked, and several share a window.

The rule: a token of a sample is one number, its id with two marks: LEARNT where the loss is about it, and BEGIN where a
document begins, which sees none of those before it in its window (objective.py). So windows of samples go wherever windows
of text do. The first token of a document is never learnt: nothing before it could tell it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nolocod.disk import written_whole
from nolocod.errors import NoChatTemplateError
from nolocod.observe.events import SamplesRead
from nolocod.trainer.chat_template import said_by_assistant
from nolocod.trainer.data import JsonTokenizer, drawn, end_of, local_files, local_records
from nolocod.trainer.records import chats_of, told_of
from nolocod.trainer.token_cache import cached
from nolocod.trainer.windows import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import IO

    from numpy.typing import NDArray

    from nolocod.run.manifest import Manifest
    from nolocod.trainer.data import Tokenizer
    from nolocod.trainer.records import Message
    from nolocod.trainer.windows import Position, Source

LEARNT, BEGIN = 1 << 30, 1 << 31
"""Beside ids, which are smaller; 32 bits in all."""
ID = LEARNT - 1
_NOTHING = np.empty(0, dtype=np.uint32)
_POOL = 32
"""Samples among which one is looked for that fits into what a window has left."""
_TELL_FROM = 1024


class Samples:
    """Makes tokens of records. NoChatTemplateError, ChatTemplateError where the run's tokenizer cannot."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, tell: Callable[[SamplesRead], None] | None = None) -> None:
        """`tell` gets how many were read, cut and left out, at the end of local data, and now and then of a stream."""
        self.settings = manifest.data
        self.tokenizer = tokenizer
        self.length = manifest.inner.sequence + 1
        self._end = end_of(manifest.data, tokenizer)
        self._tell = tell or (lambda read: None)
        self._read = self._cut = self._left_out = 0
        self._template = tokenizer.template if isinstance(tokenizer, JsonTokenizer) else None
        if self._template is not None:
            self._template.check()
        elif self.settings.kind == "chat":
            raise NoChatTemplateError("the run trains on chats, and its tokenizer has no chat template.")

    @property
    def documents(self) -> int:
        """That a sample consists of."""
        return 2 if self.settings.kind == "preference" else 1

    @property
    def facts(self) -> list[object]:
        """What its tokens depend on, beside the tokenizer's own."""
        template = self._template
        return [self.settings.kind, self.settings.field, self.length, *((template.source, template.tokens) if template else ())]

    def read(self, text: str) -> NDArray[np.int64] | None:
        """The tokens of a record, at most a window; None if it is left out. RecordError.

        A chat that is too long is cut at its end; a pair that is too long is left out, for a part of an answer is none.
        """
        self._read += 1
        if self._read >= _TELL_FROM and self._read & (self._read - 1) == 0:
            self.tell()
        found = [self._document(chat) for chat in chats_of(text, self.settings)]
        if len(found) == 1 and len(found[0]) > self.length:
            found[0] = found[0][: self.length]
            self._cut += 1
        if (
            not all((one & LEARNT).any() for one in found)
            or sum(map(len, found)) > self.length
            or (len(found) == 2 and np.array_equal(found[0], found[1]))
        ):
            self._left_out += 1
            return None
        return np.concatenate(found)

    def tell(self) -> None:
        self._tell(SamplesRead(self._read, self._cut, self._left_out, self.settings.dataset or ""))

    def _document(self, chat: Sequence[Message]) -> NDArray[np.int64]:
        if self._template is not None and isinstance(self.tokenizer, JsonTokenizer):
            text, spans = self._template.render(chat)
            ids, offsets = self.tokenizer.encode_where(text)
            learnt = said_by_assistant(offsets, spans)
        else:
            if [one["role"] for one in chat] != ["user", "assistant"]:
                cause = "it is a chat of several messages, and the run's tokenizer has no chat template."
                raise NoChatTemplateError(cause)
            asked, answer = (self.tokenizer.encode(one["content"] + end) for one, end in zip(chat, ("\n", ""), strict=True))
            ids = np.concatenate([asked, answer, self._end]).astype(np.int64)
            learnt = np.arange(len(ids)) >= len(asked)
        found: NDArray[np.int64] = ids | np.where(learnt, LEARNT, 0)
        found[:1] = ids[:1] | BEGIN
        return found


def pack(waiting: list[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """One window of the first that waits, and of those behind it that fit, which wait no more. The rest is a document of which
    nothing is learnt."""
    window = np.zeros(length, dtype=np.int64)
    at = index = 0
    while index < len(waiting):
        if len(waiting[index]) <= length - at:
            sample = waiting.pop(index)
            window[at : at + len(sample)] = sample
            at += len(sample)
        else:
            index += 1
    window[at : at + 1] = BEGIN
    return window


def isolated(windows: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Windows of text, in which `end` ends a document, with the marks of samples: all is learnt but where a document begins.
    An empty document belongs to the one before it, so that there is something to learn in every window."""
    begins = np.ones(windows.shape, dtype=bool)
    begins[:, 1:] = (windows[:, :-1] == end) & (windows[:, 1:] != end)
    return windows | np.where(begins, BEGIN, LEARNT)


class Isolated:
    """A windows.Source: the windows of text of `source`, marked."""

    def __init__(self, source: Source, end: int) -> None:
        self._source, self._end = source, end

    def take(self, count: int) -> NDArray[np.int64]:
        return isolated(self._source.take(count), self._end)

    def held_out(self, count: int) -> NDArray[np.int64]:
        return isolated(self._source.held_out(count), self._end)

    @property
    def position(self) -> Position:
        return self._source.position

    def seek(self, position: Position) -> None:
        self._source.seek(position)


def unpacked(tokens: NDArray[np.int64], documents: int) -> list[NDArray[np.int64]]:
    """The samples, of so many documents each, that lie one behind another in `tokens`."""
    begins = np.flatnonzero(tokens & BEGIN)[::documents]
    return np.split(tokens, begins[1:]) if len(tokens) else []


class _Packer:
    """Writes samples as windows."""

    def __init__(self, handle: IO[bytes], length: int) -> None:
        self._handle = handle
        self._length = length
        self._waiting: list[NDArray[np.int64]] = []

    def add(self, sample: NDArray[np.int64]) -> None:
        self._waiting.append(sample)
        if len(self._waiting) == _POOL:
            self._write()

    def close(self) -> None:
        while self._waiting:
            self._write()

    def _write(self) -> None:
        self._handle.write(pack(self._waiting, self._length).astype(np.uint32).tobytes())


def local_samples(samples: Samples, path: Path | None, cache: Path) -> Parts:
    """The windows of local records, mapped from cache files. Held out are those whose own hash says so, or the one with the
    lowest hash. DataError, RecordError."""
    files = local_files(samples.settings, path)
    target = cached(samples.settings, samples.tokenizer.content, files, cache, *samples.facts)
    held = target.with_suffix(".held")
    if not (target.exists() and held.exists()):
        with written_whole(held) as apart, written_whole(target) as handle:
            train, rest = _Packer(handle, samples.length), _Packer(apart, samples.length)
            for sample, is_held in _divided(samples, files):
                (rest if is_held else train).add(sample)
            train.close()
            rest.close()
        samples.tell()
    trained, kept = (np.memmap(one, np.uint32, "r") if one.stat().st_size else _NOTHING for one in (target, held))
    return Parts(trained, kept, samples.length - 1, share_ends=False)


def _divided(samples: Samples, files: Sequence[Path]) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """Each sample, and whether it is held out."""
    kept: tuple[float, NDArray[np.int64]] | None = None  # the one with the lowest hash, while none is held out
    found = False
    for where, text in local_records(samples.settings, files):
        with told_of(where):
            sample = samples.read(text)
        if sample is None:
            continue
        hashed = drawn(text)
        if hashed < samples.settings.held_out:
            found = True
            yield sample, True
        elif kept is None or hashed < kept[0]:
            if kept is not None:
                yield kept[1], False
            kept = hashed, sample
        else:
            yield sample, False
    if kept is not None:
        yield kept[1], not found
