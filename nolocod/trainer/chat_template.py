"""A chat as the model's own template writes it, and which of its tokens the assistant said.

The rule: the template comes from a stranger's model. It is rendered in the sandbox of `transformers`, by its own function, and
whatever it raises is its refusal. Where it does not mark the answers (`{% generation %}`), they are found by rendering what
comes before each; a template in which that finds nothing sure is refused, before anything is trained.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nolocod.errors import BaseModelError, ChatTemplateError, RecordError, on_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.trainer.records import Message

Span = tuple[int, int]
"""Of characters: the first, and the one behind the last."""

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TRIED = ("What is one and one?", "It is two.", "And two and two?", "It is four.")


@dataclass(frozen=True)
class ChatTemplate:
    """A template in jinja, and the special tokens that it may name."""

    source: str
    tokens: dict[str, str]

    def check(self) -> None:
        """Raise ChatTemplateError if it cannot write a plain chat, or does not let one find the answers in it."""
        roles = ("user", "assistant") * 2
        chat = [{"role": role, "content": content} for role, content in zip(roles, _TRIED, strict=True)]
        try:
            text, spans = self.render(chat)
        except RecordError as error:
            raise ChatTemplateError(f"of a plain chat it says: {error.cause}") from error
        found = [text[start:end] for start, end in spans]
        if not (len(found) == 2 and all(_TRIED[2 * at + 1] in one for at, one in enumerate(found))) or any(
            asked in one for asked in _TRIED[::2] for one in found
        ):
            raise ChatTemplateError("it does not let one tell the assistant's answers from the rest.")

    def render(self, chat: Sequence[Message]) -> tuple[str, list[Span]]:
        """The chat as text, and where the answers stand in it, with what ends each. RecordError, ChatTemplateError."""
        whole, marked = self._written(chat)
        if _MARKS.search(self.source):
            return whole, marked
        spans: list[Span] = []
        for number, message in enumerate(chat):
            if message["role"] == "assistant":
                spans.append(self._span(chat, number, whole))
        return whole, spans

    def _span(self, chat: Sequence[Message], number: int, whole: str) -> Span:
        """Where answer `number` stands in the chat as it is written, `whole`."""
        before, _ = self._written(chat[:number])
        asked, _ = self._written(chat[:number], ask=True)
        upto, _ = self._written(chat[: number + 1])
        content = chat[number]["content"].strip()
        last = content.split("</think>")[-1].strip()
        ending = upto[upto.rfind(last) + len(last) :] if last in upto else ""
        after = len(ending) - len(ending.rstrip() or ending)  # line breaks behind what ends an answer are none of it
        begins = asked != before  # one that knows nothing of asking begins an answer where its content begins
        if whole.startswith(upto) and upto.startswith(asked):
            return len(asked) if begins else max(len(asked), upto.find(content, len(asked))), len(upto) - after
        # It writes an answer otherwise where more follows (thoughts are left out), or asks otherwise than it writes. Then the
        # answer ends at the first place behind what was said before that has its content and what ends it in `upto`.
        begins = begins and whole.startswith(asked)
        if last and ending and whole.startswith(before):
            found = whole.find(last + ending, len(asked if begins else before))
            if found >= 0:
                return len(asked) if begins else found, found + len(last + ending) - after
        raise RecordError(f"the model's chat template writes message {number + 1} in a way in which its answer is not found.")

    def _written(self, chat: Sequence[Message], *, ask: bool = False) -> tuple[str, list[Span]]:
        """`ask`: with the beginning of an answer that is asked for."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marked = render_jinja_template(
                conversations=[list(chat)],
                chat_template=self.source,
                return_assistant_tokens_mask=bool(_MARKS.search(self.source)),
                add_generation_prompt=ask,
                **self.tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"it is no valid jinja (line {error.lineno}: {on_one_line(error, 200)}).") from error
        except Exception as error:  # a stranger's program raises what it likes
            raise RecordError(f"the model's chat template refuses it: {on_one_line(error, 200)}.") from error
        return texts[0], [(start, end) for start, end in (marked[0] if marked else [])]


def read_template(base: Path) -> ChatTemplate | None:
    """That of the model in the folder `base`, if it has one. BaseModelError."""
    try:
        about: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (path := base / name).exists():
                about |= json.loads(path.read_text(encoding="utf-8"))
        path = base / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.exists() else about.get("chat_template")
        if isinstance(source, list):  # several with names
            source = {one["name"]: one["template"] for one in source}.get("default")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BaseModelError(f"{base}: its chat template cannot be read ({on_one_line(error, 200)}).") from error
    if not isinstance(source, str):
        return None
    named = {key: one.get("content") if isinstance(one, dict) else one for key, one in about.items() if key.endswith("_token")}
    return ChatTemplate(source, {key: one for key, one in named.items() if isinstance(one, str)})


def said_by_assistant(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which tokens, of these `offsets` in the text, have a character within `spans`."""
    where = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    said = np.zeros(len(where), dtype=bool)
    for start, end in spans:
        inside = np.flatnonzero((where[:, 1] > start) & (where[:, 0] < end))
        if len(inside):
            said[inside[0] : inside[-1] + 1] = True
    return said
