"""Shows findings: as lines, in colours on a terminal; or all of them as one JSON object.

The rule: a line is shown as soon as it is known, and JSON only once it is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nolocod.doctor.examine import examine

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from nolocod.doctor.findings import Finding, Report
    from nolocod.p2p.settings import MeshSettings

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def examined(config: MeshSettings, device: str, data: Path | None, *, as_json: bool) -> bool:
    """Make all checks and show them; whether nothing failed."""
    screen = Screen()
    report = trio.run(examine, config, (lambda _: None) if as_json else screen.show, device, data)
    if as_json:
        screen.dump(report)
    else:
        screen.close(report)
    return report.ok


class Screen:
    """Shows findings one by one, and their counts at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def show(self, finding: Finding) -> None:
        """One check."""
        self._console.print(_row(finding))

    def dump(self, report: Report) -> None:
        """All as JSON."""
        self._console.out(msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), highlight=False)

    def close(self, report: Report) -> None:
        """The counts."""
        counts = {status: sum(one.status == status for one in report.findings) for status in _STYLES}
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        self._console.print(Text(f"{summary}. Codes: docs/doctor.md.", style="bold" if report.ok else _STYLES["fail"]))


def _row(finding: Finding) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_column(no_wrap=True, width=7)
    row.add_column(no_wrap=True, width=3)
    row.add_column(no_wrap=True, width=15)
    row.add_column(overflow="fold")
    style = _STYLES[finding.status]
    text = Text(finding.found, style="dim" if finding.status == "skipped" else "")
    if finding.about:
        text = Text(f"{finding.about}\n", style="dim") + text
    row.add_row(Text(finding.status, style=style), finding.code, finding.name, text)
    if finding.remedy:
        row.add_row("", "", "", Padding(Text(f"→ {finding.remedy}", style=style), 0))
    return row
