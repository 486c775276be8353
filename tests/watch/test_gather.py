"""Weights of several members, gathered by who is none: over real sockets, from real donors. Only who judges is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from nolocod.errors import FarWeightsError, NoDonorError, RejectedTensorError, first_error
from nolocod.identity import PeerId
from nolocod.observe.events import Event, Troubled, WeightsFetched
from nolocod.p2p.exchange.context import Context
from nolocod.p2p.snapshots.server import Donor, ServedSnapshot
from nolocod.p2p.transport.stream import SNAPSHOT
from nolocod.proto.types import Member, Standing, describe
from nolocod.watch import gather as module
from nolocod.watch.gather import gather
from tests.support.wires import wait_members
from tests.watch.test_observer import Members, members, nothing, settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nolocod.run.manifest import Sealed

SIZE = 4000


class Judge:
    """Takes those for no weights that say so, and those for lies that say that."""

    size = SIZE

    def __init__(self, sealed: Sealed) -> None:
        self.sealed = sealed

    def admit(self, peer: PeerId, path: Path) -> None:
        if path.read_bytes().startswith(b"broken"):
            raise RejectedTensorError(f"{peer} gave no weights.")

    def objections(self, files: Mapping[PeerId, Path]) -> dict[PeerId, str]:
        return {peer: "it lies" for peer, path in files.items() if path.read_bytes().startswith(b"liar")}


def serve(nodes: Members, kinds: list[str], folder: Path) -> None:
    """Each node gives weights of its kind."""
    folder.mkdir()
    for number, (mesh, identity, kind) in enumerate(zip(nodes.meshes, nodes.identities, kinds, strict=True)):
        path = folder / str(number)
        path.write_bytes(f"{kind} {number}".encode().ljust(SIZE))
        given = ServedSnapshot(path, Standing(7, 700, 2.5), describe(memoryview(path.read_bytes()), SIZE))

        async def snapshot(given: ServedSnapshot = given) -> ServedSnapshot:
            return given

        context = Context.of(identity, nodes.sealed)
        mesh.serve(SNAPSHOT, Donor(context, snapshot, 2, nodes.events.append).handle)


async def test_who_lies_or_gives_no_weights_is_told_and_another_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nolocod.watch.observer._SLOWEST", 0.2)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 3.0)
    events: list[Event] = []
    async with members(tmp_path / "nodes", 4) as nodes:
        serve(nodes, ["good", "liar", "broken", "good"], tmp_path / "served")
        config = settings(tmp_path / "out", *nodes.addresses)
        judge, good = await gather(config, 2, Judge, events.append)
        assert judge.sealed == nodes.sealed
        assert {one.peer for one in good} == {nodes.peers[0], nodes.peers[3]}
        assert all(one.path.read_bytes().startswith(b"good") and one.round == 7 for one in good)
        asked = {event.donor for event in events if isinstance(event, WeightsFetched)}
        told = [event.code for event in events if isinstance(event, Troubled)]
        assert told.count(FarWeightsError.entry.code) == (nodes.peers[1] in asked)
        assert told.count(RejectedTensorError.entry.code) == (nodes.peers[2] in asked)

        events.clear()
        with pytest.raises(BaseExceptionGroup) as raised:  # the command line tells of the one that is in it
            await gather(config, 3, Judge, events.append)
        error = first_error(raised.value)
        assert isinstance(error, NoDonorError)
        assert "2 of 3 members" in error.cause
        kept = {event.donor for event in events if isinstance(event, WeightsFetched)}
        assert kept == set(nodes.peers[1:3]) - (asked & {nodes.peers[1]}), "what was here already is not fetched again"


async def test_weights_that_are_old_by_now_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nolocod.watch.observer._SLOWEST", 0.2)
    async with members(tmp_path / "nodes", 2) as nodes:
        serve(nodes, ["good", "good"], tmp_path / "served")
        config = settings(tmp_path / "out", *nodes.addresses)
        _, good = await gather(config, 2, Judge, nothing)
        old = good[0]
        old.path.rename(old.path.with_name(f"{2:08d}-{old.peer}.weights"))
        good[1].path.unlink()
        events: list[Event] = []
        _, good = await gather(config, 2, Judge, events.append)
        assert {one.round for one in good} == {7}
        assert len([event for event in events if isinstance(event, WeightsFetched)]) == 2


async def test_who_tells_of_a_round_far_from_the_median_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nolocod.watch.observer._SLOWEST", 0.2)
    monkeypatch.setattr(module, "_LOOK_SECONDS", 5.0)
    events: list[Event] = []
    async with members(tmp_path / "nodes", 2) as nodes:
        await nodes.add(400)
        for mesh in nodes.meshes:
            await wait_members(mesh, 2)
        serve(nodes, ["good"] * 3, tmp_path / "served")
        with pytest.raises(BaseExceptionGroup):
            await gather(settings(tmp_path / "out", *nodes.addresses), 3, Judge, events.append)
    assert {event.donor for event in events if isinstance(event, WeightsFetched)} == set(nodes.peers[:2])


async def test_once_there_were_too_few_members_nobody_is_waited_for_but_the_next_one(
    tmp_path: Path, autojump_clock: object
) -> None:
    class Two:
        """An observer that knows two members."""

        run = staticmethod(trio.sleep_forever)

        def live(self) -> list[Member]:
            return [
                Member(PeerId(name), Standing(7, 0, 1.0), "finished", (), "1", 0.0, None, verified=True) for name in ("a", "b")
            ]

    run = SimpleNamespace(run_id="0" * 64, manifest=SimpleNamespace(outer=SimpleNamespace(staleness=3)))
    observer: Any = Two()
    gathering = module._Gathering(observer, run, Judge(cast("Any", run)), tmp_path, [].append)  # type: ignore[arg-type]
    took = []
    for besides, wanted in (((), 3), (("a",), 2), (("a", "b"), 1)):
        began = trio.current_time()
        assert len(await gathering._look([PeerId(one) for one in besides], wanted)) == 2
        took.append(trio.current_time() - began)
    assert took == [module._LOOK_SECONDS, 0.0, module._LOOK_SECONDS]
