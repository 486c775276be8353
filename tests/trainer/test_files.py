"""Files that are written beside training: the thread that writes leaves the machine to it."""

from __future__ import annotations

import mmap
import threading
import time

import pytest
import torch

from nolocod.trainer import files
from nolocod.trainer.files import REST, _copied


def test_the_thread_rests_for_many_times_as_long_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, computed, waited = 0.0, 0.0, list[float]()

    class Never(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            waited.append(timeout)
            now += timeout
            return False

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "thread_time", lambda: computed)
    rests = files._Rests(Never())
    rests()
    for worked in (0.01, 0.02, 60.0):
        now, computed = now + worked + 5.0, computed + worked
        rests()
    assert waited == pytest.approx([0.0, 0.01 * REST, 0.02 * REST, 2.0]), "not for as long as it waited for the disk"
    assert rests.rested == pytest.approx(sum(waited)), "which is not the disk's time"


def test_a_rest_ends_when_the_file_is_given_up() -> None:
    give_up = threading.Event()
    rests = files._Rests(give_up)
    give_up.set()
    began = time.monotonic()
    with pytest.raises(files._GivenUpError):
        rests()
    assert time.monotonic() - began < 1


def test_what_is_copied_is_the_same_and_lies_in_memory_of_its_own() -> None:
    """In the heap it took the place of what inner steps make and drop, and they were a tenth slower for it."""
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.randn(4, 2).bfloat16(),
        "d": torch.zeros(0),
    }
    copies = _copied(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert copies[name].dtype == tensor.dtype
    tensors["a"].zero_()
    assert copies["a"].any()
    starts = [copies[name].data_ptr() for name in "abc"]
    assert [start - starts[0] for start in starts] == [0, 64, 128]
    assert starts[0] % mmap.PAGESIZE == 0, "not where the heap has its own numbers"
