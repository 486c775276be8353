"""`python -m tests.bench.outage`: two daemons on a data set of a hub that goes away three times.

The rule: the daemons are as users start them, and the hub's libraries too; the hub is a server on this machine that refuses
connections meanwhile. Inner steps are slept (tests/support/slowed.py), so that their rate tells of text alone. At last one
daemon is killed and started again. It is an error where one ended by itself, where steps became fewer in an outage, where an
outage was not told, or where text took long to come back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nolocod.run import presets
from nolocod.run.data import Data
from nolocod.run.manifest import Evaluation, Inner, Manifest
from nolocod.studies import daemons
from nolocod.studies.daemons import Daemon, DaemonError
from tests.bench.slow import SLOWED
from tests.support import hub
from tests.support.told import IN_JSON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nolocod.observe.status.report import StatusReport

_STEP = 0.1
"""Seconds of an inner step."""
_FILES, _BYTES = 200, 8_000_000
"""A file lasts for a quarter of a minute: what a node holds of the data set, and has read ahead, is soon used up."""
_LEAST = 0.9
"""Of the steps a second before, those in an outage."""
_BACK = 90.0
"""Seconds from the hub's return to new text: it is asked once a minute."""
_RESUMES = 10.0
_START = 300.0


def files(seed: int) -> dict[str, bytes]:
    """A data set of JSON lines."""
    rng, found = random.Random(seed), {"README.md": b"---\n---\n"}
    for number in range(_FILES):
        lines, size = [], 0
        while size < _BYTES // _FILES:
            text = " ".join(f"{rng.getrandbits(20):x}" for _ in range(rng.randrange(40, 400)))
            lines.append(json.dumps({"text": text}))
            size += len(lines[-1])
        found[f"{number:02}.jsonl"] = "\n".join(lines).encode()
    return found


def told(log: Path, event: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """When, and what, of each such event of a daemon."""
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            one: dict[str, Any] = json.loads(line)
            if one["event"] == event:
                yield _seconds(one["time"]), one["fields"]


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def steps_a_second(node: Daemon, seconds: float) -> float:
    before = node.wait("a report", 60, lambda _: True).inner_steps
    began = time.monotonic()
    time.sleep(seconds)
    return (node.wait("a report", 60, lambda _: True).inner_steps - before) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each outage (%(default)s)")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the daemons' directories and logs there")
    options = parser.parse_args()
    away = 60 * options.minutes
    wrong: list[str] = []
    with ExitStack() as stack:
        root = stack.enter_context(daemons.folder(options.keep))
        server = hub.Hub(files(0))
        stack.callback(server.down)
        os.environ |= {"HF_ENDPOINT": server.url, "HF_HOME": str(root / "hub")}
        nodes = [Daemon(root / name, "--threads", "1", *IN_JSON) for name in ("first", "second")]
        for node in nodes:
            node.program = [str(SLOWED), str(_STEP), "1e9", "right"]
        stack.callback(daemons.end, nodes, 30.0)
        run = Manifest(
            name="outage",
            model=presets.MODELS["tiny"],
            data=Data(source="hub", dataset=hub.NAME),
            inner=Inner(steps=20, batch=4, sequence=64, optimizer="adamw"),
            evaluation=Evaluation(batches=1),
        )
        daemons.found(run, nodes[0].paths.root)
        nodes[0].start("start")
        nodes[0].wait("its first inner steps", _START, lambda report: report.inner_steps > 0)
        nodes[1].start("join", "--bootstrap", nodes[0].address)
        nodes[1].wait("its first pair", _START, lambda report: report.outer_paired > 0)
        usual = steps_a_second(nodes[0], 30.0)
        _say(f"with the hub: {usual:.1f} inner steps a second")
        for number in range(1, options.times + 1):
            server.down()
            time.sleep(away / 2)  # what was read ahead is trained on first
            rate = steps_a_second(nodes[0], away / 2)
            asked = server.asked
            server.up()
            returned = time.time()
            for node in nodes:
                node.wait("new text", _BACK, partial(_supplied, node, returned))
            back = max(at for node in nodes for at, fields in told(node.log, "text_supply") if not fields["trouble"])
            _say(
                f"outage {number}, {options.minutes:g} min: {rate:.1f} inner steps a second; "
                f"new text {back - returned:.0f} s after the hub's return, {server.asked - asked} requests"
            )
            if rate < _LEAST * usual:
                wrong.append(f"outage {number}: {rate:.1f} inner steps a second instead of {usual:.1f}")
        nodes[1].kill()
        began = time.time()
        nodes[1].start("start")
        nodes[1].wait("its next inner steps", _START, lambda report: report.inner_steps > 0)
        loaded = next(at for at, _ in told(nodes[1].log, "weights_loaded") if at > began)
        steps = next(at for at, _ in told(nodes[1].log, "inner_steps") if at > loaded)
        _say(f"killed and started again: weights after {loaded - began:.1f} s, inner steps {steps - loaded:.1f} s later")
        if steps - loaded > _RESUMES:
            wrong.append(f"text came {steps - loaded:.1f} s after the weights")
        for node in nodes:
            outages = [bool(fields["trouble"]) for _, fields in told(node.log, "text_supply")]
            if outages != [True, False] * options.times:
                wrong.append(f"{node.paths.root.name} told {outages} of its text")
    sys.exit("\n".join(wrong) if wrong else 0)


def _supplied(node: Daemon, since: float, _: StatusReport) -> bool:
    return any(at > since and not fields["trouble"] for at, fields in told(node.log, "text_supply"))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except DaemonError as error:
        sys.exit(str(error))
