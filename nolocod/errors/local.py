"""What the user can fix: it stops the command or the daemon."""

from __future__ import annotations

from nolocod.errors.catalogue import NolocodError, listed


class LocalError(NolocodError):
    """The fault lies on this machine: a flag, a file, a disk, a device."""

    entry = listed("NLC-001", "local failure", "Fix the cause and start again.")


class UsageError(LocalError):
    entry = listed("NLC-100", "wrong command line", "See `nolocod --help` or `nolocod COMMAND --help`.", 2)


class RunFileError(LocalError):
    entry = listed("NLC-101", "run file not valid", "Correct the line and the key that the message names.", 2)


class UnstableError(RunFileError):
    entry = listed("NLC-102", "outer settings diverge", "Choose gamma below 2(1 - alpha^2); 1 - alpha^2 is best.", 2)


class ManifestError(LocalError):
    entry = listed("NLC-103", "manifest altered or not signed", "Get the manifest again from a peer that you trust.")


class WrongRunError(LocalError):
    entry = listed("NLC-104", "wrong run", "Use a bootstrap address of this run, or another --data-dir for the other run.")


class VersionError(LocalError):
    entry = listed("NLC-105", "version not compatible", "Install the nolocod release that the run needs.")


class IdentityError(LocalError):
    entry = listed("NLC-106", "identity file not usable", "Restore it from a backup (0600), or remove it to be a new peer.")


class DataDirInUseError(LocalError):
    entry = listed("NLC-107", "data directory in use", "Stop the other daemon, or give this one its own --data-dir.")


class DataDirError(LocalError):
    entry = listed("NLC-108", "data directory not usable", "Point --data-dir at a directory that you can write to.")


class PortTakenError(LocalError):
    entry = listed("NLC-109", "port taken", "Choose another port with --listen or --http, or 0 for any free one.")


class NoBootstrapError(LocalError):
    entry = listed(
        "NLC-110",
        "no bootstrap answers",
        "Check the address, and whether that peer is up and reachable. Give several --bootstrap addresses.",
    )


class NoDonorError(LocalError):
    entry = listed("NLC-111", "no peer gave weights", "Wait until a peer trains, or try other --bootstrap addresses.")


class OwnTensorsError(NoDonorError):
    """This node's libraries make other tensors of the run's model than those of all whom it knows."""

    entry = listed(
        "NLC-119", "libraries make other tensors", "Install the versions of torch and transformers that the peers have."
    )


class NetworkKeyError(LocalError):
    entry = listed("NLC-112", "network key differs", "Give the network's key with --network-key, or none if it has none.")


class NotInvitedError(LocalError):
    entry = listed("NLC-113", "not invited", "Ask the run's owner for an invitation, and join with --invite TOKEN.")


class InvitationOverError(LocalError):
    entry = listed("NLC-114", "invitation expired or revoked", "Ask the run's owner for a new one. Check this machine's clock.")


class InvitationError(LocalError):
    entry = listed("NLC-115", "invitation not valid", "Copy the whole token again, or ask the run's owner for a new one.", 2)


class NotAllowedError(LocalError):
    entry = listed("NLC-116", "not on the peers' allow list", "Send the peers' owners what `nolocod id` prints.")


class NoRelayError(LocalError):
    entry = listed(
        "NLC-117",
        "no relay found",
        "Forward a port of your router to --listen and name it with --announce, or give a --bootstrap that relays.",
    )


class RouterError(LocalError):
    entry = listed(
        "NLC-118",
        "router maps no port",
        "Nothing to do if hole punching works. Else turn on UPnP in the router, or forward the port of --listen.",
    )


class NoSuchRunError(LocalError):
    entry = listed(
        "NLC-160", "run not found", "Give a name that `nolocod runs` lists, or the run's whole link, or --bootstrap."
    )


class DataError(LocalError):
    entry = listed("NLC-120", "training data not usable", "Point --data at text files for this run.")


class DiskFullError(LocalError):
    entry = listed("NLC-121", "disk full", "Free space for the data directory and start again. The last checkpoint is intact.")


class ModelTooLargeError(LocalError):
    entry = listed("NLC-122", "model does not fit", "Use a device with more memory, or join a run with a smaller model.")


class CheckpointError(LocalError):
    entry = listed("NLC-123", "checkpoint damaged", "Nothing to do if an older one was used. Else remove it and join again.")


class ClockError(LocalError):
    entry = listed("NLC-124", "clock far off", "Set this machine's clock (NTP). Invitations and bans go by it.")


class TrainerError(LocalError):
    entry = listed(
        "NLC-125",
        "trainer failed",
        "Nothing to do at first: it restarts from its checkpoint. If it fails again, read its last lines in the log.",
    )


class DeviceError(LocalError):
    entry = listed("NLC-126", "device not available", "Choose --devices cpu, or those that torch lists on this machine.")


class PowerUnknownError(LocalError):
    entry = listed("NLC-127", "power supply not known", "Leave --pause-on-battery out: this system does not report a battery.")


class AllowanceError(LocalError):
    entry = listed("NLC-128", "limit too low for this run", "Raise the limit, or join a run with a smaller model.")


class SensorError(LocalError):
    entry = listed("NLC-170", "sensor not there", "Leave that limit out, or give another one: --duty needs no sensor.")


class SettingError(LocalError):
    entry = listed("NLC-171", "setting not valid", "See `nolocod set --help`.", 2)


class ServiceError(LocalError):
    entry = listed(
        "NLC-172", "service manager refused", "Start the node with `nolocod join`, or mend the manager and try again."
    )


class NotRunningError(LocalError):
    entry = listed("NLC-130", "no daemon runs here", "Start one with `nolocod start` or `join`, or name its --data-dir.")


class FleetFileError(LocalError):
    entry = listed("NLC-190", "fleet's file not valid", "Correct the key that the message names (docs/fleet.md).", 2)


class HostError(LocalError):
    entry = listed("NLC-191", "host of the fleet failed", "Its row has the reason. The same command can be given again.")


class NothingToUseError(LocalError):
    entry = listed("NLC-131", "no checkpoint yet", "Let the node train until its first checkpoint.")


class ReceiptError(LocalError):
    entry = listed("NLC-132", "receipt does not verify", "The receipt proves nothing. Ask for the file again.")


class AmendmentError(LocalError):
    entry = listed("NLC-162", "amendment not valid", "See `nolocod amend --help`, and docs/amendments.md.", 2)


class ContributionsError(LocalError):
    entry = listed("NLC-161", "contributions do not verify", "The file proves nothing. Ask for it again.")


class BackupError(LocalError):
    entry = listed("NLC-133", "identity backup not usable", "Check the file and its passphrase. Nothing was changed.")


class ClonedIdentityError(LocalError):
    """Another node uses our key, from a copied data directory. Peers cannot tell the two apart."""

    entry = listed("NLC-134", "identity in use elsewhere", "Stop the other node, or remove identity.key here to be a new peer.")


class SimulationError(LocalError):
    entry = listed("NLC-140", "simulation broke an invariant", "Replay it with the printed seed, and report it.")


class LostStepsError(LocalError):
    """Outer steps that we took with partners, and that our last checkpoint does not hold."""

    entry = listed("NLC-143", "outer steps lost in a crash", "Nothing to do. A shorter --checkpoint-every loses less.")


class UnacknowledgedError(LocalError):
    """We applied an exchange, and do not know whether the partner did."""

    entry = listed("NLC-144", "commit not acknowledged", "Nothing to do: the next exchange brings both together again.")


class UnsupportedModelError(RunFileError):
    entry = listed("NLC-150", "model not supported", "Take another model, or leave out the key that is named.", 2)


class TooLongError(RunFileError):
    entry = listed("NLC-151", "sequence longer than the model", "Make `inner.sequence` smaller, or the model's key larger.", 2)


class BaseModelError(LocalError):
    entry = listed("NLC-152", "base model not usable", "Name a folder, or ID@REVISION of a model on the hub, with safetensors.")


class OtherBaseError(LocalError):
    entry = listed("NLC-153", "base model differs", "Leave --base out, or name the files that the run was founded on.")


class TasksError(LocalError):
    entry = listed("NLC-155", "tasks could not be evaluated", "`lm-eval ls tasks` names all; most are read from the hub once.")


class NoChatTemplateError(LocalError):
    entry = listed("NLC-156", "no chat template", "Take a model that has one, or put chat_template.jinja into its folder.")


class ChatTemplateError(LocalError):
    entry = listed("NLC-157", "chat template not usable", "Take another model, or mend chat_template.jinja in its folder.")


class RecordError(DataError):
    entry = listed("NLC-158", "record not usable", "Correct the record, or take other data (docs/fine-tuning.md).")


class HttpTokenError(LocalError):
    entry = listed("NLC-145", "pages need a token", "Use --http-token with a token file that you can read.")


class ParametersDifferError(RunFileError):
    entry = listed("NLC-180", "parameters differ from the run's", "Give NoLoCo the parameters of the run's own model.", 2)


class LoopEndedError(LocalError):
    """Met by the daemon."""

    entry = listed("NLC-181", "training loop ended", "Start the program again: it goes on from the last checkpoint.")


class DaemonEndedError(LocalError):
    """Met by the loop, once."""

    entry = listed("NLC-182", "daemon ended", "Join again with the same data_dir. Who catches this error trains on alone.")


class NoTorchError(LocalError):
    entry = listed(
        "NLC-183",
        "torch not installed",
        "Install its build for this machine: `pip install torch` with an NVIDIA GPU or a Mac, else the one that "
        "https://pytorch.org/get-started/locally/ shows for Pip and CPU, or 3 GB for GPUs come along.",
    )
