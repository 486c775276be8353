"""Where a node has the files of its base model from: a folder, the hub, peers; and that only the pinned bytes count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from nolocod.errors import BaseModelError, DiskFullError, NoDonorError, OtherBaseError, PeerBusyError
from nolocod.node.base import BaseFiles, link_base
from nolocod.observe.events import StateChanged, Troubled
from nolocod.run.base import Base, BaseFile, described

if TYPE_CHECKING:
    from pathlib import Path

    from nolocod.proto.types import Description

NAMES = ("config.json", "model.safetensors")


class Elsewhere:
    """The hub, as the trainer process asks it, and the peers: each with a folder, or without."""

    def __init__(self, hub: Path | None = None, peers: Path | None = None) -> None:
        self.hub, self.peers = hub, peers
        self.asked: list[tuple[str, str]] = []

    async def download(self, source: str, commit: str, file: tuple[str, int]) -> Path:
        self.asked.append(("hub", file[0]))
        if self.hub is None:
            raise BaseModelError(f"{source} is gated.")
        return self.hub / file[0]

    async def fetch_file(self, file: BaseFile, into: Path) -> Description:
        self.asked.append(("peers", file.name))
        if self.peers is None:
            raise NoDonorError(f"nobody gave {file.name}.")
        into.write_bytes((self.peers / file.name).read_bytes())  # noqa: ASYNC240 - a few bytes
        return described(into)


class Scene:
    """One node, whose manifest pins what lies in `published`."""

    def __init__(self, root: Path, source: str = "") -> None:
        self.published, self.folder = root / "published", root / "base"
        self.published.mkdir()
        for name in NAMES:
            (self.published / name).write_bytes(name.encode() * 100)
        files = [(name, described(self.published / name)) for name in NAMES]
        pinned = tuple(BaseFile(name, told.size, told.root.hex()) for name, told in files)
        self.base = Base(pinned, source, "ab" * 20 if source else "")
        self.events: list[Any] = []

    def node(self, given: Path | None = None) -> BaseFiles:
        return BaseFiles(self.base, self.folder, given, self.events.append)

    async def gather(self, elsewhere: Elsewhere, given: Path | None = None) -> BaseFiles:
        node = self.node(given)
        await node.gather(cast("Any", elsewhere), cast("Any", elsewhere))
        for file in self.base.files:
            served = node.served(bytes.fromhex(file.root))
            assert served.path.read_bytes() == (self.published / file.name).read_bytes()
        return node

    @property
    def troubles(self) -> list[str]:
        return [event.code for event in self.events if isinstance(event, Troubled)]


async def test_its_founder_has_it_where_it_was_founded(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    link_base(scene.base, scene.published, scene.folder)
    elsewhere = Elsewhere()
    await scene.gather(elsewhere)
    assert elsewhere.asked == []
    assert not scene.events
    assert (scene.folder / "config.json").is_symlink(), "14 GB are not copied"


async def test_a_folder_that_its_owner_names_is_linked_to(tmp_path: Path) -> None:
    scene, elsewhere = Scene(tmp_path), Elsewhere()
    await scene.gather(elsewhere, given=scene.published)
    await scene.gather(elsewhere)  # a later start, without the flag
    assert elsewhere.asked == []


@pytest.mark.parametrize("harm", ["altered", "longer", "absent"])
async def test_a_named_folder_that_differs_is_one_error_with_the_file(tmp_path: Path, harm: str) -> None:
    scene = Scene(tmp_path)
    own = tmp_path / "own"
    own.mkdir()
    for name in NAMES:
        (own / name).write_bytes((scene.published / name).read_bytes())
    content = (own / NAMES[1]).read_bytes()
    if harm == "absent":
        (own / NAMES[1]).unlink()
    else:
        (own / NAMES[1]).write_bytes(content + b"x" if harm == "longer" else b"x" + content[1:])
    says = {"altered": "has other bytes than", "longer": "bytes where the run's", "absent": "No such file"}
    with pytest.raises(OtherBaseError, match=f"{NAMES[1]}.*{says[harm]}"):
        await scene.gather(Elsewhere(peers=scene.published), given=own)


async def test_what_has_changed_since_is_told_and_had_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.gather(elsewhere := Elsewhere(peers=scene.published))
    assert elsewhere.asked == [("peers", name) for name in NAMES]
    (scene.folder / NAMES[0]).write_bytes(b"x" * (scene.folder / NAMES[0]).stat().st_size)
    await scene.gather(elsewhere := Elsewhere(peers=scene.published))
    assert elsewhere.asked == [("peers", NAMES[0])]
    assert scene.troubles == ["NLC-153"]
    for name in NAMES:
        assert not (scene.folder / name).is_symlink()


async def test_a_link_to_nothing_is_replaced(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.folder.mkdir()
    (scene.folder / NAMES[0]).symlink_to(tmp_path / "gone")
    await scene.gather(Elsewhere(peers=scene.published))
    assert not (tmp_path / "gone").exists(), "and not written through"


async def test_the_hub_is_asked_before_peers(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "some/model")
    await scene.gather(elsewhere := Elsewhere(hub=scene.published))
    assert elsewhere.asked == [("hub", name) for name in NAMES]


async def test_where_the_hub_gives_nothing_peers_are_asked_for_all(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "some/model")
    await scene.gather(elsewhere := Elsewhere(peers=scene.published))
    assert elsewhere.asked == [("hub", NAMES[0]), *(("peers", name) for name in NAMES)]
    assert scene.troubles == ["NLC-152"]
    assert any("from peers" in event.waiting_for for event in scene.events if isinstance(event, StateChanged))


async def test_the_hub_is_not_believed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "some/model")
    other = tmp_path / "other"
    other.mkdir()
    for name in NAMES:
        (other / name).write_bytes(b"x" * (scene.published / name).stat().st_size)
    await scene.gather(Elsewhere(hub=other, peers=scene.published))
    assert scene.troubles == ["NLC-153"]


async def test_room_is_looked_for_before_anything_comes(tmp_path: Path) -> None:
    scene, elsewhere = Scene(tmp_path), Elsewhere(peers=tmp_path)
    file = scene.base.files[1]
    scene.base = Base((scene.base.files[0], BaseFile(file.name, 1 << 60, file.root)))
    with pytest.raises(DiskFullError, match="the base model needs"):
        await scene.node().gather(cast("Any", elsewhere), cast("Any", elsewhere))
    assert elsewhere.asked == []


def test_a_peer_that_asks_too_early_is_told_to_come_back(tmp_path: Path) -> None:
    with pytest.raises(PeerBusyError) as caught:
        Scene(tmp_path).node().served(bytes(32))
    assert caught.value.retry_after > 0
