"""Prometheus metrics, made from events and nothing else.

The rule: a label's values are a small fixed set. Peer ids are never labels, and what a peer chose
(its state, an error code) is a label only if it is one that we know; all else counts as "other".
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from nolocod import __version__
from nolocod.errors import CATALOGUE, TrainerError
from nolocod.observe.events import (
    MADE_ROOM,
    Allowed,
    Checkpointed,
    DoubtSettled,
    Evaluated,
    ExchangeEnded,
    ExchangeStarted,
    HostChecked,
    InnerSteps,
    NatClass,
    NodeState,
    Outcome,
    OuterStep,
    PartitionHealed,
    Paused,
    PauseReason,
    PeerBanned,
    PeerConnected,
    PeerDisconnected,
    PeerJudged,
    PeerLost,
    PeerSeen,
    Punched,
    Reach,
    ReachFound,
    RelayHeld,
    Relaying,
    RelayLost,
    Resumed,
    Started,
    StateChanged,
    Traffic,
    Troubled,
    WeightsFetched,
    WeightsLoaded,
    WeightsServed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event

_MEMBER_STATES = ("joining", "training", "paused", "finished")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""From a toy model in one room to gigabytes over a home line."""
_WEIGHTS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0)


class Metrics:
    """Follows a node's events; `render` gives the text that Prometheus scrapes.

    `tasks` tells how many the process runs, `clock` the seconds since 1970.
    """

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(
        self,
        tasks: Callable[[], int] | None = None,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if registry is None:
            registry = CollectorRegistry()
            for collector in (
                prometheus_client.ProcessCollector,
                prometheus_client.PlatformCollector,
                prometheus_client.GCCollector,
            ):
                collector(registry=registry)
        # The "_created" twin of every counter doubles the page and tells nothing: they all begin with the process.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
        self._registry = registry
        self._clock = clock
        self._members: dict[PeerId, tuple[str, NatClass | None]] = {}
        self._connections: dict[PeerId, Reach] = {}
        self._moved = {"sent": 0, "received": 0}
        self._relays: set[PeerId] = set()
        self._carried = (0, 0)  # circuits and bytes, as last told
        self._define_training(registry)
        self._define_exchanges(registry)
        self._define_members(registry)
        self._define_node(registry)
        self._define_allowance(registry)
        self._define_reach(registry)
        self._define_trust(registry)
        if tasks is not None:
            running = Gauge("nolocod_tasks", "Of the network process; a count that only grows is a leak.", registry=registry)
            running.set_function(tasks)

    def _define_training(self, to: CollectorRegistry) -> None:
        self._inner_steps = Counter("nolocod_inner_steps", "Inner steps done by this process.", registry=to)
        self._tokens = Counter("nolocod_tokens", "Tokens trained on by this process.", registry=to)
        self._loss = Gauge("nolocod_training_loss_nats", "Mean training loss per token at the last report.", registry=to)
        self._validation = Gauge("nolocod_validation_loss_nats", "Held-out loss per token at the last evaluation.", registry=to)
        self._rate = Gauge("nolocod_learning_rate", "Learning rate of the inner optimizer.", registry=to)
        self._round = Gauge("nolocod_round", "Outer steps behind this replica.", registry=to)
        self._outer = Counter("nolocod_outer_steps", "Outer steps done by this process.", ["kind"], registry=to)
        for kind in ("paired", "solo"):
            self._outer.labels(kind)
        self._solo = Gauge("nolocod_solo_steps_since_paired", "Outer steps since the last paired one.", registry=to)
        self._paired_at = Gauge(
            "nolocod_last_paired_step_timestamp_seconds", "When, since 1970; 0 before this process's first.", registry=to
        )
        self._spread = Gauge(
            "nolocod_partner_spread", "L2 norm of the difference to the last partner's fast weights.", registry=to
        )
        self._activity = Counter(
            "nolocod_activity_seconds", "Seconds spent per activity; some of them overlap.", ["activity"], registry=to
        )
        for activity in ("training", "evaluating", "exchanging", "applying", "checkpointing", "fetching", "serving"):
            self._activity.labels(activity)

    def _define_exchanges(self, to: CollectorRegistry) -> None:
        self._exchanges = Counter("nolocod_exchanges", "Exchanges ended.", ["outcome", "role"], registry=to)
        for outcome in get_args(Outcome):
            for role in ("initiator", "responder"):
                self._exchanges.labels(outcome, role)
        self._failures = Counter(
            "nolocod_exchange_failures", "Exchanges that were not committed, by error code.", ["code"], registry=to
        )
        self._settled = Counter(
            "nolocod_doubts_settled", "Exchanges that ended in doubt, and whose end the partner told later.", registry=to
        )
        self._exchange_seconds = Histogram(
            "nolocod_exchange_duration_seconds", "Duration of the committed exchanges.", buckets=_SECONDS, registry=to
        )
        self._exchange_bytes = Counter(
            "nolocod_exchange_bytes", "Bytes of all exchanges, broken ones too.", ["direction"], registry=to
        )
        for direction in ("sent", "received"):
            self._exchange_bytes.labels(direction)
        self._served = Counter("nolocod_weights_served_bytes", "Bytes of weights given to newcomers.", registry=to)
        self._fetched = Counter("nolocod_weights_fetched_bytes", "Bytes of weights taken from donors.", registry=to)

    def _define_members(self, to: CollectorRegistry) -> None:
        self._members_gauge = Gauge("nolocod_members", "Other live members of the run, by state.", ["state"], registry=to)
        for state in (*_MEMBER_STATES, "other"):
            self._members_gauge.labels(state)
        self._nat_gauge = Gauge(
            "nolocod_members_reachable", "Other live members, by how others reach them.", ["kind"], registry=to
        )
        for kind in (*get_args(NatClass), "unknown"):
            self._nat_gauge.labels(kind)
        self._joined = Counter(
            "nolocod_members_joined", "Times that a member was seen, for the first time or again.", registry=to
        )
        self._left = Counter("nolocod_members_lost", "Times that a member left or fell silent.", registry=to)
        self._connections_gauge = Gauge("nolocod_connections", "Connected peers, by reach.", ["reach"], registry=to)
        for reach in get_args(Reach):
            self._connections_gauge.labels(reach)

    def _define_node(self, to: CollectorRegistry) -> None:
        self._checkpoints = Counter("nolocod_checkpoints", "Checkpoints written.", registry=to)
        self._checkpoint_size = Gauge("nolocod_checkpoint_size_bytes", "Size of the last checkpoint.", registry=to)
        self._errors = Counter("nolocod_errors", "Failures that the node outlived, by error code.", ["code"], registry=to)
        self._deaths = Counter("nolocod_trainer_failures", "Times that the trainer process died or failed.", registry=to)
        self._clock_offset = Gauge(
            "nolocod_clock_offset_seconds", "The members' median clock minus this machine's.", registry=to
        )
        self._disk_free = Gauge(
            "nolocod_disk_free_bytes", "Left for the data directory; NaN where the system does not tell.", registry=to
        )
        self._state = Gauge("nolocod_node_state", "1 for what the node does, 0 for the rest.", ["state"], registry=to)
        self._set_state("starting")
        self._build = Info("nolocod_build", "Release and run of this node.", registry=to)
        self._build.info({"version": __version__})

    def _define_allowance(self, to: CollectorRegistry) -> None:
        self._wire = Counter(
            "nolocod_wire_bytes", "All bytes on the connections to peers, heartbeats and all.", ["direction"], registry=to
        )
        self._rate_limit = Gauge(
            "nolocod_wire_limit_bytes_per_second", "What the owner allows; infinite if all.", ["direction"], registry=to
        )
        for direction in ("sent", "received"):
            self._wire.labels(direction)
            self._rate_limit.labels(direction).set(math.inf)
        self._month = Gauge("nolocod_month_bytes", "Bytes sent and received in this calendar month (UTC).", registry=to)
        self._month_limit = Gauge("nolocod_month_limit_bytes", "What the owner allows; infinite if all.", registry=to)
        self._month_limit.set(math.inf)
        self._paused = Gauge("nolocod_paused", "1 for what keeps it from training, 0 for the rest.", ["reason"], registry=to)
        self._set_paused(None)

    def _define_reach(self, to: CollectorRegistry) -> None:
        self._reach = Gauge("nolocod_reachable", "1 for how others reach this node, 0 for the rest.", ["kind"], registry=to)
        self._set_reach(None)
        self._relays_held = Gauge("nolocod_relays_held", "Relays that keep a reservation for this node.", registry=to)
        self._relays_lost = Counter("nolocod_relays_lost", "Reservations that ended against our will.", registry=to)
        self._punches = Counter(
            "nolocod_punches", "Tries to replace a relayed connection by a straight one.", ["outcome"], registry=to
        )
        for outcome in ("succeeded", "failed"):
            self._punches.labels(outcome)
        self._punch_seconds = Histogram(
            "nolocod_punch_duration_seconds", "Duration of the tries that succeeded.", buckets=_SECONDS, registry=to
        )
        self._reservations = Gauge("nolocod_carried_reservations", "Peers that may be reached through this node.", registry=to)
        self._open = Gauge("nolocod_carried_circuits_open", "Circuits through this node now.", registry=to)
        self._circuits = Counter("nolocod_carried_circuits", "Circuits through this node.", registry=to)
        self._carried_bytes = Counter("nolocod_carried_bytes", "Bytes carried for others, each way.", registry=to)
        self._healed = Counter("nolocod_partitions_healed", "Times that another part of the run was found again.", registry=to)

    def _define_trust(self, to: CollectorRegistry) -> None:
        self._weight = Histogram(
            "nolocod_partner_weight", "What partners' differences counted for: 1 in full, less where clipped.",
            buckets=_WEIGHTS, registry=to,
        )  # fmt: skip
        self._judged = Counter("nolocod_peer_judgements", "Times that a peer's conduct changed its reputation.", registry=to)
        self._bans = Counter("nolocod_peer_bans", "Times that a peer was banned for a while.", registry=to)

    def render(self) -> bytes:
        """The whole page in Prometheus' text format (`content_type`)."""
        return prometheus_client.generate_latest(self._registry)

    def follow(self, event: Event) -> None:
        """Count `event`. Never raises, never blocks."""
        match event:
            case Started():
                self._build.info({"version": __version__, "run_name": event.run_name, "run_id": event.run_id[:12]})
            case StateChanged():
                self._set_state(event.state)
            case PeerSeen() | PeerLost() | PeerConnected() | PeerDisconnected():
                self._follow_peers(event)
            case ExchangeStarted():
                pass
            case ExchangeEnded():
                self._follow_exchange(event)
            case DoubtSettled():
                self._settled.inc()
            case WeightsServed():
                self._served.inc(event.size)
                self._spent("serving", event.seconds)
            case WeightsFetched():
                self._fetched.inc(event.size)
                self._round.set(event.round)
                self._spent("fetching", event.seconds)
            case Troubled():
                self._count_error(event.code)
                if event.code == TrainerError.entry.code:
                    self._deaths.inc()
            case HostChecked():
                self._clock_offset.set(event.clock_offset)
                self._disk_free.set(math.nan if event.disk_free is None else event.disk_free)
            case Allowed() | Traffic() | Paused() | Resumed():
                self._follow_allowance(event)
            case ReachFound() | RelayHeld() | RelayLost() | Punched() | Relaying() | PartitionHealed():
                self._follow_reach(event)
            case PeerJudged() | PeerBanned():
                self._follow_trust(event)
            case _:
                self._follow_training(event)

    def _follow_training(self, event: WeightsLoaded | InnerSteps | Evaluated | OuterStep | Checkpointed) -> None:
        match event:
            case WeightsLoaded():
                self._round.set(event.round)
            case InnerSteps():
                self._inner_steps.inc(event.steps)
                self._tokens.inc(event.tokens)
                self._loss.set(event.loss)
                self._rate.set(event.learning_rate)
                self._spent("training", event.seconds)
            case Evaluated():
                self._validation.set(event.loss)
                self._spent("evaluating", event.seconds)
            case OuterStep():
                self._outer.labels(event.kind).inc()
                self._round.set(event.round)
                if event.kind == "solo":
                    self._solo.inc()
                else:
                    self._solo.set(0)
                    self._paired_at.set(self._clock())
                if event.spread is not None:
                    self._spread.set(event.spread)
                    self._weight.observe(event.weight)
                self._spent("applying", event.seconds)
            case Checkpointed():
                self._checkpoints.inc()
                self._checkpoint_size.set(event.size)
                self._spent("checkpointing", event.seconds)

    def _follow_trust(self, event: PeerJudged | PeerBanned) -> None:
        match event:
            case PeerJudged():
                self._judged.inc()
            case PeerBanned():
                self._bans.inc()

    def _follow_allowance(self, event: Allowed | Traffic | Paused | Resumed) -> None:
        match event:
            case Allowed():
                for direction, limit in (("sent", event.up), ("received", event.down)):
                    self._rate_limit.labels(direction).set(math.inf if limit is None else limit)
                self._month_limit.set(math.inf if event.monthly is None else event.monthly)
            case Traffic():
                for direction, total in (("sent", event.sent), ("received", event.received)):
                    self._wire.labels(direction).inc(total - self._moved[direction])
                    self._moved[direction] = total
                self._month.set(event.month_sent + event.month_received)
            case Paused():
                self._set_paused(event.reason)
            case Resumed():
                self._set_paused(None)

    def _follow_reach(self, event: ReachFound | RelayHeld | RelayLost | Punched | Relaying | PartitionHealed) -> None:
        match event:
            case ReachFound():
                self._set_reach(event.kind)
            case RelayHeld():
                self._relays.add(event.relay)
                self._relays_held.set(len(self._relays))
            case RelayLost():
                self._relays.discard(event.relay)
                self._relays_held.set(len(self._relays))
                self._relays_lost.inc()
            case Punched():
                self._punches.labels("succeeded" if event.succeeded else "failed").inc()
                if event.succeeded:
                    self._punch_seconds.observe(event.seconds)
            case Relaying():
                self._reservations.set(event.reservations)
                self._open.set(event.open)
                circuits, size = self._carried
                self._circuits.inc(event.circuits - circuits)
                self._carried_bytes.inc(event.bytes - size)
                self._carried = (event.circuits, event.bytes)
            case PartitionHealed():
                self._healed.inc()

    def _set_reach(self, current: NatClass | None) -> None:
        for kind in (*get_args(NatClass), "unknown"):
            self._reach.labels(kind).set(kind == (current or "unknown"))

    def _set_paused(self, current: PauseReason | None) -> None:
        for reason in get_args(PauseReason):
            self._paused.labels(reason).set(reason == current)

    def _follow_exchange(self, event: ExchangeEnded) -> None:
        self._exchanges.labels(event.outcome, "initiator" if event.initiator else "responder").inc()
        self._exchange_bytes.labels("sent").inc(event.sent)
        self._exchange_bytes.labels("received").inc(event.received)
        self._spent("exchanging", event.seconds)
        if event.outcome == "committed":
            self._exchange_seconds.observe(event.seconds)
        else:
            self._failures.labels(_known(event.error)).inc()
        if event.error:
            self._count_error(event.error)

    def _follow_peers(self, event: PeerSeen | PeerLost | PeerConnected | PeerDisconnected) -> None:
        match event:
            case PeerSeen():
                if event.peer_id not in self._members:
                    self._joined.inc()
                self._members[event.peer_id] = (event.state if event.state in _MEMBER_STATES else "other", event.nat)
            case PeerLost():
                if self._members.pop(event.peer_id, None) is not None and event.reason != MADE_ROOM:
                    self._left.inc()
            case PeerConnected():
                self._connections[event.peer_id] = event.reach
            case PeerDisconnected():
                self._connections.pop(event.peer_id, None)
        states = [state for state, _ in self._members.values()]
        for state in (*_MEMBER_STATES, "other"):
            self._members_gauge.labels(state).set(states.count(state))
        kinds = [nat or "unknown" for _, nat in self._members.values()]
        for kind in (*get_args(NatClass), "unknown"):
            self._nat_gauge.labels(kind).set(kinds.count(kind))
        reaches = list(self._connections.values())
        for reach in get_args(Reach):
            self._connections_gauge.labels(reach).set(reaches.count(reach))

    def _set_state(self, current: NodeState) -> None:
        for state in get_args(NodeState):
            self._state.labels(state).set(state == current)

    def _count_error(self, code: str) -> None:
        self._errors.labels(_known(code)).inc()

    def _spent(self, activity: str, seconds: float) -> None:
        self._activity.labels(activity).inc(max(0.0, seconds))


def _known(code: str) -> str:
    """`code` as a label. A refusing peer chooses it: what is not in our catalogue must not become one."""
    return code if code in CATALOGUE else "other"
