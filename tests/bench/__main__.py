"""`python -m tests.bench`: ours beside the neighbours, and our own benches; writes docs/benchmarks.md and .json.

The rule: a part that is measured again replaces its old figures, and the page is always made from all that are there.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.errors import NolocodError
from tests.bench import contest, exchange_run, messages, plan, report, transport, utilisation, wan
from tests.bench.base import BenchError, Options
from tests.bench.node import node
from tests.bench.training import training

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
_PARTS = ("exchange", "transport", "relay", "training", "node", "wan", "utilisation", "messages", "plan")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(_PARTS)} (all)")
    parser.add_argument("--values", type=size, default="100m", metavar="N", help="float32 values that are exchanged (100m)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured")
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {', '.join(one.name for one in contest.CONTESTANTS)}")
    parser.add_argument("--into", type=Path, default=_DOCS, metavar="DIR", help="where benchmarks.md and .json are")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(_PARTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no such part")
    nobody = set(filter(None, options.only.split(","))) - {one.name for one in contest.CONTESTANTS}
    if nobody:
        parser.error(f"--only {', '.join(sorted(nobody))}: no such contestant")
    if options.rounds < 1:
        parser.error("--rounds must be positive")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no process stays behind
    try:
        run(options, _say)
    except NolocodError as error:
        sys.exit(str(error))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure the parts that were asked for, and write the page after each."""
    kept = options.into / "benchmarks.json"
    table: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for part in options.parts or _PARTS:
        table["machine"] = report.machine()
        table[part] = _measure(part, options, say)
        options.into.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        (options.into / "benchmarks.md").write_text(report.to_markdown(table), encoding="utf-8")
        if wrong := table[part].get("wrong"):
            raise BenchError("; ".join(wrong))


def _measure(part: str, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    rounds = options.rounds
    match part:
        case "exchange":
            only = frozenset(filter(None, options.only.split(",")))
            return contest.run(options.values, rounds, only, say).to_table()
        case "transport":
            return transport.transport(rounds, say).to_table()
        case "relay":
            return transport.relay(rounds, say).to_table()
        case "training":
            result = training(Options(pairs=rounds), say)
            return {"text": result.to_text(), "figures": result.to_figures()}
        case "node":
            joined = node(Options(model="10m"), say)
            return {"text": joined.to_text(), "figures": asdict(joined)}
        case "wan":
            return wan.measure(rounds, say).to_table()
        case "messages":
            worst = messages.measure(rounds, say)
            return {"text": worst.to_text(), "figures": worst.to_figures()}
        case "plan":
            return plan.measure(say)
        case _:
            return utilisation.measure(Options(model="10m", codec="bfloat16", pairs=min(3, rounds)), say).to_table()


def size(text: str) -> int:
    """Read "100m", "2.5m", "800k" or a plain number of values; ValueError if a model cannot have so many."""
    factor = {"k": 1_000, "m": 1_000_000, "b": 1_000_000_000}.get(text[-1:].lower(), 1)
    values = float(text[:-1] if factor > 1 else text) * factor
    if not exchange_run.LEAST <= values <= exchange_run.MOST:
        raise ValueError(f"{text} is too small or too large")
    return round(values)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
