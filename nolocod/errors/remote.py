"""What a peer did: it costs the peer one stream and some reputation, and this node goes on."""

from __future__ import annotations

from nolocod.errors.catalogue import NolocodError, listed
from nolocod.errors.local import (
    InvitationOverError,
    LocalError,
    NetworkKeyError,
    NotAllowedError,
    NotInvitedError,
    OwnTensorsError,
    WrongRunError,
)


class RemoteError(NolocodError):
    """The fault lies with a peer, or with the network on the way to it: the stream ends, and this node goes on."""

    entry = listed("NLC-200", "peer failed", "Nothing to do: this node tries another partner.")


class PeerUnavailableError(RemoteError):
    entry = listed("NLC-201", "peer not reachable", "Nothing to do: this node tries another partner.")


class PeerTooSlowError(RemoteError):
    entry = listed("NLC-202", "peer made no progress", "Nothing to do: this node tries another partner.")


class ProtocolError(RemoteError):
    """A peer sent bytes that our protocol does not allow."""

    entry = listed("NLC-203", "peer broke the protocol", "Nothing to do. If it is your own node, update it.")


class SignatureError(ProtocolError):
    entry = listed("NLC-204", "signature not valid", "Nothing to do: the message was dropped.")


class AlteredBytesError(ProtocolError):
    entry = listed("NLC-205", "bytes do not match their signed hash", "Nothing to do: the bytes were dropped.")


class RefusedError(RemoteError):
    """A peer refused, and gave its reason."""

    entry = listed("NLC-206", "peer refused", "Read the reason that the peer gave.")


class OtherRunError(RefusedError):
    """A peer belongs to another run; its user knows the same code."""

    entry = WrongRunError.entry


class OtherTensorsError(RefusedError):
    """The libraries of a peer make other tensors of the run's model; its user knows the same code."""

    entry = OwnTensorsError.entry


class RejectedTensorError(RemoteError):
    """A partner's tensor has the wrong shape for this run, or values that are not finite: no honest node sends that."""

    entry = listed("NLC-207", "partner's tensor rejected", "Nothing to do: nothing was applied.")


class HarmfulTensorError(RejectedTensorError):
    """A partner's tensor would make our held-out loss worse. Rarely, chance alone does that."""

    entry = listed("NLC-217", "partner's tensor makes the loss worse", "Nothing to do: nothing was applied.")


class FarWeightsError(RemoteError):
    """A newcomer's donor and other donors disagree. A donor is penalised only if its loss is worse too."""

    entry = listed("NLC-218", "donor's weights far from other donors'", "Nothing to do: weights with the lower loss are kept.")


class PeerBusyError(RemoteError):
    entry = listed("NLC-208", "peer busy", "Nothing to do: this node asks again later.")

    def __init__(self, cause: str, *, retry_after: float) -> None:
        super().__init__(cause)
        self.retry_after = retry_after


class PeerVersionError(RemoteError):
    entry = listed("NLC-209", "peer speaks another protocol version", "Install the same major version on both nodes.")


class PeerNetworkKeyError(RemoteError):
    entry = listed("NLC-210", "peer has another network key", "Nothing to do. If it is your own node, give both the same key.")


class PeerNotAllowedError(RemoteError):
    """We are not on the peer's allow list, or it is not on ours."""

    entry = listed("NLC-211", "peer not on the allow list", "Add its peer id to your --allow file, or ask it to add yours.")


class AdmissionError(RefusedError):
    """A peer shows an admission that is forged, or another peer's."""

    entry = listed("NLC-212", "peer's admission not valid", "Nothing to do. If it is your own node, invite it again.")


class PeerNotInvitedError(RefusedError):
    """A peer shows no admission; its user knows the same code."""

    entry = NotInvitedError.entry


class PeerInvitationOverError(RefusedError):
    """A peer's invitation has expired or was revoked; its user knows the same code."""

    entry = InvitationOverError.entry


class RelayBudgetError(RefusedError):
    """We reach the peer only through a relay, and the relay carries less than we have to send."""

    entry = listed("NLC-213", "too much for the relay", "Nothing to do: this node prefers partners with a direct connection.")


class BannedError(RefusedError):
    """We banned the peer for misbehaviour, or it banned us."""

    entry = listed("NLC-214", "banned for misbehaviour", "Nothing to do: bans expire. If it is your own node, read its log.")


SHUT_OUT: dict[type[RemoteError], type[LocalError]] = {
    PeerNetworkKeyError: NetworkKeyError,
    PeerNotAllowedError: NotAllowedError,
    PeerNotInvitedError: NotInvitedError,
    PeerInvitationOverError: InvitationOverError,
}
"""Why a peer keeps us out, and the same as our own error, whose remedy our user can follow."""
