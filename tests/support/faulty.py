"""`python faulty.py ORDERS NOLOCOD-ARGUMENTS`: a daemon that does something to itself when it enters a state.

The rule: nothing of the product knows. The folder ORDERS holds empty files named `SIDE STATE.SIGNAL`, which may come and go
at any time: one that is carried out is taken first, by one system call. A signal goes to the own process alone, and each
once: an order to stop stays, as taken, until the process goes on, so that whoever finds no file finds no process that is
about to stop.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from state_changes import side_of, state_changes

from nolocod import cli

if TYPE_CHECKING:
    import enum

    from nolocod.proto.exchange import Exchange
    from nolocod.proto.snapshot_states import Service


def main() -> None:
    folder = Path(sys.argv[1])

    def entered(machine: Exchange | Service, state: enum.Enum) -> None:
        order = folder / f"{side_of(machine)} {state.name}"
        with suppress(FileNotFoundError):
            order.with_suffix(".SIGKILL").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        with suppress(FileNotFoundError):
            taken = order.with_suffix(".SIGSTOP").rename(order.with_suffix(".taken"))
            os.kill(os.getpid(), signal.SIGSTOP)
            taken.unlink()

    with state_changes(entered):
        cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
