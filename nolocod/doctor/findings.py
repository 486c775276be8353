"""The catalogue of the doctor's checks, with their stable codes, and what they found.

The rule: a code never changes its meaning (D30 was the line's throughput), and every finding that is not ok says what to do.
docs/doctor.md is made from `CHECKS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from nolocod import __version__
from nolocod.errors import SHUT_OUT, NolocodError, RemoteError, on_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Status = Literal["ok", "warn", "fail", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """One row of the catalogue. `seconds` is how long it may take; `asks` says what must hold."""

    code: str
    name: str
    asks: str
    remedy: str
    seconds: float = 5.0


_ALL = (
    Check("D01", "python", "Python is 3.11 or newer.", "Install a newer Python, and install nolocod there."),
    Check(
        "D02",
        "torch",
        "torch can be imported.",
        "Install torch again for this Python and processor: https://pytorch.org/get-started.",
        30.0,
    ),
    Check(
        "D03",
        "devices",
        "The devices of --devices, or the one that auto finds, work.",
        "Choose --devices cpu, or those that torch lists on this machine.",
        30.0,
    ),
    Check(
        "D04",
        "memory",
        "The run's model, optimizer and exchange buffers fit into free memory.",
        "Free memory, use a device with more, or join a run with a smaller model.",
        30.0,
    ),
    Check(
        "D05",
        "disk",
        "The disk of the data directory has room for the checkpoints of the run's model.",
        "Free space there, or point --data-dir at a larger disk.",
        30.0,
    ),
    Check(
        "D06",
        "data directory",
        "This user can write or create the data directory, and nobody else can.",
        "Point --data-dir at a directory of your own.",
    ),
    Check(
        "D07",
        "identity",
        "identity.key, if it exists, is intact, and only its owner can read it.",
        "Restore identity.key from your backup with mode 0600, or remove it: the node is then a new peer.",
    ),
    Check(
        "D08",
        "node here",
        "If a node runs in this data directory, it answers.",
        "Stop that process and start the node again.",
        7.0,
    ),
    Check(
        "D09",
        "run",
        "The stored manifest, if it exists, is intact, and this release speaks its protocol version.",
        "Get the manifest again: join with an empty --data-dir.",
    ),
    Check(
        "D10",
        "training data",
        "The run's data source gives text, and the tokenizer can encode it.",
        "Point --data at text files for this run.",
        30.0,
    ),
    Check(
        "D11",
        "port",
        "The port of --listen is free, and its address belongs to this machine.",
        "Choose another port with --listen, or leave it out for any free one.",
    ),
    Check(
        "D12",
        "own addresses",
        "This machine has an address for peers, other than loopback and the bridges of containers.",
        "Connect this machine to a network, or give --announce /ip4/YOUR.ADDRESS/tcp/PORT.",
    ),
    Check(
        "D13",
        "access",
        "The network key, allow list and invitation, if there are any, are intact, not expired, and made for this node.",
        "Ask the run's owner for a new invitation, or for the network key.",
    ),
    Check("D20", "own host", "A libp2p host starts on this machine.", "See D11. If D11 is ok, report this line.", 10.0),
    Check(
        "D21",
        "bootstrap: TCP",
        "The bootstrap address accepts a TCP connection.",
        "Ask the owner of that node whether it is up, and whether its firewall and router let the port through.",
        6.0,
    ),
    Check(
        "D22",
        "bootstrap: peer",
        "A libp2p node answers there, with the peer id at the end of the address.",
        "Ask the owner of that node for its current address: `nolocod status` shows it there.",
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
        "This machine's clock is within 30 s of the peers' clocks. A node that is 600 s off stops.",
        "Set this machine's clock (NTP).",
        9.0,
    ),
    Check(
        "D25",
        "DHT",
        "A peer finds members of the run in the DHT, which is the second way to find members.",
        "Nothing to do while a bootstrap answers. Else give more --bootstrap addresses.",
        9.0,
    ),
    Check(
        "D26",
        "reachability",
        "Peers can connect to this node from outside.",
        "Open or forward the port of --listen, or let relays carry (D28).",
        20.0,
    ),
    Check(
        "D27",
        "UPnP",
        "The router maps a port on request.",
        "Turn on UPnP or NAT-PMP in the router, or forward the port by hand.",
        9.0,
    ),
    Check(
        "D28",
        "relay",
        "A node that is not public gets a reservation at a relay.",
        "Bootstrap from a public node that relays (one started without --no-relay).",
        9.0,
    ),
    Check(
        "D29",
        "punch",
        "A node that is not public gets a direct connection to a peer behind a relay, by hole punching.",
        "Forward a port, or use a router with endpoint-independent mapping. Until then relays carry the traffic.",
        15.0,
    ),
)
CHECKS = {check.code: check for check in _ALL}


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one check found. `about`: the address that was checked. `error`: a code of docs/errors.md."""

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


class Findings:
    """Collects what the checks found and shows it in the order of their codes."""

    def __init__(self, show: Callable[[Finding], None]) -> None:
        self._show = show
        self._found: dict[str, tuple[Finding, ...]] = {}
        self._pending = list(CHECKS)

    def put(self, code: str, *found: Finding) -> None:
        """The findings of check `code`; only the first call for a code counts."""
        self._found.setdefault(code, found)
        while self._pending and self._pending[0] in self._found:
            for finding in self._found[self._pending.pop(0)]:
                self._show(finding)

    def of(self, code: str) -> tuple[Finding, ...]:
        return self._found.get(code, ())

    def missing(self) -> list[str]:
        return [code for code in CHECKS if code not in self._found]

    def skip_from(self, first: str, why: str) -> None:
        """Skip all checks from `first` on that have no finding."""
        for code in self.missing():
            if code >= first:
                self.put(code, skipped(code, why))

    def report(self) -> Report:
        return Report.of(finding for found in self._found.values() for finding in found)


def ok(code: str, found: str) -> Finding:
    """All right: `found` says what there is."""
    return Finding(code, CHECKS[code].name, "ok", found)


def skipped(code: str, why: str) -> Finding:
    """Not checked, for a reason."""
    return Finding(code, CHECKS[code].name, "skipped", why)


def warn(code: str, found: str, remedy: str = "") -> Finding:
    """A problem that a node can live with; the catalogue's remedy unless a better one is given."""
    return Finding(code, CHECKS[code].name, "warn", found, remedy or CHECKS[code].remedy)


def fail(code: str, found: str, remedy: str = "", error: str = "") -> Finding:
    """A problem that a node cannot live with."""
    return Finding(code, CHECKS[code].name, "fail", found, remedy or CHECKS[code].remedy, "", error)


def failed(code: str, error: Exception) -> Finding:
    """An exception as the failure of a check; the error's own remedy where it has one for the user."""
    if not isinstance(error, NolocodError):
        text = f"the check itself failed ({type(error).__name__}: {on_one_line(error, 200)})."
        return fail(code, text, "Report this line.", NolocodError.entry.code)
    local = SHUT_OUT.get(type(error)) if isinstance(error, RemoteError) else None
    remedy = local.entry.remedy if local else error.remedy
    return fail(code, error.cause, "" if remedy.startswith("Nothing to do") else remedy, error.code)
