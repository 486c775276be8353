"""How a process that trains behaves on its owner's machine.

The rule: threads and priority are the owner's, libraries keep their talk to themselves, and memory that runs out is an error of
ours.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nolocod.errors import ModelTooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.trainer.pipe import Setup


def quiet() -> None:
    """Before torch is imported."""
    told = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    told |= {"TRANSFORMERS_VERBOSITY": "error", "OMP_WAIT_POLICY": "PASSIVE"}  # who waits takes no core from who works
    told |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # freed parts of unlike sizes are one again
    os.environ.update(told | dict(os.environ))
    warnings.filterwarnings("ignore", module=r"(torch|transformers|datasets)\b")
    logging.getLogger("torch").setLevel(logging.ERROR)


@contextmanager
def importing() -> Iterator[None]:
    """While a process takes in its libraries. Nothing of them is garbage. To look for it takes a sixth of the time then, and
    later a full collection of a trainer's 340,000 objects held an inner step for 0.2 s, and of a network process's 110,000
    all that it does for 0.06 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle_in(setup: Setup) -> None:
    """Take the owner's threads and priority, for this thread and those that it will start."""
    import torch

    from nolocod.trainer.compiled import keep_in

    os.environ.setdefault("NUMBA_CACHE_DIR", str(setup.cache / "loops"))  # where a package's own folder cannot be written
    if setup.threads:
        torch.set_num_threads(setup.threads)
    if setup.compile:
        keep_in(setup.cache)
    if setup.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    if setup.nice:
        os.setpriority(os.PRIO_PROCESS, 0, max(setup.nice, os.getpriority(os.PRIO_PROCESS, 0)))


def keep_to_one_thread() -> None:
    """What is done beside training takes one core, and leaves the others to it."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def memory_errors() -> Iterator[None]:
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        first = str(error).splitlines()[0] if str(error) else "MemoryError"
        raise ModelTooLargeError(f"memory ran out ({first}).") from error
