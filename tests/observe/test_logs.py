"""Log lines: what events become, what is folded, what is silenced."""

from __future__ import annotations

import io
import json
import logging
import math
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from nolocod.identity import PeerId
from nolocod.observe import logs
from nolocod.observe.events import (
    Allowed,
    Amended,
    Checkpointed,
    DevicesChosen,
    DoubtSettled,
    Eased,
    Evaluated,
    Event,
    ExchangeEnded,
    ExchangeStarted,
    InnerSteps,
    MicroBatch,
    OuterStep,
    PartitionHealed,
    Paused,
    PeerConnected,
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
    Troubled,
    WeightsFetched,
    WeightsLoaded,
    WeightsServed,
)
from nolocod.observe.logs import LogFollower, set_up
from nolocod.observe.words import amount, plain
from tests.support.told import Seen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOB = PeerId("12D3KooWxyzabcd1234")
JSON_EVENTS = """
started: peer_id run_id run_name addresses http
run_found: run_id run_name peer_id
state_changed: state waiting_for
weights_loaded: round source
inner_steps: steps tokens loss learning_rate seconds waited mfu
evaluated: round loss seconds
amended: at what
exchange_started: partner initiator
exchange_ended: partner session initiator outcome sent received seconds error reason
doubt_settled: partner session committed
outer_step: round kind partner inner_steps spread seconds weight
peer_judged: peer_id reputation why
peer_banned: peer_id seconds why
checkpointed: round size seconds stopped
samples_read: samples cut left_out dataset
text_supply: trouble seconds
micro_batch: at_once windows
memory_taken: weights gradients optimizer outer exchange peak
devices_chosen: devices made_on
peer_seen: peer_id round tokens loss state nat
peer_lost: peer_id reason
peer_connected: peer_id reach
peer_disconnected: peer_id
reach_found: kind why addresses
relay_held: relay seconds
relay_lost: relay reason
punched: peer_id succeeded seconds reason
relaying: reservations open circuits bytes
partition_healed: peer_id members
weights_served: peer_id size seconds whole
weights_coming: donor here size
weights_fetched: donor round size seconds
allowed: up down monthly hours on_battery limits
eased: share why temperature power
paused: reason why seconds
resumed:
troubled: code message
"""
"""What readers of the JSON log rely on: `event`, and the names of its `fields`. The other events are not logged."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Log:
    """What was written to the stream, without the times."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.clock = Clock()

    def set_up(self, level: str = "info", source: str = "", form: str = "human") -> None:
        set_up(level, form, stream=self.stream, clock=self.clock, source=source)

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The lines of a log in JSON, each strictly so."""
        return [json.loads(line, parse_constant=pytest.fail) for line in self.stream.getvalue().splitlines()]

    @property
    def lines(self) -> list[str]:
        return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in self.stream.getvalue().splitlines()]


@pytest.fixture
def log() -> Iterator[Log]:
    """A set-up log; the process's own logging is put back afterwards."""
    names = ["", "nolocod", *logs._LOUD]
    before = {name: logging.getLogger(name).level for name in names}
    root = logging.getLogger()
    handlers = list(root.handlers)
    one = Log()
    one.set_up()
    yield one
    root.handlers = handlers
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def follow(*events: Event) -> None:
    follower = LogFollower()
    for event in events:
        follower.follow(event)


def test_a_line_is_time_level_message(log: Log) -> None:
    logging.getLogger("nolocod").info("hello")
    assert re.fullmatch(r"\d\d:\d\d:\d\d info hello\n", log.stream.getvalue())


def test_a_paired_step_is_one_line(log: Log) -> None:
    follow(
        InnerSteps(50, 51_200, 2.3123, 1e-3, 4.0),
        ExchangeStarted(BOB, initiator=True),
        ExchangeEnded(BOB, "s", True, "committed", 3_350_000, 3_350_000, 0.41),
        OuterStep(12, "paired", BOB, 50, 1.2, 0.01),
    )
    assert log.lines == ["info round 12 paired with …abcd1234: 3.35 MB each way in 0.41 s, spread 1.2, loss 2.312"]


def test_unequal_sides_are_told_apart(log: Log) -> None:
    follow(
        InnerSteps(50, 51_200, 2.3123, 1e-3, 4.0),
        ExchangeEnded(BOB, "s", True, "committed", 3_350_000, 1_000, 0.41),
        OuterStep(12, "paired", BOB, 50, 1.2, 0.01),
    )
    assert log.lines == ["info round 12 paired with …abcd1234: 3.35 MB out and 1 kB in, 0.41 s, spread 1.2, loss 2.312"]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (OuterStep(3, "solo", None, 50, None, 0.1), "info round 3 solo, no partner: loss nan"),
        (WeightsLoaded(7, "checkpoint"), "info starting from the checkpoint's weights, round 7"),
        (Evaluated(3, 2.25, 0.1), "info round 3: validation loss 2.25"),
        (
            TextSupply("the hub is gone", 0.0),
            "warning no new text to train on: the hub is gone; the last is trained on again",
        ),
        (Amended(40, "rounds 60"), "info the run's owners change it from round 40 on: rounds 60"),
        (
            DevicesChosen(("cuda:0", "cuda:1"), "cuda:0"),
            "info 2 devices share each inner step: cuda:0, cuda:1. Messages are made on cuda:0",
        ),
        (MicroBatch(4, 64), "info 4 of a step's 64 windows are computed at once: memory takes no more"),
        (SamplesRead(9, 2, 1), "info of 9 samples 1 are left out, and 2 are cut to the length of a window"),
        (SamplesRead(9, 2, 1, "a/b"), "info of 9 samples of a/b 1 are left out, and 2 are cut to the length of a window"),
        (TextSupply("", 90.0), "info new text to train on comes again, after 90 s"),
        (Checkpointed(3, 5_000_000, 0.1), "info checkpoint of round 3: 5 MB in 0.10 s"),
        (
            RunFound("ab" * 32, "demo", BOB),
            f"info joining run demo ({'ab' * 32}) on the word of …abcd1234 alone; --run ID names the run to join",
        ),
        (StateChanged("discovering", "a peer that answers"), "info discovering, waiting for a peer that answers"),
        (PeerSeen(BOB, 3, 1, 2.0, "training"), "info peer …abcd1234 is here: training, round 3"),
        (PeerLost(BOB, "no heartbeat"), "info peer …abcd1234 is gone: no heartbeat"),
        (WeightsServed(BOB, 500, 1.0, whole=False), "info sent a part of the weights to …abcd1234: 500 B in 1.00 s"),
        (WeightsFetched(BOB, 3, 1_500, 1.0), "info fetched weights of round 3 from …abcd1234: 1.5 kB in 1.00 s"),
        (Troubled("NLC-202", "no byte."), "warning NLC-202 no byte."),
        (RelayHeld(BOB, 3600.0), "info relay …abcd1234 keeps a reservation for this node for 60 min"),
        (RelayLost(BOB, "hung up"), "info reservation at relay …abcd1234 lost: hung up"),
        (Punched(BOB, succeeded=True, seconds=1.62), "info direct connection to …abcd1234 punched in 1.6 s"),
        (Punched(BOB, succeeded=False, seconds=9.0, reason="no SYN"), "info no direct connection to …abcd1234: no SYN"),
        (PartitionHealed(BOB, 7), "info found another part of the run through …abcd1234: 7 members"),
        (
            DoubtSettled(BOB, "s", committed=True),
            "info exchange with …abcd1234 is no longer in doubt: the partner applied it, this node did not",
        ),
        (
            DoubtSettled(BOB, "s", committed=False),
            "info exchange with …abcd1234 is no longer in doubt: neither node applied it",
        ),
        (
            ExchangeEnded(BOB, "s", True, "in_doubt", 1, 1, 0.1, error="NLC-201", reason="stream lost"),
            "warning exchange with …abcd1234 in doubt: NLC-201 stream lost",
        ),
        (
            ExchangeEnded(BOB, "s", True, "unreachable", 0, 0, 0.1),
            "info exchange with …abcd1234 unreachable: no reason given",
        ),
    ],
)
def test_an_event_is_one_line(log: Log, event: Event, line: str) -> None:
    follow(event)
    assert log.lines == [line]


def test_the_start_tells_who_where_and_the_page(log: Log) -> None:
    follow(Started(BOB, "ab" * 32, "demo", ("/ip4/127.0.0.1/tcp/1",), "127.0.0.1:2"))
    assert log.lines == [
        "info node …abcd1234 in run demo (abababababab) at /ip4/127.0.0.1/tcp/1",
        "info status page at http://127.0.0.1:2/",
    ]


def test_everyday_events_are_detail(log: Log) -> None:
    everyday: list[Event] = [
        InnerSteps(1, 512, 2.0, 1e-3, 0.1),
        ExchangeStarted(BOB, initiator=False),
        ExchangeEnded(BOB, "s", True, "busy", 0, 0, 0.1, reason="later"),
        PeerConnected(BOB, "direct"),
    ]
    follow(*everyday)
    assert log.lines == []
    log.set_up("debug")
    follow(*everyday)
    assert [line.split()[0] for line in log.lines] == ["debug"] * 4


def test_a_state_is_told_once_and_a_peer_too(log: Log) -> None:
    follow(StateChanged("training"), StateChanged("training", "a partner"), StateChanged("training"))
    follow(PeerSeen(BOB, 3, 1, 2.0, "training"), PeerSeen(BOB, 4, 2, 1.9, "training"))
    assert len(log.lines) == 2


def test_a_pause_and_its_end_are_a_line_each(log: Log) -> None:
    follower = LogFollower()
    log.set_up()
    for event in (
        StateChanged("training"),
        Paused("hours", "outside of --hours 22:00-07:00", 9000.0),
        StateChanged("stopping", "the exchange under way"),
        StateChanged("training"),  # what an exchange that ends says
        StateChanged("paused"),
        Paused("hours", "outside of --hours 22:00-07:00", 5400.0),  # the clock was set
        Paused("battery", "the machine runs on battery: plug it in", None),
        Resumed(),
        StateChanged("training"),
    ):
        follower.follow(event)
    assert log.lines == [
        "info training",
        "info paused, outside of --hours 22:00-07:00; resumes in 2.5 h",
        "info stopping, waiting for the exchange under way",
        "info paused, the machine runs on battery: plug it in",
        "info resumed",
        "info training",
    ]


def test_limits_are_a_line_when_they_change_and_heat_when_it_comes_and_goes(log: Log) -> None:
    follower = LogFollower()
    log.set_up()
    hot = "--max-temperature asks for it"
    for event in (
        Allowed(None, None, None, (), on_battery=True),
        Allowed(None, None, None, (), on_battery=True, limits={"duty": "50%", "max-temperature": "80 °C"}),
        Eased(0.5),
        Eased(0.4, hot, 81.0),
        Eased(0.32, hot, 82.0),
        Eased(0.5, "", 76.0),
        Allowed(None, None, None, (), on_battery=True),
    ):
        follower.follow(event)
    assert log.lines == [
        "info limits: duty 50%, max-temperature 80 °C",
        "info computes 40 % of the time, --max-temperature asks for it",
        "info computes 50 % of the time",
        "info limits: none",
    ]


def test_reach_is_a_line_when_it_changes_and_no_more(log: Log) -> None:
    follow(
        ReachFound(None, "1 peer was asked", ()),
        ReachFound("public", "3 of 3 peers dialled back", ()),
        ReachFound("public", "3 of 4 peers dialled back", ()),
        ReachFound(None, "nobody dialled back", ()),
        RelayHeld(BOB, 3600.0),
        RelayHeld(BOB, 3600.0),
        Relaying(1, 0, 0, 0),
        Relaying(1, 1, 5, 1_000_000),
        Relaying(0, 0, 5, 2_000_000),
    )
    assert log.lines == [
        "info reachable: directly, because 3 of 3 peers dialled back",
        "info reachable: not known yet, because nobody dialled back",
        "info relay …abcd1234 keeps a reservation for this node for 60 min",
        "info reservations for other peers: 1",
        "info reservations for other peers: 0",
    ]


def test_repeats_are_folded_into_a_count(log: Log) -> None:
    logger = logging.getLogger("nolocod")
    for number in range(25):
        logger.warning("peer %d made no progress", number)
    assert log.lines == [f"warning peer {number} made no progress" for number in range(10)]
    logger.warning("something else")
    assert log.lines[10:] == ["warning something else"]
    log.clock.now = 61.0
    logger.warning("peer %d made no progress", 25)
    assert log.lines[11:] == [
        "info 15 more within a minute, the last: peer 24 made no progress",
        "warning peer 25 made no progress",
    ]


def test_many_that_are_busy_fold_no_exchange_that_broke_and_one_trouble_folds_no_other(log: Log) -> None:
    log.set_up("debug")
    for _ in range(12):
        follow(ExchangeEnded(BOB, "s", True, "busy", 0, 0, 0.1), Troubled("NLC-202", "no byte."))
    follow(ExchangeEnded(BOB, "s", True, "aborted", 0, 0, 0.1), Troubled("NLC-203", "too slow."))
    assert log.lines[20:] == ["warning exchange with …abcd1234 aborted: no reason given", "warning NLC-203 too slow."]


def test_folded_repeats_are_told_at_the_end(log: Log) -> None:
    for _ in range(12):
        logging.getLogger("nolocod").warning("again")
    (handler,) = [one for one in logging.getLogger().handlers if isinstance(one, logs.FoldingHandler)]
    handler.close()
    assert log.lines[-1] == "info 2 more within a minute, the last: again"


def test_a_record_that_does_not_fit_its_template_reaches_nobody_who_logs(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logs.FoldingHandler(io.StringIO(), lambda: 0.0)  # pytest's own would raise it
    for _ in range(12):
        handler.handle(logging.LogRecord("libp2p", logging.WARNING, "", 0, "%d peers", ("many",), None))
    handler.close()
    assert capsys.readouterr().err.count("--- Logging error ---") == 11, "ten lines and what they stand for"


def test_a_folded_record_may_have_named_values(log: Log) -> None:
    for count in range(11):
        logging.getLogger("nolocod").warning("%(count)d peers", {"count": count})
    log.clock.now = 61.0
    logging.getLogger("nolocod").warning("again")
    assert log.lines[10] == "info 1 more within a minute, the last: 10 peers"


def test_a_peer_cannot_break_a_line_or_drive_the_terminal(log: Log) -> None:
    follow(PeerLost(BOB, "bye\n12:00:00 info round 99 paired\x1b[2J\u202e\x9b"))
    (line,) = log.lines
    assert line.startswith("info peer …abcd1234 is gone: bye 12:00:00 info")
    assert line.isprintable()


def test_libraries_are_heard_only_when_it_matters(log: Log) -> None:
    logging.getLogger("zeroconf").warning("no answer")
    logging.getLogger("datasets").info("loading")
    logging.getLogger("some.library").info("chatter")
    assert log.lines == []
    logging.getLogger("zeroconf").error("broken")
    logging.getLogger("some.library").warning("look")
    assert log.lines == ["error zeroconf: broken", "warning some.library: look"]


def test_a_traceback_is_for_debugging(log: Log) -> None:
    def fail() -> None:
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("nolocod").exception("failed")

    fail()
    assert log.lines == ["error failed"]
    log.set_up("debug")
    fail()
    assert "ValueError: inside" in log.stream.getvalue()


def test_setting_up_again_replaces_the_former(log: Log) -> None:
    log.set_up(source="trainer")
    logging.getLogger("nolocod").info("hello")
    assert log.lines == ["info trainer: hello"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (3_350_000, "3.35 MB"),
        (2e12, "2 TB"),
    ],
)
def test_amounts_read_well(size: float, text: str) -> None:
    assert amount(size) == text


def test_plain_keeps_what_can_be_printed() -> None:
    assert plain("grüße, 世界 …") == "grüße, 世界 …"


# --- JSON ------------------------------------------------------------------------------------------


def test_a_paired_step_is_one_object_with_whole_ids(log: Log) -> None:
    log.set_up(form="json")
    follow(
        InnerSteps(50, 51_200, 2.3123, 1e-3, 4.0),
        ExchangeEnded(BOB, "s", True, "committed", 3_350_000, 1_000, 0.41),
        OuterStep(12, "paired", BOB, 50, 1.2, 0.01),
    )
    (one,) = log.objects
    at = datetime.fromisoformat(one["time"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
    assert abs(datetime.now(UTC) - at) < timedelta(minutes=1)
    assert (one["level"], one["logger"], one["event"]) == ("info", "nolocod", "outer_step")
    assert one["message"] == "round 12 paired with …abcd1234: 3.35 MB out and 1 kB in, 0.41 s, spread 1.2, loss 2.312"
    told = {"round": 12, "kind": "paired", "partner": BOB, "loss": 2.3123, "sent": 3_350_000, "exchange_seconds": 0.41}
    assert told.items() <= one["fields"].items()


def test_what_is_not_finite_is_null_and_no_text_leaves_its_line(log: Log) -> None:
    log.set_up(form="json", source="node-1")
    bad = "a\nb\x1b[31m\x7f\x9b\u202e"
    follow(OuterStep(3, "solo", None, 50, None, 0.1), PeerSeen(BOB, 3, 1, math.inf, bad))
    solo, seen = log.objects
    assert (solo["fields"]["loss"], solo["source"]) == (None, "node-1")
    assert (seen["fields"]["loss"], seen["fields"]["state"]) == (None, bad)
    assert all(char == "\n" or " " <= char <= "~" for char in log.stream.getvalue())


def test_libraries_and_repeats_are_objects_too(log: Log) -> None:
    log.set_up(form="json")
    logging.getLogger("some.library").warning("%d sheep", 3)
    for number in range(25):
        follow(Evaluated(number, 2.0, 0.1))
    log.clock.now = 61.0
    follow(PeerLost(BOB, "no heartbeat"))
    library, *rounds, folded, lost = log.objects
    named = {"level": "warning", "logger": "some.library", "event": "log", "message": "3 sheep", "fields": {}}
    assert named.items() <= library.items()
    assert [one["fields"]["round"] for one in rounds] == list(range(10))
    assert (folded["event"], folded["fields"]["count"]) == ("folded", 15)
    assert (lost["event"], lost["fields"]) == ("peer_lost", {"peer_id": BOB, "reason": "no heartbeat"})


def test_the_labs_count_what_is_folded(log: Log, tmp_path: Path) -> None:
    log.set_up("debug", form="json")
    for _ in range(25):
        follow(ExchangeEnded(BOB, "s", True, "busy", 0, 0, 0.1))
    log.clock.now = 61.0
    follow(ExchangeEnded(BOB, "s", True, "unreachable", 0, 0, 0.1))
    (tmp_path / "log").write_text(log.stream.getvalue())
    assert Seen.of(tmp_path / "log").outcomes == {"busy": 25, "unreachable": 1}


def test_a_debug_log_in_json_has_tracebacks(log: Log) -> None:
    log.set_up("debug", form="json")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("nolocod").exception("it failed")
    assert log.objects[0]["traceback"].endswith("ValueError: why")


def test_the_json_logs_names_stay() -> None:
    logged = {line.partition(":")[0]: line.partition(":")[2].split() for line in JSON_EVENTS.split("\n") if line}
    names = {re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in Event.__subclasses__()}
    assert logged == {name: list(names[name].__struct_fields__) for name in logged if name in names}
    assert names.keys() - logged.keys() == {"traffic", "host_checked", "contributed"}
