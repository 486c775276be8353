"""lattica: one RPC each way at once, with a whole tensor's bytes as its argument."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from typing import Any

import lattica
from talk import Talk, timed

RANK = int(sys.argv[1])


class Service(lattica.ConnectionHandler):
    """Takes bytes and answers with their count; keeps them as the receiver of a tensor would."""

    got: bytes = b""
    arrived = threading.Event()

    @lattica.rpc_stream
    def put(self, data: bytes) -> int:
        Service.got = data
        Service.arrived.set()
        return len(data)


class Worker:
    def prepare(self, values: int) -> dict[str, Any]:
        self.own = bytes([RANK + 1]) * (4 * values)
        return {}

    def listen(self) -> dict[str, Any]:
        return self._open([]) if RANK == 0 else {"address": None}

    def connect(self, addresses: list[Any]) -> dict[str, Any]:
        if RANK == 1:
            self._open([f"{address}/p2p/{addresses[0]['id']}" for address in addresses[0]["listen"]])
            self.other = addresses[0]["id"]
        return {}

    def _open(self, bootstraps: list[str]) -> dict[str, Any]:
        self.folder = tempfile.TemporaryDirectory()
        address = f"/ip4/127.0.0.1/tcp/{41000 + RANK}"
        builder = lattica.Lattica.builder().with_listen_addrs([address]).with_mdns(False).with_upnp(False)
        builder = builder.with_storage_path(self.folder.name)
        builder = builder.with_bootstraps(bootstraps) if bootstraps else builder
        self.node = builder.build()
        self.service = Service(self.node)
        return {"address": {"id": self.node.peer_id(), "listen": [address]}}

    def arm(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while not self.node.get_all_peers():
            if time.monotonic() > deadline:
                raise TimeoutError("no peer within 30 s")
            time.sleep(0.05)
        self.other = self.node.get_all_peers()[0]
        Service.arrived.clear()
        return {}

    def go(self) -> dict[str, Any]:
        def run() -> None:
            stub = self.service.get_stub(self.other)
            told = stub.put(self.own)
            if hasattr(told, "result"):
                told = told.result()
            if told != len(self.own) or not Service.arrived.wait(60):
                raise RuntimeError(f"the RPC returned {told!r}")

        result = timed(run)
        result["right"] = len(Service.got) == len(self.own) and Service.got[-1] == 2 - RANK
        return result


def main() -> None:
    talk, worker = Talk(), Worker()
    names = ("prepare", "listen", "connect", "arm", "go")
    talk.serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
