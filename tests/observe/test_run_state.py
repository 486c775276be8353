"""The run's report: what an observer makes of what members say, whoever of them lies."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from nolocod.errors import DataDirError
from nolocod.observe.run.metrics import RunMetrics
from nolocod.observe.run.pages import FRESH, RunPages
from nolocod.observe.run.state import CONTRIBUTORS, PER_GROUP, SHOWN, RunState
from tests.support.page_states import Clock
from tests.support.runs import a_dozen, a_run, given, member, peer, six_hundred

if TYPE_CHECKING:
    from nolocod.proto.types import Member


def seen(looks: list[list[Member]], every: float = 10.0, rounds: int = 1000) -> RunState:
    """A run of which `looks` were seen one after another."""
    clock = Clock()
    state = RunState(a_run(rounds), clock)
    for members in looks:
        clock.now += every
        state.look(members)
    return state


def pages_of(state: RunState) -> RunPages:
    return RunPages(lambda: state.report)


def swarm(second: int, count: int = 10) -> list[Member]:
    """Members of 100 tokens and a tenth of a round each second."""
    return [member(n, round_number=40 + second // 10, tokens=1000 + 100 * second, loss=3.0) for n in range(count)]


def test_figures_are_medians_and_sums() -> None:
    report = seen([swarm(second) for second in range(0, 100, 10)]).report
    assert (report.known, report.counted, report.round, report.loss) == (10, 10, 49, 3.0)
    assert report.tokens_per_second == pytest.approx(1000)
    assert report.tokens == 1000 + 100 * 90
    assert report.watched_tokens == pytest.approx(1000 * 90, rel=0.01)
    assert report.progress == pytest.approx(0.049)
    assert report.eta == pytest.approx((1000 - 49) * 10, rel=0.01)
    assert report.curve[0] == (40, 3.0)
    assert report.states["training"] == 10
    assert report.reachable["public"] == 10


def test_the_goal_is_what_the_runs_owners_made_it() -> None:
    state = RunState(a_run(1000), Clock())
    assert state.report.rounds == 1000
    state.look(swarm(0), goal=400)
    assert (state.report.rounds, state.report.progress) == (400, 0.1)


def test_what_was_given_goes_on_over_restarts_of_an_observer(tmp_path: Path) -> None:
    state = RunState(a_run(), Clock())
    pair = (peer(0), peer(1), 5.0)
    state.look([member(0)], [given(0, 5000), given(1, 9000), given(2, 0)], [pair])
    report = state.report
    assert [one.peer_id for one in report.contributors] == [peer(1), peer(0)]
    assert (report.contributed, report.contributed_by, report.exchanges) == (14_000, 2, (pair,))
    state.save(tmp_path / "history")
    again = RunState(a_run(), Clock())
    again.restore(tmp_path / "history")
    again.look([member(0)], [replace(given(0, 5000), name="")])
    assert [(one.name, one.tokens, one.exchanges) for one in again.report.contributors] == [
        ("node 0", 10_000, 20),
        ("node 1", 9000, 18),
    ]
    text = RunMetrics(lambda: again.report).render().decode()
    assert "nolocod_run_contributed_tokens 19000.0" in text
    assert "nolocod_run_contributors 2.0" in text
    many = RunState(a_run(), Clock())
    many.look([], [given(number, 1000) for number in range(CONTRIBUTORS + 9)])
    assert (len(many.report.contributors), many.report.contributed_by) == (CONTRIBUTORS, CONTRIBUTORS + 9)


def test_a_third_of_liars_moves_no_median_and_adds_little() -> None:
    def look(second: int) -> list[Member]:
        liars = [member(10 + n, round_number=900, tokens=10**9 * (second + 1), loss=0.001) for n in range(3)]
        return swarm(second) + liars

    honest, lied = (seen([make(second) for second in range(0, 100, 10)]).report for make in (swarm, look))
    assert (lied.round, lied.loss, lied.tokens) == (honest.round, honest.loss, honest.tokens)
    assert lied.tokens_per_second == pytest.approx(honest.tokens_per_second + 3 * 4 * 100)


def test_members_that_are_only_heard_of_count_half_as_much() -> None:
    def look(second: int) -> list[Member]:
        return swarm(second) + [member(100 + n, group="", tokens=100 * second) for n in range(200)]

    report = seen([look(second) for second in range(0, 50, 10)]).report
    assert (report.known, report.counted) == (210, 15)
    assert report.tokens_per_second == pytest.approx(1500)
    assert seen([[member(n, group="") for n in range(9)]]).report.counted == 4


def test_so_many_members_of_one_address_group_count() -> None:
    report = seen([[member(n, group="203.0.113.0/24") for n in range(PER_GROUP + 9)]]).report
    assert report.counted == PER_GROUP


def test_tokens_that_a_newcomer_takes_over_are_not_trained() -> None:
    def look(second: int) -> list[Member]:
        state, tokens = ("joining", 0) if second < 50 else ("training", 10**8 + 100 * second)
        return [*swarm(second, 3), member(9, state=state, tokens=tokens)]

    report = seen([look(second) for second in range(0, 100, 10)]).report
    assert report.tokens_per_second == pytest.approx(400)


def test_a_member_that_begins_anew_has_no_negative_pace() -> None:
    looks = [[member(0, tokens=tokens)] for tokens in (5000, 6000, 0, 1000)]
    assert seen(looks).report.tokens_per_second == pytest.approx(100)


def test_a_loss_that_is_no_number_is_left_out() -> None:
    report = seen([[member(0, loss=float("nan")), member(1, loss=2.5)]]).report
    assert report.loss == 2.5
    assert [row.loss for row in report.members if row.peer_id == peer(0)] == [None]


def test_a_run_without_a_goal_has_no_progress() -> None:
    report = seen([swarm(second) for second in range(0, 100, 10)], rounds=0).report
    assert (report.progress, report.eta) == (None, None)


def test_nobody_there_leaves_what_was_known() -> None:
    report = seen([swarm(0), swarm(10), []]).report
    assert (report.known, report.round, report.loss, report.tokens_per_second) == (0, 41, 3.0, 0.0)


def test_a_report_is_bounded_and_says_nothing_of_addresses() -> None:
    report = six_hundred().report
    assert (len(report.members), report.known) == (SHOWN, 600)
    body = pages_of(a_dozen()).answer("GET", "/run.json").body
    assert b"203.0.113" not in body
    assert [peer(0)] in [row["via"] for row in json.loads(body)["members"]]


def test_what_peers_call_their_releases_is_bounded() -> None:
    report = seen([[member(n, version=f"v{n // 2}") for n in range(40)]]).report
    assert len(report.releases) == 9
    assert sum(report.releases.values()) == 40


def test_the_history_outlives_the_observer(tmp_path: Path) -> None:
    path, state = tmp_path / "history.json", seen([swarm(second) for second in range(0, 100, 10)])
    state.save(path)
    again = RunState(a_run(), Clock())
    again.restore(path)
    assert again.report.curve == state.report.curve
    assert again.report.watched_tokens == state.report.watched_tokens
    RunState(a_run(), Clock()).restore(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"run_id": "ab", "curve": [], "stride": 1, "tokens": 1}', b"[" * 9999])
def test_a_history_of_another_run_or_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(content)
    with pytest.raises(DataDirError, match="history"):
        RunState(a_run(), Clock()).restore(path)
    assert path.read_bytes() == content


def test_the_pages() -> None:
    pages = pages_of(a_dozen())
    reply = pages.answer("GET", "/run.json")
    assert ("cache-control", f"public, max-age={FRESH}") in reply.headers
    assert pages.answer("POST", "/").status == 405
    assert pages.answer("GET", "/status.json").status == 404
    assert pages.answer("GET", "/readyz").status == 200
    assert pages_of(seen([[]])).answer("GET", "/readyz").status == 503
    for path in ("/", "/run.js", "/graph.js", "/run.css", "/page.css", "/parts.js", "/loss.js", "/words.js", "/icon.svg"):
        assert pages.answer("GET", path).status == 200, path


def test_every_file_of_the_page_is_packaged_and_served_and_loads_nothing_from_elsewhere() -> None:
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["nolocod"]
    files = sorted((root / "nolocod/observe/run/page").iterdir())
    assert len(files) == 4
    for file in files:
        assert any(file.match(pattern) for pattern in patterns), f"{file} would not be in a wheel"
        reply = pages_of(a_dozen()).answer("GET", "/" if file.name == "index.html" else f"/{file.name}")
        assert dict(reply.headers)["content-security-policy"].startswith("default-src 'self'")
        text = reply.body.decode()
        assert not re.findall(r"https?://|innerHTML|insertAdjacentHTML|<script>|style=| on\w+=", text), file


def test_the_metrics_say_the_same() -> None:
    state = a_dozen()
    lines = RunMetrics(lambda: state.report).render().decode().splitlines()
    assert "nolocod_run_members 12.0" in lines
    assert f"nolocod_run_round {float(state.report.round)}" in lines
    assert 'nolocod_run_members_by_state{state="training"} 11.0' in lines
    assert 'nolocod_run_members_reachable{kind="public"} 6.0' in lines
    assert not [line for line in lines if peer(0) in line]
