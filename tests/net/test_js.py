"""js-libp2p on the other side: 64 MB each way at once, dialled by us and by it, checked by hash.

Needs npm, which fetches js-libp2p and a Node that is new enough for it into a cache folder, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.config import Address
from nolocod.identity import Identity
from nolocod.p2p.addresses import split
from nolocod.p2p.host import Host, open_host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nolocod.p2p.streams import Stream

HERE = Path(__file__).parent / "js"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nolocod-tests" / "js"
SWAP = "/test/swap"
SIZE = 64 << 20

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="js-libp2p is fetched by npm, which is not installed")


@pytest.fixture(scope="module")
def node() -> Path:
    """The Node of the cache folder; beside it lie the packages and our script."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = (HERE / "package.json").read_text()
    known = CACHE / "package.json"
    found = CACHE / "node_modules" / ".bin" / "node"
    if not found.exists() or not known.exists() or known.read_text() != wanted:
        known.write_text(wanted)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            known.unlink()
            pytest.skip(f"npm could not fetch js-libp2p: {done.stderr[-300:]}")
    shutil.copy(HERE / "peer.mjs", CACHE / "peer.mjs")
    return found


class Lines:
    """What the process prints, line by line."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._rest = b""

    async def next(self) -> str:
        while b"\n" not in self._rest:
            more = await self._stdout.receive_some()
            assert more, f"the peer ended: {self._rest!r}"
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()


@asynccontextmanager
async def js_peer(node: Path, *arguments: str) -> AsyncIterator[Lines]:
    async with trio.open_nursery() as nursery:
        command = [str(node), "peer.mjs", *arguments]
        run = partial(trio.run_process, command, cwd=CACHE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False)
        process = await nursery.start(run)
        yield Lines(process)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def our_host() -> AsyncIterator[Host]:
    async with open_host(Identity.generate(), Address("127.0.0.1", 0), (), lambda event: None) as host:
        yield host


class Swapped:
    """Our half of a swap."""

    def __init__(self) -> None:
        self.sent = self.received = ""
        self.done = trio.Event()

    async def __call__(self, stream: Stream) -> None:
        content = random.Random(1).randbytes(SIZE)
        received = memoryview(bytearray(SIZE))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, stream, content)
            nursery.start_soon(stream.read_into, received)
        self.sent, self.received = (hashlib.sha256(part).hexdigest() for part in (content, received))
        self.done.set()

    async def _send(self, stream: Stream, content: bytes) -> None:
        await stream.write(content)
        await stream.close()

    def agrees(self, line: str) -> bool:
        theirs = json.loads(line)
        return (theirs["sent"], theirs["received"]) == (self.received, self.sent)


async def test_we_dial_js(node: Path) -> None:
    with trio.fail_after(60):
        async with our_host() as host, js_peer(node, "listen") as lines:
            peer, address = split(await lines.next())
            ours = Swapped()
            await ours(await host.open_stream(peer, SWAP, [address]))
            assert ours.agrees(await lines.next())


async def test_js_dials_us(node: Path) -> None:
    with trio.fail_after(60):
        async with our_host() as host:
            ours = Swapped()
            host.serve(SWAP, ours)
            async with js_peer(node, "dial", host.addresses[0]) as lines:
                await ours.done.wait()
                assert ours.agrees(await lines.next())
