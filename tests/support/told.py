"""What a daemon told in its log, with `--log-format json --log-level debug`: outer steps, and whatever went wrong.

The rule: what is wrong where nothing fails, or a machine or a line is only slow, is told as such: an exchange that did not
commit, blame, trouble.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nolocod.p2p.membership.peer_scoring import Conduct

if TYPE_CHECKING:
    from pathlib import Path

IN_JSON = ("--log-format", "json", "--log-level", "debug")
_BUSY = "exchange with …%s busy"
"""How the node's log tells of what it folds (observe/logs.py)."""
_ENDED = ("aborted", "in_doubt", "unreachable")
"""Outcomes of exchanges that are wrong where nothing fails."""


@dataclass
class Seen:
    """What one daemon told in its log, in JSON with --log-level debug."""

    outcomes: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    """Outer steps, paired and solo, in their order in `order`."""
    order: str = ""
    exchange_seconds: list[float] = field(default_factory=list)
    checkpoints: list[tuple[float, float, int]] = field(default_factory=list)
    """Seconds, those in which training stood still, and bytes, of each."""
    fetched: list[float] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    lost: list[tuple[float, str]] = field(default_factory=list)
    """Members that fell silent, and the time of day in seconds."""
    carried: int = 0
    """Bytes of exchanges that were committed: of each those of the way that had more, for it takes as long as that."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held out, by round."""

    @classmethod
    def of(cls, log: Path, stops: float = math.inf, begin: float = 0.0) -> Seen:
        """`stops`: the time of day at which the first of them was told to stop, which breaks its partner's exchange off. Before
        the time of day `begin`, outer steps and exchanges do not count."""
        seen = cls()
        for line in log.read_text(encoding="utf-8").splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                seen.trouble.append(line)
                continue
            fields: dict[str, Any] = told["fields"]
            at = datetime.fromisoformat(told["time"]).timestamp()
            match told["event"]:
                case "state_changed" if fields["state"] == "stopping":
                    break  # what is given up for a stop is not wrong
                case "exchange_ended" if at >= begin:
                    seen.outcomes[fields["outcome"]] += 1
                    if fields["outcome"] in _ENDED and at < stops:
                        seen.trouble.append(told["message"])
                case "folded" if at >= begin and fields["like"].startswith(_BUSY):
                    seen.outcomes["busy"] += fields["count"]
                case "outer_step" if at >= begin:
                    seen.steps[fields["kind"]] += 1
                    seen.order += fields["kind"][0]
                    seen.carried += max(fields.get("sent", 0), fields.get("received", 0))
                    if "exchange_seconds" in fields:
                        seen.exchange_seconds.append(fields["exchange_seconds"])
                case "evaluated":
                    seen.losses[fields["round"]] = fields["loss"]
                case "checkpointed":
                    seen.checkpoints.append((fields["seconds"], fields["stopped"], fields["size"]))
                case "weights_fetched":
                    seen.fetched.append(fields["seconds"])
                case "troubled":
                    seen.trouble.append(told["message"])
                case "peer_lost":
                    seen.lost.append((at, told["message"]))
                case "peer_banned":
                    seen.blamed.append(told["message"])
                case "peer_judged":
                    if fields["why"] != Conduct.COMMITTED.words:
                        seen.blamed.append(told["message"])
        return seen

    @property
    def wrong(self) -> list[str]:
        return self.trouble + self.blamed + (["weights were fetched more than once"] if len(self.fetched) > 1 else [])

    def __str__(self) -> str:
        told = [f"{self.steps['paired']} paired, {self.steps['solo']} solo outer steps ({self.order})"]
        told.append(", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items())))
        if self.exchange_seconds:
            told.append(f"an exchange took {min(self.exchange_seconds):.0f} to {max(self.exchange_seconds):.0f} s")
        if self.checkpoints:
            took, stopped, size = max(self.checkpoints)
            of = f"{len(self.checkpoints)} checkpoints of {size / 1e6:.0f} MB"
            told.append(f"{of}, in {took:.0f} s at most, for {stopped:.2f} s of which training stood still")
        told += [f"weights fetched in {seconds:.0f} s" for seconds in self.fetched]
        return "; ".join(told)
