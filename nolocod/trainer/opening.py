"""The replica of a node as its owner set it up: on all its devices, as its last checkpoint has it.

The rule: the processes of further devices are started first, so that all build the model at the same time, and are ended again
where the leader cannot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nolocod.errors import NolocodError
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.devices import find_devices, is_sharded
from nolocod.trainer.group import Resume
from nolocod.trainer.model import Place, layout_of, read_config
from nolocod.trainer.ranks import open_ranks
from nolocod.trainer.replica import Replica, open_replica
from nolocod.trainer.shards import in_shards

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.events import SamplesRead, TextSupply
    from nolocod.run.manifest import Sealed
    from nolocod.trainer.checkpoint import Found
    from nolocod.trainer.pipe import Failed, Setup


def open_shared(
    setup: Setup, sealed: Sealed, tell: Callable[[TextSupply | SamplesRead], None], fallen: Callable[[Failed], None]
) -> tuple[Replica, Found]:
    """With the checkpoint that it goes on from; `fallen` as in ranks.Ranks. Raises what is wrong with run, data or devices."""
    devices, manifest = find_devices(setup.devices), sealed.manifest
    ranks, processes = None, devices.count(devices[0])
    place = Place(devices[0], setup.base, setup.base_bits, processes, setup.spare_memory, setup.compile)
    if len(devices) > 1 or is_sharded(setup.devices):
        config = read_config(manifest, make_tokenizer(manifest.data, setup.base).vocabulary)
        layout = layout_of(config, manifest.adapter)
        sharded = in_shards(setup.devices, devices, layout, config.vocab_size, manifest, setup.base_bits)
        ranks = open_ranks(setup, manifest, devices, fallen, sharded=sharded)
        place = replace(place, shards=len(devices) if sharded else 1, group=ranks.group)
    try:
        replica = open_replica(sealed, setup.peer_id, setup.data, setup.cache, place, tell, ranks)
        replica.draw_as(setup.peer_id)
        found = replica.resume(setup.checkpoints)
        if ranks is not None and found.path is not None and found.state is not None:
            ranks.tell(Resume(found.path, found.state.optimizer_steps))
    except NolocodError:
        if ranks is not None:
            ranks.close()
        raise
    return replica, found
