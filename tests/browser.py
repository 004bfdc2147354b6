"""A headless Chromium, driven over its DevTools protocol: what a page logs,
fetches, shows and looks like.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60  # seconds for anything


def chromium() -> str | None:
    """Where Chromium is, if it is anywhere."""
    given = os.environ.get("CHROMIUM")
    return given or next((found for found in map(shutil.which, NAMES) if found), None)


class Page:
    """One tab. Console messages, exceptions and requests are kept from the start."""

    def __init__(self, connection: Any) -> None:
        self._connection, self._last = connection, 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        self._connection.send(
            json.dumps(message | ({"sessionId": self._session} if self._session else {}))
        )
        while True:
            answer = json.loads(self._connection.recv(timeout=PATIENCE))
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._notice(answer)

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True

    def open(self, path: Path) -> None:
        self._loaded = False
        self.send("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._notice(json.loads(self._connection.recv(timeout=PATIENCE)))

    def see(self, width: int, height: int = 900, dark: bool = False, media: str = "") -> None:
        """The size of the window, and what the system prefers."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[feature])

    def run(self, code: str) -> Any:
        """What an expression gives; promises are waited for."""
        answer = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def settle(self) -> None:
        """Waits until what was asked for is on the screen."""
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def hover(self, selector: str) -> None:
        """Moves the pointer to the middle of the first element that is shown."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})].find(e => "
            "e.getBoundingClientRect().width)"
        )
        self.run(f"{found}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        self.settle()
        box = self.run(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({found}.getBoundingClientRect())"
        )
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
        self.settle()

    def key(self, name: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name)
        self.settle()

    def screenshot(self, whole: bool = False) -> bytes:
        return base64.b64decode(
            self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        )

    def pdf(self) -> bytes:
        return base64.b64decode(
            self.send("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
        )


@contextmanager
def browser() -> Iterator[Page]:
    """Starts Chromium with a profile of its own and without a network, and ends it afterwards."""
    from websockets.sync.client import connect

    program = chromium()
    assert program is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += [
            "--hide-scrollbars",
            "--disable-background-networking",
            "--disable-component-update",
        ]
        options += [
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--remote-debugging-port=0",
        ]
        started = subprocess.Popen(
            [program, *options], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        try:
            assert started.stderr is not None
            said = (re.search(r"ws://\S+", line) for line in started.stderr)
            address = next(match.group() for match in said if match)
            with connect(
                address, max_size=None, compression=None, open_timeout=PATIENCE, proxy=None
            ) as connection:
                yield Page(connection)
        finally:
            started.terminate()
            started.wait(PATIENCE)
            started.stderr and started.stderr.close()
