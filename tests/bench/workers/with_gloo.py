"""Raw gloo: the ceiling (send and receive both ways at once), and the pattern of the paper's reference code.

Plaintext, two processes that know each other beforehand. The reference code of NoLoCo sends two tensors (the
outer gradient and the slow weights) to a root of the pair, which sends both means back.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from talk import Talk, timed

RANK, WHAT = int(sys.argv[1]), sys.argv[2]


class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)

    def prepare(self, values: int) -> dict[str, Any]:
        # bfloat16 for the ceiling in half of the bytes
        kind = torch.bfloat16 if WHAT.endswith("bfloat16") else torch.float32
        self.own = torch.full((values,), float(RANK + 1), dtype=kind)
        return {}

    def listen(self) -> dict[str, Any]:
        if RANK == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            return {"address": self.store.port}
        return {"address": None}

    def connect(self, addresses: list[Any]) -> dict[str, Any]:
        if RANK == 1:
            self.store = dist.TCPStore("127.0.0.1", addresses[0], 2, is_master=False)
        dist.init_process_group("gloo", store=self.store, rank=RANK, world_size=2, timeout=timedelta(seconds=60))
        self.other = torch.empty_like(self.own)
        self.second = torch.full_like(self.own, float(RANK + 3)) if WHAT == "reference" else self.own
        return {}

    def arm(self) -> dict[str, Any]:
        dist.barrier()
        return {}

    def go(self) -> dict[str, Any]:
        result = timed(self._reference if WHAT == "reference" else self._both_ways)
        expected = 1.5 if WHAT == "reference" else float(2 - RANK)
        result["right"] = bool(
            (self.own if WHAT == "reference" else self.other)[:: max(1, len(self.own) // 97)].eq(expected).all()
        )
        if WHAT == "reference":
            self.own.fill_(float(RANK + 1))
            self.second.fill_(float(RANK + 3))
        return result

    def _both_ways(self) -> None:
        receiving = dist.irecv(self.other, 1 - RANK)
        sending = dist.isend(self.own, 1 - RANK)
        receiving.wait()
        sending.wait()

    def _reference(self) -> None:
        for tensor in (self.own, self.second):
            if RANK == 0:
                dist.recv(self.other, 1)
                tensor.add_(self.other).div_(2)
                dist.send(tensor, 1)
            else:
                dist.send(tensor, 0)
                dist.recv(tensor, 0)


def main() -> None:
    talk, worker = Talk(), Worker()
    names = ("prepare", "listen", "connect", "arm", "go")
    talk.serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
