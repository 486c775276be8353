"""Makes docs/testnet.svg: runs `nolocod testnet` for real, and draws its table halfway and its summary.

python tools/picture.py
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nolocod import terminal, testnet
from nolocod.status.table import SwarmRow, swarm_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.status.state import StatusReport

TARGET = Path(__file__).parent.parent / "docs" / "testnet.svg"


def main() -> None:
    console = Console(record=True, width=100, highlight=False)
    options = testnet.Options()

    @contextmanager
    def view(title: str) -> Iterator[Callable[[list[StatusReport | None]], None]]:
        shown = False

        def show(reports: list[StatusReport | None]) -> None:
            nonlocal shown
            halfway = all(report is not None and 2 * report.round >= options.outer_steps for report in reports)
            if halfway and not shown:
                shown = True
                rows = [SwarmRow(f"node-{index}", report) for index, report in enumerate(reports)]
                console.print("$ ./testnet", f"{title.split(';')[0]}\n", swarm_table(rows), sep="\n")

        yield show

    console.print(terminal.summary_table(testnet.run(options, view, lambda _: None)))
    console.save_svg(str(TARGET), title="nolocod testnet")


if __name__ == "__main__":
    main()
