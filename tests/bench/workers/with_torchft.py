"""One outer step of torchft's DiLoCo over its gloo process group (plaintext), with its lighthouse and managers.

The model is one linear layer's weight with the measured number of values; the inner optimizer takes one step, the
outer one is SGD with Nesterov momentum, as in the DiLoCo paper. What is timed is that inner optimizer's step
whose hook runs the outer step: quorum, pseudo-gradient, all-reduce, vote, outer optimizer, restored weights.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from talk import Talk, timed
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

RANK = int(sys.argv[1])


class Tensor(torch.nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((values,), 1.0))


class Worker:
    def prepare(self, values: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        self.model = Tensor(values)
        self.model.weight.grad = torch.full((values,), float(RANK + 1))
        return {}

    def listen(self) -> dict[str, Any]:
        if RANK == 0:
            self.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
            return {"address": self.lighthouse.address()}
        return {"address": None}

    def connect(self, addresses: list[Any]) -> dict[str, Any]:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seconds = timedelta(seconds=60)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=seconds),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=seconds,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=addresses[0].replace("0.0.0.0", "127.0.0.1"),
            replica_id=f"replica_{RANK}",
            hostname="127.0.0.1",
            init_sync=False,
        )
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.5)
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.diloco = DiLoCo(self.manager, [self.model], self.inner, outer, sync_every=1, pin_memory=False)
        self.diloco.__enter__()
        return {}

    def arm(self) -> dict[str, Any]:
        self.before = self.model.weight.detach()[:1].clone()
        self.steps = self.manager.current_step()
        return {}

    def go(self) -> dict[str, Any]:
        def run() -> None:
            self.inner.step()

        result = timed(run)
        result["right"] = self.manager.current_step() == self.steps + 1 and bool((self.model.weight[:1] != self.before).all())
        return result


def main() -> None:
    talk, worker = Talk(), Worker()
    names = ("prepare", "listen", "connect", "arm", "go")
    talk.serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
