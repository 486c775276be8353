"""What peers make us remember is bounded."""

from __future__ import annotations

from nolocod.p2p.limits.newest import Newest


def test_the_entry_set_longest_ago_makes_room_and_the_kept_one_never_does() -> None:
    seen: Newest[str, int] = Newest(3, "own")
    for number, name in enumerate(("own", "a", "b", "a", "c")):
        seen[name] = number
    assert seen == {"own": 0, "a": 3, "c": 4}
