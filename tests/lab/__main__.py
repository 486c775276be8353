"""`python -m tests.lab [SCENARIO ...] [--full]`: the scenarios behind NATs, and docs/network.md from their figures.

The rule: a table says by which command it was made and when it was; scenarios that were not run keep the tables of their
last run (docs/network.json holds them all).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.errors import NolocodError
from tests.lab import observers, scenarios
from tests.lab.nodes import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.lab.scenarios import Churn, Meeting, Stack
    from tests.lab.topology import Kind

_DOCS = Path(__file__).resolve().parents[2] / "docs"
_TITLE = """# Behind NATs

Real daemons in network namespaces on one machine, behind routers made of Linux's own NAT (`tests/lab`). A *cone* router
keeps its ports and drops what nobody inside has asked for; a *symmetric* one draws a port for each connection. Each table
names the command that made it; all of them: `python -m tests.lab --full` (root, Linux, a C compiler, and the packages
iproute2, iptables and conntrack).
"""


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    raw: Any
    """The figures that the rows were made of."""
    wrong: str = ""
    """Why the scenario counts as failed; its figures are not kept then."""


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _spread(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):.1f} s ({min(found):.1f} to {max(found):.1f})" if found else "never"


def punching(root: Path, full: bool) -> Table:
    rows, raw = [], {}
    for rtt in (0.0, 80.0):
        found = scenarios.meetings(root / f"{rtt:g}", rtt=rtt, trials=10 if full else 2)
        good = [one for one in found if one.straight is not None and one.straight <= scenarios.MEETING]
        paired = sum(one.paired is not None and "punched" in one.reach for one in found)
        told = _spread([one.straight for one in found])
        rows.append((f"{rtt:g} ms", f"{len(good)} of {len(found)}", told, f"{paired} of {len(found)}"))
        raw[f"{rtt:g}"] = [asdict(one) for one in found]
    head = ("round trip", f"straight within {scenarios.MEETING:g} s", "after meeting, median (range)", "paired steps over it")
    return Table("Two nodes behind different cone routers", head, rows, raw)


def symmetric(root: Path, full: bool) -> Table:
    rows, raw = [], {}
    sides: tuple[tuple[Kind, Kind], ...] = (("symmetric", "cone"), ("symmetric", "symmetric"))
    for kinds in sides:
        found = scenarios.meetings(root / "-".join(kinds), kinds, trials=3 if full else 1)
        relayed = sum(one.reach == ("relayed", "relayed") for one in found)
        paired = sum(one.paired is not None for one in found)
        told = "; ".join(dict.fromkeys(f"{one.nat[0]}: {one.why[0]}" for one in found))
        rows.append((" and ".join(kinds), f"{relayed} of {len(found)}", f"{paired} of {len(found)}", told))
        raw["-".join(kinds)] = [asdict(one) for one in found]
    head = ("routers", "stay relayed", "exchange committed", "what the first node's status says")
    return Table("One or both behind symmetric routers", head, rows, raw)


def ipv6(root: Path, full: bool) -> Table:
    rows, raw = [], {}
    cases: dict[str, tuple[Stack, Kind]] = {
        "IPv6 alone, firewalls": ("6", "cone"),
        "both; IPv4 behind cones": ("both", "cone"),
        "both; IPv4 behind symmetric routers": ("both", "symmetric"),
    }
    for case, (stack, kind) in cases.items():
        found = scenarios.meetings(root / f"{stack}-{kind}", (kind, kind), rtt=40.0, trials=2 if full else 1, stack=stack)
        good = [one for one in found if one.straight is not None and one.straight <= scenarios.MEETING]
        rows.append(
            (
                case,
                ", ".join(sorted({str(nat) for one in found for nat in one.nat})),
                f"{len(good)} of {len(found)}, {_spread([one.straight for one in found])}",
                _reaches(found),
                f"{sum(one.over6 for one in found)} of {len(found)}",
                f"{sum(one.paired is not None for one in found)} of {len(found)}",
            )
        )
        raw[case] = [asdict(one) for one in found]
    head = (
        "the two nodes have",
        "class",
        f"straight within {scenarios.MEETING:g} s, after",
        "connected",
        "over IPv6",
        "paired steps over it",
    )
    return Table("IPv6, which routers filter and do not translate, 40 ms apart", head, rows, raw)


def throughput(root: Path, full: bool) -> Table:
    rows, raw = [], {}
    ways: dict[str, tuple[Kind, Kind]] = {
        "direct": ("open", "open"),
        "punched": ("cone", "cone"),
        "relayed": ("symmetric", "cone"),
    }
    for way, kinds in ways.items():
        load = Load(hidden=512, steps=20)
        found = scenarios.meetings(root / way, kinds, rtt=20.0, trials=3 if full else 1, load=load, rate=100.0)
        rates = [one.rate for one in found if one.rate is not None]
        told = f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})" if rates else "none"
        rows.append((way, " and ".join(kinds), _reaches(found), told))
        raw[way] = [asdict(one) for one in found]
    head = ("way", "routers", "connected", "MB/s of one exchange, both ways together")
    return Table("Exchanges over lines of 100 Mbit/s, 20 ms apart", head, rows, raw)


def _reaches(found: Sequence[Meeting]) -> str:
    return ", ".join(sorted({str(reach) for one in found for reach in one.reach}))


def relay(root: Path, full: bool) -> Table:
    found = [scenarios.relay_killed(root / str(number)) for number in range(3 if full else 1)]
    rows = [
        (
            "yes" if one.during else "no",
            _seconds(one.elsewhere),
            _seconds(one.paired),
            "yes" if one.agreed else "no",
        )
        for one in found
    ]
    head = ("in mid-exchange", "both hold two places elsewhere after", "next exchange after", "receipts and steps agree")
    return Table("The relay of two nodes behind symmetric routers killed with -9", head, rows, [asdict(one) for one in found])


def lines(root: Path, full: bool) -> Table:
    down = 60.0 if full else 20.0
    found = scenarios.recoveries(root, ("forgotten", "moved", "readdressed", "cut"), down)
    what = {
        "forgotten": "the router forgets all mappings",
        "moved": "the router gets another address",
        "readdressed": "the host gets another address",
        "cut": f"the line is dead for {down:g} s",
    }
    rows = [(what[one.accident], _seconds(one.heard), _seconds(one.paired)) for one in found]
    head = ("what happens", "heard by a public node after", "exchange begun and committed after")
    return Table("A node's line fails, counted from its return", head, rows, [asdict(one) for one in found])


_WORDS = {
    "memory": "memory of the network process (MiB)",
    "threads": "its threads",
    "files": "its open files",
    "tasks": "its tasks",
}


def _held(found: Churn, what: str) -> str:
    return ", ".join(f"{value:.0f}" for value in found.held[what])


def _growth(found: Churn, what: str) -> str:
    slopes = found.growth[what]
    return f"{statistics.median(slopes):+.2f} ({min(slopes):+.2f} to {max(slopes):+.2f})"


def churn(root: Path, full: bool) -> Table:
    found = scenarios.churn(root) if full else scenarios.churn(root, nodes_in_all=8, homes=3, minutes=2.0, every=30.0)
    rows = [
        ("live nodes that pair", f"{found.paired} of {found.asked}"),
        ("tried exchanges that succeed", f"{found.success:.1%}" if found.success is not None else "none tried"),
        ("their outcomes", ", ".join(f"{name} {count}" for name, count in sorted(found.tried.items()))),
        *(
            (f"{what}, at each {'minute' if full else 'half minute'}: median of {found.steady}", _held(found, name))
            for name, what in _WORDS.items()
        ),
        *(
            (f"growth of {what} in a minute, after the first third: median (range)", _growth(found, name))
            for name, what in _WORDS.items()
        ),
    ]
    title = f"{found.nodes} nodes for {found.minutes:g} minutes, one killed and one joined each minute"
    return Table(title if full else title.replace("each minute", "each half minute"), ("what", "figure"), rows, asdict(found))


def doctor(root: Path, full: bool) -> Table:
    found = scenarios.diagnoses(root)
    rows = [
        (
            one.router,
            str(one.status),
            one.reachability.get("status", ""),
            one.reachability.get("found", ""),
            ", ".join(one.troubles),
        )
        for one in found
    ]
    head = ("router", "exit status", "about reachability", "in words", "warnings and failures")
    return Table("`nolocod doctor` behind each router", head, rows, [asdict(one) for one in found])


def observer(root: Path, full: bool) -> Table:
    found = observers.observed(root, 5.0 if full else 2.0)
    title = "An observer behind a cone router, of 12 nodes behind routers of all kinds"
    return Table(title, ("what", "figure"), observers.rows(found), asdict(found), found.wrong)


SCENARIOS: dict[str, Callable[[Path, bool], Table]] = {
    "punching": punching,
    "symmetric": symmetric,
    "ipv6": ipv6,
    "throughput": throughput,
    "relay": relay,
    "lines": lines,
    "churn": churn,
    "doctor": doctor,
    "observer": observer,
}


def to_markdown(tables: dict[str, dict[str, Any]]) -> str:
    parts = [_TITLE]
    for name in SCENARIOS:
        if name not in tables:
            continue
        table = tables[name]
        lines_ = [f"## {table['title']}", "", "| " + " | ".join(table["head"]) + " |", "|" + "---|" * len(table["head"])]
        lines_ += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table["rows"]]
        lines_ += ["", f"`{table['command']}`, {table['when']}, {table['machine']}."]
        parts.append("\n".join(lines_) + "\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; all by default")
    parser.add_argument("--full", action="store_true", help="the long forms, and docs/network.md from their figures")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the nodes' directories and logs there")
    options = parser.parse_args()
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}.")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process stays behind
    root = options.keep or Path(tempfile.mkdtemp(prefix="nolocod-lab-"))
    failed = False
    try:
        for name in options.scenarios or SCENARIOS:
            failed |= not _run(name, root / name, options.full)
    except KeyboardInterrupt:
        sys.exit("interrupted.")
    finally:
        if options.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(failed)


def _run(name: str, root: Path, full: bool) -> bool:
    began = time.monotonic()
    try:
        table = SCENARIOS[name](root, full)
    except NolocodError as error:
        sys.stdout.write(f"--- {name}: {error}\n")
        return False
    entry = {
        **{name: value for name, value in asdict(table).items() if name != "wrong"},
        "command": f"python -m tests.lab {name}{' --full' if full else ''}",
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, Linux {platform.release().partition('-')[0]}",
    }
    known = _DOCS / "network.json"
    tables = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    sys.stdout.write(
        to_markdown({name: json.loads(json.dumps(entry))}).removeprefix(_TITLE) + f"({time.monotonic() - began:.0f} s)\n"
    )
    if table.wrong:
        sys.stdout.write(f"--- {name}: {table.wrong}.\n")
    sys.stdout.flush()
    if full and not table.wrong:
        tables[name] = json.loads(json.dumps(entry))
        known.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
        (_DOCS / "network.md").write_text(to_markdown(tables), encoding="utf-8")
    return not table.wrong


if __name__ == "__main__":
    main()
