"""What is checked, and what was found: the catalogue of checks with their stable codes.

The rule: a code never changes its meaning, and every check that is not all right says what to do.
docs/doctor.md is made from `CHECKS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from nolocod import __version__
from nolocod.errors import SHUT_OUT, NolocodError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterable

Status = Literal["ok", "warn", "fail", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """One row of the catalogue. `seconds` is how long it may take; `asks` says what must hold."""

    code: str
    name: str
    asks: str
    remedy: str
    seconds: float = 5.0


_ALL = (
    Check("D01", "python", "Python is 3.11 or newer.", "Install a newer Python, and nolocod into an environment of it."),
    Check(
        "D02",
        "torch",
        "torch can be imported in a process of its own.",
        "Install torch anew for this Python and processor: https://pytorch.org/get-started.",
        30.0,
    ),
    Check(
        "D03",
        "device",
        "The device that --device names (or auto finds) computes.",
        "Choose --device cpu, or one that torch lists on this machine.",
        30.0,
    ),
    Check(
        "D04",
        "memory",
        "The run's model, its optimizer and the exchange's boxes fit into free memory.",
        "Free memory, use a device with more, or join a run with a smaller model.",
        30.0,
    ),
    Check(
        "D05",
        "disk",
        "The data directory's disk has room for the checkpoints of the run's model.",
        "Free space there, or point --data-dir at a larger disk.",
        30.0,
    ),
    Check(
        "D06",
        "data directory",
        "The data directory can be written, or made, by this user and by nobody else.",
        "Point --data-dir at a directory of your own.",
    ),
    Check(
        "D07",
        "identity",
        "identity.key, if there is one, is whole and readable by its owner alone.",
        "Restore identity.key from your backup with mode 0600, or remove it to become a new peer.",
    ),
    Check(
        "D08",
        "node here",
        "Whether a node runs in this data directory, and answers.",
        "Stop that process and start the node again.",
        7.0,
    ),
    Check(
        "D09",
        "run",
        "The stored manifest, if there is one, is whole and of a version that this release speaks.",
        "Get the manifest again: join with an empty --data-dir.",
    ),
    Check(
        "D10",
        "training data",
        "The run's source gives text, and the tokenizer takes it.",
        "Point --data at files with text for this run.",
        30.0,
    ),
    Check(
        "D11",
        "port",
        "The port of --listen is free and its address this machine's.",
        "Choose another port with --listen, or leave it out for any free one.",
    ),
    Check(
        "D12",
        "own addresses",
        "There is an address of this machine, not of loopback or a container's bridge alone, that peers can be told.",
        "Connect this machine to a network, or say --announce /ip4/YOUR.ADDRESS/tcp/PORT.",
    ),
    Check(
        "D13",
        "access",
        "Network key, allow list and invitation, where there are any, are whole, not expired, and made for this node.",
        "Ask the run's owner for a new invitation, or for the network's key.",
    ),
    Check("D20", "own host", "A libp2p host comes up here.", "See D11; else report it with this line.", 10.0),
    Check(
        "D21",
        "bootstrap: TCP",
        "A TCP connection to the address comes about.",
        "Ask whoever runs that node whether it is up, and whether its port is open in firewall and router.",
        6.0,
    ),
    Check(
        "D22",
        "bootstrap: peer",
        "Behind the address is a libp2p node, and the one whose peer id the address ends in.",
        "Get the current address from whoever runs that node: `nolocod status` there shows it.",
        8.0,
    ),
    Check(
        "D23",
        "bootstrap: run",
        "That node is in the run, and speaks this release's protocol version.",
        "Use a bootstrap address of the run, or another --data-dir for another run.",
        9.0,
    ),
    Check(
        "D24",
        "clock",
        "This machine's clock is within 30 s of the peers' (their heartbeats tell the time); 600 s off ends a node.",
        "Set this machine's clock (NTP).",
        9.0,
    ),
    Check(
        "D25",
        "DHT",
        "A peer answers who is in the run by the DHT, the second way to find members.",
        "None needed while a bootstrap answers; else give more --bootstrap addresses.",
        9.0,
    ),
    Check(
        "D26",
        "reachability",
        "Peers can connect to this node from outside.",
        "Open or forward the port of --listen, or leave it to relays (D28).",
        20.0,
    ),
    Check(
        "D27",
        "UPnP",
        "The router maps a port when it is asked.",
        "Turn UPnP or NAT-PMP on in the router, or forward the port by hand.",
        9.0,
    ),
    Check(
        "D28",
        "relay",
        "Where this node is not public, a relay keeps a place for it.",
        "Bootstrap from a public node that relays (one started without --no-relay).",
        9.0,
    ),
    Check(
        "D29",
        "punch",
        "Where this node is not public, a straight connection can be punched to a peer that is met through a relay.",
        "None that is sure: a router with endpoint-independent mapping, or a forwarded port. Relays carry meanwhile.",
        15.0,
    ),
    Check(
        "D30",
        "throughput",
        "A sample of at most 3 MB to and from a bootstrap is faster than the slowest rate that a run can be trained at.",
        "Look at what else uses the line; --max-upload below 256kbit makes partners give up.",
        14.0,
    ),
)
CHECKS = {check.code: check for check in _ALL}


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one check found. `about` is the address or peer that it was about, `error` a code of docs/errors.md."""

    code: str
    name: str
    status: Status
    found: str
    remedy: str = ""
    about: str = ""
    error: str = ""


class Report(msgspec.Struct, frozen=True, rename={"findings": "checks"}):
    """All findings, in the order of their codes. `ok`: nothing failed."""

    version: str
    ok: bool
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        listed = tuple(sorted(findings, key=lambda finding: finding.code))
        return cls(__version__, all(finding.status != "fail" for finding in listed), listed)


def ok(code: str, found: str, about: str = "") -> Finding:
    """All right: `found` says what there is."""
    return Finding(code, CHECKS[code].name, "ok", found, "", about)


def skipped(code: str, why: str, about: str = "") -> Finding:
    """Not looked at, for a reason."""
    return Finding(code, CHECKS[code].name, "skipped", why, "", about)


def warn(code: str, found: str, remedy: str = "", about: str = "") -> Finding:
    """Something that a node can live with; the catalogue's remedy unless a better one is given."""
    return Finding(code, CHECKS[code].name, "warn", found, remedy or CHECKS[code].remedy, about)


def fail(code: str, found: str, remedy: str = "", about: str = "", error: str = "") -> Finding:
    """Something that a node cannot live with."""
    return Finding(code, CHECKS[code].name, "fail", found, remedy or CHECKS[code].remedy, about, error)


def failed(code: str, error: NolocodError, about: str = "") -> Finding:
    """An error of ours as the finding of a check, in the error's words where it has a remedy for the user."""
    kind = SHUT_OUT.get(type(error)) if isinstance(error, RemoteError) else None
    remedy = kind.entry.remedy if kind else "" if error.remedy.startswith("Nothing to do") else error.remedy
    return fail(code, error.cause, remedy, about, error.code)
