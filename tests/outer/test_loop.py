"""Rounds against stand-in trainers and a stand-in mesh on trio's virtual clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import pytest
import trio

from nolocod.errors import TrainerError
from nolocod.identity import PeerId
from nolocod.observe.events import Event, ExchangeEnded, ExchangeStarted, InnerSteps, OuterStep
from nolocod.outer.loop import LoopSettings, OuterLoop
from nolocod.proto.types import Accept, Applied, Busy, Description, Ended, Inspection, Offer, Refuse, Standing

if TYPE_CHECKING:
    from collections.abc import Collection

    from nolocod.outer.sides import TrainerSide

INNER_STEPS = 20
STEP_TOKENS = 512
EXCHANGE_SECONDS = 0.4
LATENCY = 0.05


class ClockTrainer:
    """A trainer whose inner steps are the passing of (virtual) time."""

    can_enlarge = True
    times = 1
    outbox = inbox = None  # type: ignore[assignment]  # the stand-in mesh moves no bytes

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.round = 0
        self.calls: Counter[str] = Counter()
        self.began = trio.current_time()
        self.captured_at: float | None = None
        self.weight = 1.0

    @property
    def standing(self) -> Standing:
        return Standing(self.round, 0, 1.0)

    @property
    def steps_since_outer(self) -> int:
        return int((trio.current_time() - self.began) / self.step_seconds + 1e-9)

    async def enlarge(self, times: int) -> None:
        self.times = times

    async def wait_steps(self, count: int) -> None:
        while self.steps_since_outer < count:  # noqa: ASYNC110 - the step count is a function of the clock
            await trio.sleep_until(self.began + count * self.step_seconds)

    def subject(self, count: int) -> int:
        self.count = count
        return 0

    async def _end_of_step(self, after: int) -> None:
        last = max(self.steps_since_outer + 1, after)
        await trio.sleep_until(self.began + last * self.step_seconds)

    async def capture(self, subject: int, after: int) -> Description:
        await self._end_of_step(after)
        self.calls["capture"] += 1
        self.captured_at = trio.current_time()
        return Description(0, 1, ())

    async def inspect(self, *, probation: bool) -> Inspection:
        self.calls["on probation"] += probation
        self.weight = 0.5 if probation else 1.0
        return Inspection(1.0, weight=self.weight)

    async def apply(self, run_round: int, skipped: bytes) -> Applied:
        assert self.captured_at is not None, "applied without a capture"
        steps = int((self.captured_at - self.began) / self.step_seconds + 1e-9)
        self.calls["apply"] += 1
        self.round = max(self.round + 1, run_round)
        self.began, self.captured_at = self.captured_at, None
        return Applied(self.round, steps, 1.0, 0.0, self.weight)

    async def solo(self, run_round: int, subject: int, after: int) -> Applied:
        await self._end_of_step(after)
        steps, self.began = self.steps_since_outer, trio.current_time()
        self.calls["solo"] += 1
        self.round = max(self.round + 1, run_round)
        return Applied(self.round, steps, None, 0.0)

    async def discard(self) -> None:
        self.calls["discard"] += 1
        self.captured_at = None


def trusted(peer: PeerId) -> bool:
    """Nobody is on probation."""
    return False


class Table:
    """The mesh of all nodes of one test: draws partners, and runs exchanges by calling the other node."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.nodes: dict[PeerId, Node] = {}
        self.dead: set[PeerId] = set()
        self.broken: set[PeerId] = set()
        self.suspected: Counter[PeerId] = Counter()

    def add(self, name: str, step_seconds: float = 1.0, **pace: float) -> Node:
        node = Node(PeerId(name), self, step_seconds, **pace)
        self.nodes[node.name] = node
        return node


class Node:
    """One node: the trainer, its rounds, what it emitted, and the mesh as it sees it."""

    def __init__(
        self, name: PeerId, table: Table, step_seconds: float, *, patience: float = 60, goal: float = 0, staleness: float = 3,
        inner_steps: float = INNER_STEPS, parts: int = 1,
    ) -> None:  # fmt: skip
        self.name = name
        self.table = table
        self.trainer = ClockTrainer(step_seconds)
        self.events: list[Event] = []
        self.asked: list[tuple[PeerId, bool]] = []
        self.turned_away: set[PeerId] = set()
        self.believes, self.median = 1 << 30, 0
        self.run_phase, self.lead = 0.0, 0
        self.told_phase = 0.0
        self.partners: list[tuple[PeerId, bool]] = []
        settings = LoopSettings(int(inner_steps), int(staleness), patience, int(goal), STEP_TOKENS, parts)
        self.loop = OuterLoop(name, self.trainer, self, settings, self.events.append, trusted)

    def partner(self, own: Standing, avoid: Collection[PeerId], apart: Collection[PeerId]) -> PeerId | None:
        avoid = {*avoid, *apart}
        live = [n for n in self.table.nodes if n != self.name and n not in avoid and not self.table.suspected[n]]
        return self.table.rng.choice(live) if live else None

    def admits(self, peer: PeerId, own: Standing, apart: Collection[PeerId], *, late: bool) -> bool:
        self.asked.append((peer, late))
        return peer not in self.turned_away or late

    def met(self, peer: PeerId, *, offered: bool) -> None:
        self.partners.append((peer, offered))

    def believed(self, peer: PeerId, told: int, phase: float) -> int:
        return max(self.median, min(told, self.believes))

    def pace(self, number: int, phase: float) -> tuple[float, int]:
        self.told_phase = phase
        return self.run_phase or phase, self.lead

    def suspect(self, peer: PeerId) -> None:
        self.table.suspected[peer] += 1

    async def offer(self, partner: PeerId, standing: Standing, subject: int, local_side: TrainerSide) -> Ended:
        await trio.sleep(LATENCY)
        if partner in self.table.dead:
            return Ended("unreachable", partner, b"s")
        other = self.table.nodes[partner].loop
        answer = other.decide(Offer(self.name, b"s", standing, subject))
        if not isinstance(answer, Accept):
            await trio.sleep(LATENCY)
        if isinstance(answer, Busy):
            return Ended("busy", partner, b"s", retry_after=answer.retry_after)
        if isinstance(answer, Refuse):
            return Ended("refused", partner, b"s", reason=answer.reason)
        other_side = other.local_side
        await local_side.capture(subject)
        await other_side.capture(subject)
        await trio.sleep(EXCHANGE_SECONDS)
        await local_side.inspect()
        await other_side.inspect()
        outcome = "aborted" if partner in self.table.broken else "committed"
        await other.ended(Ended(outcome, self.name, b"s", partner_standing=standing))
        return Ended(outcome, partner, b"s", partner_standing=answer.standing)

    def steps(self, kind: str) -> list[OuterStep]:
        return [event for event in self.events if isinstance(event, OuterStep) and event.kind == kind]


async def run_for(table: Table, seconds: float) -> None:
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for node in table.nodes.values():
                nursery.start_soon(node.loop.run)
            await trio.sleep_forever()


async def test_eight_nodes_in_step_pair_nearly_always_and_mix(autojump_clock: object) -> None:
    table = Table()
    nodes = [table.add(f"peer-{index}") for index in range(8)]
    await run_for(table, 2000)
    paired = sum(len(node.steps("paired")) for node in nodes)
    solo = sum(len(node.steps("solo")) for node in nodes)
    assert solo == 0
    assert paired >= 8 * 2000 / (1.5 * INNER_STEPS)
    for node in nodes:
        partners = {step.partner for step in node.steps("paired")}
        assert len(partners) == 7, f"{node.name} met only {partners}"


@pytest.mark.parametrize(("seconds", "parts", "most"), [(0.05, 8, 8), (0.7, 8, 2), (9.0, 8, 2), (9.0, 25, 7), (9.0, 3, 1)])
async def test_on_a_slow_line_an_exchange_is_about_a_quarter_of_the_model_at_most(
    seconds: float, parts: int, most: int, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "EXCHANGE_SECONDS", seconds)
    table = Table()
    node, other = (table.add(name, 0.01, goal=2, parts=parts) for name in ("a", "b"))
    for one in (node, other):
        one.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 0.01))
        one.loop._phase.took(2 * parts * INNER_STEPS, 0)  # all are due, and remain so
    await run_for(table, 60)
    assert len(node.steps("paired")) == len(other.steps("paired")) == 2
    assert {node.trainer.count, other.trainer.count} <= {most, parts}
    assert most in (node.trainer.count, other.trainer.count)


async def test_how_long_an_exchange_takes_is_remembered_of_each_partner(autojump_clock: object) -> None:
    node = Table().add("node", parts=8, inner_steps=1)
    node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 0.01))
    node.loop._phase.took(8, 0)  # all are due

    async def took(seconds: float, partner: str) -> None:
        node.loop._started = trio.current_time()
        await trio.sleep(seconds)
        node.loop._learn(PeerId(partner), 1)

    def most(partner: str) -> int:
        node.loop._subject(PeerId(partner))
        return node.trainer.count

    assert most("slow") == 8, "nothing is known"
    await took(9.0, "slow")
    assert (most("slow"), most("other")) == (2, 2), "of others it is as of most"
    await took(0.1, "fast")
    assert (most("slow"), most("fast"), most("other")) == (2, 8, 8)
    await took(9.0, "slower")
    assert most("other") == 2
    await took(0.1, "slow")
    assert (most("slow"), most("other")) == (8, 8)
    for number in range(100):
        await took(0.5, str(number))
    assert len(node.loop._part_seconds) == 64
    assert (most("99"), most("1"), most("slower")) == (4, 4, 4), "those who are met no more are forgotten"


async def test_nodes_of_unlike_speed_pair_without_waiting(autojump_clock: object) -> None:
    table = Table()
    fast, slow = table.add("fast", 1.0), table.add("slow", 3.0)
    third, fourth = table.add("third", 1.0), table.add("fourth", 1.3)
    for node in (fast, slow, third, fourth):
        node.run_phase = 1.15 * INNER_STEPS
        node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, node.trainer.step_seconds))
    await run_for(table, 1000)
    for node in (fast, slow, third, fourth):
        assert len(node.steps("paired")) >= 0.9 * 1000 / node.run_phase
    rounds = [node.trainer.round for node in table.nodes.values()]
    assert max(rounds) - min(rounds) <= 3


async def test_the_outer_step_is_due_when_the_median_machines_is(autojump_clock: object) -> None:
    table = Table()
    node = table.add("fast", goal=2)
    node.run_phase = 2.0 * INNER_STEPS
    node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 1.0))
    began = trio.current_time()
    await node.loop.run()
    assert trio.current_time() - began == 2 * node.run_phase
    assert node.told_phase == INNER_STEPS, "what the run's inner steps take, however many we take"
    answer = node.loop.decide(Offer(PeerId("other"), b"s", node.trainer.standing, 0))
    assert isinstance(answer, Refuse)
    node.trainer.round = 0
    assert node.loop.decide(Offer(PeerId("other"), b"s", node.trainer.standing, 0)) == Busy(
        INNER_STEPS - 1.0, f"{INNER_STEPS - 1} inner steps before the next exchange"
    )


@pytest.mark.parametrize(("can_enlarge", "times", "steps"), [(True, 4, 2), (False, 1, 8)])
async def test_beside_slow_machines_a_trainer_that_can_takes_larger_steps(
    can_enlarge: bool, times: int, steps: int, autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClockTrainer, "can_enlarge", can_enlarge)
    node = Table().add("fast", goal=4)
    node.run_phase = 8.0 * INNER_STEPS
    node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 1.0))
    await node.loop.run()
    assert (node.trainer.times, node.loop._phase.steps) == (times, steps * INNER_STEPS)
    node.loop.follow(InnerSteps(INNER_STEPS, times * STEP_TOKENS * INNER_STEPS, 0.0, 0.0, float(times * INNER_STEPS)))
    assert node.loop._phase.own == INNER_STEPS, "by their tokens they take no longer"


async def test_a_partner_is_sought_in_the_last_inner_step_and_weights_are_copied_at_its_end(autojump_clock: object) -> None:
    table = Table()
    node, other = table.add("a"), table.add("b")
    other.trainer.began -= INNER_STEPS - 1  # ready to accept, its own run not started
    began = trio.current_time()
    with trio.move_on_after(INNER_STEPS + 3):
        await node.loop.run()
    started = [event for event in node.events if isinstance(event, ExchangeStarted)]
    (step,) = node.steps("paired")
    assert (len(started), step.inner_steps) == (1, INNER_STEPS), "and not one more"
    assert node.trainer.began == began + INNER_STEPS


async def test_who_accepts_copies_at_half_a_phase_at_the_earliest(autojump_clock: object) -> None:
    node = Table().add("node")
    offer = Offer(PeerId("other"), b"s", Standing(0, 0, 1.0))
    await trio.sleep(INNER_STEPS / 2 - 1)
    assert isinstance(node.loop.decide(offer), Accept)
    await node.loop.local_side.capture(0)
    assert node.trainer.steps_since_outer == INNER_STEPS / 2


@pytest.mark.parametrize(("steps", "most"), [(1, 2.0), (2, 2.1)])
async def test_phases_of_a_step_or_two_have_hardly_more(steps: int, most: float, autojump_clock: object) -> None:
    """Of one step: the one is as far as the other only now and then."""
    table = Table()
    nodes = [table.add(name, inner_steps=steps, patience=2.0) for name in ("a", "b")]
    nodes[0].trainer.began -= 0.5  # never at once
    await run_for(table, 200)
    for node in nodes:
        taken = [step.inner_steps for step in node.steps("paired")]
        assert sum(taken) / len(taken) <= most
        assert min(step.inner_steps for step in node.steps("paired") + node.steps("solo")) >= 1


async def test_alone_every_step_is_solo_at_its_boundary(autojump_clock: object) -> None:
    table = Table()
    node = table.add("only", goal=5)
    await node.loop.run()
    assert [step.round for step in node.steps("solo")] == [1, 2, 3, 4, 5]
    assert trio.current_time() - node.trainer.began == 0
    assert all(step.inner_steps == INNER_STEPS for step in node.steps("solo"))


async def test_a_dead_partner_is_suspected_once_and_another_is_taken(autojump_clock: object) -> None:
    table = Table()
    node = table.add("live-1")
    table.add("live-2")
    table.add("dead")
    table.dead.add(PeerId("dead"))
    table.nodes[PeerId("dead")].loop.run = trio.sleep_forever  # type: ignore[method-assign]
    await run_for(table, 500)
    assert table.suspected[PeerId("dead")] == 1
    assert len(node.steps("paired")) >= 10
    assert not node.steps("solo")


async def test_aborted_exchanges_apply_on_neither_side(autojump_clock: object) -> None:
    table = Table()
    node, other = table.add("a"), table.add("b")
    table.broken.update({PeerId("a"), PeerId("b")})
    await run_for(table, 300)
    for one in (node, other):
        assert one.trainer.calls["apply"] == 0
        assert one.trainer.calls["capture"] == one.trainer.calls["discard"] > 0
        assert one.steps("solo"), "training goes on alone"
        assert any(isinstance(event, ExchangeEnded) and event.outcome == "aborted" for event in one.events)


async def test_both_offer_at_once_and_the_lower_id_stands(autojump_clock: object) -> None:
    table = Table()
    low, high = table.add("a"), table.add("b")
    await run_for(table, INNER_STEPS + 3)
    assert len(low.steps("paired")) == len(high.steps("paired")) == 1
    began = [event for event in low.events + high.events if isinstance(event, ExchangeEnded) and event.outcome == "committed"]
    assert {(event.partner, event.initiator) for event in began} == {("b", True), ("a", False)}


async def test_what_is_answered_to_an_offer(autojump_clock: object) -> None:
    table = Table()
    node = table.add("node", goal=9)
    node.loop._step_seconds = 1.0
    offer = Offer(PeerId("other"), b"s", Standing(0, 0, 1.0))
    early = node.loop.decide(offer)
    assert isinstance(early, Busy)
    assert early.retry_after == pytest.approx(INNER_STEPS / 2 - 1), "in the last inner step before half a phase"
    await trio.sleep(INNER_STEPS / 2 - 1)
    far = node.loop.decide(Offer(PeerId("other"), b"s", Standing(4, 0, 1.0)))
    assert isinstance(far, Refuse)
    assert "4 rounds apart" in far.reason
    assert isinstance(node.loop.decide(offer), Accept)
    assert isinstance(node.loop.decide(offer), Busy), "one exchange at a time"
    await node.loop.ended(Ended("aborted", PeerId("other"), b"s"))
    assert isinstance(node.loop.decide(offer), Accept), "free again"
    await node.loop.ended(Ended("in_doubt", PeerId("other"), b"s"))
    assert node.trainer.calls["apply"] == 0
    node.trainer.round = 9
    assert isinstance(node.loop.decide(offer), Refuse), "the goal is reached"


async def test_an_offer_out_of_its_turn_waits_until_our_own_draws_have_failed(autojump_clock: object) -> None:
    table = Table()
    node = table.add("node")
    for number in range(4):
        table.nodes[PeerId(f"busy {number}")] = table.add(f"busy {number}")
        table.nodes[PeerId(f"busy {number}")].turned_away.add(node.name)
    node.turned_away.add(PeerId("first"))
    node.loop._step_seconds = 1.0
    offer = Offer(PeerId("first"), b"s", Standing(0, 0, 1.0))
    await trio.sleep(INNER_STEPS / 2)
    early = node.loop.decide(offer)
    assert isinstance(early, Busy)
    assert early.retry_after == pytest.approx(INNER_STEPS / 2 - 1)
    assert node.asked == [(PeerId("first"), False)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        while not isinstance(node.loop.decide(offer), Accept):  # noqa: ASYNC110 - an attacker's way
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert node.asked[-1] == (PeerId("first"), True)
    refusals = [event for event in node.events if isinstance(event, ExchangeEnded) and event.outcome == "busy"]
    assert len(refusals) == 3
    await node.loop.local_side.capture(0)
    await node.loop.ended(Ended("committed", PeerId("first"), b"s", partner_standing=Standing(0, 0, 1.0)))
    assert node.partners == [(PeerId("first"), True)]
    await trio.sleep(INNER_STEPS / 2)
    assert isinstance(node.loop.decide(offer), Busy), "in the next step our own draws come first again"


async def test_close_waits_for_the_exchange_under_way_but_not_for_ever(autojump_clock: object) -> None:
    table = Table()
    node = table.add("node")
    await trio.sleep(INNER_STEPS)
    assert isinstance(node.loop.decide(Offer(PeerId("x"), b"s", Standing(0, 0, 1.0))), Accept)
    began = trio.current_time()
    await node.loop.close(10)
    assert trio.current_time() - began == pytest.approx(10)
    assert isinstance(node.loop.decide(Offer(PeerId("y"), b"s", Standing(0, 0, 1.0))), Busy)


async def test_cancelled_in_the_middle_discards_the_capture(autojump_clock: object) -> None:
    table = Table()
    node, other = table.add("a"), table.add("b")
    other.trainer.began -= INNER_STEPS  # ready to accept, its own run not started
    with trio.move_on_after(INNER_STEPS + LATENCY + 1.2):
        await node.loop.run()
    assert node.trainer.calls["capture"] == 1
    assert node.trainer.calls["discard"] == 1
    assert node.trainer.calls["apply"] == 0
    assert isinstance(node.events[-1], ExchangeEnded), "nobody is shown an exchange that is over"


async def test_a_stop_does_not_come_between_a_commitment_and_its_step(autojump_clock: object) -> None:
    """The partner applies too."""
    node = Table().add("node")
    apply, handed = node.trainer.apply, []

    async def slow(run_round: int, skipped: bytes) -> Applied:
        await trio.sleep(5)
        handed.append(skipped)
        return await apply(run_round, skipped)

    node.trainer.apply = slow  # type: ignore[method-assign]
    await trio.sleep(INNER_STEPS)
    assert isinstance(node.loop.decide(Offer(PeerId("x"), b"s", Standing(0, 0, 1.0))), Accept)
    await node.loop.local_side.capture(0)
    with trio.move_on_after(1):
        ended = Ended("committed", PeerId("x"), b"s", partner_standing=Standing(0, 0, 1.0), skipped=b"\x05")
        await node.loop.ended(ended)
    assert node.trainer.round == 1
    assert handed == [b"\x05"], "the blocks that the partner leaves out are left out here too"


async def test_a_partners_round_counts_as_far_as_it_is_believed(autojump_clock: object) -> None:
    node, other = Table().add("node"), PeerId("other")
    for believed, expected in ((2, 2), (2, 3), (9, 6)):
        node.believes = believed
        await trio.sleep(INNER_STEPS)
        own = node.trainer.round
        assert isinstance(node.loop.decide(Offer(other, b"s", Standing(own + 3, 0, 1.0))), Accept)
        await node.loop.local_side.capture(0)
        await node.loop.ended(Ended("committed", other, b"s", partner_standing=Standing(own + 3, 0, 1.0)))
        assert node.trainer.round == expected


async def test_a_step_takes_a_node_to_the_runs_round_alone_too_within_the_limit_of_staleness(autojump_clock: object) -> None:
    """The others' rounds are the clock: one that steps alone, or with those who tell its own round, would fall behind."""
    node, other = Table().add("node"), PeerId("other")
    node.median = 2
    await node.loop._outer_step()
    assert node.trainer.calls["solo"] == 0, "no step is due"
    await trio.sleep(INNER_STEPS)
    await node.loop._outer_step()
    assert (node.trainer.calls["solo"], node.trainer.round) == (1, 2)
    node.median = 1000
    await trio.sleep(INNER_STEPS)
    assert isinstance(node.loop.decide(Offer(other, b"s", Standing(2, 0, 1.0))), Accept)
    await node.loop.local_side.capture(0)
    await node.loop.ended(Ended("committed", other, b"s", partner_standing=Standing(2, 0, 1.0)))
    assert node.trainer.round == 2 + 3


async def test_who_takes_our_time_for_nothing_gets_a_sixteenth_of_it(autojump_clock: object) -> None:
    node, other = Table().add("node"), PeerId("other")
    await trio.sleep(INNER_STEPS)
    began, wasted, accepted = trio.current_time(), 0.0, 0
    while trio.current_time() < began + 40_000:
        answer = node.loop.decide(Offer(other, b"s", Standing(0, 0, 1.0)))
        if isinstance(answer, Accept):
            accepted += 1
            await trio.sleep(100.0)
            wasted += 100.0
            await node.loop.ended(Ended("aborted" if accepted % 2 else "in_doubt", other, b"s"))
        else:
            assert not isinstance(answer, Accept)
            node.table.nodes = {node.name: node, other: node}
            assert node.loop._draw(Standing(0, 0, 1.0)) is None or not node.loop._wasted.by(other, trio.current_time())
            assert isinstance(node.loop.decide(Offer(PeerId("third"), b"s", Standing(0, 0, 1.0))), Accept)
            await node.loop.ended(Ended("aborted", PeerId("third"), b"s"))
            await trio.sleep(INNER_STEPS)
    assert 0.05 < wasted / 40_000 < 0.075
    assert len(node.loop._wasted.peers) <= 2


async def test_partners_that_take_turns_have_no_more_of_our_time_than_one(autojump_clock: object) -> None:
    """Each is in its allowance alone. They are free to come again and again, and come first."""
    node, began, wasted = Table().add("node"), trio.current_time(), 0.0
    await trio.sleep(INNER_STEPS)
    while trio.current_time() < began + 10_000:
        for number in range(8):
            if isinstance(node.loop.decide(Offer(PeerId(f"p{number}"), b"s", Standing(0, 0, 1.0))), Accept):
                await trio.sleep(30.0)
                wasted += 30.0
                await node.loop.ended(Ended("aborted", PeerId(f"p{number}"), b"s"))
        await trio.sleep(5.0)
    assert wasted <= 8 * 30.0 + 10_000 / 16


async def test_who_took_our_time_is_the_partner_where_there_is_no_better_one(autojump_clock: object) -> None:
    """A partner on a bad line in a run of two or three: once in a step, after all others."""
    table = Table()
    node, other, third = table.add("node"), table.add("other"), table.add("third")
    node.loop._wasted.charge(other.name, 100.0, trio.current_time())
    drawn = {node.loop._draw(Standing(0, 0, 1.0)) for _ in range(50)}
    assert drawn == {third.name}
    node.loop._busy[third.name] = 10.0
    assert node.loop._draw(Standing(0, 0, 1.0)) is None, "the better one is waited for"
    node.loop._busy.clear()
    del table.nodes[third.name]
    assert node.loop._draw(Standing(0, 0, 1.0)) == other.name
    await trio.sleep(INNER_STEPS)
    offer = Offer(other.name, b"s", Standing(0, 0, 1.0))
    assert isinstance(node.loop.decide(offer), Busy)
    node.loop._tries = 3
    assert isinstance(node.loop.decide(offer), Accept), "our own draws failed, and it is all that is left"
    await node.loop.ended(Ended("aborted", other.name, b"s"))
    assert node.loop._draw(Standing(0, 0, 1.0)) is None, "not again in this step"
    assert isinstance(node.loop.decide(offer), Busy)


async def test_who_asks_one_that_is_busy_for_long_does_not_set_it_apart(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in an exchange across a slow line, which it fills: an answer takes half a second there."""
    monkeypatch.setitem(globals(), "LATENCY", 0.25)
    table = Table()
    node, other = table.add("node", patience=1000), table.add("other")
    other.loop._engage(PeerId("third"), initiator=False)
    await trio.sleep(INNER_STEPS)
    with trio.move_on_after(500):
        await node.loop._outer_step()
    assert sum(isinstance(event, ExchangeEnded) for event in node.events) > 200
    now = trio.current_time()
    assert not node.loop._wasted.wary(now)
    for _ in range(20):
        node.loop._wasted.charge(other.name, 1.1, now)
    assert node.loop._wasted.apart(now) == {other.name}, "other time is charged whole"


async def test_a_stranger_has_less_time_while_too_much_was_lost_and_a_partner_of_old_has_not(autojump_clock: object) -> None:
    table = Table()
    node = table.add("node")
    await trio.sleep(INNER_STEPS)
    said = ((0.0, False, False, 1.0), (0.0, True, False, 0.25), (100.0, True, True, 0.0), (0.0, False, False, 0.0))
    for wasted, newcomers, wary, credit in said:
        node.loop._wasted.charge(PeerId("x"), wasted, trio.current_time())
        node.loop._probation = lambda _, new=newcomers: new  # type: ignore[misc]
        assert isinstance(node.loop.decide(Offer(PeerId("y"), b"s", Standing(0, 0, 1.0))), Accept)
        assert node.loop.local_side.wary == wary
        assert node.loop.local_side.credit == credit, "what partners of old say of their steps has to wait, too"
        await node.loop.ended(Ended("aborted", PeerId("y"), b"s"))


async def test_an_exchange_that_broke_is_forgiven(autojump_clock: object) -> None:
    """Twenty seconds are gone, as with a line that broke: the same partner is welcome at once."""
    node, other = Table().add("node"), PeerId("other")
    await trio.sleep(INNER_STEPS)
    for _ in range(2):
        assert isinstance(node.loop.decide(Offer(other, b"s", Standing(0, 0, 1.0))), Accept)
        await trio.sleep(20)
        await node.loop.ended(Ended("aborted", other, b"s"))
    node.table.nodes[other] = node
    assert node.loop._draw(Standing(0, 0, 1.0)) == other


async def test_an_offer_accepted_in_the_moment_another_ends_keeps_the_desk(autojump_clock: object) -> None:
    table = Table()
    node = table.add("node")
    table.add("other")
    await trio.sleep(INNER_STEPS)
    first, second = (Offer(PeerId(name), b"s", Standing(0, 0, 1.0)) for name in ("first", "second"))
    assert isinstance(node.loop.decide(first), Accept)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        await trio.sleep(1)  # at its boundary, waiting for the exchange to end
        await node.loop.ended(Ended("aborted", first.partner, b"s"))
        assert isinstance(node.loop.decide(second), Accept)
        local_side = node.loop.local_side
        await trio.sleep(3)
        assert node.loop.local_side is local_side, "two exchanges would share the boxes"
        assert node.trainer.calls["capture"] == 0, "no offer of our own beside it"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("outcome", ["committed", "aborted"])
async def test_what_was_told_as_started_is_told_as_ended_though_the_trainer_died(outcome: str, autojump_clock: object) -> None:
    table = Table()
    node = table.add("node")
    await trio.sleep(INNER_STEPS)
    assert isinstance(node.loop.decide(Offer(PeerId("x"), b"s", Standing(0, 0, 1.0))), Accept)
    await node.loop.local_side.capture(0)

    async def die(*_: object) -> NoReturn:
        raise TrainerError("it died.")

    node.trainer.apply = node.trainer.discard = die  # type: ignore[method-assign]
    with pytest.raises(TrainerError):
        await node.loop.ended(Ended(outcome, PeerId("x"), b"s", partner_standing=Standing(0, 0, 1.0)))  # type: ignore[arg-type]
    assert [type(event) for event in node.events] == [ExchangeStarted, ExchangeEnded]
    with pytest.raises(AssertionError, match="not accepted"):
        _ = node.loop.local_side


async def test_a_partner_on_probation_is_inspected_as_one(autojump_clock: object) -> None:
    table = Table()
    alice, bob = table.add("alice"), table.add("bob")
    settings = LoopSettings(INNER_STEPS, 3, 60.0, 1, STEP_TOKENS, 1)
    alice.loop = OuterLoop(alice.name, alice.trainer, alice, settings, alice.events.append, lambda peer: peer == bob.name)
    bob.loop = OuterLoop(bob.name, bob.trainer, bob, settings, bob.events.append, trusted)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.loop.run)
        nursery.start_soon(bob.loop.run)
    assert (alice.trainer.calls["on probation"], bob.trainer.calls["on probation"]) == (1, 0)
    steps = [event for event in alice.events if isinstance(event, OuterStep)]
    assert [step.weight for step in steps] == [0.5]


async def test_patience_ends_though_there_is_always_another_to_ask(autojump_clock: object) -> None:
    """Found by the simulator: among many busy members a node asked one after the other, and never took a step."""
    table = Table()
    node = table.add("one", patience=30, goal=1)
    for index in range(500):  # more than can be asked in that time
        other = table.add(f"busy-{index}")
        other.loop.run = trio.sleep_forever  # type: ignore[method-assign]
        other.trainer.began = 1e9  # its inner steps never begin
    began = trio.current_time()
    await node.loop.run()
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["solo"]
    assert 30 <= trio.current_time() - began - INNER_STEPS < 32


@pytest.mark.parametrize(
    ("fails", "ago", "wary", "phases"),
    [(False, math.inf, False, 3.0), (True, math.inf, False, 0.25), (False, 3500.0, False, 2.0), (False, 3600.0, True, 1.0)],
)
async def test_whom_a_partner_let_down_waits_for_a_quarter_of_a_phase_at_most_or_for_one_or_for_two(
    autojump_clock: object, fails: bool, ago: float, wary: bool, phases: float
) -> None:
    """Beside attackers that nobody had banned yet nodes lost a round with each: a whole patience, and the time before. Later,
    one that set them apart asked the others for four turns on end, whose hour it was not. One that had paid for them, and
    counted fewer members than the others, looked for four turns three times, and was behind by a tenth at last."""
    table = Table()
    node = table.add("one", patience=3 * INNER_STEPS, goal=1)
    for index in range(4):
        other = table.add(f"other-{index}")
        other.loop.run = trio.sleep_forever  # type: ignore[method-assign]
        other.trainer.began = 1e9
    if fails:
        other.trainer.began = -1e9
        table.broken.add(other.name)
    if wary:
        node.loop._wasted.charge(PeerId("x"), 1e3, trio.current_time())
    node.loop._let_down_at = trio.current_time() - ago
    began = trio.current_time()
    await node.loop.run()
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["solo"]
    least = phases * INNER_STEPS
    assert least <= trio.current_time() - began - INNER_STEPS < least + 2


@pytest.mark.parametrize(("lead", "waits"), [(2, False), (3, True)])
async def test_who_is_far_before_the_others_waits_for_them_for_eight_phases_at_most(
    autojump_clock: object, lead: int, waits: bool
) -> None:
    """Of three real daemons two met over a slow line; the third took a step alone in each turn, until both refused it."""
    table = Table()
    node = table.add("one", goal=1)
    node.lead = lead
    node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 1.0))
    began = trio.current_time()
    await node.loop.run()
    took = trio.current_time() - began
    assert took >= 9 * INNER_STEPS if waits else took < 2 * INNER_STEPS
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["solo"]


async def test_who_was_far_before_the_others_goes_on_once_they_are_near(autojump_clock: object) -> None:
    table = Table()
    node = table.add("one", goal=1)
    node.lead = 3
    node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 1.0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        await trio.sleep(3 * INNER_STEPS)
        assert not node.trainer.calls["solo"]
        node.lead = 2
        await trio.sleep(INNER_STEPS)
        assert node.trainer.calls["solo"] == 1


async def test_a_busy_partner_is_not_followed_by_the_next_at_once(autojump_clock: object) -> None:
    """A node that offers is busy itself: where all hurry nobody finds anybody, and a swarm of thousands is asked through."""
    table = Table()
    node = table.add("one", patience=20, goal=1)
    for index in range(100):
        other = table.add(f"busy-{index}")
        other.loop.run = trio.sleep_forever  # type: ignore[method-assign]
        other.trainer.began = 1e9
    await node.loop.run()
    asked = sum(isinstance(event, ExchangeEnded) for event in node.events)
    assert 10 < asked < 30


async def test_patience_ends_in_the_pause_between_two_partners_too(autojump_clock: object) -> None:
    """Where inner steps are slow, a pause is a part of a long phase."""
    table = Table()
    node = table.add("one", patience=5, goal=1)
    for index in range(10):
        other = table.add(f"busy-{index}")
        other.loop.run = trio.sleep_forever  # type: ignore[method-assign]
        other.trainer.began = 1e9
    node.loop._step_seconds = 200.0
    began = trio.current_time()
    await node.loop.run()
    assert trio.current_time() - began - INNER_STEPS < 7


async def test_after_an_exchange_longer_than_patience_the_next_step_has_a_patience_of_its_own(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was due as the first ended, and was taken alone at once: over a slow line every second step was a solo one."""
    monkeypatch.setitem(globals(), "EXCHANGE_SECONDS", 3.0 * INNER_STEPS)
    table = Table()
    nodes = [table.add(name, patience=1.5 * INNER_STEPS) for name in "ab"]
    await run_for(table, 30.0 * INNER_STEPS)
    for node in nodes:
        assert len(node.steps("paired")) >= 8
        assert not node.steps("solo")


async def test_at_the_goal_no_further_step_is_taken(autojump_clock: object) -> None:
    """Found by the simulator: who reached the goal as an answerer, on the way to its own boundary, took one step more."""
    table = Table()
    nodes = [table.add(f"peer-{index}", 1.0 + 0.1 * index, goal=6) for index in range(7)]
    await run_for(table, 600)
    assert {node.trainer.round for node in nodes} == {6}


async def test_who_waits_for_a_long_inner_step_to_go_on_alone_takes_an_offer_before(autojump_clock: object) -> None:
    """With steps of 200 s two nodes met whenever they were free, and the third was always about to step alone just then."""
    table, other = Table(), PeerId("other")
    node = table.add("one", step_seconds=200.0, goal=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        last = 200.0 * (INNER_STEPS - 1)
        await trio.sleep(last + 61)  # it has looked for a minute: there is nobody
        assert isinstance(node.loop.decide(Offer(other, b"s", Standing(0, 0, 1.0))), Accept)
        assert isinstance(node.loop.decide(Offer(PeerId("third"), b"s", Standing(0, 0, 1.0))), Busy)
        await node.loop.local_side.capture(0)
        assert trio.current_time() - node.trainer.began == last + 200
        await node.loop.ended(Ended("committed", other, b"s", partner_standing=Standing(0, 0, 1.0)))
    assert node.trainer.calls["solo"] == 0
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["paired"]


@pytest.mark.parametrize("lost", ["in this step", "of late"])
async def test_a_step_alone_is_not_given_up_for_an_offer_where_exchanges_failed(lost: str, autojump_clock: object) -> None:
    """Each attacker that offered then cost one more inner step: of 24 honest nodes beside eight that send NaN five took less
    than nine tenths of their outer steps, and two take less since."""
    table = Table()
    node = table.add("one", step_seconds=200.0, goal=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        await trio.sleep(200.0 * (INNER_STEPS - 1) + 61)
        if lost == "in this step":
            node.loop._let_down = True
        else:
            node.loop._wasted.charge(PeerId("x"), 1e4, trio.current_time())
        assert isinstance(node.loop.decide(Offer(PeerId("other"), b"s", Standing(0, 0, 1.0))), Busy)
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["solo"]


async def test_a_step_alone_that_is_due_is_not_given_up_for_an_offer(autojump_clock: object) -> None:
    table, other = Table(), PeerId("other")
    node = table.add("one", step_seconds=10.0, goal=1)
    await trio.sleep(10.0 * INNER_STEPS + 5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.loop.run)
        await trio.sleep(1)
        assert isinstance(node.loop.decide(Offer(other, b"s", Standing(0, 0, 1.0))), Busy)
    assert [step.kind for step in node.events if isinstance(step, OuterStep)] == ["solo"]


async def test_rounds_take_as_long_as_the_run_says(autojump_clock: object) -> None:
    """Where an offer brings an outer step early, the next is as much later. Else they had 206 to 210 in the time of 200."""
    table = Table()
    nodes = [table.add(f"peer-{index}", inner_steps=6) for index in range(8)]
    for index, node in enumerate(nodes):
        node.run_phase = 6.0
        node.trainer.began -= 0.7 * index
        node.loop.follow(InnerSteps(1, 0, 0.0, 0.0, 1.0))
    await run_for(table, 1200)
    taken = [len(node.steps("paired")) + len(node.steps("solo")) for node in nodes]
    assert all(198 <= one <= 202 for one in taken), taken
