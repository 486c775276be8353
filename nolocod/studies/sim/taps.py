"""Being told whenever one of the product's state machines enters a state, without a word about it in the product.

The rule: nothing is changed but who hears of it. What is told is the machine and its new state, right when it was set.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nolocod.proto.exchange import Exchange
from nolocod.proto.serving import Service

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Iterator

    Tell = Callable[[Exchange | Service, enum.Enum], None]


@contextmanager
def tapped(tell: Tell) -> Iterator[None]:
    """Until the end of the block, `tell` hears of every state of every exchange and service in this process."""
    with ExitStack() as stack:
        for machine in (Exchange, Service):
            stack.enter_context(_tapped(machine, tell))
        yield


@contextmanager
def _tapped(machine: type, tell: Tell) -> Iterator[None]:
    def set_and_tell(one: Exchange | Service, name: str, value: object) -> None:
        object.__setattr__(one, name, value)
        if name == "state":
            tell(one, value)  # type: ignore[arg-type]  # a state is an enum's member

    machine.__setattr__ = set_and_tell  # type: ignore[assignment,method-assign]  # taken back below
    try:
        yield
    finally:
        del machine.__setattr__


def side_of(machine: Exchange | Service) -> str:
    """Its side's name in `states.TABLE` or `serving.SERVING`."""
    if isinstance(machine, Service):
        return machine.side
    return "offerer" if machine.offerer else "answerer"
