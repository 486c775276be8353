"""The status report, the HTTP pages and the tables."""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import re
import socket
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
from rich.console import Console

from nolocod import __version__
from nolocod.errors import PortTakenError, UsageError
from nolocod.identity import PeerId
from nolocod.observe.events import (
    Allowed,
    Checkpointed,
    Eased,
    Evaluated,
    Event,
    ExchangeEnded,
    ExchangeStarted,
    InnerSteps,
    MemoryTaken,
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
from nolocod.observe.status.report import ComingReport, StatusReport
from nolocod.observe.status.server import Pages, serve_http
from nolocod.observe.status.state import StatusState
from nolocod.observe.status.terminal_table import Watched, node_table, swarm_lines, swarm_table
from nolocod.observe.words import duration
from nolocod.units import Address
from tests.support.wires import ENOUGH, own_port

if TYPE_CHECKING:
    from rich.console import RenderableType

ALICE = PeerId("12D3KooWAliceAliceAliceAliceAliceAliceAliceAlice0000aaaa")
BOB = PeerId("12D3KooWBobBobBobBobBobBobBobBobBobBobBobBobBobBo0000bbbb")
CAROL = PeerId("12D3KooWCarolCarolCarolCarolCarolCarolCarolCarol0000cccc")
LOCAL = Address("127.0.0.1", 0)


class Node:
    """A status state under a clock of the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.state = StatusState(lambda: self.now, lambda: 7)

    def follow(self, *events: Event) -> None:
        for event in events:
            self.state.follow(event)

    def report(self) -> StatusReport:
        return self.state.snapshot(self.now)


@pytest.fixture
def node() -> Node:
    return Node()


def busy_node() -> Node:
    """A node with something of everything."""
    node = Node()
    node.follow(
        Started(ALICE, "ab" * 32, "demo", (f"/ip4/192.168.1.17/tcp/40001/p2p/{ALICE}",), "127.0.0.1:8080"),
        StateChanged("training", "a partner"),
        PeerSeen(BOB, 12, 400_000, 2.34, "training"),
        PeerConnected(BOB, "relayed"),
        ReachFound("symmetric", "2 peers saw 2 ports; forward port 40001", (f"/ip4/192.168.1.17/tcp/40001/p2p/{ALICE}",)),
        RelayHeld(CAROL, 3600.0),
        PeerSeen(CAROL, 12, 400_000, 2.34, "finished"),
    )
    node.now += 10
    node.follow(
        InnerSteps(50, 51_200, 2.3456, 1e-3, 4.0),
        ExchangeStarted(BOB, initiator=True),
        ExchangeEnded(BOB, "s", True, "committed", 3_350_000, 3_350_000, 0.41),
        OuterStep(12, "paired", BOB, 50, 1.2, 0.1),
        Evaluated(12, 2.1, 0.3),
        ExchangeEnded(CAROL, "s", False, "aborted", 3_350_000, 1_350_000, 10.41, "NLC-202", "no byte in 30 s"),
        OuterStep(13, "solo", None, 50, None, 0.1),
        Checkpointed(13, 5_000_000, 0.2),
        Troubled("NLC-202", "a peer made no progress: " + "word " * 20),
    )
    return node


# --- the report ------------------------------------------------------------------------------------


def test_a_new_node_is_starting_and_knows_nothing(node: Node) -> None:
    report = node.report()
    assert (report.state, report.peer_id, report.round, report.loss, report.peers) == ("starting", "", 0, None, ())
    assert (report.version, report.pid, report.utilisation, report.tokens_per_second) == (__version__, os.getpid(), 0.0, 0.0)


def test_an_outage_of_text_is_told_until_it_is_over(node: Node) -> None:
    node.follow(TextSupply("the hub is gone", 0.0))
    assert node.report().text_trouble == "the hub is gone"
    assert "no new one: the hub is gone" in "\n".join(rendered(node_table(node.report()), 100))
    node.follow(TextSupply("", 9.0))
    assert node.report().text_trouble == ""
    assert "no new one" not in "\n".join(rendered(node_table(node.report()), 100))


def test_the_state_tells_how_long_and_for_what_it_waits(node: Node) -> None:
    node.follow(StateChanged("discovering", "a bootstrap peer"))
    node.now += 5
    node.follow(StateChanged("discovering", "a donor"))
    node.now += 5
    report = node.report()
    assert (report.state, report.waiting_for, report.since, report.uptime) == ("discovering", "a donor", 10.0, 10.0)
    node.follow(StateChanged("training"))
    assert (node.report().since, node.report().waiting_for) == (0.0, "")


def test_training_adds_up(node: Node) -> None:
    node.now += 10
    node.follow(InnerSteps(10, 1000, 3.0, 1e-3, 2.0), Evaluated(1, 2.9, 0.1))
    node.now += 10
    node.follow(InnerSteps(10, 1000, 2.5, 9e-4, 2.0), Evaluated(2, 2.4, 0.1))
    report = node.report()
    assert (report.inner_steps, report.tokens, report.loss, report.learning_rate) == (20, 2000, 2.5, 9e-4)
    assert (report.validation_loss_first, report.validation_loss) == (2.9, 2.4)
    assert report.utilisation == 4 / 20
    assert report.tasks == 7


def test_what_training_takes_of_the_machine(node: Node) -> None:
    node.follow(InnerSteps(10, 1000, 3.0, 1e-3, 2.0, 0.5))
    assert (node.report().text_wait, node.report().mfu, node.report().memory) == (0.5, None, {})
    assert "MFU" not in "\n".join(rendered(node_table(node.report()), 200))
    node.follow(InnerSteps(10, 1000, 3.0, 1e-3, 2.0, 70.0, 0.375), MemoryTaken(4_000_000, 2, 3, 4, 5, 60_000_000))
    told = "\n".join(rendered(node_table(node.report()), 200))
    assert "tokens/s (MFU 38%), 70 s waiting for text" in told
    assert "peak 60 MB, weights 4 MB, exchange 5 B" in told


def test_tokens_per_second_are_those_of_the_last_minute(node: Node) -> None:
    node.now += 2
    node.follow(InnerSteps(10, 1000, 3.0, 1e-3, 2.0))
    assert node.report().tokens_per_second == 500
    node.now += 2
    node.follow(InnerSteps(10, 3000, 3.0, 1e-3, 2.0))
    assert node.report().tokens_per_second == 1000
    node.now += 61
    assert node.report().tokens_per_second == 0
    node.now += 2
    node.follow(InnerSteps(10, 200, 3.0, 1e-3, 2.0))
    assert node.report().tokens_per_second == 100


def test_the_spread_is_put_with_its_exchange(node: Node) -> None:
    node.follow(
        ExchangeEnded(BOB, "1", True, "committed", 1, 2, 0.5),
        OuterStep(1, "paired", BOB, 50, 1.5, 0.1),
        ExchangeEnded(BOB, "2", False, "committed", 1, 2, 0.5),
        ExchangeEnded(CAROL, "3", False, "aborted", 1, 2, 0.5, "NLC-202", "slow"),
    )
    aborted, second, first = node.report().exchanges
    assert (first.spread, second.spread, aborted.spread) == (1.5, None, None)
    assert (aborted.role, aborted.outcome, aborted.error, aborted.reason) == ("responder", "aborted", "NLC-202", "slow")
    node.follow(OuterStep(2, "paired", BOB, 50, 2.5, 0.1))
    assert [one.spread for one in node.report().exchanges] == [None, 2.5, 1.5]
    assert node.report().exchanges_by_outcome == {"aborted": 1, "committed": 2}
    assert (node.report().outer_paired, node.report().outer_solo) == (2, 0)


def test_who_is_exchanged_with_now(node: Node) -> None:
    node.follow(ExchangeStarted(BOB, initiator=True))
    assert node.report().exchanging_with == BOB
    node.follow(ExchangeEnded(BOB, "1", True, "busy", 0, 0, 0.1))
    assert node.report().exchanging_with is None


def test_lists_keep_the_last_twenty_newest_first(node: Node) -> None:
    for number in range(30):
        node.follow(ExchangeEnded(BOB, str(number), True, "busy", number, 0, 0.1), Troubled("NLC-201", str(number)))
        node.now += 1
    report = node.report()
    assert [one.sent for one in report.exchanges] == list(range(29, 9, -1))
    assert [error.message for error in report.errors] == [str(number) for number in range(29, 9, -1)]
    assert (report.errors[0].age, report.errors[-1].age) == (1.0, 20.0)
    assert report.exchanges_by_outcome == {"busy": 30}


def test_peers_come_change_and_go(node: Node) -> None:
    node.follow(PeerConnected(BOB, "inbound"))
    node.now += 3
    (bob,) = node.report().peers
    assert (bob.state, bob.round, bob.reach, bob.age) == ("", None, "inbound", 3.0)
    node.follow(PeerSeen(BOB, 7, 100, 2.0, "training"), PeerSeen(ALICE, 8, 100, 2.0, "finished"))
    node.now += 2
    alice, bob = node.report().peers
    assert (alice.peer_id, alice.state, alice.reach) == (ALICE, "finished", None)
    assert (bob.round, bob.tokens, bob.loss, bob.reach, bob.age) == (7, 100, 2.0, "inbound", 2.0)
    node.follow(PeerDisconnected(BOB), PeerLost(BOB, "left"), PeerLost(ALICE, "left"))
    assert node.report().peers == ()


def test_what_is_thought_of_thousands_of_peers_is_bounded_and_the_latest_is_shown(node: Node) -> None:
    for number in range(3000):
        peer = PeerId(f"peer-{number}")
        node.follow(PeerJudged(peer, 0.4, "why"), PeerBanned(peer, 60.0, "why"))
    rows = node.report().peers
    assert len(rows) == 512
    assert {(row.reputation, row.banned_for) for row in rows} == {(0.4, 60.0)}
    assert "peer-2999" in {row.peer_id for row in rows}
    node.now += 61
    assert node.report().peers == ()


def test_traffic_counts_exchanges_and_weights(node: Node) -> None:
    node.follow(
        ExchangeEnded(BOB, "1", True, "aborted", 10, 20, 0.1),
        WeightsServed(BOB, 100, 1.0, whole=False),
        WeightsFetched(BOB, 9, 1000, 1.0),
    )
    report = node.report()
    assert (report.sent, report.received, report.round) == (110, 1020, 9)


def test_weights_that_come_are_told_with_their_rate_and_what_is_left(node: Node) -> None:
    """While 454 MB came in, status said "0 B received"."""
    node.follow(StateChanged("fetching", "weights from one of 3 peers"))
    assert node.report().weights is None
    for seconds in range(0, 100, 10):  # 50 MB were here when this process began
        node.now += 10
        node.follow(WeightsComing(BOB, 50_000_000 + seconds * 1_000_000, 454_000_000))
    report = node.report()
    assert report.weights == ComingReport(donor=BOB, here=140_000_000, size=454_000_000, rate=1e6, left=314.0)
    assert report.received == 90_000_000
    shown = [" ".join(line.split()) for line in rendered(node_table(report), 120)]
    assert any("waiting for the weights of …0000bbbb: 140 MB of 454 MB, 1 MB/s, 5 min left" in line for line in shown)
    for _ in range(8):
        node.now += 10
        node.follow(WeightsComing(BOB, 140_000_000, 454_000_000))
    assert "140 MB of 454 MB, nothing comes now" in node.report().waiting_for
    node.follow(WeightsComing(ALICE, 10, 454_000_000), WeightsComing(ALICE, 20, 454_000_000))
    assert node.report().received == 90_000_010, "of another donor"
    node.follow(WeightsFetched(ALICE, 9, 454_000_000, 1.0), StateChanged("training"))
    report = node.report()
    assert (report.weights, report.waiting_for, report.received) == (None, "", 90_000_010 + 454_000_000 - 20)


def test_what_the_owner_allows_and_what_is_used(node: Node) -> None:
    assert (node.report().allowance.max_upload, node.report().allowance.paused) == (None, "")
    node.follow(
        Allowed(2_500_000, None, 200_000_000_000, ("22:00-07:00", "12:00-13:00"), on_battery=False),
        Traffic(5_000_000, 7_000_000, 1_200_000.0, 300_000.0, "2025-06", 10_000_000_000, 2_340_000_000),
        Paused("hours", "outside of --hours 22:00-07:00, 12:00-13:00", 10_000.0),
    )
    node.now += 1000
    found = node.report().allowance
    assert (found.sent, found.received, found.month, found.month_used) == (5_000_000, 7_000_000, "2025-06", 12_340_000_000)
    assert (found.max_upload, found.max_download, found.monthly_budget) == (2_500_000, None, 200_000_000_000)
    assert (found.hours, found.pause_on_battery) == (("22:00-07:00", "12:00-13:00"), True)
    assert (found.paused, found.resumes_in) == ("hours", 9000.0)
    facts = [" ".join(line.split()) for line in rendered(node_table(node.report()), 80)]
    for fact in (
        "line 1.2 MB/s of 2.5 MB/s up, 300 kB/s down",
        "month 12.3 GB of 200 GB",
        "trains 22:00-07:00, 12:00-13:00 (local time), not on battery",
        "paused outside of --hours 22:00-07:00, 12:00-13:00 (resumes in 2.5 h)",
    ):
        assert fact in facts
    assert not any(fact.startswith(("limits", "computes")) for fact in facts)
    limits = {"hours": "22:00-07:00", "max-temperature": "80 °C", "duty": "50%"}
    node.follow(Allowed(None, None, None, (), on_battery=True, limits=limits), Eased(0.4, "it is too hot", 81.0, 120.0))
    assert (node.report().allowance.limits, node.report().allowance.share) == (limits, 0.4)
    facts = [" ".join(line.split()) for line in rendered(node_table(node.report()), 80)]
    assert "limits max-temperature 80 °C, duty 50%" in facts
    assert "computes 40% of the time, it is too hot, 81 °C, 120 W" in facts
    node.follow(Paused("battery", "unplugged", None))
    assert node.report().allowance.resumes_in is None
    node.follow(Resumed())
    assert (node.report().allowance.paused, node.report().allowance.paused_why) == ("", "")
    assert not any(line.startswith("paused") for line in rendered(node_table(node.report()), 80))


def test_how_others_reach_it_and_what_it_carries(node: Node) -> None:
    assert (node.report().reach.kind, node.report().reach.relays) == (None, ())
    assert any(line.startswith("reachable") and "not known yet" in line for line in rendered(node_table(node.report()), 80))
    node.follow(
        Started(ALICE, "ab" * 32, "demo", ("/ip4/192.168.1.17/tcp/1",), ""),
        ReachFound("cone", "2 peers see port 5", ("/ip4/192.0.2.1/tcp/5",)),
        RelayHeld(BOB, 600.0),
        RelayHeld(CAROL, 600.0),
        Punched(BOB, succeeded=True, seconds=1.0),
        Punched(CAROL, succeeded=False, seconds=9.0, reason="no answer"),
        Relaying(3, 1, 4, 5_000_000),
        PartitionHealed(BOB, 7),
        PeerSeen(BOB, 7, 100, 2.0, "training", "symmetric"),
        PeerConnected(BOB, "punched"),
    )
    node.now += 200
    node.follow(RelayHeld(CAROL, 600.0))
    report = node.report()
    assert (report.addresses, report.reach.addresses) == (("/ip4/192.0.2.1/tcp/5",),) * 2
    assert [(one.peer_id, one.seconds) for one in report.reach.relays] == [(BOB, 400.0), (CAROL, 600.0)]
    assert (report.reach.punches, report.reach.punched, report.reach.healed) == (2, 1, 1)
    carried = report.reach.carried
    assert (carried.reservations, carried.open, carried.circuits, carried.bytes) == (3, 1, 4, 5_000_000)
    assert [(peer.reach, peer.nat) for peer in report.peers] == [("punched", "symmetric")]
    facts = [" ".join(line.split()) for line in rendered(node_table(report), 120)]
    for fact in (
        "reachable by hole punching (relays: 0000bbbb, 0000cccc), because 2 peers see port 5",
        "punched 1 of 2 connections",
        "relay 3 reservations, 1 circuits now, 4 in all, 5 MB",
    ):
        assert fact in facts
    node.follow(RelayLost(BOB, "gone"), ReachFound("client", "no relay was found", ()))
    assert [one.peer_id for one in node.report().reach.relays] == [CAROL]
    assert node.report().addresses == ("/ip4/192.168.1.17/tcp/1",)


def test_the_report_goes_through_json_and_has_no_nan(node: Node) -> None:
    node.follow(*[InnerSteps(1, 1, bad, math.inf, 0.1) for bad in (math.nan,)])
    node.follow(PeerSeen(BOB, 1, 1, math.nan, "joining"), Evaluated(1, -math.inf, 0.1))
    raw = msgspec.json.encode(node.report())
    assert json.loads(raw, parse_constant=pytest.fail)["loss"] is None
    for report in (node.report(), busy_node().report()):
        assert msgspec.json.decode(msgspec.json.encode(report), type=StatusReport) == report


# --- the pages -------------------------------------------------------------------------------------


def test_answers_without_a_socket(node: Node) -> None:
    answer = Pages(node.state, Metrics()).answer
    assert answer("GET", "/healthz").status == 200
    not_ready = answer("GET", "/readyz")
    assert (not_ready.status, json.loads(not_ready.body)["state"]) == (503, "starting")
    for state in ("training", "finished"):
        node.follow(StateChanged(state))  # type: ignore[arg-type]  # both are node states
        assert answer("GET", "/readyz").status == 200
    node.follow(StateChanged("fetching", f"weights from {BOB}"), Troubled("NLC-202", f"of {BOB}"))
    assert json.loads(answer("GET", "/readyz").body) == {"ready": False, "state": "fetching"}, "anybody may ask, so no names"
    assert answer("GET", "/nothing").status == 404
    assert answer("POST", "/healthz").status == 405
    assert answer("GET", "/metrics").content_type.startswith("text/plain")


def test_the_page_is_whole_and_may_load_nothing_from_elsewhere(node: Node) -> None:
    answer = Pages(node.state, Metrics()).answer
    seen, wanted = set(), ["/"]
    while wanted:
        path = wanted.pop()
        reply = answer("GET", path)
        assert reply.status == 200, path
        seen.add(path)
        text = reply.body.decode()
        assert not re.findall(r"https?://(?!www\.w3\.org/)|innerHTML|insertAdjacentHTML|<script>|style=| on\w+=", text), path
        if "content-security-policy" in dict(reply.headers):
            assert dict(reply.headers)["content-security-policy"].startswith("default-src 'self'")
            names = re.findall(r'(?:href|src)="([\w.]+)"|from "\./([\w.]+)"|EventSource\("(\w+)"\)', text)
            wanted += {f"/{name}" for match in names for name in match if name and f"/{name}" not in seen}
    assert {"/", "/page.js", "/page.css", "/loss.js", "/swarm.js", "/words.js", "/icon.svg", "/events", "/status.json"} <= seen


def test_every_file_of_the_page_is_packaged_and_served(node: Node) -> None:
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["nolocod"]
    files = [path.relative_to(root / "nolocod") for path in (root / "nolocod/observe/status/page").rglob("*") if path.is_file()]
    assert len(files) >= 7
    answer = Pages(node.state, Metrics()).answer
    for file in files:
        assert any(file.match(pattern) for pattern in patterns), f"{file} would not be in a wheel"
        assert answer("GET", "/" if file.name == "index.html" else f"/{file.name}").status == 200, f"{file} is served nowhere"


def test_curves_and_remedies_are_in_the_report(node: Node) -> None:
    node.follow(InnerSteps(100, 800, 5.5, 1e-3, 0.1), Evaluated(1, 5.25, 0.1))
    node.follow(Troubled("NLC-125", "it died"), Troubled("X", "?"))
    report = node.report()
    assert (report.curve.training, report.curve.validation) == (((100, 5.5),), ((100, 5.25),))
    unknown, trainer = report.errors
    assert trainer.title == "trainer failed"
    assert "restarts" in trainer.remedy
    assert (unknown.title, unknown.remedy) == ("", "")


def fetch(where: str, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    name, _, port = where.rpartition(":")
    connection = http.client.HTTPConnection(name.strip("[]"), int(port), timeout=ENOUGH)
    connection.request(method, path, headers={"Host": host or where})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, {key.lower(): value for key, value in reply.getheaders()}, body


async def get(where: str, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    return await trio.to_thread.run_sync(fetch, where, path, method, host)


async def test_the_pages_over_a_socket(nursery: trio.Nursery) -> None:
    node = busy_node()
    where = await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics()))
    assert Address.parse(where, "").port > 0
    status, headers, body = await get(where, "/status.json")
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
    assert msgspec.json.decode(body, type=StatusReport) == node.report()
    status, headers, body = await get(where, "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert b"\nnolocod_round 0.0\n" in body
    assert "server" not in headers
    assert (await get(where, "/healthz"))[0] == 200
    assert (await get(where, "/readyz"))[0] == 200


async def test_unknown_pages_and_methods_get_json(nursery: trio.Nursery, node: Node) -> None:
    where = await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics()))
    status, headers, body = await get(where, "/etc/passwd")
    assert (status, headers["content-type"]) == (404, "application/json")
    assert "no such page" in json.loads(body)["error"]
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        status, headers, body = await get(where, "/metrics", method)
        assert (status, headers["allow"]) == (405, "GET")
        assert method in json.loads(body)["error"]


async def test_who_sends_on_and_on_after_its_request_is_not_read(nursery: trio.Nursery, node: Node) -> None:
    """A second's worth of it was read before: 37 MB a second from eight readers, and a quarter of a training's steps."""
    where = Address.parse(await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics())), "")
    taken = 0
    with trio.fail_after(ENOUGH), suppress(trio.BrokenResourceError):
        async with await trio.open_tcp_stream(where.host, where.port) as stream:
            while True:
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
                taken += 1
    assert taken * 37_000 < 32 << 20, "the kernel's buffers, and no more"


async def test_a_request_of_very_many_lines_is_refused_before_they_are_parsed(nursery: trio.Nursery, node: Node) -> None:
    where = Address.parse(await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics())), "")
    for lines, status in ((90, b"200"), (500, b"431")):
        with trio.fail_after(ENOUGH):
            stream = await trio.open_tcp_stream(where.host, where.port)
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * lines + b"\r\n")
            assert (await stream.receive_some(64)).split()[1] == status
            await stream.aclose()


async def test_another_host_name_is_refused_on_loopback(nursery: trio.Nursery, node: Node) -> None:
    where = await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics()))
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:80", ":80", "[::2]:80"):
        assert (await get(where, "/status.json", host=host))[0] == 403, host
    for host in ("localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:80"):
        assert (await get(where, "/status.json", host=host))[0] == 200, host


async def test_another_host_name_is_fine_where_the_user_opened_the_pages(nursery: trio.Nursery, node: Node) -> None:
    where = await nursery.start(serve_http, Address("0.0.0.0", 0), Pages(node.state, Metrics()))
    port = Address.parse(where, "").port
    assert (await get(f"127.0.0.1:{port}", "/healthz", host="node.example:80"))[0] == 200


async def test_a_taken_port_is_named(nursery: trio.Nursery, node: Node) -> None:
    where = await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics()))
    with pytest.raises(PortTakenError, match=where):
        await serve_http(Address.parse(where, "--http"), Pages(node.state, Metrics()))


async def test_an_address_of_another_machine_is_named(node: Node) -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        await serve_http(Address("192.0.2.1", 0), Pages(node.state, Metrics()))


async def test_cancelling_stops_at_once_and_frees_the_port(node: Node) -> None:
    """With a client that sent half a request, one that sent nothing, and one that does not read."""
    clients = []
    async with trio.open_nursery() as nursery:
        where = await nursery.start(serve_http, Address("127.0.0.1", own_port()), Pages(node.state, Metrics()))
        address = Address.parse(where, "")
        for begun in (b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50):
            client = socket.create_connection((address.host, address.port), timeout=ENOUGH)
            client.sendall(begun)
            clients.append(client)
        assert (await get(where, "/healthz"))[0] == 200
        began = time.perf_counter()
        nursery.cancel_scope.cancel()
    assert time.perf_counter() - began < 5, "half of what a client may take over its request"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port), timeout=ENOUGH)
    for client in clients:
        client.close()


async def test_the_listener_is_not_passed_to_child_processes(nursery: trio.Nursery, node: Node) -> None:
    where = await nursery.start(serve_http, LOCAL, Pages(node.state, Metrics()))
    (listener,) = [descriptor for descriptor in open_sockets() if bound_to(descriptor) == where]
    assert not os.get_inheritable(listener)


def open_sockets() -> list[int]:
    links = {int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    return [descriptor for descriptor, target in links.items() if target.startswith("socket:")]


def bound_to(descriptor: int) -> str:
    with socket.socket(fileno=os.dup(descriptor)) as other:
        return ":".join(map(str, other.getsockname()[:2]))


# --- tables ----------------------------------------------------------------------------------------


def rendered(what: RenderableType, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(what, crop=False)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_node_table_fits_and_is_plain_text_without_a_terminal(width: int) -> None:
    lines = rendered(node_table(busy_node().report()), width)
    text = "\n".join(lines)
    addresses = [line for line in lines if line.startswith("/ip4/")]
    assert addresses == list(busy_node().report().addresses), "each in one piece, however narrow the terminal"
    assert max(len(line) for line in lines if line not in addresses) <= width
    assert "\x1b" not in text
    assert "…" not in text, "nothing is cut off"
    for fact in ("demo (abababababab)", ALICE, "training, waiting for a partner (10 s)", "round 13, 50 inner steps"):
        assert fact in text
    exchange = next(line for line in lines if line.startswith("0000bbbb initiator"))
    assert exchange.split() == ["0000bbbb", "initiator", "committed", "3.35", "MB", "3.35", "MB", "0.41", "s", "1.2", "0", "s"]
    assert next(line for line in lines if line.startswith("0000cccc finished")).split()[-2:] == ["10", "s"]


def test_the_loss_has_a_course_and_peers_have_a_reputation(node: Node) -> None:
    assert not any(line.startswith("course") for line in rendered(node_table(node.report()), 80))
    for step in range(80):
        node.follow(InnerSteps(1, 1, 5 - step / 40, 1e-3, 0.1))
    node.follow(PeerSeen(BOB, 1, 1, 2.0, "training"), PeerSeen(CAROL, 1, 1, 2.0, "discovering"))
    node.follow(PeerJudged(BOB, 0.925, "x"), PeerBanned(CAROL, 3600.0, "x"))
    lines = rendered(node_table(node.report()), 80)
    (course,) = (line for line in lines if line.startswith("course"))
    bars, *values = course.split()[1:]
    assert len(bars) == 40
    assert (bars[0], bars[-1], " ".join(values)) == ("█", "▁", "5 to 3.025")
    assert list(bars) == sorted(bars, reverse=True)
    rows = [line.split() for line in lines if line.startswith(("0000bbbb", "0000cccc"))]
    assert [row[0] for row in rows] == ["0000cccc", "0000bbbb"], "who is banned comes first"
    assert (rows[0][-5:-2], rows[1][-3]) == (["ban", "60", "min"], "0.93")


def test_a_watched_table_has_the_newest_and_says_how_many_more(node: Node) -> None:
    for number in range(12):
        node.follow(PeerSeen(PeerId(f"12D3KooWPeer{number:08}"), 1, 1, 2.0, "training"))
        node.follow(Troubled("NLC-202", f"trouble {number}"))
    node.follow(ExchangeEnded(PeerId("12D3KooWPeer00000011"), "s", True, "committed", 1, 1, 0.1))
    lines = rendered(node_table(node.report(), 4), 80)
    assert "and 8 more" in lines
    assert sum(line.startswith("000000") for line in lines) == 4 + 1
    assert any(line.startswith("00000011 training") for line in lines), "its partner is among them"
    assert "trouble 11" in "\n".join(lines)
    assert "trouble 7" not in "\n".join(lines)
    assert not any("more" in line for line in rendered(node_table(node.report()), 80))


@pytest.mark.parametrize(("width", "height", "rows"), [(80, 24, 5), (80, 50, 8), (120, 17, 1)])
def test_a_watched_node_fills_its_screen_and_no_more(node: Node, width: int, height: int, rows: int) -> None:
    for number in range(12):
        node.follow(PeerSeen(PeerId(f"12D3KooWPeer{number:08}"), 1, 1, 2.0, "training"))
        node.follow(ExchangeEnded(PeerId("12D3KooWPeer00000011"), "s", True, "committed", 1, 1, 0.1))
    stream = io.StringIO()
    Console(file=stream, width=width, height=height).print(Watched(node.report()))
    lines = stream.getvalue().splitlines()
    assert len(lines) <= height
    assert sum(line.startswith("0000") for line in lines) == 2 * rows
    assert lines[-1] == f"and {12 - rows} more"
    assert any(line.startswith("page") for line in lines) == (height == 50), "a low screen shows what changes"


def test_a_new_node_has_a_table_too(node: Node) -> None:
    assert any("starting" in line for line in rendered(node_table(node.report()), 80))


@pytest.mark.parametrize("width", [80, 120])
def test_the_swarm_table_is_one_line_per_node(width: int) -> None:
    rows = [busy_node().report(), None]
    header, first, second = rendered(swarm_table(rows), width)
    assert header.split()[:4] == ["node", "state", "round", "steps"]
    assert first.split() == ["node-0", "training", "13", "50", "12.8k", "2.3456", "2.1000", "1", "1", "0000bbbb", "2"]
    assert second.split() == ["node-1", "no", "answer", *"-" * 9]


def test_swarm_lines_can_be_read_alone() -> None:
    assert swarm_lines([busy_node().report(), None]) == [
        "node-0: training, round 13, 50 steps, 12.8k tokens/s, loss 2.3456, validation 2.1000, "
        "outer 1 paired 1 solo, partner 0000bbbb, 2 peers",
        "node-1: no answer",
    ]


def test_what_a_peer_wrote_is_shown_as_text(node: Node) -> None:
    node.follow(PeerSeen(BOB, 1, 1, 2.0, "[red]x[/red]\x1b[31m\n"), Troubled("NLC-203", "[link=http://evil]\x1b]0;title\x07"))
    text = "\n".join(rendered(node_table(node.report()), 120))
    assert "[red]x[/red]" in text
    assert "[link=http://evil]" in text
    assert all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (5999, "100 min"), (7200, "2.0 h"), (864_000, "10.0 d")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_node_that_resumes_tells_its_round_before_its_first_step(node: Node) -> None:
    node.follow(WeightsLoaded(7, "checkpoint"))
    assert node.report().round == 7
