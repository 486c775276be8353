"""Metrics: events in, Prometheus text out."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from nolocod.identity import PeerId
from nolocod.observe import events
from nolocod.observe.events import (
    MADE_ROOM,
    Allowed,
    Amended,
    Checkpointed,
    Contributed,
    DevicesChosen,
    DoubtSettled,
    Eased,
    Evaluated,
    Event,
    ExchangeEnded,
    ExchangeStarted,
    HostChecked,
    InnerSteps,
    MemoryTaken,
    MicroBatch,
    OuterStep,
    PartitionHealed,
    Paused,
    PeerBanned,
    PeerConnected,
    PeerDisconnected,
    PeerJudged,
    PeerLost,
    PeerSeen,
    Punched,
    ReachFound,
    RelayHeld,
    Relaying,
    RelayLost,
    Resumed,
    RunFound,
    SamplesRead,
    Started,
    StateChanged,
    TextSupply,
    Traffic,
    Troubled,
    WeightsComing,
    WeightsFetched,
    WeightsLoaded,
    WeightsServed,
)
from nolocod.observe.metrics import Metrics

ALICE, BOB = PeerId("12D3KooWalice000"), PeerId("12D3KooWbob00000")

ONE_OF_EACH: list[Event] = [
    Started(ALICE, "ab" * 32, "demo", ("/ip4/127.0.0.1/tcp/1",), "127.0.0.1:2"),
    RunFound("ab" * 32, "demo", BOB),
    StateChanged("training"),
    InnerSteps(10, 5120, 2.5, 1e-3, 0.5, 0.125, 0.375),
    MemoryTaken(1, 2, 3, 4, 5, 6),
    WeightsLoaded(2, "donor"),
    Evaluated(3, 2.25, 0.125),
    ExchangeStarted(BOB, initiator=True),
    ExchangeEnded(BOB, "s", True, "committed", 1000, 2000, 0.25),
    DoubtSettled(BOB, "s", committed=True),
    OuterStep(4, "paired", BOB, 10, 1.5, 0.0625),
    Checkpointed(4, 5_000_000, 0.75),
    MicroBatch(4, 64),
    DevicesChosen(("cuda:0", "cuda:1")),
    SamplesRead(9, 2, 1),
    TextSupply("", 7.5),
    TextSupply("the hub is gone", 0.0),
    PeerSeen(BOB, 4, 5120, 2.5, "training"),
    PeerConnected(BOB, "direct"),
    PeerDisconnected(BOB),
    PeerLost(BOB, "no heartbeat"),
    WeightsServed(BOB, 300, 1.0, whole=True),
    WeightsComing(BOB, 200, 400),
    WeightsFetched(BOB, 4, 400, 2.0),
    Amended(40, "rounds 60"),
    Troubled("NLC-202", "no byte in 30 s."),
    Allowed(2_500_000, None, 200_000_000_000, ("22:00-07:00",), on_battery=False),
    Eased(0.75, "--max-temperature asks for it", 81.0),
    Traffic(5000, 7000, 10.0, 20.0, "2025-06", 50_000, 70_000),
    Resumed(),
    Paused("hours", "outside of --hours 22:00-07:00", 3600.0),
    ReachFound("cone", "two peers see one port", ("/ip4/192.0.2.1/tcp/1",)),
    RelayHeld(ALICE, 600.0),
    RelayHeld(BOB, 600.0),
    RelayHeld(BOB, 600.0),
    RelayLost(ALICE, "gone"),
    Punched(BOB, succeeded=True, seconds=2.0),
    Punched(ALICE, succeeded=False, seconds=9.0, reason="symmetric"),
    Relaying(3, 1, 4, 1000),
    Relaying(2, 0, 6, 5000),
    PartitionHealed(BOB, 7),
    PeerJudged(BOB, 0.4, "a tensor that was not finite"),
    PeerBanned(BOB, 600.0, "three rejected tensors"),
    HostChecked(-0.5, 9_000_000),
    Contributed(None, ()),
    Troubled("NLC-125", "killed."),
]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(lambda: 7, registry, clock=lambda: 1_700_000_000.0)


def follow(metrics: Metrics, *facts: Event) -> None:
    for fact in facts:
        metrics.follow(fact)


def test_the_list_above_has_one_of_each_event() -> None:
    assert {type(event) for event in ONE_OF_EACH} == set(events.Event.__subclasses__())


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("nolocod_inner_steps_total", {}, 10),
        ("nolocod_tokens_total", {}, 5120),
        ("nolocod_training_loss_nats", {}, 2.5),
        ("nolocod_validation_loss_nats", {}, 2.25),
        ("nolocod_learning_rate", {}, 1e-3),
        ("nolocod_round", {}, 4),
        ("nolocod_outer_steps_total", {"kind": "paired"}, 1),
        ("nolocod_outer_steps_total", {"kind": "solo"}, 0),
        ("nolocod_solo_steps_since_paired", {}, 0),
        ("nolocod_last_paired_step_timestamp_seconds", {}, 1_700_000_000),
        ("nolocod_partner_spread", {}, 1.5),
        ("nolocod_partner_weight_count", {}, 1),
        ("nolocod_peer_judgements_total", {}, 1),
        ("nolocod_peer_bans_total", {}, 1),
        ("nolocod_clock_offset_seconds", {}, -0.5),
        ("nolocod_disk_free_bytes", {}, 9_000_000),
        ("nolocod_trainer_failures_total", {}, 1),
        ("nolocod_members_joined_total", {}, 1),
        ("nolocod_members_lost_total", {}, 1),
        ("nolocod_exchanges_total", {"outcome": "committed", "role": "initiator"}, 1),
        ("nolocod_exchange_bytes_total", {"direction": "sent"}, 1000),
        ("nolocod_exchange_bytes_total", {"direction": "received"}, 2000),
        ("nolocod_exchange_duration_seconds_count", {}, 1),
        ("nolocod_exchange_duration_seconds_sum", {}, 0.25),
        ("nolocod_activity_seconds_total", {"activity": "training"}, 0.5),
        ("nolocod_activity_seconds_total", {"activity": "evaluating"}, 0.125),
        ("nolocod_activity_seconds_total", {"activity": "exchanging"}, 0.25),
        ("nolocod_activity_seconds_total", {"activity": "applying"}, 0.0625),
        ("nolocod_activity_seconds_total", {"activity": "checkpointing"}, 0.75),
        ("nolocod_activity_seconds_total", {"activity": "serving"}, 1.0),
        ("nolocod_activity_seconds_total", {"activity": "fetching"}, 2.0),
        ("nolocod_checkpoints_total", {}, 1),
        ("nolocod_micro_batch_windows", {}, 4),
        ("nolocod_trainer_devices", {}, 2),
        ("nolocod_text_wait_seconds_total", {}, 0.125),
        ("nolocod_model_flops_utilisation_ratio", {}, 0.375),
        ("nolocod_trainer_memory_bytes", {"part": "optimizer"}, 3),
        ("nolocod_trainer_memory_bytes", {"part": "peak"}, 6),
        ("nolocod_text_outage", {}, 1),
        ("nolocod_text_outage_seconds_total", {}, 7.5),
        ("nolocod_checkpoint_size_bytes", {}, 5_000_000),
        ("nolocod_weights_served_bytes_total", {}, 300),
        ("nolocod_weights_fetched_bytes_total", {}, 400),
        ("nolocod_errors_total", {"code": "NLC-202"}, 1),
        ("nolocod_node_state", {"state": "training"}, 1),
        ("nolocod_node_state", {"state": "starting"}, 0),
        ("nolocod_wire_bytes_total", {"direction": "sent"}, 5000),
        ("nolocod_wire_bytes_total", {"direction": "received"}, 7000),
        ("nolocod_wire_limit_bytes_per_second", {"direction": "sent"}, 2_500_000),
        ("nolocod_wire_limit_bytes_per_second", {"direction": "received"}, math.inf),
        ("nolocod_month_bytes", {}, 120_000),
        ("nolocod_month_limit_bytes", {}, 200_000_000_000),
        ("nolocod_paused", {"reason": "hours"}, 1),
        ("nolocod_paused", {"reason": "battery"}, 0),
        ("nolocod_reachable", {"kind": "cone"}, 1),
        ("nolocod_reachable", {"kind": "unknown"}, 0),
        ("nolocod_relays_held", {}, 1),
        ("nolocod_relays_lost_total", {}, 1),
        ("nolocod_punches_total", {"outcome": "succeeded"}, 1),
        ("nolocod_punches_total", {"outcome": "failed"}, 1),
        ("nolocod_punch_duration_seconds_sum", {}, 2.0),
        ("nolocod_carried_reservations", {}, 2),
        ("nolocod_carried_circuits_open", {}, 0),
        ("nolocod_carried_circuits_total", {}, 6),
        ("nolocod_carried_bytes_total", {}, 5000),
        ("nolocod_partitions_healed_total", {}, 1),
        ("nolocod_build_info", {"version": "0.1.0", "run_name": "demo", "run_id": "abababababab"}, 1),
    ],
)
def test_one_of_each_event_is_counted(
    metrics: Metrics, registry: CollectorRegistry, name: str, labels: dict[str, str], value: float
) -> None:
    follow(metrics, *ONE_OF_EACH)
    assert registry.get_sample_value(name, labels) == value


def test_members_and_connections_are_counted_by_what_they_are_now(metrics: Metrics, registry: CollectorRegistry) -> None:
    def members(state: str) -> float | None:
        return registry.get_sample_value("nolocod_members", {"state": state})

    follow(metrics, PeerSeen(ALICE, 1, 1, 2.0, "joining"), PeerSeen(BOB, 1, 1, 2.0, "training"), PeerConnected(BOB, "relayed"))
    assert (members("joining"), members("training")) == (1, 1)
    follow(metrics, PeerSeen(ALICE, 2, 2, 2.0, "training"))
    assert (members("joining"), members("training")) == (0, 2)
    assert registry.get_sample_value("nolocod_connections", {"reach": "relayed"}) == 1
    follow(metrics, PeerConnected(BOB, "direct"))
    assert registry.get_sample_value("nolocod_connections", {"reach": "relayed"}) == 0
    assert registry.get_sample_value("nolocod_connections", {"reach": "direct"}) == 1
    follow(metrics, PeerLost(BOB, "left"), PeerDisconnected(BOB), PeerLost(BOB, "left"))
    assert members("training") == 1
    assert registry.get_sample_value("nolocod_connections", {"reach": "direct"}) == 0


def test_what_a_peer_chose_never_makes_a_new_label(metrics: Metrics, registry: CollectorRegistry) -> None:
    for number in range(50):
        follow(
            metrics,
            PeerSeen(PeerId(f"peer{number}"), 1, 1, 2.0, f"state{number}"),
            ExchangeEnded(BOB, "s", False, "refused", 0, 0, 0.1, error=f"NLC-9{number}", reason="because"),
        )
    assert registry.get_sample_value("nolocod_members", {"state": "other"}) == 50
    assert registry.get_sample_value("nolocod_errors_total", {"code": "other"}) == 50
    assert b"state49" not in metrics.render()
    assert b"peer49" not in metrics.render()


def test_members_are_counted_by_reach_and_as_they_come_and_go(metrics: Metrics, registry: CollectorRegistry) -> None:
    def reached(kind: str) -> float | None:
        return registry.get_sample_value("nolocod_members_reachable", {"kind": kind})

    follow(metrics, PeerSeen(ALICE, 1, 1, 2.0, "training", "cone"), PeerSeen(BOB, 1, 1, 2.0, "training"))
    assert (reached("cone"), reached("unknown")) == (1, 1)
    follow(metrics, PeerSeen(ALICE, 2, 2, 2.0, "training", "public"), PeerLost(BOB, MADE_ROOM))
    assert (reached("public"), reached("cone"), reached("unknown")) == (1, 0, 0)
    assert registry.get_sample_value("nolocod_members_joined_total") == 2
    assert registry.get_sample_value("nolocod_members_lost_total") == 0, "whom we made room for is not lost"


def test_solo_steps_count_up_to_the_next_paired_one(metrics: Metrics, registry: CollectorRegistry) -> None:
    def solo() -> float | None:
        return registry.get_sample_value("nolocod_solo_steps_since_paired")

    assert registry.get_sample_value("nolocod_last_paired_step_timestamp_seconds") == 0
    for expected in (1, 2, 3):
        follow(metrics, OuterStep(expected, "solo", None, 10, None, 0.1))
        assert solo() == expected
    assert registry.get_sample_value("nolocod_last_paired_step_timestamp_seconds") == 0
    follow(metrics, OuterStep(4, "paired", BOB, 10, 1.5, 0.1))
    assert solo() == 0


def test_an_alert_sees_the_first_of_every_kind_because_it_is_0_before(metrics: Metrics, registry: CollectorRegistry) -> None:
    for outcome in get_args(events.Outcome):
        for role in ("initiator", "responder"):
            assert registry.get_sample_value("nolocod_exchanges_total", {"outcome": outcome, "role": role}) == 0


def test_a_disk_that_cannot_be_read_is_neither_full_nor_empty(metrics: Metrics, registry: CollectorRegistry) -> None:
    follow(metrics, HostChecked(0.0, None))
    assert math.isnan(registry.get_sample_value("nolocod_disk_free_bytes") or 0.0)


def test_only_committed_exchanges_are_timed(metrics: Metrics, registry: CollectorRegistry) -> None:
    follow(metrics, ExchangeEnded(BOB, "s", False, "aborted", 10, 20, 30.0, error="NLC-202"))
    assert registry.get_sample_value("nolocod_exchange_duration_seconds_count") == 0
    assert registry.get_sample_value("nolocod_exchange_bytes_total", {"direction": "received"}) == 20
    assert registry.get_sample_value("nolocod_errors_total", {"code": "NLC-202"}) == 1
    assert registry.get_sample_value("nolocod_exchange_failures_total", {"code": "NLC-202"}) == 1


def test_a_pause_has_one_reason_and_traffic_only_grows(metrics: Metrics, registry: CollectorRegistry) -> None:
    def paused() -> dict[str, float | None]:
        return {one: registry.get_sample_value("nolocod_paused", {"reason": one}) for one in get_args(events.PauseReason)}

    none = dict.fromkeys(get_args(events.PauseReason), 0)
    assert paused() == none
    follow(metrics, Paused("hours", "x", 1.0), Paused("budget", "y", 2.0))
    assert paused() == none | {"budget": 1}
    follow(metrics, Resumed())
    assert paused() == none
    for total in (100, 100, 250):
        follow(metrics, Traffic(total, 2 * total, 0.0, 0.0, "2025-06", total, total))
    assert registry.get_sample_value("nolocod_wire_bytes_total", {"direction": "sent"}) == 250
    assert registry.get_sample_value("nolocod_wire_bytes_total", {"direction": "received"}) == 500
    assert registry.get_sample_value("nolocod_month_limit_bytes") == math.inf


def test_exactly_one_kind_of_reach_is_on(metrics: Metrics, registry: CollectorRegistry) -> None:
    kinds = (*get_args(events.NatClass), "unknown")

    def on() -> list[str]:
        return [kind for kind in kinds if registry.get_sample_value("nolocod_reachable", {"kind": kind})]

    assert on() == ["unknown"]
    for kind in get_args(events.NatClass):
        follow(metrics, ReachFound(kind, "because", ()))
        assert on() == [kind]
    follow(metrics, ReachFound(None, "not known yet", ()))
    assert on() == ["unknown"]


def test_exactly_one_state_is_on(metrics: Metrics, registry: CollectorRegistry) -> None:
    for state in get_args(events.NodeState):
        follow(metrics, StateChanged(state))
        values = {one: registry.get_sample_value("nolocod_node_state", {"state": one}) for one in get_args(events.NodeState)}
        assert values == {one: float(one == state) for one in values}


def test_the_page_parses_and_keeps_to_prometheus_naming_rules(metrics: Metrics) -> None:
    follow(metrics, *ONE_OF_EACH)
    families = list(text_string_to_metric_families(metrics.render().decode()))
    assert len(families) > 20
    for family in families:
        assert re.fullmatch(r"nolocod_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_total", "_created")), family.name
        assert {key for sample in family.samples for key in sample.labels} <= {
            *("kind", "outcome", "role", "direction", "state", "reach", "activity", "code", "reason", "part", "le"),
            *("version", "run_name", "run_id"),
        }, family.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed")
def test_promtool_finds_nothing_to_say_about_the_page() -> None:
    metrics = Metrics(lambda: 7)
    follow(metrics, *ONE_OF_EACH)
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=metrics.render(), capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_tasks_are_counted_at_every_look(metrics: Metrics, registry: CollectorRegistry) -> None:
    assert registry.get_sample_value("nolocod_tasks") == 7


def test_a_registry_of_its_own_tells_about_the_process_too() -> None:
    page = Metrics().render().decode()
    assert "process_resident_memory_bytes" in page
    assert "process_start_time_seconds" in page
    assert "python_info" in page
    assert "_created" not in page


def test_two_nodes_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics(), Metrics()
    follow(first, InnerSteps(10, 5120, 2.5, 1e-3, 0.5))
    assert b"nolocod_inner_steps_total 10.0" in first.render()
    assert b"nolocod_inner_steps_total 0.0" in second.render()
