"""`python -m tests.fuzz.child TARGET SEEDS [libFuzzer's options]`: fuzzes one target, as `tests.fuzz` has it do.

The target's seeds are written into the folder SEEDS first: they are made by the code that is fuzzed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import atheris


def main() -> None:
    name, folder, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["nolocod"]):
        targets = importlib.import_module("tests.fuzz.targets")
        if name in targets.TENSORS:
            importlib.import_module("tests.fuzz.tensors")
    target = targets.TARGETS[name]
    for number, seed in enumerate(target.seeds):
        (Path(folder) / f"seed-{number}").write_bytes(seed)

    def one(raw: bytes) -> None:
        target.run(bytes(raw))

    # what libFuzzer says to a shell where it begins a process of its own, as for a merge
    again = f"{sys.executable} -m tests.fuzz.child {name} {folder}"
    atheris.Setup([again, *options, f"-max_len={target.most}"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
