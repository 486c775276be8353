"""Who may read the pages: loopback, tokens, cookies, and how much one reader may take."""

from __future__ import annotations

import errno
import os
import stat
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from nolocod.errors import DiskFullError, HttpTokenError, SettingError
from nolocod.node.data_directory import Running
from nolocod.observe.events import StateChanged
from nolocod.observe.metrics import Metrics
from nolocod.observe.status import client, http
from nolocod.observe.status.access import PageAccess, is_loopback, make_token, read_token
from nolocod.observe.status.http import Request
from nolocod.observe.status.server import READERS, Pages, serve_http
from nolocod.observe.status.state import StatusState
from nolocod.units import Address

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKEN = "a-token-of-a-good-length"


def status_of(access: PageAccess, path: str, query: str = "", **headers: str) -> int:
    """What an open address answers; 200 for who may go on."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = access.judge(Request("GET", path, query, "node.example:80", named), only_local=False, port=80)
    return 200 if reply is None else reply.status


def test_an_open_address_asks_for_the_token() -> None:
    access = PageAccess(TOKEN)
    for path in ("/", "/status.json", "/events", "/metrics", "/nothing"):
        assert status_of(access, path) == 401, path
        assert status_of(access, path, authorization=f"Bearer {TOKEN}") == 200, path
        for wrong in ("", f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer ÿ"):
            assert status_of(access, path, authorization=wrong) == 401, wrong
        assert status_of(access, path, "token=wrong") == 401
    for path in ("/healthz", "/readyz"):
        assert status_of(access, path) == 200


def test_metrics_may_be_opened_alone() -> None:
    access = PageAccess(TOKEN, open_metrics=True)
    assert status_of(access, "/metrics") == 200
    assert status_of(access, "/status.json") == 401


def test_an_open_address_without_a_token_lets_nobody_in() -> None:
    assert status_of(PageAccess(), "/status.json") == 401
    assert status_of(PageAccess(), "/status.json", authorization="Bearer None") == 401


def test_a_loopback_address_answers_to_the_name_that_a_proxy_publishes_and_to_no_other() -> None:
    access = PageAccess(hosts=frozenset({"run.example"}))
    for host, refused in (("run.example", False), ("RUN.example:443", False), ("other.example", True), ("127.0.0.1:80", False)):
        reply = access.judge(Request("GET", "/", "", host), only_local=True, port=80)
        assert (reply is not None) == refused, host
    assert PageAccess().judge(Request("GET", "/", "", "run.example"), only_local=True, port=80) is not None


def test_the_token_in_the_address_becomes_a_cookie() -> None:
    access = PageAccess(TOKEN)
    reply = access.judge(Request("GET", "//evil.example/x", f"token={TOKEN}"), only_local=False, port=80)
    assert reply is not None
    headers = dict(reply.headers)
    assert (reply.status, headers["location"]) == (303, "/evil.example/x")
    assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    assert TOKEN not in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert status_of(access, "/status.json", cookie=f"other=1; {cookie}") == 200
    assert status_of(access, "/status.json", cookie=cookie[:-1]) == 401
    assert status_of(PageAccess("another-token-of-a-length"), "/status.json", cookie=cookie) == 401


def test_a_token_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.token"
    token = make_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert make_token(path) == token == read_token(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_token_that_could_not_be_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file in its place would keep the node from starting until somebody removed it."""

    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError):
            make_token(tmp_path / "http.token")
    assert not list(tmp_path.iterdir())
    assert make_token(tmp_path / "http.token")


@pytest.mark.parametrize("content", [b"", b"short\n", b"two words in one line\n", b"\xff" * 40, b"x" * 5000])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    with pytest.raises(HttpTokenError, match="No such file"):
        read_token(path)
    path.write_bytes(content)
    with pytest.raises(HttpTokenError, match="holds no token"):
        read_token(path)


def test_what_counts_as_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "LOCALHOST"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "localhost.example", ""))


def pages() -> Pages:
    return Pages(StatusState(trio.current_time, lambda: 1), Metrics())


async def test_status_reads_an_open_node_by_its_token(nursery: trio.Nursery, tmp_path: Path) -> None:
    path = tmp_path / "http.token"
    access = PageAccess(make_token(path))
    where = await nursery.start(serve_http, Address("0.0.0.0", 0), pages(), access)
    report = await trio.to_thread.run_sync(client.read, Running(1, where, "", "", (), str(path)))
    assert report.state == "starting"
    path.write_text("another-token-of-a-length\n")
    for token_file in (str(path), ""):
        with pytest.raises(HttpTokenError, match="refuses"):
            await trio.to_thread.run_sync(client.read, Running(1, where, "", "", (), token_file))


# --- who may change something


def change_status(access: PageAccess, client: str, authorization: str, server: str = "", **headers: str) -> int:
    told = {"authorization": authorization} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request("POST", "/settings", "", "localhost:80", told, client, server)
    reply = access.judge(request, only_local=True, port=80)
    return 200 if reply is None else reply.status


def test_who_changes_something_shows_the_token_on_this_machine() -> None:
    for access in (PageAccess(changes=TOKEN), PageAccess(TOKEN, changes=TOKEN)):
        for here in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            assert change_status(access, here, f"Bearer {TOKEN}") == 200
            for wrong in ("", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
                assert change_status(access, here, wrong) == 401, wrong
        for elsewhere in ("192.0.2.1", "::ffff:192.0.2.1", ""):
            assert change_status(access, elsewhere, f"Bearer {TOKEN}") == 403, elsewhere
        assert change_status(access, "192.0.2.1", f"Bearer {TOKEN}", "192.0.2.1") == 200, "from its own address to it"
        assert change_status(access, "192.0.2.1", f"Bearer {TOKEN}", "192.0.2.2") == 403
        for header in ("forwarded", "via", "x_forwarded_for", "x_real_ip"):
            passed_on = {header: "192.0.2.1"}
            assert change_status(access, "127.0.0.1", f"Bearer {TOKEN}", **passed_on) == 403, "a proxy's reader"
    cookie = f"nolocod-80={PageAccess(TOKEN)._cookie_value()}"
    request = Request("POST", "/settings", f"token={TOKEN}", "localhost:80", {"cookie": cookie}, "127.0.0.1")
    refused = PageAccess(TOKEN, changes=TOKEN).judge(request, only_local=True, port=80)
    assert refused is not None, "other web pages can make a browser send cookies, and forms to this address"
    assert refused.status == 401


async def test_settings_come_over_a_socket(nursery: trio.Nursery, tmp_path: Path) -> None:
    told: list[dict[str, str]] = []

    def change(settings: Mapping[str, str]) -> dict[str, str]:
        told.append(dict(settings))
        if "nice" in settings:
            raise SettingError("nice cannot be x.", remedy="From 0 to 19.")
        return {"duty": "50%"}

    path = tmp_path / "http.token"
    access = PageAccess(changes=make_token(path))
    given = Pages(StatusState(trio.current_time, lambda: 1), Metrics(), change)
    where = await nursery.start(serve_http, Address("127.0.0.1", 0), given, access)
    running = Running(1, where, "", "", ())

    async def ask(settings: dict[str, str]) -> dict[str, str]:
        return await trio.to_thread.run_sync(client.change, running, path, settings)

    assert await ask({"duty": "50%"}) == {"duty": "50%"}
    with pytest.raises(SettingError, match="nice cannot be x") as raised:
        await ask({"nice": "x"})
    assert (raised.value.code, raised.value.remedy) == ("NLC-171", "From 0 to 19.")
    with pytest.raises(SettingError, match="not an HTTP request"):
        await ask({"duty": "x" * 9000})
    assert told == [{"duty": "50%"}, {"nice": "x"}]
    path.write_text("another-token-of-a-length\n")
    with pytest.raises(HttpTokenError, match="refuses"):
        await ask({"duty": "50%"})
    path.unlink()
    with pytest.raises(HttpTokenError):
        await ask({"duty": "50%"})
    assert len(told) == 2
    assert (await trio.to_thread.run_sync(client.read, running)).state == "starting", "reading takes no token"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"duty": 1}', b"\xff", b"[" * 4000])
async def test_what_is_no_setting_is_refused(body: bytes) -> None:
    given = Pages(StatusState(trio.current_time, lambda: 1), Metrics(), lambda _: pytest.fail("asked"))
    assert given.answer("POST", "/settings", body).status == 400
    assert given.answer("GET", "/settings").status == 404
    assert given.answer("POST", "/", b"{}").status == 405
    assert pages().answer("POST", "/settings", b"{}").status == 405, "where nothing can be set"


async def connect(where: str) -> trio.SocketStream:
    address = Address.parse(where, "")
    return await trio.open_tcp_stream(address.host, address.port)


async def read_all(stream: trio.SocketStream) -> bytes:
    with trio.fail_after(60):
        return b"".join([bytes(part) async for part in stream])


async def test_one_connection_too_many_is_closed_and_room_is_made_again(nursery: trio.Nursery) -> None:
    where = await nursery.start(serve_http, Address("127.0.0.1", 0), pages())
    idle = [await connect(where) for _ in range(http.PER_ADDRESS)]
    assert await read_all(await connect(where)) == b""
    await idle[0].aclose()
    reply = b""
    with trio.fail_after(60):
        while not reply:  # until the server has seen that one left
            stream = await connect(where)
            await stream.send_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            try:
                reply = await read_all(stream)
            except trio.BrokenResourceError:
                reply = b""
    assert b'{"alive":true}' in reply


async def test_nonsense_is_answered_and_closed(nursery: trio.Nursery) -> None:
    where = await nursery.start(serve_http, Address("127.0.0.1", 0), pages())
    for nonsense in (b"\x16\x03\x01 nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"x" * 20_000 + b"\r\n\r\n"):
        stream = await connect(where)
        await stream.send_all(nonsense)
        assert (await read_all(stream)).startswith(b"HTTP/1.1 4")


async def test_a_silent_reader_is_cut_off(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    """The stream of a connection, without the kernel's buffers: what is not taken in time ends it."""
    ours, theirs = trio.testing.lockstep_stream_pair()
    nursery.start_soon(theirs.send_all, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    connection = http._Connection(ours)  # type: ignore[arg-type]  # a stream of memory stands for the socket
    began = trio.current_time()
    with pytest.raises(trio.TooSlowError):
        await connection.run(lambda request: pages().answer(request.method, request.path))
    assert trio.current_time() - began < 30


async def test_events_come_at_once_when_something_happens_else_every_second(autojump_clock: trio.testing.MockClock) -> None:
    state = StatusState(trio.current_time, lambda: 1)
    at: list[float] = []

    async def take(data: bytes) -> None:
        assert data.startswith(b"data: {")
        assert data.endswith(b"}\n\n")
        at.append(trio.current_time())
        if len(at) == 3:
            state.follow(StateChanged("training"))

    reply = Pages(state, Metrics()).answer("GET", "/events")
    assert reply.content_type == "text/event-stream"
    assert reply.feed is not None
    began = trio.current_time()
    with trio.move_on_after(3):
        await reply.feed(take)
    gaps = [round(later - earlier, 1) for earlier, later in pairwise(at)]
    assert gaps[:3] == [1.0, 1.0, 0.2]
    assert at[0] == began


async def test_only_so_many_watch_at_once(autojump_clock: trio.testing.MockClock) -> None:
    served = pages()

    async def take(data: bytes) -> None: ...

    async with trio.open_nursery() as nursery:
        for _ in range(READERS):
            feed = served.answer("GET", "/events").feed
            assert feed is not None
            nursery.start_soon(feed, take)
        await trio.sleep(1)
        assert served.answer("GET", "/events").status == 503
        nursery.cancel_scope.cancel()
    assert served.answer("GET", "/events").status == 200
