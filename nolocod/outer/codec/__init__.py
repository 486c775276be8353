"""How a fragment of the weights becomes a message for a partner, and back.

`modulo` (a byte per parameter, or half of one) and `plain` are the codecs, `base` what they share; `blocks` divides the
weights. `fused` is `modulo` in compiled loops (`kernels`), for large models on the processor.

Not here: when (outer.loop).

The rule: both partners of an exchange apply what the bytes say, the sender too: what it reads back is bit
for bit what the partner reads. With rounding in between, anything else would leave the two with different
means of delta. The sender need not keep the bytes for that: encoding is a function of phi, the change and
the capture's seed, and is done again. What arrives is hostile until it was read without RejectedTensorError.

A message is a header and then one record per block, in order; docs/codecs.md has the layout.
Everything works on a few blocks at a time, a row each, in scratch memory that fits a core's caches; on a GPU on more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nolocod.outer.codec.base import HEADER, Coder, Shared
from nolocod.outer.codec.modulo import Modulo4, Modulo8
from nolocod.outer.codec.plain import BFloat16, Float32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nolocod.outer.codec.blocks import Fragment
    from nolocod.run.manifest import Codec

_KINDS: dict[Codec, type[Coder]] = {"float32": Float32, "bfloat16": BFloat16, "modulo8": Modulo8, "modulo4": Modulo4}
WITH_LOOPS: tuple[Codec, ...] = ("modulo8", "modulo4")
"""Those of which there are loops (fused.py)."""


def coder_for(codec: Codec, shared: Shared) -> Coder:
    """The coder of one message of ours."""
    if shared.compiled and codec in WITH_LOOPS:
        from nolocod.outer.codec.fused import KINDS

        return KINDS[codec](shared)
    return _KINDS[codec](shared)


def box_size(codec: Codec, fragments: Sequence[Fragment]) -> int:
    """Bytes of the largest message that all `fragments` together can make."""
    kind = _KINDS[codec]
    return HEADER + sum(kind.largest(block.size) for fragment in fragments for block in fragment.blocks)
