"""What other donors hold, in samples: so that no donor's weights are taken on its word alone.

The rule: each donor signs for all of its snapshot before it learns which chunks are asked for, and those are drawn anew by
chance each time, the same of every donor. Nobody is waited for: who is busy, gone or slow is no witness. What a
sample says of the weights is the trainer's matter (trainer/compare_donors.py).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from nolocod.disk import disk_errors
from nolocod.errors import RefusedError, RemoteError
from nolocod.identity import short
from nolocod.p2p.snapshots.client import open_line
from nolocod.p2p.transport.deadlines import deadline
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.content import check_chunk
from nolocod.proto.types import Sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import IO

    from nolocod.identity import PeerId
    from nolocod.p2p.exchange.context import Context
    from nolocod.p2p.snapshots.client import Line
    from nolocod.p2p.transport.stream import Dial
    from nolocod.proto.types import Description

CHUNKS = 8
"""Drawn of each donor, besides the first, which says what lies where: 18 MiB."""
_TRIED = 2
"""Donors that are asked for each sample that is wanted, at most."""
_ROOM = 4096
"""Bytes by which honest snapshots of one run differ, at most: their heads name the round."""


async def sample_snapshots(
    context: Context,
    dial: Dial,
    donors: Sequence[PeerId],
    wanted: tuple[int, int],
    folder: Path,
    blame: Callable[[PeerId, RemoteError], None] = lambda _, __: None,
) -> list[Sampled]:
    """Samples of the snapshots of the first donors that give one, written into `folder`; fewer than wanted where few do.

    `wanted`: how many, and of which size the snapshots have to be. Raises DiskFullError or DataDirError.
    """
    count, size = wanted
    seed = context.rng.randbytes(16)
    sampled: list[Sampled] = []
    for number, donor in enumerate(donors[: _TRIED * count]):
        if len(sampled) == count:
            break
        path = folder / f"sample-{number}"
        try:
            with deadline(context.limits.sample_seconds, f"a sample of the weights of {short(donor)}"):
                sampled.append(await _sample(context, dial, donor, (random.Random(seed), size), path))
        except RemoteError as error:
            path.unlink(missing_ok=True)
            blame(donor, error)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return sampled


async def _sample(context: Context, dial: Dial, donor: PeerId, draw: tuple[random.Random, int], path: Path) -> Sampled:
    rng, size = draw
    async with open_line(context, dial, donor) as line:
        _, description = await line.described(context.limits)
        if abs(description.size - size) > _ROOM:
            raise RefusedError(f"{short(donor)} has weights of {description.size} bytes where {size} are due.")
        chunks = len(description.hashes)
        drawn = sorted({0, *rng.sample(range(chunks), min(CHUNKS, chunks))})
        buffer = bytearray(min(description.chunk_size, description.size))
        with disk_errors(path), path.open("wb") as handle:
            await context.aside(handle.truncate, description.size)  # what was not asked for takes no room
            for index in drawn:
                start, content = await _chunk(line, description, index, buffer)
                check_chunk(description, index, content)
                await context.aside(_store, handle, start, content)
    return Sampled(path, tuple(description.span(index) for index in drawn))


async def _chunk(line: Line, description: Description, index: int, buffer: bytearray) -> tuple[int, memoryview]:
    await line.ask(chunk_request=pb.ChunkRequest(id=description.root, first=index, count=1))
    content = await line.chunk(description, index, buffer)
    line.service.step("<chunk")
    line.service.step("<last chunk" if index == len(description.hashes) - 1 else "<last chunk of a request")
    return content


def _store(handle: IO[bytes], start: int, content: memoryview) -> None:
    handle.seek(start)
    handle.write(content)
