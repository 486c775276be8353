"""The files of a node's data directory: one name each, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class DataDir:
    """Where everything in a node's data directory lies."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / "identity.key"
        self.manifest = root / "manifest"
        self.lock = root / "lock"
        self.daemon = root / "daemon.json"
        self.peers = root / "peers.json"
        self.reputation = root / "reputation.json"
        self.checkpoints = root / "checkpoints"
        self.receipts = root / "receipts"
        self.contributions = root / "contributions"
        self.name = root / "name"
        self.serving = root / "serving"
        self.incoming = root / "incoming"
        self.cache = root / "cache"
        self.base = root / "base"
        self.swarm = root / "swarm"
        self.usage = root / "usage.json"
        self.network_key = root / "network.key"
        self.http_token = root / "http.token"
        self.settings = root / "settings.json"
        self.admission = root / "admission"
        self.invitations = root / "invitations.json"
        self.revocations = root / "revocations"
        self.announcement = root / "announcement"
        self.amendments = root / "amendments"
        self.owner_lock = root / "owner.lock"
        self.log = root / "node.log"


def newest_round(checkpoints: Path) -> int:
    """The round in the name of the newest checkpoint in this folder; 0 if there is none."""
    numbers = [path.name.removeprefix("round-") for path in checkpoints.glob("round-*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)
