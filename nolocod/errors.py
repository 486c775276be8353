"""Every failure that a user or a peer can cause, with a stable code, a cause and a remedy.

The rule: an error names its culprit. A `LocalError` stops the command or the daemon with a non-zero
exit status; a `RemoteError` costs the peer that caused it one stream and some reputation, and never
costs us the process. `CATALOGUE` is the whole list; docs/errors.md is made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Entry:
    """One row of the catalogue.

    `code` never changes its meaning; `exit_status` is what the process ends with (local errors only).
    """

    code: str
    title: str
    remedy: str
    exit_status: int = 1


CATALOGUE: dict[str, Entry] = {}
RETIRED = {"NLC-215": "partner draws (`trust.draws`), which were removed"}
"""Codes of earlier releases and what they were about: none is given again."""


def _entry(code: str, title: str, remedy: str, exit_status: int = 1) -> Entry:
    entry = Entry(code, title, remedy, exit_status)
    if code in CATALOGUE or code in RETIRED:
        raise AssertionError(f"error code {code} is given twice")
    CATALOGUE[code] = entry
    return entry


class NolocodError(Exception):
    """The base of all errors that this program raises on purpose.

    `cause` is one sentence about what happened here; the remedy comes from the catalogue unless the
    place that raises knows a better one.
    """

    entry: ClassVar[Entry] = _entry("NLC-000", "unexpected failure", "Report it, with the log and this code.", 70)

    def __init__(self, cause: str, *, remedy: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy or self.entry.remedy

    @property
    def code(self) -> str:
        return self.entry.code

    @property
    def exit_status(self) -> int:
        return self.entry.exit_status

    def __str__(self) -> str:
        return f"{self.code} {self.entry.title}: {self.cause} {self.remedy}"


def on_one_line(error: BaseException, most: int | None = None) -> str:
    """What it says, without line breaks: its first `most` characters."""
    return " ".join(str(error).split())[:most]


# --- what the user can put right -------------------------------------------------------------------


class LocalError(NolocodError):
    """The fault lies on this machine: a flag, a file, a disk, a device."""

    entry = _entry("NLC-001", "local failure", "Read the cause, put it right and start again.")


class UsageError(LocalError):
    entry = _entry("NLC-100", "wrong command line", "See `nolocod --help` or `nolocod COMMAND --help`.", 2)


class RunFileError(LocalError):
    entry = _entry("NLC-101", "run file not valid", "Correct the line and key that are named.", 2)


class UnstableError(RunFileError):
    entry = _entry(
        "NLC-102",
        "outer settings diverge",
        "Choose gamma inside 0 < gamma < 2(1 - alpha^2); gamma = 1 - alpha^2 keeps replicas closest.",
        2,
    )


class ManifestError(LocalError):
    entry = _entry("NLC-103", "manifest altered or not signed", "Get the manifest again from a peer that you trust.")


class WrongRunError(LocalError):
    entry = _entry(
        "NLC-104",
        "wrong run",
        "Use another --data-dir for another run, or a bootstrap address of this run.",
    )


class VersionError(LocalError):
    entry = _entry("NLC-105", "version not compatible", "Install the nolocod release that the run asks for.")


class IdentityError(LocalError):
    entry = _entry(
        "NLC-106",
        "identity file not usable",
        "Restore identity.key from your backup with mode 0600, or remove it to become a new peer.",
    )


class DataDirInUseError(LocalError):
    entry = _entry("NLC-107", "data directory in use", "Stop the other daemon, or give this one its own --data-dir.")


class DataDirError(LocalError):
    entry = _entry("NLC-108", "data directory not usable", "Point --data-dir at a directory that you can write to.")


class PortTakenError(LocalError):
    entry = _entry("NLC-109", "port taken", "Choose another port with --listen or --http, or 0 for any free one.")


class NoBootstrapError(LocalError):
    entry = _entry(
        "NLC-110",
        "no bootstrap answers",
        "Check the address and that the peer is up and reachable; give several --bootstrap addresses.",
    )


class NoDonorError(LocalError):
    entry = _entry("NLC-111", "no peer gave weights", "Wait for a peer that trains, or try other --bootstrap addresses.")


class NetworkKeyError(LocalError):
    entry = _entry(
        "NLC-112",
        "network key differs",
        "Give --network-key the file that the network's nodes share, or leave it out if they have none.",
    )


class NotInvitedError(LocalError):
    entry = _entry("NLC-113", "not invited", "Ask the run's owner for an invitation, and join with --invite TOKEN.")


class InvitationOverError(LocalError):
    entry = _entry("NLC-114", "invitation expired or revoked", "Ask the run's owner for a new one; check this machine's clock.")


class InvitationError(LocalError):
    entry = _entry("NLC-115", "invitation not valid", "Copy the whole token again, or ask the run's owner for another.", 2)


class NotAllowedError(LocalError):
    entry = _entry(
        "NLC-116",
        "not on the peers' allow list",
        "Give the peers' owners what `nolocod id` prints, for their allow lists.",
    )


class NoRelayError(LocalError):
    entry = _entry(
        "NLC-117",
        "no relay to be had",
        "Forward a port of your router to --listen and give it as --announce, or give a --bootstrap that relays.",
    )


class RouterError(LocalError):
    entry = _entry(
        "NLC-118",
        "router gives no port",
        "None needed where punching works; else turn on UPnP in the router, or forward the port that --listen names.",
    )


class DataError(LocalError):
    entry = _entry("NLC-120", "training data not usable", "Point --data at files with text for this run.")


class DiskFullError(LocalError):
    entry = _entry("NLC-121", "disk full", "Free space in the data directory and start again; the last checkpoint is whole.")


class ModelTooLargeError(LocalError):
    entry = _entry("NLC-122", "model does not fit", "Use a device with more memory, or join a run with a smaller model.")


class CheckpointError(LocalError):
    entry = _entry("NLC-123", "checkpoint damaged", "None needed if an older one was used; else remove it and join again.")


class ClockError(LocalError):
    entry = _entry("NLC-124", "clock far off", "Set this machine's clock (NTP); peers refuse heartbeats from another time.")


class TrainerError(LocalError):
    entry = _entry("NLC-125", "trainer failed", "Read the trainer's last lines in the log; it restarts from its checkpoint.")


class DeviceError(LocalError):
    entry = _entry("NLC-126", "device not available", "Choose --device cpu, or one that torch lists on this machine.")


class PowerUnknownError(LocalError):
    entry = _entry("NLC-127", "power supply not known", "Leave --pause-on-battery out where the system tells of no battery.")


class AllowanceError(LocalError):
    entry = _entry("NLC-128", "allowance too small for this run", "Allow more, or join a run with a smaller model.")


class NotRunningError(LocalError):
    entry = _entry("NLC-130", "no daemon runs here", "Start one with `nolocod start` or `join`, or name its --data-dir.")


class NothingToUseError(LocalError):
    entry = _entry("NLC-131", "no checkpoint yet", "Let the node train until its first checkpoint.")


class ReceiptError(LocalError):
    entry = _entry("NLC-132", "receipt does not verify", "It proves nothing: get the file again from whoever showed it.")


class BackupError(LocalError):
    entry = _entry("NLC-133", "identity backup not usable", "Check the file and its passphrase; nothing was changed.")


class ClonedIdentityError(LocalError):
    """Another node speaks with our key: a copied data directory. Peers cannot tell the two apart."""

    entry = _entry(
        "NLC-134",
        "identity in use elsewhere",
        "Stop the other node, or remove identity.key here to become a new peer; keep one node per identity.",
    )


class SoakError(LocalError):
    entry = _entry("NLC-135", "soak broke a promise", "Run it again with the same --seed and --keep, and report it.")


class SimulationError(LocalError):
    entry = _entry("NLC-140", "simulation broke an invariant", "Replay it with the printed seed, and report it.")


class LostStepsError(LocalError):
    """Outer steps that partners took with us, and that our last checkpoint does not hold."""

    entry = _entry(
        "NLC-143",
        "outer steps lost with the process",
        "None needed: training goes on from the checkpoint; --checkpoint-every with fewer seconds loses less.",
    )


class UnacknowledgedError(LocalError):
    """We applied an exchange, and never heard that the partner learnt of the decision."""

    entry = _entry(
        "NLC-144",
        "commit not acknowledged",
        "None needed: the partner may have taken this step alone, or not at all; the next exchange brings both together.",
    )


class HttpTokenError(LocalError):
    entry = _entry(
        "NLC-145",
        "pages need a token",
        "Use a token file that you can read: --http-token FILE, or http.token in the data directory.",
    )


# --- what a peer did -------------------------------------------------------------------------------


class RemoteError(NolocodError):
    """The fault lies with a peer, or with the way to it: the stream ends, and this node goes on."""

    entry = _entry("NLC-200", "peer failed", "None needed: another partner is tried.")


class PeerUnavailableError(RemoteError):
    entry = _entry("NLC-201", "peer not reachable", "None needed: another partner is tried.")


class PeerTooSlowError(RemoteError):
    entry = _entry("NLC-202", "peer made no progress", "None needed: another partner is tried.")


class ProtocolError(RemoteError):
    """A peer sent bytes that our protocol does not allow."""

    entry = _entry("NLC-203", "peer broke the protocol", "None needed; if it is your own node, update it.")


class SignatureError(ProtocolError):
    entry = _entry("NLC-204", "signature does not fit", "None needed: the message was dropped.")


class AlteredBytesError(ProtocolError):
    entry = _entry("NLC-205", "bytes do not fit their signed hash", "None needed: the bytes were dropped.")


class RefusedError(RemoteError):
    """A peer said no, with a reason of its own."""

    entry = _entry("NLC-206", "peer refused", "Read the peer's reason.")


class OtherRunError(RefusedError):
    """A peer belongs to another run; the code is the one that its user knows from the start command."""

    entry = WrongRunError.entry


class RejectedTensorError(RemoteError):
    """A partner's tensor is none of this run, or holds what is not finite: no honest node sends such a thing."""

    entry = _entry("NLC-207", "partner's tensor rejected", "None needed: nothing was applied.")


class MisdirectedTensorError(RejectedTensorError):
    """A partner's change points against our own by more than the run allows; chance alone may do that, rarely."""

    entry = _entry("NLC-216", "partner's change points the wrong way", "None needed: nothing was applied.")


class HarmfulTensorError(RejectedTensorError):
    """With a partner's tensor our held-out loss would be worse than without it; chance alone may do that, rarely."""

    entry = _entry("NLC-217", "partner's tensor does harm", "None needed: nothing was applied.")


class FarWeightsError(RemoteError):
    """A newcomer's donor and other donors disagree; only where loss too speaks against one is it judged."""

    entry = _entry(
        "NLC-218",
        "donor's weights far from other donors'",
        "None needed: another donor's weights are tried, and those with the lower loss on our own text are kept.",
    )


class PeerBusyError(RemoteError):
    entry = _entry("NLC-208", "peer busy", "None needed: it is asked again later.")

    def __init__(self, cause: str, *, retry_after: float) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


class PeerVersionError(RemoteError):
    entry = _entry("NLC-209", "peer speaks another protocol version", "One of the two needs the other's major version.")


class PeerNetworkKeyError(RemoteError):
    entry = _entry("NLC-210", "peer has another network key", "None needed; if it is your own node, give both the same key.")


class PeerNotAllowedError(RemoteError):
    """One of the two is not on the other's allow list."""

    entry = _entry("NLC-211", "peer not on the allow list", "Add its peer id to the file of --allow, or ask it to add ours.")


class AdmissionError(RefusedError):
    """A peer shows an admission that nobody could have given it: forged, or another's."""

    entry = _entry("NLC-212", "peer's admission not valid", "None needed; if it is your own node, join with a new invitation.")


class PeerNotInvitedError(RefusedError):
    """A peer shows no admission; the code is the one that its user knows."""

    entry = NotInvitedError.entry


class PeerInvitationOverError(RefusedError):
    """A peer's invitation has expired or was revoked; the code is the one that its user knows."""

    entry = InvitationOverError.entry


class RelayBudgetError(RefusedError):
    """Only a relay reaches the peer, and it carries less than is to be sent."""

    entry = _entry("NLC-213", "more than the relay carries", "None needed: partners that are reached straight are preferred.")


class BannedError(RefusedError):
    """A peer misbehaved too often, by our count or by its own of us."""

    entry = _entry("NLC-214", "banned for misbehaviour", "None needed: bans expire; if it is your own node, read its log.")


SHUT_OUT: dict[type[RemoteError], type[LocalError]] = {
    PeerNetworkKeyError: NetworkKeyError,
    PeerNotAllowedError: NotAllowedError,
    PeerNotInvitedError: NotInvitedError,
    PeerInvitationOverError: InvitationOverError,
}
"""What a peer that keeps us out says, and what that is on our side, where the remedy is ours too."""
