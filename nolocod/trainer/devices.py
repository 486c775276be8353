"""On which devices a node trains: what its owner writes, and what this machine has.

The rule: what is written is read without torch, so that a flag is refused before anything starts; that the devices are there
is found out where they are to compute. The first of several is the leader's.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from nolocod.errors import DeviceError, UsageError

if TYPE_CHECKING:
    import torch

    from nolocod.run.manifest import Manifest

_MOST = 64
"""Processes on the CPU."""
_REMEDY = (
    "Write auto, cpu, cuda:1, mps, several GPUs like 0,1, all for every GPU, or cpu:2 for two processes on the CPU; shard: "
    "before several spreads the model over them."
)
_SHARD = "shard:"


def read_devices(text: str, name: str) -> str:
    """`text` as it is kept, without spaces; UsageError, naming the flag, if it says no devices."""
    found = text.replace(" ", "")
    named = named_devices(found)
    if not named or (is_sharded(found) and len(named) == 1 and not is_all(found)):
        says = f"says {'one device, and shards need several' if named else 'no device'}"
        raise UsageError(f"{name} {text!r} {says}.", remedy=_REMEDY)
    twice = next((one for one in named if one != "cpu" and named.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"{name} {text!r} names {twice} twice.", remedy="Name each GPU once.")
    return found


def is_sharded(text: str) -> bool:
    """Whether its owner has the model lie in shards on these devices."""
    return text.startswith(_SHARD)


def is_all(text: str) -> bool:
    """Whether it names every GPU."""
    return text.removeprefix(_SHARD) == "all"


def named_devices(text: str) -> tuple[str, ...]:
    """The devices that `text` names, as torch names them, besides "auto" and "all"; none if it makes no sense."""
    text = text.removeprefix(_SHARD)
    if found := re.fullmatch(r"cpu:(\d{1,3})", text):
        return ("cpu",) * int(found[1]) if int(found[1]) <= _MOST else ()
    if re.fullmatch(r"[a-z]+(:\d{1,3})?", text):
        return (text,)  # torch may know more than we do
    cards = [re.fullmatch(r"(?:cuda:)?(\d{1,3})", one) for one in text.split(",")]
    return tuple(f"cuda:{int(card[1])}" for card in cards if card) if all(cards) else ()


def find_devices(text: str) -> tuple[torch.device, ...]:
    """Those of this machine. DeviceError if one is not there or cannot compute."""
    import torch

    from nolocod.trainer.model import pick_device

    there = torch.cuda.device_count()
    named = tuple(f"cuda:{number}" for number in range(there)) if is_all(text) else named_devices(text)
    if not named:  # of all
        remedy = "Choose cpu, or see why torch finds no GPU (nolocod doctor)."
        raise DeviceError(f"all GPUs are to be used, and this torch {torch.__version__} finds none.", remedy=remedy)
    if len(named) > 1 and named[0] != "cpu" and (missing := [one for one in named if int(one.partition(":")[2]) >= there]):
        has = ", ".join(f"cuda:{number}" for number in range(there)) or "none"
        raise DeviceError(f"{missing[0]} is not there: this torch {torch.__version__} finds {there} GPUs ({has}).")
    return tuple(pick_device(one) for one in named)


def check_count(count: int, manifest: Manifest) -> None:
    """Raise DeviceError where an inner step of the run cannot be shared by so many devices."""
    windows = manifest.inner.batch * manifest.inner.accumulation
    if count > windows:
        remedy = "Name as many devices as it has sequences, or fewer."
        raise DeviceError(
            f"an inner step of this run has {windows} sequences, and {count} devices are to share it.", remedy=remedy
        )
    if count > 1 and sys.platform != "linux":
        raise DeviceError("several devices of one node work on Linux alone.", remedy="Name one device.")
