"""What a node's libraries made of the run's model: what the bytes of an exchange mean to it, and where it would start.

The rule: who tells other tensors than ours gets no bytes of ours and gives us none, as bytes of one size would pass for weights
that they are not. Who tells nothing, as the release before, is taken as of the run. The values that a run starts from may
differ by a rounding between honest processors: that is no fault, and costs a fetch (node/weights.py).
"""

from __future__ import annotations

from nolocod.errors import OtherTensorsError
from nolocod.proto import nolocod_pb2 as pb
from nolocod.proto.envelope import readable
from nolocod.proto.types import Built

DIGEST_SIZE = 16
_MOST_TEXT = 80


def check_built(own: Built, other: Built) -> None:
    """Raise OtherTensorsError where `other`, a peer's, has other tensors."""
    if not own.fits(other):
        raise OtherTensorsError(differences(own, other))


def differences(own: Built, other: Built) -> str:
    """Both sides' libraries, in a sentence that is the same to whoever reads it."""
    here, there = (one.libraries or "libraries that it does not name" for one in (own, other))
    return f"the run's model has other tensors with {here} than with {there}."


def built_to_wire(built: Built) -> pb.Built:
    return pb.Built(layout=built.layout, weights=built.weights, libraries=built.libraries[:_MOST_TEXT])


def built_from_wire(told: pb.Built) -> Built:
    """A digest of another length counts as not told."""
    layout, weights = (one if len(one) == DIGEST_SIZE else b"" for one in (told.layout, told.weights))
    return Built(layout, weights, readable(told.libraries, _MOST_TEXT))
