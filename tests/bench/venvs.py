"""The neighbours' own environments: one each, outside of the repository, installed once.

The rule: nothing of a neighbour gets into our environment, and torch is the same release everywhere. Set pip's own
variables (PIP_EXTRA_INDEX_URL and so on) where the default index has no CPU build of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bench.base import BenchError

TORCH = "torch==2.13.0"
NEIGHBOURS = {
    "gloo": (TORCH, "numpy"),
    "hivemind": (TORCH, "hivemind==1.1.12"),
    "torchft": (TORCH, "numpy", "torchft-nightly==2026.10.26"),
    "lattica": ("lattica==1.0.21",),
}
"""What each environment holds."""

_INSTALL_SECONDS = 1200.0


def cache() -> Path:
    """Where the environments lie: NOLOCOD_BENCH_CACHE, or ~/.cache/nolocod-bench."""
    return Path(os.environ.get("NOLOCOD_BENCH_CACHE", "~/.cache/nolocod-bench")).expanduser()


def ensure(name: str) -> Path:
    """The interpreter of the environment `name`, installed if need be; BenchError with pip's last words if that fails."""
    folder, wanted = cache() / name, NEIGHBOURS[name]
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    if mark.exists() and mark.read_text(encoding="utf-8").split() == list(wanted):
        return python
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n", encoding="utf-8")  # nothing that follows may bring another one
    _run([sys.executable, "-m", "venv", str(folder)], name)
    _run([str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints), *wanted], name)
    mark.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return python


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{name} was not installed within {_INSTALL_SECONDS:.0f} s.") from None
    if done.returncode != 0:
        raise BenchError(f"{name} could not be installed: {done.stderr.strip()[-500:]}")
