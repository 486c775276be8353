"""libp2p without the parts that nolocod never calls: for processes that must be small, above all `nolocod watch`.

The rule: `leave_out`, called before libp2p is imported, puts empty stand-ins in the place of `PARTS`. libp2p imports all its
transports, and what those need, at once: 20 MB of a process's memory, of which we use TCP alone. What a stand-in is asked for
by name is a class whose call gives None; no instance of it is anything, and nothing of ours asks for one.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableSequence

PARTS = (
    *("libp2p.transport.quic", "libp2p.transport.websocket", "libp2p.security.tls", "libp2p.discovery", "libp2p.pubsub"),
    *("aioquic", "dns", "coincurve", "fastecdsa", "Crypto"),  # QUIC, names by DNS's own protocol, keys other than Ed25519
)


def leave_out() -> None:
    """Do without `PARTS` from now on. Nothing happens where libp2p is imported already."""
    if "libp2p" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Nothing(type):
    """Of the classes that stand for all that is left out: they can be named, inherited from and caught."""

    def __call__(cls, *_: object, **__: object) -> None:
        return None

    def __getattr__(cls, name: str) -> type:
        return _named(name)


def _named(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__call__(_Nothing, name, (Exception,), {})  # type: ignore[no-any-return]


class _Empty(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  # as ModuleType has it

    def __getattr__(self, name: str) -> type:
        return _named(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        left_out = any(fullname == part or fullname.startswith(f"{part}.") for part in PARTS)
        return ModuleSpec(fullname, self, is_package=True) if left_out else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass
