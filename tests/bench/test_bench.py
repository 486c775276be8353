"""The measurements themselves, at sizes at which nothing is worth measuring."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from nolocod.run import presets
from nolocod.run.manifest import Inner, Manifest, Outer
from nolocod.trainer.made_on import PROCESSOR
from tests.bench import contest, device, plan, probe, report, sizes, venvs, wan
from tests.bench.__main__ import main, size
from tests.bench.base import BenchError, spread
from tests.bench.exchange_run import model_of
from tests.bench.parties import Pair, pair, started
from tests.bench.training import TrainingResult, bound_to
from tests.bench.transport import CARRIERS, RelayResult, TransportResult, relay, transport
from tests.support.swarm import ENOUGH
from tests.support.trainer_parts import MODEL

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20

ECHO = """
import json, os, sys, time
kept = []
for line in sys.stdin:
    told = json.loads(line)
    match told["do"]:
        case "hold":
            descriptor = os.memfd_create("held")
            os.write(descriptor, bytes(told["size"]))
            if os.fork() == 0:
                time.sleep(60)
        case "sleep":
            time.sleep(60)
        case "die":
            sys.exit("the last words")
        case "fail":
            told = {"error": "it could not"}
        case "send":
            import socket
            with socket.create_server(("127.0.0.1", 0)) as server:
                with socket.create_connection(server.getsockname()) as out, server.accept()[0] as into:
                    out.sendall(bytes(told["size"]))
                    out.shutdown(socket.SHUT_WR)
                    while into.recv(1 << 20):
                        pass
    print(json.dumps(told), flush=True)
"""


def echo() -> list[str]:
    return [sys.executable, "-c", ECHO]


# --- parties --------------------------------------------------------------------------------------------


def test_both_parties_answer_what_they_were_asked() -> None:
    with pair([echo(), echo()]) as two:
        assert two.ask("nod", ENOUGH, number=7) == [{"do": "nod", "number": 7}] * 2


def test_a_party_that_fails_is_told_with_its_reason() -> None:
    with started([echo()]) as (one,):
        one.tell("fail")
        with pytest.raises(BenchError, match="it could not"):
            one.hear(ENOUGH)


def test_a_party_that_dies_is_told_with_its_last_words() -> None:
    with started([echo()]) as (one,):
        one.tell("die")
        with pytest.raises(BenchError, match="the last words"):
            one.hear(ENOUGH)


def test_a_party_that_is_silent_is_given_up() -> None:
    with started([echo()]) as (one,):
        one.tell("sleep")
        with pytest.raises(BenchError, match=r"said nothing for 0\.1 s"):
            one.hear(0.1)


def test_no_process_outlives_the_block_not_even_a_grandchild() -> None:
    with started([echo()]) as (one,):
        one.tell("hold", size=1)
        one.hear(ENOUGH)
        tree = probe.processes(one.pid)
        assert len(tree) == 2
    gone, alive = psutil.wait_procs(tree, timeout=ENOUGH)
    assert (len(gone), alive) == (2, [])


# --- probe ----------------------------------------------------------------------------------------------


def test_shared_memory_counts_once_also_where_nobody_has_mapped_it() -> None:
    with started([echo()]) as (one,):
        one.tell("nod")
        one.hear(ENOUGH)
        before = probe.memory(one.pid)
        one.tell("hold", size=64 * MB)  # in a file in memory, which a child holds open too
        one.hear(ENOUGH)
        assert 64 * MB <= probe.memory(one.pid) - before < 96 * MB


def test_the_peak_is_seen_while_the_block_runs() -> None:
    with started([echo()]) as (one,):
        one.tell("hold", size=32 * MB)
        one.hear(ENOUGH)
        with probe.watched(one.pid, every=0.001) as peak:
            while not peak.samples:
                one.tell("nod")
                one.hear(ENOUGH)
    assert peak.highest >= 32 * MB


def test_a_private_loopback_carries_this_pair_s_bytes_and_no_others() -> None:
    with pair([echo(), echo()]) as two:
        if two.network is None:
            pytest.skip("this system gives no network namespaces")
        before = two.carried()
        assert _sent_by_others(two) == before
        two.parties[0].tell("send", size=MB)
        two.parties[0].hear(ENOUGH)
        assert MB <= two.carried() - before < 1.1 * MB


def _sent_by_others(two: Pair) -> int:
    """Send something in another network, and return what the pair's has carried."""
    with pair([echo(), echo()]) as others:
        others.ask("send", ENOUGH, size=MB)
    return two.carried()


# --- exchange -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "number"), [("100m", 100_000_000), ("2.5M", 2_500_000), ("800k", 800_000), ("64000", 64_000)])
def test_sizes_are_read(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "m", "many", "1e999", "nan", "0", "9999", "10b"])
def test_what_is_no_size_of_a_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too|float"):
        size(text)


@pytest.mark.parametrize(
    "flags", [["--values", "many"], ["--values", "9k"], ["--only", "nobody"], ["--rounds", "0"], ["nothing"]], ids=" ".join
)
def test_a_wrong_flag_is_told_before_anything_runs(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [50_000, 1_000_000, 10_000_000, 100_000_000, 400_000_000, 1_500_000_000])
def test_a_model_has_about_as_many_parameters_as_was_asked_for(wanted: int) -> None:
    shape = model_of(wanted)
    hidden, layers, wide = (shape[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    has = hidden * (256 + 1) + layers * (4 * hidden**2 + 3 * hidden * wide + 2 * hidden)
    assert abs(has - wanted) / wanted < (0.001 if wanted >= 10_000_000 else 0.02)


def test_an_outer_step_of_ours_is_measured_part_by_part() -> None:
    said: list[str] = []
    ours = contest.run(600_000, 1, frozenset(["ours-float32"]), said.append).figures["ours-float32"]
    assert ours.failures == []
    (seconds,) = (list(parts) for parts in zip(*(ours.parts[end] for end in contest.PARTS), strict=True))
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert (ours.seconds, ours.step) == (ours.parts["verified"], ours.parts["ended"])
    assert set(ours.cpu) == {"network", "trainer"}
    assert len(said) == 1 + len(contest.PARTS) + len(ours.cpu)
    table = {"machine": report.machine(), "exchange": contest.Contest(600_000, 1, {"ours-float32": ours}).to_table()}
    assert "| both inboxes verified | " in report.to_markdown(table)


def test_the_arithmetic_of_an_outer_step_is_measured_for_any_size() -> None:
    took = sizes.measured(4e6, PROCESSOR)
    assert set(took) == {"capture", "own part", "write", "inspect", "step", "merge"}
    assert all(0 < ns < 1e3 for ns in took.values())


# --- transport ------------------------------------------------------------------------------------------


def test_all_carriers_move_bytes_both_ways() -> None:
    result = transport(1, lambda _: None, megabytes=1)
    assert all(rate > 0 for rates in (result.one_way, result.both_ways) for (rate,) in rates.values())
    assert set(result.to_table()["figures"]["one_way"]) == set(CARRIERS)


def test_a_relay_carries_bytes() -> None:
    result = relay(1, lambda _: None, megabytes=1)
    assert result.to_table()["figures"]["ratio"] == result.relayed[0] / result.direct[0] > 0


def test_ratios_are_taken_within_a_repetition() -> None:
    rates = {"tls": [100.0, 10.0, 50.0], "ours": [200.0, 15.0, 90.0]}
    assert TransportResult(rates, rates).ratio(rates, "ours") == 1.8  # of 2.0, 1.5, 1.8
    assert RelayResult(2, rates["tls"], rates["ours"]).ratio == 1.8


# --- beside the neighbours ------------------------------------------------------------------------------


@pytest.fixture
def own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours' workers run in our own environment, which has gloo, and no hivemind."""
    monkeypatch.setattr(venvs, "ensure", lambda _: sys.executable)


@pytest.mark.usefixtures("own_interpreter")
def test_a_contestant_that_fails_is_told_and_the_others_go_on() -> None:
    said: list[str] = []
    found = contest.run(2_000_000, 1, frozenset(["hivemind", "gloo"]), said.append)
    gloo, hivemind = found.figures["gloo"], found.figures["hivemind"]
    assert len(gloo.seconds) == 1
    assert not gloo.failures
    assert not hivemind.seconds
    assert "hivemind" in hivemind.failures[0]
    assert len(said) == 2


def figures(seconds: list[float], wire: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - a JSON table
    return {"seconds": seconds, "step": [], "wire": [wire] * len(seconds), "extra": [1.0], "failures": [], **more}


def test_the_page_tells_what_was_reached_what_was_missed_and_what_did_not_run() -> None:
    table = {
        "machine": report.machine(),
        "exchange": {
            "values": 1000,
            "rounds": 2,
            "figures": {
                "gloo": figures([0.2, 0.4], 8000),
                "ours-float32": figures([0.5, 2.0], 8080, step=[0.9, 2.5]),
                "hivemind": figures([3.0, 3.0], 8100),
                "torchft": figures([], 0, failures=["no | wheel\nfor this"]),
                "reference": figures([0.9, 0.9], 16000),
            },
        },
        "transport": {"text": "ours 2.0", "figures": {}},
    }
    page = report.to_markdown(table)
    assert "| nolocod float32 | 1.250 (0.500-2.000) [1.700 (0.900-2.500)] | 0.0 | 1.00 (1.00-1.00) |" in page
    assert "| hivemind uncompressed / nolocod float32, time | 3.75 (1.50-6.00) | ≥ 3 | reached |" in page
    assert "| nolocod float32 / raw gloo, time | 3.75 (2.50-5.00) | ≤ 4 | reached |" in page
    assert "| nolocod float32 / the paper's pattern, bytes | 0.51 (0.51-0.51) | ≤ 0.5 | reached |" in page
    assert "did not run: no / wheel for this" in page
    assert "ours 2.0" in page
    assert os.uname().nodename not in page


def test_a_missed_goal_is_told_as_missed() -> None:
    both = {"hivemind": figures([3.0], 8), "ours-float32": figures([1.5], 8, extra=[1.3])}
    page = report.to_markdown({"machine": report.machine(), "exchange": {"values": 1, "rounds": 1, "figures": both}})
    assert "2.00 (2.00-2.00) | ≥ 3 | **missed** |" in page
    assert "1.30 (1.30-1.30) | ≤ 1.1 | **missed** |" in page


def test_an_environment_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOLOCOD_BENCH_CACHE", str(tmp_path))
    monkeypatch.setitem(venvs.NEIGHBOURS, "lattica", (str(tmp_path / "no-such.whl"),))
    monkeypatch.setattr(venvs.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="lattica could not be installed"):
        venvs.ensure("lattica")


# --- a long way -----------------------------------------------------------------------------------------


def test_a_long_way_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan.os, "geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="only root"):
        wan.compiled()


def test_a_long_way_has_its_rate_and_its_delay() -> None:
    try:
        wan.compiled()
    except BenchError as error:
        pytest.skip(error.cause)
    way = wan.Way(rate=100, rtt=40)
    result = wan.measure(1, lambda _: None, {way: 1}, carriers=("raw",))
    (rate,) = result.rates[str(way)]["raw"]
    seconds = MB / 1e6 / rate
    assert seconds >= 0.02 + MB * 8 / 100e6


# --- what is concluded from figures


def test_what_exchanges_cost_is_told_beside_the_same_daemon_without_them() -> None:
    result = TrainingResult(True, [100.0, 200.0], [90.0, 200.0], [97.0, 188.0], [97.0, 141.0], [1.0, 0.9])
    assert result.over_bare(result.apart) == [0.97, 0.94]
    assert result.kept == [1.0, 0.75]
    assert "0.837 (0.705-0.970)   (an exchange under way 95% of the time)" in result.to_text()
    assert "with exchanges over without: 0.875 (0.750-1.000)" in result.to_text()


def test_what_is_started_in_the_block_is_bound_to_its_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with bound_to(frozenset([core])):
        told = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
    assert told.strip() == f"{{{core}}}"
    assert os.sched_getaffinity(0) == before


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 2.0], digits=1) == "2.0 (1.0-3.0)"


# --- what is planned ------------------------------------------------------------------------------------


def test_a_plan_that_is_off_is_wrong_either_way_and_a_bound_only_where_it_is_passed() -> None:
    found = plan.Compared("a model", 1.0)
    for name, planned in (
        ("much", 116.0),
        ("enough", 114.0),
        ("little", 84.0),
        ("much, at most", 900.0),
        ("little, at most", 80.0),
    ):
        found.add(name, planned, 100.0)
    assert [text.split(": ")[1] for text in found.wrong] == ["much +16%", "little -16%", "little, at most -20%"]
    assert "84" in found.to_text()


def test_the_trainer_beside_a_bare_loop_on_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Manifest(name="tiny", model=MODEL, inner=Inner(steps=4, batch=1, sequence=16), outer=Outer(turns=2))
    (tmp_path / "run.toml").write_text(presets.to_toml(run))
    few = ("--device", "cpu", "--threads", "1", "--seconds", "0.5", "--steps", "5", "--times", "1")
    assert device.main([str(tmp_path / "run.toml"), *few]) == 0
    assert re.search(r"cpu: bare [\d,]+, alone [\d,]+, exchanging [\d,]+ tokens/s \([1-9]", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"(?s)the bare loop ended with status 1.*NLC-126"):
        device.main([str(tmp_path / "run.toml"), "--device", "cuda:77", *few[2:]])
