"""How many cores work at a time takes.

The rule: what goes block by block takes one. A block is done before a second thread is awake, and where others use the
machine each block waits for the slowest of the threads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone; also a decorator."""
    before = torch.get_num_threads()
    if before == 1:  # as beside training
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
