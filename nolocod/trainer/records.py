"""What a record of a fine-tuning data set says, before any tokenizer: chats of messages with a role and a content.

The rule: a record is known by its text, the canonical JSON of the columns that count, so that what is held out and what is
streamed goes by text here too. A record without what its kind needs is a RecordError that names what it has.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from nolocod.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.run.data import Data

Message = dict[str, str]
"""With a `role` and a `content`, as chat templates take it."""

_CHATS = ("messages", "conversations")
_PROMPTS, _INPUT, _ANSWERS = ("instruction", "prompt", "question"), "input", ("output", "completion", "response", "answer")
_PAIR = ("chosen", "rejected")
_OTHER_NAMES = {"human": "user", "gpt": "assistant"}
"""Roles as ShareGPT has them, with `from` and `value` for role and content."""


def columns_of(settings: Data) -> tuple[str, ...]:
    """The columns that may count, of which a record needs some; none for plain text."""
    match settings.kind:
        case "chat":
            return _CHATS if settings.field == "text" else (settings.field,)
        case "instruction":
            return *_PROMPTS, _INPUT, *_ANSWERS
        case "preference":
            return "prompt", *_PAIR
    return ()


def text_of(record: object, settings: Data) -> str:
    """The record as text. RecordError if it lacks what its kind needs."""
    given = record if isinstance(record, dict) else {}
    columns = columns_of(settings)
    kept = {name: given[name] for name in columns if given.get(name) is not None}
    needed = {"instruction": (_PROMPTS, _ANSWERS), "preference": (_PAIR[:1], _PAIR[1:])}.get(settings.kind, (columns,))
    for names in needed:
        if not kept.keys() & set(names):
            lacks, has = " or ".join(f"`{name}`" for name in names), ", ".join(sorted(map(str, given))) or "none"
            raise RecordError(f"it has no {lacks}, which a record of kind {settings.kind!r} needs (columns: {has}).")
    return msgspec.json.encode(kept, order="sorted").decode()


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """An error is about the record that is named."""
    try:
        yield
    except RecordError as error:
        raise RecordError(f"{where}: {error.cause}", remedy=error.remedy) from error


def chats_of(text: str, settings: Data) -> tuple[list[Message], ...]:
    """The chats of a record: one; of a preference the preferred one and the other. RecordError."""
    record: dict[str, Any] = msgspec.json.decode(text)
    if settings.kind == "chat":
        name = next(name for name in columns_of(settings) if name in record)
        if isinstance(record[name], str):
            raise RecordError(f"`{name}` is text, and no list of messages.")
        return (_messages(record[name], name),)
    if settings.kind == "instruction":
        prompt, answer = (next(name for name in names if name in record) for names in (_PROMPTS, _ANSWERS))
        asked, more = record[prompt], record.get(_INPUT)
        if isinstance(asked, str) and isinstance(more, str) and more:
            asked = f"{asked}\n\n{more}"
        return (_messages(asked, prompt) + _messages(record[answer], answer, "assistant"),)
    prompted = _messages(record["prompt"], "prompt") if record.get("prompt") else []
    pair = [_messages(record[name], name, "assistant") for name in _PAIR]
    whole = [prompted + one if one[0]["role"] == "assistant" else one for one in pair]  # others have the prompt in both
    for name, one in zip(_PAIR, whole, strict=True):
        if one[-1]["role"] != "assistant" or not one[-1]["content"] or len(one) < 2:
            raise RecordError(f"`{name}` is no answer to a prompt, and two answers are compared.")
    return tuple(whole)


def _messages(value: object, name: str, role: str = "user") -> list[Message]:
    """A list of messages, or a text as one of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise RecordError(f"`{name}` is neither text nor a list of messages.")
    found = []
    for number, one in enumerate(value, 1):
        given = one if isinstance(one, dict) else {}
        said = given.get("role") or given.get("from"), given.get("content", given.get("value"))
        if not (isinstance(said[0], str) and isinstance(said[1], str)):
            keys = ", ".join(sorted(map(str, given))) or "none"
            raise RecordError(f"message {number} of `{name}` has no role or no text (keys: {keys}).")
        found.append({"role": _OTHER_NAMES.get(said[0], said[0]), "content": said[1]})
    return found
