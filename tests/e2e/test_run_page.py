"""The run's page in a real browser: phone, tablet and desk, by day and by night, by keyboard, and behind a proxy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from msgspec.structs import replace

from nolocod.observe.run.pages import RunPages
from nolocod.observe.status.access import PageAccess
from nolocod.observe.status.server import serve_http
from tests.e2e.test_page_states import FOCUS, LOCAL, axe, check_whole_and_without_barriers, served
from tests.e2e.test_page_states import opened as page_opened
from tests.support.runs import STATES, a_dozen, a_run, member, peer

if TYPE_CHECKING:
    from collections.abc import Callable

    from nolocod.observe.run.state import RunState
    from tools.browser import Browser

__all__ = ["axe"]
HIDDEN = """[...document.querySelectorAll('#swarm text')].flatMap((one, index, all) => {
    const box = one.getBoundingClientRect(), room = document.getElementById('swarm').getBoundingClientRect();
    const meets = (other) => { const its = other.getBoundingClientRect();
        return box.left < its.right && box.right > its.left && box.top < its.bottom - 3 && box.bottom - 3 > its.top; };
    const out = box.left < room.left || box.right > room.right || box.top < room.top || box.bottom > room.bottom;
    const others = [...all.slice(index + 1), ...document.querySelectorAll('#swarm circle')].filter(meets);
    return out || others.length ? [one.textContent] : [];
})"""
"""Texts of the graph that lie on another text or on a node, or are cut off."""
SIZES = {"phone": (390, 844), "tablet": (768, 1024), "desktop": (1440, 900)}
EVERY_LOOK = (("phone", True), ("desktop", False), ("phone", False), ("tablet", True), ("tablet", False), ("desktop", True))
"""Each with whether it is dark. Where the rules for barriers look at a page they take three seconds."""


opened = partial(page_opened, sizes=SIZES)


async def in_browser(state: RunState, look: Callable[[str], None]) -> None:
    """The page of a run in `state`."""
    await served(RunPages(lambda: state.report), look)


@pytest.mark.parametrize("name", STATES)
async def test_every_state_is_shown_whole_and_without_barriers(chromium: Browser, axe: str, name: str) -> None:
    def look(address: str) -> None:
        for size, dark in EVERY_LOOK if name == "a_dozen" else EVERY_LOOK[:2]:
            page = opened(chromium, address, size, dark=dark)
            check_whole_and_without_barriers(page, axe, address, size, dark=dark)

    await in_browser(STATES[name](), look)


async def test_what_the_observer_knows_is_on_the_page(chromium: Browser) -> None:
    state = a_dozen()

    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        figures = " ".join(page.text("#figures").split())
        for text in ("Members 12", "Round 436 / 1k", "Loss 1.90", "Tokens/s 1.1"):
            assert text in figures
        assert "12 members, reached 6 directly" in page.text("#swarm-text")
        assert "1 of them carries for others" in page.text("#swarm-text")
        assert page.run("document.querySelectorAll('#swarm .member').length") == 12
        assert page.run("document.querySelectorAll('#swarm .edge.relayed').length") > 0
        assert page.run("document.getElementById('progress').getAttribute('aria-valuenow')") == "43.6"
        assert peer(3)[-8:] in page.text("#members")
        assert page.run("document.querySelectorAll('#swarm .edge.exchanged').length") == 6
        assert "6 pairs exchanged in the last hour, the last one 0 s ago." in page.text("#swarm-text")
        assert "node 1" in page.text("#members")
        assert "node 1" in page.text("#given")
        assert "tokens by 12 members, counted from receipts" in page.text("#given-text")
        page.close()

    await in_browser(state, look)


async def test_no_text_of_the_graph_lies_on_another_or_on_a_node_or_is_cut_off(chromium: Browser) -> None:
    def look(address: str) -> None:
        for size in SIZES:
            page = opened(chromium, address, size)
            assert page.run(HIDDEN) == []
            assert page.run("document.querySelectorAll('#swarm .member text').length") >= 10
            page.close()

    await in_browser(a_dozen(), look)


async def test_the_keyboard_reaches_all_and_sees_where_it_is(chromium: Browser) -> None:
    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        stops = []
        for _ in range(6):
            page.press("Tab", 9)
            name, visible = page.run(FOCUS)
            assert visible, f"the focus on {name!r} cannot be seen"
            stops.append(name)
        assert stops == ["To the content", "theme", "Table of members", "Table of contributors", "run.json", "metrics"]
        page.close()

    await in_browser(a_dozen(), look)


async def test_what_members_wrote_is_text(chromium: Browser) -> None:
    state, bad = a_dozen(), "<img src=x onerror=1><b>x</b>"
    state.look([replace(member(1, state=bad, version=bad), name=bad)])

    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        assert page.text("#members").count(bad) == 3
        assert bad in page.text("#releases")
        assert page.run("document.querySelector('#swarm .member text').textContent") == f"{bad[:13]}…"
        assert page.run("document.querySelectorAll('img, b').length") == 0
        assert page.complaints == []
        page.close()

    await in_browser(state, look)


async def test_it_works_below_a_path_of_a_proxy(chromium: Browser) -> None:
    """A proxy that publishes the page as /run/ on a name of its own, as nginx and Caddy do."""

    passed_on: list[bytes] = []

    async def proxy(where: str, client: trio.SocketStream) -> None:
        async with client, await trio.open_tcp_stream("127.0.0.1", int(where.split(":")[1])) as server:
            asked = await client.receive_some(8192)
            passed_on.append(asked.replace(b" /run/", b" /", 1).replace(b"Host: 127.0.0.1", b"Host: run.example", 1))
            await server.send_all(passed_on[-1])
            async for piece in server:
                await client.send_all(piece)

    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        assert "12" in page.text("#figures")
        assert any(one.startswith(b"GET /run.json ") and b"Host: run.example" in one for one in passed_on)
        assert page.complaints == []
        page.close()

    state = a_dozen()
    async with trio.open_nursery() as nursery:
        access = PageAccess(hosts=frozenset({"run.example"}))
        where = await nursery.start(serve_http, LOCAL, RunPages(lambda: state.report), access)
        (front,) = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), partial(proxy, where), 0)
        await trio.to_thread.run_sync(look, f"http://127.0.0.1:{front.socket.getsockname()[1]}/run/")
        nursery.cancel_scope.cancel()


def test_the_states_are_of_one_run() -> None:
    assert {made().report.run_id for made in STATES.values()} == {a_run().run_id}
