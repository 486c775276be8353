"""What a run trains on: `[data]` of the run file.

The rule: no path of a node's own, which a manifest must not be able to point at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from nolocod.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the run file. A misspelt key is an error."""


class Part(Section, frozen=True):
    """A data set of a mixture."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Its share of the windows of text, against the sum of all weights."""


class Data(Section, frozen=True):
    """What is trained on. Local files are a node's own matter (`--data`): a manifest must not be able to point at one."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hub"] = "stdlib"
    """"stdlib" needs nothing: the sources of the running Python's standard library."""
    dataset: str | None = None
    """The name of a `datasets` data set (source "hub"), streamed."""
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    """The column or key that holds the text (jsonl, parquet, hub), or a chat where it is not `messages` or `conversations`."""
    mixture: Annotated[tuple[Part, ...], Meta(max_length=32)] = ()
    """In place of `dataset`: tables `[[data.mixture]]`, each with `dataset`, `weight`, and `subset`, `split`, `field` as here.
    Each window of text is of one of them, drawn by their weights."""
    tokenizer: str = "bytes"
    """"bytes" (256 ids), or the whole text of a `tokenizers` JSON file; the run file names its path. "base": that of the
    model in `model.base`, which is the default of such a run."""
    held_out: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    """Share of the text that nobody trains on."""
    kind: Literal["text", "chat", "instruction", "preference"] = "text"
    """What is learnt of a record (docs/fine-tuning.md): its text; the assistant's answers in a chat; the answer to an
    instruction; or which of two answers is preferred, by DPO."""
    beta: Annotated[float, Meta(gt=0, le=100)] = 0.1
    """DPO's beta (arXiv 2305.18290, Eq. 7): the higher it is, the closer the model stays to what the run starts from."""
    documents: Literal["apart", "isolated", "joined"] = "apart"
    """"apart": a document ends with the tokenizer's token for that, and is held out by its own hash. "isolated": and sees none
    of those before it in its window, as samples always do. "joined": it ends with a line break, and local text is held out by
    its place."""

    def __post_init__(self) -> None:
        if (self.source == "hub") != (self.dataset is not None or bool(self.mixture)):
            raise ValueError('`data.dataset`, or `data.mixture`, belongs to `data.source = "hub"`, and only to it')
        if self.mixture and (self.dataset, self.subset, self.split, self.field) != (None, None, "train", "text"):
            raise ValueError("`data.mixture` stands in place of `data.dataset`, `subset`, `split` and `field`")
        if self.kind != "text" and (self.source in ("stdlib", "text") or self.documents != "apart"):
            raise ValueError(f'`data.kind = "{self.kind}"` needs records, apart: `data.source` = "jsonl", "parquet" or "hub"')

    @property
    def isolates(self) -> bool:
        """Whether a document sees none of those before it in its window."""
        return self.kind != "text" or self.documents == "isolated"

    @property
    def text(self) -> str:
        """Which text it is, of those that a run may come to have."""
        if self.mixture:
            return " + ".join(f"{weight:g} {part.text}" for part, weight in self.parts)
        return f"{self.dataset}/{self.subset}/{self.split}/{self.field}"

    @property
    def parts(self) -> tuple[tuple[Data, float], ...]:
        """The data sets, each as if it were the only one, and their weights."""
        if not self.mixture:
            return ((self, 1.0),)
        found = []
        for part in self.mixture:
            own = msgspec.structs.asdict(part)
            weight = own.pop("weight")
            found.append((msgspec.structs.replace(self, mixture=(), **own), weight))
        return tuple(found)

    @property
    def from_node(self) -> bool:
        """Whether each node brings files of its own."""
        return self.source in ("text", "jsonl", "parquet")

    def check_given(self, path: Path | None) -> None:
        """Raise DataError where a node must bring files and `path`, its --data, names none."""
        if not self.from_node:
            return
        if path is None:
            cause = f"this run trains on {self.source} files of your own, and none were given."
            raise DataError(cause, remedy="Point --data at them.")
        if not path.exists():
            raise DataError(f"{path} does not exist.")
