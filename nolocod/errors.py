"""The catalogue of errors: every failure that a user or a peer can cause, with its code, title and remedy.

The rule: an error names its culprit. A `LocalError` stops the command or the daemon with a non-zero exit status. A
`RemoteError` costs the peer that caused it one stream and some reputation, and never costs us the process.
docs/errors.md is made from `CATALOGUE`.
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
RETIRED = {
    "NLC-135": "what `nolocod soak` found broken; `python -m tests.soak` tells it without a code",
    "NLC-215": "partner draws (`trust.draws`), which were removed",
    "NLC-216": "the direction check (`trust.direction`), which was removed",
}
"""Codes of earlier releases and what they were about: none is given again."""


def _entry(code: str, title: str, remedy: str, exit_status: int = 1) -> Entry:
    entry = Entry(code, title, remedy, exit_status)
    if code in CATALOGUE or code in RETIRED:
        raise AssertionError(f"error code {code} is given twice")
    CATALOGUE[code] = entry
    return entry


class NolocodError(Exception):
    """The base of all errors that this program raises on purpose.

    `cause` is one sentence about what happened; `remedy` replaces the catalogue's where the caller knows a better one.
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


def first_error(group: BaseExceptionGroup[NolocodError]) -> NolocodError:
    """The first error in a group of whatever depth."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error


def on_one_line(error: BaseException, most: int | None = None) -> str:
    """The first `most` characters of its text, without line breaks."""
    return " ".join(str(error).split())[:most]


# --- what the user can fix -------------------------------------------------------------------


class LocalError(NolocodError):
    """The fault lies on this machine: a flag, a file, a disk, a device."""

    entry = _entry("NLC-001", "local failure", "Fix the cause and start again.")


class UsageError(LocalError):
    entry = _entry("NLC-100", "wrong command line", "See `nolocod --help` or `nolocod COMMAND --help`.", 2)


class RunFileError(LocalError):
    entry = _entry("NLC-101", "run file not valid", "Correct the line and the key that the message names.", 2)


class UnstableError(RunFileError):
    entry = _entry("NLC-102", "outer settings diverge", "Choose gamma below 2(1 - alpha^2); 1 - alpha^2 is best.", 2)


class ManifestError(LocalError):
    entry = _entry("NLC-103", "manifest altered or not signed", "Get the manifest again from a peer that you trust.")


class WrongRunError(LocalError):
    entry = _entry("NLC-104", "wrong run", "Use a bootstrap address of this run, or another --data-dir for the other run.")


class VersionError(LocalError):
    entry = _entry("NLC-105", "version not compatible", "Install the nolocod release that the run needs.")


class IdentityError(LocalError):
    entry = _entry("NLC-106", "identity file not usable", "Restore it from a backup (0600), or remove it to be a new peer.")


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
        "Check the address, and whether that peer is up and reachable. Give several --bootstrap addresses.",
    )


class NoDonorError(LocalError):
    entry = _entry("NLC-111", "no peer gave weights", "Wait until a peer trains, or try other --bootstrap addresses.")


class NetworkKeyError(LocalError):
    entry = _entry("NLC-112", "network key differs", "Give the network's key with --network-key, or none if it has none.")


class NotInvitedError(LocalError):
    entry = _entry("NLC-113", "not invited", "Ask the run's owner for an invitation, and join with --invite TOKEN.")


class InvitationOverError(LocalError):
    entry = _entry("NLC-114", "invitation expired or revoked", "Ask the run's owner for a new one. Check this machine's clock.")


class InvitationError(LocalError):
    entry = _entry("NLC-115", "invitation not valid", "Copy the whole token again, or ask the run's owner for a new one.", 2)


class NotAllowedError(LocalError):
    entry = _entry("NLC-116", "not on the peers' allow list", "Send the peers' owners what `nolocod id` prints.")


class NoRelayError(LocalError):
    entry = _entry(
        "NLC-117",
        "no relay found",
        "Forward a port of your router to --listen and name it with --announce, or give a --bootstrap that relays.",
    )


class RouterError(LocalError):
    entry = _entry(
        "NLC-118",
        "router maps no port",
        "Nothing to do if hole punching works. Else turn on UPnP in the router, or forward the port of --listen.",
    )


class NoSuchRunError(LocalError):
    entry = _entry(
        "NLC-160", "run not found", "Give a name that `nolocod runs` lists, or the run's whole link, or --bootstrap."
    )


class DataError(LocalError):
    entry = _entry("NLC-120", "training data not usable", "Point --data at text files for this run.")


class DiskFullError(LocalError):
    entry = _entry("NLC-121", "disk full", "Free space for the data directory and start again. The last checkpoint is intact.")


class ModelTooLargeError(LocalError):
    entry = _entry("NLC-122", "model does not fit", "Use a device with more memory, or join a run with a smaller model.")


class CheckpointError(LocalError):
    entry = _entry("NLC-123", "checkpoint damaged", "Nothing to do if an older one was used. Else remove it and join again.")


class ClockError(LocalError):
    entry = _entry("NLC-124", "clock far off", "Set this machine's clock (NTP). Invitations and bans go by it.")


class TrainerError(LocalError):
    entry = _entry(
        "NLC-125",
        "trainer failed",
        "Nothing to do at first: it restarts from its checkpoint. If it fails again, read its last lines in the log.",
    )


class DeviceError(LocalError):
    entry = _entry("NLC-126", "device not available", "Choose --device cpu, or one that torch lists on this machine.")


class PowerUnknownError(LocalError):
    entry = _entry("NLC-127", "power supply not known", "Leave --pause-on-battery out: this system does not report a battery.")


class AllowanceError(LocalError):
    entry = _entry("NLC-128", "limit too low for this run", "Raise the limit, or join a run with a smaller model.")


class NotRunningError(LocalError):
    entry = _entry("NLC-130", "no daemon runs here", "Start one with `nolocod start` or `join`, or name its --data-dir.")


class NothingToUseError(LocalError):
    entry = _entry("NLC-131", "no checkpoint yet", "Let the node train until its first checkpoint.")


class ReceiptError(LocalError):
    entry = _entry("NLC-132", "receipt does not verify", "The receipt proves nothing. Ask for the file again.")


class BackupError(LocalError):
    entry = _entry("NLC-133", "identity backup not usable", "Check the file and its passphrase. Nothing was changed.")


class ClonedIdentityError(LocalError):
    """Another node uses our key, from a copied data directory. Peers cannot tell the two apart."""

    entry = _entry("NLC-134", "identity in use elsewhere", "Stop the other node, or remove identity.key here to be a new peer.")


class SimulationError(LocalError):
    entry = _entry("NLC-140", "simulation broke an invariant", "Replay it with the printed seed, and report it.")


class LostStepsError(LocalError):
    """Outer steps that we took with partners, and that our last checkpoint does not hold."""

    entry = _entry("NLC-143", "outer steps lost in a crash", "Nothing to do. A shorter --checkpoint-every loses less.")


class UnacknowledgedError(LocalError):
    """We applied an exchange, and do not know whether the partner did."""

    entry = _entry("NLC-144", "commit not acknowledged", "Nothing to do: the next exchange brings both together again.")


class UnsupportedModelError(RunFileError):
    entry = _entry("NLC-150", "model not supported", "Take another model, or leave out the key that is named.", 2)


class TooLongError(RunFileError):
    entry = _entry("NLC-151", "sequence longer than the model", "Make `inner.sequence` smaller, or the model's key larger.", 2)


class BaseModelError(LocalError):
    entry = _entry("NLC-152", "base model not usable", "Name a folder, or ID@REVISION of a model on the hub, with safetensors.")


class OtherBaseError(LocalError):
    entry = _entry("NLC-153", "base model differs", "Leave --base out, or name the files that the run was founded on.")


class HttpTokenError(LocalError):
    entry = _entry("NLC-145", "pages need a token", "Use --http-token with a token file that you can read.")


# --- what a peer did -------------------------------------------------------------------------------


class RemoteError(NolocodError):
    """The fault lies with a peer, or with the network on the way to it: the stream ends, and this node goes on."""

    entry = _entry("NLC-200", "peer failed", "Nothing to do: this node tries another partner.")


class PeerUnavailableError(RemoteError):
    entry = _entry("NLC-201", "peer not reachable", "Nothing to do: this node tries another partner.")


class PeerTooSlowError(RemoteError):
    entry = _entry("NLC-202", "peer made no progress", "Nothing to do: this node tries another partner.")


class ProtocolError(RemoteError):
    """A peer sent bytes that our protocol does not allow."""

    entry = _entry("NLC-203", "peer broke the protocol", "Nothing to do. If it is your own node, update it.")


class SignatureError(ProtocolError):
    entry = _entry("NLC-204", "signature not valid", "Nothing to do: the message was dropped.")


class AlteredBytesError(ProtocolError):
    entry = _entry("NLC-205", "bytes do not match their signed hash", "Nothing to do: the bytes were dropped.")


class RefusedError(RemoteError):
    """A peer refused, and gave its reason."""

    entry = _entry("NLC-206", "peer refused", "Read the reason that the peer gave.")


class OtherRunError(RefusedError):
    """A peer belongs to another run; its user knows the same code."""

    entry = WrongRunError.entry


class RejectedTensorError(RemoteError):
    """A partner's tensor has the wrong shape for this run, or values that are not finite: no honest node sends that."""

    entry = _entry("NLC-207", "partner's tensor rejected", "Nothing to do: nothing was applied.")


class HarmfulTensorError(RejectedTensorError):
    """A partner's tensor would make our held-out loss worse. Rarely, chance alone does that."""

    entry = _entry("NLC-217", "partner's tensor makes the loss worse", "Nothing to do: nothing was applied.")


class FarWeightsError(RemoteError):
    """A newcomer's donor and other donors disagree. A donor is penalised only if its loss is worse too."""

    entry = _entry("NLC-218", "donor's weights far from other donors'", "Nothing to do: weights with the lower loss are kept.")


class PeerBusyError(RemoteError):
    entry = _entry("NLC-208", "peer busy", "Nothing to do: this node asks again later.")

    def __init__(self, cause: str, *, retry_after: float) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


class PeerVersionError(RemoteError):
    entry = _entry("NLC-209", "peer speaks another protocol version", "Install the same major version on both nodes.")


class PeerNetworkKeyError(RemoteError):
    entry = _entry("NLC-210", "peer has another network key", "Nothing to do. If it is your own node, give both the same key.")


class PeerNotAllowedError(RemoteError):
    """We are not on the peer's allow list, or it is not on ours."""

    entry = _entry("NLC-211", "peer not on the allow list", "Add its peer id to your --allow file, or ask it to add yours.")


class AdmissionError(RefusedError):
    """A peer shows an admission that is forged, or another peer's."""

    entry = _entry("NLC-212", "peer's admission not valid", "Nothing to do. If it is your own node, invite it again.")


class PeerNotInvitedError(RefusedError):
    """A peer shows no admission; its user knows the same code."""

    entry = NotInvitedError.entry


class PeerInvitationOverError(RefusedError):
    """A peer's invitation has expired or was revoked; its user knows the same code."""

    entry = InvitationOverError.entry


class RelayBudgetError(RefusedError):
    """We reach the peer only through a relay, and the relay carries less than we have to send."""

    entry = _entry("NLC-213", "too much for the relay", "Nothing to do: this node prefers partners with a direct connection.")


class BannedError(RefusedError):
    """We banned the peer for misbehaviour, or it banned us."""

    entry = _entry("NLC-214", "banned for misbehaviour", "Nothing to do: bans expire. If it is your own node, read its log.")


SHUT_OUT: dict[type[RemoteError], type[LocalError]] = {
    PeerNetworkKeyError: NetworkKeyError,
    PeerNotAllowedError: NotAllowedError,
    PeerNotInvitedError: NotInvitedError,
    PeerInvitationOverError: InvitationOverError,
}
"""Why a peer keeps us out, and the same as our own error, whose remedy our user can follow."""
