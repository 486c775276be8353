"""The process of a device that is not the leader's (follower.py).

Started by ranks.py as `python -m nolocod.trainer.rank PIPE MEETING AREA`, three descriptors. It ignores the signals that its
leader ignores, which are inherited, and tells the leader of its failures in the catalogue's codes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from nolocod.errors import NolocodError
from nolocod.trainer.settled import importing, memory_errors, quiet


def main() -> None:
    quiet()
    with importing():
        from nolocod.trainer import pipe
        from nolocod.trainer.follower import follow
        from nolocod.trainer.group import Peer
    pipe_end, *files = (int(text) for text in sys.argv[1:])
    leader = Peer(pipe_end)
    try:
        with memory_errors():
            follow(leader, (files[0], files[1]))
    except NolocodError as error:
        failed = pipe.failed(error)
        with suppress(OSError):
            leader.send(pipe.answer(0, failed, None))
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
