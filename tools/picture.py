"""Makes the pictures of the README from real local testnets: docs/testnet.svg, the terminal's table halfway and the summary;
docs/page-light.png and docs/page-dark.png, the status page of one of six nodes (needs Chromium).

python -m tools.picture [terminal | page]
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nolocod.commands import terminal
from nolocod.node import data_directory
from nolocod.observe.status.terminal_table import swarm_table
from nolocod.studies import testnet
from tools import browser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nolocod.observe.status.report import StatusReport

DOCS = Path(__file__).parent.parent / "docs"
_MOST_BYTES = 250_000
"""Of one picture: the repository carries it for ever."""


def draw_terminal() -> None:
    console = Console(record=True, width=100, highlight=False)
    options = testnet.Options()

    @contextmanager
    def view(title: str) -> Iterator[Callable[[list[StatusReport | None]], None]]:
        shown = False

        def show(reports: list[StatusReport | None]) -> None:
            nonlocal shown
            if _halfway(reports, options) and not shown:
                shown = True
                console.print("$ ./testnet", f"{title.split(';')[0]}\n", swarm_table(reports), sep="\n")

        yield show

    console.print(terminal.summary_table(testnet.run(options, view, lambda _: None)))
    console.save_svg(str(DOCS / "testnet.svg"), title="nolocod testnet")


def draw_page() -> None:
    options = testnet.Options(nodes=6, model="tiny")
    with tempfile.TemporaryDirectory(prefix="nolocod-picture-") as name:
        nodes = testnet.Testnet(options, Path(name))
        try:
            nodes.start()
            for reports in nodes.watch():
                if _halfway(reports, options):
                    break
            address = f"http://{data_directory.find_running(nodes.nodes[1].paths).http}/"
            with browser.browser(Path(name) / "profile") as chromium:
                for theme in ("light", "dark"):
                    page = chromium.page(1280, 800, dark=theme == "dark")
                    page.open(address)
                    page.wait("document.getElementById('link').textContent === 'live'", 20)
                    picture = page.picture()
                    if len(picture) > _MOST_BYTES:
                        raise SystemExit(f"the {theme} page takes {len(picture)} bytes, more than {_MOST_BYTES}")
                    (DOCS / f"page-{theme}.png").write_bytes(picture)
        finally:
            nodes.stop()


def _halfway(reports: list[StatusReport | None], options: testnet.Options) -> bool:
    return all(report is not None and 2 * report.round >= options.outer_steps for report in reports)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the README's pictures.")
    parser.add_argument("what", nargs="?", choices=["terminal", "page"], help="one of them alone")
    what = parser.parse_args().what
    if what != "page":
        draw_terminal()
    if what != "terminal":
        draw_page()


if __name__ == "__main__":
    main()
