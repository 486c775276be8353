"""One end of utilisation.py, inside its network: a daemon, and the eyes on it, for its status page is not seen outside.

The rule: answers as workers do (workers/talk.py); rank 0 founds the run, and is the one that is measured.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nolocod.node import data_directory
from nolocod.run.paths import DataDir
from nolocod.studies.benchmarks.training import WARM_UP, Setting, cores, daemon, give_core, rate, wait
from tests.bench.workers.talk import Talk

_NO_CHECKPOINTS = ("--checkpoint-every", "3600")
"""They have nothing to do with exchanges, and would fall into one measurement or the other."""


class End:
    def __init__(self, rank: int, host: str, folder: Path, seconds: float, core: int) -> None:
        # the measured one's trainer has a core of its own; everything else has the others, on which this runs
        _, others = cores()
        self._setting = Setting(folder / "run.toml", folder, seconds, frozenset([core]), others, host)
        self._paths = DataDir(folder / f"node-{rank}")
        self._daemons = ExitStack()

    def found(self) -> dict[str, Any]:
        """Start a daemon that founds a run."""
        data_directory.found(self._paths, self._setting.run_file)
        self._process = self._daemons.enter_context(daemon(self._setting, self._paths, "start", *_NO_CHECKPOINTS))
        wait(self._paths, self._process, lambda report: report.inner_steps >= WARM_UP)
        return {"address": data_directory.find_running(self._paths).addresses[0]}

    def alone(self) -> dict[str, Any]:
        """Measure it; the other trains beside it, in a run of its own."""
        give_core(self._setting, self._process)
        return asdict(rate(self._paths, self._setting.seconds))

    def join(self, address: str) -> dict[str, Any]:
        """Leave the own run, and join that of the other."""
        self._daemons.close()
        self._paths = DataDir(self._paths.root.with_name(f"{self._paths.root.name}-joined"))
        self._daemons.enter_context(daemon(self._setting, self._paths, "join", "--bootstrap", address, *_NO_CHECKPOINTS))
        return {}

    def watch(self) -> dict[str, Any]:
        """Measure the founder beside its partner, from one paired outer step to another."""
        wait(self._paths, self._process, lambda report: report.outer_paired > 0)
        seen = rate(self._paths, self._setting.seconds, paired=True)
        return asdict(seen)

    def close(self) -> None:
        self._daemons.close()


def main() -> None:
    rank, host, folder, seconds, core = sys.argv[1:]
    end = End(int(rank), host, Path(folder), float(seconds), int(core))
    Talk().serve({name: getattr(end, name) for name in ("found", "alone", "join", "watch")}, end.close)


if __name__ == "__main__":
    main()
