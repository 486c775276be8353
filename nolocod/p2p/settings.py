"""What a node's owner decides about its mesh: addresses, relays, who may connect, how many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.paths import DataDir
from nolocod.units import Address

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Allowance:
    """What this node may use of its owner's line. None means no limit."""

    up: int | None = None
    """Bytes per second sent, on all peers' connections together."""
    down: int | None = None
    monthly: int | None = None
    """Bytes sent and received per calendar month (UTC)."""


@dataclass(frozen=True)
class Relaying:
    """What this node does with relays. Rates in bytes per second."""

    serve: bool = True
    """Carry for others, once this node turns out to be public."""
    use: bool = True
    """Hold reservations at others, where it is not."""
    only: bool = False
    """Never connect straight but to relays and bootstraps; announce nothing but circuits."""
    rate: int = 2_500_000
    """At which all circuits together are carried for others."""
    reservations: int = 64
    circuits: int = 32


@dataclass(frozen=True)
class Access:
    """Who this node talks to, and how it shows that it belongs."""

    network_key: Path | None = None
    """A file with the key that all nodes of a private network share."""
    allow: Path | None = None
    """A file with the peer ids that may connect, one a line."""
    invite: str = ""
    """The token that the run's owner gave, for runs that one must be invited to."""


@dataclass(frozen=True)
class MeshSettings:
    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs that end in /p2p/PEER."""
    run: str = ""
    """The id of the run to join, or its first digits; empty for the run that a bootstrap names first."""
    listen: tuple[Address, ...] = (Address("0.0.0.0", 0), Address("::", 0))
    """For peers. Where no port is given the first's is tried for all; an address family that this machine does not
    have is left out, as long as another one is there."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell peers instead of the interfaces' own."""
    connections: int = 256
    """With peers, at once."""
    connections_per_address: int = 64
    """Of them those that come from one address group: a /24 of IPv4 or a /48 of IPv6."""
    relaying: Relaying = Relaying()
    access: Access = Access()
    name: str = ""
    """What its owner calls the node; others are told."""
    upnp: bool = True
    """Ask the router to map the port."""

    @property
    def paths(self) -> DataDir:
        return DataDir(self.data_dir)
