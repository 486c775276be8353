"""One end of utilisation.py, inside its network: a daemon, and the eyes on it, for its status page is not seen outside.

The rule: answers as workers do (workers/talk.py); rank 0 founds the run, and is the one that is measured.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nolocod.run.run_file import read_run_file
from nolocod.studies.daemons import Daemon
from tests.bench.training import Cores, founder, rate, started
from tests.bench.workers.talk import Talk

_OPTIONS = ("--threads", "1", "--log-level", "error", "--checkpoint-every", "3600")
"""Checkpoints have nothing to do with exchanges, and would fall into one measurement or the other."""
_PAIR_SECONDS = 300.0


class End:
    def __init__(self, rank: int, host: str, folder: Path, seconds: float, core: int) -> None:
        # the measured one's trainer has a core of its own; everything else has the others, on which this runs
        self._cores = Cores(frozenset([core]), Cores.of_machine().others)
        self._run_file, self._folder = folder / "run.toml", folder / f"rank-{rank}"
        self._rank, self._listen, self._seconds = rank, f"{host}:0", seconds
        self._daemons = ExitStack()

    def found(self) -> dict[str, Any]:
        """Start a daemon that founds a run; the measured one's trainer gets its core."""
        self._folder.mkdir()
        run, root = read_run_file(self._run_file), self._folder / "founder"
        own = founder(run, root, self._cores, *_OPTIONS[-2:], pin=self._rank == 0, listen=self._listen)
        self._daemon = self._daemons.enter_context(own)
        return {"address": self._daemon.address}

    def alone(self) -> dict[str, Any]:
        """Measure it; the other trains beside it, in a run of its own."""
        return asdict(rate(self._daemon, self._seconds))

    def join(self, address: str) -> dict[str, Any]:
        """Leave the own run, and join that of the other."""
        self._daemons.close()
        joined = Daemon(self._folder / "joined", *_OPTIONS, listen=self._listen)
        self._daemons.enter_context(started(joined, self._cores, "join", "--bootstrap", address))
        return {}

    def watch(self) -> dict[str, Any]:
        """Measure the founder beside its partner, from one paired outer step to another."""
        self._daemon.wait("its first exchange", _PAIR_SECONDS, lambda report: report.outer_paired > 0)
        return asdict(rate(self._daemon, self._seconds, paired=True))

    def close(self) -> None:
        self._daemons.close()


def main() -> None:
    rank, host, folder, seconds, core = sys.argv[1:]
    end = End(int(rank), host, Path(folder), float(seconds), int(core))
    Talk().serve({name: getattr(end, name) for name in ("found", "alone", "join", "watch")}, end.close)


if __name__ == "__main__":
    main()
