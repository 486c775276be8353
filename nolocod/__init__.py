"""nolocod: a peer-to-peer training daemon for volunteers (NoLoCo, arXiv 2506.10911).

For a training loop of one's own (docs/your-own-loop.md): `join` and `create` start a node beside it, of which a `Swarm` tells,
and `NoLoCo` wraps its optimizer. They are imported when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nolocod.api.optimizer import NoLoCo
    from nolocod.api.swarm import Swarm, create, join

__version__ = "0.1.0"
__all__ = ["NoLoCo", "Swarm", "create", "join"]


def __getattr__(name: str) -> object:
    """One of the names above. NoTorchError where torch is needed and missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module("nolocod.api.optimizer" if name == "NoLoCo" else "nolocod.api.swarm"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from nolocod.errors import NoTorchError

        raise NoTorchError(f"nolocod.{name} needs it.") from error
