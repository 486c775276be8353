"""A node as a good guest: sensors of the test's, on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from nolocod.errors import TrainerError
from nolocod.node.guest import Guest
from nolocod.node.schedule import PausePolicy
from nolocod.node.sensors import Readings
from nolocod.node.settings import LiveSettings, Settings
from nolocod.observe.events import Allowed, Eased, Event, Paused, Resumed, Troubled
from nolocod.p2p.settings import Allowance
from tests.support.stand_ins import StandInTrainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Scene:
    """A guest whose sensors the test sets, and the policy that asks it."""

    def __init__(self, folder: Path, nursery: trio.Nursery, limits: Settings) -> None:
        self.events: list[Event] = []
        self.readings = Readings()
        self.react: Callable[[float], Readings] = lambda share: self.readings
        """What is read where the trainer computes in such a share of the time."""
        live = LiveSettings(limits, folder / "settings.json")
        self.guest = Guest(live, Allowance(up=5), self.events.append, self.read)
        self.policy = PausePolicy(self.guest.checks, self.events.append)
        self.trainer = StandInTrainer(self.events.append)
        nursery.start_soon(self.guest.run, lambda: cast("Any", self.trainer))
        nursery.start_soon(self.policy.run)

    async def read(self, _: Settings) -> Readings:
        return self.react(self.guest.share)

    def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def paused(self) -> str:
        return self.policy.pause.reason if self.policy.pause else ""


async def look(seconds: float = 4.0) -> None:
    """Wait until the sensors were read, and their word has come to the policy."""
    await trio.sleep(seconds)
    await trio.testing.wait_all_tasks_blocked()


CASES = [
    (Settings(pause_on_battery=True), Readings(plugged=True), Readings(plugged=False), "battery", None),
    (Settings(pause_on_metered=True), Readings(metered=False), Readings(metered=True), "metered", None),
    (Settings(pause_when_used=600.0), Readings(idle=601.0), Readings(idle=20.0), "used", 580.0),
    (Settings(pause_when_gpu_used=10**9), Readings(gpu_taken=10**9), Readings(gpu_taken=3 * 10**9), "gpu", None),
    (Settings(max_temperature=80.0), Readings(temperature=79.0), Readings(temperature=91.0), "heat", None),
]


@pytest.mark.parametrize(("limits", "fine", "not_now", "reason", "seconds"), CASES, ids=[case[3] for case in CASES])
async def test_each_limit_pauses_with_its_reason_and_lets_go_on(
    limits: Settings, fine: Readings, not_now: Readings, reason: str, seconds: float | None,
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: object,
) -> None:  # fmt: skip
    scene = Scene(tmp_path, nursery, limits)
    scene.readings = fine
    await look()
    assert scene.paused == ""
    scene.readings = not_now
    await look()
    (pause,) = scene.told(Paused)
    assert (pause.reason, pause.seconds) == (reason, seconds)
    await look(100)
    assert scene.paused == reason
    scene.readings = replace(fine, temperature=70.0) if reason == "heat" else fine
    await look(64)
    assert scene.paused == ""
    assert scene.told(Resumed) == [Resumed()]
    assert scene.told(Troubled) == []


@pytest.mark.parametrize(("limits", "code"), [(case[0], "NLC-127" if case[3] == "battery" else "NLC-170") for case in CASES])
async def test_a_sensor_that_is_not_there_is_told_once_and_pauses_nobody(
    limits: Settings, code: str, tmp_path: Path, nursery: trio.Nursery, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, nursery, limits)
    await look(100)
    assert [event.code for event in scene.told(Troubled)] == [code]
    assert "has no effect: this system tells of no" in scene.told(Troubled)[0].message
    assert scene.paused == ""


async def test_a_pause_when_used_ends_so_long_after_the_last_touch(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, nursery, Settings(pause_when_used=600.0))
    touched = trio.current_time()
    scene.react = lambda _: Readings(idle=trio.current_time() - touched)
    await look(599)
    assert scene.paused == "used"
    assert len(scene.told(Paused)) == 1, "its end has not moved"
    await look(4)
    assert scene.paused == ""
    touched = trio.current_time()
    await look()
    scene.react = lambda _: Readings()
    await look(500)
    assert scene.paused == "used", "a desktop that does not answer for once has not fallen asleep"


async def test_heat_is_kept_below_its_limit_by_computing_less(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, nursery, Settings(max_temperature=80.0))
    scene.react = lambda share: Readings(temperature=min(50 + 45 * share, 89.0))
    await look(300)
    assert 0.55 < scene.trainer.share < 0.68
    assert 77 <= 50 + 45 * scene.trainer.share <= 80.5
    assert scene.told(Paused) == []
    why = scene.told(Eased)[-1]
    assert (why.why, why.share) == ("--max-temperature asks for it", scene.trainer.share)
    scene.react = lambda share: Readings(temperature=40.0)  # a window was opened
    await look(60)
    assert (scene.trainer.share, scene.told(Eased)[-1].why) == (1.0, "")


async def test_what_computing_less_does_not_cool_pauses(tmp_path: Path, nursery: trio.Nursery, autojump_clock: object) -> None:
    scene = Scene(tmp_path, nursery, Settings(max_temperature=80.0, duty=0.5))
    scene.readings = Readings(temperature=84.0)
    await look(60)
    assert scene.paused == ""
    assert scene.guest.share == pytest.approx(0.05), "a tenth of what its owner gave"
    await look(70)
    assert scene.paused == "heat"
    assert "84 °C, and --max-temperature is 80" in scene.told(Paused)[0].why
    scene.readings = Readings(temperature=77.0)
    await look(100)
    assert scene.paused == "heat", "not cool enough to begin again"
    scene.readings = Readings(temperature=74.0)
    await look(5)
    assert scene.paused == ""


async def test_power_is_a_mean_over_seconds(tmp_path: Path, nursery: trio.Nursery, autojump_clock: object) -> None:
    scene = Scene(tmp_path, nursery, Settings(max_power=200.0))
    scene.react = lambda share: Readings(power=300.0 if trio.current_time() % 4 < 2 else 60.0)  # 180 W in the mean
    await look(120)
    assert scene.guest.share == pytest.approx(1.0, abs=0.25)
    scene.react = lambda share: Readings(power=50 + 250 * share)
    await look(400)
    assert 185 <= 50 + 250 * scene.guest.share <= 202
    scene.react = lambda share: Readings(power=280.0)  # somebody else's
    await look(200)
    assert scene.paused == "power"


async def test_what_is_set_counts_at_once_and_is_told(tmp_path: Path, nursery: trio.Nursery, autojump_clock: object) -> None:
    scene = Scene(tmp_path, nursery, Settings(duty=0.5))
    scene.guest.tell()
    assert scene.told(Allowed) == [Allowed(5, None, None, (), on_battery=True, limits={"duty": "50%"})]
    await look()
    assert scene.trainer.share == 0.5
    assert scene.guest.change({"duty": "", "pause": "yes"}) == {"duty": "50%", "pause": "yes"}
    await look(2)
    assert scene.paused == "owner"
    assert "nolocod set pause=no" in scene.told(Paused)[0].why
    assert scene.guest.change({"duty": "100%", "pause": ""}) == {}
    await look(4)
    assert (scene.paused, scene.trainer.share) == ("", 1.0)
    assert len(scene.told(Allowed)) == 3
    assert scene.trainer.calls == ["ease", "ease"]


async def test_a_share_reaches_no_loop_of_ones_own_and_a_dead_trainer_harms_nobody(
    tmp_path: Path, nursery: trio.Nursery, autojump_clock: object
) -> None:
    scene = Scene(tmp_path, nursery, Settings(duty=0.5))
    scene.trainer.can_end = False
    await look()
    assert scene.trainer.calls == []
    scene.trainer.can_end, scene.trainer.death = True, TrainerError("it died.")
    await look()
    scene.trainer.death = None
    await look()
    assert scene.trainer.share == 0.5
