"""Makes the pictures of the README, docs/run-light.png and docs/run-dark.png: the run's page, of what an observer knew of real
nodes (needs Chromium).

python -m tests.lab observer --full --keep DIR
python -m tools.picture DIR/observer/run.json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import msgspec
import trio

from nolocod.observe.run.pages import RunPages
from nolocod.observe.run.report import RunReport
from nolocod.observe.status.server import serve_http
from nolocod.units import Address
from tools import browser

DOCS = Path(__file__).parent.parent / "docs"
_SIZE = (1440, 900)
_MOST_BYTES = 250_000
"""Of one picture: the repository carries it for ever."""


async def serve(report: RunReport) -> None:
    """Serve the page of what an observer said, and draw it in both themes."""
    async with trio.open_nursery() as nursery:
        where = await nursery.start(serve_http, Address("127.0.0.1", 0), RunPages(lambda: report))
        await trio.to_thread.run_sync(draw, f"http://{where}/")
        nursery.cancel_scope.cancel()


def draw(address: str) -> None:
    with tempfile.TemporaryDirectory(prefix="nolocod-picture-") as name, browser.browser(Path(name) / "profile") as chromium:
        for theme in ("light", "dark"):
            page = chromium.page(*_SIZE, dark=theme == "dark")
            page.open(address)
            page.wait("document.getElementById('link').textContent === 'live'", 20)
            picture = page.picture()
            if len(picture) > _MOST_BYTES:
                raise SystemExit(f"the {theme} page takes {len(picture)} bytes, more than {_MOST_BYTES}")
            (DOCS / f"run-{theme}.png").write_bytes(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the README's pictures.")
    parser.add_argument("report", type=Path, help="a /run.json")
    trio.run(serve, msgspec.json.decode(parser.parse_args().report.read_bytes(), type=RunReport))


if __name__ == "__main__":
    main()
