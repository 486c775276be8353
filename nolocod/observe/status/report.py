"""The status report: the structs that are the whole of /status.json.

The rule: the report has no clock times, only ages in seconds, so that a reader's clock does not matter;
and no number in it is NaN or infinite (`None` instead), so that it is JSON everywhere.
"""

from __future__ import annotations

import msgspec

from nolocod.observe.events import Contribution, NatClass, Reach, Relaying


class ExchangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ended exchange. `age` is seconds since its end; `spread` is there once it was applied."""

    partner: str
    role: str
    outcome: str
    sent: int
    received: int
    seconds: float
    spread: float | None
    error: str
    reason: str
    age: float


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One peer. `age` is seconds since what it says changed; a peer that is connected but not (yet) a
    live member has an empty `state`."""

    peer_id: str
    round: int | None = None
    tokens: int | None = None
    loss: float | None = None
    state: str = ""
    reach: Reach | None
    """How it is connected now, if it is."""
    nat: NatClass | None = None
    """How others reach it, as it says itself."""
    age: float
    reputation: float | None
    """From 0 to 1; None for a peer without conduct to judge."""
    banned_for: float | None
    """Seconds, while it is banned."""


class ErrorRow(msgspec.Struct, frozen=True, kw_only=True):
    """`title` and `remedy` are the catalogue's."""

    code: str
    message: str
    age: float
    title: str = ""
    remedy: str = ""


class CurveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Losses by inner steps of this process, oldest first; each point may be the mean of several."""

    training: tuple[tuple[int, float], ...] = ()
    validation: tuple[tuple[int, float], ...] = ()


class AllowanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic and the owner's limits. Bytes, bytes per second; None for no limit."""

    sent: int = 0
    """All bytes on the connections to peers, by this process."""
    received: int = 0
    sending: float = 0.0
    receiving: float = 0.0
    max_upload: int | None = None
    max_download: int | None = None
    month: str = ""
    """Like "2025-06", UTC."""
    month_used: int = 0
    """Sent and received, over restarts."""
    monthly_budget: int | None = None
    hours: tuple[str, ...] = ()
    """Local time; empty for all hours."""
    pause_on_battery: bool = False
    limits: dict[str, str] = {}
    """Of the machine, by their keys, as they are shown; those alone that were given."""
    share: float = 1.0
    """Of the time in which the trainer may compute now ..."""
    share_why: str = ""
    """... if that is less than its owner gave it, why ..."""
    temperature: float | None = None
    """... with what was measured, in °C and watts, where a limit asks for it."""
    power: float | None = None
    paused: str = ""
    """The reason (events.PauseReason) while the node is paused."""
    paused_why: str = ""
    resumes_in: float | None = None
    """Seconds; None if that does not depend on the clock."""


class ComingReport(msgspec.Struct, frozen=True, kw_only=True):
    """A donor's weights that this node fetches. Bytes, bytes per second, seconds."""

    donor: str
    here: int
    size: int
    rate: float
    """Mean of the last minute."""
    left: float | None
    """None while nothing comes."""


class RelayRow(msgspec.Struct, frozen=True, kw_only=True):
    """A relay that keeps a reservation for this node, for `seconds` more unless it is renewed."""

    peer_id: str
    seconds: float


class ReachReport(msgspec.Struct, frozen=True, kw_only=True):
    """How others reach this node."""

    kind: NatClass | None = None
    """None while it is not known."""
    why: str = ""
    """What was seen, and what the owner can do about it."""
    addresses: tuple[str, ...] = ()
    """Those that peers are told, best first."""
    relays: tuple[RelayRow, ...] = ()
    punches: int = 0
    """Attempts to replace a relayed connection by a direct one."""
    punched: int = 0
    """Those that succeeded."""
    healed: int = 0
    """Times that another part of the run was found again."""
    carried: Relaying = Relaying(0, 0, 0, 0)


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a node tells about itself. Bytes, seconds, nats per token.

    Counts are those of this process: a restart begins them anew, while `round` goes on.
    """

    version: str
    peer_id: str
    run_id: str
    run_name: str
    addresses: tuple[str, ...]
    http: str
    pid: int
    state: str
    waiting_for: str = ""
    uptime: float = 0.0
    since: float = 0.0
    """Seconds in this state."""
    round: int = 0
    inner_steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    """Mean of the last minute."""
    loss: float | None = None
    validation_loss_first: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    outer_paired: int = 0
    outer_solo: int = 0
    exchanging_with: str | None = None
    exchanges_by_outcome: dict[str, int] = {}
    exchanges: tuple[ExchangeRow, ...] = ()
    """The last 20, newest first."""
    checkpoint_round: int | None = None
    checkpoint_age: float | None = None
    amended: tuple[str, ...] = ()
    """What the run's owners changed of it lately, in words."""
    devices: tuple[str, ...] = ()
    """That share its inner steps, as torch names them."""
    mfu: float | None = None
    """Operations of the model over those that the devices could do, lately; None where that is not known."""
    text_wait: float = 0.0
    """Seconds for which inner steps waited for text."""
    memory: dict[str, int] = {}
    """Bytes that training takes, by part (events.MemoryTaken)."""
    text_trouble: str = ""
    """Why no new text to train on comes, and the last is trained on again; empty while it comes."""
    peers: tuple[PeerRow, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    """The last 20, newest first."""
    sent: int = 0
    received: int = 0
    utilisation: float = 0.0
    """Share of the uptime spent in training steps."""
    tasks: int = 0
    """Of the network process, all at this moment: a count that only grows is a leak."""
    weights: ComingReport | None = None
    """While this node fetches them."""
    allowance: AllowanceReport = AllowanceReport()
    reach: ReachReport = ReachReport()
    curve: CurveReport = CurveReport()
    given: Contribution | None = None
    """By this node, as receipts that both partners signed show it, over restarts."""
    contributors: tuple[Contribution, ...] = ()
    """Those of the run that gave most, this node among them, as far as it knows."""
