"""One node's own settings: built once from the command line, checked before any socket opens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Address:
    """A TCP address to bind: port 0 takes any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Address:
        """Read "HOST:PORT" (IPv6 hosts in brackets); UsageError names the flag."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
            raise UsageError(f"{flag} {text!r} is not HOST:PORT.")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeConfig:
    """What one daemon is told. Times in seconds."""

    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs that end in /p2p/PEER."""
    listen: Address = Address("0.0.0.0", 0)
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell peers instead of the interfaces' own."""
    http: Address = Address("127.0.0.1", 0)
    data: Path | None = None
    """Training text on this machine, for runs whose source is text, jsonl or parquet."""
    device: str = "auto"
    threads: int = 0
    """CPU threads of the trainer; 0 leaves the choice to torch."""
    max_uploads: int = 2
    """Newcomers served weights at once."""
    checkpoint_every: float = 60.0
    """At the first outer step after this many seconds."""
    grace: float = 10.0
    """How long a stop waits for an exchange under way."""
    linger: float = 3600.0
    """How long weights are served to others after the run's end."""

    @property
    def paths(self) -> DataDir:
        return DataDir(self.data_dir)


@dataclass(frozen=True)
class DataDir:
    """Where everything in a node's data directory lies."""

    root: Path
    identity: Path = field(init=False)
    manifest: Path = field(init=False)
    lock: Path = field(init=False)
    daemon: Path = field(init=False)
    peers: Path = field(init=False)
    checkpoints: Path = field(init=False)
    receipts: Path = field(init=False)
    serving: Path = field(init=False)
    incoming: Path = field(init=False)
    cache: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, file in {
            "identity": "identity.key",
            "manifest": "manifest",
            "lock": "lock",
            "daemon": "daemon.json",
            "peers": "peers.json",
            "checkpoints": "checkpoints",
            "receipts": "receipts",
            "serving": "serving",
            "incoming": "incoming",
            "cache": "cache",
        }.items():
            object.__setattr__(self, name, self.root / file)
