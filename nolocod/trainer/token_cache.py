"""Where a node's text lies once it is tokens: in files that are named by all that their content follows from.

The rule: texts and tokenizers change, and each change leaves a file. What was used longest ago goes as another is written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import blake3
import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.run.data import Data

KEPT = 8
"""Texts whose tokens are kept: a node has one, or a handful of fine-tuning sets, and `nolocod eval` may have others."""


def cached(settings: Data, tokenizer: str, files: list[Path], cache: Path, *more: object) -> Path:
    """Where the tokens of `files` lie, or are to be written: named by the files' paths, sizes and times, the field and the
    `tokenizer`'s content. What goes with them may lie beside it, by the same name and another suffix."""
    facts = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    what: list[object] = [settings.source, settings.field, tokenizer, facts]
    if more:
        what += [settings.held_out, *more]
    target = cache / f"tokens-{blake3.blake3(msgspec.json.encode(what)).hexdigest()[:32]}.bin"
    if target.exists():
        os.utime(target)
    else:
        _make_room(cache)
    return target


def _make_room(cache: Path) -> None:
    """For one more."""
    used = sorted(cache.glob("tokens-*.bin"), key=lambda file: file.stat().st_mtime)
    for oldest in used[: max(0, len(used) - KEPT + 1)]:
        for file in cache.glob(f"{oldest.stem}.*"):
            file.unlink(missing_ok=True)
