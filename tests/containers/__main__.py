"""Run the image and the compose testnet on this machine, from nothing: `python -m tests.containers`, as root on Debian 12.

It makes a container engine of its own, stand-ins for the images that a registry would give, builds, brings the testnet
up, looks at it, kills a node, and takes all away again. Exit status 0: all holds; 1: something does not; 77: this machine
cannot run it, and nothing was tested.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.containers import stand_ins
from tests.containers.engine import CheckFailed, Unavailable, engine, prepare, workplace
from tests.containers.testnet import Testnet, step

_ROOT = Path(__file__).resolve().parents[2]
_NOT_TESTED = 77


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.containers", description=__doc__)
    parser.add_argument("--both-builders", action="store_true", help="build without BuildKit too")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        with step("the packages are there"):
            prepare()
        with workplace() as folder, engine(folder) as found:
            names = stand_ins.Names.read(_ROOT)
            with step("the stand-ins for images are made"):
                stand_ins.make(found, names, folder)
            Testnet(found, _ROOT).check(names, both_builders=options.both_builders)
    except Unavailable as error:
        print(f"NOT TESTED with containers: {error}")
        return _NOT_TESTED
    except CheckFailed as error:
        print(f"FAILED: {error}")
        return 1
    print(f"all holds, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
