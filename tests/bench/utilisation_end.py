"""One end of utilisation.py, inside its network: a daemon, and the eyes on it, for its status page is not seen outside.

The rule: answers as workers do (workers/talk.py); rank 0 founds the run, and is the one that is measured.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nolocod import datadir
from nolocod.benchmarks.training import WARM_UP, Setting, cores, daemon, give_core, rate, wait
from nolocod.config import DataDir
from tests.bench.workers.talk import Talk


class End:
    def __init__(self, rank: int, host: str, folder: Path, seconds: float) -> None:
        own, others = cores()
        # the measured one's trainer has a core of its own; everything else has the others
        self._setting = Setting(folder / "run.toml", folder, seconds, own, others, host)
        self._paths = DataDir(folder / f"node-{rank}")
        self._daemons = ExitStack()

    def found(self) -> dict[str, Any]:
        """Start the daemon that founds the run, and measure it alone."""
        datadir.found(self._paths, self._setting.run_file)
        self._process = self._daemons.enter_context(daemon(self._setting, self._paths, "start"))
        wait(self._paths, self._process, lambda report: report.inner_steps >= WARM_UP)
        give_core(self._setting, self._process)
        alone = rate(self._paths, self._setting.seconds)
        return {"address": datadir.find_running(self._paths).addresses[0], "alone": alone.tokens_per_second}

    def join(self, address: str) -> dict[str, Any]:
        self._daemons.enter_context(daemon(self._setting, self._paths, "join", "--bootstrap", address))
        return {}

    def watch(self) -> dict[str, Any]:
        """Measure the founder beside its partner, from one paired outer step to another."""
        wait(self._paths, self._process, lambda report: report.outer_paired > 0)
        seen = rate(self._paths, self._setting.seconds, paired=True)
        return {"tokens": seen.tokens_per_second, "busy": seen.busy, "seconds": seen.seconds, "paired": seen.paired}

    def close(self) -> None:
        self._daemons.close()


def main() -> None:
    end = End(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
    Talk().serve({name: getattr(end, name) for name in ("found", "join", "watch")}, end.close)


if __name__ == "__main__":
    main()
