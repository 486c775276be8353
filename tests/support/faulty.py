"""`python faulty.py ORDERS NOLOCOD-ARGUMENTS`: a daemon that does something to itself when it enters a state.

The rule: nothing of the product knows. The file ORDERS holds lines `SIDE STATE SIGNAL`, and may be written at any time. A
signal goes to the own process alone, and each once: its line is removed when the process goes on after it, so that whoever
finds no line finds no process that is about to stop; before a signal after which nothing goes on, just before it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from state_changes import side_of, state_changes

from nolocod import cli

if TYPE_CHECKING:
    import enum

    from nolocod.proto.exchange import Exchange
    from nolocod.proto.snapshot_states import Service


def main() -> None:
    path = Path(sys.argv[1])

    def orders() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    def remove(order: str) -> None:
        if order in (now := orders()):
            left = path.with_suffix(".left")
            left.write_text("\n".join(one for one in now if one != order))
            left.replace(path)

    def entered(machine: Exchange | Service, state: enum.Enum) -> None:
        for order in orders():
            side, name, what = order.split()
            if (side_of(machine), state.name) == (side, name):
                if what == "SIGKILL":
                    remove(order)
                os.kill(os.getpid(), signal.Signals[what])
                remove(order)
                return

    with state_changes(entered):
        cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
