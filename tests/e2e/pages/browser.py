"""A Chromium without a window, spoken to over its debugging pipe: what a page looks like, says and asks for.

The protocol (https://chromedevtools.github.io/devtools-protocol/) is JSON messages that end with a zero byte, on the
browser's descriptors 3 and 4. What the tests need of it is so little that a driver library, which brings an interpreter
of its own, is not worth its weight.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.patience import PATIENCE_S

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
HEIGHT = 900
WIDEST_PHONE = 480
"""Pixels; narrower screens lay a page out as telephones do, which want it to say that it knows of them."""
TO_BROWSER, FROM_BROWSER = 3, 4


class BrowserError(Exception):
    """The browser refused a command, or fell silent."""


class Page:
    """One tab. ``requests`` are the addresses that it asked for, ``complaints`` what its console says of mistakes."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, expression: str) -> Any:
        """The value of the expression in the page; a promise's when it is kept."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_until(self, condition: str) -> None:
        """The page itself looks, so that nothing is asked in between."""
        look = f"const look = () => ({condition}) ? done() : setTimeout(look, 20); look();"
        self.evaluate(f"new Promise((done) => {{ {look} }})")

    def press_tab(self) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def screenshot(self) -> bytes:
        """PNG of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])


class Browser:
    """A process of its own with a profile in ``directory``; ends with the context."""

    def __init__(self, directory: Path) -> None:
        assert EXECUTABLE is not None
        self._command = [EXECUTABLE, *FLAGS, f"--user-data-dir={directory}", "about:blank"]
        self._pages: dict[str, Page] = {}
        self._messages: deque[dict[str, Any]] = deque()
        self._rest = b""
        self._last_id = 0

    def __enter__(self) -> "Browser":
        their_in, self._out = map(_out_of_the_way, os.pipe())
        self._in, their_out = map(_out_of_the_way, os.pipe())
        actions = [(os.POSIX_SPAWN_DUP2, their_in, TO_BROWSER), (os.POSIX_SPAWN_DUP2, their_out, FROM_BROWSER)]
        actions += [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        self._pid = os.posix_spawn(self._command[0], self._command, os.environ, file_actions=actions, setsid=True)
        os.close(their_in)
        os.close(their_out)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str, width: int, *, dark: bool = False) -> Page:
        """A new tab so many pixels wide, when it has been loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        is_phone = width <= WIDEST_PHONE
        metrics = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": is_phone}
        page.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=url)
        page.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        """The answer to a command; events that come before it are heard by their page."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            page = self._pages.get(answer.get("sessionId", ""))
            if page is not None and "method" in answer:
                page.hear(answer["method"], answer["params"])

    def _receive(self) -> dict[str, Any]:
        while not self._messages:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            data = os.read(self._in, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("the browser says nothing")
            *whole, self._rest = (self._rest + data).split(b"\0")
            self._messages.extend(map(json.loads, whole))
        return self._messages.popleft()


def _out_of_the_way(fd: int) -> int:
    """The same pipe under a number that is none of the browser's."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return copy
