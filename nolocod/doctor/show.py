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

    from nolocod.doctor.findings import Finding, Report
    from nolocod.p2p.settings import MeshSettings

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def examined(config: MeshSettings, devices: str, data: Path | None, *, as_json: bool) -> bool:
    """Make all checks and show them; whether nothing failed."""
    console = Console(highlight=False)
    show = (lambda _: None) if as_json else (lambda finding: console.print(row(finding)))
    report = trio.run(examine, config, show, devices, data)
    if as_json:
        console.out(msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), highlight=False)
    else:
        console.print(counts(report))
    return report.ok


def counts(report: Report) -> Text:
    """How many findings there are of each status."""
    found = {status: sum(one.status == status for one in report.findings) for status in _STYLES}
    summary = ", ".join(f"{count} {status}" for status, count in found.items() if count)
    return Text(f"{summary}. Codes: docs/doctor.md.", style="bold" if report.ok else _STYLES["fail"])


def row(finding: Finding) -> Table:
    """One line, or more where it has a remedy."""
    table = Table.grid(padding=(0, 1))
    for width in (7, 3, 15):
        table.add_column(no_wrap=True, width=width)
    table.add_column(overflow="fold")
    style = _STYLES[finding.status]
    text = Text(finding.found, style="dim" if finding.status == "skipped" else "")
    if finding.about:
        text = Text(f"{finding.about}\n", style="dim") + text
    table.add_row(Text(finding.status, style=style), finding.code, finding.name, text)
    if finding.remedy:
        table.add_row("", "", "", Padding(Text(f"→ {finding.remedy}", style=style), 0))
    return table
