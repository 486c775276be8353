"""The files of a node's data directory: one name each, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


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
