"""Questions to a running Prometheus and Alertmanager.

The rule: an answer is waited for until a deadline, and what was last answered is part of the failure.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.containers.engine import CheckFailed

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL = 1.0
_ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Monitor:
    """Where both listen, on this machine."""

    prometheus: str
    alertmanager: str

    def values(self, query: str) -> dict[str, float]:
        """The answer to an instant query, by instance (or "" where the query leaves none)."""
        answer = _get(f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        return {one["metric"].get("instance", ""): float(one["value"][1]) for one in answer["data"]["result"]}

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """The alerts called `name` that Alertmanager holds."""
        listed = urllib.parse.urlencode({"filter": f'alertname="{name}"', "active": "true"})
        return list(_get(f"{self.alertmanager}/api/v2/alerts?{listed}"))


def _get(address: str) -> Any:  # noqa: ANN401 - JSON
    with urllib.request.urlopen(address, timeout=_ANSWER_SECONDS) as reply:
        return json.load(reply)


def wait(what: str, seconds: float, found: Callable[[], Any]) -> float:
    """Ask until `found` gives something true; the seconds that it took. CheckFailed at the deadline."""
    began = time.monotonic()
    last: object = None
    while time.monotonic() - began < seconds:
        with suppress(urllib.error.URLError, OSError):
            last = found()
            if last:
                return time.monotonic() - began
        time.sleep(_POLL)
    raise CheckFailed(f"{what}: not within {seconds:.0f} s (last answer: {last!r})")
