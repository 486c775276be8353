"""A headless Chromium that does what it is told, for pictures of the status page and for its tests.

The rule: it speaks the DevTools protocol over two pipes, so that no driver has to be installed and no port is opened;
every answer has a deadline; and what a page asked for and complained of is written down, not only shown.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_QUIET = ("background-networking", "component-update", "default-apps", "extensions", "quic", "sync")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"),
    *(f"--disable-{one}" for one in _QUIET),
    "--remote-debugging-pipe",
)
_ANSWER_SECONDS = 60.0
"""A loaded machine may take most of it to start a renderer."""
_PIECE = 1 << 16


class BrowserError(RuntimeError):
    """It ended, refused a command, or did not answer in time."""


def find() -> str | None:
    """Where a Chromium is, if there is one."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


@contextmanager
def browser(profile: Path, *, storage: bool = True) -> Iterator[Browser]:
    """A browser with an empty profile in the new folder `profile`; it is gone when the block ends.

    Without `storage` it blocks cookies and all that pages keep, as a user may have set it.
    """
    path = find()
    if path is None:
        raise BrowserError("there is no Chromium in PATH")
    if not storage:
        (profile / "Default").mkdir(parents=True)
        settings = {"profile": {"default_content_setting_values": {"cookies": 2}}}
        (profile / "Default" / "Preferences").write_text(json.dumps(settings), encoding="utf-8")
    # it reads commands from descriptor 3 and answers on 4
    line = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null', path, *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, bufsize=0
    )
    try:
        yield Browser(process)
    finally:
        with suppress(ProcessLookupError):  # its helpers are of its session
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class Browser:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("a browser without its pipes")
        self._to, self._from = process.stdin, process.stdout
        self._number = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def page(self, width: int, height: int, *, dark: bool = False) -> Page:
        """A new page with cookies and storage of its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        page.resize(width, height)
        # a page that moves is drawn sixty times a second
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        page.ask("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in wishes.items()])
        return page

    def ask(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:  # noqa: ANN401  # as the protocol has them
        """Send one command and wait for its answer; events that come meanwhile go to their pages."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._to.write(json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            message = self._next(method, deadline)
            if message.get("id") == self._number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                answer: dict[str, Any] = message["result"]
                return answer
            if message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].note(message)

    def _next(self, method: str, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._from.fileno(), _PIECE) if ready else b""
            if not more:
                raise BrowserError(f"{method}: the browser ended" if ready else f"{method}: no answer")
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        return message


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.asked_for: list[str] = []
        """Addresses of all requests."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions that nobody caught."""

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401  # as the protocol has them
        return self._browser.ask(method, self._session, **parameters)

    def note(self, event: dict[str, Any]) -> None:
        """Write down what an event says of requests and complaints."""
        said = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                self.asked_for.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(said["exceptionDetails"].get("exception", {}).get("description", said)))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}".strip())

    def resize(self, width: int, height: int) -> None:
        """Give the page so many CSS pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> None:
        answer = self.ask("Page.navigate", url=address)
        if "errorText" in answer:
            raise BrowserError(f"{address}: {answer['errorText']}")
        self.wait("document.readyState === 'complete'", _ANSWER_SECONDS)

    def run(self, script: str) -> Any:  # noqa: ANN401  # whatever the script comes to
        """The value of `script`, or what its promise comes to."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script[:200]}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of the first element that fits; "" if there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait(self, script: str, seconds: float) -> None:
        """Until `script` comes to something true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > deadline:
                raise BrowserError(f"not within {seconds:.0f} s: {script}\n{self.text('body')}")
            time.sleep(0.1)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """Press and release a key, such as ("Tab", 9)."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            modifiers = 8 if shift else 0
            self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers, **text
            )

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is seen, or of the page to its end."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def close(self) -> None:
        self._browser.ask("Target.closeTarget", targetId=self._target)
