"""What memory is free: the machine's, or less where a container has less."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from nolocod.errors import ModelTooLargeError
from nolocod.trainer import memory
from nolocod.trainer.model import ON_CPU, check_memory, layout_of, read_config
from tests.support.trainer_parts import sealed_run

if TYPE_CHECKING:
    from pathlib import Path

MB = 1_000_000


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of control groups, of which this process is in pods/node."""
    (tmp_path / "own").write_text("1:cpu:/elsewhere\n0::/pods/node\n")
    (tmp_path / "groups" / "pods" / "node").mkdir(parents=True)
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def limit(group: Path, most: str, held: int, files: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{held}\n")
    (group / "memory.stat").write_text(f"anon {held - files}\ninactive_file {files}\n")


def test_a_container_has_what_its_limit_leaves(groups: Path) -> None:
    limit(groups / "pods" / "node", str(100 * MB), held=70 * MB, files=20 * MB)
    assert (memory.free(), memory.total()) == (50 * MB, 100 * MB)


def test_the_limit_of_a_group_around_it_counts_too(groups: Path) -> None:
    limit(groups / "pods" / "node", "max", held=70 * MB, files=0)
    limit(groups / "pods", str(90 * MB), held=80 * MB, files=0)
    assert (memory.free(), memory.total()) == (10 * MB, 90 * MB)


def test_a_group_beyond_its_limit_has_nothing(groups: Path) -> None:
    limit(groups / "pods", str(90 * MB), held=95 * MB, files=0)
    assert memory.free() == 0


def test_without_a_limit_the_machine_counts(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine._replace(available=3 * MB, total=7 * MB))
    limit(groups / "pods" / "node", str(100 * MB), held=0, files=0)
    assert (memory.free(), memory.total()) == (3 * MB, 7 * MB)
    (groups.parent / "own").unlink()
    assert memory.free() == 3 * MB


def test_a_model_beyond_the_limit_is_refused(groups: Path) -> None:
    manifest = sealed_run().manifest
    layout = layout_of(config := read_config(manifest, 256))
    limit(groups / "pods" / "node", str(MB), held=MB - 1000, files=0)
    with pytest.raises(ModelTooLargeError, match=r"0\.00 GB are free"):
        check_memory(layout, config.vocab_size, manifest, 0, ON_CPU)
