"""Main memory that is ours to take.

The rule: where a container's limit (cgroup v2) leaves less than the machine has, the limit counts; whoever goes beyond it is
killed. What the kernel can drop of a container's files is free, as it is on a machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def free() -> int:
    """Bytes that can be allocated."""
    return min([psutil.virtual_memory().available, *(max(0, limit - held) for limit, held in _limits())])


def total() -> int:
    """Bytes, in use or not."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def held() -> int:
    """Bytes that this process has."""
    return psutil.Process().memory_info().rss


def _limits() -> Iterator[tuple[int, int]]:
    """Of the control group of this process, and of those around it: the limit, if there is one, and what is held of it."""
    try:
        own = next(line[3:] for line in _OWN.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):  # no Linux, or version 1
        return
    inner = _GROUPS / own.strip("/")
    for folder in (inner, *inner.parents):
        if not folder.is_relative_to(_GROUPS):
            return
        try:
            limit = (folder / "memory.max").read_text().strip()
            held = int((folder / "memory.current").read_text())
            facts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # the outermost group has none, and a container does not see those around its own
            continue
        if limit != "max":
            yield int(limit), held - int(facts.get("inactive_file", 0))
