"""The status page in a real browser, in every state that it has to show, on desks and phones, by day and by night.

Needs Chromium; the check for accessibility also npm, which fetches axe-core (one package) into a cache folder, once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from nolocod.errors import SettingError
from nolocod.identity import short
from nolocod.observe.events import Allowed, InnerSteps, PeerSeen, Troubled
from nolocod.observe.metrics import Metrics
from nolocod.observe.status.access import PageAccess
from nolocod.observe.status.server import Pages, serve_http
from nolocod.units import Address
from tests.support.page_states import STATES, peer, ten_peers
from tests.support.swarm import ENOUGH
from tests.support.wires import own_port
from tools import browser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nolocod.observe.status.server import Answers
    from nolocod.observe.status.state import StatusState
    from tools.browser import Browser, Page

AXE = "4.10.3"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nolocod-tests" / f"axe-core-{AXE}.js"
LIVE = "document.getElementById('link').textContent === 'live'"
LOCAL = Address("127.0.0.1", 0)
TOKEN = "a-token-of-a-good-length"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
FOCUS = """(() => {
    const on = document.activeElement, style = getComputedStyle(on), box = on.getBoundingClientRect();
    const visible = style.outlineStyle === 'solid' && box.width > 0 && box.height > 0;
    return [on.id || on.getAttribute('aria-label') || on.textContent, visible];
})()"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The script that checks a page against WCAG and good practice."""
    if not CACHE.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm, which brings axe-core, is not installed")
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"axe-core@{AXE}"]
        done = subprocess.run(command, cwd=CACHE.parent, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(f"npm cannot bring axe-core: {done.stderr.strip()[-300:]}")
        with tarfile.open(CACHE.parent / f"axe-core-{AXE}.tgz") as packed:
            member = packed.extractfile("package/axe.min.js")
            assert member is not None
            CACHE.write_bytes(member.read())
    return CACHE.read_text(encoding="utf-8")


async def served(pages: Answers, look: Callable[[str], None], address: Address = LOCAL) -> None:
    """Serve `pages` while `look`, which is told their address, does its work in a thread."""
    async with trio.open_nursery() as nursery:
        where = await nursery.start(serve_http, address, pages)
        await trio.to_thread.run_sync(look, f"http://{where}/")
        nursery.cancel_scope.cancel()


async def in_browser(state: StatusState, look: Callable[[str], None], address: Address = LOCAL) -> None:
    """The pages of a node in `state`."""
    await served(Pages(state, Metrics()), look, address)


def opened(
    chromium: Browser, address: str, size: str, *, dark: bool = False, sizes: Mapping[str, tuple[int, int]] = SIZES
) -> Page:
    page = chromium.page(*sizes[size], dark=dark)
    page.open(address)
    page.wait(LIVE, ENOUGH)
    return page


def check_whole_and_without_barriers(page: Page, axe: str, address: str, size: str, *, dark: bool) -> None:
    """And close it."""
    assert page.run("getComputedStyle(document.body).colorScheme") == ("dark" if dark else "light")
    assert not page.run("document.documentElement.scrollWidth > innerWidth"), f"wider than a {size}"
    page.run(axe)
    found = page.run("axe.run().then(({ violations }) => violations.map(v => v.id + ' ' + v.nodes[0].html))")
    assert found == [], f"on a {size}: {found}"
    assert page.complaints == []
    assert all(one.startswith(address) for one in page.asked_for), page.asked_for
    page.close()


@pytest.mark.parametrize("name", STATES)
async def test_every_state_is_shown_whole_and_without_barriers(chromium: Browser, axe: str, name: str) -> None:
    def look(address: str) -> None:
        for size, dark in (("desktop", False), ("phone", True)):
            page = opened(chromium, address, size, dark=dark)
            check_whole_and_without_barriers(page, axe, address, size, dark=dark)

    await in_browser(STATES[name](), look)


async def test_what_the_states_say_is_on_the_page(chromium: Browser) -> None:
    wanted = {
        "new": [("#state", "discovering waiting for a first peer"), ("#swarm-text", "0 peers"), ("#peers", "Nobody yet")],
        "relayed": [
            ("#reach", "through relays"),
            ("#reach", "24340"),
            ("#peers", "by a relay"),
            ("#swarm-text", "3 through relays"),
        ],
        "banned": [("#peers", "banned for 60 min"), ("#swarm-text", "1 banned")],
        "warned": [("#warnings", "NLC-125 trainer failed: the trainer ended with status -9"), ("#warnings", "it restarts")],
        "paused": [("#state", "paused"), ("#line", "outside its hours; resumes in 5.0 h"), ("#line", "22:00-07:00")],
        "ten_peers": [("#swarm-text", f"Exchanging with {short(peer(3))} now"), ("#peers", short(peer(10)))],
    }
    for name, texts in wanted.items():

        def look(address: str, name: str = name, texts: list[tuple[str, str]] = texts) -> None:
            page = opened(chromium, address, "desktop")
            for selector, text in texts:
                assert text in " ".join(page.text(selector).split()), selector
            assert page.run("document.getElementById('warnings').hidden") == (name != "warned")
            page.close()

        await in_browser(STATES[name](), look)


async def test_the_keyboard_reaches_all_and_sees_where_it_is(chromium: Browser) -> None:
    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        stops = []
        for _ in range(10):
            page.press("Tab", 9)
            name, visible = page.run(FOCUS)
            assert visible, f"the focus on {name!r} cannot be seen"
            stops.append(name)
        form = ("key", "value", "token", "Set")
        assert stops == ["To the content", "theme", "Table of peers", "Table of exchanges", *form, "status.json", "metrics"]
        for _ in range(8):
            page.press("Tab", 9, shift=True)
        assert page.run(FOCUS)[0] == "theme"
        page.press("Enter", 13)
        assert page.run("document.documentElement.dataset.theme") == "dark"
        page.open(address)
        assert page.run("document.documentElement.dataset.theme") == "dark", "the choice is kept"
        page.close()

    await in_browser(ten_peers(), look)


async def test_a_limit_is_set_with_the_token_and_not_without(chromium: Browser) -> None:
    told: list[dict[str, str]] = []
    state = ten_peers()

    def change(settings: Mapping[str, str]) -> Mapping[str, str]:
        told.append(dict(settings))
        if settings["duty"] == "200%":
            raise SettingError("duty cannot be 200%.")
        limits = dict(settings)
        state.follow(Allowed(None, None, None, (), on_battery=True, limits=limits))
        return limits

    def look(address: str) -> None:
        page = opened(chromium, address, "phone")
        for value, token, says in (
            ("50%", "a-token-of-another-node", "takes the token"),
            ("200%", TOKEN, "duty cannot be 200%. See `nolocod set --help`."),
            ("50%", TOKEN, "duty is set."),
        ):
            fill = f"key.value = 'duty'; value.value = '{value}'; token.value = '{token}'"
            page.run(f"{{ const {{ key, value, token }} = settings.elements; {fill}; settings.requestSubmit(); 0 }}")
            page.wait(f"answer.textContent.includes({says!r})", ENOUGH)
        page.wait("limits.textContent.includes('duty50%')", ENOUGH)
        page.close()

    async with trio.open_nursery() as nursery:
        pages, access = Pages(state, Metrics(), change), PageAccess(changes=TOKEN)
        where = await nursery.start(serve_http, LOCAL, pages, access)
        await trio.to_thread.run_sync(look, f"http://{where}/")
        nursery.cancel_scope.cancel()
    assert told == [{"duty": "200%"}, {"duty": "50%"}]


async def test_the_page_works_where_the_browser_blocks_storage(chromium: Browser, tmp_path: Path) -> None:
    del chromium  # there is one to be had
    blocked = "(() => { try { return !localStorage; } catch (error) { return error.name; } })()"

    def look(address: str) -> None:
        with browser.browser(tmp_path / "profile", storage=False) as careful:
            page = opened(careful, address, "desktop")
            assert page.run(blocked) == "SecurityError"
            for theme in ("dark", "light"):
                page.run("document.getElementById('theme').click()")
                assert page.run("document.documentElement.dataset.theme") == theme
            assert page.complaints == []

    await in_browser(ten_peers(), look)


async def test_a_lost_node_is_said_and_found_again(chromium: Browser) -> None:
    state = ten_peers()
    page = chromium.page(*SIZES["desktop"])
    where = Address("127.0.0.1", own_port())

    def first(address: str) -> None:
        page.open(address)
        page.wait(LIVE, ENOUGH)

    await in_browser(state, first, where)
    await trio.to_thread.run_sync(page.wait, "document.getElementById('link').textContent.startsWith('no answer')", ENOUGH)
    assert "old" in page.run("document.getElementById('main').className")
    state.follow(InnerSteps(1_000_000, 1, 1.25, 1e-3, 0.1))
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_http, where, Pages(state, Metrics()))
        await trio.to_thread.run_sync(
            page.wait, f"{LIVE} && document.getElementById('figures').innerText.includes('1.25')", ENOUGH
        )
        assert await trio.to_thread.run_sync(page.run, "document.getElementById('main').className") == ""
        page.close()
        nursery.cancel_scope.cancel()


async def test_what_peers_wrote_is_text(chromium: Browser) -> None:
    state = ten_peers()
    bad = "<img src=x onerror=\"document.title='caught'\"><b>x</b>"
    state.follow(PeerSeen(peer(1), 1, 1, 2.0, bad))
    state.follow(Troubled("NLC-203", bad))

    def look(address: str) -> None:
        page = opened(chromium, address, "desktop")
        assert bad in page.text("#warnings")
        assert bad in page.text("#peers")
        assert page.run("document.querySelectorAll('img, b').length") == 0
        assert page.complaints == []
        page.close()

    await in_browser(state, look)
