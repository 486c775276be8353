"""One node's own settings: built once from the command line, checked before any socket opens."""

from __future__ import annotations

import re
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


SLOWEST_RATE = 32_000
"""Bytes per second: a chunk of 2 MiB then takes a third of the three minutes that a partner gives it."""

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", re.ASCII)
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_rate(text: str, flag: str) -> int:
    """Read "20Mbit" or "2.5MB" (per second; "/s" may follow) as bytes per second; UsageError names the flag."""
    rate = _amount(text.strip().removesuffix("/s"), flag, bits=True)
    if rate < SLOWEST_RATE:
        least = f"{SLOWEST_RATE * 8 // 1000}kbit"
        raise UsageError(
            f"{flag} {text!r} is too slow.", remedy=f"Give at least {least}, or the partner's patience ends first."
        )
    return rate


def parse_size(text: str, flag: str) -> int:
    """Read "200GB" or "1.5TiB" as bytes; UsageError names the flag."""
    size = _amount(text.strip(), flag, bits=False)
    if size < 1:
        raise UsageError(f"{flag} {text!r} is nothing.", remedy="Leave it out for no limit.")
    return size


def _amount(text: str, flag: str, *, bits: bool) -> int:
    """Bytes. The unit is never guessed: "Mb" means one thing to a network and another to a disk."""
    units = "20Mbit or 2.5MB (bits and bytes per second)" if bits else "200GB or 1.5TB"
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise UsageError(f"{flag} {text!r} is not a number and a unit.", remedy=f"Write it like {units}.")
    number, unit = found.groups()
    for ending, per_byte in (("bit", 8), ("bps", 8), ("B", 1)):
        factor = _PREFIXES.get(unit.removesuffix(ending).lower())
        if unit.endswith(ending) and factor is not None and (bits or per_byte == 1):
            return round(float(number) * factor / per_byte)
    raise UsageError(f"{flag} {text!r} has no unit that we know.", remedy=f"Write it like {units}.")


def parse_span(text: str, flag: str) -> float:
    """Read "12h", "30d" or "2w" as seconds; UsageError names the flag."""
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text.strip(), re.ASCII)
    if found is None or not int(found.group(1)):
        raise UsageError(f"{flag} {text!r} is no span of time.", remedy="Write it like 12h, 30d or 2w.")
    return float(int(found.group(1)) * _UNITS[found.group(2)])


@dataclass(frozen=True)
class Hours:
    """A span of each day, in minutes since midnight, local time; over midnight where it ends before it begins."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Hours:
        """Read "22:00-07:00"; UsageError names the flag."""
        found = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text.strip(), re.ASCII)
        if found is None:
            raise UsageError(f"{flag} {text!r} is not HH:MM-HH:MM.")
        hours, minutes, end_hours, end_minutes = map(int, found.groups())
        begin, end = hours * 60 + minutes, end_hours * 60 + end_minutes
        if max(minutes, end_minutes) > 59 or begin >= 1440 or end > 1440:
            raise UsageError(f"{flag} {text!r}: there is no such time of day.")
        if begin == end:
            raise UsageError(f"{flag} {text!r} is empty.", remedy=f"Leave {flag} out to train at all hours.")
        return cls(begin, end)

    def contains(self, minute: int) -> bool:
        """Whether `minute` of the day lies in it; the end does not."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return f"{self.begin // 60:02}:{self.begin % 60:02}-{self.end // 60:02}:{self.end % 60:02}"


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


@dataclass(frozen=True)
class NodeConfig:
    """What one daemon is told. Times in seconds."""

    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs that end in /p2p/PEER."""
    listen: tuple[Address, ...] = (Address("0.0.0.0", 0), Address("::", 0))
    """For peers. Where no port is given the first's is tried for all; an address family that this machine does not
    have is left out, as long as another one is there."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell peers instead of the interfaces' own."""
    http: Address = Address("127.0.0.1", 0)
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


@dataclass(frozen=True)
class DataDir:
    """Where everything in a node's data directory lies."""

    root: Path
    identity: Path = field(init=False)
    manifest: Path = field(init=False)
    lock: Path = field(init=False)
    daemon: Path = field(init=False)
    peers: Path = field(init=False)
    reputation: Path = field(init=False)
    checkpoints: Path = field(init=False)
    receipts: Path = field(init=False)
    serving: Path = field(init=False)
    incoming: Path = field(init=False)
    cache: Path = field(init=False)
    usage: Path = field(init=False)
    network_key: Path = field(init=False)
    http_token: Path = field(init=False)
    admission: Path = field(init=False)
    invitations: Path = field(init=False)
    revocations: Path = field(init=False)
    owner_lock: Path = field(init=False)

    def __post_init__(self) -> None:
        for name, file in {
            "identity": "identity.key",
            "manifest": "manifest",
            "lock": "lock",
            "daemon": "daemon.json",
            "peers": "peers.json",
            "reputation": "reputation.json",
            "checkpoints": "checkpoints",
            "receipts": "receipts",
            "serving": "serving",
            "incoming": "incoming",
            "cache": "cache",
            "usage": "usage.json",
            "network_key": "network.key",
            "http_token": "http.token",
            "admission": "admission",
            "invitations": "invitations.json",
            "revocations": "revocations",
            "owner_lock": "owner.lock",
        }.items():
            object.__setattr__(self, name, self.root / file)
