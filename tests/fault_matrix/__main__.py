"""`python -m tests.fault_matrix [WORD ...]`: the fault matrix, or those of its cells that are of all these words.

A word is a side, a state or a fault. About two minutes for all of it. Exit status 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nolocod.studies.pages import Place
from tests.fault_matrix import matrix
from tests.fault_matrix.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_matrix", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--seed", type=int, default=0, help="decides everything")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between its markers there")
    options = parser.parse_args()
    if unknown := [word for word in options.words if not matrix.known(word)]:
        parser.error(f"{unknown[0]!r} is no side, state or fault. Faults are {', '.join(FAULTS)}.")
    if options.into is not None and options.words:
        parser.error("--into is for the whole matrix.")
    place = None if options.into is None else Place(options.into, "faults", "Name a page that has the table.")
    results = []
    for one in matrix.run(options.words, options.seed):
        results.append(one)
        for violation in one.verdict.violations:
            sys.stdout.write(f"BROKEN  {one.name}: {violation}\n        again: {one.replay}\n")
            sys.stdout.flush()
    if place is not None:
        place.fill(f"{matrix.summary(results)}\n\n{matrix.table(results)}")
    sys.stdout.write(f"{matrix.table(results)}\n\n{matrix.summary(results)}\n")
    return int(any(one.verdict.violations for one in results))


if __name__ == "__main__":
    raise SystemExit(main())
