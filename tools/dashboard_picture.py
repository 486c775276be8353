"""Draws docs/dashboard-swarm.png, the dashboard deploy/grafana/dashboards/swarm.json with the data of real daemons.

    python -m tools.dashboard_picture                                   # brings up five nodes and a Prometheus, ten minutes
    python -m tools.dashboard_picture --prometheus URL --out FILE.png   # what a Prometheus of yours has

The rule: what the file says is drawn, with what Prometheus answers, by the components that Grafana itself draws with
(`@grafana/ui`, in Chromium; tools/board/board.jsx has what is ours). Needs Chromium; Node with npm, which installs them into
a folder that goes away again; and Debian's package `prometheus` where it is to bring one up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.node import data_directory
from nolocod.studies import testnet
from tools import browser, panels
from tools.prometheus import prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
_PAGE = Path(__file__).parent / "board"
_OUT = ROOT / "docs" / "dashboard-swarm.png"
_WIDTH = 1280
"""Pixels, of a laptop."""
_STEP = 15
"""Seconds: Grafana's own for a data source that says nothing else; it is also how often nodes are scraped here."""
_MOST_BYTES = 250_000
"""Of the picture: the repository carries it for ever."""
_INSTALL_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the swarm's dashboard.")
    parser.add_argument("--prometheus", metavar="URL", help="one that watches nodes; without it, five of them are brought up")
    parser.add_argument("--minutes", type=float, default=10.0, help="of data (%(default)s)")
    parser.add_argument("--out", type=Path, default=_OUT, metavar="FILE", help="(%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nolocod-dashboard-") as name:
        folder, seconds = Path(name), options.minutes * 60
        with nullcontext(options.prometheus) if options.prometheus else _watched_swarm(folder, seconds) as url:
            asked = ask(panels.asking(url.rstrip("/")), time.time(), seconds)
        _bundle(folder / "page", asked)
        shown = sum(panel["type"] != "row" for panel in asked["board"]["panels"])
        options.out.write_bytes(_drawn(folder, shown))


def ask(get: panels.Get, now: float, seconds: float) -> dict[str, Any]:
    """The dashboard and the answers to all its queries, as board.jsx takes them."""
    board = json.loads((panels.DASHBOARDS / "swarm.json").read_text(encoding="utf-8"))
    to = now // _STEP * _STEP
    span = {"start": str(to - seconds), "end": str(to), "step": str(_STEP)}

    def answer(target: dict[str, Any]) -> dict[str, Any]:
        query = {"query": panels.replaced(target["expr"])}
        found = get("query", query | {"time": str(to)}) if target.get("instant") else get("query_range", query | span)
        return {"target": target, "result": found["result"]}

    notes = []
    for note in board["annotations"]["list"]:
        for series in answer(note["target"])["result"]:
            last = 0.0
            for at, value in series["values"]:  # Grafana makes one mark of values that follow each other
                if float(value) > 0 and at > last + _STEP:
                    notes.append({"at": at * 1000, "color": note["iconColor"]})
                last = at if float(value) > 0 else last
    return {
        "board": board,
        "answers": [[answer(target) for target in panel.get("targets", [])] for panel in board["panels"]],
        "notes": notes,
        "from": to - seconds,
        "to": to,
        "step": _STEP,
        "run": ", ".join(get("label/run_name/values", {"match[]": "nolocod_build_info"})),
    }


@contextmanager
def _watched_swarm(folder: Path, seconds: float) -> Iterator[str]:
    """Four nodes, a fifth that joins on the way, and the address of a Prometheus that has watched them for `seconds`."""
    options = testnet.Options(nodes=4, model="tiny", inner_steps=20, outer_steps=1000)
    nodes = testnet.Testnet(options, folder)
    with prometheus(folder, _STEP) as (url, watch):
        try:
            nodes.start()
            began = 0.0
            for reports in nodes.watch():
                if not all(reports):
                    continue
                began = began or time.monotonic()
                watch([data_directory.find_running(node.paths).http for node in nodes.nodes])
                if len(nodes.nodes) == options.nodes and time.monotonic() > began + seconds / 3:
                    nodes.join()
                if time.monotonic() > began + seconds + _STEP:
                    break
            yield url
        finally:
            nodes.stop()


def _bundle(page: Path, asked: dict[str, Any]) -> None:
    """Make the page in the new folder `page`."""
    shutil.copytree(_PAGE, page)
    # their CommonJS builds: the others take the default exports of what they import for granted, which esbuild does not give
    aliases = [f"--alias:@grafana/{name}=./node_modules/@grafana/{name}/dist/cjs/index.cjs" for name in ("data", "ui")]
    for line in (
        ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"],
        ["npx", "esbuild", "board.jsx", "--bundle", "--minify", "--jsx=automatic", "--outfile=board.js", "--log-level=error",
         "--loader:.ttf=empty", '--define:process.env.NODE_ENV="production"', *aliases],
    ):  # fmt: skip
        subprocess.run(line, cwd=page, check=True, timeout=_INSTALL_SECONDS)
    modules, fonts = page / "node_modules", page / "public" / "fonts" / "inter"  # where Grafana's server has them
    fonts.mkdir(parents=True)
    (page / "public" / "img").symlink_to(modules / "@grafana" / "ui" / "dist" / "public" / "img")
    for name, weight in (("Regular", 400), ("Medium", 500)):
        (fonts / f"Inter-{name}.woff2").symlink_to(modules / f"@fontsource/inter/files/inter-latin-{weight}-normal.woff2")
    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><link rel="stylesheet" href="board.css">'
    data = json.dumps(asked).replace("</", "<\\/")
    body = f'<div id="board"></div><script>window.ASKED = {data}</script><script src="board.js"></script>'
    (page / "index.html").write_text(head + body, encoding="utf-8")


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def _drawn(folder: Path, panels: int) -> bytes:
    """The page as Chromium shows it, once as many `panels` are there; SystemExit if it complains of anything."""
    handler = partial(_Silent, directory=str(folder / "page"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.browser(folder / "profile") as chromium:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = chromium.page(_WIDTH, 800, dark=True)
        try:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            page.wait(f"document.querySelectorAll('section').length === {panels}", 30)
            page.run(
                "document.fonts.ready.then(() => new Promise(done => setTimeout(done, 1000)))"
            )  # plots follow a frame later
            picture = page.picture(whole=True)
        finally:
            server.shutdown()
            if page.complaints:
                raise SystemExit("\n".join(page.complaints))
    if len(picture) > _MOST_BYTES:
        raise SystemExit(f"the picture takes {len(picture)} bytes, more than {_MOST_BYTES}")
    return picture


if __name__ == "__main__":
    main()
