"""Prometheus metrics, made from events and nothing else. One class per group defines its metrics and counts its events.

The rule: a label's values are a small fixed set. Peer ids are never labels, and what a peer chose
(its state, an error code) is a label only if it is one that we know; all else counts as "other".
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from nolocod import __version__
from nolocod.errors import CATALOGUE, TrainerError
from nolocod.observe import events
from nolocod.observe.events import MADE_ROOM, NatClass, NodeState, Outcome, PauseReason, Reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nolocod.identity import PeerId
    from nolocod.observe.events import Event

T = TypeVar("T", Counter, Gauge)

_MEMBER_STATES = ("joining", "training", "paused", "finished", "other")
_NAT_CLASSES = (*get_args(NatClass), "unknown")
_ACTIVITIES: dict[type[events.Event], str] = {
    events.InnerSteps: "training",
    events.Evaluated: "evaluating",
    events.ExchangeEnded: "exchanging",
    events.OuterStep: "applying",
    events.Checkpointed: "checkpointing",
    events.WeightsFetched: "fetching",
    events.WeightsServed: "serving",
}
"""Whose `seconds` are counted as what."""
_PARTS = events.MemoryTaken.__struct_fields__
_DIRECTIONS = ("sent", "received")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""From a toy model in one room to gigabytes over a home line."""
_LAGS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_WEIGHTS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0)


class Metrics:
    """Follows a node's events; `render` gives the text that Prometheus scrapes.

    `tasks` gives how many the process runs, `clock` the seconds since 1970.
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
            prometheus_client.ProcessCollector(registry=registry)
            prometheus_client.PlatformCollector(registry=registry)
            prometheus_client.GCCollector(registry=registry)
        # The "_created" twin of every counter doubles the page and says nothing: they all begin with the process.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations
        self._registry = registry
        kinds = (_Exchanges, _Members, _Node, _Allowance, _Reachability, _Trust)
        self._groups: list[Any] = [_Training(registry, clock), *(kind(registry) for kind in kinds)]
        if tasks is not None:
            text = "Tasks of the network process; a count that only grows is a leak."
            Gauge("nolocod_tasks", text, registry=registry).set_function(tasks)
        self.loop_lag = Histogram(
            "nolocod_loop_lag_seconds", "How late the loop wakes a task.", buckets=_LAGS, registry=registry
        )

    def render(self) -> bytes:
        """The whole page in Prometheus' text format (`content_type`)."""
        return prometheus_client.generate_latest(self._registry)

    def follow(self, event: Event) -> None:
        """Count `event`. Never raises, never blocks."""
        for group in self._groups:
            group.follow(event)


class _Training:
    def __init__(self, to: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inner_steps = Counter("nolocod_inner_steps", "Inner steps done by this process.", registry=to)
        self._tokens = Counter("nolocod_tokens", "Tokens trained on by this process.", registry=to)
        self._loss = Gauge("nolocod_training_loss_nats", "Mean training loss per token at the last report.", registry=to)
        self._validation = Gauge("nolocod_validation_loss_nats", "Held-out loss per token at the last evaluation.", registry=to)
        waited = "Seconds for which inner steps waited for text."
        self._waited = Counter("nolocod_text_wait_seconds", waited, registry=to)
        mfu = "Operations of the model over those that the GPUs could do; 0 on processors."
        self._mfu = Gauge("nolocod_model_flops_utilisation_ratio", mfu, registry=to)
        memory = "Bytes that training takes, by part; the peak is that of the GPU, or of the process."
        self._memory = _labelled(Gauge, "nolocod_trainer_memory_bytes", memory, "part", _PARTS, to)
        self._rate = Gauge("nolocod_learning_rate", "Learning rate of the inner optimizer.", registry=to)
        self._round = Gauge("nolocod_round", "Outer steps that this replica has done.", registry=to)
        outer = "Outer steps done by this process."
        self._outer = _labelled(Counter, "nolocod_outer_steps", outer, "kind", ("paired", "solo"), to)
        self._solo = Gauge("nolocod_solo_steps_since_paired", "Outer steps since the last paired one.", registry=to)
        paired_at = "Time of the last paired outer step, since 1970; 0 before this process's first."
        self._paired_at = Gauge("nolocod_last_paired_step_timestamp_seconds", paired_at, registry=to)
        spread = "L2 norm of the difference to the last partner's fast weights."
        self._spread = Gauge("nolocod_partner_spread", spread, registry=to)
        activity = "Seconds spent per activity; some of them overlap."
        self._activity = _labelled(Counter, "nolocod_activity_seconds", activity, "activity", _ACTIVITIES.values(), to)

    def follow(self, event: Event) -> None:
        if activity := _ACTIVITIES.get(type(event)):
            self._activity.labels(activity).inc(max(0.0, getattr(event, "seconds", 0.0)))
        match event:
            case events.WeightsLoaded() | events.WeightsFetched():
                self._round.set(event.round)
            case events.InnerSteps():
                self._inner_steps.inc(event.steps)
                self._tokens.inc(event.tokens)
                self._loss.set(event.loss)
                self._rate.set(event.learning_rate)
                self._waited.inc(event.waited)
                self._mfu.set(event.mfu or 0.0)
            case events.MemoryTaken():
                for part in _PARTS:
                    self._memory.labels(part).set(getattr(event, part))
            case events.Evaluated():
                self._validation.set(event.loss)
            case events.OuterStep():
                self._outer.labels(event.kind).inc()
                self._round.set(event.round)
                if event.kind == "solo":
                    self._solo.inc()
                else:
                    self._solo.set(0)
                    self._paired_at.set(self._clock())
                if event.spread is not None:
                    self._spread.set(event.spread)


class _Exchanges:
    def __init__(self, to: CollectorRegistry) -> None:
        self._ended = Counter("nolocod_exchanges", "Exchanges ended.", ["outcome", "role"], registry=to)
        for outcome in get_args(Outcome):
            for role in ("initiator", "responder"):
                self._ended.labels(outcome, role)
        failures = "Exchanges that were not committed, by error code."
        self._failures = Counter("nolocod_exchange_failures", failures, ["code"], registry=to)
        settled = "Exchanges in doubt whose outcome the partner told later."
        self._settled = Counter("nolocod_doubts_settled", settled, registry=to)
        took = "Duration of the committed exchanges."
        self._seconds = Histogram("nolocod_exchange_duration_seconds", took, buckets=_SECONDS, registry=to)
        moved = "Bytes of all exchanges, broken ones included."
        self._bytes = _labelled(Counter, "nolocod_exchange_bytes", moved, "direction", _DIRECTIONS, to)
        self._served = Counter("nolocod_weights_served_bytes", "Bytes of weights given to newcomers.", registry=to)
        self._fetched = Counter("nolocod_weights_fetched_bytes", "Bytes of weights taken from donors.", registry=to)

    def follow(self, event: Event) -> None:
        match event:
            case events.ExchangeEnded():
                self._ended.labels(event.outcome, "initiator" if event.initiator else "responder").inc()
                self._bytes.labels("sent").inc(event.sent)
                self._bytes.labels("received").inc(event.received)
                if event.outcome == "committed":
                    self._seconds.observe(event.seconds)
                else:
                    self._failures.labels(_known(event.error)).inc()
            case events.DoubtSettled():
                self._settled.inc()
            case events.WeightsServed():
                self._served.inc(event.size)
            case events.WeightsFetched():
                self._fetched.inc(event.size)


class _Members:
    def __init__(self, to: CollectorRegistry) -> None:
        self._members: dict[PeerId, tuple[str, str]] = {}
        self._connections: dict[PeerId, Reach] = {}
        members = "Other live members of the run, by state."
        self._states = _labelled(Gauge, "nolocod_members", members, "state", _MEMBER_STATES, to)
        reachable = "Other live members, by how others reach them."
        self._nats = _labelled(Gauge, "nolocod_members_reachable", reachable, "kind", _NAT_CLASSES, to)
        joined = "Times that a member was seen for the first time, or again after it was lost."
        self._joined = Counter("nolocod_members_joined", joined, registry=to)
        self._left = Counter("nolocod_members_lost", "Times that a member left or fell silent.", registry=to)
        connected = "Connected peers, by how they are connected."
        self._reaches = _labelled(Gauge, "nolocod_connections", connected, "reach", get_args(Reach), to)

    def follow(self, event: Event) -> None:
        match event:
            case events.PeerSeen():
                if event.peer_id not in self._members:
                    self._joined.inc()
                state = event.state if event.state in _MEMBER_STATES else "other"
                self._members[event.peer_id] = (state, event.nat or "unknown")
            case events.PeerLost():
                if self._members.pop(event.peer_id, None) is not None and event.reason != MADE_ROOM:
                    self._left.inc()
            case events.PeerConnected():
                self._connections[event.peer_id] = event.reach
            case events.PeerDisconnected():
                self._connections.pop(event.peer_id, None)
            case _:
                return
        _set_counts(self._states, _MEMBER_STATES, [state for state, _ in self._members.values()])
        _set_counts(self._nats, _NAT_CLASSES, [nat for _, nat in self._members.values()])
        _set_counts(self._reaches, get_args(Reach), list(self._connections.values()))


class _Node:
    def __init__(self, to: CollectorRegistry) -> None:
        self._checkpoints = Counter("nolocod_checkpoints", "Checkpoints written.", registry=to)
        self._checkpoint_size = Gauge("nolocod_checkpoint_size_bytes", "Size of the last checkpoint.", registry=to)
        few = "Windows computed at once, where memory took less than the run's micro-batch; else 0."
        self._micro_batch = Gauge("nolocod_micro_batch_windows", few, registry=to)
        told = "Devices that share the trainer's inner steps; 0 before the model is loaded."
        self._devices = Gauge("nolocod_trainer_devices", told, registry=to)
        out = "1 while no new text to train on comes and the last is trained on again, else 0."
        self._text_out = Gauge("nolocod_text_outage", out, registry=to)
        lost = "Time for which no new text to train on came, counted when it comes again."
        self._text_lost = Counter("nolocod_text_outage_seconds", lost, registry=to)
        self._errors = Counter("nolocod_errors", "Failures that the node survived, by error code.", ["code"], registry=to)
        self._deaths = Counter("nolocod_trainer_failures", "Times that the trainer process died or failed.", registry=to)
        offset = "The members' median clock minus this machine's."
        self._clock_offset = Gauge("nolocod_clock_offset_seconds", offset, registry=to)
        free = "Free space for the data directory; NaN where the system does not tell."
        self._disk_free = Gauge("nolocod_disk_free_bytes", free, registry=to)
        state = "1 for the node's state, 0 for all other states."
        self._state = _labelled(Gauge, "nolocod_node_state", state, "state", get_args(NodeState), to)
        self._state.labels("starting").set(1)
        self._build = Info("nolocod_build", "Release and run of this node.", registry=to)
        self._build.info({"version": __version__})

    def follow(self, event: Event) -> None:
        match event:
            case events.Started():
                self._build.info({"version": __version__, "run_name": event.run_name, "run_id": event.run_id[:12]})
            case events.StateChanged():
                _set_counts(self._state, get_args(NodeState), [event.state])
            case events.Checkpointed():
                self._checkpoints.inc()
                self._checkpoint_size.set(event.size)
            case events.MicroBatch():
                self._micro_batch.set(event.at_once)
            case events.DevicesChosen():
                self._devices.set(len(event.devices))
            case events.TextSupply():
                self._text_out.set(bool(event.trouble))
                self._text_lost.inc(event.seconds)
            case events.Troubled():
                self._errors.labels(_known(event.code)).inc()
                if event.code == TrainerError.entry.code:
                    self._deaths.inc()
            case events.ExchangeEnded() if event.error:
                self._errors.labels(_known(event.error)).inc()
            case events.HostChecked():
                self._clock_offset.set(event.clock_offset)
                self._disk_free.set(math.nan if event.disk_free is None else event.disk_free)


class _Allowance:
    def __init__(self, to: CollectorRegistry) -> None:
        self._counted = dict.fromkeys(_DIRECTIONS, 0)
        wire = "All bytes on the connections to peers, heartbeats and all else included."
        self._wire = _labelled(Counter, "nolocod_wire_bytes", wire, "direction", _DIRECTIONS, to)
        rate = "The owner's limit; infinite if there is none."
        self._rate_limit = _labelled(Gauge, "nolocod_wire_limit_bytes_per_second", rate, "direction", _DIRECTIONS, to)
        self._month = Gauge("nolocod_month_bytes", "Bytes sent and received in this calendar month (UTC).", registry=to)
        self._month_limit = Gauge("nolocod_month_limit_bytes", rate, registry=to)
        paused = "1 for the reason why the node is paused, 0 for all other reasons."
        self._paused = _labelled(Gauge, "nolocod_paused", paused, "reason", get_args(PauseReason), to)
        self._share = Gauge("nolocod_duty_ratio", "Share of the time in which the trainer may compute.", registry=to)
        self._share.set(1)
        self.follow(events.Allowed(None, None, None, (), on_battery=True))

    def follow(self, event: Event) -> None:
        match event:
            case events.Allowed():
                for direction, limit in zip(_DIRECTIONS, (event.up, event.down), strict=True):
                    self._rate_limit.labels(direction).set(math.inf if limit is None else limit)
                self._month_limit.set(math.inf if event.monthly is None else event.monthly)
            case events.Eased():
                self._share.set(event.share)
            case events.Traffic():
                for direction, total in zip(_DIRECTIONS, (event.sent, event.received), strict=True):
                    self._wire.labels(direction).inc(total - self._counted[direction])
                    self._counted[direction] = total
                self._month.set(event.month_sent + event.month_received)
            case events.Paused():
                _set_counts(self._paused, get_args(PauseReason), [event.reason])
            case events.Resumed():
                _set_counts(self._paused, get_args(PauseReason), [])


class _Reachability:
    def __init__(self, to: CollectorRegistry) -> None:
        self._relays: set[PeerId] = set()
        self._counted = (0, 0)  # circuits and bytes
        reachable = "1 for how others reach this node, 0 for all other ways."
        self._kind = _labelled(Gauge, "nolocod_reachable", reachable, "kind", _NAT_CLASSES, to)
        self._kind.labels("unknown").set(1)
        self._held = Gauge("nolocod_relays_held", "Relays that keep a reservation for this node.", registry=to)
        self._lost = Counter("nolocod_relays_lost", "Reservations that this node lost.", registry=to)
        punches = "Attempts to replace a relayed connection by a direct one."
        self._punches = _labelled(Counter, "nolocod_punches", punches, "outcome", ("succeeded", "failed"), to)
        took = "Duration of the attempts that succeeded."
        self._seconds = Histogram("nolocod_punch_duration_seconds", took, buckets=_SECONDS, registry=to)
        reservations = "Reservations that this node, as a relay, keeps for peers."
        self._reservations = Gauge("nolocod_carried_reservations", reservations, registry=to)
        self._open = Gauge("nolocod_carried_circuits_open", "Open circuits through this node.", registry=to)
        self._circuits = Counter("nolocod_carried_circuits", "Circuits through this node.", registry=to)
        self._bytes = Counter("nolocod_carried_bytes", "Bytes relayed for other peers, in each direction.", registry=to)
        self._healed = Counter("nolocod_partitions_healed", "Times that another part of the run was found again.", registry=to)

    def follow(self, event: Event) -> None:
        match event:
            case events.ReachFound():
                _set_counts(self._kind, _NAT_CLASSES, [event.kind or "unknown"])
            case events.RelayHeld():
                self._relays.add(event.relay)
                self._held.set(len(self._relays))
            case events.RelayLost():
                self._relays.discard(event.relay)
                self._held.set(len(self._relays))
                self._lost.inc()
            case events.Punched():
                self._punches.labels("succeeded" if event.succeeded else "failed").inc()
                if event.succeeded:
                    self._seconds.observe(event.seconds)
            case events.Relaying():
                self._reservations.set(event.reservations)
                self._open.set(event.open)
                circuits, size = self._counted
                self._circuits.inc(event.circuits - circuits)
                self._bytes.inc(event.bytes - size)
                self._counted = (event.circuits, event.bytes)
            case events.PartitionHealed():
                self._healed.inc()


class _Trust:
    def __init__(self, to: CollectorRegistry) -> None:
        weight = "Weight of partners' differences: 1 in full, less where clipped."
        self._weight = Histogram("nolocod_partner_weight", weight, buckets=_WEIGHTS, registry=to)
        self._judged = Counter("nolocod_peer_judgements", "Times that a peer's conduct changed its reputation.", registry=to)
        self._bans = Counter("nolocod_peer_bans", "Times that a peer was banned for a while.", registry=to)

    def follow(self, event: Event) -> None:
        match event:
            case events.OuterStep() if event.spread is not None:
                self._weight.observe(event.weight)
            case events.PeerJudged():
                self._judged.inc()
            case events.PeerBanned():
                self._bans.inc()


def _labelled(make: type[T], name: str, text: str, label: str, values: Iterable[str], to: CollectorRegistry) -> T:
    """A metric with all its values at 0, so that a graph shows them before the first event."""
    metric = make(name, text, [label], registry=to)
    for value in values:
        metric.labels(value)
    return metric


def _set_counts(gauge: Gauge, values: Iterable[str], found: list[str]) -> None:
    """Set each value of the gauge's label to its count in `found`."""
    for value in values:
        gauge.labels(value).set(found.count(value))


def _known(code: str) -> str:
    """`code` as a label. A peer that refuses chooses the code: only one of our catalogue may become a label."""
    return code if code in CATALOGUE else "other"
