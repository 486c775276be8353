"""The replica of a node as its owner set it up: on all its devices, as its last checkpoint has it.

The rule: the processes of further devices are started first, so that all build the model at the same time, and are ended again
where the leader cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.errors import NolocodError
from nolocod.trainer.devices import find_devices
from nolocod.trainer.model import Place
from nolocod.trainer.ranks import open_ranks
from nolocod.trainer.replica import Replica, open_replica

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
    devices = find_devices(setup.devices)
    ranks = open_ranks(setup, sealed.manifest, devices, fallen)
    try:
        place = Place(devices[0], setup.base, setup.base_bits, devices.count(devices[0]), setup.spare_memory)
        replica = open_replica(sealed, setup.peer_id, setup.data, setup.cache, place, tell)
        replica.draw_as(setup.peer_id)
        found = replica.resume(setup.checkpoints)
        if ranks is not None:
            replica.share(ranks)
            if found.path is not None and found.state is not None:
                ranks.resume(found.path, found.state.optimizer_steps)
    except NolocodError:
        if ranks is not None:
            ranks.close()
        raise
    return replica, found
