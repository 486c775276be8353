"""The observer's HTTP pages: the run's page at /, /run.json, /metrics, /healthz, /readyz.

The rule: read only, and each answer is whole at once, so that a proxy may keep it for its readers. The page asks for /run.json
again and again: a public page has more readers than there are connections to be kept open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from nolocod.observe.run.metrics import CONTENT_TYPE, RunMetrics
from nolocod.observe.status.http import Reply, refusal
from nolocod.observe.status.server import page_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.run.report import RunReport

FRESH = 2
"""Seconds for which a proxy may give the same answer again."""
_FILES = {
    "/": ("run", "index.html"),
    "/run.js": ("run", "run.js"),
    "/graph.js": ("run", "graph.js"),
    "/run.css": ("run", "run.css"),
    **{f"/{name}": ("status", name) for name in ("page.css", "parts.js", "loss.js", "words.js", "icon.svg")},
}
_KEPT = (("cache-control", f"public, max-age={FRESH}"),)


class RunPages:
    """The answers, without a socket; `report` gives what they tell."""

    def __init__(self, report: Callable[[], RunReport]) -> None:
        self._report = report
        self._metrics = RunMetrics(report)

    def answer(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The reply to one request, whose sender may read the pages."""
        match path:
            case _ if method not in ("GET", "HEAD"):
                return refusal(405, f"{method} is not allowed: every page is read with GET", ("allow", "GET"))
            case "/metrics":
                return Reply(200, self._metrics.render(), CONTENT_TYPE)
            case "/run.json":
                return Reply(200, msgspec.json.encode(self._report()), headers=_KEPT)
            case "/healthz":
                return Reply(200, b'{"alive":true}')
            case "/readyz":
                known = self._report().known
                return Reply(200 if known else 503, msgspec.json.encode({"ready": known > 0, "members": known}))
            case _ if path in _FILES:
                return page_file(*_FILES[path])
            case _:
                return refusal(404, "no such page; the pages are /, /run.json, /metrics, /healthz and /readyz")
