"""Samples of what other donors hold, so that no donor's weights are taken on its word alone; node/weights.py judges them.

The rule: each donor signs for all of its snapshot before it learns which chunks are asked for, and those are drawn anew by
chance each time, the same of every donor. Nobody is waited for: who is busy, gone or slow does not count. What the parts
say of the weights is the trainer's matter (trainer/compare_donors.py).
"""

from __future__ import annotations

import random
from io import FileIO
from typing import TYPE_CHECKING

from nolocod.disk import disk_errors
from nolocod.errors import RemoteError
from nolocod.identity import short
from nolocod.p2p.snapshots.client import open_donor_stream
from nolocod.p2p.transport.deadlines import deadline
from nolocod.proto.types import SnapshotParts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.transport.stream import Dial

CHUNKS = 8
"""Drawn of each donor, besides the first, which says what lies where: 18 MiB."""
_TRIED = 2
"""Donors that are asked for each that is wanted, at most."""


async def fetch_parts(
    context: Context,
    dial: Dial,
    donors: Sequence[PeerId],
    wanted: tuple[int, int],
    folder: Path,
    seconds: float,
    blame: Callable[[PeerId, RemoteError], None] = lambda _, __: None,
) -> list[SnapshotParts]:
    """Parts of the snapshots of the first donors that give them, written into `folder`; of fewer than wanted where few do.

    `wanted`: of how many donors, and of which size the snapshots have to be; `seconds`: for each. Raises DiskFullError or
    DataDirError.
    """
    count, size = wanted
    seed = context.rng.randbytes(16)
    fetched: list[SnapshotParts] = []
    for number, donor in enumerate(donors[: _TRIED * count]):
        if len(fetched) == count:
            break
        path = folder / f"parts-{number}"
        try:
            with deadline(seconds, f"parts of the weights of {short(donor)}"):
                fetched.append(await _fetch(context, dial, donor, (random.Random(seed), size), path))
        except RemoteError as error:
            path.unlink(missing_ok=True)
            blame(donor, error)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return fetched


async def _fetch(context: Context, dial: Dial, donor: PeerId, draw: tuple[random.Random, int], path: Path) -> SnapshotParts:
    rng, size = draw
    async with open_donor_stream(context, dial, donor) as stream:
        _, description = await stream.describe(size)
        chunks = len(description.hashes)
        drawn = sorted({0, *rng.sample(range(chunks), min(CHUNKS, chunks))})
        with disk_errors(path), FileIO(path, "w") as file:
            await context.aside(file.truncate, description.size)  # what was not asked for takes no room
            for index in drawn:
                async for _ in stream.fetch(description, index, 1, file):
                    pass
    return SnapshotParts(path, tuple(description.span(index) for index in drawn))
