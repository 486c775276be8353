"""The checks of this machine that need neither torch nor a peer.

The rule: files are read and never created; a file that does not exist yet is no fault. Every check blocks on disks at
most.
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
from nolocod.disk import USUAL_RATE
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
from nolocod.node.config import NodeConfig
from nolocod.node.data_directory import find_running
from nolocod.observe.status import client
from nolocod.observe.status.access import is_loopback
from nolocod.observe.words import amount, duration
from nolocod.p2p.limits.connection_gater import ConnectionGater
from nolocod.p2p.transport.listen_addresses import announced, claim, is_bridge
from nolocod.p2p.transport.multiaddrs import dialable, endpoint
from nolocod.proto.envelope import MAJOR
from nolocod.run import credentials, invitations
from nolocod.run.manifest import stored_manifest
from nolocod.trainer.patience import CHECKPOINT_BYTES
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nolocod.identity import Identity, PeerId
    from nolocod.node.data_directory import Running
    from nolocod.observe.status.report import StatusReport
    from nolocod.p2p.settings import MeshSettings
    from nolocod.paths import DataDir
    from nolocod.run.invitations import Invitation
    from nolocod.run.manifest import Sealed

_OLDEST = (3, 11)
_LITTLE = 1_000_000_000
"""Bytes: less free space than that is a warning, whatever the model."""
_CHECKPOINTS = 3
"""On the disk at once: two that are kept, and one that is being written."""
_SERVED = 8
"""Bytes per parameter of a snapshot that is served or fetched."""


@dataclass(frozen=True)
class Here:
    """The node that runs in this data directory: what it wrote there, and its status; all empty if none runs."""

    running: Running | None = None
    report: StatusReport | None = None
    pid: str = ""
    """Of the process that holds the lock; empty if none does."""

    @property
    def held(self) -> bool:
        """Whether the identity is in use."""
        return bool(self.pid)


def python_version(found: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """D01."""
    text = ".".join(map(str, found))
    return ok("D01", f"Python {text}.") if found[:2] >= _OLDEST else fail("D01", f"Python {text} is older than 3.11.")


def room_for(parameters: int, there: int = 0) -> int:
    """Bytes that a node of such a model needs on its disk at most, beside what is `there` of checkpoints."""
    one = CHECKPOINT_BYTES * parameters
    return max(one, _CHECKPOINTS * one - there) + _SERVED * parameters


def disk(paths: DataDir, parameters: int | None) -> Finding:
    """D05: free space against the need of a model with so many parameters; None where no run is known."""
    free = shutil.disk_usage(_existing(paths.root)).free
    there = sum(file.stat().st_size for file in paths.checkpoints.rglob("*") if file.is_file())
    if parameters is None:
        text = f"{amount(free)} free; the need is not known without a run."
        return ok("D05", text) if free >= _LITTLE else warn("D05", text)
    needed = room_for(parameters, there)
    text = f"{amount(free)} free, {amount(needed)} needed for the checkpoints of {parameters:,} parameters."
    last = CHECKPOINT_BYTES * parameters / USUAL_RATE
    text += f" The last one takes a disk of {amount(USUAL_RATE)}/s {duration(last)}: "
    text += f"SIGTERM leaves it {NodeConfig.stop_within:.0f} s, or as long as --stop-within says."
    if free < needed:
        return fail("D05", text)
    return ok("D05", text) if free - needed >= _LITTLE else warn("D05", text)


def data_directory(paths: DataDir) -> Finding:
    """D06."""
    root = paths.root
    if not root.exists():
        parent = _existing(root)
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            return ok("D06", f"{root} does not exist yet and can be created.")
        return fail("D06", f"{root} cannot be created: {parent} is not writable.")
    if not root.is_dir():
        return fail("D06", f"{root} is not a directory.")
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return fail("D06", f"this user cannot read and write {root}.")
    mode = stat.S_IMODE(root.stat().st_mode)
    if mode & 0o022:
        return warn("D06", f"other users can write {root} (mode {mode:04o}).", f"Run: chmod go-w {root}")
    return ok("D06", f"this user can write {root}.")


def identity_file(paths: DataDir) -> tuple[Finding, Identity | None]:
    """D07, and the identity. Raises IdentityError."""
    if not paths.identity.exists():
        return ok("D07", "none yet; the first start creates one."), None
    found = identity.load_or_create(paths.identity)
    return ok("D07", f"{found.peer_id}."), found


def node_here(paths: DataDir) -> tuple[Finding, Here]:
    """D08: by the lock, which a node holds while it lives, and by its status page."""
    if not (pid := _holder(paths.lock)):
        return ok("D08", "no node runs here."), Here()
    try:
        running = find_running(paths)
        report = client.read(running)
    except NotRunningError as error:
        joining = f"process {pid} holds the directory, but is not up yet."
        found = warn("D08", joining if not paths.daemon.exists() else f"process {pid} holds the directory, but {error.cause}")
        return found, Here(pid=pid)
    return ok("D08", f"process {running.pid} runs here: {report.state}. The doctor asks it for what only it knows."), Here(
        running, report, pid
    )


def _holder(lock: Path) -> str:
    """The process that holds the lock, "unknown" if it wrote no number; empty if none holds it."""
    try:
        handle = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        # shared and given back at once, so that it hardly disturbs a node that starts at this moment
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
    if (sealed := stored_manifest(paths)) is None:
        return ok("D09", "no run yet; a bootstrap address decides which one."), None
    if sealed.manifest.protocol != MAJOR:
        cause = f"the run needs protocol version {sealed.manifest.protocol}, this release speaks {MAJOR}."
        return failed("D09", VersionError(cause)), sealed
    return ok("D09", f"{sealed.manifest.name} ({sealed.run_id[:12]})."), sealed


def port(listen: Sequence[Address], here: Here) -> Finding:
    """D11."""
    addresses, running = " and ".join(map(str, listen)), here.running
    own = {found[1] for address in running.addresses if (found := endpoint(_transport(address)))} if running else set()
    if any(address.port in own for address in listen):
        return ok("D11", f"{addresses} belongs to this directory's own node.")
    try:
        with claim(listen):
            return ok("D11", f"{addresses} is free." if any(one.port for one in listen) else f"{addresses}: any port will do.")
    except (PortTakenError, UsageError) as error:
        if isinstance(error, PortTakenError) and here.held and running is None:
            taken = f"{addresses} is in use, probably by process {here.pid}, which holds this directory but is not up yet."
            return warn("D11", taken, "Run the doctor again when it is up, or has ended.")
        return failed("D11", error)


def own_addresses(listen: Sequence[Address], announce: Sequence[str], running: Running | None) -> Finding:
    """D12: the addresses that peers are told, or would be."""
    wrong = [address for address in announce if not dialable(address)]
    if wrong:
        return fail("D12", f"--announce {wrong[0]!r} cannot be dialled.", "Write it like /ip4/203.0.113.7/tcp/4001.")
    if running:
        found = [_transport(address) for address in running.addresses]
    else:  # as if bound: any port will do
        found = list(announce or announced([Address(one.host, one.port or 1) for one in listen]))
    if not found:
        return fail("D12", "this machine has no address for peers.")
    shown = ", ".join(found[:3])
    if announce or running:
        return ok("D12", f"peers are told {shown}.")
    hosts = [parts[0] for address in found if (parts := endpoint(address))]
    if all(is_loopback(host) for host in hosts):
        return warn("D12", f"only {shown}: peers on other machines cannot reach it.")
    if all(is_loopback(host) or is_bridge(host) for host in hosts):
        return warn("D12", f"only {shown}: they belong to bridges of containers.")
    return ok("D12", f"peers are told {', '.join(hosts[:3])}.")


@dataclass(frozen=True)
class Credentials:
    """What this node shows to peers, and which peers it accepts."""

    gater: ConnectionGater = field(default_factory=ConnectionGater)
    bootstrap: tuple[str, ...] = ()
    """From the invitation."""


def credentials_in_order(
    config: MeshSettings, own: PeerId | None, sealed: Sealed | None, now: float
) -> tuple[Finding, Credentials]:
    """D13 at the time of day `now`. Raises UsageError, InvitationError, InvitationOverError or NotInvitedError."""
    wanted = config.access
    token = invitations.read_token(wanted.invite) if wanted.invite else None
    named = credentials.read_network_key(wanted.network_key) if wanted.network_key else None
    key = named or (token.network_key if token else None) or credentials.stored_network_key(config.paths)
    gater = ConnectionGater.reading(credentials.prologue(key), wanted.allow, credentials.read_allow_list)
    parts = ["a network key" if key else "", f"an allow list of {len(gater.allowed)}" if gater.allowed is not None else ""]
    if token is not None:
        parts.append(_invited(invitations.unchecked(token), own, sealed, now))
    elif sealed is not None and sealed.manifest.access == "invited":
        parts.append(_admitted(config.paths, own, sealed, now))
    text = ", ".join(filter(None, parts))
    return ok("D13", f"{text}." if text else "anybody may connect."), Credentials(gater, token.bootstrap if token else ())


def _invited(invitation: Invitation, own: PeerId | None, sealed: Sealed | None, now: float) -> str:
    if invitation.peer is not None and invitation.peer != own:
        raise InvitationError(f"it was made for {invitation.peer}, but this node is {own or 'not created yet'}.")
    if sealed is not None and invitation.run_id != sealed.run_id:
        raise InvitationError(
            f"it is for run {invitation.run_id[:12]}, but this directory belongs to run {sealed.run_id[:12]}."
        )
    return f"an invitation {_until(invitation, now)}"


def _admitted(paths: DataDir, own: PeerId | None, sealed: Sealed, now: float) -> str:
    if own == sealed.manifest.owner:
        return "this node owns the run"
    admission = credentials.stored_admission(paths)
    if own is None or not admission:
        raise NotInvitedError(f"run {sealed.manifest.name} is for invited nodes only, and this node is not invited.")
    return f"an admission {_until(credentials.check_own(admission, own, sealed), now)}"


def _until(invitation: Invitation, now: float) -> str:
    """For how long it lasts. Raises InvitationOverError if it has expired."""
    left = invitation.expires - now
    if left <= 0:
        raise InvitationOverError(f"it expired {-left / 3600:.0f} hours ago.")
    return f"for {left / 86_400:.0f} days" if left > 172_800 else f"for {left / 3600:.0f} hours"


def _transport(address: str) -> str:
    return address.partition("/p2p/")[0]


def _existing(path: Path) -> Path:
    """The nearest existing path at or above `path`."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
