"""Local text is read beside training too where a GPU trains, and lies where the card reads it by itself."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from nolocod.run.data import Data
from nolocod.run.manifest import Inner
from nolocod.trainer import prefetch, source
from nolocod.trainer.bus import sent
from nolocod.trainer.data import make_tokenizer
from nolocod.trainer.estimate import estimate
from nolocod.trainer.model import Place
from nolocod.trainer.prefetch import Prefetched
from nolocod.trainer.replica import open_replica
from nolocod.trainer.source import open_source
from tests.support.trainer_parts import make_replica, sealed_run, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nolocod.trainer.windows import Source

CARD = torch.device("cuda")
INNER = Inner(steps=4, batch=2, accumulation=2, sequence=32)


@pytest.fixture
def laid(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By which threads windows were laid, as for a GPU."""
    found: list[int] = []

    def lay(windows: NDArray[np.int64]) -> NDArray[np.int64]:
        found.append(threading.get_ident())
        return windows.copy()

    monkeypatch.setattr(source, "lay_for", lambda device: lay if device == CARD else None)
    return found


def opened(text: Path, device: torch.device | None, documents: str = "joined") -> Source:
    data = Data(source="text", documents=documents)  # type: ignore[arg-type] # literal strings
    manifest = sealed_run(data=data, inner=INNER).manifest
    return open_source(manifest, make_tokenizer(data), "alice", text, text.parent / "cache", device=device)


@pytest.mark.parametrize("documents", ["joined", "isolated"])
def test_local_text_is_laid_by_a_thread_and_is_the_same(tmp_path: Path, laid: list[int], documents: str) -> None:
    text = write_text(tmp_path)
    ahead, plain = opened(text, CARD, documents), opened(text, None, documents)
    assert isinstance(ahead, Prefetched)
    assert not isinstance(plain, Prefetched)
    for _ in range(60):
        assert np.array_equal(ahead.take(4), plain.take(4))
        assert ahead.position == plain.position
    count = INNER.batch * sealed_run().manifest.evaluation.batches
    assert np.array_equal(ahead.held_out(count), plain.held_out(count))
    ahead.close()
    assert len(laid) >= 60
    assert threading.get_ident() not in laid
    again = opened(text, CARD, documents)
    again.seek(plain.position)
    assert np.array_equal(again.take(4), plain.take(4))
    again.close()


def test_windows_stay_while_the_step_on_them_may_be_under_way_however_large(
    tmp_path: Path, laid: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "AHEAD", 1)
    ahead = opened(write_text(tmp_path), CARD)
    taken = [weakref.ref(ahead.take(4)) for _ in range(20)]
    gc.collect()
    assert [one() is not None for one in taken] == [False] * 18 + [True] * 2, "those of the step before, and no more"
    assert laid
    ahead.close()


def test_an_inner_step_takes_windows_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = make_replica(sealed_run(inner=INNER), tmp_path)
    windows, seen = replica.source.take(4), []
    monkeypatch.setattr(replica.source, "take", lambda count: windows)
    monkeypatch.setattr(replica._part, "step", lambda given, rate: seen.append(given))
    replica.step()
    assert seen[0].data_ptr() == windows.ctypes.data


def test_what_is_read_ahead_for_a_gpu_is_counted() -> None:
    manifest = sealed_run(data=Data(source="text"), inner=INNER).manifest
    assert estimate(manifest).text == 0
    assert estimate(manifest, devices=(CARD,)).text == 2 * prefetch.MOST * 8 * 4 * 33
    large = msgspec.structs.replace(manifest, inner=msgspec.structs.replace(INNER, batch=1 << 15))
    assert estimate(large, devices=(CARD,)).text == 2 * 2 * 8 * (1 << 16) * 33


@pytest.mark.gpu
def test_a_gpu_reads_windows_where_they_lie(tmp_path: Path) -> None:
    replica = open_replica(sealed_run(inner=INNER), "alice", write_text(tmp_path), tmp_path / "cache", Place(CARD))
    windows = torch.from_numpy(replica.source.take(4))
    assert windows.is_pinned()
    assert windows[1:2].pin_memory().data_ptr() == windows[1:2].data_ptr(), "no copy is made of a part"
    assert torch.equal(sent(windows, CARD).cpu(), windows)
    replica.close()
