"""How a process that trains takes in its libraries."""

from __future__ import annotations

import gc

from nolocod.trainer.settled import importing


def test_what_is_imported_is_looked_at_by_no_collection_then_or_later() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            libraries: list[object] = []
            libraries.append(libraries)
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(one is libraries for one in gc.get_objects())
    finally:
        gc.unfreeze()
