"""`python faulty.py ORDERS NOLOCOD-ARGUMENTS`: a daemon that does something to itself when it enters a state.

The rule: nothing of the product knows. The file ORDERS holds lines `SIDE STATE SIGNAL`, and may be written at any time; a
line is removed just before its signal is sent, to the own process alone, so each is done once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nolocod import cli
from nolocod.sim.taps import side_of, tapped

if TYPE_CHECKING:
    import enum

    from nolocod.proto.exchange import Exchange
    from nolocod.proto.serving import Service


def main() -> None:
    path = Path(sys.argv[1])

    def entered(machine: Exchange | Service, state: enum.Enum) -> None:
        orders = path.read_text().splitlines() if path.exists() else []
        for order in orders:
            side, name, what = order.split()
            if (side_of(machine), state.name) == (side, name):
                left = path.with_suffix(".left")
                left.write_text("\n".join(one for one in orders if one != order))
                left.replace(path)
                os.kill(os.getpid(), signal.Signals[what])
                return

    with tapped(entered):
        cli.main(sys.argv[2:])


if __name__ == "__main__":
    main()
