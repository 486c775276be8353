"""The command line that studies with kept trials share: tools/compare.py and tools/choices.py.

The rule: trials that were performed are kept in a file, and not performed again; a table goes into a page of docs/ only
if the whole study was done.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod.studies.pages import Place
from tools.trials import book

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.trials import Book

    Tables = Callable[[Book, int, Callable[[str], None]], str]


ON_A_GPU = 3
"""Trials at the same time on a card, which serves one process after the other."""


def parser_of(name: str, text: str) -> argparse.ArgumentParser:
    """Of `python -m tools.NAME`: what both take."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}", description=text)
    parser.add_argument("--workers", type=int, metavar="N", help=f"trials at the same time (one per core, {ON_A_GPU} on a GPU)")
    parser.add_argument("--kept", type=Path, default=Path("docs/evidence.jsonl"), metavar="FILE", help="results (%(default)s)")
    parser.add_argument("--into", type=Path, metavar="DIR", help="write the tables into their page there")
    return parser


def place_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, name: str, page: str = "evidence.md"
) -> Place | None:
    """Where the tables go, if anywhere; ends with a usage error where the study is not the whole one."""
    if options.reduced and options.into:
        parser.error("--into is for the whole study")
    return Place(options.into / page, name, "Name the folder of the page with --into.") if options.into else None


def carry_out(tables: Tables, options: argparse.Namespace, place: Place | None) -> None:
    """Perform what is not kept yet, telling of each on stderr, and show the tables."""
    workers = options.workers or (ON_A_GPU if getattr(options, "gpu", False) else os.cpu_count() or 1)
    text = tables(book(options.kept), workers, lambda line: print(line, file=sys.stderr))  # noqa: T201
    if place is not None:
        place.fill(text)
    print(text)  # noqa: T201
