"""One node's own settings: built once from the command line, checked before any socket opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nolocod.run.paths import DataDir
from nolocod.units import Address, Hours

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Allowance:
    """What this node may use of its owner's line and day. None and empty mean no limit."""

    up: int | None = None
    """Bytes per second sent, on all peers' connections together."""
    down: int | None = None
    monthly: int | None = None
    """Bytes sent and received per calendar month (UTC)."""
    hours: tuple[Hours, ...] = ()
    """When it may train, local time."""
    pause_on_battery: bool = False


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


_ANY_PORT = (Address("0.0.0.0", 0), Address("::", 0))
_LOOPBACK = Address("127.0.0.1", 0)


@dataclass(frozen=True)
class NodeConfig:
    """What one daemon is told. Times in seconds."""

    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs that end in /p2p/PEER."""
    listen: tuple[Address, ...] = _ANY_PORT
    """For peers. Where no port is given the first's is tried for all; an address family that this machine does not
    have is left out, as long as another one is there."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell peers instead of the interfaces' own."""
    http: Address = _LOOPBACK
    http_token: Path | None = None
    """A file with the token that readers of the pages need; None for the data directory's own, where one is needed."""
    http_open_metrics: bool = False
    """Whether /metrics may be read without it."""
    data: Path | None = None
    """Training text on this machine, for runs whose source is text, jsonl or parquet."""
    device: str = "auto"
    threads: int = 0
    """CPU threads of the trainer; 0 leaves the choice to torch."""
    max_uploads: int = 2
    """Newcomers served weights at once."""
    connections: int = 256
    """With peers, at once."""
    connections_per_address: int = 64
    """Of them those that come from one IPv4 address, or one /64 of IPv6."""
    checkpoint_every: float = 60.0
    """At the first outer step after this many seconds."""
    grace: float = 10.0
    """How long a stop waits for an exchange under way."""
    linger: float = 3600.0
    """How long weights are served to others after the run's end."""
    allowance: Allowance = Allowance()
    relaying: Relaying = Relaying()
    access: Access = Access()
    upnp: bool = True
    """Ask the router to map the port."""

    @property
    def paths(self) -> DataDir:
        return DataDir(self.data_dir)
