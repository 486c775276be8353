"""The checks of this machine that need neither torch nor a peer.

The rule: files are read and never made; what is not there yet is no fault. Every function blocks on disks at
most, returns one finding, and is given what it needs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nolocod import identity
from nolocod.doctor.findings import Finding, fail, failed, ok, warn
from nolocod.errors import (
    InvitationError,
    InvitationOverError,
    NotInvitedError,
    NotRunningError,
    PortTakenError,
    UsageError,
    VersionError,
)
from nolocod.identity import PeerId
from nolocod.node.data_directory import find_running
from nolocod.observe.status import client
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.transport.listen_addresses import announced, claim, is_bridge
from nolocod.p2p.transport.multiaddrs import dialable, endpoint
from nolocod.proto.envelope import MAJOR
from nolocod.run import credentials, invitations
from nolocod.run.manifest import stored_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.identity import Identity
    from nolocod.node.data_directory import Running
    from nolocod.observe.status.report import StatusReport
    from nolocod.p2p.settings import MeshSettings
    from nolocod.run.invitations import Invitation
    from nolocod.run.manifest import Sealed
    from nolocod.run.paths import DataDir
    from nolocod.units import Address

_OLDEST = (3, 11)
_LITTLE = 1_000_000_000
"""Bytes free below which a disk is worth a warning, whatever the model."""
_CHECKPOINT = 20
"""Bytes per parameter: phi, delta, theta and Adam's two moments, float32."""
_CHECKPOINTS = 3
"""On the disk at once: two that are kept, and the one being written."""
_SERVED = 8
"""Bytes per parameter of the weights that are served to, or fetched by, a newcomer."""


@dataclass(frozen=True)
class Here:
    """The node of this data directory, if one runs: what it left in the directory, and what its status says."""

    running: Running | None = None
    report: StatusReport | None = None
    pid: str = ""
    """Of whoever holds the lock; empty if nobody does."""

    @property
    def held(self) -> bool:
        """Whether the identity is in use."""
        return bool(self.pid)


def python_version(found: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """D01."""
    text = ".".join(map(str, found))
    return ok("D01", f"Python {text}.") if found[:2] >= _OLDEST else fail("D01", f"Python {text} is older than 3.11.")


def disk(paths: DataDir, parameters: int | None) -> Finding:
    """D05: free space against what a model of so many parameters needs; None where no run is known."""
    free = shutil.disk_usage(_existing(paths.root)).free
    there = sum(file.stat().st_size for file in paths.checkpoints.rglob("*") if file.is_file())
    if parameters is None:
        text = f"{_size(free)} free; how much is needed is not known without a run."
        return ok("D05", text) if free >= _LITTLE else warn("D05", text)
    one = _CHECKPOINT * parameters
    needed = max(one, _CHECKPOINTS * one - there) + _SERVED * parameters
    text = f"{_size(free)} free, {_size(needed)} needed for the checkpoints of {parameters:,} parameters."
    if free < needed:
        return fail("D05", text)
    return ok("D05", text) if free - needed >= _LITTLE else warn("D05", text)


def data_directory(paths: DataDir) -> Finding:
    """D06."""
    root = paths.root
    if not root.exists():
        parent = _existing(root)
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            return ok("D06", f"{root} is not there yet and can be made.")
        return fail("D06", f"{root} cannot be made: {parent} is not writable.")
    if not root.is_dir():
        return fail("D06", f"{root} is no directory.")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return fail("D06", f"{root} cannot be read and written by this user.")
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & 0o022:
        return warn("D06", f"{root} can be written by other users (mode {mode:04o}).", f"Run: chmod go-w {root}")
    return ok("D06", f"{root} can be written.")


def identity_file(paths: DataDir) -> tuple[Finding, Identity | None]:
    """D07, and the identity. Raises IdentityError."""
    if not paths.identity.exists():
        return ok("D07", "none yet; the first start makes one."), None
    found = identity.load_or_create(paths.identity)
    return ok("D07", f"{found.peer_id}."), found


def node_here(paths: DataDir) -> tuple[Finding, Here]:
    """D08: by the lock, which a node holds for as long as it lives, and by its status page."""
    pid = _holder(paths.lock)
    if not pid:
        return ok("D08", "no node runs here."), Here()
    try:
        running = find_running(paths)
        report = client.read(running)
    except NotRunningError as error:
        joining = f"process {pid} holds the directory, and is not up yet."
        found = warn("D08", joining if not paths.daemon.exists() else f"process {pid} holds the directory, but {error.cause}")
        return found, Here(pid=pid)
    return ok("D08", f"process {running.pid} runs here: {report.state}; it is asked for what only it knows."), Here(
        running, report, pid
    )


def _holder(lock: Path) -> str:
    """The process that holds the lock, "unknown" where it left no number; empty if nobody holds it."""
    try:
        handle = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        # shared, and given back at once: a node that starts this very moment is the only one it could be in the way of
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(handle)
    return ""


def stored_run(paths: DataDir) -> tuple[Finding, Sealed | None]:
    """D09, and the run. Raises ManifestError or VersionError."""
    sealed = stored_manifest(paths)
    if sealed is None:
        return ok("D09", "belongs to no run yet; a bootstrap tells which one it is."), None
    if sealed.manifest.protocol != MAJOR:
        cause = f"the run needs protocol version {sealed.manifest.protocol}, this release speaks {MAJOR}."
        return failed("D09", VersionError(cause)), sealed
    return ok("D09", f"{sealed.manifest.name} ({sealed.run_id[:12]})."), sealed


def port(listen: Sequence[Address], here: Here) -> Finding:
    """D11."""
    told, running = " and ".join(map(str, listen)), here.running
    own = {found[1] for address in running.addresses if (found := endpoint(_transport(address)))} if running else set()
    if any(address.port in own for address in listen):
        return ok("D11", f"{told} is this directory's own node.")
    try:
        bound = claim(listen)
    except (PortTakenError, UsageError) as error:
        if isinstance(error, PortTakenError) and here.held and running is None:
            taken = f"{told} is in use, as it seems by process {here.pid}, which holds this directory and is not up yet."
            return warn("D11", taken, "Ask again when it is up, or has ended.")
        return failed("D11", error)
    if all(address.port == 0 for address in listen):
        return ok("D11", f"{told}: there are free ports.")
    return ok("D11", f"{' and '.join(map(str, bound))} is free.")


def own_addresses(listen: Sequence[Address], announce: Sequence[str], running: Running | None) -> Finding:
    """D12: what peers are, or would be, told."""
    wrong = [address for address in announce if not dialable(address)]
    if wrong:
        return fail("D12", f"--announce {wrong[0]!r} cannot be dialled.", "Write it like /ip4/203.0.113.7/tcp/4001.")
    told = [_transport(address) for address in running.addresses] if running else announced(_bound(listen), announce)
    if not told:
        return fail("D12", "this machine has no address that peers could be told.")
    shown = ", ".join(told[:3])
    if announce or running:
        return ok("D12", f"peers are told {shown}.")
    hosts = [found[0] for address in told if (found := endpoint(address))]
    if all(_loopback(host) for host in hosts):
        return warn("D12", f"only {shown}: peers on other machines cannot reach it.")
    if all(_loopback(host) or is_bridge(host) for host in hosts):
        return warn("D12", f"only {shown}, which belong to bridges of containers.")
    return ok("D12", f"peers are told {', '.join(hosts[:3])}.")


@dataclass(frozen=True)
class Credentials:
    """What this node shows others, and whom it lets in."""

    gate: ConnectionGater = field(default_factory=ConnectionGater)
    bootstrap: tuple[str, ...] = ()
    """That came with an invitation."""


def credentials_in_order(
    config: MeshSettings, own: PeerId | None, sealed: Sealed | None, now: float
) -> tuple[Finding, Credentials]:
    """D13 at the time of day `now`. Raises UsageError, InvitationError, InvitationOverError or NotInvitedError."""
    wanted = config.access
    token = invitations.read_token(wanted.invite) if wanted.invite else None
    named = credentials.read_network_key(wanted.network_key) if wanted.network_key else None
    key = named or (token.network_key if token else None) or credentials.stored_network_key(config.paths)
    gate = ConnectionGater.reading(credentials.prologue(key), wanted.allow, credentials.read_allow_list)
    told = ["a network key" if key else "", f"an allow list of {len(gate.allowed)}" if gate.allowed is not None else ""]
    if token is not None:
        told.append(_invited(invitations.unchecked(token), own, sealed, now))
    elif sealed is not None and sealed.manifest.access == "invited":
        told.append(_admitted(config.paths, own, sealed, now))
    text = ", ".join(filter(None, told))
    return ok("D13", f"{text}." if text else "anybody may connect."), Credentials(gate, token.bootstrap if token else ())


def _invited(invitation: Invitation, own: PeerId | None, sealed: Sealed | None, now: float) -> str:
    if invitation.peer is not None and invitation.peer != own:
        raise InvitationError(f"it was made for {invitation.peer}, and this node is {own or 'not made yet'}.")
    if sealed is not None and invitation.run_id != sealed.run_id:
        raise InvitationError(f"it is for run {invitation.run_id[:12]}, and this directory belongs to {sealed.run_id[:12]}.")
    return f"an invitation {_until(invitation, now)}"


def _admitted(paths: DataDir, own: PeerId | None, sealed: Sealed, now: float) -> str:
    if own == sealed.manifest.owner:
        return "the run is this node's own"
    admission = credentials.stored_admission(paths)
    if own is None or not admission:
        raise NotInvitedError(f"run {sealed.manifest.name} is for those who are invited, and this node is not.")
    credentials.check_own(admission, own, sealed)
    invitation = invitations.open_admission(admission, own, PeerId(sealed.manifest.owner), sealed.run_id)
    return f"an admission {_until(invitation, now)}"


def _until(invitation: Invitation, now: float) -> str:
    """For how long it lasts; InvitationOverError if it does no more."""
    left = invitation.expires - now
    if left <= 0:
        raise InvitationOverError(f"it has expired {-left / 3600:.0f} hours ago.")
    return f"for {left / 86_400:.0f} days" if left > 172_800 else f"for {left / 3600:.0f} hours"


def _bound(listen: Sequence[Address]) -> list[Address]:
    """As if bound: some port, where any will do."""
    return [address if address.port else type(address)(address.host, 1) for address in listen]


def _transport(address: str) -> str:
    return address.partition("/p2p/")[0]


def _loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _existing(path: Path) -> Path:
    """The nearest folder above `path` that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
