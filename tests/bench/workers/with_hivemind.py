"""One all-reduce of hivemind's DecentralizedAverager between two peers, whose Go daemons encrypt.

Matchmaking (seconds) is done before the clock starts, in the neighbour's favour: only the all-reduce is timed.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from talk import Talk, timed

RANK, WHAT = int(sys.argv[1]), sys.argv[2]


class Worker:
    def prepare(self, values: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        self.own = torch.full((values,), float(RANK + 1))
        return {}

    def listen(self) -> dict[str, Any]:
        if RANK == 0:
            self.dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
            return {"address": [str(address) for address in self.dht.get_visible_maddrs()]}
        return {"address": None}

    def connect(self, addresses: list[Any]) -> dict[str, Any]:
        if RANK == 1:
            self.dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=addresses[0])
        self.averager = hivemind.DecentralizedAverager(
            [self.own],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=2,
            min_group_size=2,
            min_matchmaking_time=1.0,
            request_timeout=1.0,
            compression=Float16Compression() if WHAT == "fp16" else NoCompression(),
        )
        return {}

    def arm(self) -> dict[str, Any]:
        with self.averager.get_tensors() as tensors:
            tensors[0].fill_(float(RANK + 1))
        self.step = self.averager.step(wait=False, require_trigger=True, timeout=120)
        deadline = time.monotonic() + 60
        while self.step.stage != AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > deadline:
                raise TimeoutError("no group within 60 s")
            time.sleep(0.01)
        return {}

    def go(self) -> dict[str, Any]:
        def run() -> None:
            self.step.allow_allreduce()
            self.step.result()

        result = timed(run)
        with self.averager.get_tensors() as tensors:
            result["right"] = bool((tensors[0][:: max(1, tensors[0].numel() // 97)] - 1.5).abs().max() < 1e-3)
        return result


def main() -> None:
    talk, worker = Talk(), Worker()
    names = ("prepare", "listen", "connect", "arm", "go")
    talk.serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
