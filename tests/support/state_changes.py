"""Tells a test whenever one of the product's state machines enters a state. The product itself is not changed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from nolocod.proto.exchange import Exchange
from nolocod.proto.snapshot_states import Service

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable, Iterator


@contextmanager
def state_changes(tell: Callable[[Exchange | Service, enum.Enum], None]) -> Iterator[None]:
    """Until the end of the block, `tell` hears of every new state of every exchange and service in this process."""

    def set_and_tell(machine: Exchange | Service, name: str, value: object) -> None:
        object.__setattr__(machine, name, value)
        if name == "state":
            tell(machine, value)

    with ExitStack() as stack:
        for machine in (Exchange, Service):
            stack.callback(delattr, machine, "__setattr__")
            machine.__setattr__ = set_and_tell
        yield


def side_of(machine: Exchange | Service) -> str:
    """Its side's name in `exchange_states.TABLE` or `snapshot_states`."""
    if isinstance(machine, Service):
        return machine.side
    return "offerer" if machine.offerer else "answerer"
