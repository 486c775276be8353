"""The status page of real daemons in a real browser: it follows them live, shows a fault and its recovery, and keeps strangers
out. Needs Chromium.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from nolocod.identity import short
from nolocod.node import data_directory
from tests.support.swarm import ENOUGH, ready, trainer_of

if TYPE_CHECKING:
    from tests.support.swarm import Daemon, Swarm
    from tools.browser import Browser

LIVE = "document.getElementById('link').textContent === 'live'"


def row(daemon: Daemon, text: str) -> str:
    """A script: whether the table of peers says `text` of `daemon`."""
    name = short(data_directory.find_running(daemon.paths).peer_id)
    rows = "[...document.querySelectorAll('#peers tbody tr')]"
    return f"{rows}.some(row => row.innerText.includes('{name}') && row.innerText.includes('{text}'))"


def figure(name: str) -> str:
    """A script: the number at the head of a figure."""
    figures = "[...document.querySelectorAll('#figures div')]"
    return f"parseFloat({figures}.find(one => one.firstChild.innerText === '{name}').lastChild.innerText)"


def test_the_page_follows_real_nodes_through_faults(swarm: Swarm, chromium: Browser) -> None:
    first = swarm.found(steps=50)
    swarm.wait("the first node's address", lambda: ready(first))
    http = data_directory.find_running(first.paths).http
    page = chromium.page(1280, 800)
    page.open(f"http://{http}/")
    page.wait(LIVE, ENOUGH)
    page.run("document.body.dataset.same = 'page'")

    second = swarm.daemon().run("join", "--bootstrap", first.address, "--http", "0.0.0.0:0")
    swarm.wait("the second node's address", lambda: ready(second))
    page.wait(row(second, "training"), ENOUGH)
    page.wait(f"{figure('Paired / solo')} > 1 && document.querySelectorAll('.arc.done').length === 1", ENOUGH)

    # whoever holds the token sees the page of an open address, and the token stays in no history
    port = data_directory.find_running(second.paths).http.rpartition(":")[2]
    other = chromium.page(390, 844)
    other.open(f"http://127.0.0.1:{port}/")
    assert "needs a token" in other.text("body")
    other.open(f"http://127.0.0.1:{port}/?token={(second.paths.root / 'http.token').read_text().strip()}")
    other.wait(f"{LIVE} && {row(first, 'training')}", ENOUGH)
    assert other.run("location.href") == f"http://127.0.0.1:{port}/"

    # a partner dies and comes back
    connected = f"{row(second, 'by us')} || {row(second, 'by the peer')}"
    page.wait(connected, ENOUGH)
    here = row(second, "training")
    second.signal(signal.SIGKILL)
    page.wait(f"!({connected})", ENOUGH)
    other.wait("document.getElementById('link').textContent.startsWith('no answer')", ENOUGH)
    before = page.run(figure("Paired / solo"))
    second.run("join", "--bootstrap", first.address)
    page.wait(f"{here} && {figure('Paired / solo')} > {before}", ENOUGH)

    # the trainer dies and is started again
    before = page.run(figure("Inner steps"))
    assert page.run("document.getElementById('warnings').hidden")
    trainer_of(first).kill()
    page.wait("document.getElementById('warnings').innerText.includes('NLC-125')", ENOUGH)
    assert "What to do: " in page.text("#warnings")
    page.wait(f"document.querySelector('#state strong').innerText === 'training' && {figure('Inner steps')} > {before}", ENOUGH)

    assert page.complaints == []
    assert all(one.startswith(f"http://{http}/") for one in page.asked_for), page.asked_for
    assert page.run("document.body.dataset.same") == "page", "all that without loading the page again"
    first.signal(signal.SIGTERM)
    page.wait("document.getElementById('link').textContent.startsWith('no answer')", ENOUGH)
